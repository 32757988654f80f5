"""The sampler's state as a file: arrays in NumPy's format, checked against what is expected before they are read.

Nothing in such a file is run, and no more is read than the arrays take.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ppleffects.errors import CheckpointError
from ppleffects.inference.layout import Layout
from ppleffects.inference.processes import fetch

# What NumPy's format may put before the numbers.
MAX_HEADER = 2**14


def spec_names(state: Any) -> dict[str, list[Any]]:
    """How each array lies on the mesh, by its path in the state, as JSON has it."""
    shardings = {path: getattr(leaf, "sharding", None) for path, leaf in _leaves(state).items()}
    return {path: list(x.spec) for path, x in shardings.items() if isinstance(x, NamedSharding)}


def host_copy(state: Any, axes: Any, num_chains: int) -> dict[str, np.ndarray]:
    """The arrays of the state on the host by path; chains that only fill up a mesh are left out.

    Args:
        state: state of all chains.
        axes: a prefix of it with 0 for what each chain has of its own, and None for what all have in common.
        num_chains: chains to keep.
    """
    own, arrays = _own(state, axes), {path: np.asarray(fetch(leaf)) for path, leaf in _leaves(state).items()}
    return {path: array[:num_chains] if path in own else array for path, array in arrays.items()}


def write(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes arrays to a file that is there in whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, *arrays.values(), allow_pickle=False)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read(path: Path, expected: Any, axes: Any, num_chains: int) -> dict[str, np.ndarray]:
    """The arrays of a file, by their path in the state.

    Args:
        path: the file.
        expected: the state as it will be, abstract.
        axes: as in ``host_copy``.
        num_chains: chains that were kept.

    Raises:
        CheckpointError: the file is damaged, or holds something else.
    """
    own = _own(expected, axes)
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as file:
            for i, (name, leaf) in enumerate(_leaves(expected).items()):
                shape = (num_chains, *leaf.shape[1:]) if name in own else leaf.shape
                arrays[name] = _read_array(file, f"arr_{i}.npy", shape, np.dtype(leaf.dtype))
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(
            "the sampler's state in the checkpoint is damaged or not of this sampler",
            expected=f"the arrays of {type(expected).__name__}, in NumPy's format",
            found=f"{path}: {error}",
            fix="restore the checkpoint from a copy, or begin anew at another path; its draws can still be read with "
            "xarray.open_datatree",
        ) from error
    return arrays


def restored(
    arrays: dict[str, np.ndarray],
    expected: Any,
    axes: Any,
    layout: Layout,
    spec_of: Callable[[str, int], Any],
    key: Any,
) -> Any:
    """The state on the devices, its chains repeated until they fill the mesh.

    Args:
        arrays: by path.
        expected: the state as it will be, abstract.
        axes: as in ``host_copy``.
        layout: where chains run.
        spec_of: how an array lies on the mesh, by its path and number of axes; None if it lies as its chains do.
        key: a key like those of the state.
    """
    own, leaves = _own(expected, axes), []
    for path, leaf in jax.tree_util.tree_leaves_with_path(expected):
        name = jax.tree_util.keystr(path)
        array = arrays[name][layout.chains] if name in own else arrays[name]
        spec = spec_of(name, array.ndim)
        if spec is None:
            spec = layout.spec() if name in own else PartitionSpec()
        placed = _placed(array, layout, PartitionSpec(*(tuple(x) if isinstance(x, list) else x for x in spec)))
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        leaves.append(jax.random.wrap_key_data(placed, impl=jax.random.key_impl(key)) if is_key else placed)
    return jax.tree.unflatten(jax.tree.structure(expected), leaves)


def _placed(array: np.ndarray, layout: Layout, spec: PartitionSpec) -> jax.Array:
    """An array on the devices, in memory of its own: programs use up what they are given."""
    if layout.mesh is None:
        return jnp.array(array)
    sharding = NamedSharding(layout.mesh, spec)
    return jnp.copy(jax.make_array_from_callback(array.shape, sharding, lambda index: array[index]))


def _leaves(state: Any) -> dict[str, Any]:
    """Arrays by path; of keys their data."""
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    return {path: _key_data(leaf) for path, leaf in leaves.items()}


def _key_data(leaf: Any) -> Any:
    if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    return jax.random.key_data(leaf) if isinstance(leaf, jax.Array) else jax.eval_shape(jax.random.key_data, leaf)


def _own(state: Any, axes: Any) -> set[str]:
    """The paths of what each chain has of its own."""
    marked = jax.tree.map(
        lambda axis, part: jax.tree.map(lambda _: axis is not None, part), axes, state, is_leaf=lambda x: x is None
    )
    return {jax.tree_util.keystr(path) for path, own in jax.tree_util.tree_leaves_with_path(marked) if own}


def _read_array(file: zipfile.ZipFile, name: str, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    info = file.getinfo(name)
    if info.compress_type != zipfile.ZIP_STORED or not size <= info.file_size <= size + MAX_HEADER:
        raise ValueError(f"{name} takes {info.file_size} bytes, and an array of {dtype}{list(shape)} {size}")
    with file.open(info) as member:
        version = np.lib.format.read_magic(member)
        if version != (1, 0):
            raise ValueError(f"{name} is of version {version} of the format")
        found_shape, fortran, found_dtype = np.lib.format.read_array_header_1_0(member)
        if (found_shape, found_dtype) != (tuple(shape), dtype):
            raise ValueError(f"{name} is {found_dtype}{list(found_shape)} where {dtype}{list(shape)} is expected")
        array = np.frombuffer(member.read(size + 1), dtype)
    return array.reshape(shape, order="F" if fortran else "C")
