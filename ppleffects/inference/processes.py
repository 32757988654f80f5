"""What several processes of one run must agree on; with one process, each function returns what it is given."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


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


def fetch(tree: Any) -> Any:
    """Arrays on the host, whole in each process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return jax.tree.map(_whole, tree)


def _whole(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
        return np.asarray(leaf)
    return multihost_utils.process_allgather(leaf, tiled=True)
