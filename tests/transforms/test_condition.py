"""``condition`` and ``do``: closed forms, every control flow around and inside, composition, errors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from tests.conftest import SHARDED_GRADIENT

NORMAL = dist.Normal(0.0, 1.0)
BOTH = pytest.mark.parametrize("transform", [ppl.condition, ppl.do], ids=["condition", "do"])


def normal(x, loc=0.0, scale=1.0):
    return dist.Normal(loc, scale).log_prob(x)


def chain():
    x = ppl.sample("x", NORMAL)
    y = ppl.sample("y", dist.Normal(2 * x, 1.0))
    ppl.observe("z", dist.Normal(y, 1.0), 0.5)
    return x, y


def close(found, expected):
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_condition_keeps_the_density():
    given = ppl.condition(chain, {"x": 1.5})
    close(ppl.log_density(given)({"y": 0.2}), ppl.log_density(chain)({"x": 1.5, "y": 0.2}))
    trace = ppl.simulate(given)(0)
    assert set(trace.observed) == {"x", "z"}
    assert list(trace.latents) == ["y"]
    assert trace.values["x"] == 1.5
    close(trace.log_probs["x"], normal(1.5))


def test_do_takes_the_density_away():
    intervened = ppl.do(chain, {"y": 1.5})
    close(ppl.log_density(intervened)({"x": 0.3}), normal(0.3) + normal(0.5, 1.5))
    trace = ppl.simulate(intervened)(0)
    assert "y" not in trace.log_probs
    assert trace.observed == ("z",)
    assert trace.retval[1] == trace.values["y"] == 1.5
    assert ppl.sites(intervened)()["y"].kind == "deterministic"


def test_do_on_an_observation():
    intervened = ppl.do(chain, {"z": 3.0})
    close(ppl.log_density(intervened)({"x": 0.3, "y": 1.0}), normal(0.3) + normal(1.0, 0.6))
    assert ppl.simulate(intervened)(0).values["z"] == 3.0


def test_other_draws_stay_as_they_were():
    plain = ppl.simulate(chain)(0).values
    assert ppl.simulate(ppl.condition(chain, {"y": 1.0}))(0).values["x"] == plain["x"]
    given = ppl.simulate(ppl.condition(chain, {"x": plain["x"]}))(0).values
    close(given["y"], plain["y"])


def test_nothing_given_changes_nothing():
    for transform in (ppl.condition, ppl.do):
        close(ppl.log_density(transform(chain, {}))({"x": 0.1, "y": 0.2}), ppl.log_density(chain)({"x": 0.1, "y": 0.2}))


def test_condition_on_all_leaves_no_latents():
    whole = ppl.condition(chain, {"x": 0.1, "y": 0.2})
    close(ppl.log_density(whole)({}), ppl.log_density(chain)({"x": 0.1, "y": 0.2}))


def test_gradients_in_the_given_values():
    def density(x):
        return ppl.log_density(ppl.condition(chain, {"x": x}))({"y": 0.2})

    close(jax.grad(density)(1.5), -1.5 + 2 * (0.2 - 3.0))

    def intervened(x):
        return ppl.log_density(ppl.do(chain, {"x": x}))({"y": 0.2})

    close(jax.grad(intervened)(1.5), 2 * (0.2 - 3.0))


def test_one_program_for_all_values():
    traces = []

    def counted(v):
        traces.append(v.shape)
        return ppl.log_density(ppl.condition(chain, {"x": v}))({"y": 0.2})

    density = jax.jit(counted)
    close(density(1.0) - density(2.0), normal(1.0) + normal(0.2, 2.0) - normal(2.0) - normal(0.2, 4.0))
    assert len(traces) == 1


# Control flow. In each place two sites: x, and y around it, so that what is given reaches what follows.


def pair(loc=0.0):
    x = ppl.sample("x", dist.Normal(loc, 1.0))
    return ppl.sample("y", dist.Normal(2 * x, 1.0))


def in_scan(f, n=3):
    return lambda: lax.scan(lambda c, loc: (c, f(loc)), 0.0, jnp.arange(float(n)))[1]


def in_vmap(f, n=3):
    return lambda: jax.vmap(f)(jnp.arange(float(n)))


def branches(f):
    return lambda: lax.cond(jnp.array(2) > 1, f, lambda _: ppl.sample("x", NORMAL), 0.0)


PLACES = {
    "jit": (lambda: jax.jit(pair)(0.0), jnp.zeros(())),
    "checkpoint": (lambda: jax.checkpoint(pair)(0.0), jnp.zeros(())),
    "scan": (in_scan(pair), jnp.arange(3.0)),
    "reversed scan": (
        lambda: lax.scan(lambda c, loc: (c, pair(loc)), 0.0, jnp.arange(3.0), reverse=True)[1],
        jnp.arange(3.0),
    ),
    "vmap": (in_vmap(pair), jnp.arange(3.0)),
    "vmap without operands": (lambda: jax.vmap(lambda _: pair())(jnp.zeros(3)), jnp.zeros(3)),
    "scan in vmap": (
        lambda: jax.vmap(lambda a: lax.scan(lambda c, b: (c, pair(a + b)), 0.0, jnp.arange(2.0))[1])(jnp.arange(3.0)),
        jnp.arange(2.0)[:, None] + jnp.arange(3.0),
    ),
    "vmap in scan in jit": (
        lambda: jax.jit(in_scan(lambda a: jax.vmap(lambda b: pair(a + b))(jnp.arange(2.0))))(),
        jnp.arange(3.0)[:, None] + jnp.arange(2.0),
    ),
}


@pytest.mark.parametrize("place", PLACES)
@BOTH
def test_around_control_flow(place, transform):
    model, loc = PLACES[place]
    x = 0.3 + jnp.arange(float(loc.size)).reshape(loc.shape)
    y = 1.7 * x
    given = transform(lambda: model(), {"x": x})
    expected = jnp.sum(normal(y, 2 * x)) + (jnp.sum(normal(x, loc)) if transform is ppl.condition else 0.0)
    close(ppl.log_density(given)({"y": y}), expected)
    close(jax.grad(ppl.log_density(given))({"y": y})["y"], 2 * x - y)
    trace = ppl.simulate(given)(0)
    np.testing.assert_array_equal(trace.values["x"], x)
    close(trace.log_prob, ppl.log_density(given)(trace.latents))
    assert ("x" in trace.log_probs) == (transform is ppl.condition)


@BOTH
def test_inside_of_loops_the_layout_is_that_of_the_place(transform):
    """A value that is the same in all steps and lanes, and one that each step has its own."""

    def model(xs):
        return lax.scan(lambda c, x: (c, transform(pair, {"x": x})(0.0)), 0.0, xs)[1]

    xs, y = jnp.array([0.1, 0.7]), jnp.array([0.3, 0.9])

    def own(x, loc=0.0):
        return jnp.sum(normal(x, loc)) if transform is ppl.condition else 0.0

    close(ppl.log_density(model)({"y": y}, xs), jnp.sum(normal(y, 2 * xs)) + own(xs))
    same = ppl.log_density(jax.vmap(transform(pair, {"x": 0.5})))({"y": y}, xs)
    close(same, jnp.sum(normal(y, 1.0)) + own(0.5, xs))

    def lanes(xs):
        return jax.vmap(lambda x: transform(pair, {"x": x})(0.0))(xs)

    close(ppl.log_density(lanes)({"y": y}, xs), jnp.sum(normal(y, 2 * xs)) + own(xs))

    def inner(xs):  # around a scan, inside of a vmap
        return jax.vmap(lambda row: transform(in_scan(pair, 2), {"x": row})())(xs)

    rows = jnp.array([[0.1, 0.2], [0.4, 0.5], [0.7, 0.8]])
    y = jnp.ones((2, 3))
    expected = jnp.sum(normal(y, 2 * rows.T))
    if transform is ppl.condition:
        expected += jnp.sum(normal(rows.T, jnp.arange(2.0)[:, None]))
    close(ppl.log_density(inner)({"y": y}, rows), expected)


@pytest.mark.parametrize("flag", [0, 1])
@BOTH
def test_a_site_of_both_branches(flag, transform):
    def model(flag):
        return lax.cond(
            flag > 0, lambda: ppl.sample("x", dist.Normal(3.0, 1.0)), lambda: ppl.sample("x", dist.Normal(0.0, 2.0))
        )

    given = transform(model, {"x": 0.4})
    expected = [normal(0.4, 0.0, 2.0), normal(0.4, 3.0, 1.0)][flag]
    close(ppl.log_density(given)({}, flag * 1.0), expected if transform is ppl.condition else 0.0)
    assert ppl.simulate(given)(0, flag * 1.0).retval == 0.4


@BOTH
def test_lanes_with_their_own_branches(transform):
    def model(flag):
        return lax.cond(flag > 0, lambda: pair(1.0), lambda: ppl.sample("y", dist.Normal(5.0, 1.0)))

    flags, x, y = jnp.array([1.0, 0.0, 1.0]), jnp.array([0.1, jnp.nan, 0.3]), jnp.array([1.0, 2.0, 3.0])
    given = transform(jax.vmap(model), {"x": x})
    expected = normal(y[1], 5.0) + jnp.sum(normal(y[::2], 2 * x[::2]))
    if transform is ppl.condition:
        expected += jnp.sum(normal(x[::2], 1.0))
    close(ppl.log_density(given)({"y": y}, flags), expected)
    gradient = jax.grad(ppl.log_density(given))({"y": y}, flags)["y"]
    close(gradient, jnp.array([0.2 - 1.0, 3.0, 0.6 - 3.0]))
    trace = ppl.simulate(given)(0, flags)
    np.testing.assert_array_equal(trace.active["x"], [True, False, True])
    np.testing.assert_array_equal(trace.values["x"], x)


def on_shards(mesh, body, *args):
    return jax.shard_map(body, mesh=mesh, in_specs=tuple(P("data") for _ in args), out_specs=P("data"))(*args)


@SHARDED_GRADIENT
@pytest.mark.parametrize("mesh", ["mesh_data", "mesh_data_explicit"])
@BOTH
def test_around_shard_map(mesh, transform, request):
    mesh = request.getfixturevalue(mesh)

    def model(loc):
        def body(loc):
            one = ppl.sample("one", NORMAL, spec=P())
            return one + jax.vmap(pair)(loc)

        return on_shards(mesh, body, loc)

    loc = jax.device_put(jnp.arange(8.0), jax.sharding.NamedSharding(mesh, P("data")))
    x, y = 0.1 * np.arange(8.0), 0.3 * np.arange(8.0)
    given = transform(model, {"x": x, "one": 0.5})
    expected = jnp.sum(normal(y, 2 * x))
    if transform is ppl.condition:
        expected += jnp.sum(normal(x, np.arange(8.0))) + normal(0.5)
    close(ppl.log_density(given)({"y": y}, loc), expected)
    close(jax.jit(jax.grad(ppl.log_density(given)))({"y": y}, loc)["y"], 2 * x - y)
    close(ppl.evaluate(given)({"y": y}, loc).retval, y + 0.5)


@SHARDED_GRADIENT
@pytest.mark.parametrize("mesh", ["mesh_data", "mesh_data_explicit"])
@BOTH
def test_inside_of_shard_map(mesh, transform, request):
    """The layout is that of the piece; given values may be the shard's own, or equal on all."""
    mesh = request.getfixturevalue(mesh)

    def model(loc, x):
        def body(loc, x):
            y = transform(lambda loc: jax.vmap(pair)(loc), {"x": x})(loc)
            z = transform(lambda: ppl.sample("z", dist.Normal(loc, 1.0)), {"z": jnp.ones(2)})()
            return y + z

        return on_shards(mesh, body, loc, x)

    put = functools.partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, P("data")))
    loc, x, y = np.arange(8.0), 0.1 * np.arange(8.0), 0.3 * np.arange(8.0)
    expected = jnp.sum(normal(y, 2 * x))
    if transform is ppl.condition:
        expected += jnp.sum(normal(x, loc)) + jnp.sum(normal(1.0, loc))
    close(ppl.log_density(model)({"y": y}, put(loc), put(x)), expected)
    found = jax.jit(jax.grad(ppl.log_density(model)))({"y": y}, put(loc), put(x))["y"]
    close(found, 2 * x - y)


def test_events_masks_and_integers():
    def model(mask):
        p = ppl.sample("p", dist.Dirichlet(jnp.ones((2, 3))), mask=mask)
        ppl.sample("k", dist.Categorical(probs=p))

    p = jnp.array([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    mask = jnp.array([True, False])
    given = ppl.condition(model, {"p": p, "k": jnp.array([1, 2])})
    expected = dist.Dirichlet(jnp.ones(3)).log_prob(p[0]) + jnp.log(0.3) + jnp.log(0.8)
    close(ppl.log_density(given)({}, mask), expected)
    given = ppl.condition(ppl.do(model, {"p": p}), {"k": jnp.array([1, 2])})
    close(ppl.log_density(given)({}, mask), jnp.log(0.3) + jnp.log(0.8))


def test_with_each_other():
    first = ppl.condition(ppl.do(chain, {"x": 1.0}), {"y": 0.5})
    second = ppl.do(ppl.condition(chain, {"y": 0.5}), {"x": 1.0})
    expected = normal(0.5, 2.0) + normal(0.5, 0.5)
    close(ppl.log_density(first)({}), expected)
    close(ppl.log_density(second)({}), expected)
    # What has been observed can still be set.
    set_again = ppl.do(ppl.condition(chain, {"y": 0.5}), {"y": 9.0})
    close(ppl.log_density(set_again)({"x": 0.1}), normal(0.1) + normal(0.5, 9.0))


@BOTH
@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"xx": 1.0}, ppl.errors.ValuesError, "has no latent of this name(.|\n)*did you mean 'x'"),
        ({"x": jnp.ones(2)}, ppl.errors.ShapeError, "does not have the shape of its site(.|\n)*found: \\(2,\\)"),
        ({"x": 1j}, ppl.errors.DTypeError, "a cast to the dtype of the site would lose(.|\n)*complex"),
    ],
    ids=["unknown", "shape", "dtype"],
)
def test_refused(transform, values, error, message):
    with pytest.raises(error, match=message):
        ppl.log_density(transform(chain, values))({"y": 0.0})


def test_condition_refuses_what_is_observed():
    with pytest.raises(ppl.errors.ValuesError, match="site 'z'(.|\n)*kind 'observe', which takes none"):
        ppl.log_density(ppl.condition(chain, {"z": 0.0}))({})
    with pytest.raises(ppl.errors.ValuesError, match="kind 'observe', which takes none"):
        ppl.log_density(ppl.condition(ppl.condition(chain, {"x": 1.0}), {"x": 1.0}))({"y": 0.0})


def test_what_is_given_is_no_latent_any_more():
    for transform in (ppl.condition, ppl.do):
        with pytest.raises(ppl.errors.ValuesError, match="a value is given for a site of kind"):
            ppl.log_density(transform(chain, {"x": 1.0}))({"x": 1.0, "y": 0.0})


@BOTH
def test_layout_of_the_whole_is_asked_for(transform):
    with pytest.raises(ppl.errors.ShapeError, match="expected: \\(3,\\), inside scan\\[3\\](.|\n)*one leading axis"):
        ppl.log_density(transform(in_scan(pair), {"x": 1.0}))({"y": jnp.zeros(3)})
