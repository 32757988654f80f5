"""The metric of a sampler: a diagonal scale and a few directions, over positions with sharded leaves.

The inverse mass matrix is ``L L'`` with ``L = D S``, ``D`` a diagonal and ``S = I + U (sqrt(V) - 1) U'`` for a few
orthonormal directions ``U``. A sampler integrates in the momentum ``p = L' r``, which is standard normal, so that
kinetic energies and U-turns are plain sums of products, whatever the metric.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.inference.coordinates import VECTOR

type Tree = dict[str, Array]


class Metric(NamedTuple):
    """The factor ``L`` of an inverse mass matrix.

    Attributes:
        scale: the diagonal of ``D``; leaves and shapes of a position.
        vectors: ``U'`` for the vector of replicated latents, ``(direction, coordinate)``, or None. Sharded latents
            have a diagonal alone.
        values: ``V``, the eigenvalues along the directions; 1 where a direction is not used. ``(direction,)``, or None.
    """

    scale: Tree
    vectors: Array | None = None
    values: Array | None = None


def dot(a: Tree, b: Tree) -> Array:
    """The sum of products of two trees."""
    products = jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)
    return sum(jax.tree.leaves(products), start=jnp.zeros(()))


def times(a: Tree, b: Tree) -> Tree:
    """The product, entry by entry."""
    return jax.tree.map(jnp.multiply, a, b)


def _stretched(metric: Metric, x: Tree, power: float) -> Tree:
    """``(I + U (V**power - 1) U') x``."""
    if metric.vectors is None or metric.values is None:
        return x
    weights = (metric.values**power - 1.0) * (metric.vectors @ x[VECTOR])
    return {**x, VECTOR: x[VECTOR] + weights @ metric.vectors}


def velocity(metric: Metric, momentum: Tree) -> Tree:
    """``L p``: the direction in which a position moves."""
    return times(metric.scale, _stretched(metric, momentum, 0.5))


def force(metric: Metric, gradient: Tree) -> Tree:
    """``L' g``: the change of the momentum by a gradient of the log-density."""
    return _stretched(metric, times(metric.scale, gradient), 0.5)
