"""Blocks of rows inside of a shard_map: each shard has its own, and what they share is summed over shards once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from tests.conftest import SHARDED_GRADIENT

pytestmark = SHARDED_GRADIENT
N = 4 * 11
TOLERANCE = 1e-10 if jax.config.jax_enable_x64 else 2e-4
RNG = np.random.default_rng(5)
X, Y = jnp.asarray(RNG.normal(size=(N, 3)), float), jnp.asarray(RNG.normal(size=N), float)
VALUES = {"alpha": jnp.asarray(0.3), "beta": jnp.array([0.1, -0.4, 0.8]), "tau": jnp.asarray(0.7)}


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, TOLERANCE, TOLERANCE), found, expected)


def regression(rows, mesh=None, *, check_vma=True, latents=False):
    """A regression whose rows lie on the shards of a mesh (None: on one device), in blocks (None: all at once)."""

    def model(x, y):
        alpha = ppl.sample("alpha", dist.Normal(0.0, 1.0))
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((3,)))
        tau = ppl.sample("tau", dist.HalfNormal(1.0))
        spec = None if check_vma or mesh is None else P("data")

        def likelihood(block):
            x, y = block
            mean = x @ beta + alpha
            if latents:
                mean = ppl.sample("z", dist.Normal(mean, tau), spec=spec)
            ppl.observe("y", dist.Normal(mean, tau), y, spec=spec)
            ppl.deterministic("mean", mean, spec=spec)
            ppl.factor("penalty", -(mean**2), spec=spec)

        def shard(x, y):
            (likelihood if rows is None else ppl.blocked(likelihood, rows))((x, y))

        if mesh is None:
            shard(x, y)
        else:
            specs = (P("data"), P("data"))
            jax.shard_map(shard, mesh=mesh, in_specs=specs, out_specs=None, check_vma=check_vma)(x, y)

    return model


def placed(mesh):
    return [jax.device_put(a, jax.NamedSharding(mesh, P("data"))) for a in (X, Y)]


def values_of(latents):
    return VALUES | ({"z": jnp.cos(jnp.arange(N, dtype=X.dtype))} if latents else {})


@pytest.mark.parametrize("latents", [False, True])
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axes", ["mesh_data", "mesh_data_explicit"])
def test_density_gradient_and_second_derivatives(axes, check_vma, latents, request):
    mesh = request.getfixturevalue(axes)
    values = values_of(latents)
    direction = jax.tree.map(jnp.ones_like, values)

    def derivatives(model, x, y):
        density = lambda v: ppl.log_density(model)(v, x, y)  # noqa: E731
        slope = jax.grad(density)
        return (
            jax.value_and_grad(density)(values),
            jax.jvp(slope, (values,), (direction,)),
            jax.jvp(density, (values,), (direction,)),
            jax.grad(lambda v: sum(jnp.sum(g) for g in jax.tree.leaves(slope(v))))(values),
        )

    model = regression(4, mesh, check_vma=check_vma, latents=latents)
    found = jax.jit(lambda x, y: derivatives(model, x, y))(*placed(mesh))
    close(jax.device_get(found), derivatives(regression(None, latents=latents), X, Y))


@pytest.mark.parametrize("latents", [False, True])
def test_records_draws_and_sites(mesh_data, latents):
    plain, blocked = (regression(rows, mesh_data, latents=latents) for rows in (None, 4))
    found, expected = (ppl.evaluate(model)(values_of(latents), X, Y) for model in (blocked, plain))
    close((found.values, found.log_probs, found.log_prob), (expected.values, expected.log_probs, expected.log_prob))
    unsharded = ppl.evaluate(regression(None, latents=latents))(values_of(latents), X, Y)
    close((found.log_probs, found.log_prob), (unsharded.log_probs, unsharded.log_prob))
    close(ppl.simulate(blocked)(0, X, Y).values, ppl.simulate(plain)(0, X, Y).values)
    sites, expected_sites = (ppl.sites(model)(X, Y) for model in (blocked, plain))
    assert [(s.shape, s.spec, s.axes) for s in sites.values()] == [
        (s.shape, s.spec, s.axes) for s in expected_sites.values()
    ]


def all_reduces(hlo):
    """The all-reduces of each computation of a compiled program, by its name."""
    found, current = {}, ""
    for line in hlo.splitlines():
        head = re.match(r"^(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        current = head[2] if head else current
        if re.search(r"\sall-reduce(-start)?\(", line):
            found[current] = found.get(current, 0) + 1
    return found


@pytest.mark.parametrize("rows", [4, 11])
def test_shards_are_summed_once_and_in_no_loop(mesh_data, rows):
    def compiled(rows):
        density = jax.value_and_grad(ppl.log_density(regression(rows, mesh_data)))
        return jax.jit(density).lower(VALUES, X, Y).compile().as_text() or ""

    plain, blocked = (all_reduces(compiled(r)) for r in (None, rows))
    assert sum(plain.values()) == sum(blocked.values()) == 1
    assert set(blocked).isdisjoint(re.findall(r"body=%?([\w.-]+)", compiled(rows)))


def loops_with_a_sum(jaxpr, inside=False):
    """How many equations of a program sum over shards inside of a loop."""
    found = 0
    for eqn in jaxpr.eqns:
        found += inside and str(eqn.primitive).startswith("psum")
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple) else (value,):
                if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                    body = getattr(body, "jaxpr", body)
                    found += loops_with_a_sum(body, inside or str(eqn.primitive) == "scan")
    return found


def test_the_traced_gradient_sums_over_shards_in_no_loop(mesh_data):
    gradient = jax.grad(ppl.log_density(regression(4, mesh_data)))
    assert loops_with_a_sum(jax.make_jaxpr(gradient)(VALUES, X, Y).jaxpr) == 0


def test_latents_of_the_shards_and_shared_ones(mesh_data):
    """Effects on the shards by group, rows that look them up, by a group index."""
    groups = jnp.tile(jnp.arange(3), N)[:N]

    def model(x, y, groups, rows, mesh):
        scale = ppl.sample("scale", dist.HalfNormal(1.0))

        def shard(x, y, groups):
            spec = None if mesh is None else P("data")
            effect = ppl.sample("effect", dist.Normal(jnp.zeros(3 if mesh else 12), scale), spec=spec)

            def likelihood(block):
                x, y, groups = block
                ppl.observe("y", dist.Normal(effect[groups] * x[:, 0], 1.0), y)

            (ppl.blocked(likelihood, rows) if rows else likelihood)((x, y, groups))

        if mesh is None:
            shard(x, y, groups)
        else:
            jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=None)(x, y, groups)

    values = {"scale": jnp.asarray(0.4), "effect": jnp.sin(jnp.arange(12.0))}
    shard_of_row = jnp.repeat(jnp.arange(4), N // 4)
    density = ppl.log_density(lambda x, y, g: model(x, y, g, 4, mesh_data))
    plain = ppl.log_density(lambda x, y, g: model(x, y, g + 3 * shard_of_row, None, None))
    close(jax.value_and_grad(density)(values, X, Y, groups), jax.value_and_grad(plain)(values, X, Y, groups))


def test_rows_that_are_the_same_on_all_shards_count_once(mesh_data):
    """Two sums in one block: one over the shards, one that is the same on all of them."""
    weights = jnp.linspace(-1.0, 1.0, N // 4)

    def model(y, weights, rows, mesh):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))

        def likelihood(block):
            y, weights = block
            ppl.observe("y", dist.Normal(a * y, 1.0), y)
            ppl.factor("weights", -jnp.exp(a * weights))

        run = ppl.blocked(likelihood, rows)
        jax.shard_map(lambda *xs: run(xs), mesh=mesh, in_specs=(P("data"), P()), out_specs=None)(y, weights)

    def hand(v):
        terms = -0.5 * (Y - v["a"] * Y) ** 2 - 0.5 * jnp.log(2 * jnp.pi)
        return jnp.sum(terms) - jnp.sum(jnp.exp(v["a"] * weights)) - 0.5 * v["a"] ** 2 - 0.5 * jnp.log(2 * jnp.pi)

    density = ppl.log_density(lambda y, w: model(y, w, 4, mesh_data))
    values = {"a": jnp.asarray(0.6)}
    close(jax.value_and_grad(density)(values, Y, weights), jax.value_and_grad(hand)(values))
    close(
        jax.grad(jax.grad(lambda a: density({"a": a}, Y, weights)))(0.6),
        jax.grad(jax.grad(lambda a: hand({"a": a})))(0.6),
    )


def test_collectives_in_a_block(mesh_data):
    """Slopes pass a sum over shards that the likelihood takes itself."""

    def model(y, rows):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))

        def likelihood(y):
            total = lax.psum(jnp.sin(a * y), "data")
            ppl.observe("y", dist.Normal(total * y, 1.0), y)

        run = likelihood if rows is None else ppl.blocked(likelihood, rows)
        jax.shard_map(run, mesh=mesh_data, in_specs=P("data"), out_specs=None)(y)

    def hand(v):
        pieces = Y.reshape(4, -1)
        mean = jnp.sin(v["a"] * pieces).sum(0, keepdims=True) * pieces
        return jnp.sum(-0.5 * (pieces - mean) ** 2 - 0.5 * jnp.log(2 * jnp.pi)) - 0.5 * v["a"] ** 2

    values = {"a": jnp.asarray(0.6)}
    found, slope = jax.value_and_grad(ppl.log_density(lambda y: model(y, 4)))(values, Y)
    expected, expected_slope = jax.value_and_grad(hand)(values)
    close((found + 0.5 * jnp.log(2 * jnp.pi), slope), (expected, expected_slope))


@pytest.mark.parametrize("check_vma", [True, False])
def test_within_a_shard_map_of_the_caller(mesh_2x2, check_vma):
    """The caller maps over chains; the model over the data."""
    chains = {"beta": jnp.stack([VALUES["beta"], -VALUES["beta"]])}

    def model(x, y, rows):
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((3,)))

        def shard(beta, x, y):
            likelihood = lambda block: ppl.observe("y", dist.Normal(block[0] @ beta, 1.0), block[1])  # noqa: E731
            (likelihood if rows is None else ppl.blocked(likelihood, rows))((x, y))

        if rows is None:
            shard(beta, x, y)
        else:
            jax.shard_map(shard, in_specs=(P(), P("data"), P("data")), out_specs=None, axis_names={"data"})(beta, x, y)

    def derivatives(values, x, y, rows):
        density = lambda v: ppl.log_density(lambda x, y: model(x, y, rows))(v, x, y)  # noqa: E731
        if check_vma:  # JAX's own reverse mode cannot lower nested axes with check_vma
            return jax.jvp(density, (values,), (jax.tree.map(lambda v: 0 * v + 1, values),))
        return density(values), sum(jnp.sum(g) for g in jax.tree.leaves(jax.grad(density)(values)))

    def per_chain(values, x, y):
        found = derivatives(jax.tree.map(lambda v: v[0], values), x, y, 4)
        return jax.tree.map(lambda v: v[None], found)

    specs = {"in_specs": (P("chains"), P(), P()), "out_specs": P("chains"), "axis_names": {"chains"}}
    found = jax.jit(jax.shard_map(per_chain, mesh=mesh_2x2, check_vma=check_vma, **specs))(chains, X, Y)
    close(found, jax.vmap(lambda v: derivatives(v, X, Y, None))(chains))


def test_shard_map_inside_of_a_block(mesh_data):
    def model(x, rows):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))

        def likelihood(x):
            body = lambda x: (ppl.observe("x", dist.Normal(a, 1.0), x), None)[1]  # noqa: E731
            jax.shard_map(body, mesh=mesh_data, in_specs=P("data"), out_specs=None)(x)

        (likelihood if rows is None else ppl.blocked(likelihood, rows))(x)

    values = {"a": jnp.asarray(0.6)}
    plain, blocked = (lambda x: model(x, None)), (lambda x: model(x, 16))
    close(*(jax.value_and_grad(ppl.log_density(m))(values, Y) for m in (blocked, plain)))
    close(*(ppl.evaluate(m)(values, Y).log_probs for m in (blocked, plain)))
