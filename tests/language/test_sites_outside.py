"""A site outside of an interpretation raises, wherever it stands; vmaps give every lane a site of its own."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import ppleffects as ppl
from ppleffects.errors import DTypeError, PPLError, UnhandledEffectError


def sampling(x):
    ppl.sample("lonely", dist.Normal(0.0, 1.0))
    return x


def observing(x):
    ppl.observe("lonely", dist.Normal(0.0, 1.0), x)
    return x


def factoring(x):
    ppl.factor("lonely", x)
    return x


def noting(x):
    ppl.deterministic("lonely", x)
    return x


SITES = [sampling, observing, factoring, noting]
WRAPS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.ones(2) * x),
    "scan": lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0],
    "jit scan": lambda f: jax.jit(lambda x: jax.lax.scan(lambda c, _: (f(c), None), x, length=2)[0]),
    "checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "cond": lambda f: lambda x: jax.lax.cond(x > 0, f, lambda y: y, x),
    "cond of lanes": lambda f: lambda x: jax.vmap(lambda x: jax.lax.cond(x > 0, f, lambda y: y, x))(x * jnp.ones(2)),
    "jit cond of lanes": lambda f: jax.jit(jax.vmap(lambda x: jax.lax.cond(x.sum() > 0, f, lambda y: y, x.sum()))),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("site", SITES)
def test_unhandled_sites_name_themselves_and_their_line(site, wrap):
    line = site.__code__.co_firstlineno + 1
    with pytest.raises(UnhandledEffectError, match=rf"site 'lonely' at test_sites_outside.py:{line}(.|\n)*simulate"):
        WRAPS[wrap](site)(jnp.ones((2, 1)) if wrap == "jit cond of lanes" else jnp.array(1.0))


def test_unhandled_in_shard_map(mesh_data):
    P = jax.sharding.PartitionSpec
    fn = jax.shard_map(factoring, mesh=mesh_data, in_specs=P("data"), out_specs=P("data"))
    with pytest.raises(UnhandledEffectError, match="site 'lonely'"):
        jax.jit(fn)(jnp.ones(4))


def test_unhandled_in_a_thread():
    errors = []

    def work():
        try:
            sampling(1.0)
        except UnhandledEffectError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(errors) == 1


def test_an_interpretation_leaves_nothing_behind():
    ppl.simulate(sampling)(0, 1.0)
    with pytest.raises(UnhandledEffectError, match="site 'lonely'"):
        sampling(1.0)


@pytest.mark.parametrize("wrap", ["plain", "jit", "checkpoint", "scan", "cond"])
def test_lanes_without_batched_operands_draw_for_themselves(wrap):
    def draw():
        return ppl.sample("x", dist.Normal(0.0, 1.0))

    inner = {
        "plain": draw,
        "jit": jax.jit(draw),
        "checkpoint": jax.checkpoint(draw),
        "scan": lambda: jax.lax.scan(lambda c, _: (c, draw()), 0.0, length=2)[1],
        "cond": lambda: jax.lax.cond(jnp.array(True), draw, draw),
    }[wrap]

    def model():
        return jax.vmap(lambda _: inner())(jnp.zeros(3))

    trace = ppl.simulate(model)(0)
    x = np.asarray(trace.values["x"])
    assert x.shape == ((2, 3) if wrap == "scan" else (3,))
    assert len(set(x.ravel().tolist())) == x.size
    np.testing.assert_array_equal(trace.retval, x.T if wrap == "scan" else x)
    np.testing.assert_allclose(ppl.log_density(model)(trace.latents), dist.Normal(0.0, 1.0).log_prob(x).sum())


def test_lanes_of_unbatched_observations_and_factors_count():
    def model():
        def lane(_):
            ppl.observe("y", dist.Normal(0.0, 1.0), 0.0)
            ppl.factor("f", 1.0)
            ppl.deterministic("d", 2.0)

        jax.vmap(lane)(jnp.zeros(3))

    trace = ppl.evaluate(model)({})
    np.testing.assert_allclose(trace.log_prob, 3 * (1.0 - 0.5 * np.log(2 * np.pi)))
    assert {n: v.shape for n, v in trace.values.items()} == {"y": (3,), "d": (3,)}


@pytest.mark.parametrize("name", ["", None, 3])
def test_a_site_needs_a_name(name):
    with pytest.raises(PPLError, match=r"at test_sites_outside.py:\d+: a site needs a name"):
        ppl.simulate(lambda: ppl.sample(name, dist.Normal(0.0, 1.0)))(0)


def test_python_numbers_lists_and_numpy_are_values():
    def model():
        ppl.observe("a", dist.Normal(0, 1), 1)
        ppl.observe("b", dist.Normal(0, 1), [0.5, 1.0])
        ppl.observe("c", dist.Bernoulli(0.25), np.array([True, False]))
        ppl.factor("d", [1.0, 2.0])
        ppl.deterministic("e", (1, 2))

    def normal(x):
        return -0.5 * x**2 - 0.5 * np.log(2 * np.pi)

    expected = normal(1) + normal(0.5) + normal(1) + np.log(0.25 * 0.75) + 3
    np.testing.assert_allclose(ppl.log_density(model)({}), expected, rtol=1e-7)


def test_observe_returns_the_value_and_none_makes_a_latent():
    def model(y):
        return ppl.observe("y", dist.Normal(0.0, 1.0), y)

    assert float(ppl.evaluate(model)({}, 2.0).retval) == 2.0
    trace = ppl.simulate(model)(0, None)
    assert list(trace.latents) == ["y"]
    assert float(trace.retval) == float(trace.values["y"])
    assert float(ppl.log_density(model)({"y": 2.0}, None)) == float(ppl.log_density(model)({}, 2.0))


NOT_NUMBERS = {
    "a factor": (lambda: ppl.factor("x", object()), "found: object"),
    "a deterministic": (lambda: ppl.deterministic("x", "text"), "found: str"),
    "an observation": (lambda: ppl.observe("x", dist.Normal(0.0, 1.0), [[1.0], [2.0, 3.0]]), "found: list"),
    "a complex factor": (lambda: ppl.factor("x", 1.0 + 2.0j), "found: complex"),
}


@pytest.mark.parametrize("case", NOT_NUMBERS)
def test_what_is_not_real_is_refused(case):
    model, found = NOT_NUMBERS[case]
    with pytest.raises(DTypeError, match=rf"site 'x' at test_sites_outside.py:\d+: (.|\n)*{found}(.|\n)*fix: "):
        ppl.simulate(model)(0)
