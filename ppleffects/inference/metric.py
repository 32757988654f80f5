"""The metric of a sampler: a diagonal scale and some directions, over positions with sharded leaves.

The inverse mass matrix is ``L L'`` with ``L = D S``, ``D`` a diagonal and ``S = I + U (sqrt(V) - 1) U'`` for
orthonormal directions ``U``. A sampler integrates in the momentum ``p = L' r``, which is standard normal, so that
kinetic energies and U-turns are plain sums of products, whatever the metric.

What a sampler knows of a momentum's and a force's components along the directions it hands on: a leapfrog step then
projects once, which takes one sum over the mesh where latents are sharded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.inference.coordinates import VECTOR

type Tree = dict[str, Array]


@dataclass(frozen=True)
class Shape:
    """What a metric has beside its diagonal; known when the program is compiled.

    Attributes:
        num_directions: directions that it has room for.
        cutoff: a direction is used whose eigenvalue differs from 1 by more than this factor.
        blocks: for each coordinate of the vector its block, where directions reach into one block each.
        wide: whether directions reach all leaves, and not the vector alone.
    """

    num_directions: int = 0
    cutoff: float = 1.0
    blocks: tuple[int, ...] | None = None
    wide: bool = False


class Metric(NamedTuple):
    """The factor ``L`` of an inverse mass matrix.

    Attributes:
        scale: the diagonal of ``D``; leaves and shapes of a position.
        vectors: ``U'`` by leaf, for those leaves that the directions reach. ``(direction, *leaf)``
        values: ``V``, the eigenvalues along the directions; 1 where a direction is not used. ``(direction,)``
    """

    scale: Tree
    vectors: Tree
    values: Array


class Pull(NamedTuple):
    """A vector in the metric's coordinates, a momentum or a force.

    Attributes:
        whole: leaves and shapes of a position.
        along: its components along the directions. ``(direction,)``
    """

    whole: Tree
    along: Array


def identity(position: Tree, shape: Shape) -> Metric:
    """The metric that changes nothing, with room for the directions.

    Chains begin with it: a scale from the gradient at a remote start makes trajectories so short that they end in the
    nearest mode.
    """
    leaves = position if shape.wide else {name: x for name, x in position.items() if name == VECTOR}
    count = shape.num_directions
    vectors = {name: jnp.broadcast_to(jnp.zeros_like(x), (count, *x.shape)) for name, x in leaves.items()}
    return Metric(jax.tree.map(jnp.ones_like, position), vectors if count else {}, jnp.ones(count))


def dot(a: Tree, b: Tree) -> Array:
    """The sum of products of two trees."""
    products = jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)
    return sum(jax.tree.leaves(products), start=jnp.zeros(()))


def times(a: Tree, b: Tree) -> Tree:
    """The product, entry by entry."""
    return jax.tree.map(jnp.multiply, a, b)


def components(metric: Metric, x: Tree) -> Array:
    """``U' x``."""
    return projections(metric.vectors, x) if metric.vectors else jnp.zeros_like(metric.values)


def projections(rows: Tree, x: Tree) -> Array:
    """The inner products of ``x`` with trees on a leading axis, over the leaves that these have."""
    parts = [_projected(each, x[name]) for name, each in rows.items()]
    return sum(parts[1:], start=parts[0])


def _projected(rows: Array, x: Array) -> Array:
    """The inner product of ``x`` with each row; on shards no matrix product, whose result JAX asks to place."""
    return rows @ x if x.ndim == 1 and not is_sharded(x) else jnp.sum(rows * x[None], tuple(range(1, rows.ndim)))


def velocity(metric: Metric, momentum: Pull) -> Tree:
    """``L p``: the direction in which a position moves."""
    return times(metric.scale, _stretched(metric, momentum.whole, momentum.along))


def force(metric: Metric, gradient: Tree) -> Pull:
    """``L' g``: the change of the momentum by a gradient of the log-density."""
    scaled = times(metric.scale, gradient)
    along = components(metric, scaled)
    return Pull(_stretched(metric, scaled, along), jnp.sqrt(metric.values) * along)


def _stretched(metric: Metric, x: Tree, along: Array) -> Tree:
    """``(I + U (sqrt(V) - 1) U') x``, of an ``x`` with these components along ``U``."""
    weights = (jnp.sqrt(metric.values) - 1.0) * along
    return x | {name: x[name] + jnp.tensordot(weights, vectors, 1) for name, vectors in metric.vectors.items()}


def is_sharded(x: Array) -> bool:
    """Whether an array is known to lie on the shards of an Explicit mesh."""
    return any(part is not None for part in getattr(jax.typeof(x).sharding, "spec", ()))
