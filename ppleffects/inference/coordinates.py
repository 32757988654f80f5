"""How a sampler sees a position: replicated latents as one vector, and each sharded latent by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ppleffects.effects._jax import spec_axes
from ppleffects.interpretations.layout import Occurrence

VECTOR = ""  # no site has this name


@dataclass(frozen=True)
class Coordinates:
    """The layout of a position; hashable.

    Attributes:
        replicated: name, shape and dtype of each latent that is the same on all devices, in the order of the vector.
        sharded: the same of each latent whose pieces lie on the shards, and how they do.
    """

    replicated: tuple[tuple[str, tuple[int, ...], Any], ...]
    sharded: tuple[tuple[str, tuple[int, ...], Any, PartitionSpec], ...]

    @property
    def size(self) -> int:
        """The number of scalars in a position."""
        return self.vector_size + sum(math.prod(shape) for _, shape, *_ in self.sharded)

    @property
    def vector_size(self) -> int:
        """The number of scalars in the vector."""
        return sum(math.prod(shape) for _, shape, _ in self.replicated)

    def pack(self, position: dict[str, Array]) -> dict[str, Array]:
        """From arrays by site to a vector and the sharded arrays, all in the default float dtype."""
        dtype = jnp.result_type(float)
        packed = {name: _laid_out(position[name].astype(dtype), spec) for name, *_, spec in self.sharded}
        if self.replicated:
            packed[VECTOR] = jnp.concatenate([position[name].astype(dtype).reshape(-1) for name, *_ in self.replicated])
        return packed

    def pack_rows(self, make: Callable[[str, tuple[int, ...]], Array]) -> dict[str, Array]:
        """Packs what ``make(name, shape)`` returns for each latent: arrays with one more leading axis."""
        packed = {
            name: _laid_out(make(name, shape), PartitionSpec(None, *spec)) for name, shape, _, spec in self.sharded
        }
        if self.replicated:
            rows = [make(name, shape) for name, shape, _ in self.replicated]
            packed[VECTOR] = jnp.concatenate([x.reshape(x.shape[0], -1) for x in rows], axis=1)
        return packed

    def laid_out(self, packed: dict[str, Array], *, leading: int = 0) -> dict[str, Array]:
        """Keeps the sharded arrays of a packed tree, which may have further leading axes, on the shards.

        What is computed from others follows them; constants would be whole on every device.
        """
        specs = {name: PartitionSpec(*[None] * leading, *spec) for name, *_, spec in self.sharded}
        return {name: _laid_out(x, specs[name]) if name in specs else x for name, x in packed.items()}

    def spec_of(self, path: str, ndim: int, leading: PartitionSpec) -> PartitionSpec | None:
        """How an array of a sampler's state lies on the mesh; None where it is whole on the devices of its chains.

        Args:
            path: of the array in the state, as JAX writes it.
            ndim: the number of its axes.
            leading: how the first of them, that of chains, lies.
        """
        for name, shape, _, spec in self.sharded:
            if path.endswith(f"['{name}']"):
                return PartitionSpec(*leading, *[None] * (ndim - len(shape) - len(leading)), *spec)
        return None

    def unpack(self, packed: dict[str, Array]) -> dict[str, Array]:
        """From a vector and the sharded arrays to arrays by site, each of its site's dtype."""
        position = {name: _laid_out(packed[name], spec).astype(dtype) for name, _, dtype, spec in self.sharded}
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
    sharded = tuple((*described[name], _spec(o, len(types[name].shape))) for name, o in latents.items() if o.axes)
    return Coordinates(tuple(described[name] for name, o in latents.items() if not o.axes), sharded)


def _spec(occurrence: Occurrence, ndim: int) -> PartitionSpec:
    """How the unconstrained value of a latent lies on the mesh; within nested shard_maps the compiler decides."""
    if len(occurrence.shards) != 1:
        return PartitionSpec()
    whole = len(occurrence.layout()[0]) - occurrence.site.event_dim
    return occurrence.placement(occurrence.shards[0]).spec(ndim, ndim - whole)


def _laid_out(x: Array, spec: PartitionSpec) -> Array:
    """Lays an array on the axes of the mesh that are not manual here; a latent would else be whole on every device."""
    mesh = jax.sharding.get_abstract_mesh()
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    kinds = {types.get(axis) for axis in spec_axes(spec)}
    if kinds == {AxisType.Explicit}:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return jax.lax.with_sharding_constraint(x, spec) if kinds == {AxisType.Auto} else x


def _whole(vector: Array) -> Array:
    """Keeps the compiler from sharding the vector on Auto axes: it would move parts of it around in every step."""
    if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
        return jax.lax.with_sharding_constraint(vector, PartitionSpec())
    return vector
