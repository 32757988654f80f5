"""How the tests run (host devices, precision, caches), and the meshes and references that they share."""

import json
import math
import os
import sys
import warnings
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
    # Small decompositions are slower in several threads, above all where several host devices make them at once.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")


_set_environment()

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# For tests that fail in JAX's own code when JAX_CHECK_TRACER_LEAKS is set.
SHARDED_GRADIENT = pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks, reason="the gradient of a shard_map leaks tracers within JAX itself"
)


def _mesh(axis_type: AxisType, **sizes: int) -> Mesh:
    needed = math.prod(sizes.values())
    if jax.device_count() < needed:
        pytest.skip(f"needs {needed} devices and finds {jax.device_count()}: set PPLEFFECTS_TEST_DEVICES=4")
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


@pytest.fixture(autouse=True)
def _strict_ranks(request, monkeypatch):
    """Rank promotion raises.

    Outside of the tests of `effects`, what is not the project's own may promote: many constructors, samplers and
    densities of NumPyro and TFP do. jax is asked to warn, and a warning from the project's code is made an error.
    """
    if Path(__file__).parent / "effects" in request.path.parents:
        with jax.numpy_rank_promotion("raise"):
            yield
        return
    show = warnings.showwarning

    def judge(message, *rest, **options):
        if "rank promotion" not in str(message):
            return show(message, *rest, **options)
        if _is_strict(_innermost_file(sys._getframe(1))):
            raise ValueError(str(message))

    with warnings.catch_warnings(), jax.numpy_rank_promotion("warn"):
        warnings.filterwarnings("always", message=".*rank promotion")
        monkeypatch.setattr(warnings, "showwarning", judge)
        yield


def _innermost_file(frame) -> str:
    """The file of the innermost code that is neither jax's nor Python's own."""
    while frame is not None:
        path = frame.f_code.co_filename
        if "/site-packages/jax/" not in path and not path.endswith(("/warnings.py", "/functools.py", "/contextlib.py")):
            return path
        frame = frame.f_back
    return ""


def _is_strict(path: str) -> bool:
    """The package is; so are the tests, but for those programs that are drawn at random or are samplers' targets."""
    loose = ("tests/property", "tests/inference", "benchmarks", "examples")
    own = "/site-packages/" not in path and Path(path).is_relative_to(ROOT)
    return own and not any(Path(path).is_relative_to(ROOT / folder) for folder in loose)


@pytest.fixture(scope="module", autouse=True)
def _few_programs():
    """Each compiled program takes memory maps, of which Linux gives a process 65,530; beyond them it crashes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def _float32_tolerance(monkeypatch):
    """Without 64-bit floats numbers are compared to the precision that is promised there."""
    if not jax.config.jax_enable_x64:
        close = np.testing.assert_allclose

        def rounded(actual, desired, rtol=0.0, atol=0.0, **options):
            close(actual, desired, rtol=max(rtol, 1e-4), atol=max(atol, 1e-5), **options)

        monkeypatch.setattr(np.testing, "assert_allclose", rounded)


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
