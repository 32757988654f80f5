"""Names of dimensions, coordinates, constant data, and what survives a file."""

import types

import jax
import numpy as np
import pytest
import xarray

from ppleffects.errors import SettingsError
from ppleffects.inference.datatree import check_coords, constant_data, site_dims, to_datatree


def site(shape, dims=()):
    return types.SimpleNamespace(shape=shape, dims=dims)


def test_dims_of_sites():
    sites = {
        "a": site((3, 2), ("school", None)),
        "b": site((3,), ("school",)),
        "c": site((4,), ("school",)),  # of another length
        "d": site((5, 5), ("row", "row")),
        "e": site((4,), ("chain",)),
        "f": site(()),
    }
    assert site_dims(sites) == {
        "a": ["school", "a_dim_0"],
        "b": ["school"],
        "c": ["c_dim_0"],
        "d": ["row", "d_dim_0"],
        "e": ["e_dim_0"],
        "f": [],
    }


def test_coords_must_fit():
    sites = {"a": site((3,), ("school",))}
    check_coords(sites, {"school": list("xyz")})
    with pytest.raises(SettingsError, match=r"(?s)'town', which no site has.*\['school'\].*dims= at the site"):
        check_coords(sites, {"town": list("xyz")})
    with pytest.raises(SettingsError, match=r"(?s)'school' have the wrong length.*3 values.*2"):
        check_coords(sites, {"school": list("xy")})


def test_constant_data_are_arrays_that_are_not_observed():
    y = np.arange(3.0)
    arguments = {
        "x": y + 1,
        "y": y,
        "same": y.copy(),
        "n": 3,
        "key": jax.random.key(0),
        "label": "a",
        "scalar": np.float64(1),
    }
    assert set(constant_data(arguments, {"y": y})) == {"x"}


def test_tree_through_zarr(tmp_path):
    draws = np.random.default_rng(0).normal(size=(2, 5, 3))
    tree = to_datatree(
        {"posterior": {"a": draws}, "sample_stats": {"lp": draws[..., 0]}, "log_likelihood": {}},
        {"a": site((3,), ("school",))},
        coords={"school": ["x", "y", "z"]},
        attrs={"inference_library": "ppleffects", "complete": False, "problems": ["one"], "max_rhat": float("nan")},
    )
    tree.to_zarr(tmp_path / "run.zarr", consolidated=False)
    back = xarray.open_datatree(tmp_path / "run.zarr", engine="zarr", consolidated=False)
    np.testing.assert_array_equal(back.posterior.a.sel(school="y"), draws[..., 1])
    assert back.posterior.a.dims == ("chain", "draw", "school")
    assert set(back.children) == {"posterior", "sample_stats"}
    assert back.attrs["complete"] is False
    assert back.attrs["problems"] == ["one"]
    assert back.posterior.attrs["inference_library"] == "ppleffects"
