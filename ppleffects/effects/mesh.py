"""Values and the axes of a mesh: casts of their types, sums over shards, and how they lie on explicit axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ppleffects.effects._jax import spec_axes, varying

# The axes of the caller's own shard_maps over which what is given to a model varies: its latents vary over them too. A
# jit inside of the model that was traced elsewhere is traced anew, since the context is part of JAX's cache keys.
ambient_axes = jax.make_user_context(default_value=())


def cast_varying(x: Array, axes: frozenset[str]) -> Array:
    """Types ``x`` as varying over ``axes`` too; the value stays."""
    missing = tuple(sorted(axes - varying(x)))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def sharding_spec(x: Any) -> P:
    """The explicit part of an array's type: how it lies on the explicit axes of the mesh."""
    return jax.typeof(x).sharding.spec


def placed_like(x: Array, aval: Any) -> Array:
    """Lays ``x`` on the explicit axes of the mesh as a traced program expects."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Explicit not in mesh.axis_types:
        return x
    spec = P(*(e if _explicit_only(mesh, e) else None for e in aval.sharding.spec))
    return x if sharding_spec(x) == spec else jax.sharding.reshard(x, NamedSharding(mesh, spec))


def _explicit_only(mesh: AbstractMesh, entry: Any) -> bool:
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    return entry is not None and all(types.get(a) == AxisType.Explicit for a in spec_axes(P(entry)))


def psum_over(x: Array, axes: frozenset[str]) -> Array:
    """The sum of ``x`` over ``axes``; the result is the same on all shards."""
    names = tuple(sorted(axes))
    return jax.lax.psum(x, names) if names else x


def of_first_shard(x: Array, axes: frozenset[str]) -> Array:
    """The value that ``x`` has on the first shard along ``axes``, typed as equal on all: to the bit, and derivable."""
    if not axes:
        return x
    names = tuple(sorted(axes))
    first = jnp.stack([jax.lax.axis_index(a) == 0 for a in names]).all()
    held = jnp.where(first, x, jnp.zeros_like(x))
    return jax.lax.psum(held.astype(int), names).astype(bool) if x.dtype == bool else jax.lax.psum(held, names)


def where_lane(flag: Array, x: Array, otherwise: Array) -> Array:
    """``x`` in the lanes (leading axes) where ``flag`` is True, ``otherwise`` in the others."""
    return jnp.where(flag.reshape(flag.shape + (1,) * (jnp.ndim(x) - flag.ndim)), x, otherwise)


def select_lane(index: Array, choices: Sequence[Array]) -> Array:
    """Of ``choices``, in each lane (leading axes) the one that ``index`` names."""
    result = choices[-1]
    for number in range(len(choices) - 2, -1, -1):
        result = where_lane(index == number, choices[number], result)
    return result
