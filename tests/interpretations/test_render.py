"""``render`` draws the sites, their plates and what reaches them; ``sites`` prints them as a table."""

import re

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import MissingDependencyError

pytest.importorskip("graphviz")

STANDARD = dist.Normal(0.0, 1.0)


def around(x, scale=1.0):
    return dist.Normal(x, scale)


def edges(model, *args):
    """The arrows of the drawing, as pairs of names."""
    found = [re.fullmatch(r'\s*"?(.+?)"? -> "?(.+?)"?\n?', line) for line in ppl.render(model)(*args).body]
    return {match.groups() for match in found if match}


def test_values_reach_sites_through_arithmetic_and_stop_at_sites():
    def model(y):
        a = ppl.sample("a", STANDARD)
        b = ppl.sample("b", around(jnp.sin(a)))
        ppl.sample("alone", STANDARD)
        d = ppl.deterministic("d", a + b)
        ppl.observe("y", around(d), y)
        ppl.factor("f", b * y)

    assert edges(model, 0.5) == {("a", "b"), ("a", "d"), ("b", "d"), ("d", "y"), ("b", "f")}


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.jit(jax.checkpoint(f))])
def test_through_calls(wrap):
    def model():
        a = ppl.sample("a", STANDARD)
        c = ppl.sample("c", STANDARD)
        first, second = wrap(lambda a, c: (ppl.sample("b", around(a)), 2 * c))(a, c)
        ppl.sample("of first", around(first))
        ppl.sample("of second", around(second))

    assert edges(model) == {("a", "b"), ("b", "of first"), ("c", "of second")}


def test_a_carry_takes_several_steps():
    """What is carried reaches a site of the same body in a later step, by way of another carry."""

    def model():
        a = ppl.sample("a", STANDARD)
        b = ppl.sample("b", STANDARD)
        scales = ppl.sample("scales", dist.HalfNormal(jnp.ones(3)))

        def step(carry, scale):
            x, y, z = carry
            ppl.sample("s", around(z, scale))
            return (x, x, y), y

        (_, _, z), ys = lax.scan(step, (a, b, 0.0), scales)
        ppl.sample("t", around(z))
        ppl.sample("u", around(ys.sum()))

    assert edges(model) == {*((n, "s") for n in ("a", "b", "scales")), *((n, m) for n in "ab" for m in "tu")}


def test_a_walk_is_no_arrow_to_itself():
    def model():
        start = ppl.sample("start", STANDARD)
        lax.scan(lambda x, _: (ppl.sample("x", around(x)), None), start, length=3)

    assert edges(model) == {("start", "x")}


def test_a_loop_depends_on_what_decides_how_long_it_runs():
    def model():
        a = ppl.sample("a", STANDARD)
        b = ppl.sample("b", STANDARD)
        limit = ppl.sample("limit", STANDARD)

        def body(carry):
            count, x = carry
            ppl.factor("f", x)
            return count + 1.0, x * b

        count, _ = lax.while_loop(lambda carry: carry[0] < limit, body, (0.0, a))
        ppl.sample("c", around(count))

    assert edges(model) == {("a", "f"), ("b", "f"), ("limit", "f"), ("limit", "c")}


@pytest.mark.parametrize("lanes", [False, True], ids=["one", "lanes"])
def test_a_branch_depends_on_the_predicate_and_on_its_own_operands(lanes):
    def model():
        def one(p):
            a = ppl.sample("a", STANDARD)
            b = ppl.sample("b", STANDARD)
            p = ppl.sample("p", around(p))
            out = lax.cond(p > 0, lambda: ppl.sample("x", around(a)), lambda: ppl.sample("z", around(b)))
            ppl.sample("after", around(out))

        (jax.vmap(one) if lanes else lambda ps: one(ps[0]))(jnp.zeros(2))

    assert edges(model) == {
        ("p", "x"),
        ("a", "x"),
        ("p", "z"),
        ("b", "z"),
        ("p", "after"),
        ("x", "after"),
        ("z", "after"),
    }


def test_shards_and_plates(mesh_2x2):
    """Each repetition is a plate: the scan in the vmap in the shards, and no plate along an axis that is not varied."""

    def body(level, y):
        ppl.sample("shared", STANDARD, spec=P())

        def row(y):
            lax.scan(lambda carry, _: (carry, ppl.sample("x:0", around(y))), 0.0, length=5)

        jax.vmap(row, axis_name="row")(y)
        jax.vmap(lambda y: ppl.observe("y", around(level), y))(y)

    def model(y):
        level = ppl.sample("level", STANDARD)
        jax.shard_map(body, mesh=mesh_2x2, in_specs=(P(), P("data")), out_specs=None)(level, y)

    source = ppl.render(model)(jnp.zeros(6)).source
    plates = re.findall(r'label="?([^"\n]*(?:shards|scan|vmap|row)[^"\n]*?)"? label', source)
    assert plates == ["data: 2 shards", "scan 5", "row: 3", "vmap 3"]
    assert edges(model, jnp.zeros(6)) == {("level", "y")}
    nodes = dict(re.findall(r'\n\t*"?([^"\n\[]+?)"? \[label="[^"]*"[^\]]* tooltip="([^"]*)"', source))
    line = body.__code__.co_firstlineno
    assert nodes["shared"] == f"test_render.py:{line + 1} ()"
    assert nodes["x\u22360"] == f"test_render.py:{line + 4} (5, 6)"  # a colon would be a port
    assert nodes["y"] == f"test_render.py:{line + 7} (6,)"


def test_without_graphviz_the_error_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "graphviz", None)
    with pytest.raises(MissingDependencyError, match=r"graphviz is not installed(.|\n)*fix: pip install"):
        ppl.render(lambda: ppl.sample("x", STANDARD))()


def test_sites_print_as_a_table(mesh_data):
    def model(y):
        ppl.sample("sigma", dist.LogNormal(0.0, 1.0))
        lax.scan(lambda c, _: (c, ppl.sample("p", dist.Dirichlet(jnp.ones((2, 3))), dims=("group",))), 0.0, length=4)
        jax.shard_map(
            lambda y: (ppl.observe("y", STANDARD, y), None)[1], mesh=mesh_data, in_specs=P("data"), out_specs=None
        )(y)
        ppl.factor("f", y.sum())
        ppl.sample("e", dist.Normal(jnp.zeros(3), 1.0).to_event(1))

    sites = ppl.sites(model)(jnp.zeros(8))
    rows = [re.split(r"\s{2,}", line) for line in repr(sites).splitlines()]
    first = model.__code__.co_firstlineno
    assert rows[0] == ["name", "kind", "distribution", "shape", "support", "dims", "spec", "inside", "line"]
    assert rows[1] == ["sigma", "sample", "LogNormal", "()", "positive", f"test_render.py:{first + 1}"]
    assert rows[2][:6] == ["p", "sample", "Dirichlet", "(4, 2, 3)", "simplex", "-, group"]
    assert rows[2][6:] == ["scan[4]", f"test_render.py:{first + 2}"]
    assert rows[3][:5] == ["y", "observe", "Normal", "(8,)", "real"]
    assert rows[3][5:] == ["data", str(P("data")), "shard_map[data: 4]", f"test_render.py:{first + 4}"]
    assert rows[4] == ["f", "factor", "()", f"test_render.py:{first + 6}"]
    assert rows[5] == ["e", "sample", "Independent", "(3,)", "real", f"test_render.py:{first + 7}"]
    assert not sites["p"].is_discrete
    assert ppl.sites(lambda: ppl.sample("k", dist.Poisson(2.0)))()["k"].is_discrete
