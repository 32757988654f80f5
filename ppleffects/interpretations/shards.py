"""The rule of shard_map: values enter and records leave by their site's spec, and totals are summed over shards."""

from __future__ import annotations

import dataclasses
from typing import Any, override

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ppleffects.effects import Frame, HandlerResult, Interpreter, _jax, default_shard_map_handler, mesh
from ppleffects.interpretations.layout import Occurrence, Placement, Step, occurrences
from ppleffects.interpretations.parts import Context, Inputs, Record, Records, Totals


def shard_map_rule(interpreter: Interpreter[Context], ctx: Context, eqn, invals) -> HandlerResult[Context]:
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
        ctx.shared,
    )

    def in_specs(abstract: Context) -> Any:
        values: Any = {
            name: places[name].placement.spec(len(x.shape), places[name].given_event_dim(x))
            for name, x in abstract.inputs.values.items()
        }
        return dataclasses.replace(_replicated(abstract), inputs=Inputs(values))

    def out_specs(abstract: Context) -> Any:
        return dataclasses.replace(_replicated(abstract), records=_record_specs(abstract.records, places))

    left = default_shard_map_handler(
        _Within(interpreter.dispatcher, interpreter.label, interpreter.varying, places),
        entering,
        eqn,
        invals,
        declare_ctx_in_specs=in_specs,
        declare_ctx_out_specs=out_specs,
        reduce_ctx=lambda ctx: _reduced(ctx, shard, places),
    )
    totals = ctx.totals.rejoin(frame, (), left.ctx.totals.sums)
    records = ctx.records
    if records is not None and left.ctx.records is not None:
        records = records.rejoin(frame, (), left.ctx.records.entries)
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


@dataclasses.dataclass(frozen=True)
class _Within(Interpreter[Context]):
    """Runs the body of a shard_map on the shard's own pieces of the given values; only what was written leaves."""

    places: dict[str, _Place] = dataclasses.field(default_factory=dict)

    @override
    def __call__(self, jaxpr, ctx, *args):
        values = {name: _squeezed(x, self.places[name]) for name, x in ctx.inputs.values.items()}
        inner = Interpreter(self.dispatcher, self.label, self.varying)
        outs, ctx = inner(jaxpr, dataclasses.replace(ctx, inputs=Inputs(values)), *args)
        return outs, dataclasses.replace(ctx, inputs=Inputs({}), draws=None, shared=None)


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


def _replicated(tree: Any) -> Any:
    return jax.tree.map(lambda _: PartitionSpec(), tree)


def _record_specs(records: Records | None, places: dict[str, _Place]) -> Any:
    if records is None:
        return None

    def spec(place: _Place, x: Any, event_dim: int) -> Any:
        return None if x is None else place.placement.spec(len(x.shape), event_dim)

    return Records(
        {
            name: Record(
                spec(places[name], r.value, len(r.value.shape) - places[name].batch_ndim),
                spec(places[name], r.log_prob, 0),
                spec(places[name], r.active, 0),
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
        value = mesh.psum_over(value, here)
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
    return jax.tree.map(lambda x: jnp.expand_dims(x, place.batch_ndim - 1), record)
