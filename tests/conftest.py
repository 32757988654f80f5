"""How the tests run (host devices, precision, caches), and the meshes and references that they share."""

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _set_environment() -> None:
    """Settings that jax and matplotlib read when they are imported; what the caller has set stays."""
    count = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if count not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {count}={os.environ.get('PPLEFFECTS_TEST_DEVICES', '4')}".strip()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("JAX_ENABLE_X64", "1")
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    os.environ.setdefault("MPLBACKEND", "Agg")


_set_environment()

import jax
from jax.sharding import AxisType, Mesh


def _mesh(axis_type: AxisType, **sizes: int) -> Mesh:
    if jax.device_count() < 4:
        pytest.skip(f"needs 4 devices and finds {jax.device_count()}: set PPLEFFECTS_TEST_DEVICES=4")
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


@pytest.fixture(autouse=True)
def _strict_ranks(request):
    """Rank promotion raises in the tests of `effects`.

    Elsewhere it cannot: NumPyro's samplers and log-densities promote ranks (Beta, Dirichlet, MultivariateNormal, LKJ,
    Categorical and more, as soon as a sample shape is given).
    """
    if Path(__file__).parent / "effects" in request.path.parents:
        with jax.numpy_rank_promotion("raise"):
            yield
    else:
        yield


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def axis_type(request) -> AxisType:
    """Both types of mesh axes, for a test that builds its own mesh."""
    return request.param


@pytest.fixture(scope="session")
def mesh_data() -> Mesh:
    """Four devices along `data`, Auto axes."""
    return _mesh(AxisType.Auto, data=4)


@pytest.fixture(scope="session")
def mesh_2x2() -> Mesh:
    """Two devices along `chains`, two along `data`, Auto axes."""
    return _mesh(AxisType.Auto, chains=2, data=2)


@pytest.fixture(scope="session")
def mesh_data_explicit() -> Mesh:
    """Four devices along `data`, Explicit axes (the default of `jax.make_mesh`)."""
    return _mesh(AxisType.Explicit, data=4)


@pytest.fixture(scope="session")
def mesh_2x2_explicit() -> Mesh:
    """Two devices along `chains`, two along `data`, Explicit axes."""
    return _mesh(AxisType.Explicit, chains=2, data=2)


@pytest.fixture(scope="session")
def posteriordb():
    """A function from a posterior's name to its data and its reference, both as `tests/data/posteriordb` has them."""

    def load(name: str) -> tuple[dict, dict]:
        folder = ROOT / "tests" / "data" / "posteriordb" / name
        data, reference = (json.loads((folder / f"{part}.json").read_text()) for part in ("data", "reference"))
        return data, reference

    return load
