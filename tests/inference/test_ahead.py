"""Programs that are compiled side by side are those that are called: nothing is compiled twice, and no draw changes."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import ppleffects as ppl
from ppleffects.inference import run
from ppleffects.inference.ahead import compile_ahead, is_uncommitted, without_collection

pytestmark = pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")

COMPILED = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: COMPILED.append(event) if event.endswith("backend_compile_duration") else None
)


def model(y):
    loc = ppl.sample("loc", dist.Normal(0.0, 1.0))
    ppl.observe("y", dist.Normal(loc, 1.0), y)


def draws_and_compilations(y, engine="ppleffects"):
    jax.clear_caches()
    before = len(COMPILED)
    settings = {"num_warmup": 5, "num_samples": 5, "num_chains": 2, "progress": False}
    tree = ppl.mcmc(model, ppl.NUTS(engine=engine), **settings)(0, y)
    return tree.posterior["loc"].values, len(COMPILED) - before


@pytest.mark.parametrize("engine", ["ppleffects", "numpyro"])
@pytest.mark.parametrize("place", [np.asarray, lambda y: jax.device_put(y, jax.devices()[0])], ids=["host", "device"])
def test_compiling_side_by_side_changes_nothing(monkeypatch, engine, place):
    y = place(np.arange(3.0))
    beside, number_beside = draws_and_compilations(y, engine)
    monkeypatch.setattr(run, "is_uncommitted", lambda _: False)
    after, number_after = draws_and_compilations(y, engine)
    np.testing.assert_array_equal(beside, after)
    assert number_beside == number_after


def test_arrays_that_were_put_on_a_device_are_seen():
    assert is_uncommitted((jnp.zeros(2), np.zeros(2), 1.0))
    assert not is_uncommitted({"y": jax.device_put(jnp.zeros(2), jax.devices()[0])})


def test_what_the_compiler_raises_is_raised():
    program = jax.jit(lambda x: x + 1, compiler_options={"no_such_option": 1})
    future = compile_ahead(program, (jnp.zeros(2),), {})
    with pytest.raises(Exception, match="no_such_option"):
        future.result()


def fail():
    assert not gc.isenabled()
    raise ValueError("here")


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_left_as_it_was(was_enabled):
    try:
        (gc.enable if was_enabled else gc.disable)()
        with pytest.raises(ValueError, match="here"), without_collection():
            fail()
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
