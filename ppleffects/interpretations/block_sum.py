"""Sums over blocks of rows whose derivatives are found on the way: value and gradient in one pass over the rows."""

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
type Term = Callable[..., Array]
type RowAxes = Sequence[int | None]


def sum_over_blocks(
    block: Callable[..., Sums],
    rest: Callable[..., Sums] | None,
    rows: int,
    axes: RowAxes,
    operands: Sequence[Array],
) -> Sums:
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
    left = length % rows
    sizes = {rows: block} if rest is None else {rows: block, left: rest}
    traced = [tracing.trace(terms, *types_with_rows(operands, axes, size)) for size, terms in sizes.items()]
    sums = {}
    for key, aval in traced[0].abstract_result.items():
        # What is the same on all shards is cast here to what the sum varies over: its slopes are then those of a shard,
        # and are summed over the shards once, by the cast's own transpose, and not in each block.
        varying = _jax.varying(aval)
        cast = [mesh.cast_varying(x, varying) for x in operands]
        first, *last = (_term(t, key, varying) for t in traced)
        while_p = _jax.CONTROL_FLOW["while"]
        reversible = while_p not in _jax.primitives_in(traced[0].jaxpr)
        total = _Blocks(first, reversible, length // rows, rows, axes).total()(*cast)
        for term in last:
            pairs = zip(cast, axes, strict=True)
            total = total + term(*(x if a is None else lax.slice_in_dim(x, -left, None, axis=a) for x, a in pairs))
        sums[key] = total
    return sums


def _term(traced: tracing.Traced, key: Axes, axes: frozenset[str]) -> Term:
    """One of the sums of a block, as a function of operands that all vary over ``axes``, as the sum does."""
    interpreter = Interpreter(default_dispatcher(), varying=axes)

    def term(*operands):
        outs, _ = interpreter.run(traced.jaxpr, traced.consts, (), *operands)
        return jax.tree.unflatten(traced.out_tree, outs)[key]

    return term


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The sum over blocks of one size.

    Attributes:
        term: the sum of one block.
        reversible: whether JAX can differentiate ``term`` in reverse for sure: a while loop may stand in the way.
        count: number of blocks.
        rows: rows of each.
        axes: for each operand the axis of its rows, or None.
    """

    term: Term
    reversible: bool
    count: int
    rows: int
    axes: RowAxes

    def total(self) -> Term:
        """The sum as a function of the operands, with its own rule for derivatives."""
        total = jax.custom_jvp(self.value)
        total.defjvp(self._rule, symbolic_zeros=True)
        return total

    def value(self, *operands: Array) -> Array:
        """The sum, differentiated as any other function."""
        _, terms = lax.scan(lambda _, i: (None, self.term(*self._block(operands, i))), None, jnp.arange(self.count))
        return sum_pairwise(terms)

    def _block(self, operands: Sequence[Array], number: Array) -> list[Array]:
        pairs = zip(operands, self.axes, strict=True)
        start = number * self.rows
        return [x if a is None else lax.dynamic_slice_in_dim(x, start, self.rows, axis=a) for x, a in pairs]

    def _rule(self, primals: Sequence[Array], tangents: Sequence[Any]) -> tuple[Array, Array]:
        moving = [i for i, tangent in enumerate(tangents) if type(tangent) is not SymbolicZero]
        directions = [tangents[i] for i in moving]
        if not self.reversible:
            along = lambda *moved: self.value(*_replaced(primals, moving, moved))  # noqa: E731
            return jax.jvp(along, [primals[i] for i in moving], directions)
        value, slopes = self._with_slopes(primals, moving)
        return value, _along(slopes, directions, value)

    def _with_slopes(self, operands: Sequence[Array], moving: Sequence[int]) -> tuple[Array, list[Array]]:
        """The sum, and its slope along every operand that moves: of a block's rows, or of what all blocks share."""
        own = [i for i in moving if self.axes[i] is not None]
        shared = [i for i in moving if self.axes[i] is None]

        @functools.partial(jax.checkpoint, prevent_cse=False)  # for slopes that are differentiated in reverse
        def block(*xs):
            value, pull = jax.vjp(lambda *moved: self.term(*_replaced(xs, moving, moved)), *(xs[i] for i in moving))
            one = mesh.cast_varying(jnp.ones((), value.dtype), _jax.varying(value))
            return value, dict(zip(moving, pull(one), strict=True))

        def step(added, number):
            value, slopes = block(*self._block(operands, number))
            added = {i: add_compensated(added[i], slopes[i]) for i in shared}
            return added, (value, {i: slopes[i] for i in own})

        zeros = {i: _zeros_like(operands[i]) for i in shared}
        begun = {i: (zero, zero) for i, zero in zeros.items()}
        added, (values, stacked) = lax.scan(step, begun, jnp.arange(self.count))

        def slope(i: int) -> Array:
            axis = self.axes[i]
            if axis is None:
                value, error = added[i]
                return value + error
            return _joined(stacked[i], axis, operands[i].shape[axis])

        return sum_pairwise(values), [slope(i) for i in moving]


def _replaced(xs: Sequence[Array], at: Sequence[int], new: Sequence[Array]) -> list[Array]:
    found = dict(zip(at, new, strict=True))
    return [found.get(i, x) for i, x in enumerate(xs)]


def _zeros_like(x: Array) -> Array:
    return mesh.placed_like(mesh.cast_varying(jnp.zeros(x.shape, x.dtype), _jax.varying(x)), jax.typeof(x))


def _joined(stacked: Array, axis: int, length: int) -> Array:
    """The slopes of all rows from those of each block; zero for rows that are in none."""
    moved = jnp.moveaxis(stacked, 0, axis)
    joined = moved.reshape(*moved.shape[:axis], -1, *moved.shape[axis + 2 :])
    left = length - joined.shape[axis]
    return jnp.pad(joined, [(0, left if i == axis else 0) for i in range(joined.ndim)]) if left else joined


def _along(slopes: Sequence[Array], directions: Sequence[Any], value: Array) -> Array:
    """The derivative of a sum along a direction of all operands.

    Along an operand that varies over more mesh axes than the sum does, every shard's piece of it counts.
    """
    axes = _jax.varying(value)
    terms = [jnp.sum(slope * direction) for slope, direction in zip(slopes, directions, strict=True)]
    terms = [mesh.psum_over(term, _jax.varying(term) - axes) for term in terms]
    total = functools.reduce(jnp.add, terms) if terms else jnp.zeros(())
    return mesh.cast_varying(jnp.asarray(jnp.real(total), value.dtype), axes)
