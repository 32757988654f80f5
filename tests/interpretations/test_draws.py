"""Draws: independent over steps, lanes and shards; a function of key, name and place alone; of the right law."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

NORMAL = dist.Normal(0.0, 1.0)


def draw(name="x"):
    return ppl.sample(name, NORMAL)


def scanned(f, n=3):
    return lambda: lax.scan(lambda c, _: (c, f()), 0.0, length=n)[1]


def mapped(f, n=2):
    return lambda: jax.vmap(lambda _: f())(jnp.zeros(n))


PLACES = {
    "scan": scanned(draw),
    "vmap": mapped(draw),
    "scan in scan": scanned(scanned(draw, 2)),
    "vmap in scan": scanned(mapped(draw)),
    "scan in vmap": mapped(scanned(draw)),
    "vmap in vmap": mapped(mapped(draw, 3)),
    "jit in scan in checkpoint": jax.checkpoint(scanned(jax.jit(draw))),
    "batch": lambda: ppl.sample("x", dist.Normal(jnp.zeros(4), 1.0)),
    "batch in vmap": mapped(lambda: ppl.sample("x", dist.Normal(jnp.zeros(3), 1.0))),
}


@pytest.mark.parametrize("place", PLACES)
def test_all_entries_differ(place):
    x = np.asarray(ppl.simulate(lambda: PLACES[place]())(0).values["x"])
    assert len(set(x.ravel().tolist())) == x.size


@pytest.mark.parametrize("place", PLACES)
def test_other_sites_change_nothing(place):
    alone = ppl.simulate(lambda: PLACES[place]())(0).values["x"]

    def with_others():
        before = ppl.sample("before", NORMAL)
        x = PLACES[place]()
        ppl.observe("y", dist.Normal(before, 1.0), jnp.sum(x))
        ppl.deterministic("d", before)
        ppl.sample("after", dist.Gamma(2.0, 1.0))

    np.testing.assert_array_equal(ppl.simulate(with_others)(0).values["x"], alone)


def test_eager_jit_and_legacy_keys_draw_the_same():
    def model():
        draw("a")
        scanned(lambda: ppl.sample("b", dist.Gamma(2.0, 1.0)))()

    eager = ppl.simulate(model)(5).values
    for key in (jax.random.key(5), jax.random.PRNGKey(5)):
        found = jax.jit(ppl.simulate(model))(key).values
        for name in eager:
            np.testing.assert_array_equal(found[name], eager[name])
    with jax.disable_jit():
        found = ppl.simulate(lambda: draw("a"))(5).values["a"]
    np.testing.assert_array_equal(found, eager["a"])


def test_keys_of_another_kind():
    key = jax.random.key(0, impl="rbg")
    assert ppl.simulate(lambda: draw())(key).values["x"].shape == ()


def test_many_keys_by_vmap():
    keys = jax.random.split(jax.random.key(0), 3)
    together = jax.vmap(ppl.simulate(lambda: draw()))(keys).values["x"]
    apart = [ppl.simulate(lambda: draw())(key).values["x"] for key in keys]
    np.testing.assert_array_equal(together, jnp.stack(apart))


def test_another_key_another_draw_another_name_another_draw():
    def model():
        return (draw("a"), draw("b"))

    one, two = ppl.simulate(model)(0).values, ppl.simulate(model)(1).values
    assert len({float(v) for t in (one, two) for v in t.values()}) == 4


def test_longer_loops_only_append():
    short = ppl.simulate(scanned(draw, 3))(0).values["x"]
    np.testing.assert_array_equal(ppl.simulate(scanned(draw, 5))(0).values["x"][:3], short)
    lanes = ppl.simulate(mapped(draw, 3))(0).values["x"]
    np.testing.assert_array_equal(ppl.simulate(mapped(draw, 5))(0).values["x"][:3], lanes)


def test_a_reversed_scan_draws_in_its_layout():
    def model():
        return lax.scan(lambda c, _: (c, draw()), 0.0, length=3, reverse=True)[1]

    trace = ppl.simulate(model)(0)
    np.testing.assert_array_equal(trace.retval, trace.values["x"])


def test_branches_draw_from_their_own_distribution():
    def model(p):
        return lax.cond(p, lambda: ppl.sample("x", dist.Normal(100.0, 1.0)), lambda: ppl.sample("x", NORMAL))

    high, low = (float(ppl.simulate(model)(0, jnp.array(p)).values["x"]) for p in (True, False))
    np.testing.assert_allclose(high - 100.0, low, rtol=1e-9)  # the same key in each branch


def test_the_law_of_draws_over_steps_and_lanes():
    def model():
        return lax.scan(
            lambda c, _: (c, jax.vmap(lambda _: ppl.sample("x", dist.Gamma(3.0, 2.0)))(jnp.zeros(40))), 0.0, length=50
        )

    x = np.asarray(ppl.simulate(model)(0).values["x"])
    assert x.shape == (50, 40)
    assert abs(x.mean() - 1.5) < 5 * np.sqrt(0.75 / x.size)
    assert abs(x.var() - 0.75) < 0.15
    assert abs(np.corrcoef(x[:-1].ravel(), x[1:].ravel())[0, 1]) < 5 / np.sqrt(x.size)
    assert abs(np.corrcoef(x[:, :-1].ravel(), x[:, 1:].ravel())[0, 1]) < 5 / np.sqrt(x.size)


def test_in_shard_map_with_loops(mesh_data):
    def model(x):
        def body(x):
            own = scanned(mapped(lambda: ppl.sample("own", NORMAL, spec=P("data"))))()
            one = scanned(lambda: ppl.sample("one", NORMAL, spec=P()))()
            rows = lax.scan(lambda c, _: (c, ppl.sample("rows", dist.Normal(x, 1.0))), 0.0, length=2)[1]
            return jnp.moveaxis(own, 1, 0), one, rows

        specs = (P("data"), P(), P(None, "data"))
        return jax.shard_map(body, mesh=mesh_data, in_specs=P("data"), out_specs=specs)(x)

    trace = ppl.simulate(model)(0, jnp.zeros(8))
    shapes = {name: value.shape for name, value in trace.values.items()}
    assert shapes == {"own": (3, 8), "one": (3,), "rows": (2, 8)}
    for name in ("own", "rows"):
        assert len(set(np.asarray(trace.values[name]).ravel().tolist())) == trace.values[name].size
    own, one, rows = trace.retval
    np.testing.assert_array_equal(jnp.moveaxis(own, 0, 1), trace.values["own"])
    np.testing.assert_array_equal(one, trace.values["one"])
    np.testing.assert_array_equal(rows, trace.values["rows"])
    np.testing.assert_array_equal(one, ppl.simulate(scanned(lambda: draw("one")))(0).values["one"])


@pytest.mark.parametrize(
    ("key", "found"),
    [
        ("seed", "'seed'"),
        (1.5, "1.5"),
        (True, "True"),
        (None, "None"),
        (jnp.zeros(2), "float"),
        (jax.random.split(jax.random.key(0), 2), r"key<fry>\[2\]"),
    ],
    ids=["str", "float", "bool", "None", "floats", "batch"],
)
def test_what_is_no_key(key, found):
    with pytest.raises(ppl.errors.PPLError, match=f"not a random key(.|\n)*{found}"):
        ppl.simulate(lambda: draw())(key)
