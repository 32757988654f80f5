"""A site is never lost, doubled or confused with another: caches, unused values, threads, duplicates, names."""

import functools
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax

import ppleffects as ppl
from ppleffects.errors import DuplicateSiteError

NORMAL = dist.Normal(0.0, 1.0)
LOG_2PI = np.log(2 * np.pi)


def normal(x):
    return np.sum(-0.5 * np.asarray(x) ** 2 - 0.5 * LOG_2PI)


@jax.jit
def cached(x):
    ppl.sample("a", dist.Normal(x, 1.0))
    ppl.observe("b", NORMAL, x)
    ppl.factor("c", x)
    return 2 * x


@jax.jit
@jax.checkpoint
def cached_checkpoint(x):
    ppl.sample("a", dist.Normal(x, 1.0))
    return x


def test_a_cached_jit_keeps_its_sites():
    def model(x):
        return cached(x)

    for _ in range(3):
        trace = ppl.simulate(model)(0, 0.5)
        assert sorted(trace.values) == ["a", "b"]
        expected = normal(trace.values["a"] - 0.5) + normal(0.5) + 0.5
        np.testing.assert_allclose(ppl.log_density(model)(trace.latents, 0.5), expected)
        np.testing.assert_allclose(trace.log_prob, expected)

    def other(x):
        return cached(x) + 1.0

    assert sorted(ppl.sites(other)(0.5)) == ["a", "b", "c"]
    assert sorted(ppl.sites(lambda x: cached_checkpoint(x))(0.5)) == ["a"]


def test_the_model_itself_may_be_a_jit():
    values = {"a": 0.1}
    expected = normal(0.1 - 0.5) + normal(0.5) + 0.5
    for _ in range(2):
        np.testing.assert_allclose(ppl.log_density(cached)(values, 0.5), expected)
        np.testing.assert_allclose(jax.jit(ppl.log_density(cached))(values, 0.5), expected)


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f)), lambda f: f])
def test_unused_values_count(wrap):
    def body():
        ppl.sample("x", NORMAL)
        ppl.sample("y", NORMAL)

    def model():
        wrap(body)()
        lax.scan(lambda c, _: (c, (ppl.sample("z", NORMAL), None)[1]), 0.0, length=2)

    trace = ppl.simulate(model)(0)
    assert sorted(trace.latents) == ["x", "y", "z"]
    expected = sum(normal(v) for v in trace.latents.values())
    np.testing.assert_allclose(ppl.log_density(model)(trace.latents), expected)
    np.testing.assert_allclose(jax.jit(ppl.log_density(model))(trace.latents), expected)


def test_checkpoint_under_a_gradient_counts_once():
    def model():
        x = ppl.sample("x", NORMAL)
        jax.checkpoint(lambda x: ppl.observe("y", dist.Normal(jnp.sin(x), 1.0), 0.5))(x)
        jax.checkpoint(lambda x: ppl.factor("f", x**3))(x)

    def density(x):
        return ppl.log_density(model)({"x": x})

    def plain(x):
        return -0.5 * x**2 - 0.5 * (0.5 - jnp.sin(x)) ** 2 + x**3 - LOG_2PI

    for fn in (lambda f: f, jax.grad, jax.hessian, jax.jacfwd):
        np.testing.assert_allclose(fn(density)(0.7), fn(plain)(0.7), rtol=1e-12)


@pytest.mark.skipif(
    jax.config.jax_check_tracer_leaks, reason="the check takes the tracers of the other threads for leaked ones"
)
def test_two_threads_at_once():
    def model(x):
        cached(x)
        lax.scan(lambda c, _: (c, ppl.sample("s", NORMAL)), 0.0, length=3)

    expected = ppl.simulate(model)(7, 0.5).log_prob
    found, errors = [], []

    def work(seed):
        try:
            for _ in range(3):
                found.append(float(ppl.simulate(lambda x: model(x))(seed, 0.5).log_prob))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(7,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    np.testing.assert_allclose(found, expected)


def test_a_duplicate_names_both_lines():
    def model():
        ppl.sample("x", NORMAL)
        ppl.observe("x", NORMAL, 0.0)

    line = model.__code__.co_firstlineno
    match = rf"site 'x' at .*: two sites have this name: .*py:{line + 1} and .*py:{line + 2}"
    for run in (ppl.sites(model), lambda: ppl.simulate(model)(0), lambda: ppl.log_density(model)({"x": 0.0})):
        with pytest.raises(DuplicateSiteError, match=match):
            run()


def test_a_duplicate_by_two_calls_of_a_cached_function_names_the_calls():
    def model():
        cached_checkpoint(0.0)
        cached_checkpoint(1.0)

    line = model.__code__.co_firstlineno
    with pytest.raises(DuplicateSiteError, match=rf"py:{line + 1} and .*py:{line + 2}"):
        ppl.sites(model)()


def test_a_duplicate_by_two_calls_within_one_function_names_the_calls():
    def model():
        @jax.jit
        def outer():
            cached_checkpoint(0.0)
            cached_checkpoint(1.0)

        outer()

    line = model.__code__.co_firstlineno
    with pytest.raises(DuplicateSiteError, match=rf"py:{line + 3} and .*py:{line + 4}"):
        ppl.sites(model)()


def test_one_line_traced_twice_says_what_to_write():
    def looped():
        for _ in range(2):
            ppl.sample("x", NORMAL)

    def mapped():
        lax.map(lambda y: ppl.sample("x", NORMAL), jnp.zeros(5), batch_size=2)

    def associative():
        lax.associative_scan(lambda a, b: (ppl.factor("x", 1.0), a + b)[1], jnp.arange(4.0))

    for model in (looped, mapped, associative):
        with pytest.raises(DuplicateSiteError, match=r"site 'x'(.|\n)*fix: .*(scan|vmap|Python loop)"):
            ppl.sites(model)()


def test_branches_may_share_a_name_and_other_conds_may_not():
    def shared(p):
        return lax.cond(p, lambda: ppl.sample("x", NORMAL), lambda: ppl.sample("x", dist.Normal(5.0, 1.0)))

    assert sorted(ppl.simulate(shared)(0, jnp.array(True)).latents) == ["x"]

    def twice(p):
        return shared(p) + shared(p)

    with pytest.raises(DuplicateSiteError, match="site 'x'"):
        ppl.sites(twice)(jnp.array(True))

    def nested(p):
        lax.cond(p, lambda: lax.cond(p, lambda: ppl.factor("f", 1.0), lambda: ppl.factor("f", 2.0)), lambda: None)
        lax.cond(p, lambda: ppl.factor("f", 1.0), lambda: None)

    with pytest.raises(DuplicateSiteError, match="site 'f'"):
        ppl.sites(nested)(jnp.array(True))


def test_the_kinds_share_one_space_of_names():
    def model():
        ppl.factor("x", 1.0)
        ppl.deterministic("x", 1.0)

    with pytest.raises(DuplicateSiteError, match="site 'x'"):
        ppl.evaluate(model)({})


def test_the_line_is_the_users_even_through_a_helper_of_another_function():
    def helper(name):
        return ppl.sample(name, NORMAL)

    model = functools.partial(helper, "x")
    site = ppl.sites(model)()["x"]
    assert site.source == f"test_sites_kept.py:{helper.__code__.co_firstlineno + 1}"


PROGRAM = """
import jax, numpyro.distributions as dist, ppleffects as ppl
def model():
    ppl.sample("x", dist.Normal(0.0, 1.0)); ppl.sample("y", dist.Gamma(2.0, 1.0))
print(repr({k: float(v) for k, v in sorted(ppl.simulate(model)(3).values.items())}))
"""


def test_draws_are_the_same_in_every_process():
    found = set()
    for seed in ("0", "1"):
        run = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**__import__("os").environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(run.stdout)
    assert len(found) == 1

    def model():
        ppl.sample("y", dist.Gamma(2.0, 1.0))
        ppl.sample("x", NORMAL)

    here = {k: float(v) for k, v in sorted(ppl.simulate(model)(3).values.items())}
    assert repr(here) == found.pop().strip()
