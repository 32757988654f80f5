"""The interpretation of a model in which each latent starts in its own way: unconstrained, at a value, or drawn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from ppleffects.effects import HandlerResult, Lane
from ppleffects.interpretations.draw import name_digest
from ppleffects.interpretations.parts import Context, Draws, Inputs, Record, Records, Totals
from ppleffects.interpretations.program import Program, compiled
from ppleffects.interpretations.rules import Reading, interpreter
from ppleffects.language import SiteParams, over_lanes, sample_p
from ppleffects.language import distribution as protocol

type Values = Mapping[str, Array]

WRAPPERS = (dist.ExpandedDistribution, dist.Independent, dist.MaskedDistribution)


def place(
    target: Any, free: Values, given: Values, key: Array, prior: tuple[str, ...] = ()
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The position at which some latents have unconstrained values, some have values, and the rest are drawn.

    A draw from the prior is one given the values of what stands before it. That of a latent on the shards comes from
    uniform numbers through the quantile function, if its distribution has one: it is then the same, whatever the number
    of shards.

    Args:
        target: the density.
        free: unconstrained values by name.
        given: values by name.
        key: a typed key, of the draws.
        prior: names of the latents to draw.

    Returns:
        Unconstrained values of all latents, and, for each that was given a value, whether it is outside of its support.
    """
    records = _run(target, free, given, key, prior, invert=True)
    position = {name: free[name] if name in free else records[name].value for name in target.position_type}
    return position, {name: jnp.isneginf(jnp.asarray(records[name].log_prob)).any() for name in given}


def values_at(target: Any, free: Values, given: Values) -> tuple[dict[str, Array], dict[str, Array]]:
    """Values of latents and deterministics, and pointwise log densities of all sites, at a position of ``place``."""
    records = _run(target, free, given, jax.random.key(0), (), invert=False)
    kinds = target.program.named("sample", "deterministic")
    values = {name: record.value for name, record in records.items() if name in kinds}
    return values, {name: record.log_prob for name, record in records.items() if record.log_prob is not None}


def _run(
    target: Any, free: Values, given: Values, key: Array, prior: tuple[str, ...], *, invert: bool
) -> dict[str, Record]:
    sites, types = target.sites, target.position_type

    def uniform(name: str) -> Array:
        own, dtype = jax.random.fold_in(key, jnp.uint32(name_digest(name))), sites[name].dtype
        return jax.random.uniform(own, sites[name].shape, dtype, minval=jnp.finfo(dtype).tiny)

    values = {name: jnp.asarray(u, types[name].dtype) for name, u in free.items()}
    values |= {name: jnp.asarray(value, sites[name].dtype) for name, value in given.items()}
    on_shards = frozenset(name for name in prior if sites[name].axes)
    values |= {name: uniform(name) for name in on_shards}
    call = compiled(_build, target.program, frozenset(free), on_shards, invert)
    return call(values, key, target.model.consts, target.model.args)


def _build(program: Program, free: frozenset[str], uniform: frozenset[str], invert: bool) -> Callable[..., Any]:
    """Runs a model on values, some of them unconstrained, and some uniform numbers to draw by; the rest is drawn."""
    plain = interpreter(Reading(invert=invert), program.label)
    unconstrained = interpreter(Reading(unconstrained=True, invert=invert), program.label)
    as_given: Any = plain.dispatcher.handler(sample_p)
    as_free: Any = unconstrained.dispatcher.handler(sample_p)

    def sample(interpreter: Any, ctx: Context, eqn: Any, invals: list[Any]) -> HandlerResult[Context]:
        site: SiteParams = eqn.params["site"]
        if site.name in free:
            return as_free(interpreter, ctx, eqn, invals)
        if site.name in uniform:
            return as_given(interpreter, _with_draw(ctx, site, invals), eqn, invals)
        value = ctx.inputs.values.get(site.name)
        after, outs = as_given(interpreter, ctx, eqn, invals)
        if value is not None and invert:
            after = _telling_outside(after, site, invals, value)
        return HandlerResult(after, outs)

    interpret = dataclasses.replace(plain, dispatcher=plain.dispatcher.extended({sample_p: sample}))

    def call(values: dict[str, Array], key: Array, consts: Any, args: Any) -> dict[str, Record]:
        ctx = Context(Inputs(values), Draws(key), Records({}), Totals({}))
        return interpret.run(program.jaxpr, consts, ctx, *args)[1].entries

    return call


def _with_draw(ctx: Context, site: SiteParams, invals: list[Any]) -> Context:
    """The context in which a site is given its draw, or nothing where its distribution has to draw by itself."""
    values = dict(ctx.inputs.values)
    u = values.pop(site.name)
    drawn = _in_lanes(_quantile, site, invals, u)
    if drawn is not None:
        values[site.name] = drawn
    return dataclasses.replace(ctx, inputs=Inputs(values))


def _telling_outside(ctx: Context, site: SiteParams, invals: list[Any], value: Array) -> Context:
    """The context whose record of a site has -inf for a density where the value is outside of the support, else 0."""
    record = ctx.entries[site.name]
    inside = jnp.broadcast_to(_in_lanes(_inside, site, invals, value), jnp.asarray(record.log_prob).shape)
    if record.active is not None:
        inside = inside | ~record.active
    return ctx.written(site.name, dataclasses.replace(record, log_prob=jnp.where(inside, 0.0, -jnp.inf)))


def _in_lanes(fn: Callable[[Any, Array], Any], site: SiteParams, invals: list[Any], x: Array) -> Any:
    """``fn`` of the distribution and the entry of ``x`` in each lane."""
    arrays = invals[: len(invals) - site.masked - site.scaled - site.conditional]
    lanes = [Lane(lane.name, lane.size, lane.mapped[: len(arrays)]) for lane in site.lanes]
    return over_lanes(lambda *operands: fn(site.distribution(operands[:-1]), operands[-1]), lanes, extra=1)(*arrays, x)


def _inside(distribution: Any, value: Array) -> Array:
    """Whether a value lies in the support, for each event; True where that cannot be asked."""
    constraint = protocol.support(distribution)
    if protocol.is_tfp(distribution) or constraint is None or dist.constraints.is_dependent(constraint):
        return jnp.ones(value.shape[: value.ndim - len(distribution.event_shape)], bool)
    return jnp.asarray(constraint(value))


def _quantile(distribution: Any, u: Array) -> Array | None:
    """The value below which a share ``u`` of a distribution lies; None where the distribution does not know it."""
    while isinstance(distribution, WRAPPERS):
        distribution = distribution.base_dist
    if tuple(distribution.event_shape):
        return None
    with contextlib.suppress(NotImplementedError):
        if protocol.is_tfp(distribution):
            return distribution.quantile(u)
        if isinstance(distribution, dist.Distribution):
            return distribution.icdf(u)
    return None
