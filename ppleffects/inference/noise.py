"""What trajectories begin with: momenta, first directions and keys, drawn for several at once."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ppleffects.inference.coordinates import VECTOR, Coordinates
from ppleffects.inference.metric import Tree
from ppleffects.interpretations.draw import name_digest

# Momenta are drawn for at most so many trajectories at once, and for one where they have more scalars than this.
MAX_NOISE_DRAWS, MAX_NOISE = 512, 8192
# Where numbers that a chain's key is folded with are in their upper half.
UPPER = np.uint32(2**31)


class Noise(NamedTuple):
    """What the next trajectories of a chain begin with, drawn for several at once.

    Attributes:
        momenta: standard normal. ``(trajectory, *leaf)``
        forward: first directions. ``(trajectory,)``
        keys: what else is random in each. ``(trajectory,)``
    """

    momenta: Tree
    forward: Array
    keys: Array


def noise_length(size: int) -> int:
    """For how many trajectories noise is drawn at once, where positions have so many scalars."""
    return int(np.clip(MAX_NOISE // max(size, 1), 1, MAX_NOISE_DRAWS))


def draw_noise(coordinates: Coordinates, key: Array, number: Array, length: int) -> Noise:
    """What trajectories of one block begin with; a site's depends on no other, nor on where it lies.

    Replicated latents of one size are drawn at once: it is one program to compile.

    Args:
        coordinates: the layout of a position.
        key: the chain's key.
        number: of a trajectory; noise is drawn for those of its block of ``length``.
        length: trajectories to draw for.
    """
    dtype = jnp.result_type(float)
    names = [VECTOR, *(name for name, *_ in (*coordinates.replicated, *coordinates.sharded))]
    # The upper half of all numbers is apart from those that starts, or here trajectories, are numbered by.
    block = jax.random.fold_in(key, UPPER + quotient(number, length).astype(jnp.uint32))
    digests = UPPER | jnp.asarray([name_digest(name) for name in names], jnp.uint32)
    numbers = jnp.concatenate([digests, jnp.arange(length, dtype=jnp.uint32)])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(block, numbers)
    of_name = dict(zip(names, keys[: len(names)], strict=True))

    def draw(key: Array, *shape: int) -> Array:
        least = float(np.nextafter(np.asarray(-1, dtype), np.asarray(0, dtype)))
        return jax.random.uniform(key, (length, *shape), dtype, least, 1.0)

    alike: dict[int, list[str]] = {1: [VECTOR]}
    for name, shape, _ in coordinates.replicated:
        alike.setdefault(math.prod(shape), []).append(name)
    drawn = {name: draw(of_name[name], *shape) for name, shape, *_ in coordinates.sharded}
    for size, group in alike.items():
        rows = jax.vmap(lambda key, size=size: draw(key, size))(jnp.stack([of_name[name] for name in group]))
        drawn |= dict(zip(group, rows, strict=True))
    packed = coordinates.pack_rows(lambda name, shape: drawn[name].reshape(length, *shape))
    momenta = jax.tree.map(lambda u: np.asarray(np.sqrt(2), dtype) * jax.lax.erf_inv(u), packed)
    return Noise(momenta, drawn[VECTOR].reshape(length) < 0, keys[len(names) :])


def quotient(number: Array, divisor: int) -> Array:
    """Of a number that is not negative, which takes one operation."""
    return jax.lax.div(number, jnp.asarray(divisor, number.dtype))
