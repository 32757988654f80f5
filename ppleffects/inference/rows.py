"""Rows that lie on a mesh, padded and perhaps reordered: found among a model's data, and put back as they were.

Each array that holds such rows is registered, by its identity. What comes of a model that is given one of them is
padded and ordered alike, along an axis of each site whose pieces lie on the shards beside the rows.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from ppleffects.effects import _jax
from ppleffects.errors import MeshError
from ppleffects.inference.processes import fetch
from ppleffects.interpretations import Site
from ppleffects.interpretations.dependence import parents
from ppleffects.interpretations.program import Model


@dataclasses.dataclass(frozen=True, eq=False)
class RowOrder:
    """Where the caller's rows lie among the padded ones.

    Attributes:
        num_rows: number of the caller's rows.
        num_padded: number of rows on the mesh.
        axes: the mesh axes that they lie along.
        positions: of each of the caller's rows among the padded ones; a slice from 0 where these are not reordered.
    """

    num_rows: int
    num_padded: int
    axes: tuple[str, ...]
    positions: slice | np.ndarray

    @property
    def is_trivial(self) -> bool:
        """Whether rows lie as the caller has them."""
        return isinstance(self.positions, slice) and self.num_rows == self.num_padded

    def sources(self, start: int, stop: int) -> np.ndarray:
        """For padded rows from ``start`` to ``stop`` the caller's row that each holds; padding holds the row before."""
        if isinstance(self.positions, slice):
            return np.clip(np.arange(start, stop), 0, self.num_rows - 1)
        return self._sources[start:stop]

    @functools.cached_property
    def _sources(self) -> np.ndarray:
        before = np.maximum.accumulate(np.where(self.mask(), np.arange(self.num_padded), 0))
        sources = np.zeros(self.num_padded, np.int64)
        sources[self.positions] = np.arange(self.num_rows)
        return sources[before]

    @functools.cached_property
    def numbers(self) -> np.ndarray:
        """For each padded row the number of the caller's row that it is, and -1 for padding. ``(num_padded,)``."""
        numbers = np.full(self.num_padded, -1)
        numbers[self.positions] = np.arange(self.num_rows)
        return numbers

    def mask(self) -> np.ndarray:
        """False for the rows that pad, of length ``num_padded``."""
        mask = np.zeros(self.num_padded, bool)
        mask[self.positions] = True
        return mask

    def restore(self, array: Any, axis: int) -> Any:
        """Rows along an axis in the caller's order, without the padding."""
        return array[(*[slice(None)] * axis, self.positions)]

    def lay_out(self, array: Any, axis: int) -> Any:
        """Rows along an axis as they lie on the mesh: the inverse of ``restore``."""
        return array[(*[slice(None)] * axis, self.sources(0, self.num_padded))]

    def agrees_with(self, other: RowOrder) -> bool:
        """Whether both restore alike."""
        if (self.num_rows, self.num_padded, self.axes) != (other.num_rows, other.num_padded, other.axes):
            return False
        if isinstance(self.positions, slice) and isinstance(other.positions, slice):
            return True
        return np.array_equal(self.sources(0, self.num_padded), other.sources(0, self.num_padded))


class Registered(NamedTuple):
    """What is known of an array that holds padded rows.

    Attributes:
        order: where the caller's rows lie in it, along its leading axis.
        bookkeeping: whether it says where rows lie and is no data, as a mask.
    """

    order: RowOrder
    bookkeeping: bool


class RowAxis(NamedTuple):
    """The axis of a site's value along which padded rows lie.

    Attributes:
        axis: counted from the front of the value.
        order: where the caller's rows lie along it.
    """

    axis: int
    order: RowOrder


# By identity, since arrays are not hashable; an entry ends with its array.
_registered: dict[int, Registered] = {}


def register(array: Array, order: RowOrder, *, bookkeeping: bool = False) -> None:
    """Remember how the rows of an array lie, as long as it lives."""
    _registered[id(array)] = Registered(order, bookkeeping)
    weakref.finalize(array, _registered.pop, id(array), None).atexit = False


def registered(array: Any) -> Registered | None:
    """What is known of the rows of an array; None for one that was not registered."""
    return _registered.get(id(array))


def row_axes(model: Model, sites: Mapping[str, Site]) -> dict[str, RowAxis]:
    """The sites along whose values padded rows lie.

    Such a site has an axis as long as the padded rows. Its pieces lie on the shards along that axis, as the rows do; or
    it is no latent, and rows reach it that the compiler shards. Of several tables it is the one of which rows reach it.

    Args:
        model: a traced model, whose arguments and closed-over arrays are the very ones that were registered.
        sites: its sites.

    Raises:
        MeshError: a site may belong to either of two tables.
    """
    known = [registered(leaf) for leaf in (*model.consts, *model.args)]
    orders: list[RowOrder] = []
    marks: list[frozenset[Any]] = []
    for entry in known:
        same = next((order for order in orders if entry is not None and order.agrees_with(entry.order)), None)
        if entry is not None and same is None:
            same = entry.order
            orders.append(same)
        marks.append(frozenset() if same is None else frozenset({same}))
    if not orders:
        return {}
    reaching = _closure(parents(model.program.jaxpr, marks))
    found = ((name, _row_axis(site, orders, reaching[name])) for name, site in sites.items() if name in reaching)
    return {name: row_axis for name, row_axis in found if row_axis is not None}


def restored_sites(sites: Mapping[str, Site], axes: Mapping[str, RowAxis]) -> dict[str, Site]:
    """Sites whose shapes are those of the caller's rows."""

    def restored(site: Site, row_axis: RowAxis) -> Site:
        shape = list(site.shape)
        shape[row_axis.axis] = row_axis.order.num_rows
        return dataclasses.replace(site, shape=tuple(shape))

    return {name: restored(site, axes[name]) if name in axes else site for name, site in sites.items()}


def restore(arrays: Mapping[str, Any], axes: Mapping[str, RowAxis], *, leading: int = 0) -> dict[str, Any]:
    """Arrays of sites with the rows in the caller's order, without the padding; the other arrays as they are.

    Args:
        arrays: values or pointwise log densities by the names of sites, on the host.
        axes: the result of ``row_axes``.
        leading: number of axes before those of the site, as chains and draws.
    """
    return {
        name: axes[name].order.restore(array, leading + axes[name].axis) if name in axes else array
        for name, array in arrays.items()
    }


def restore_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A model's arguments with the rows in the caller's order; masks of padding are left out."""
    restored = dict(arguments)
    for name, value in arguments.items():
        entry = registered(value)
        if entry is not None and entry.bookkeeping:
            del restored[name]
        elif entry is not None:
            restored[name] = entry.order.restore(np.asarray(fetch(value)), 0)
    return restored


def lay_out(values: Any, sites: Mapping[str, Site], axes: Mapping[str, RowAxis]) -> Any:
    """Values of latents in the caller's order, for one chain or for each on a leading axis, as they lie on the mesh.

    What is no mapping, no array, or as long as the padded rows, is returned as it is.
    """
    if hasattr(values, "data_vars"):  # a Dataset, as of a former run
        latents = [name for name, site in sites.items() if site.kind == "sample"]
        values = {name: values[name].values for name in latents if name in values.data_vars}
    if not isinstance(values, Mapping):
        return values

    def laid_out(name: str, value: Any) -> Any:
        if name not in axes or isinstance(value, str):
            return value
        array, (axis, order) = np.asarray(value), axes[name]
        axis += array.ndim - len(sites[name].shape)
        fits = 0 <= axis < array.ndim and array.shape[axis] == order.num_rows
        return order.lay_out(array, axis) if fits else value

    return {name: laid_out(name, value) for name, value in values.items()}


def _closure(edges: Mapping[str, frozenset[Any]]) -> dict[str, frozenset[Any]]:
    """What reaches each site, directly or through other sites."""
    found = dict(edges)
    grown = True
    while grown:
        grown = False
        for name, above in found.items():
            further = above.union(*(found[other] for other in above if other in found))
            if further != above:
                found[name], grown = further, True
    return found


def _row_axis(site: Site, orders: list[RowOrder], reaching: frozenset[Any]) -> RowAxis | None:
    for axis in range(len(site.shape) - site.event_dim):
        along = _jax.spec_axes(PartitionSpec(*site.spec[axis : axis + 1]))
        fitting = [
            order
            for order in orders
            if order.num_padded == site.shape[axis] and along == (frozenset(order.axes) if along else frozenset())
        ]
        evident = [order for order in fitting if order in reaching]
        if along and not evident:
            evident = fitting
        if not along and site.kind == "sample":  # coefficients, say, as many as there are rows
            evident = []
        if len(evident) > 1:
            raise MeshError(
                f"axis {axis} of the site may hold the rows of either of two tables",
                site=site.name,
                source=site.source,
                expected="rows of one table, or tables that are padded to different lengths",
                found=" and ".join(f"{order.num_rows} rows padded to {order.num_padded}" for order in evident),
                fix="append the masked rows of one table yourself, or put both tables into one",
            )
        if evident:
            return RowAxis(axis, evident[0])
    return None
