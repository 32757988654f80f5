"""From the arrays of a run to an ArviZ DataTree: groups, dimension names, coordinates, attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from ppleffects.errors import SettingsError
from ppleffects.inference.processes import fetch
from ppleffects.language.arguments import as_mapping

if TYPE_CHECKING:
    import xarray

# Names that ArviZ gives to the leading axes of a group.
SAMPLE_DIMS = ("chain", "draw")


def site_dims(sites: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of the axes of each site's value: the site's own, else ``{name}_dim_{number}``, as ArviZ names them.

    A name that two sites give to axes of different lengths stays with the first; the other takes ArviZ's. So does a
    dimension that is named as a site is: xarray would drop the site.
    """
    lengths: dict[str, int] = {}
    dims: dict[str, list[str]] = {}
    for name, site in sites.items():
        if site.shape is None:
            continue
        given = tuple(site.dims or ())
        given += (None,) * (len(site.shape) - len(given))
        chosen: list[str] = []
        unnamed = 0
        for dim, length in zip(given, site.shape, strict=True):
            taken = dim in SAMPLE_DIMS or dim in chosen or dim in sites
            if dim is None or taken or lengths.setdefault(dim, length) != length:
                dim, unnamed = f"{name}_dim_{unnamed}", unnamed + 1
            chosen.append(dim)
        dims[name] = chosen
    return dims


def check_coords(sites: Mapping[str, Any], coords: Mapping[str, Any] | None) -> None:
    """Raise where coordinates do not fit, before anything is sampled.

    Raises:
        SettingsError: a coordinate names a dimension of no site, or has another length.
    """
    lengths = {
        dim: length
        for name, dims in site_dims(sites).items()
        for dim, length in zip(dims, sites[name].shape, strict=True)
    }
    for dim, values in as_mapping({} if coords is None else coords, "coords=").items():
        if dim not in lengths:
            raise SettingsError(
                f"coords= names the dimension '{dim}', which no site has",
                expected=f"one of {sorted(lengths)}",
                found=f"'{dim}'",
                fix="name the axis with dims= at the site",
            )
        if np.shape(values) != (lengths[dim],):
            raise SettingsError(
                f"coords= for the dimension '{dim}' have the wrong length",
                expected=f"{lengths[dim]} values",
                found=f"shape {np.shape(values)}",
                fix="give one value for each entry along the dimension",
            )


def constant_data(arguments: Mapping[str, Any], observed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Those arguments that are arrays, save the ones that are observed values."""
    arrays = {name: np.asarray(fetch(value)) for name, value in arguments.items() if _is_data(value)}
    return {
        name: array
        for name, array in arrays.items()
        if name not in observed and not any(_same(array, value) for value in observed.values())
    }


def to_datatree(
    groups: Mapping[str, Mapping[str, np.ndarray]],
    sites: Mapping[str, Any],
    *,
    coords: Mapping[str, Any] | None = None,
    attrs: Mapping[str, Any] | None = None,
) -> xarray.DataTree:
    """A DataTree of the given groups.

    Args:
        groups: arrays by group and name; in groups of draws ``(chain, draw, *site)``. Empty ones are left out.
        sites: the model's sites, whose ``dims`` name axes.
        coords: values along named dimensions.
        attrs: attributes of the tree; those whose name starts with ``inference_library`` also of its groups of draws.
    """
    import arviz_base  # imported when used, so that `import ppleffects` stays light

    data = {group: dict(arrays) for group, arrays in groups.items() if arrays}
    attrs = dict(attrs or {})
    library = {name: value for name, value in attrs.items() if name.startswith("inference_library")}
    group_attrs: dict[str, dict[str, Any]] = {group: library for group in data if "data" not in group}
    return arviz_base.from_dict(
        data,
        dims=site_dims(sites),
        coords=dict(coords or {}),
        attrs={"/": attrs, **group_attrs},
        save_warmup=True,
        check_conventions=False,  # which warns of fewer draws than chains
    )


def _is_data(value: Any) -> bool:
    return isinstance(value, np.ndarray | jax.Array) and np.ndim(value) > 0 and not _is_key(value)


def _is_key(value: Any) -> bool:
    return isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key)


def _same(array: np.ndarray, other: Any) -> bool:
    other = np.asarray(other)
    return array.shape == other.shape and bool(np.array_equal(array, other))
