"""The one layout of values: scans, then vmaps, then batch, then event; pieces of shards joined."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from tests.conftest import _mesh


def check(model, *args, shape, name="x", event_dim=0):
    """Shape in sites, simulate, evaluate; round trip of values; density as the sum of the entries."""
    trace = ppl.simulate(model)(0, *args)
    site = ppl.sites(model)(*args)[name]
    assert site.shape == trace.values[name].shape == shape
    assert trace.log_probs[name].shape == shape[: len(shape) - event_dim]
    again = ppl.evaluate(model)(trace.latents, *args)
    jax.tree.map(np.testing.assert_array_equal, again.values, trace.values)
    if trace.retval is not None:
        jax.tree.map(np.testing.assert_array_equal, again.retval, trace.retval)
    np.testing.assert_allclose(trace.log_prob, sum(jnp.sum(v) for v in trace.log_probs.values()), rtol=1e-12)
    np.testing.assert_allclose(ppl.log_density(model)(trace.latents, *args), trace.log_prob, rtol=1e-12)
    return trace


def at(x):
    return ppl.sample("x", dist.Normal(x, 1.0))


def scan(f, xs):
    return lax.scan(lambda c, x: (c, f(x)), 0.0, xs)[1]


DATA = P("data")
GRID = jnp.arange(6.0).reshape(2, 3) * 100


def test_scan_in_scan():
    trace = check(lambda: scan(lambda r: scan(at, r), GRID), shape=(2, 3))
    np.testing.assert_allclose(trace.values["x"], GRID, atol=6)
    np.testing.assert_array_equal(trace.retval, trace.values["x"])


def test_vmap_in_scan():
    trace = check(lambda: scan(lambda r: jax.vmap(at)(r), GRID), shape=(2, 3))
    np.testing.assert_allclose(trace.values["x"], GRID, atol=6)


def test_scan_in_vmap_has_the_scan_in_front():
    trace = check(lambda: jax.vmap(lambda r: scan(at, r))(GRID), shape=(3, 2))
    np.testing.assert_allclose(trace.values["x"], GRID.T, atol=6)
    np.testing.assert_array_equal(trace.retval.T, trace.values["x"])


@pytest.mark.parametrize("in_axes", [0, 1, -1])
@pytest.mark.parametrize("out_axes", [0, 1])
def test_nested_vmaps_with_any_axes(in_axes, out_axes):
    def model():
        return jax.vmap(lambda r: jax.vmap(at)(r), in_axes=in_axes, out_axes=out_axes)(GRID)

    grid = GRID if in_axes == 0 else GRID.T
    trace = check(model, shape=grid.shape)
    np.testing.assert_allclose(trace.values["x"], grid, atol=6)
    np.testing.assert_array_equal(trace.retval if out_axes == 0 else trace.retval.T, trace.values["x"])


def test_vmaps_of_which_the_operands_have_some():
    def model():
        return jax.vmap(lambda a: jax.vmap(lambda b: ppl.sample("x", dist.Normal(b, 1.0)))(GRID[0]))(jnp.zeros(2))

    trace = check(model, shape=(2, 3))
    np.testing.assert_allclose(trace.values["x"], jnp.stack([GRID[0], GRID[0]]), atol=6)

    def mixed():
        def outer(loc):
            return jax.vmap(lambda scale: ppl.sample("x", dist.Normal(loc, scale)))(jnp.array([1.0, 1e-3]))

        return jax.vmap(outer)(GRID[0])

    trace = check(mixed, shape=(3, 2))
    np.testing.assert_allclose(trace.values["x"][:, 1], GRID[0], atol=0.01)


def test_batch_and_event_axes_come_last():
    def d(x):
        return dist.MultivariateNormal(jnp.zeros((4, 2)) + x, jnp.eye(2))

    trace = check(
        lambda: jax.vmap(lambda r: scan(lambda x: ppl.sample("x", d(x)), r))(GRID), shape=(3, 2, 4, 2), event_dim=1
    )
    np.testing.assert_allclose(trace.values["x"][..., 0, 0], GRID.T, atol=6)


def test_three_deep():
    cube = jnp.arange(24.0).reshape(2, 3, 4) * 100
    trace = check(lambda: jax.vmap(lambda a: scan(lambda b: jax.vmap(at)(b), a))(cube), shape=(3, 2, 4))
    np.testing.assert_allclose(trace.values["x"], jnp.moveaxis(cube, 1, 0), atol=6)
    trace = check(lambda: scan(lambda a: jax.vmap(lambda b: scan(at, b))(a), cube), shape=(2, 4, 3))
    np.testing.assert_allclose(trace.values["x"], jnp.moveaxis(cube, 2, 1), atol=6)


def test_observations_and_deterministics_have_the_layout_too():
    def model(y):
        def lane(r):
            def step(c, v):
                ppl.observe("y", dist.Normal(0.0, 1.0), v)
                ppl.deterministic("d", jnp.stack([v, 2 * v]))
                return c, None

            lax.scan(step, 0.0, r)

        jax.vmap(lane)(y)

    trace = ppl.evaluate(model)({}, GRID)
    np.testing.assert_array_equal(trace.values["y"], GRID.T)
    np.testing.assert_array_equal(trace.values["d"], jnp.stack([GRID.T, 2 * GRID.T], -1))
    assert ppl.sites(model)(GRID)["d"].shape == (3, 2, 2)


def sharded(mesh, body, *args, out=DATA):
    specs = tuple(P("data") for _ in args)
    return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out)(*args)


def put(mesh, x):
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, P("data")))


def test_pieces_join_along_their_first_axis(axis_type):
    mesh = _mesh(axis_type, data=4)
    trace = check(lambda x: sharded(mesh, at, x), put(mesh, jnp.arange(8.0) * 100), shape=(8,))
    np.testing.assert_allclose(trace.values["x"], jnp.arange(8.0) * 100, atol=6)
    trace = check(lambda x: sharded(mesh, at, x), put(mesh, jnp.zeros((8, 3))), shape=(8, 3))
    np.testing.assert_array_equal(trace.retval, trace.values["x"])


def test_scalar_pieces_stack(axis_type):
    mesh = _mesh(axis_type, data=4)
    trace = check(lambda x: sharded(mesh, lambda x: at(x[0])[None], x), put(mesh, jnp.arange(4.0) * 100), shape=(4,))
    np.testing.assert_allclose(trace.values["x"], jnp.arange(4.0) * 100, atol=6)


def test_events_are_never_joined(axis_type):
    mesh = _mesh(axis_type, data=4)

    def body(c):
        return ppl.sample("x", dist.Dirichlet(c[0]))[None]

    concentration = put(mesh, 1.0 + jnp.arange(12.0).reshape(4, 3))
    trace = check(lambda c: sharded(mesh, body, c), concentration, shape=(4, 3), event_dim=1)
    np.testing.assert_allclose(trace.values["x"].sum(-1), 1.0)
    np.testing.assert_array_equal(trace.retval, trace.values["x"])


def test_scan_in_a_shard_stays_in_front(mesh_data):
    def body(x):
        return lax.scan(lambda c, _: (c, at(x)), 0.0, length=3)[1]

    trace = check(lambda x: sharded(mesh_data, body, x, out=P(None, "data")), jnp.arange(8.0) * 100, shape=(3, 8))
    np.testing.assert_array_equal(trace.retval, trace.values["x"])

    def scalar(x):
        return lax.scan(lambda c, _: (c, at(x[0])), 0.0, length=3)[1][:, None]

    trace = check(lambda x: sharded(mesh_data, scalar, x, out=P(None, "data")), jnp.arange(4.0) * 100, shape=(3, 4))
    np.testing.assert_array_equal(trace.retval, trace.values["x"])


def test_a_vmap_inside_is_joined_and_one_outside_is_not(mesh_data):
    def inside(x):
        return sharded(mesh_data, lambda x: jax.vmap(at)(x), x)

    trace = check(inside, jnp.arange(8.0) * 100, shape=(8,))
    np.testing.assert_array_equal(trace.retval, trace.values["x"])

    def outside(x):
        return jax.vmap(lambda x: sharded(mesh_data, at, x))(x)

    x = jnp.arange(16.0).reshape(2, 8) * 100
    trace = check(outside, x, shape=(2, 8))
    np.testing.assert_allclose(trace.values["x"], x, atol=6)
    np.testing.assert_array_equal(trace.retval, trace.values["x"])

    def both(x):
        return jax.vmap(lambda x: sharded(mesh_data, lambda x: jax.vmap(at)(x), x))(x)

    trace = check(both, jnp.stack([x, x, x], -1), shape=(2, 8, 3))
    np.testing.assert_array_equal(trace.retval, trace.values["x"])


def test_a_scalar_piece_under_a_vmap_outside(mesh_data):
    def model(x):
        return jax.vmap(lambda x: sharded(mesh_data, lambda x: at(x[0])[None], x))(x)

    x = jnp.arange(8.0).reshape(2, 4) * 100
    trace = check(model, x, shape=(2, 4))
    np.testing.assert_allclose(trace.values["x"], x, atol=6)
    np.testing.assert_array_equal(trace.retval, trace.values["x"])


def test_spec_names_the_axis_of_the_piece(mesh_data):
    def model():
        def body():
            return ppl.sample("x", dist.Normal(jnp.zeros((3, 2)), 1.0), spec=P(None, "data"))

        return jax.shard_map(body, mesh=mesh_data, in_specs=(), out_specs=P(None, "data"))()

    trace = check(model, shape=(3, 8))
    np.testing.assert_array_equal(trace.retval, trace.values["x"])
    assert ppl.sites(model)()["x"].spec == P(None, "data")


def test_two_axes_on_two_dimensions(axis_type):
    mesh = _mesh(axis_type, a=2, b=2)

    def model():
        def body():
            return ppl.sample("x", dist.Normal(jnp.zeros((3, 2)), 1.0), spec=P("a", "b"))

        return jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P("a", "b"))()

    trace = check(model, shape=(6, 4))
    np.testing.assert_array_equal(trace.retval, trace.values["x"])


def test_spec_of_an_axis_that_the_piece_lacks(mesh_data):
    def model():
        def body():
            return ppl.sample("x", dist.Normal(jnp.zeros(3), 1.0), spec=P(None, "data"))

        jax.shard_map(body, mesh=mesh_data, in_specs=(), out_specs=P(None))()

    with pytest.raises((ppl.errors.SpecError, ValueError), match="x|spec"):
        ppl.simulate(model)(0)


def test_dims(mesh_data):
    def model(x):
        jax.vmap(lambda x: ppl.sample("lane", dist.Normal(x, 1.0)), axis_name="student")(jnp.zeros(3))
        ppl.sample("named", dist.Normal(jnp.zeros((2, 3)), 1.0), dims=("row", None))
        sharded(mesh_data, lambda x: ppl.sample("rows", dist.Normal(x, 1.0)), x)
        ppl.sample("event", dist.Dirichlet(jnp.ones(3)).expand((2,)), dims=("school",))

    sites = ppl.sites(model)(jnp.zeros(8))
    dims = {name: site.dims for name, site in sites.items()}
    assert dims == {"lane": ("student",), "named": ("row", None), "rows": ("data",), "event": ("school",)}
    with pytest.raises(ppl.errors.SpecError, match="site 'x' at .*: dims= names more axes"):
        ppl.sites(lambda: ppl.sample("x", dist.Normal(0.0, 1.0), dims=("a",)))()
