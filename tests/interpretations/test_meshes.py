"""Meshes of every kind: Auto and Explicit, named or set, nested, partly manual, of size 1, within a caller's own."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import SpecError
from tests.conftest import SHARDED_GRADIENT, _mesh

X = jnp.sin(jnp.arange(8.0))
ONCE = P()
GAMMA = dist.Gamma(2.0, 1.0)


def put(mesh, x, spec):
    return jax.device_put(x, NamedSharding(mesh, spec))


def body(mu, x):
    """A shared site, pieces, an observation and both kinds of factor."""
    one = ppl.sample("one", dist.Normal(mu, 1.0), spec=P())
    own = ppl.sample("own", dist.Normal(x, 1.0))
    ppl.observe("y", dist.Normal(own + one, 1.0), x)
    ppl.factor("f", lax.psum(jnp.sum(x * one), "data"))


def hierarchical(**options):
    def model(x):
        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))

        def silent(mu, x):
            body(mu, x)

        jax.shard_map(silent, in_specs=(P(), P("data")), out_specs=None, **options)(mu, x)

    return model


def plain(values, x):
    mu, one, own = values["mu"], values["one"], values["own"]
    quad = mu**2 + (one - mu) ** 2 + jnp.sum((own - x) ** 2) + jnp.sum((x - own - one) ** 2)
    return -0.5 * quad - 0.5 * np.log(2 * np.pi) * (2 + 2 * x.size) + jnp.sum(x) * one


VALUES = {"mu": jnp.array(0.4), "one": jnp.array(-0.3), "own": jnp.cos(X)}


def check(model, x, place=lambda values: values, rtol=1e-11):
    values = place(VALUES)
    value, slope = jax.jit(jax.value_and_grad(ppl.log_density(model)))(values, x)
    expected, expected_slope = jax.value_and_grad(plain)(VALUES, X)
    np.testing.assert_allclose(value, expected, rtol=rtol)
    for name in VALUES:
        np.testing.assert_allclose(slope[name], expected_slope[name], rtol=rtol, atol=1e-12)
    trace = jax.jit(ppl.evaluate(model))(values, x)
    np.testing.assert_allclose(trace.log_prob, expected, rtol=rtol)
    drawn = ppl.simulate(model)(0, x)
    np.testing.assert_allclose(
        plain({k: jnp.asarray(np.asarray(v)) for k, v in drawn.latents.items()}, X), drawn.log_prob, rtol=rtol
    )
    return drawn


@pytest.mark.parametrize("named", ["argument", "set_mesh"])
@SHARDED_GRADIENT
def test_named_or_set(axis_type, named):
    mesh = _mesh(axis_type, data=4)
    x = put(mesh, X, P("data"))
    if named == "argument":
        check(hierarchical(mesh=mesh), x)
    else:
        with jax.set_mesh(mesh):
            check(hierarchical(), x)


@SHARDED_GRADIENT
def test_an_axis_of_size_one_is_the_unsharded_model(axis_type):
    mesh = _mesh(axis_type, data=1)
    check(hierarchical(mesh=mesh), put(mesh, X, P("data")))
    two = _mesh(axis_type, data=4, other=1)
    check(hierarchical(mesh=two), put(two, X, P("data")))


@pytest.mark.parametrize("manual", [{"data"}, {"chains", "data"}])
@SHARDED_GRADIENT
def test_partly_manual(axis_type, manual):
    mesh = _mesh(axis_type, chains=2, data=2)
    x = put(mesh, X, P("data"))
    if manual == {"data"}:
        with jax.set_mesh(mesh):
            check(hierarchical(axis_names=manual), x)
    else:
        check(hierarchical(mesh=mesh, axis_names=manual), x)


@SHARDED_GRADIENT
def test_two_shard_maps_in_one_model(axis_type):
    mesh = _mesh(axis_type, data=4)

    def model(x):
        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))

        def run(f, *args):
            return jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"))(*args)

        own = run(lambda mu, x: ppl.sample("own", dist.Normal(mu + x, 1.0)), mu, x)
        run(lambda mu, own: ppl.observe("y", dist.Normal(mu, 1.0), own * 0 + 1.0), mu, own)

    values = {"mu": jnp.array(0.4), "own": put(mesh, jnp.cos(X), P("data"))}
    value, slope = jax.jit(jax.value_and_grad(ppl.log_density(model)))(values, put(mesh, X, P("data")))

    def reference(mu, own):
        return -0.5 * (mu**2 + jnp.sum((own - mu - X) ** 2) + 8 * (1 - mu) ** 2) - 0.5 * np.log(2 * np.pi) * 17

    np.testing.assert_allclose(value, reference(0.4, jnp.cos(X)), rtol=1e-11)
    np.testing.assert_allclose(slope["mu"], jax.grad(reference)(0.4, jnp.cos(X)), rtol=1e-11)


def test_nested_shard_maps(axis_type):
    mesh = _mesh(axis_type, a=2, b=2)
    x = jnp.arange(16.0).reshape(4, 4) / 10

    def model(x):
        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))

        def inner(mu, x, row):
            ppl.observe("y", dist.Normal(mu + row, 1.0), x)
            ppl.sample("both", dist.Normal(x, 1.0), spec=P("a", "b"))
            ppl.factor("inner", jnp.sum(row))

        def outer(mu, x):
            row = ppl.sample("row", dist.Normal(jnp.zeros((2, 1)) + mu, 1.0), spec=P("a"))
            ppl.factor("outer", mu)
            specs = (P(), P(None, "b"), P())
            jax.shard_map(lambda *args: inner(*args), in_specs=specs, out_specs=None, axis_names={"b"})(mu, x, row)

        jax.shard_map(outer, in_specs=(P(), P("a")), out_specs=None, axis_names={"a"})(mu, x)

    def reference(values):
        mu, row, both = values["mu"], values["row"], values["both"]
        quad = mu**2 + jnp.sum((row - mu) ** 2) + jnp.sum((x - mu - row) ** 2) + jnp.sum((both - x) ** 2)
        return -0.5 * quad - 0.5 * np.log(2 * np.pi) * (1 + 4 + 32) + jnp.sum(row) + mu

    values = {"mu": jnp.array(0.4), "row": jnp.arange(4.0)[:, None] / 7, "both": jnp.cos(x)}
    with jax.set_mesh(mesh):
        sharded = put(mesh, x, P("a", "b"))
        tangents = jax.tree.map(jnp.ones_like, values)
        # Forward mode: JAX's own reverse mode cannot lower a shard_map within another's manual axes.
        ours = jax.jit(lambda v, t: jax.jvp(lambda v: ppl.log_density(model)(v, sharded), (v,), (t,)))(values, tangents)
        drawn = ppl.simulate(model)(0, sharded)
    np.testing.assert_allclose(ours, jax.jvp(reference, (values,), (tangents,)), rtol=1e-11)
    assert {k: v.shape for k, v in drawn.latents.items()} == {"mu": (), "row": (4, 1), "both": (4, 4)}
    latents = {k: jnp.asarray(np.asarray(v)) for k, v in drawn.latents.items()}
    np.testing.assert_allclose(drawn.log_prob, reference(latents), rtol=1e-11)


@pytest.mark.parametrize("check_vma", [True, False])
@SHARDED_GRADIENT
def test_within_a_callers_shard_map(axis_type, check_vma):
    """The caller's axis is the caller's: each of its shards has a density of its own."""
    mesh = _mesh(axis_type, chains=2, data=2)

    def slope_of(density, values):
        """Forward mode where JAX's own reverse mode cannot lower nested axes with check_vma."""
        if check_vma:
            tangents = jax.tree.map(lambda v: 0 * v + 1, values)
            return jax.jvp(density, (values,), (tangents,))[1]
        return sum(jnp.sum(g) for g in jax.tree.leaves(jax.grad(density)(values)))

    with jax.set_mesh(mesh):
        model = hierarchical(axis_names={"data"})
        x = put(mesh, X, P("data"))
        many = {k: jnp.stack([v, v + 0.5]) for k, v in VALUES.items()}
        many = {k: put(mesh, v, P("chains", *["data"] * (k == "own"))) for k, v in many.items()}

        def both(values, x):
            values = jax.tree.map(lambda v: v[0], values)

            def density(v):
                return ppl.log_density(model)(v, x)

            return density(values)[None], slope_of(density, values)[None]

        run = jax.shard_map(
            both,
            in_specs=(P("chains"), P()),
            out_specs=(P("chains"), P("chains")),
            axis_names={"chains"},
            check_vma=check_vma,
        )
        value, slope = jax.jit(run)(many, x)
    for i, shift in enumerate([0.0, 0.5]):
        values = {k: v + shift for k, v in VALUES.items()}
        np.testing.assert_allclose(np.asarray(value)[i], plain(values, X), rtol=1e-11)
        expected = slope_of(lambda v: plain(v, X), values)
        np.testing.assert_allclose(np.asarray(slope)[i], expected, rtol=1e-10)


@pytest.mark.parametrize("check_vma", [True, False])
def test_draws_within_a_callers_shard_map(axis_type, check_vma):
    mesh = _mesh(axis_type, chains=2, data=2)
    keys = jax.random.split(jax.random.key(0), 2)

    def model(x):
        def silent(x):
            ppl.sample("own", dist.Gamma(2.0 + 0 * x, 1.0))
            ppl.sample("one", GAMMA, spec=P())

        jax.shard_map(silent, in_specs=P("data"), out_specs=None, axis_names={"data"})(x)

    with jax.set_mesh(mesh):
        x = put(mesh, X, P("data"))
        apart = [ppl.simulate(model)(key, x).latents for key in keys]
        run = jax.shard_map(
            lambda k, x: jax.tree.map(lambda v: v[None], ppl.simulate(model)(k[0], x).latents),
            in_specs=(P("chains"), P()),
            out_specs=P("chains"),
            axis_names={"chains"},
            check_vma=check_vma,
        )
        together = jax.jit(run)(put(mesh, keys, P("chains")), x)
    for i, alone in enumerate(apart):
        for name, value in alone.items():
            np.testing.assert_allclose(np.asarray(together[name])[i], value, rtol=1e-12)


def unchecked(spec_own, spec_one, spec_f=ONCE):
    def run(mesh):
        def model(x):
            mu = ppl.sample("mu", dist.Normal(0.0, 1.0))

            def silent(mu, x):
                one = ppl.sample("one", dist.Normal(mu, 1.0), spec=spec_one)
                own = ppl.sample("own", dist.Normal(x, 1.0), spec=spec_own)
                ppl.observe("y", dist.Normal(own + one, 1.0), x, spec=spec_own)
                ppl.factor("f", lax.psum(jnp.sum(x), "data") * one, spec=spec_f)

            options = {"mesh": mesh, "in_specs": (P(), P("data")), "out_specs": None, "check_vma": False}
            jax.shard_map(silent, **options)(mu, x)

        return model

    return run


def test_without_check_vma_every_site_must_say(axis_type):
    mesh = _mesh(axis_type, data=4)
    x = put(mesh, X, P("data"))
    for specs in ((None, P()), (P("data"), None), (P("data"), P(), None)):
        with pytest.raises(SpecError, match=r"site '\w+' at test_meshes.py:\d+: (.|\n)*check_vma=False(.|\n)*spec="):
            ppl.simulate(unchecked(*specs)(mesh))(0, x)


@SHARDED_GRADIENT
def test_without_check_vma_and_with_specs(axis_type):
    mesh = _mesh(axis_type, data=4)
    check(unchecked(P("data"), P())(mesh), put(mesh, X, P("data")))


def test_rows_that_do_not_divide_and_axes_that_are_not_there(mesh_data):
    with pytest.raises(ppl.errors.MeshError, match=r"at test_meshes.py:\d+: the rows .*\n(.*\n)*.*shard_rows"):
        ppl.log_density(hierarchical(mesh=mesh_data))({**VALUES, "own": jnp.zeros(7)}, X[:7])
    with pytest.raises((ValueError, ppl.errors.PPLError), match="rows"):
        jax.shard_map(lambda x: x, mesh=mesh_data, in_specs=P("rows"), out_specs=P("rows"))(X)


def test_the_mesh_of_a_target(mesh_data):
    assert ppl.target(hierarchical(mesh=mesh_data))(X).mesh.axis_names == ("data",)
    assert ppl.target(lambda: ppl.sample("x", dist.Normal(0.0, 1.0)))().mesh is None
