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
    dtype = canonical_dtype(leaf)
    pieces = []
    for (start, stop), holders in devices.items():
        rows = _read(name, leaf, sources(start, stop), dtype)
        pieces += [jax.device_put(rows, device) for device in holders]
    return jax.make_array_from_single_device_arrays(shape, sharding, pieces, dtype=dtype)


def canonical_dtype(leaf: Any) -> np.dtype:
    """The dtype that JAX gives to the numbers of a leaf."""
    return jax.dtypes.canonicalize_dtype(np.dtype(leaf.dtype).newbyteorder("="))


def _read(name: str, leaf: Any, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Some rows of a leaf, in memory of their own; what is read at once is no longer than they are."""
    out = np.empty((len(rows), *leaf.shape[1:]), dtype)
    if isinstance(leaf, Array):
        _copy_from_devices(name, leaf, rows, out)
        return out
    if isinstance(leaf, np.ndarray):
        _copy(name, np.asarray(leaf[rows]), out, slice(None))
        return out
    for start in range(rows.min(), rows.max() + 1, len(rows)):
        here = (start <= rows) & (rows < start + len(rows))
        if here.any():
            first, last = rows[here].min(), rows[here].max()
            _copy(name, np.asarray(leaf[int(first) : int(last) + 1])[rows[here] - first], out, here)
    return out


def _copy(name: str, numbers: np.ndarray, out: np.ndarray, at: Any) -> None:
    """Write numbers into ``out``; floats are rounded to its dtype as JAX rounds them.

    Raises:
        DTypeError: integers are too large for it.
    """
    out[at] = numbers
    if numbers.dtype.kind in "iu" and numbers.dtype != out.dtype and not np.array_equal(out[at], numbers):
        raise DTypeError(
            f"{name} holds integers that do not fit into JAX's dtype for them",
            expected=f"numbers of {out.dtype}",
            found=f"{numbers.dtype}, from {numbers.min()} to {numbers.max()}",
            fix='jax.config.update("jax_enable_x64", True), or number what they stand for from 0',
        )


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
