"""Checksums of arrays that do not depend on how they lie on devices; with them, processes see that they agree."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppleffects.effects.structure import described
from ppleffects.errors import MeshError
from ppleffects.inference.processes import allgather, is_here

# Entries of data that are looked at at once: few enough for a processor's cache.
BLOCK = 2**16


def checksum(array: Any, numbers: np.ndarray | None = None) -> str:
    """A number for the bits of an array.

    Args:
        array: on the host, on devices, or on those of several processes, each of which calls this.
        numbers: of each row that by which it is known, so that rows count alike wherever they lie; a negative one is
            left out. By default its place along the leading axis. ``(row,)``
    """
    shape = np.shape(array)
    if numbers is None:
        numbers = np.arange(shape[0] if shape else 1)
    if not isinstance(array, jax.Array) or array.is_fully_replicated:
        return f"{_sum_of_bits(np.asarray(array), [0] * len(shape), shape, numbers) % 2**64:016x}"
    own = [shard for shard in array.addressable_shards if shard.replica_id == 0]
    total = 0
    for shard in own:
        start = [part.start or 0 for part in shard.index]
        part = np.asarray(shard.data)
        total += _sum_of_bits(part, start, shape, numbers[start[0] : start[0] + len(part)])
    if not array.is_fully_addressable:
        words = np.asarray([(total >> shift) & 0xFFFF for shift in (48, 32, 16, 0)], np.int32)
        total = sum(int(word) << (48 - 16 * i) for row in allgather(words) for i, word in enumerate(row))
    return f"{total % 2**64:016x}"


def check_same(tree: Any, *, is_model: bool = False) -> None:
    """Raise where processes hold different numbers of their own, or run different programs.

    Args:
        tree: arrays; those that lie on devices of several processes are the same anyway.
        is_model: whether it has a program, which is to be the same too.

    Raises:
        MeshError: there is a difference.
    """
    if jax.process_count() == 1:
        return
    own = [leaf for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype") and is_here(leaf)]
    own = [jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x for x in own]
    arrays = [f"{jnp.dtype(x.dtype).name}{list(x.shape)}" for x in own]
    equations = described(tree.program.jaxpr) if is_model else []
    texts = {
        "equations": "\n".join(equations),
        "shapes": " ".join(arrays),
        "numbers": " ".join(f"{shape} {checksum(x)}" for shape, x in zip(arrays, own, strict=True)),
    }
    digests = [hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts.values()]
    told = allgather(np.frombuffer(b"".join(digests), np.uint8).astype(np.int32)).reshape(-1, len(texts), 8)
    for i, what in enumerate(texts):
        others = np.flatnonzero((told[:, i] != told[0, i]).any(-1))
        if len(others):
            raise MeshError(
                f"the processes give the model different {what}",
                expected="the same model, key and arrays in every process, or rows of its own by ppl.shard_rows",
                found=f"process {others[0]} differs from the first one; process {jax.process_index()} has the arrays "
                f"{', '.join(arrays)}",
                fix="ppl.shard_rows(rows, mesh, local=True) for rows that each process has of its own; the same seed "
                "for what is drawn",
            )


def _sum_of_bits(part: np.ndarray, start: list[int], shape: tuple[int, ...], numbers: np.ndarray) -> int:
    """The sum, modulo 2^64, of a hash of each entry's bits and of its position in the whole array.

    Args:
        part: a part of the array.
        start: where it begins in the whole, along each axis.
        shape: that of the whole.
        numbers: of the rows of the part.
    """
    if part.dtype.kind == "c":
        real, imaginary = (_sum_of_bits(x, start, shape, numbers) for x in (np.real(part), np.imag(part)))
        return real + 3 * imaginary
    if not part.ndim:
        part, start, shape = part[None], [0], (1,)
    strides = [math.prod(shape[axis + 1 :]) for axis in range(part.ndim)]
    columns = np.zeros((1, *part.shape[1:]), np.uint64)
    for axis in range(1, part.ndim):
        along = (np.arange(part.shape[axis], dtype=np.uint64) + np.uint64(start[axis])) * np.uint64(strides[axis])
        columns = columns + along.reshape(-1, *[1] * (part.ndim - axis - 1))
    total, rows = 0, max(BLOCK // max(columns.size, 1), 1)
    for begin in range(0, len(part), rows):
        known = numbers[begin : begin + rows] >= 0
        block = np.ascontiguousarray(part[begin : begin + rows][known])
        bits = block.view(f"u{part.dtype.itemsize}").astype(np.uint64)
        along = numbers[begin : begin + rows][known].astype(np.uint64) * np.uint64(strides[0])
        bits += (along.reshape(-1, *[1] * (part.ndim - 1)) + columns) * np.uint64(0x9E3779B97F4A7C15)
        total += int(_mixed(bits).sum(dtype=np.uint64))
    return total % 2**64


def _mixed(x: np.ndarray) -> np.ndarray:
    """A bijection of 64-bit words in which each bit depends on all (Steele, Lea and Flood 2014, SplitMix); in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x
