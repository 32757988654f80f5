"""Contexts: what a program writes, and how it passes loops, branches and shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Self, override

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from ppleffects.effects import Crossing, Part, varying
from ppleffects.errors import DuplicateSiteError, ShapeError, UnsupportedPrimitiveError


class Written(Part):
    """What a program writes: nothing enters a body, and what a step, branch or shard has written joins the rest."""

    def empty(self) -> Self:
        """Returns the part with nothing written."""
        raise NotImplementedError

    def out_of_shards(self, axes: tuple[str, ...], checked: bool) -> Self:
        """Returns, inside of a ``shard_map`` over ``axes``, what leaves it; ``checked``: types say what varies."""
        raise NotImplementedError

    def specs(self, axes: tuple[str, ...]) -> Self:
        """Returns the partition specs by which it leaves."""
        return jax.tree.map(lambda _: P(), self)

    @override
    def enter(self, frame):
        return Crossing()

    @override
    def inside(self, frame, crossing):
        return self.empty()


# --- numbers that are added up ----------------------------------------------------------------------------------------


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums(Written):
    """Numbers that are added up by name: over the steps of loops, of the branch that is taken, over shards.

    Attributes:
        terms: the sums so far.
        dtype: ``int`` or ``float``.
        over_shards: how the sums of the shards become one.
    """

    terms: dict[str, Any] = dataclasses.field(default_factory=dict)
    dtype: type = dataclasses.field(default=int, metadata={"static": True})
    over_shards: Callable[..., Any] = dataclasses.field(default=lax.psum, metadata={"static": True})

    def plus(self, terms: Mapping[str, Any]) -> Sums:
        """Returns the sums with more terms."""
        added = {name: self.terms[name] + x if name in self.terms else x for name, x in terms.items()}
        return dataclasses.replace(self, terms={**self.terms, **added})

    @override
    def empty(self):
        return dataclasses.replace(self, terms={})

    @override
    def leave(self, frame):
        return (), {name: jnp.asarray(x, self.dtype) for name, x in self.terms.items()}

    @override
    def align(self, frame, emitted):
        zeros = {name: jnp.zeros((), self.dtype) for branch in emitted for name in branch}
        return [lambda terms: {**zeros, **terms} for _ in emitted]

    @override
    def select(self, frame, emitted):
        return functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), emitted)

    @override
    def rejoin(self, frame, carried, emitted):
        return self.plus(jax.tree.map(lambda x: jnp.sum(x, axis=0), emitted) if frame.kind == "scan" else emitted)

    @override
    def out_of_shards(self, axes, checked):
        def over(x):
            x = jnp.asarray(x, self.dtype)
            missing = tuple(a for a in axes if checked and a not in varying(x))
            return self.over_shards(lax.pcast(x, missing, to="varying") if missing else x, axes)

        return dataclasses.replace(self, terms={name: over(x) for name, x in self.terms.items()})


# --- values by name ---------------------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """A leading axis of an entry: a ``"step"`` of a scan, a ``"lane"`` of a vmap, or a ``"shard"``, and its name."""

    kind: str
    name: str


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Entry:
    """One named value, as it was on every step, lane and shard.

    Attributes:
        value: the values; leading axes are ``axes``. Where it was not reached: NaN, or zero if it is an integer.
        active: whether it was reached.
        axes: what the axes of ``active`` are: scans and shard_maps from the outermost to the innermost, then vmaps.
        source: ``file.py:line`` of the call.
    """

    value: Array
    active: Array
    axes: tuple[Axis, ...] = dataclasses.field(default=(), metadata={"static": True})
    source: str = dataclasses.field(default="", metadata={"static": True})

    def under(self, *axes: Axis) -> Entry:
        """Returns the entry, whose arrays have new leading axes, with the names of these."""
        return dataclasses.replace(self, axes=(*axes, *self.axes))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Records(Written):
    """Values by name: stacked along scans, one for each lane and shard, ``active`` on the branch that is taken."""

    entries: dict[str, Entry] = dataclasses.field(default_factory=dict)

    def plus(self, entries: Mapping[str, Entry]) -> Self:
        """Returns the records with more entries."""
        for name, entry in entries.items():
            if name in self.entries:
                raise DuplicateSiteError(
                    f"this name stands twice: at {self.entries[name].source} and at {entry.source}",
                    site=name,
                    source=entry.source,
                    expected="each name once (the branches of one cond may share a name)",
                    found="two calls, or one that is traced twice",
                    fix="give each its own name",
                )
        return dataclasses.replace(self, entries={**self.entries, **entries})

    @override
    def empty(self):
        return dataclasses.replace(self, entries={})

    @override
    def leave(self, frame):
        return (), self.entries

    @override
    def align(self, frame, emitted):
        models = {name: entry for branch in reversed(emitted) for name, entry in branch.items()}
        for name, entry in (item for branch in emitted for item in branch.items()):
            model = models[name].value
            if (entry.value.shape, entry.value.dtype) != (model.shape, model.dtype):
                raise ShapeError(
                    "the branches of a cond write different shapes or dtypes",
                    site=name,
                    source=entry.source,
                    expected=f"{model.dtype}{list(model.shape)}, as in the first branch",
                    found=f"{entry.value.dtype}{list(entry.value.shape)}",
                    fix="give each its own name",
                )

        def complete(entries):
            return {name: _like(model, entries.get(name)) for name, model in models.items()}

        return [complete for _ in emitted]

    @override
    def select(self, frame, emitted):
        return functools.reduce(lambda a, b: {name: _merged(a[name], b[name]) for name in a}, emitted)

    @override
    def accumulate(self, frame, total, emitted):
        for name, entry in emitted.items():
            raise UnsupportedPrimitiveError(
                "a while loop has an unknown number of steps, whose values cannot be stacked",
                site=name,
                source=entry.source,
                expected="a loop of known length",
                found="lax.while_loop, or lax.fori_loop with a traced number of steps",
                fix="use lax.scan, or write the value down after the loop",
            )
        return total

    @override
    def rejoin(self, frame, carried, emitted):
        steps = (Axis("step", "step"),) if frame.kind == "scan" else ()
        return self.plus({name: entry.under(*steps) for name, entry in emitted.items()})

    @override
    def out_of_shards(self, axes, checked):
        def stacked(entry):
            over = [a for a in axes if not checked or a in varying(entry.value) | varying(entry.active)]
            pieces = jax.tree.map(lambda x: jnp.expand_dims(x, tuple(range(len(over)))), entry)
            return pieces.under(*(Axis("shard", a) for a in over))

        return dataclasses.replace(self, entries={name: stacked(entry) for name, entry in self.entries.items()})

    @override
    def specs(self, axes):
        def spec(entry):
            over = [axis.name for axis in entry.axes if axis.kind == "shard" and axis.name in axes]
            return jax.tree.map(lambda _: P(*over), entry)

        return dataclasses.replace(self, entries={name: spec(entry) for name, entry in self.entries.items()})


def wide(active: Array, value: Array) -> Array:
    """Returns ``active`` with an axis of size 1 for each axis of one value."""
    return active.reshape(active.shape + (1,) * (value.ndim - active.ndim))


def _merged(first: Entry, other: Entry) -> Entry:
    """One entry of two branches of a cond of which each lane takes one."""
    value = jnp.where(wide(other.active, other.value), other.value, first.value)
    return dataclasses.replace(first, value=value, active=first.active | other.active)


def _like(model: Entry, entry: Entry | None) -> Entry:
    """Returns what a branch has written, or that it has written nothing, as an entry like those of other branches."""
    if entry is not None:
        return dataclasses.replace(model, value=entry.value, active=entry.active)
    missing = jnp.nan if jnp.issubdtype(model.value.dtype, jnp.inexact) else 0
    return dataclasses.replace(model, value=_full(model.value, missing), active=_full(model.active, False))


def _full(like: Any, fill: Any) -> Array:
    """An array of the shape, dtype and place on explicit mesh axes of ``like``, an array or its type."""
    sharding = (jax.typeof(like) if isinstance(like, Array) else like).sharding
    full = jnp.full(like.shape, fill, like.dtype)
    return jax.sharding.reshard(full, sharding) if any(sharding.spec) else full
