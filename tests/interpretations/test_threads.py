"""Eight threads at once trace, simulate, evaluate and transform models as one thread does: there is no shared state."""

import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.effects import tracing
from ppleffects.errors import DuplicateSiteError
from tests.effects.toys import tally, tallying

pytestmark = [
    pytest.mark.skipif(
        jax.config.jax_check_tracer_leaks, reason="the check takes the tracers of the other threads for leaked ones"
    ),
    # JAX's cache of compiled programs is no shared state of ours: a thread may read what another is writing.
    pytest.mark.filterwarnings("ignore:Error reading persistent compilation cache entry"),
]
THREADS = 8
STANDARD = dist.Normal(0.0, 1.0)


@jax.jit
def shared(x):
    """One function that is traced once for all threads."""
    ppl.sample("shared", dist.Normal(x, 1.0))
    return jnp.sin(x)


def regression(y):
    slope = ppl.sample("slope", STANDARD)
    scale = ppl.sample("scale", dist.HalfNormal(1.0))
    mean = ppl.deterministic("mean", slope * jnp.arange(y.size))
    ppl.observe("y", dist.Normal(mean, scale), y)
    return shared(slope)


def walk(y):
    def step(x, y):
        x = ppl.sample("x", dist.Normal(0.9 * x, 0.5))
        jax.checkpoint(lambda x: ppl.observe("y", dist.StudentT(3.0, x, 1.0), y))(x)
        return x, lax.cond(y > 0, lambda: ppl.sample("up", STANDARD), lambda: ppl.sample("up", dist.Normal(1.0, 2.0)))

    return lax.scan(step, 0.0, y)[1]


def lanes(y):
    def lane(y):
        x = ppl.sample("x", dist.Gamma(2.0, 1.0))
        lax.cond(y > 0, lambda: ppl.factor("f", -x), lambda: ppl.factor("g", -(x**2)))
        return jax.jit(lambda: ppl.sample("w", dist.Beta(1.0 + x, 2.0)))()

    return jax.vmap(lane, axis_name="row")(y)


def mixed(y):
    ppl.scale(ppl.condition(ppl.scope(regression, "fixed"), {"fixed/slope": 0.5}), 0.5)(y)
    return ppl.mask(lanes, y > 0, sites=["x"])(y)


def sharded(mesh):
    def rows(level, y):
        x = ppl.sample("x", dist.Normal(level, jnp.exp(y)))
        ppl.observe("y", dist.Normal(x, 1.0), y)
        ppl.sample("same", STANDARD, spec=P())

    def model(y):
        level = ppl.sample("level", STANDARD)
        jax.shard_map(rows, mesh=mesh, in_specs=(P(), P("data")), out_specs=None)(level, y)

    return model


MODELS = {f.__name__: f for f in (regression, walk, lanes, mixed)}


def everything(model, y):
    """What the interpretations say of a model."""
    trace = ppl.simulate(model)(3, y)
    density = ppl.log_density(model)
    value, gradient = jax.value_and_grad(density)(trace.latents, y)
    again = ppl.evaluate(model)(trace.latents, y)
    sites = {name: (s.kind, s.shape, str(s.dtype), s.dims, s.source) for name, s in ppl.sites(model)(y).items()}
    position = ppl.target(model)(y).unconstrain(trace.latents)
    arrays = trace.values, trace.log_probs, trace.log_prob, trace.retval, value, gradient, again.log_probs, position
    return jax.tree.map(np.asarray, arrays), sites


def in_threads(jobs):
    """Runs functions at once, each in a thread of its own; returns their results, or raises the first error."""
    start, results, errors = threading.Barrier(len(jobs)), [None] * len(jobs), []

    def work(number, job):
        try:
            start.wait(60)
            results[number] = job()
        except BaseException as error:  # what is raised in a thread would be lost
            errors.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results


def assert_same(found, expected):
    assert found[1] == expected[1]
    assert jax.tree.structure(found[0]) == jax.tree.structure(expected[0])
    jax.tree.map(np.testing.assert_array_equal, found[0], expected[0])


def data(seed=0):
    return jnp.sin(jnp.arange(4.0) + seed) + 0.1


@pytest.mark.parametrize("name", MODELS)
def test_one_model_in_eight_threads(name):
    jax.clear_caches()
    found = in_threads([lambda: everything(MODELS[name], data())] * THREADS)
    jax.clear_caches()
    expected = everything(MODELS[name], data())
    for result in found:
        assert_same(result, expected)


def test_a_sharded_model_in_eight_threads(mesh_data):
    model = sharded(mesh_data)
    found = in_threads([lambda: everything(model, data())] * THREADS)
    expected = everything(model, data())
    for result in found:
        assert_same(result, expected)


def test_eight_models_in_eight_threads():
    """Models that differ in a constant, a name, a branch or their data, at the same time, more than once each."""
    inner = [regression, walk, lanes]

    def make(number):
        def model(y):
            x = ppl.sample(f"x{number % 3}", dist.Normal(float(number), 1.0))
            if number % 2:
                ppl.factor("f", -(x**2))
            ppl.scope(inner[number % 3], "inner")(y)
            return shared(x)

        return model

    def job(number):
        return lambda: [everything(make(number), data(number)) for _ in range(2)]

    jax.clear_caches()
    found = in_threads([job(number) for number in range(THREADS)])
    for number, results in enumerate(found):
        expected = everything(make(number), data(number))
        for result in results:
            assert_same(result, expected)


@pytest.mark.skipif(jax.device_count() < 2, reason="the programs' meshes have two devices")
def test_programs_are_right_at_once():
    """Programs that hold branches, lanes, loops, shards and transformations, each compared with its plain meaning."""
    pytest.importorskip("tensorflow_probability.substrates.jax", reason="the programs draw from TFP's distributions")
    from tests.property.examples import EXAMPLES
    from tests.property.test_programs import checked

    jax.clear_caches()
    in_threads([lambda program=program: checked(program) for program in EXAMPLES.values()])


def test_rules_for_derivatives_asked_for_at_once():
    """Eight threads want the derivative rules of one traced program for the first time, in the midst of each other."""

    def slow(primals, tangents):
        (x,), (slope,) = primals, tangents
        for _ in range(10):
            x = jnp.sin(jnp.abs(x))
        return jnp.sin(primals[0]) + 0 * x, jnp.cos(primals[0]) * slope

    functions = [jax.custom_jvp(jnp.sin) for _ in range(10)]
    for function in functions:
        function.defjvp(slow)

    def body(x):
        tally(sum(jax.vmap(function)(x).sum() for function in functions))
        return x

    x = jnp.arange(3.0)
    traced = tracing.trace(body, x)

    def slopes(scale):
        total = lambda x: tallying().run(traced.jaxpr, traced.consts, jnp.zeros(()), x)[1]  # noqa: E731
        return jax.jit(jax.grad(lambda x: scale * total(x)))(x)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        found = in_threads([lambda scale=scale: slopes(1.0 + scale) for scale in range(THREADS)])
    finally:
        sys.setswitchinterval(interval)
    np.testing.assert_allclose(found, [10 * (1.0 + scale) * jnp.cos(x) for scale in range(THREADS)], rtol=1e-12)


def test_errors_stay_in_their_thread():
    """Some threads fail, in the midst of tracing; the others do not notice."""

    def broken(y):
        ppl.sample("x", STANDARD)
        ppl.sample("x", STANDARD)

    def fails():
        with pytest.raises(DuplicateSiteError, match="two sites have this name"):
            ppl.simulate(broken)(0, data())

    jobs = [fails, lambda: everything(regression, data())] * (THREADS // 2)
    expected = everything(regression, data())
    for result in in_threads(jobs)[1::2]:
        assert_same(result, expected)
