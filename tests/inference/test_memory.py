"""Memory: on the devices it does not grow with the number of draws, on the host it is that of the draws."""

import gc
import tracemalloc

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest

import ppleffects as ppl
from ppleffects.inference.progress import Progress

pytestmark = pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")

SETTINGS = {"num_warmup": 50, "num_chains": 2, "progress": False}
KERNELS = {"own": ppl.NUTS(max_tree_depth=3), "numpyro": ppl.NUTS(max_tree_depth=3, engine="numpyro")}


def model():
    ppl.sample("x", dist.Normal(jnp.zeros(300), 1.0))


def on_devices():
    return sum(array.nbytes for array in jax.live_arrays())


@pytest.mark.parametrize("kernel", KERNELS)
def test_device_bytes_do_not_grow_with_draws(monkeypatch, kernel):
    seen = []
    monkeypatch.setattr(Progress, "update", lambda self, *_, **__: seen.append(on_devices()))

    def largest(num_samples):
        seen.clear()
        ppl.mcmc(model, KERNELS[kernel], num_samples=num_samples, **SETTINGS)(0)
        return max(seen)

    few, many = largest(100), largest(3000)
    assert many <= 1.01 * few
    assert few > 2 * 300 * 8


def test_nothing_stays_on_the_devices_after_a_run():
    def run(key):
        ppl.mcmc(model, KERNELS["own"], num_samples=20, **SETTINGS)(key)
        gc.collect()
        return len(jax.live_arrays()), on_devices()

    run(0)
    first = run(1)
    assert [run(key) for key in range(2, 12)] == [first] * 10


def test_host_memory_is_that_of_the_draws():
    ppl.mcmc(model, KERNELS["own"], num_samples=20, **SETTINGS)(0)
    gc.collect()
    tracemalloc.start()
    try:
        tree = ppl.mcmc(model, KERNELS["own"], num_samples=1500, **SETTINGS)(0)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tree.posterior["x"].nbytes > 7e6
    assert peak <= 1.5 * tree.posterior["x"].nbytes


def test_draws_of_a_checkpoint_do_not_stay_in_memory(tmp_path):
    settings = SETTINGS | {"checkpoint": tmp_path / "run.zarr"}
    ppl.mcmc(model, KERNELS["own"], num_samples=20, **SETTINGS, checkpoint=tmp_path / "warm.zarr")(0)
    gc.collect()
    tracemalloc.start()
    try:
        tree = ppl.mcmc(model, KERNELS["own"], num_samples=1500, **settings)(0)
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert after <= 0.3 * tree.posterior["x"].nbytes
