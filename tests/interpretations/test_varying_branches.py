"""R6, R10: a branch that differs from shard to shard, and in it what the shards share: slopes are summed outside."""

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.scipy.special import xlogy
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.effects import Interpreter, default_dispatcher, tracing
from tests.conftest import SHARDED_GRADIENT

pytestmark = pytest.mark.skipif(len(jax.devices()) < 2, reason="shards need two devices")
W = 0.3


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def gradient(mesh, branch, x):
    def model(x):
        w = ppl.sample("w", dist.Normal(0.0, 1.0))

        def body(x):
            lax.cond(x[0] > 0, lambda: branch(w, x[0]) + 0 * x, lambda: 0 * x)

        jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=None)(x)

    return jax.jit(jax.grad(ppl.log_density(model)))({"w": W}, x)["w"]


def observed(w, x):
    return ppl.observe("y", dist.Normal(w, 1.0), x)


def carried(w, x):
    ppl.factor("f", lax.scan(lambda c, _: (c * w + 0.1, None), 0.0, length=3)[0] + 0 * x)
    return x


def cached(w, x):
    ppl.factor("f", jax.checkpoint(jax.jit(lambda w: jnp.sin(w) * 2.0))(w) + 0 * x)
    return x


def nested(w, x):
    lax.cond(w > 0, lambda: ppl.observe("y", dist.Normal(w, 1.0), x), lambda: x)
    return x


def ruled(w, x):
    ppl.factor("f", xlogy(w - W, 2.0 + 0 * x))  # at 0: its own rule gives log 2, where that of its body gives NaN
    return x


@jax.custom_jvp
def tripled(w):
    return w * jnp.where(w > -100, 1.0, w)  # a constant, which becomes a cast inside of the function


tripled.defjvp(lambda primals, tangents: (tripled(*primals), 3 * tangents[0] + jnp.zeros(())))


def own_rule(w, x):
    ppl.factor("f", tripled(w) + 0 * x)
    return x


@jax.custom_vjp
def product(w, x):
    return w * x + jnp.zeros(())


product.defvjp(lambda w, x: (w * x, (w, x)), lambda res, ct: (lax.psum(2 * res[1] * ct, "data"), 0 * res[0] * ct))


def summed_rule(w, x):
    ppl.factor("f", product(w, x))
    return x


@SHARDED_GRADIENT
@pytest.mark.parametrize(
    ("branch", "slope"),
    [
        (observed, lambda x: x - W),
        (carried, lambda x: 0.2 * W + 0.1),
        (cached, lambda x: 2 * jnp.cos(W)),
        (nested, lambda x: x - W),
        (ruled, lambda x: jnp.log(2.0)),
        (own_rule, lambda x: 3.0),
    ],
)
@pytest.mark.parametrize("x", [(1.0, -1.0), (1.0, 2.0), (-1.0, -2.0)], ids=["one", "both", "none"])
def test_gradient_of_what_the_shards_share(mesh, branch, slope, x):
    expected = -W + sum(slope(piece) for piece in x if piece > 0)
    assert jnp.allclose(gradient(mesh, branch, jnp.array(x)), expected, rtol=1e-6)


@SHARDED_GRADIENT
def test_a_rule_that_sums_over_the_shards_counts_once(mesh):
    assert jnp.allclose(gradient(mesh, summed_rule, jnp.array([1.0, 2.0])), -W + 2 * (1.0 + 2.0), rtol=1e-6)


def test_lanes_in_a_branch_that_differs_from_shard_to_shard_hold_one_that_does_not(mesh):
    def lane(flag, x):
        def inner():
            lax.cond(flag, lambda: ppl.observe("y", dist.Normal(0.0, 1.0), x), lambda: x)

        lax.cond(x > 1, inner, lambda: None)

    def model(x):
        body = lambda x: jax.vmap(lane)(jnp.array([True, False]), x)  # noqa: E731
        jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=None)(x)

    found = ppl.log_density(model)({}, jnp.arange(4.0))
    assert jnp.allclose(found, dist.Normal(0.0, 1.0).log_prob(2.0))


def test_sites_in_a_body_that_hides_its_effects_are_found_from_outside():
    summed = jax.jit(lambda x: lax.reduce(x, 0.0, lambda a, b: (ppl.factor("f", 1.0), a + b)[1], (0,)))
    model = lambda: summed(jnp.ones(3))  # noqa: E731
    for interpretation in (ppl.sites(model), lambda: ppl.log_density(model)({})):
        with pytest.raises(ppl.errors.UnsupportedPrimitiveError, match=r"site 'f' at test_varying.*'reduce'"):
            interpretation()


@SHARDED_GRADIENT
@pytest.mark.skipif(len(jax.devices()) < 4, reason="two axes need four devices")
def test_own_rules_stay_where_an_explicit_axis_has_become_manual():
    mesh = jax.make_mesh((2, 2), ("chains", "data"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        traced = tracing.trace(lambda w: tripled(jnp.sin(w)) * xlogy(w - W, 2.0), jnp.asarray(W))

        def run(w):
            return Interpreter(default_dispatcher()).run(traced.jaxpr, traced.consts, (), w)[0][0]

        slope = jax.jit(jax.shard_map(jax.grad(run), in_specs=P(), out_specs=P(), axis_names={"chains"}))(W)
    assert jnp.allclose(slope, jnp.sin(W) * jnp.log(2.0), rtol=1e-6)


@SHARDED_GRADIENT
@pytest.mark.skipif(len(jax.devices()) < 4, reason="two axes need four devices")
def test_a_rule_refuses_what_it_closes_over_there_as_elsewhere():
    """A custom_vjp gives no derivative in a value that its function closes over: JAX says so, and so do we."""

    def closing(w):
        scaled = jax.custom_vjp(lambda x: x * w)
        scaled.defvjp(lambda x: (x * w, None), lambda _, slope: (slope,))
        return scaled(jnp.ones(()))

    mesh = jax.make_mesh((2, 2), ("chains", "data"), devices=jax.devices()[:4])
    with jax.set_mesh(mesh):
        traced = tracing.trace(closing, jnp.asarray(W))

        def run(w):
            return Interpreter(default_dispatcher()).run(traced.jaxpr, traced.consts, (), w)[0][0]

        within = jax.shard_map(jax.grad(run), in_specs=P(), out_specs=P(), axis_names={"chains"})
        plain = jax.grad(lambda w: tracing.call(traced.closed, w)[0])
        for slope in (plain, jax.jit(within)):
            with pytest.raises(Exception, match="closed-over value"):
                slope(jnp.asarray(W))
