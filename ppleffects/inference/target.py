"""``target``: a model's posterior as a density over unconstrained reals, for samplers and optimisers."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, Mesh

from ppleffects.errors import DiscreteLatentError
from ppleffects.interpretations import Site
from ppleffects.interpretations.draw import as_key, name_digest
from ppleffects.interpretations.program import Model, Program, bind_arguments, trace_model
from ppleffects.interpretations.rules import Reading
from ppleffects.interpretations.run import checked_values, run
from ppleffects.interpretations.sites import describe, sites_of

type Unconstrained = dict[str, Array]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Target:
    """The density of a model's latents, in unconstrained coordinates.

    A position ``u`` is a dict from the names of latents to unconstrained arrays. Each is mapped onto the support of
    its site where the site stands, so that supports may depend on other values, and pieces on shards stay there:
    ``log p(u) = log p(x(u)) + log |det dx/du|``.

    A target is a pytree: its leaves are the data, so that a compiled function of it takes data as arguments.

    Attributes:
        model: the traced model and its data.
        arguments: the model's arguments by name, where its signature tells them.
    """

    model: Model
    arguments: dict[str, Any]

    @property
    def program(self) -> Program:
        """The traced equations."""
        return self.model.program

    @functools.cached_property
    def sites(self) -> dict[str, Site]:
        """The sites of the model by name, in order."""
        return sites_of(self.program)

    @property
    def mesh(self) -> Mesh | AbstractMesh | None:
        """The mesh that the model's shard_maps name; None if there are none."""
        return self.program.mesh

    def log_density(self, u: Unconstrained) -> Array:
        """Returns ``log p(u)``, a scalar."""
        _, ctx = run(self.model, self._checked(u), record=False, reading=Reading(unconstrained=True))
        return ctx.totals.total()

    def constrain(self, u: Unconstrained) -> dict[str, Array]:
        """Returns the values of latents and deterministics at ``u``."""
        _, ctx = run(self.model, self._checked(u), reading=Reading(unconstrained=True))
        kinds = self.program.named("sample", "deterministic")
        return {name: r.value for name, r in ctx.entries.items() if name in kinds}

    def unconstrain(self, values: Mapping[str, Any]) -> Unconstrained:
        """Returns ``u`` for values of all latents; the inverse of ``constrain``."""
        checked = checked_values(self.program, values)
        _, ctx = run(self.model, checked, reading=Reading(invert=True))
        latents = self.program.named("sample")
        return {name: r.value for name, r in ctx.entries.items() if name in latents}

    def log_probs(self, u: Unconstrained) -> dict[str, Array]:
        """Returns the pointwise log densities of all sites at ``u``, without log-determinants."""
        _, ctx = run(self.model, self._checked(u), reading=Reading(unconstrained=True))
        return {name: r.log_prob for name, r in ctx.entries.items() if r.log_prob is not None}

    def init(self, key: Any, radius: float = 2.0) -> Unconstrained:
        """Draws a position, each coordinate uniform in ``(-radius, radius)``; a name's draw depends on no other."""
        key, types = as_key(key), self.position_type
        digests = jnp.asarray([name_digest(name) for name in types], jnp.uint32)
        keys = dict(zip(types, jax.vmap(jax.random.fold_in, (None, 0))(key, digests), strict=True)) if types else {}
        alike: dict[Any, list[str]] = {}
        for name, aval in types.items():
            alike.setdefault((aval.size, aval.dtype), []).append(name)
        position = {}
        for (size, dtype), names in alike.items():  # at once, which is one program to compile
            draw = functools.partial(jax.random.uniform, shape=(size,), dtype=dtype, minval=-radius, maxval=radius)
            drawn = jax.vmap(draw)(jnp.stack([keys[name] for name in names]))
            position |= {name: row.reshape(types[name].shape) for name, row in zip(names, drawn, strict=True)}
        return {name: position[name] for name in types}

    @functools.cached_property
    def position_type(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Shape and dtype of each entry of a position."""
        latents = self.program.named("sample")
        values = {n: jax.ShapeDtypeStruct(o.layout()[0], o.dtype) for n, o in latents.items()}

        def invert(model, values):
            _, ctx = run(model, values, reading=Reading(invert=True))
            return {n: ctx.entries[n].value for n in latents}

        shapes = jax.eval_shape(invert, self.model, values)
        return {n: jax.ShapeDtypeStruct(s.shape, s.dtype) for n, s in shapes.items()}

    def _checked(self, u: Unconstrained) -> Unconstrained:
        """A position as the program takes it.

        Raises:
            ValuesError, ShapeError, DTypeError: see ``checked_values``.
        """
        shapes = {name: type_.shape for name, type_ in self.position_type.items()}
        return checked_values(self.program, u, unconstrained=shapes)

    def observed(self) -> dict[str, Array]:
        """Returns the observed values by name."""
        names = self.program.named("observe")
        zeros = {n: jnp.zeros(s.shape, s.dtype) for n, s in self.position_type.items()}
        _, ctx = run(self.model, zeros, reading=Reading(unconstrained=True))
        return {name: ctx.entries[name].value for name in names}


def target(model: Callable[..., Any]) -> Callable[..., Target]:
    """Returns ``(*args, **kwargs) -> Target``: traces the model on its arguments.

    Raises:
        DiscreteLatentError: a latent is discrete, so that there is no density over the reals.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> def model():
        ...     ppl.sample("s", dist.HalfNormal(1.0))
        >>> float(ppl.target(model)().constrain({"s": 0.0})["s"])
        1.0
    """

    def call(*args: Any, **kwargs: Any) -> Target:
        traced = trace_model(model, args, kwargs)
        _check_continuous(traced.program)
        return Target(traced, _array_arguments(bind_arguments(model, args, kwargs)))

    return call


def _array_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if isinstance(value, jax.Array)}


def _check_continuous(program: Program) -> None:
    for name, occurrence in program.named("sample").items():
        if not jnp.issubdtype(occurrence.dtype, jnp.floating) or describe(occurrence).is_discrete:
            kind = type(occurrence.abstract_distribution()).__name__
            raise DiscreteLatentError(
                "a discrete latent has no density over the reals, so no gradient-based sampler can move it",
                site=name,
                source=occurrence.site.source,
                expected="continuous latents",
                found=f"{kind}, of dtype {occurrence.dtype}",
                fix="sum it out (a mixture or a hidden Markov model by logsumexp in ppl.factor), or fix it with "
                "ppl.condition",
            )
