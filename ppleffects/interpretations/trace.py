"""``simulate``, ``evaluate`` and ``log_density``: what a model draws, and how likely given values are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import Array

from ppleffects.interpretations.draw import as_key
from ppleffects.interpretations.parts import Context
from ppleffects.interpretations.program import Model, trace_model
from ppleffects.interpretations.run import checked_values, run


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Trace:
    """One run of a model.

    Attributes:
        values: the value of every site by name: latents, observations and deterministics. Axes: one for each scan
            around the site, outermost first, then one for each vmap, then batch and event axes; shards are joined.
        latents: the values of the latents alone, which is what ``log_density`` takes.
        log_probs: pointwise log densities: the values' layout without event axes; masked entries are 0.
        log_prob: the joint log density, a scalar: their sum, factors included.
        active: for sites in branches of a cond, whether they were reached; an inactive one has log density 0 and, if
            it is a float, the value NaN.
        retval: what the model returned.
        observed: names of the observations.
    """

    values: dict[str, Array]
    latents: dict[str, Array]
    log_probs: dict[str, Array]
    log_prob: Array
    active: dict[str, Array]
    retval: Any
    observed: tuple[str, ...] = dataclasses.field(metadata={"static": True})


def _trace(model: Model, retval: Any, ctx: Context) -> Trace:
    latents = model.program.named("sample")
    entries = ctx.entries
    return Trace(
        values={name: r.value for name, r in entries.items()},
        latents={name: r.value for name, r in entries.items() if name in latents},
        log_probs={name: r.log_prob for name, r in entries.items() if r.log_prob is not None},
        log_prob=ctx.totals.total(),
        active={name: r.active for name, r in entries.items() if r.active is not None},
        retval=retval,
        observed=tuple(model.program.named("observe")),
    )


def simulate(model: Callable[..., Any]) -> Callable[..., Trace]:
    """Returns ``(key, *args, **kwargs) -> Trace``: draws every latent from its distribution.

    A site's draw depends on the key, its name, and the step, lane and shard it stands in: adding, removing or
    conditioning another site never changes it, nor does ``jit``.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> def model():
        ...     return ppl.sample("x", dist.Normal(0.0, 1.0))
        >>> ppl.simulate(model)(0).values["x"].shape
        ()
    """

    def call(key: Any, *args: Any, **kwargs: Any) -> Trace:
        key = as_key(key)
        traced = trace_model(model, args, kwargs, key)
        return _trace(traced, *run(traced, {}, key=key))

    return call


def evaluate(model: Callable[..., Any]) -> Callable[..., Trace]:
    """Returns ``(values, *args, **kwargs) -> Trace``: runs the model at given values of its latents.

    Raises:
        ValuesError: ``values`` does not name every latent and nothing else.
        ShapeError: a value does not have the shape of its site.
        DTypeError: a value's dtype does not fit.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> def model():
        ...     x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ...     ppl.deterministic("double", 2 * x)
        >>> float(ppl.evaluate(model)({"x": 3.0}).values["double"])
        6.0
    """

    def call(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Trace:
        traced = trace_model(model, args, kwargs, values)
        return _trace(traced, *run(traced, checked_values(traced.program, values)))

    return call


def log_density(model: Callable[..., Any]) -> Callable[..., Array]:
    """Returns ``(values, *args, **kwargs) -> Array``: the joint log density of all sites and factors, a scalar.

    ``log p = sum over sites of log_prob(value) + sum of factors``. A site that varies over a mesh axis is summed over
    its shards; one that varies over none counts once. Gradients, Hessians and forward mode are JAX's.

    Raises:
        ValuesError, ShapeError, DTypeError: as for ``evaluate``.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist, jax
        >>> def model(y):
        ...     x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ...     ppl.observe("y", dist.Normal(x, 1.0), y)
        >>> float(jax.grad(ppl.log_density(model))({"x": 1.0}, 3.0)["x"])
        1.0
    """

    def call(values: Mapping[str, Any], *args: Any, **kwargs: Any) -> Array:
        traced = trace_model(model, args, kwargs, values)
        _, ctx = run(traced, checked_values(traced.program, values), record=False)
        return ctx.totals.total()

    return call
