"""The handlers of the four site primitives, written once for every interpretation of a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.effects import HandlerResult, Interpreter, Lane, _jax, default_dispatcher
from ppleffects.errors import PPLError
from ppleffects.interpretations.draw import draw
from ppleffects.interpretations.parts import Context, Record
from ppleffects.interpretations.shards import shard_map_rule
from ppleffects.language import (
    SiteParams,
    deterministic_p,
    factor_p,
    observe_p,
    over_lanes,
    sample_p,
)
from ppleffects.language import distribution as protocol


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an interpretation reads the values of latents.

    Attributes:
        unconstrained: whether given values are unconstrained; the log-determinant of the map is then a part of the
            density.
        invert: whether to record unconstrained values in place of values.
    """

    unconstrained: bool = False
    invert: bool = False


GIVEN = Reading()


def interpreter(reading: Reading, label: str) -> Interpreter[Context]:
    """The interpreter of models that reads latents in one way."""
    return Interpreter(
        default_dispatcher().extended(
            {
                sample_p: functools.partial(_sample, reading),
                observe_p: _observe,
                factor_p: _factor,
                deterministic_p: _deterministic,
                _jax.shard_map_p: shard_map_rule,
            }
        ),
        label,
    )


def _sample(reading, interpreter, ctx: Context, eqn, invals) -> HandlerResult[Context]:
    site: SiteParams = eqn.params["site"]
    arrays, mask = _operands(site, invals)
    axes = _site_axes(site, invals, ctx)
    given = ctx.inputs.values.get(site.name)
    log_det = None
    if given is None:
        if ctx.draws is None:
            raise PPLError("no value and no key", site=site.name, source=site.source)
        value = draw(ctx.draws, site, arrays, axes)
    elif reading.unconstrained:
        value, log_det = _constrain(site, arrays, given)
    else:
        value = given
    value = _like(eqn.outvars[0].aval, jnp.asarray(value, eqn.params["dtype"]))
    inside = given is None or reading.unconstrained
    log_prob = _log_prob(site, arrays, value, mask, inside=inside)
    recorded = _unconstrain(site, arrays, value) if reading.invert else value
    ctx = ctx.written(site.name, Record(recorded, log_prob))
    term = jnp.sum(log_prob)
    ctx = _count(ctx, site, term if log_det is None else term + jnp.sum(log_det), axes)
    return HandlerResult(ctx, [value])


def _observe(interpreter, ctx: Context, eqn, invals) -> HandlerResult[Context]:
    site: SiteParams = eqn.params["site"]
    operands, mask = _operands(site, invals)
    *arrays, value = operands
    axes = _site_axes(site, invals, ctx)
    at = len(arrays)
    lanes = [Lane(lane.name, lane.size, lane.mapped[:at]) for lane in site.lanes]
    whole = _with_all_lanes(value, [lane.mapped[at] for lane in site.lanes], site)
    log_prob = _log_prob(site.replace(lanes=tuple(lanes)), arrays, whole, mask, masked_by=_mask_lanes(site))
    if ctx.records is not None:
        ctx = ctx.written(site.name, _claimed(Record(whole, log_prob), ctx, axes))
    return HandlerResult(_count(ctx, site, jnp.sum(log_prob), axes), [value])


def _factor(interpreter, ctx: Context, eqn, invals) -> HandlerResult[Context]:
    site: SiteParams = eqn.params["site"]
    (value,) = invals
    whole = _with_all_lanes(value, [lane.mapped[0] for lane in site.lanes], site)
    return HandlerResult(_count(ctx, site, jnp.sum(whole), _site_axes(site, invals, ctx)), [])


def _deterministic(interpreter, ctx: Context, eqn, invals) -> HandlerResult[Context]:
    site: SiteParams = eqn.params["site"]
    (value,) = invals
    if ctx.records is None:
        return HandlerResult(ctx, [value])
    whole = _with_all_lanes(value, [lane.mapped[0] for lane in site.lanes], site)
    record = _claimed(Record(whole), ctx, _site_axes(site, invals, ctx))
    return HandlerResult(ctx.written(site.name, record), [value])


def _operands(site: SiteParams, invals: list[Any]) -> tuple[list[Any], Array | None]:
    return (list(invals[:-1]), invals[-1]) if site.masked else (list(invals), None)


def _mask_lanes(site: SiteParams) -> tuple[bool, ...]:
    return tuple(lane.mapped[-1] for lane in site.lanes)


def _with_all_lanes(value: Array, mapped: list[bool], site: SiteParams) -> Array:
    """Broadcasts a value to the lanes that it does not have."""
    missing = tuple(i for i, m in enumerate(mapped) if not m)
    if not missing:
        return jnp.asarray(value)
    return jnp.broadcast_to(jnp.expand_dims(value, missing), site.full_shape)


def _like(aval: Any, value: Array) -> Array:
    """Gives a value the type that the traced program has for it."""
    value = _jax.cast_varying(value, _jax.varying(aval))
    return _jax.placed_like(value, aval)


def _log_prob(
    site: SiteParams,
    arrays: list[Any],
    value: Array,
    mask: Array | None,
    masked_by: tuple[bool, ...] | None = None,
    inside: bool = False,
) -> Array:
    """The pointwise log density: the value's non-event axes, lanes in front; masked entries are 0."""
    at = len(arrays)
    masked_by = _mask_lanes(site) if masked_by is None else masked_by
    lanes = [
        Lane(lane.name, lane.size, (*lane.mapped[:at], True, *([m] if mask is not None else [])))
        for lane, m in zip(site.lanes, masked_by or [False] * len(site.lanes), strict=True)
    ]

    def one(*operands):
        arrays, value, *rest = operands[:at], *operands[at:]
        dist = site.distribution(arrays)
        if not rest:
            return protocol.log_prob(dist, value, inside=inside)
        (keep,) = rest
        batch = value.shape[: value.ndim - site.event_dim]
        keep = jnp.broadcast_to(keep, batch)
        over_event = keep.reshape(*batch, *[1] * site.event_dim)
        dist = protocol.with_safe_parameters(dist, keep)
        safe = jnp.where(over_event, value, protocol.feasible(dist, value))
        return jnp.where(keep, protocol.log_prob(dist, safe, inside=inside), 0.0)

    operands = [*arrays, value] if mask is None else [*arrays, value, mask]
    result = over_lanes(one, lanes)(*operands)
    batch_ndim = len(site.lanes) + len(site.batch_shape)
    if result.ndim < batch_ndim:
        result = jnp.broadcast_to(result, site.full_shape[:batch_ndim])
    return result


def _constrain(site: SiteParams, arrays: list[Any], given: Array) -> tuple[Array, Array]:
    return _through_bijector(site, arrays, lambda bijector, u: bijector.forward(u))(given)


def _unconstrain(site: SiteParams, arrays: list[Any], value: Array) -> Array:
    return _through_bijector(site, arrays, lambda bijector, x: bijector.inverse(x))(value)


def _through_bijector(site: SiteParams, arrays: list[Any], fn: Callable[..., Any]) -> Callable[[Array], Any]:
    lanes = [Lane(lane.name, lane.size, lane.mapped[: len(arrays)]) for lane in site.lanes]

    def one(*operands):
        *arrays, x = operands
        return fn(protocol.bijector(site.distribution(arrays)), x)

    return lambda x: over_lanes(one, lanes, extra=1)(*arrays, x)


def _site_axes(site: SiteParams, operands: list[Any], ctx: Context) -> frozenset[str]:
    """The mesh axes over which a site varies: its types say so, or ``spec=`` does."""
    varying = frozenset().union(*map(_jax.varying, operands))
    if site.spec is None:
        return varying
    return _jax.spec_axes(site.spec) | (varying - frozenset(ctx.totals.manual))


def _count(ctx: Context, site: SiteParams, term: Array, axes: frozenset[str]) -> Context:
    """Adds a term to the total of those axes over which its site varies; a replica counts by its mean over shards."""
    if site.spec is not None:
        term = _mean_over_replicas(term, ctx, axes)
    if _jax.checks_varying():
        term = _jax.cast_varying(term, axes)
    return ctx.added(term, axes)


def _mean_over_replicas(x: Array, ctx: Context, axes: frozenset[str]) -> Array:
    candidates = _jax.varying(x) if _jax.checks_varying() else frozenset(ctx.totals.manual)
    equal = tuple(sorted((candidates & frozenset(ctx.totals.manual)) - axes))
    return jax.lax.pmean(x, equal) if equal else x


def _claimed(record: Record, ctx: Context, axes: frozenset[str]) -> Record:
    """Types a record that ``spec=`` claims to be equal on the shards as equal."""
    manual = frozenset(ctx.totals.manual)
    return jax.tree.map(lambda x: _jax.of_first_shard(x, (_jax.varying(x) & manual) - axes), record)
