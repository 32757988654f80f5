"""``scale`` and ``mask``: sites that count for more, for less, or not at all."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

from ppleffects.errors import ShapeError
from ppleffects.interpretations.layout import Occurrence
from ppleffects.interpretations.program import Program
from ppleffects.language import SiteParams, deterministic_p
from ppleffects.language.arguments import as_booleans, as_names, as_real
from ppleffects.transforms.rewrite import Model, check_names, rebind, rewrite

KINDS = ("sample", "observe", "factor")


def scale(model: Model, factor: ArrayLike, *, sites: Sequence[str] | None = None) -> Model:
    """A model in which the log density of every site and factor is multiplied by ``factor``.

    With the observations of a minibatch scaled by ``rows / batch``, the log density and its gradient are unbiased.
    What a sampler adds for the change to unconstrained coordinates is not scaled.

    Args:
        model: a function with sites in it.
        factor: a scalar, or an array that broadcasts to the values of all sites concerned, event axes left out.
        sites: names of the sites that it acts on; all by default.

    Raises:
        ValuesError: ``sites`` names none of the model's.
        DTypeError: ``factor`` is no array of real numbers.
        ShapeError: ``factor`` does not broadcast to a site.

    Example:
        >>> import ppleffects as ppl, jax.numpy as jnp
        >>> def model():
        ...     ppl.factor("f", jnp.array([1.0, 2.0]))
        >>> float(ppl.log_density(ppl.scale(model, 10.0))({}))
        30.0
    """

    def combine(site, operands, weight):
        at = len(operands) - site.conditional - site.scaled
        if site.scaled:
            return _combined(site, operands, at, weight, jnp.multiply)
        return site.with_operand(at, lanes=weight.ndim > 0).replace(scaled=True), _inserted(operands, at, weight)

    return _weighted(model, as_real(factor, "scale"), sites, "scale", combine)


def mask(model: Model, mask: ArrayLike, *, sites: Sequence[str] | None = None) -> Model:
    """A model in which every site and factor counts only where ``mask`` is True.

    Args:
        model: a function with sites in it.
        mask: a boolean scalar, or an array that broadcasts to the values of all sites concerned, event axes left out.
        sites: names of the sites that it acts on; all by default.

    Raises:
        ValuesError: ``sites`` names none of the model's.
        DTypeError: ``mask`` is not boolean.
        ShapeError: ``mask`` does not broadcast to a site.

    Example:
        >>> import ppleffects as ppl, jax.numpy as jnp
        >>> def model():
        ...     ppl.factor("f", jnp.array([1.0, 2.0]))
        >>> float(ppl.log_density(ppl.mask(model, jnp.array([False, True])))({}))
        2.0
    """

    def combine(site, operands, keep):
        if site.structure is None:
            return _combined(site, operands, 0, keep, lambda x, keep: jnp.where(keep, x, jnp.zeros_like(x)))
        at = len(operands) - site.conditional - site.scaled - site.masked
        if site.masked:
            return _combined(site, operands, at, keep, jnp.logical_and)
        return site.with_operand(at, lanes=keep.ndim > 0).replace(masked=True), _inserted(operands, at, keep)

    return _weighted(model, as_booleans(mask, "mask"), sites, "mask", combine)


type Combine = Callable[[SiteParams, list[Any], Array], tuple[SiteParams, list[Any]]]


def _weighted(model: Model, weight: Array, sites: Sequence[str] | None, what: str, combine: Combine) -> Model:
    """Gives the sites concerned one more operand, a scalar as it is, an array sliced as the values of sites are."""
    sites = None if sites is None else as_names(sites, "sites=")

    def concerned(program: Program) -> dict[str, Occurrence]:
        if sites is not None:
            check_names(program, sites, KINDS, what)
        return {n: o for n, o in program.named(*KINDS).items() if sites is None or n in sites}

    def inputs(program: Program) -> Mapping[str, Array]:
        found = concerned(program)
        return {} if weight.ndim == 0 else {name: _laid_out(o, weight, what) for name, o in found.items()}

    def rule(ctx, eqn, operands):
        site = eqn.params["site"]
        if eqn.primitive is deterministic_p or (sites is not None and site.name not in sites):
            return None
        own = ctx.shared.value if weight.ndim == 0 else ctx.inputs.values[site.name]
        site, operands = combine(site, operands, own)
        rest = {k: v for k, v in eqn.params.items() if k not in ("site", "name", "source")}
        return rebind(eqn.primitive, site, operands, **rest)

    return rewrite(model, rule, inputs=inputs, shared=weight if weight.ndim == 0 else ())


def _laid_out(occurrence: Occurrence, weight: Array, what: str) -> Array:
    shape, _ = occurrence.layout()
    shape = shape[: len(shape) - occurrence.site.event_dim]
    try:
        fits = jnp.broadcast_shapes(weight.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            f"the {what} does not fit the site",
            site=occurrence.site.name,
            source=occurrence.site.source,
            expected=f"a scalar, or a shape that broadcasts to {shape}",
            found=f"{weight.shape}",
            fix="name the sites that it is meant for: sites=[...]",
        )
    return jnp.broadcast_to(weight, shape)


def _inserted(operands: list[Any], at: int, new: Array) -> list[Any]:
    return [*operands[:at], new, *operands[at:]]


def _combined(
    site: SiteParams, operands: list[Any], at: int, weight: Array, fn: Callable[[Array, Array], Array]
) -> tuple[SiteParams, list[Any]]:
    """Combines an operand with a weight; for a weight with the axes of lanes, the operand is given them too."""
    operand = operands[at]
    if weight.ndim > 0:
        sizes = tuple(lane.size for lane in site.lanes)
        missing = tuple(i for i, lane in enumerate(site.lanes) if not lane.mapped[at])
        operand = jnp.expand_dims(operand, missing)
        inner = operand.shape[len(sizes) :]
        operand = operand.reshape(*operand.shape[: len(sizes)], *[1] * (weight.ndim - len(sizes) - len(inner)), *inner)
        rest = site.replace(
            lanes=tuple(
                dataclasses.replace(lane, mapped=(*lane.mapped[:at], *lane.mapped[at + 1 :])) for lane in site.lanes
            )
        )
        site = rest.with_operand(at, lanes=True)
        operand = jnp.broadcast_to(operand, jnp.broadcast_shapes(operand.shape, weight.shape))
    return site, [*operands[:at], fn(operand, weight), *operands[at + 1 :]]
