"""``scope``: names of submodels, one cached function under two scopes, every control flow, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

NORMAL = dist.Normal(0.0, 1.0)


def submodel(loc=0.0):
    x = ppl.sample("x", dist.Normal(loc, 1.0))
    ppl.observe("o", dist.Normal(x, 1.0), 0.5)
    ppl.factor("f", -(x**2))
    return ppl.deterministic("d", 2 * x)


def density(x, loc=0.0):
    return jnp.sum(dist.Normal(loc, 1.0).log_prob(x) + dist.Normal(x, 1.0).log_prob(0.5) - x**2)


def names(model, *args):
    return list(ppl.sites(model)(*args))


def test_every_kind_of_site_is_renamed():
    scoped = ppl.scope(submodel, "a")
    assert names(scoped) == ["a/x", "a/o", "a/f", "a/d"]
    np.testing.assert_allclose(ppl.log_density(scoped)({"a/x": 0.3}), density(0.3), rtol=1e-12)
    trace = ppl.simulate(scoped)(0)
    assert set(trace.values) == {"a/x", "a/o", "a/d"}
    assert trace.observed == ("a/o",)


def test_scopes_nest_outermost_first():
    assert names(ppl.scope(ppl.scope(submodel, "a"), "b"))[0] == "b/a/x"


def test_one_cached_function_under_two_scopes():
    cached = jax.jit(submodel)

    def model():
        return ppl.scope(cached, "a")(0.0) + ppl.scope(cached, "b")(0.0)

    for _ in range(2):  # and once it is cached
        values = {"a/x": 0.3, "b/x": -0.7}
        np.testing.assert_allclose(ppl.log_density(model)(values), density(0.3) + density(-0.7), rtol=1e-12)
        draws = ppl.simulate(model)(0).values
        assert draws["a/x"] != draws["b/x"]
    assert names(cached) == ["x", "o", "f", "d"]


def test_a_cached_function_with_and_without_a_scope():
    cached = jax.jit(submodel)

    def model():
        return cached(0.0), ppl.scope(cached, "a")(0.0)

    assert names(model) == ["x", "o", "f", "d", "a/x", "a/o", "a/f", "a/d"]


def test_one_function_scoped_in_a_loop():
    def model():
        return sum(ppl.scope(submodel, f"group{i}")() for i in range(3))

    values = {f"group{i}/x": 0.1 * i for i in range(3)}
    np.testing.assert_allclose(ppl.log_density(model)(values), sum(density(v) for v in values.values()), rtol=1e-12)


def test_a_draw_depends_on_the_full_name():
    scoped = ppl.simulate(ppl.scope(submodel, "a"))(0).values["a/x"]
    assert scoped == ppl.simulate(lambda: ppl.sample("a/x", NORMAL))(0).values["a/x"]
    assert scoped != ppl.simulate(submodel)(0).values["x"]


LOC = jnp.arange(3.0)
PLACES = {
    "scan": lambda f: lax.scan(lambda c, loc: (c, f(loc)), 0.0, LOC)[1],
    "vmap": lambda f: jax.vmap(f)(LOC),
    "checkpoint in scan": lambda f: lax.scan(lambda c, loc: (c, jax.checkpoint(f)(loc)), 0.0, LOC)[1],
    "jit in vmap": lambda f: jax.vmap(jax.jit(f))(LOC),
}


@pytest.mark.parametrize("place", PLACES)
def test_around_and_inside_are_the_same(place):
    around = ppl.scope(lambda: PLACES[place](submodel), "a")
    inside = lambda: PLACES[place](ppl.scope(submodel, "a"))  # noqa: E731
    x = jnp.array([0.1, -0.2, 0.4])
    for model in (around, inside):
        np.testing.assert_allclose(ppl.log_density(model)({"a/x": x}), density(x, LOC), rtol=1e-12)
    jax.tree.map(np.testing.assert_array_equal, ppl.simulate(around)(0).values, ppl.simulate(inside)(0).values)


def test_branches_under_two_scopes():
    branch = jax.jit(submodel)

    def model(flag):
        return lax.cond(flag > 0, ppl.scope(branch, "a"), ppl.scope(branch, "b"), 0.0)

    flags, x = jnp.array([1.0, 0.0]), jnp.array([0.3, 0.7])
    np.testing.assert_allclose(
        ppl.log_density(jax.vmap(model))({"a/x": x, "b/x": x}, flags), density(0.3) + density(0.7), rtol=1e-12
    )
    trace = ppl.simulate(jax.vmap(model))(0, flags)
    np.testing.assert_array_equal(trace.active["a/x"], [True, False])
    np.testing.assert_array_equal(trace.active["b/x"], [False, True])


def test_in_shard_map(mesh_data):
    def on_shards(body):
        return jax.shard_map(body, mesh=mesh_data, in_specs=P("data"), out_specs=P("data"))

    inside = on_shards(ppl.scope(jax.vmap(submodel), "b"))
    x, loc = jnp.arange(8.0) / 4, jnp.ones(8)
    np.testing.assert_allclose(ppl.log_density(inside)({"b/x": x}, loc), density(x, loc), rtol=1e-12)
    both = ppl.scope(inside, "c")
    np.testing.assert_allclose(ppl.log_density(both)({"c/b/x": x}, loc), density(x, loc), rtol=1e-12)

    def shared(loc):
        one = ppl.scope(lambda: ppl.sample("x", NORMAL, spec=P()), "one")()
        own = ppl.scope(lambda: ppl.sample("x", NORMAL, spec=P("data")), "own")()
        return one + own + ppl.scope(lambda loc: ppl.sample("x", dist.Normal(loc, 1.0)), "rows")(loc)

    shapes = {name: site.shape for name, site in ppl.sites(on_shards(shared))(loc).items()}
    assert shapes == {"one/x": (), "own/x": (4,), "rows/x": (8,)}


def test_with_the_other_transformations():
    scoped = ppl.scope(submodel, "a")
    given = ppl.condition(scoped, {"a/x": 0.3})
    np.testing.assert_allclose(ppl.log_density(given)({}), density(0.3), rtol=1e-12)
    given = ppl.scope(ppl.condition(submodel, {"x": 0.3}), "a")
    np.testing.assert_allclose(ppl.log_density(given)({}), density(0.3), rtol=1e-12)
    half = ppl.scale(scoped, 0.5, sites=["a/x"])
    prior = NORMAL.log_prob(0.3)
    np.testing.assert_allclose(ppl.log_density(half)({"a/x": 0.3}), density(0.3) - 0.5 * prior, rtol=1e-12)


def test_arguments_and_results_pass():
    def sub(x, *, flag, shape=(2,)):
        ppl.sample("x", dist.Normal(jnp.zeros(shape), 1.0))
        return {"sum": x + 1, "flag": flag}

    trace = ppl.simulate(lambda: ppl.scope(sub, "a")(1.0, flag=True, shape=(3,)))(0)
    assert trace.retval == {"sum": 2.0, "flag": True}
    assert trace.values["a/x"].shape == (3,)


@pytest.mark.parametrize("prefix", ["", None, 3])
def test_a_scope_needs_a_name(prefix):
    with pytest.raises(ppl.errors.PPLError, match="a scope needs a name"):
        ppl.scope(submodel, prefix)


def test_the_same_scope_twice_is_a_duplicate():
    def model():
        ppl.scope(submodel, "a")()
        ppl.scope(submodel, "a")()

    with pytest.raises(ppl.errors.DuplicateSiteError, match="site 'a/x'(.|\n)*two sites have this name"):
        ppl.sites(model)()
