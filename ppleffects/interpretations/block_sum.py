"""A sum over blocks of rows whose derivative is found on the way: value and gradient in one pass over the rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero

from ppleffects.effects import Interpreter, _jax, default_dispatcher, mesh, tracing
from ppleffects.interpretations.parts import Axes, add_compensated, sum_pairwise
from ppleffects.language.blocked import length_of, types_with_rows

type Sums = dict[Axes, Array]
type Terms = Callable[..., Sums]
type RowAxes = Sequence[int | None]


def sum_over_blocks(block: Terms, rest: Terms | None, rows: int, axes: RowAxes, operands: Sequence[Array]) -> Sums:
    """Returns ``sum_i block(rows of block i) + rest(the rows that are left)``.

    The derivative of a block is taken right after its value, and added up beside it. So the reverse pass reads no rows,
    and nothing is kept but the sums, and for rows that are differentiated a slope for each.

    Args:
        block: from the operands, those with rows cut to ``rows`` of them, to one scalar for each set of mesh axes.
        rest: the same for the last rows, fewer than ``rows``; None if there are none.
        rows: rows of a block.
        axes: for each operand the axis of its rows, or None.
        operands: arrays.
    """
    length = length_of(operands, axes)
    count = length // rows
    left = length - count * rows
    sizes = {rows: block} if rest is None else {rows: block, left: rest}
    traced = [tracing.trace(terms, *types_with_rows(operands, axes, size)) for size, terms in sizes.items()]
    everywhere = frozenset().union(*map(_jax.varying, operands))
    parts: list[Terms] = list(traced)
    if everywhere and all(frozenset(key) == everywhere for t in traced for key in t.abstract_result):
        # Cast here, slopes along what is the same on all shards are summed over them once, and not once in each block.
        operands = [mesh.cast_varying(x, everywhere) for x in operands]
        parts = [_varying(t, everywhere) for t in traced]
    while_p = _jax.CONTROL_FLOW["while"]
    reversible = while_p not in _jax.primitives_in(traced[0].jaxpr)
    whole = _Blocks(parts[0], tuple(traced[0].abstract_result), reversible, count, rows, axes)
    sums = whole.total()(*operands)
    for last in parts[1:]:
        added = last(*_cut(operands, axes, count * rows, left))
        sums = {key: sums[key] + added[key] for key in sums}
    return sums


def _cut(operands: Sequence[Array], axes: RowAxes, start: Any, size: int) -> list[Array]:
    pairs = zip(operands, axes, strict=True)
    return [x if axis is None else lax.dynamic_slice_in_dim(x, start, size, axis=axis) for x, axis in pairs]


def _varying(traced: tracing.Traced, axes: frozenset[str]) -> Terms:
    """The same function of operands that all vary over ``axes``, as its results do."""
    interpreter = Interpreter(default_dispatcher(), varying=axes)

    def terms(*operands):
        outs, _ = interpreter.run(traced.jaxpr, traced.consts, (), *operands)
        return jax.tree.unflatten(traced.out_tree, outs)

    return terms


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The sum over blocks of one size.

    Attributes:
        terms: the sums of one block.
        keys: which sums there are.
        reversible: whether JAX can differentiate ``terms`` in reverse for sure: a while loop may stand in the way.
        count: number of blocks.
        rows: rows of each.
        axes: for each operand the axis of its rows, or None.
    """

    terms: Terms
    keys: tuple[Axes, ...]
    reversible: bool
    count: int
    rows: int
    axes: RowAxes

    def total(self) -> Terms:
        """The sum as a function of the operands, with its own rule for derivatives."""
        total = jax.custom_jvp(self.values)
        total.defjvp(self._rule, symbolic_zeros=True)
        return total

    def values(self, *operands: Array) -> Sums:
        """The sum, differentiated as any other function."""
        _, stacked = lax.scan(lambda _, i: (None, self.terms(*self._block(operands, i))), None, jnp.arange(self.count))
        return jax.tree.map(sum_pairwise, stacked)

    def _block(self, operands: Sequence[Array], number: Array) -> list[Array]:
        return _cut(operands, self.axes, number * self.rows, self.rows)

    def _rule(self, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Sums, Sums]:
        moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not SymbolicZero]
        directions = [tangents[i] for i in moving]
        if not self.reversible:
            along = lambda *moved: self.values(*_replaced(primals, moving, moved))  # noqa: E731
            return jax.jvp(along, [primals[i] for i in moving], directions)
        sums, slopes = self._with_slopes(primals, moving)
        return sums, {key: _along(slopes[key], directions, value) for key, value in sums.items()}

    def _with_slopes(self, operands: Sequence[Array], moving: Sequence[int]) -> tuple[Sums, dict[Axes, list[Array]]]:
        """The sums, and the slope of each along every operand that moves: of a block's rows, or of what all share."""
        own = [i for i in moving if self.axes[i] is not None]
        shared = [i for i in moving if self.axes[i] is None]

        @functools.partial(jax.checkpoint, prevent_cse=False)  # for slopes that are differentiated in reverse
        def block(*xs):
            values, pull = jax.vjp(lambda *moved: self.terms(*_replaced(xs, moving, moved)), *(xs[i] for i in moving))
            slopes = {key: dict(zip(moving, pull(_cotangent(key, values)), strict=True)) for key in self.keys}
            return values, slopes

        def step(added, number):
            values, slopes = block(*self._block(operands, number))
            added = {key: {i: add_compensated(added[key][i], slopes[key][i]) for i in shared} for key in self.keys}
            return added, (values, {key: {i: slopes[key][i] for i in own} for key in self.keys})

        zeros = {i: _zeros_like(operands[i]) for i in shared}
        begun = {key: {i: (zero, zero) for i, zero in zeros.items()} for key in self.keys}
        added, (values, stacked) = lax.scan(step, begun, jnp.arange(self.count))

        def slope(key: Axes, i: int) -> Array:
            axis = self.axes[i]
            if axis is None:
                value, error = added[key][i]
                return value + error
            return _joined(stacked[key][i], axis, operands[i].shape[axis])

        return jax.tree.map(sum_pairwise, values), {key: [slope(key, i) for i in moving] for key in self.keys}


def _replaced(xs: Sequence[Array], at: Sequence[int], new: Sequence[Array]) -> list[Array]:
    found = dict(zip(at, new, strict=True))
    return [found.get(i, x) for i, x in enumerate(xs)]


def _cotangent(key: Axes, values: Sums) -> Sums:
    """One for one of the sums, zero for the others."""
    return {k: mesh.cast_varying(jnp.full((), float(k == key), v.dtype), _jax.varying(v)) for k, v in values.items()}


def _zeros_like(x: Array) -> Array:
    return mesh.placed_like(mesh.cast_varying(jnp.zeros(x.shape, x.dtype), _jax.varying(x)), jax.typeof(x))


def _joined(stacked: Array, axis: int, length: int) -> Array:
    """The slopes of all rows from those of each block; zero for rows that are in none."""
    moved = jnp.moveaxis(stacked, 0, axis)
    joined = moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
    left = length - joined.shape[axis]
    return jnp.pad(joined, [(0, left if i == axis else 0) for i in range(joined.ndim)]) if left else joined


def _along(slopes: Sequence[Array], directions: Sequence[Any], value: Array) -> Array:
    """The derivative of a sum along a direction of all operands."""
    total = sum(jnp.sum(slope * direction) for slope, direction in zip(slopes, directions, strict=True))
    total = jnp.asarray(jnp.real(total), value.dtype)
    return mesh.cast_varying(total, _jax.varying(value))
