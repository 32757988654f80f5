"""``shard_rows`` and ``shard_groups``: tables of rows on a mesh, padded to fit, and groups of them kept whole."""

from __future__ import annotations

import dataclasses
import heapq
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ppleffects.errors import DTypeError, MeshError, ShapeError, ValuesError
from ppleffects.inference.placing import Sources, place
from ppleffects.inference.rows import RowOrder, register, registered


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GroupedRows:
    """Rows on a mesh, each group of them whole on one shard; a pytree whose every leaf is sharded along its first axis.

    Attributes:
        rows: the table, its rows padded, those of a group side by side.
        mask: False for the rows that pad. ``(row,)``
        group: of each row, the number of its group among those of its shard. ``(row,)``
        per_group: the table of groups, padded; None if there was none.
        group_mask: False for the groups that pad; inside of ``shard_map`` it is as long as the shard has groups.
            ``(group,)``
    """

    rows: Any
    mask: Array
    group: Array
    per_group: Any
    group_mask: Array


def shard_rows(
    tree: Any, mesh: Mesh, axis: str | tuple[str, ...] = "data", *, local: bool = False
) -> tuple[Any, Array]:
    """A table of rows on a mesh, padded to a multiple of the mesh axis, and the mask of the rows that are no padding.

    Rows that pad are copies of the row before, so that none has unusual values; give the mask to ``ppl.observe``. What
    ``ppl.mcmc`` returns holds no padded rows, if the model is given these arrays as they are.

    Args:
        tree: arrays whose leading axis is that of the rows: NumPy's and JAX's, ``np.memmap``, or anything with
            ``shape``, ``dtype`` and slices, as a zarr array. They are read shard by shard.
        mesh: the devices.
        axis: the mesh axis over which rows are spread, or several, the first of them outermost.
        local: whether each process gives rows of its own, which go to its own devices; else every process gives the
            same table, of which it reads what lies on its devices.

    Returns:
        The tree, each leaf with the sharding ``NamedSharding(mesh, P(axis))``, and the mask ``(row,)``, sharded alike.

    Raises:
        MeshError: the mesh has no such axis, or a leaf is laid out already.
        ShapeError: there are no rows, or leaves have different numbers of them.
        DTypeError: a leaf is no array of numbers, or a number does not fit into the dtype that JAX has for it.

    Example:
        >>> import ppleffects as ppl, jax, numpy as np
        >>> mesh = jax.make_mesh((jax.device_count(),), ("data",))
        >>> data, mask = ppl.shard_rows({"y": np.arange(10.0)}, mesh)
        >>> int(mask.sum())
        10
    """
    axes = _checked_axes(mesh, axis)
    tree = _as_arrays(tree)
    num_rows = _length("tree", tree, "row")
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    if local and jax.process_count() > 1:
        order, first = _order_of_processes(num_rows, sharding, axes)
    else:
        num_shards = _size(mesh, axes)
        order, first = RowOrder(num_rows, -(-num_rows // num_shards) * num_shards, axes, slice(0, num_rows)), 0
    rows = _place("tree", tree, sharding, order, lambda start, stop: order.sources(start, stop) - first)
    return rows, _place_mask(sharding, order)


def shard_groups(
    tree: Any,
    groups: Any,
    mesh: Mesh,
    axis: str | tuple[str, ...] = "data",
    *,
    per_group: Any = None,
    num_groups: int | None = None,
) -> GroupedRows:
    """A table of rows on a mesh, the rows of a group on one shard, so that what they have in common can be there too.

    Groups go to shards one after the other, the largest first, each to the shard that has least. Every shard is padded
    to the same number of rows, and of groups. Declare a latent of each group inside of ``shard_map``, as many as
    ``group_mask`` has entries there, with ``spec=P(axis)`` and no mask: those that pad follow their prior, and the
    posterior of all else is the same. What ``ppl.mcmc`` returns holds no padding, if the model is given these arrays as
    they are: rows are in their former order, and latents of groups in that of the groups' numbers.

    Args:
        tree: as for ``ppl.shard_rows``.
        groups: the number of each row's group, from 0. ``(row,)``
        mesh: the devices.
        axis: the mesh axis over which groups are spread, or several, the first of them outermost.
        per_group: arrays whose leading axis is that of the groups, as covariates of groups.
        num_groups: number of groups; by default that of ``per_group``, else of ``groups``, where each must have rows.

    Raises:
        ValuesError: the numbers of groups are not from 0 to below ``num_groups``, or some are missing.
        MeshError, ShapeError, DTypeError: as for ``ppl.shard_rows``.

    Example:
        >>> import ppleffects as ppl, jax, numpy as np
        >>> mesh = jax.make_mesh((1,), ("data",))
        >>> data = ppl.shard_groups({"y": np.array([1.0, 2.0, 3.0])}, [1, 0, 1], mesh)
        >>> data.rows["y"].tolist(), data.group.tolist()
        ([2.0, 1.0, 3.0], [0, 1, 1])
    """
    axes = _checked_axes(mesh, axis)
    tree, per_group = _as_arrays(tree), _as_arrays(per_group)
    num_rows = _length("tree", tree, "row")
    if jax.tree.leaves(per_group):
        length = _length("per_group", per_group, "group")
        num_groups = length if num_groups is None else num_groups
        if length != num_groups:
            raise _lengths_differ("per_group", length, "num_groups=", num_groups, "group")
    groups = _checked_groups(np.asarray(groups), num_rows, num_groups)
    row_order, group_order, local_group = _layout_of_groups(groups, num_groups, _size(mesh, axes), axes)
    sharding = NamedSharding(mesh, PartitionSpec(axis))
    return GroupedRows(
        rows=_place("tree", tree, sharding, row_order, row_order.sources),
        mask=_place_mask(sharding, row_order),
        group=_place("groups", local_group[groups], sharding, row_order, row_order.sources, bookkeeping=True),
        per_group=_place("per_group", per_group, sharding, group_order, group_order.sources),
        group_mask=_place_mask(sharding, group_order),
    )


def _layout_of_groups(
    groups: np.ndarray, num_groups: int | None, num_shards: int, axes: tuple[str, ...]
) -> tuple[RowOrder, RowOrder, np.ndarray]:
    """Where rows and groups lie, and the number of each group among those of its shard."""
    sizes = np.bincount(groups, minlength=num_groups or 0)
    # A group weighs its rows and its latents; the smaller number is taken of equal shards, and of equal groups.
    shard_of, loads = np.zeros(len(sizes), np.int64), [(0, shard) for shard in range(num_shards)]
    for group in np.argsort(-sizes, kind="stable"):
        load, shard_of[group] = loads[0]
        heapq.heapreplace(loads, (load + int(sizes[group]) + 1, int(shard_of[group])))
    order = np.lexsort((groups, shard_of[groups]))
    row_of, per_shard = _ranks(shard_of[groups], order, num_shards)
    group_of, groups_per_shard = _ranks(shard_of, np.argsort(shard_of, kind="stable"), num_shards)
    groups_per_shard += groups_per_shard == per_shard  # so that an axis is known by its length
    positions = shard_of[groups] * per_shard + row_of, shard_of * groups_per_shard + group_of
    row_order = RowOrder(len(groups), num_shards * per_shard, axes, positions[0])
    group_order = RowOrder(len(sizes), num_shards * groups_per_shard, axes, positions[1])
    return row_order, group_order, group_of.astype(np.int32)


def _ranks(shard_of: np.ndarray, order: np.ndarray, num_shards: int) -> tuple[np.ndarray, int]:
    """The number of each item among those of its shard, and the largest number of items of one.

    Args:
        shard_of: the shard of each item.
        order: the items sorted by shard.
        num_shards: number of shards.
    """
    counts = np.bincount(shard_of, minlength=num_shards)
    ranks = np.empty(len(shard_of), np.int64)
    ranks[order] = np.arange(len(shard_of)) - np.repeat(np.cumsum(counts) - counts, counts)
    return ranks, int(counts.max())


def _order_of_processes(num_rows: int, sharding: NamedSharding, axes: tuple[str, ...]) -> tuple[RowOrder, int]:
    """Where the rows of all processes lie, process by process, and the number of this process's first row.

    Raises:
        MeshError: processes share some of their shards, or have none.
        ShapeError: processes that hold the same shards have different numbers of rows.
    """
    counts = multihost_utils.process_allgather(np.asarray(num_rows, np.int32))
    num_shards = _size(sharding.mesh, axes)
    shards: dict[int, set[int]] = {process: set() for process in range(len(counts))}
    for device, index in sharding.devices_indices_map((num_shards,)).items():
        shards[device.process_index].add(index[0].indices(num_shards)[0])
    owners: dict[tuple[int, ...], int] = {}  # of a set of shards, the rows that lie there
    for process, count in enumerate(counts):
        own = tuple(sorted(shards[process]))
        if owners.setdefault(own, int(count)) != count:
            raise _lengths_differ("the table of a process", int(count), "that of its replica", owners[own], "row")
    if sum(map(len, owners)) != num_shards or () in owners:
        raise MeshError(
            "with local=True the processes must share the mesh axis out among them",
            expected="devices of each process, on positions along the axis that it has to itself or shares as a whole",
            found=f"positions by process: { {process: sorted(own) for process, own in shards.items()} }",
            fix="order the devices of the mesh by process, or give all rows to every process without local=True",
        )
    per_shard = max(-(-count // len(own)) for own, count in owners.items())
    positions, first, before = [], 0, 0
    for own, count in sorted(owners.items()):
        positions.append((np.array(own)[:, None] * per_shard + np.arange(per_shard)).reshape(-1)[:count])
        first = before if own == tuple(sorted(shards[jax.process_index()])) else first
        before += count
    return RowOrder(before, num_shards * per_shard, axes, np.concatenate(positions)), first


def _place(
    of: str, tree: Any, sharding: NamedSharding, order: RowOrder, sources: Sources, *, bookkeeping: bool = False
) -> Any:
    """The tables of a tree on the mesh, and remembered."""

    def placed(path: Any, leaf: Any) -> Array:
        array = place(_name(of, path), leaf, order.num_padded, sharding, sources)
        register(array, order, bookkeeping=bookkeeping)
        return array

    return jax.tree_util.tree_map_with_path(placed, tree)


def _place_mask(sharding: NamedSharding, order: RowOrder) -> Array:
    mask = place("the mask", order.mask(), order.num_padded, sharding, np.arange)
    register(mask, order, bookkeeping=True)
    return mask


def _checked_axes(mesh: Any, axis: Any) -> tuple[str, ...]:
    """The names of the mesh axes.

    Raises:
        MeshError: the mesh is none, or has no such axis.
    """
    axes = axis if isinstance(axis, tuple) else (axis,)
    if not isinstance(mesh, Mesh):
        raise MeshError(
            "rows are placed on a mesh of devices",
            expected="a jax.sharding.Mesh",
            found=f"{type(mesh).__name__}",
            fix='mesh = jax.make_mesh((jax.device_count(),), ("data",))',
        )
    for name in axes:
        if name not in mesh.axis_names:
            raise MeshError(
                f"the mesh has no axis {name!r} to spread rows over",
                expected=f"among {list(mesh.axis_names)}",
                found=f"axis={axis!r}",
                fix="name the axis of the mesh that the model's shard_map maps rows over",
            )
    return axes


def _size(mesh: Any, axes: tuple[str, ...]) -> int:
    return math.prod(mesh.shape[name] for name in axes)


def _as_arrays(tree: Any) -> Any:
    """Columns and tables of pandas as arrays, since their slices go by labels; the rest as it is."""
    return jax.tree.map(lambda leaf: np.asarray(leaf) if hasattr(leaf, "iloc") else leaf, tree)


def _name(of: str, path: Any) -> str:
    return f"{of}{jax.tree_util.keystr(path)}"


def _length(of: str, tree: Any, unit: str) -> int:
    """The number of rows that all leaves of a tree have.

    Raises:
        DTypeError: a leaf is no array of numbers.
        ShapeError: they differ in it, there are none, or there is no leaf.
        MeshError: a leaf is laid out already.
    """
    lengths: dict[str, int] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(of, path)
        _check_numbers(name, leaf)
        known = registered(leaf)
        if known is not None and not known.order.is_trivial:
            raise MeshError(
                f"{name} is laid out already, and its padding and order would be taken for the table's own",
                expected="a table as it was before ppl.shard_rows or ppl.shard_groups",
                found=f"{known.order.num_rows} rows laid out as {known.order.num_padded}",
                fix="give the former table, or use the rows and the mask that there are",
            )
        lengths[name] = leaf.shape[0]
        first = next(iter(lengths))
        if lengths[name] != lengths[first]:
            raise _lengths_differ(name, lengths[name], first, lengths[first], unit)
    if not any(lengths.values()):
        raise ShapeError(
            f"there are no {unit}s to place on the mesh",
            expected=f"arrays of at least one {unit}",
            found="no arrays" if not lengths else f"{next(iter(lengths))} with 0 {unit}s",
            fix="check what was selected before",
        )
    return next(iter(lengths.values()))


def _check_numbers(name: str, leaf: Any) -> None:
    try:
        numeric = any(jnp.issubdtype(leaf.dtype, kind) for kind in (jnp.number, jnp.bool_)) and len(leaf.shape) > 0
    except (AttributeError, TypeError):
        numeric = False
    if not numeric or isinstance(leaf, np.ma.MaskedArray | Tracer):
        known = [f"{what} {getattr(leaf, what)}" for what in ("dtype", "shape") if hasattr(leaf, what)]
        raise DTypeError(
            f"{name} is no array of numbers with rows",
            expected="an array of numbers or booleans whose leading axis is that of the rows, outside of jit",
            found=" of ".join([type(leaf).__name__, *[", ".join(known)][: len(known)]]),
            fix="np.asarray(...) of a list, numbers for labels, a mask of its own for a masked array",
        )


def _lengths_differ(name: str, length: int, other: str, other_length: int, unit: str) -> ShapeError:
    return ShapeError(
        f"{name} has another number of {unit}s than {other}",
        expected=f"{other_length}, as {other} has",
        found=f"{length}",
        fix=f"give arrays with one entry for each {unit} along the leading axis",
    )


def _checked_groups(groups: np.ndarray, num_rows: int, num_groups: int | None) -> np.ndarray:
    """The numbers of groups.

    Raises:
        ShapeError: there is not one for each row.
        ValuesError: they are no such numbers.
    """
    if groups.shape != (num_rows,):
        raise ShapeError(
            "groups has not one number for each row",
            expected=f"shape {(num_rows,)}",
            found=f"shape {groups.shape}",
            fix="give the number of each row's group",
        )
    if groups.dtype.kind not in "iu":
        raise ValuesError(
            "groups are no numbers of groups",
            expected="integers",
            found=f"{groups.dtype}",
            fix="labels, groups = np.unique(labels, return_inverse=True)",
        )
    largest = groups.max() + 1 if num_groups is None else num_groups
    if groups.min() < 0 or groups.max() >= largest:
        raise ValuesError(
            "a row is in no group",
            expected=f"numbers from 0 to {largest - 1}",
            found=f"numbers from {groups.min()} to {groups.max()}",
            fix="leave such rows out, or give them a group; num_groups= says how many there are",
        )
    missing = np.flatnonzero(np.bincount(groups, minlength=largest) == 0)
    if num_groups is None and len(missing):
        raise ValuesError(
            f"group {missing[0]} has no row",
            expected=f"rows of each group from 0 to {largest - 1}",
            found=f"{len(missing)} groups without any",
            fix="num_groups= if they are meant, else labels, groups = np.unique(labels, return_inverse=True)",
        )
    return groups.astype(np.int64)
