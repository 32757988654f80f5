"""The handlers of the four site primitives and of shard_map, written once for every interpretation of a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.effects import (
    Frame,
    HandlerResult,
    Interpreter,
    Lane,
    _jax,
    default_dispatcher,
    default_shard_map_handler,
)
from ppleffects.errors import PPLError
from ppleffects.interpretations.draw import draw
from ppleffects.interpretations.layout import Occurrence, Placement, Step, occurrences
from ppleffects.interpretations.parts import Context, Inputs, Record, Records, Totals
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


def interpreter(reading: Reading, label: str) -> Interpreter[Context]:
    """The interpreter of models that reads latents in one way."""
    return Interpreter(
        default_dispatcher().extended(
            {
                sample_p: functools.partial(_sample, reading),
                observe_p: _observe,
                factor_p: _factor,
                deterministic_p: _deterministic,
                _jax.shard_map_p: _shard_map,
            }
        ),
        label,
    )


# --- sites ------------------------------------------------------------------------------------------------------------


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
    log_prob = _log_prob(site, arrays, value, mask)
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
        dist = site.structure.build(arrays)
        if not rest:
            return protocol.log_prob(dist, value)
        (keep,) = rest
        batch = value.shape[: value.ndim - site.event_dim]
        keep = jnp.broadcast_to(keep, batch)
        over_event = keep.reshape(*batch, *[1] * site.event_dim)
        dist = protocol.with_safe_parameters(dist, keep)
        safe = jnp.where(over_event, value, protocol.feasible(dist, value))
        return jnp.where(keep, protocol.log_prob(dist, safe), 0.0)

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
        return fn(protocol.bijector(site.structure.build(arrays)), x)

    return lambda x: over_lanes(one, lanes, extra=1)(*arrays, x)


# --- mesh axes ----------------------------------------------------------------------------------------------------------


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
    extra = tuple(sorted((_jax.varying(record.value) & frozenset(ctx.totals.manual)) - axes))
    log_prob = record.log_prob
    if log_prob is not None:
        log_prob = _mean_over_replicas(log_prob, ctx, axes)
    return Record(jax.lax.pmax(record.value, extra) if extra else record.value, log_prob, record.active)


# --- shard_map ----------------------------------------------------------------------------------------------------------


def _shard_map(interpreter: Interpreter[Context], ctx: Context, eqn, invals) -> HandlerResult[Context]:
    """Values enter by their site's spec; totals are summed over their own axes; records leave by their site's spec."""
    shard = _jax.shard_map_parts(eqn)
    frame = Frame("shard_map", eqn, shard.body)
    places = _placements(eqn, shard)
    manual = tuple(sorted({*ctx.totals.manual, *shard.axes}))
    entering = Context(
        Inputs(ctx.inputs.within(shard.body)),
        ctx.draws,
        None if ctx.records is None else Records({}),
        Totals({}, manual),
    )

    def in_specs(abstract: Context) -> Context:
        values = {
            name: places[name].placement.spec(len(x.shape), places[name].given_event_dim(x))
            for name, x in abstract.inputs.values.items()
        }
        return dataclasses.replace(_all_replicated(abstract), inputs=Inputs(values))

    def out_specs(abstract: Context) -> Context:
        return dataclasses.replace(_all_replicated(abstract), records=_record_specs(abstract.records, places))

    def body(jaxpr, ctx, *args):
        values = {name: _squeezed(x, places[name]) for name, x in ctx.inputs.values.items()}
        outs, ctx = interpreter(jaxpr, dataclasses.replace(ctx, inputs=Inputs(values)), *args)
        return outs, dataclasses.replace(ctx, inputs=Inputs({}), draws=None)

    left = default_shard_map_handler(
        body,
        entering,
        eqn,
        invals,
        declare_ctx_in_specs=in_specs,
        declare_ctx_out_specs=out_specs,
        reduce_ctx=lambda ctx: _reduced(ctx, shard, places),
    )
    totals = ctx.totals.rejoin(frame, (), left.ctx.totals.sums)
    records = None if ctx.records is None else ctx.records.rejoin(frame, (), left.ctx.records.entries)
    return HandlerResult(dataclasses.replace(ctx, totals=totals, records=records), left.outvals)


@dataclasses.dataclass(frozen=True)
class _Place:
    """Where a site of a shard_map's body lies, as the body sees it."""

    placement: Placement
    batch_ndim: int
    event_dim: int

    def given_event_dim(self, given: Any) -> int:
        """The number of event axes of a given value; an unconstrained one may have others than the site."""
        return len(given.shape) - self.batch_ndim


def _placements(eqn: Any, shard: _jax.ShardMapParts) -> dict[str, _Place]:
    step = Step("shard_map", eqn, 0)
    places = {}
    for inner in occurrences(shard.body):
        occurrence: Occurrence = dataclasses.replace(inner, path=(step, *inner.path))
        placement = occurrence.placement(0)
        stacked = sum(occurrence.placement(i).stacked for i in occurrence.shards)
        scans = sum(s.kind == "scan" for s in inner.path)
        batch = scans + len(occurrence.site.lanes) + len(occurrence.site.batch_shape) + stacked
        places[occurrence.site.name] = _Place(placement, batch, occurrence.site.event_dim)
    return places


def _squeezed(x: Array, place: _Place) -> Array:
    return jnp.squeeze(x, place.batch_ndim - 1) if place.placement.stacked else x


def _all_replicated(abstract: Context) -> Any:
    return jax.tree.map(lambda _: jax.sharding.PartitionSpec(), abstract)


def _record_specs(records: Records | None, places: dict[str, _Place]) -> Records | None:
    if records is None:
        return None

    def spec(place, x, event_dim):
        return None if x is None else place.placement.spec(len(x.shape), event_dim)

    return Records(
        {
            name: Record(
                spec(places[name], r.value, len(r.value.shape) - places[name].batch_ndim),
                spec(places[name], r.log_prob, 0),
                None if r.active is None else jax.sharding.PartitionSpec(),
            )
            for name, r in records.entries.items()
        }
    )


def _reduced(ctx: Context, shard: _jax.ShardMapParts, places: dict[str, _Place]) -> Context:
    """Runs inside of the manual axes, after the body: each total is summed over its own axes and no others."""
    sums: dict[tuple[str, ...], Array] = {}
    for axes, value in ctx.totals.sums.items():
        here = frozenset(axes) & shard.axes
        left = tuple(sorted(frozenset(axes) - here))
        value = _jax.psum_over(value, here)
        sums[left] = sums[left] + value if left in sums else value
    records = ctx.records
    if records is not None:
        entries = {name: _stacked(r, places[name]) for name, r in records.entries.items()}
        records = Records(entries)
    return dataclasses.replace(ctx, totals=Totals(sums, ctx.totals.manual), records=records)


def _stacked(record: Record, place: _Place) -> Record:
    """Gives a piece without non-event axes the axis along which the pieces are joined."""
    if not place.placement.stacked:
        return record
    at = place.batch_ndim - 1
    log_prob = None if record.log_prob is None else jnp.expand_dims(record.log_prob, at)
    return Record(jnp.expand_dims(record.value, at), log_prob, record.active)
