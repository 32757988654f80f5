"""Rows of a table read shard by shard and put on the devices, never the whole of it in one place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

from ppleffects.errors import DTypeError, MeshError

# What is no array in memory is read in slices of so many bytes at most, and no longer than a shard.
MAX_BYTES = 2**26

# For padded rows from a first to before a last one: the numbers of the rows to read for them.
type Sources = Callable[[int, int], np.ndarray]


def place(name: str, leaf: Any, num_padded: int, sharding: NamedSharding, sources: Sources) -> Array:
    """An array of padded rows on the mesh.

    Args:
        name: what the leaf is called in messages.
        leaf: anything with ``shape``, ``dtype`` and slices.
        num_padded: number of rows on the mesh.
        sharding: along the leading axis.
        sources: the rows to read.

    Raises:
        DTypeError: a number does not fit into the dtype that JAX has for it.
        MeshError: the leaf lies on devices of other processes and would have to be padded.
    """
    shape = (num_padded, *leaf.shape[1:])
    fits = isinstance(leaf, Array) and leaf.shape == shape
    if fits and np.array_equal(sources(0, num_padded), np.arange(num_padded)):
        return jax.device_put(leaf, sharding)
    devices: dict[tuple[int, int], list[Any]] = {}  # by the rows that they hold, so that each row is read once
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        start, stop, _ = index[0].indices(num_padded)  # pyright: ignore[reportOptionalSubscript]
        devices.setdefault((start, stop), []).append(device)
    dtype = jax.dtypes.canonicalize_dtype(np.dtype(leaf.dtype).newbyteorder("="))
    pieces: list[Array] = []
    for (start, stop), holders in devices.items():
        pieces += _put(_cast(name, _read(name, leaf, sources(start, stop)), dtype), holders)
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=dtype)


def _put(rows: np.ndarray, devices: list[Any]) -> list[Array]:
    return [jax.device_put(rows, device) for device in devices]


def _cast(name: str, numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers in JAX's dtype for them; floats are rounded, as JAX does.

    Raises:
        DTypeError: integers are too large for it.
    """
    cast = numbers.astype(dtype, copy=False)
    if numbers.dtype.kind in "iu" and not np.array_equal(cast, numbers):
        raise DTypeError(
            f"{name} holds integers that do not fit into JAX's dtype for them",
            expected=f"numbers of {dtype}",
            found=f"{numbers.dtype}, {numbers[cast != numbers].flat[0]} among them",
            fix='jax.config.update("jax_enable_x64", True), or number what they stand for from 0',
        )
    return cast


def _read(name: str, leaf: Any, rows: np.ndarray) -> np.ndarray:
    """Some rows of a leaf, in memory of their own."""
    if isinstance(leaf, np.ndarray):
        return np.asarray(leaf[rows])
    out = np.empty((len(rows), *leaf.shape[1:]), leaf.dtype)
    if isinstance(leaf, Array):
        _copy_from_devices(name, leaf, rows, out)
        return out
    step = min(len(rows), max(1, MAX_BYTES // max(1, out[:1].nbytes)))
    for start in range(rows.min(), rows.max() + 1, step):
        here = (start <= rows) & (rows < start + step)
        if here.any():
            first, last = int(rows[here].min()), int(rows[here].max())
            out[here] = np.asarray(leaf[first : last + 1])[rows[here] - first]
    return out


def _copy_from_devices(name: str, leaf: Array, rows: np.ndarray, out: np.ndarray) -> None:
    """Read rows of an array on devices from the pieces that this process holds.

    Raises:
        MeshError: it does not hold all of them.
    """
    found = np.zeros(len(rows), bool)
    for piece in leaf.addressable_shards:
        if piece.replica_id and leaf.is_fully_addressable:
            continue
        start, stop, _ = piece.index[0].indices(leaf.shape[0])
        here = (start <= rows) & (rows < stop)
        if here.any():
            out[(here, *piece.index[1:])] = np.asarray(piece.data[jnp.asarray(rows[here] - start)])
            found |= here
    if not found.all():
        raise MeshError(
            f"{name} lies on devices of several processes, and its rows would have to move between them",
            expected="a number of rows that the size of the mesh axis divides, or arrays that each process can read",
            found=f"{leaf.shape[0]} rows, laid out by {leaf.sharding}",
            fix="give NumPy arrays or files that every process can read; or, with local=True, each process its own",
        )
