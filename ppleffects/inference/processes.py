"""What several processes of one run must agree on; with one process, each function returns what it is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ppleffects.errors import CheckpointError

# Arrays that are brought to every process are gathered together up to so many bytes, since each lies whole on a device.
MAX_BYTES = 2**26


def is_first() -> bool:
    """Whether this process speaks and writes for all."""
    return jax.process_index() == 0


def decided(size: int, is_due: bool, stop: bool) -> tuple[int, bool, bool]:
    """What all processes do next: as the first one says, and stop where any of them is told to.

    Args:
        size: of the next call.
        is_due: whether draws are to be written.
        stop: whether to stop.
    """
    if jax.process_count() == 1:
        return size, is_due, stop
    told = allgather(np.asarray([size, is_due, stop], np.int32))
    return int(told[0, 0]), bool(told[0, 1]), bool(told[:, 2].any())


def allgather(array: np.ndarray) -> np.ndarray:
    """What each process gives, on a leading axis."""
    return np.asarray(multihost_utils.process_allgather(array)).reshape(-1, *array.shape)


def wait(what: str) -> None:
    """Go on when all processes are here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(what)


def as_first(number: int) -> int:
    """What the first process gives."""
    return number if jax.process_count() == 1 else int(allgather(np.asarray(number, np.int32))[0])


def together[T](act: Callable[[], T]) -> T:
    """What a call returns that each process makes on its own; where it fails in one, it fails in all.

    Raises:
        CheckpointError: it has failed in another process.
    """
    if jax.process_count() == 1:
        return act()
    result: Any = None
    error = None
    try:
        result = act()
    except Exception as raised:  # the others are told first
        error = raised
    failed = np.flatnonzero(allgather(np.asarray(error is not None)))
    if error is not None:
        raise error
    if len(failed):
        raise CheckpointError(
            f"process {failed[0]} cannot use the checkpoint",
            expected="a folder that every process can read, and the first one write",
            found="an error, which that process raises",
            fix="put the checkpoint on a file system that all processes share",
        )
    return result


def fetch(tree: Any) -> Any:
    """Arrays on the host, whole in each process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    leaves, treedef = jax.tree.flatten(tree)
    far = [i for i, leaf in enumerate(leaves) if not _is_whole(leaf)]
    for i in [i for i in far if not isinstance(leaves[i].sharding, NamedSharding)]:
        leaves[i] = multihost_utils.process_allgather(leaves[i], tiled=True)
        far.remove(i)
    while far:
        sizes = np.cumsum([leaves[i].nbytes for i in far])
        count = max(int(np.searchsorted(sizes, MAX_BYTES, side="right")), 1)
        group, far = far[:count], far[count:]
        meshes = tuple(leaves[i].sharding.mesh for i in group)
        for i, leaf in zip(group, _gather(meshes)([leaves[i] for i in group]), strict=True):
            leaves[i] = leaf
    return treedef.unflatten([np.asarray(leaf) for leaf in leaves])


def _is_whole(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated


@functools.lru_cache
def _gather(meshes: tuple[Mesh, ...]) -> Callable:
    """A program that makes arrays whole on each device of their meshes."""
    return jax.jit(lambda leaves: leaves, out_shardings=[NamedSharding(mesh, PartitionSpec()) for mesh in meshes])


def put(leaf: Any, sharding: Sharding) -> jax.Array:
    """An array on devices, perhaps of other processes too; every process gives the same one.

    Where this process has the whole of it, no more of it is moved than its own devices hold.
    """
    if sharding.is_fully_addressable or not is_here(leaf):
        return jax.device_put(leaf, sharding)
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(put(jax.random.key_data(leaf), sharding), impl=jax.random.key_impl(leaf))
    dtype = jnp.result_type(leaf)
    array = np.asarray(leaf, dtype)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index], dtype=dtype)


def is_here(leaf: Any) -> bool:
    """Whether this process has the whole of an array."""
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable
