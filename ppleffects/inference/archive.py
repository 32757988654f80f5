"""Draws on disk: a zarr store as ArviZ lays it out, whose chains grow at their own pace.

Readers see what the metadata of the whole store say, which is replaced in one step: as many draws as every chain has.
What chains have beyond that lies in the same arrays, and is not lost.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import xarray
    import zarr

# A file holds so many bytes, more or less.
CHUNK_BYTES = 2**20
DRAW = "draw"


class GrowingArray:
    """One array of draws ``(chain, draw, *site)``: written by blocks of draws, which stay here until they are full.

    Args:
        array: in the store, as long as it may become.
        folder: where its files are.
        lengths: draws of each chain that it holds already. ``(chain,)``
    """

    def __init__(self, array: zarr.Array, folder: Path, lengths: np.ndarray):
        self.array, self._folder = array, folder
        self._rows = array.chunks[1]
        self._blocks: dict[int, np.ndarray] = {}
        self._changed: set[int] = set()
        if lengths.max() > lengths.min() or lengths.min() % self._rows:
            for number in range(lengths.min() // self._rows, -(-int(lengths.max()) // self._rows)):
                self._blocks[number] = np.asarray(array[:, self._draws(number)])

    def write(self, chain: int, start: int, rows: np.ndarray) -> None:
        """Take draws of a chain, from number ``start`` on."""
        done = 0
        while done < len(rows):
            number, offset = divmod(start + done, self._rows)
            block = self._block(number)
            count = min(len(rows) - done, block.shape[1] - offset)
            block[chain, offset : offset + count] = rows[done : done + count]
            self._changed.add(number)
            done += count

    def flush(self, complete: int) -> list[Path]:
        """Write what has changed, forget the blocks before draw ``complete``, and say which files were written."""
        changed = sorted(self._changed)
        for number in changed:
            self.array[:, self._draws(number)] = self._blocks[number]
        zeros = ["0"] * (self.array.ndim - 2)
        self.forget(complete)
        return [self._folder.joinpath("c", "0", str(number), *zeros) for number in changed]

    def forget(self, complete: int) -> None:
        """Hold no blocks before draw ``complete``, and take what is held as written."""
        self._changed.clear()
        for number in [number for number in self._blocks if (number + 1) * self._rows <= complete]:
            del self._blocks[number]

    def _draws(self, number: int) -> slice:
        return slice(number * self._rows, min((number + 1) * self._rows, self.array.shape[1]))

    def _block(self, number: int) -> np.ndarray:
        if number not in self._blocks:
            draws = self._draws(number)
            shape = (self.array.shape[0], draws.stop - draws.start, *self.array.shape[2:])
            self._blocks[number] = np.full(shape, self.array.fill_value, self.array.dtype)
        return self._blocks[number]


class StoredSeries:
    """The arrays of one group, by name, that grow by rows, each chain at its own pace.

    Args:
        arrays: the arrays.
        folder: where they are.
        lengths: rows of each chain that they hold already. ``(chain,)``
    """

    def __init__(self, arrays: Mapping[str, zarr.Array], folder: Path, lengths: np.ndarray):
        self._arrays = {name: GrowingArray(array, folder / name, lengths) for name, array in arrays.items()}
        self.lengths = lengths

    @property
    def length(self) -> int:
        """Rows that every chain has."""
        return int(self.lengths.min())

    def append(self, chain: int, rows: dict[str, Any]) -> None:
        """Add arrays ``(row, ...)`` of one chain, all with as many rows."""
        start, count = int(self.lengths[chain]), 0
        for name, value in rows.items():
            self._arrays[name].write(chain, start, np.asarray(value))
            count = len(value)
        self.lengths[chain] = start + count

    def flush(self) -> list[Path]:
        """Write what is new, and say which files were written."""
        return [path for array in self._arrays.values() for path in array.flush(self.length)]

    def forget(self) -> None:
        """Take what is new as written, as it is by another process."""
        for array in self._arrays.values():
            array.forget(self.length)

    def arrays(self) -> Mapping[str, np.ndarray]:
        """The arrays as they were flushed, each ``(chain, draw, ...)`` and read when it is asked for."""
        return _Read({name: array.array for name, array in self._arrays.items()}, self.length)


class _Read(Mapping):
    """Arrays by name that are read when they are asked for; the last one is kept, no more."""

    def __init__(self, arrays: dict[str, zarr.Array], length: int):
        self._arrays, self._length = arrays, length
        self._last: tuple[str, np.ndarray | None] = ("", None)

    def __getitem__(self, name: str) -> np.ndarray:
        kept, array = self._last
        if array is None or kept != name:
            self._last = ("", None)  # so that two are never held
            array = np.asarray(self._arrays[name][:, : self._length])
            self._last = (name, array)
        return array

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)


def create(path: Path, template: xarray.DataTree) -> None:
    """Write a store without draws: a tree whose arrays of draws have a ``draw`` axis of length 0."""
    encoding: dict[str, Any] = {}
    for node in template.subtree:
        if DRAW in node.dims:
            encoding[node.path] = {
                name: {"chunks": _chunks(x.shape, x.dtype), "compressors": None}
                for name, x in node.data_vars.items()
                if DRAW in x.dims
            }
            encoding[node.path][DRAW] = {"chunks": (CHUNK_BYTES // 8,), "compressors": None}
    with _quiet():
        template.to_zarr(
            path, zarr_format=3, mode="w-", consolidated=True, encoding=encoding, write_inherited_coords=False
        )


def _chunks(shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    num_chains, _, *rest = shape
    row_bytes = max(num_chains * int(np.prod(rest)) * dtype.itemsize, 1)
    return (max(num_chains, 1), max(CHUNK_BYTES // row_bytes, 1), *[max(size, 1) for size in rest])


def open_arrays(path: Path, group: str, num_rows: int) -> dict[str, zarr.Array]:
    """The arrays of draws of a group, made as long as ``num_rows``; none where the group is not there."""
    import zarr  # imported when used, so that `import ppleffects` stays light

    if not (path / group).is_dir():
        return {}
    arrays = {}
    for name, array in zarr.open_group(path, path=group, mode="r+", use_consolidated=False).arrays():
        dims = getattr(array.metadata, "dimension_names", None) or ()
        if DRAW not in dims:
            continue
        axis = dims.index(DRAW)
        if array.shape[axis] != num_rows:
            array.resize((*array.shape[:axis], num_rows, *array.shape[axis + 1 :]))
        if name != DRAW:
            arrays[name] = array
        elif not np.array_equal(array[:], np.arange(num_rows)):  # also where a run was killed right after it had grown
            array[:] = np.arange(num_rows)
    return arrays


def read_attrs(path: Path) -> dict[str, Any]:
    """The attributes of the store."""
    return json.loads((path / "zarr.json").read_text())["attributes"]


def publish(path: Path, attrs: dict[str, Any], lengths: dict[str, int]) -> None:
    """Show readers the first draws of each group and the attributes, in one step.

    Args:
        path: of the store.
        attrs: its attributes.
        lengths: draws to show, by group.
    """
    file = path / "zarr.json"
    document = json.loads(file.read_text())
    document["attributes"] = attrs
    for name, node in document["consolidated_metadata"]["metadata"].items():
        group, dims = name.split("/")[0], node.get("dimension_names") or ()
        if group in lengths and DRAW in dims:
            node["shape"][dims.index(DRAW)] = lengths[group]
    partial = file.with_suffix(".partial")
    with partial.open("w") as out:
        json.dump(document, out)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)


def sync(paths: list[Path]) -> None:
    """Wait until files are on the disk."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # zarr writes no file for a block of nothing but its fill value
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)


def open_tree(path: Path) -> xarray.DataTree:
    """The store as a tree, whose arrays are read when they are used."""
    import xarray  # imported when used, so that `import ppleffects` stays light

    with _quiet():
        return xarray.open_datatree(path, engine="zarr", consolidated=True)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without zarr's warning that metadata of a whole store are no part of its format 3 yet; xarray reads them."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        yield
