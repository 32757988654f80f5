"""Value, gradient, Hessian-vector product and forward mode equal those of the plain density, in float32 too."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import numpyro.infer
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import ppleffects as ppl

LOG_2PI = np.log(2 * np.pi)


def walk(y):
    """A latent walk seen with noise, in a scan, plus a checkpoint and a cond."""

    def step(x, y):
        x = ppl.sample("x", dist.Normal(0.9 * x, 0.5))
        jax.checkpoint(lambda x: ppl.observe("y", dist.Normal(jnp.sin(x), 1.0), y))(x)
        lax.cond(y > 0, lambda x: ppl.factor("f", -(x**4)), lambda x: None, x)
        return x, None

    start = ppl.sample("start", dist.Normal(0.0, 1.0))
    lax.scan(step, start, y)


def plain_walk(values, y):
    before = jnp.concatenate([values["start"][None], values["x"][:-1]])
    total = -0.5 * values["start"] ** 2 - 0.5 * LOG_2PI
    total += jnp.sum(-0.5 * ((values["x"] - 0.9 * before) / 0.5) ** 2 - jnp.log(0.5) - 0.5 * LOG_2PI)
    total += jnp.sum(-0.5 * (y - jnp.sin(values["x"])) ** 2 - 0.5 * LOG_2PI)
    return total + jnp.sum(jnp.where(y > 0, -(values["x"] ** 4), 0.0))


@pytest.fixture(scope="module")
def problem():
    y = jnp.sin(jnp.arange(6.0) * 1.3)
    return {"start": jnp.array(0.3), "x": jnp.cos(jnp.arange(6.0))}, y


def test_value_gradient_hvp_and_forward_mode(problem):
    values, y = problem
    tangent = jax.tree.map(jnp.ones_like, values)
    ours, plain = (lambda v: ppl.log_density(walk)(v, y)), (lambda v: plain_walk(v, y))

    def close(a, b):
        return jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12), a, b)

    close(ours(values), plain(values))
    close(jax.grad(ours)(values), jax.grad(plain)(values))
    close(jax.jvp(ours, (values,), (tangent,)), jax.jvp(plain, (values,), (tangent,)))

    def hvp(f):
        return jax.jvp(jax.grad(f), (values,), (tangent,))[1]

    close(hvp(ours), hvp(plain))
    close(jax.jacfwd(ours)(values), jax.jacrev(plain)(values))

    def reverse(f):
        return jax.grad(lambda v: sum(jnp.sum(g) for g in jax.tree.leaves(jax.grad(f)(v))))(values)

    close(reverse(ours), reverse(plain))


def test_against_finite_differences(problem):
    values, y = problem
    check_grads(
        lambda v: ppl.log_density(walk)(v, y), (values,), order=2, rtol=1e-4 if jax.config.jax_enable_x64 else 1e-2
    )


def test_gradient_with_respect_to_data(problem):
    values, y = problem
    ours = jax.grad(lambda y: ppl.log_density(walk)(values, y))(y)
    np.testing.assert_allclose(ours, jax.grad(lambda y: plain_walk(values, y))(y), rtol=1e-10)


@pytest.mark.parametrize("n", [100_000, 1_000_000])
def test_float32_scans_of_many_terms(n):
    y = np.random.default_rng(0).normal(3.0, 1.0, n).astype(np.float32)

    def model(y):
        mu = ppl.sample("mu", dist.Normal(jnp.float32(0.0), jnp.float32(1.0)))

        def step(c, y):
            ppl.observe("y", dist.Normal(mu, jnp.float32(1.0)), y)
            return c, None

        lax.scan(step, 0.0, y)

    value, slope = jax.value_and_grad(lambda v: ppl.log_density(model)(v, y))({"mu": jnp.float32(0.5)})
    assert value.dtype == jnp.float32
    wide = y.astype(np.float64)
    expected = -0.5 * np.sum((wide - 0.5) ** 2) - 0.5 * LOG_2PI * (n + 1) - 0.125
    np.testing.assert_allclose(value, expected, rtol=1e-4)
    np.testing.assert_allclose(slope["mu"], np.sum(wide - 0.5) - 0.5, rtol=1e-4)


def test_float32_scans_in_scans_of_many_terms():
    term = np.float32(0.1)

    def model(t):
        def inner(c, _):
            return (c, ppl.factor("f", t))

        lax.scan(lambda c, _: (lax.scan(inner, c, length=1000)[0], None), 0.0, length=1000)

    np.testing.assert_allclose(ppl.log_density(model)({}, term), float(term) * 1e6, rtol=1e-4)


@pytest.mark.parametrize("n", [100_000, 1_000_000, 5_000_000])
def test_float32_while_of_many_terms(n):
    term = np.float32(0.1)

    def model(t, n):
        lax.while_loop(lambda c: c < n, lambda c: (ppl.factor("f", t), c + 1)[1], 0)

    np.testing.assert_allclose(ppl.log_density(model)({}, term, jnp.array(n)), float(term) * n, rtol=1e-4)


def test_float32_shards(mesh_data):
    y = np.random.default_rng(0).normal(3.0, 1.0, 100_000).astype(np.float32)

    def model(y):
        def body(y):
            return ppl.observe("y", dist.Normal(jnp.float32(0.5), jnp.float32(1.0)), y)

        jax.shard_map(lambda y: (body(y), None)[1], mesh=mesh_data, in_specs=P("data"), out_specs=None)(y)

    expected = -0.5 * np.sum((y.astype(np.float64) - 0.5) ** 2) - 0.5 * LOG_2PI * y.size
    np.testing.assert_allclose(ppl.log_density(model)({}, y), expected, rtol=1e-4)


def test_integer_and_bool_factors_give_a_density_that_can_be_differentiated():
    def model(x):
        ppl.factor("count", jnp.arange(3))
        ppl.factor("flags", jnp.array([True, True]))
        ppl.factor("x", x)

    assert jnp.issubdtype(ppl.log_density(lambda: ppl.factor("n", jnp.arange(3)))({}).dtype, jnp.floating)
    assert float(ppl.log_density(model)({}, 0.5)) == 5.5
    assert jax.grad(lambda x: ppl.log_density(model)({}, x))(0.5) == 1.0


def test_a_model_without_sites():
    assert float(ppl.log_density(lambda: None)({})) == 0.0
    trace = ppl.simulate(lambda x: 2 * x)(0, 3.0)
    assert (float(trace.log_prob), float(trace.retval), trace.values) == (0.0, 6.0, {})


def test_numpyro_gives_the_same_density():
    y = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
    sigma = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])

    def theirs():
        mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
        tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
        with numpyro.plate("school", 8):
            theta = numpyro.sample("theta", dist.Normal(mu, tau))
            numpyro.sample("y", dist.Normal(theta, sigma), obs=y)

    def ours(y, sigma):
        mu = ppl.sample("mu", dist.Normal(0.0, 5.0))
        tau = ppl.sample("tau", dist.HalfCauchy(5.0))

        def school(y, sigma):
            theta = ppl.sample("theta", dist.Normal(mu, tau))
            ppl.observe("y", dist.Normal(theta, sigma), y)

        jax.vmap(school, axis_name="school")(y, sigma)

    values = {"mu": 1.5, "tau": 2.0, "theta": jnp.linspace(-3.0, 9.0, 8)}
    expected = numpyro.infer.util.log_density(theirs, (), {}, values)[0]
    np.testing.assert_allclose(ppl.log_density(ours)(values, y, sigma), expected, rtol=1e-12)
    u = {"mu": 1.5, "tau": jnp.log(2.0), "theta": values["theta"]}
    potential = numpyro.infer.util.potential_energy(theirs, (), {}, u)
    np.testing.assert_allclose(ppl.target(ours)(y, sigma).log_density(u), -potential, rtol=1e-12)
