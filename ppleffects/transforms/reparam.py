"""``reparam``: the same model in other coordinates, by the strategies of NumPyro."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from numpyro.primitives import Messenger

from ppleffects.effects import Lane, _jax, activated, tracing
from ppleffects.errors import PPLError, ValuesError
from ppleffects.interpretations.program import Program
from ppleffects.language import SiteParams, deterministic_p, factor_p, sample_p
from ppleffects.language import distribution as protocol
from ppleffects.language.arguments import as_mapping
from ppleffects.language.site import bind_params
from ppleffects.transforms.rewrite import Model, check_names, rewrite


def reparam(model: Model, strategies: Mapping[str, Any]) -> Model:
    """A model of the same values in coordinates that a sampler finds easier.

    The value of a reparametrised site becomes deterministic, under its own name; its auxiliary sites are named
    after it.

    Args:
        model: a function with sites in it.
        strategies: by the name of a latent, a strategy of ``numpyro.infer.reparam``: ``LocScaleReparam(centered)``
            (0 is non-centred; an array gives each entry its own degree), ``TransformReparam()``,
            ``ExplicitReparam(bijector)``, ``CircularReparam()``, ``ProjectedNormalReparam()``, or any callable
            ``(name, dist, obs) -> (dist or None, value)`` that calls ``numpyro.sample``.

    Raises:
        ValuesError: a name is none of the model's latents, or a strategy is no function.
        PPLError: a strategy needs something that a model does not have, such as a ``numpyro.param``.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> from numpyro.infer.reparam import LocScaleReparam
        >>> def model():
        ...     m = ppl.sample("m", dist.Normal(0.0, 1.0))
        ...     return ppl.sample("x", dist.Normal(m, 3.0))
        >>> sorted(ppl.simulate(ppl.reparam(model, {"x": LocScaleReparam(0.0)}))(0).latents)
        ['m', 'x_decentered']
    """
    strategies = as_mapping(strategies, "strategies")

    def check(program: Program) -> Mapping[str, Any]:
        check_names(program, list(strategies), ("sample",), "reparam")
        for name, strategy in strategies.items():
            if not callable(strategy):
                raise ValuesError(
                    "the strategy of this site is no function",
                    site=name,
                    source=program.named("sample")[name].site.source,
                    expected="a strategy of numpyro.infer.reparam, or another callable (name, dist, obs)",
                    found=f"{strategy!r}",
                    fix="reparam(model, {'" + name + "': LocScaleReparam(0.0)})",
                )
        return {}

    def rule(ctx, eqn, operands):
        site: SiteParams = eqn.params["site"]
        if eqn.primitive is not sample_p or site.name not in strategies:
            return None
        if site.masked or site.scaled:
            raise PPLError(
                "a site that is masked or scaled cannot be reparametrised",
                site=site.name,
                source=site.source,
                expected="a site that counts as it is",
                found=" and ".join(word for word in ("masked", "scaled") if getattr(site, word)),
                fix="apply ppl.mask or ppl.scale to the reparametrised model",
            )
        return [_in_lanes(site, strategies[site.name], eqn.params["dtype"], operands)]

    return rewrite(model, rule, inputs=check)


def _in_lanes(site: SiteParams, strategy: Any, dtype: Any, operands: list[Any]) -> Any:
    """Runs a strategy in one lane, and batches what it binds as the site itself was."""

    def one(*arrays):
        own = site.replace(lanes=(), conditional=False)
        with _Forward(own):
            dist, value = strategy(site.name, site.distribution(arrays), None)
        if dist is not None:
            return _sample(own, site.name, dist)
        return _deterministic(own, jnp.asarray(value, dtype))

    arrays = operands[: len(operands) - site.conditional]
    inner = [x[(0,) * sum(lane.mapped[i] for lane in site.lanes)] for i, x in enumerate(map(jnp.asarray, arrays))]
    body = tracing.closed(one, *inner)
    if site.conditional:
        body = tracing.closed(lambda *xs: activated(body)(xs[-1], *xs[:-1]), *inner, jnp.array(True))
    for lane in reversed(site.lanes):
        body = _jax.over_lane(body, Lane(lane.name, lane.size, lane.mapped, lane.depth))
    return tracing.call(body, *operands)[0]


def _sample(site: SiteParams, name: str, dist: Any) -> Any:
    arrays, structure = protocol.take_apart(dist, name, site.source)
    event_dim = len(protocol.event_shape(dist))
    own = site.replace(name=name, shape=protocol.shape(dist), event_dim=event_dim, structure=structure)
    return sample_p.bind(*arrays, dtype=protocol.dtype(dist), **bind_params(own))[0]


def _deterministic(site: SiteParams, value: Any) -> Any:
    own = site.replace(shape=value.shape, structure=None, predicted=False)
    return deterministic_p.bind(value, **bind_params(own))[0]


class _Forward(Messenger):
    """Binds what a strategy says to NumPyro as sites of ours, with the line and the spec of the reparametrised site."""

    def __init__(self, site: SiteParams):
        super().__init__()
        self.site = site

    def process_message(self, msg: dict[str, Any]) -> None:
        """Handles one NumPyro primitive."""
        kind, name = msg["type"], msg["name"]
        if kind == "deterministic":
            msg["value"] = _deterministic(self.site.replace(name=name), jnp.asarray(msg["value"]))
        elif kind == "sample" and msg["is_observed"]:
            factor = msg["fn"].log_prob(msg["value"])
            own = self.site.replace(name=name, shape=jnp.shape(factor), event_dim=0, structure=None)
            _factor(own, factor)
        elif kind == "sample":
            msg["value"] = _sample(self.site, name, msg["fn"])
        else:
            raise PPLError(
                f"the strategy of this site needs numpyro.{kind}, which a model does not have",
                site=self.site.name,
                source=self.site.source,
                expected="a strategy that calls numpyro.sample and numpyro.deterministic alone",
                found=f"numpyro.{kind}('{name}')",
                fix="give it a fixed value, as in LocScaleReparam(centered=0.0), or learn it as a latent of the model",
            )


def _factor(site: SiteParams, value: Any) -> None:
    factor_p.bind(value, **bind_params(site))
