"""How a sampler sees a position: replicated latents as one vector, and each sharded latent by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

VECTOR = ""  # no site has this name


@dataclass(frozen=True)
class Coordinates:
    """The layout of a position; hashable.

    Attributes:
        replicated: name, shape and dtype of each latent that is the same on all devices, in the order of the vector.
        sharded: the same of each latent whose pieces lie on the shards.
    """

    replicated: tuple[tuple[str, tuple[int, ...], Any], ...]
    sharded: tuple[tuple[str, tuple[int, ...], Any], ...]

    @property
    def size(self) -> int:
        """The number of scalars in a position."""
        return self.vector_size + sum(math.prod(shape) for _, shape, _ in self.sharded)

    @property
    def vector_size(self) -> int:
        """The number of scalars in the vector."""
        return sum(math.prod(shape) for _, shape, _ in self.replicated)

    def pack(self, position: dict[str, Array]) -> dict[str, Array]:
        """From arrays by site to a vector and the sharded arrays, all in the default float dtype."""
        dtype = jnp.result_type(float)
        packed = {name: position[name].astype(dtype) for name, *_ in self.sharded}
        if self.replicated:
            packed[VECTOR] = jnp.concatenate([position[name].astype(dtype).reshape(-1) for name, *_ in self.replicated])
        return packed

    def pack_rows(self, make: Callable[[str, tuple[int, ...]], Array]) -> dict[str, Array]:
        """Packs what ``make(name, shape)`` returns for each latent: arrays with one more leading axis."""
        packed = {name: make(name, shape) for name, shape, _ in self.sharded}
        if self.replicated:
            rows = [make(name, shape) for name, shape, _ in self.replicated]
            packed[VECTOR] = jnp.concatenate([x.reshape(x.shape[0], -1) for x in rows], axis=1)
        return packed

    def unpack(self, packed: dict[str, Array]) -> dict[str, Array]:
        """From a vector and the sharded arrays to arrays by site, each of its site's dtype."""
        position = {name: packed[name].astype(dtype) for name, _, dtype in self.sharded}
        if self.replicated:
            vector, start = _whole(packed[VECTOR]), 0
            for name, shape, dtype in self.replicated:
                size = math.prod(shape)
                position[name] = vector[start : start + size].reshape(shape).astype(dtype)
                start += size
        return position


def coordinates_of(target: Any) -> Coordinates:
    """The layout of a target's positions."""
    latents = target.program.named("sample")
    types = target.position_type
    described = {name: (name, types[name].shape, types[name].dtype) for name in latents}
    sharded = tuple(described[name] for name, occurrence in latents.items() if occurrence.axes)
    return Coordinates(tuple(d for d in described.values() if d not in sharded), sharded)


def _whole(vector: Array) -> Array:
    """Keeps the compiler from sharding the vector on Auto axes: it would move parts of it around in every step."""
    if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
        return jax.lax.with_sharding_constraint(vector, PartitionSpec())
    return vector
