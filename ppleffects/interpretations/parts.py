"""The parts of a model's context: given values, keys for draws, records and the joint log density."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, override

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.effects import Crossing, Frame, Part, Shared, _jax, mesh
from ppleffects.errors import ShapeError, UnsupportedPrimitiveError
from ppleffects.interpretations.layout import occurrences

_register = jax.tree_util.register_dataclass


@_register
@dataclasses.dataclass(frozen=True)
class Inputs(Part):
    """Values that sites read by name: sliced along scans, passed to branches.

    Attributes:
        values: what has been given, by the name of the site.
    """

    values: dict[str, Array]

    def within(self, body: Any) -> dict[str, Array]:
        """The values of those sites that stand in ``body``."""
        names = {o.site.name for o in occurrences(body)}
        return {name: value for name, value in self.values.items() if name in names}

    @override
    def enter(self, frame):
        here = self.within(frame.body)
        return Crossing(sliced=here) if frame.kind == "scan" else Crossing(shared=here)

    @override
    def inside(self, frame, crossing):
        return Inputs(crossing.sliced if frame.kind == "scan" else crossing.shared)

    @override
    def leave(self, frame):
        return (), ()

    @override
    def rejoin(self, frame, carried, emitted):
        return self


@_register
@dataclasses.dataclass(frozen=True)
class Draws(Part):
    """The run's key, and the number of the step in each loop around the present equation, outermost first.

    Attributes:
        key: a typed key; it is folded, never split, so that no site's draw depends on another site.
        steps: scalars.
    """

    key: Array
    steps: tuple[Array, ...] = ()

    @override
    def enter(self, frame):
        if frame.kind == "scan":
            return Crossing(shared=(self.key, self.steps), sliced=jnp.arange(frame.length, dtype=jnp.uint32))
        start = jnp.uint32(0) if frame.kind == "while" else ()
        return Crossing(shared=(self.key, self.steps), carried=start)

    @override
    def inside(self, frame, crossing):
        key, steps = crossing.shared
        step = {"scan": crossing.sliced, "while": crossing.carried}.get(frame.kind)
        return Draws(key, steps if step is None else (*steps, step))

    @override
    def leave(self, frame):
        return (self.steps[-1] + jnp.uint32(1) if frame.kind == "while" else ()), ()

    @override
    def rejoin(self, frame, carried, emitted):
        return self


@_register
@dataclasses.dataclass(frozen=True)
class Record:
    """What is known of one site after a run.

    Attributes:
        value: its value; axes of lanes and loops in front.
        log_prob: pointwise log density, the value's non-event axes; None for deterministics.
        active: whether the site was reached, in the layout of ``log_prob``; None if it always is.
    """

    value: Array
    log_prob: Array | None = None
    active: Array | None = None


@_register
@dataclasses.dataclass(frozen=True)
class Records(Part):
    """What sites have written by name: stacked along scans, merged over the branches of a cond."""

    entries: dict[str, Record]

    @override
    def enter(self, frame):
        return Crossing()

    @override
    def inside(self, frame, crossing):
        return Records({})

    @override
    def leave(self, frame):
        return (), self.entries

    @override
    def align(self, frame, emitted):
        names = sorted({name for branch in emitted for name in branch})
        templates = {name: _common(frame, name, [branch.get(name) for branch in emitted]) for name in names}

        def complete(entries):
            return {name: _filled(entries.get(name), template) for name, template in templates.items()}

        return [complete for _ in emitted]

    @override
    def select(self, frame, emitted):
        return {name: _merged([branch[name] for branch in emitted]) for name in emitted[0]}

    @override
    def accumulate(self, frame, total, emitted):
        if emitted:
            name = next(iter(emitted))
            raise UnsupportedPrimitiveError(
                "a site inside of a while loop has an unknown number of values, which cannot be recorded",
                site=name,
                source=_source(frame, name),
                expected="an interpretation that records nothing, or a loop of known length",
                found="'while'",
                fix="use ppl.log_density, which sums them, or lax.scan, whose length is known",
            )
        return total

    @override
    def rejoin(self, frame, carried, emitted):
        return Records({**self.entries, **emitted})


def _source(frame: Frame, name: str) -> str | None:
    """The line of a site that stands in the bodies of a frame's equation."""
    found = (o.site for body in _jax.bodies(frame.eqn) for o in occurrences(body))
    return next((site.source for site in found if site.name == name), None)


def _common(frame: Frame, name: str, branches: Sequence[Record | None]) -> tuple[Record, bool]:
    """The abstract record of a site that some branches write, and whether all write it."""
    present = [record for record in branches if record is not None]
    shapes = {(record.value.shape, record.value.dtype) for record in present}
    if len(shapes) > 1:
        raise ShapeError(
            "the branches of a cond give this site different shapes or dtypes",
            site=name,
            source=_source(frame, name),
            expected="one shape and dtype in all branches",
            found=", ".join(f"{dtype}{list(shape)}" for shape, dtype in sorted(shapes, key=str)),
            fix="give the site one shape in all branches, or another name in each",
        )
    always = len(present) == len(branches) and all(record.active is None for record in present)
    return present[0], always


def _filled(record: Record | None, template: tuple[Record, bool]) -> Record:
    like, always = template
    shape = like.value.shape if like.log_prob is None else like.log_prob.shape
    rows = like.value if like.log_prob is None else like.log_prob
    if record is None:
        missing = jnp.nan if jnp.issubdtype(like.value.dtype, jnp.inexact) else 0
        value = mesh.placed_like(jnp.full(like.value.shape, missing, like.value.dtype), _aval(like.value))
        zeros = None
        if like.log_prob is not None:
            zeros = mesh.placed_like(jnp.zeros(shape, like.log_prob.dtype), _aval(like.log_prob))
        return Record(value, zeros, mesh.placed_like(jnp.zeros(shape, bool), _aval(rows)))
    if always or record.active is not None:
        return record
    return Record(record.value, record.log_prob, mesh.placed_like(jnp.ones(shape, bool), _aval(rows)))


def _aval(x: Any) -> Any:
    """The type of an array, or of what is a type already."""
    return jax.typeof(x) if isinstance(x, jax.Array) else x


def _merged(branches: Sequence[Record]) -> Record:
    """One record of branches of which each lane takes one; all say where they are active."""
    first, *others = branches
    for other in others:
        active = other.active
        if first.active is None or active is None:  # pragma: no cover - in lanes every record has it
            continue
        over_event = active.reshape(active.shape + (1,) * (other.value.ndim - active.ndim))
        log_prob = first.log_prob
        if log_prob is not None and other.log_prob is not None:
            log_prob = jnp.where(active, other.log_prob, log_prob)
        first = Record(jnp.where(over_event, other.value, first.value), log_prob, first.active | active)
    return first


type Axes = tuple[str, ...]


@_register
@dataclasses.dataclass(frozen=True)
class Totals(Part):
    """The joint log density so far: one sum for each set of mesh axes over which its terms vary.

    One sum for all would mix terms that vary with terms that do not; all of it would then vary, and sites that are the
    same on all shards would count once for each.

    Attributes:
        sums: scalars by sorted axes.
        manual: the axes that the model's own shard_maps have made manual here.
    """

    sums: dict[Axes, Array]
    manual: Axes = dataclasses.field(default=(), metadata={"static": True})

    def add(self, term: Array, axes: frozenset[str]) -> Totals:
        """Adds a scalar term that varies over ``axes``."""
        key = tuple(sorted(axes))
        return Totals({**self.sums, key: self.sums[key] + term if key in self.sums else term}, self.manual)

    def total(self) -> Array:
        """The sum of all sums."""
        sums = list(self.sums.values())
        if not sums:
            return jnp.zeros(())
        axes = frozenset().union(*map(_jax.varying, sums))
        return functools.reduce(jnp.add, [mesh.cast_varying(s, axes) for s in sums])

    @override
    def enter(self, frame):
        return Crossing()

    @override
    def inside(self, frame, crossing):
        return Totals({}, self.manual)

    @override
    def leave(self, frame):
        return (), self.sums

    @override
    def align(self, frame, emitted):
        types = {key: jnp.result_type(*(e[key].dtype for e in emitted if key in e)) for e in emitted for key in e}

        def complete(sums):
            return {k: jnp.asarray(sums[k], t) if k in sums else jnp.zeros((), t) for k, t in types.items()}

        return [complete for _ in emitted]

    @override
    def select(self, frame, emitted):
        return {key: functools.reduce(jnp.add, [branch[key] for branch in emitted]) for key in emitted[0]}

    @override
    def start(self, frame, zeros):
        return {key: (zero, zero) for key, zero in zeros.items()}

    @override
    def accumulate(self, frame, total, emitted):
        return {key: add_compensated(total[key], term) for key, term in emitted.items()}

    @override
    def rejoin(self, frame, carried, emitted):
        joined = self
        for key, value in emitted.items():
            if frame.kind == "scan":
                value = sum_pairwise(value)
            elif frame.kind == "while":
                value = value[0] + value[1]
            joined = joined.add(value, frame.axes.union(key))
        return joined


def sum_pairwise(terms: Array) -> Array:
    """The sum along axis 0, in blocks: the rounding error grows with the root of the length, not with the length."""
    length = terms.shape[0]
    block = 1024
    if length <= block:
        return jnp.sum(terms, axis=0)
    whole = length // block * block
    head = jnp.sum(jnp.sum(terms[:whole].reshape(-1, block, *terms.shape[1:]), axis=1), axis=0)
    return head + jnp.sum(terms[whole:], axis=0) if whole < length else head


def add_compensated(total: tuple[Array, Array], term: Array) -> tuple[Array, Array]:
    """Adds a term to a sum and its rounding error (Neumaier 1974), so that the error does not grow with the number."""
    value, error = total
    new = value + term
    lost = jnp.where(jnp.abs(value) >= jnp.abs(term), (value - new) + term, (term - new) + value)
    # The error is carried into the value as soon as it counts there; it would lose digits of its own otherwise.
    whole = new + (error + lost)
    finite = jnp.isfinite(new)  # the error of an infinite sum is no number
    return jnp.where(finite, whole, new), jnp.where(finite, (new - whole) + (error + lost), 0.0)


@_register
@dataclasses.dataclass(frozen=True)
class Context:
    """What an interpretation of a model passes through every equation.

    Attributes:
        inputs: values that sites read.
        draws: keys, if sites without a value are drawn.
        records: what sites write, if it is wanted.
        totals: the joint log density.
        shared: what a transformation of models passes to every site, if anything.
    """

    inputs: Inputs
    draws: Draws | None
    records: Records | None
    totals: Totals
    shared: Shared | None = None

    @property
    def entries(self) -> dict[str, Record]:
        """What sites have written; nothing if it is not wanted."""
        return {} if self.records is None else self.records.entries

    def written(self, name: str, record: Record) -> Context:
        """The context with one more record."""
        if self.records is None:
            return self
        return dataclasses.replace(self, records=Records({**self.records.entries, name: record}))

    def added(self, term: Array, axes: frozenset[str]) -> Context:
        """The context with one more term of the log density."""
        return dataclasses.replace(self, totals=self.totals.add(term, axes))
