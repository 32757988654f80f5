"""cond, switch and while: the taken branch counts, the other leaves neither numbers nor NaNs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax

import ppleffects as ppl
from ppleffects.errors import ShapeError, UnsupportedPrimitiveError

LOG_2PI = np.log(2 * np.pi)
STANDARD = dist.Normal(0.0, 1.0)


def normal(x):
    return np.sum(-0.5 * np.asarray(x) ** 2 - 0.5 * LOG_2PI)


def two(p, y=0.5):
    """A latent in both branches, an observation in one."""

    def first():
        x = ppl.sample("x", dist.Normal(10.0, 1.0))
        ppl.observe("y", dist.Normal(x, 1.0), y)
        ppl.factor("f", 3.0)
        ppl.deterministic("d", 2 * x)
        return x

    return lax.cond(p, first, lambda: ppl.sample("x", dist.Normal(-10.0, 1.0)))


@pytest.mark.parametrize("taken", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_the_taken_branch_counts(taken, transform):
    expected = normal(1.0 - 10.0) + normal(0.5 - 1.0) + 3.0 if taken else normal(1.0 + 10.0)
    np.testing.assert_allclose(transform(ppl.log_density(two))({"x": 1.0}, jnp.array(taken)), expected)
    trace = transform(ppl.evaluate(two))({"x": 1.0}, jnp.array(taken))
    np.testing.assert_allclose(trace.log_prob, expected)
    drawn = ppl.simulate(two)(0, jnp.array(taken))
    assert (float(drawn.values["x"]) > 0) == taken


def test_records_of_what_was_not_reached():
    trace = ppl.evaluate(two)({"x": 1.0}, jnp.array(False))
    assert not trace.active["y"]
    assert not trace.active["d"]
    assert "x" not in trace.active or trace.active["x"]
    assert jnp.isnan(trace.values["y"])
    assert jnp.isnan(trace.values["d"])
    assert float(trace.log_probs["y"]) == 0.0
    reached = ppl.evaluate(two)({"x": 1.0}, jnp.array(True))
    assert reached.active["y"]
    assert float(reached.values["y"]) == 0.5


def test_a_static_predicate_leaves_one_branch():
    trace = ppl.evaluate(lambda: two(True))({"x": 1.0})
    assert float(trace.values["y"]) == 0.5


@pytest.mark.parametrize("index", [0, 1, 2])
def test_switch(index):
    scales = jnp.array([1.0, 2.0, 4.0])
    branches = [
        lambda: ppl.observe("y", dist.Normal(0.0, 1.0), 0.5),
        lambda: (ppl.factor("f", 2.0), 0.0)[1],
        lambda: ppl.observe("y", dist.Normal(0.0, 4.0), 0.5),
    ]
    for ordered, want in ((branches, index), (branches[::-1], 2 - index)):
        model = functools.partial(lambda ordered, i: lax.switch(i, ordered), tuple(ordered))
        value = ppl.log_density(model)({}, jnp.array(index))
        expected = 2.0 if want == 1 else normal(0.5 / scales[want]) - np.log(scales[want])
        np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_the_other_branch_gives_no_nan_gradient():
    def model(x):
        lax.cond(x > 0, lambda x: ppl.factor("f", jnp.sqrt(x)), lambda x: ppl.factor("f", x**2), x)

    def latent():
        x = ppl.sample("x", STANDARD)
        model(x)
        return x

    for x, slope in ((-2.0, 2.0 - 4.0), (4.0, -4.0 + 0.25)):
        np.testing.assert_allclose(jax.grad(ppl.log_density(latent))({"x": x})["x"], slope)
        np.testing.assert_allclose(jax.jvp(lambda x: ppl.log_density(latent)({"x": x}), (x,), (1.0,))[1], slope)


def test_a_nan_in_the_other_branch_stays_there():
    def model(p, bad):
        return lax.cond(
            p, lambda: ppl.observe("y", dist.Normal(bad, 1.0), 0.0), lambda: ppl.observe("z", STANDARD, 0.0)
        )

    value, slope = jax.value_and_grad(lambda b: ppl.log_density(model)({}, jnp.array(False), b))(jnp.nan)
    np.testing.assert_allclose(value, normal(0.0))
    assert float(slope) == 0.0


def test_in_a_scan_every_step_takes_its_own():
    ps = jnp.array([True, False, True])

    def model(ps):
        def step(c, p):
            return c, lax.cond(p, lambda: ppl.sample("x", STANDARD), lambda: (ppl.factor("f", 5.0), 0.0)[1])

        return lax.scan(step, 0.0, ps)[1]

    trace = ppl.simulate(model)(0, ps)
    np.testing.assert_array_equal(trace.active["x"], ps)
    np.testing.assert_array_equal(jnp.isnan(trace.values["x"]), ~ps)
    np.testing.assert_allclose(trace.log_prob, normal(trace.values["x"][ps]) + 5.0)
    values = {"x": jnp.array([0.1, 99.0, 0.3])}
    np.testing.assert_allclose(ppl.log_density(model)(values, ps), normal([0.1, 0.3]) + 5.0)
    np.testing.assert_allclose(jax.grad(ppl.log_density(model))(values, ps)["x"], [-0.1, 0.0, -0.3])


def test_nested_branches_and_loops():
    def model(p, q):
        def inner():
            return lax.scan(
                lambda c, x: (c, lax.cond(x > q, lambda: ppl.sample("a", STANDARD), lambda: 0.0)), 0.0, jnp.arange(3.0)
            )[1].sum()

        return lax.cond(p, inner, lambda: 0.0)

    trace = ppl.simulate(model)(0, jnp.array(True), 0.5)
    np.testing.assert_array_equal(trace.active["a"], [False, True, True])
    np.testing.assert_allclose(trace.log_prob, normal(trace.values["a"][1:]))
    trace = ppl.simulate(model)(0, jnp.array(False), 0.5)
    np.testing.assert_array_equal(trace.active["a"], [False, False, False])
    assert float(trace.log_prob) == 0.0


def test_integers_that_were_not_reached_are_masked():
    def model(p):
        return lax.cond(p, lambda: ppl.sample("k", dist.Poisson(3.0)), lambda: 0)

    trace = ppl.simulate(model)(0, jnp.array(False))
    assert not trace.active["k"]
    assert float(trace.log_probs["k"]) == 0.0


def test_observations_of_different_shapes_count():
    def model(p):
        lax.cond(
            p,
            lambda: ppl.observe("y", STANDARD, jnp.zeros(3)).sum(),
            lambda: ppl.observe("y", STANDARD, jnp.ones(2)).sum(),
        )

    np.testing.assert_allclose(ppl.log_density(model)({}, jnp.array(True)), normal(np.zeros(3)))
    np.testing.assert_allclose(ppl.log_density(model)({}, jnp.array(False)), normal(np.ones(2)))


def test_lanes_take_their_own_branch():
    def model(ps):
        def lane(p):
            lax.cond(p, lambda: ppl.factor("f", 1.0), lambda: ppl.factor("f", 10.0))
            return lax.cond(p, lambda: ppl.sample("x", STANDARD), lambda: ppl.sample("x", dist.Normal(50.0, 1.0)))

        return jax.vmap(lane)(ps)

    ps = jnp.array([False, True, True])
    values = {"x": jnp.array([49.0, 0.5, -0.5])}
    expected = 12.0 + normal([1.0, 0.5, 0.5])
    np.testing.assert_allclose(ppl.log_density(model)(values, ps), expected)
    np.testing.assert_allclose(jax.grad(ppl.log_density(model))(values, ps)["x"], [1.0, -0.5, 0.5])
    trace = ppl.simulate(model)(0, ps)
    np.testing.assert_array_equal(trace.values["x"] > 25.0, ~ps)
    np.testing.assert_allclose(ppl.evaluate(model)(values, ps).log_prob, expected)


def test_lanes_give_no_nan_gradient_from_the_other_branch():
    def model(xs):
        jax.vmap(lambda x: lax.cond(x > 0, lambda: ppl.factor("f", jnp.sqrt(x)), lambda: None))(xs)

    def density(xs):
        return ppl.log_density(model)({}, xs)

    xs = jnp.array([4.0, -1.0])
    np.testing.assert_allclose(density(xs), 2.0)
    np.testing.assert_allclose(jax.grad(density)(xs), [0.25, 0.0])


def test_while_counts_observations_and_factors():
    def model(n, x):
        def body(c):
            ppl.observe("y", dist.Normal(x, 1.0), c * 1.0)
            ppl.factor("f", x)
            return c + 1

        lax.while_loop(lambda c: c < n, body, 0)

    for n in (0, 3):
        np.testing.assert_allclose(ppl.log_density(model)({}, jnp.array(n), 0.5), normal(np.arange(n) - 0.5) + 0.5 * n)
    slope = jax.jvp(lambda x: ppl.log_density(model)({}, jnp.array(3), x), (0.5,), (1.0,))[1]
    np.testing.assert_allclose(slope, np.sum(np.arange(3) - 0.5) + 3)


def test_while_counts_per_lane():
    def model(ns):
        def lane(n):
            lax.while_loop(lambda c: c < n, lambda c: (ppl.factor("f", 1.0 + c), c + 1)[1], 0)

        jax.vmap(lane)(ns)

    assert float(ppl.log_density(model)({}, jnp.array([1, 3, 0]))) == 1 + (1 + 2 + 3)


@pytest.mark.parametrize("kind", ["sample", "deterministic"])
def test_while_refuses_values(kind):
    def body(c):
        if kind == "sample":
            ppl.sample("x", STANDARD)
        else:
            ppl.deterministic("x", c)
        return c + 1

    def model():
        return lax.while_loop(lambda c: c < 3, body, 0)

    for interpret in (ppl.sites(model), lambda: ppl.log_density(model)({"x": 0.0}), lambda: ppl.simulate(model)(0)):
        with pytest.raises(UnsupportedPrimitiveError, match=rf"site 'x' at .*: a {kind} site inside(.|\n)*lax.scan"):
            interpret()


@pytest.mark.parametrize("interpret", ["simulate", "evaluate"])
def test_while_keeps_no_record(interpret):
    """The number of iterations, and so the shape of the record, is unknown."""

    def model(n):
        def body(c):
            ppl.observe("y", STANDARD, 1.0 * c)
            return c + 1

        return lax.while_loop(lambda c: c < n, body, 0)

    run = {"simulate": lambda n: ppl.simulate(model)(0, n), "evaluate": lambda n: ppl.evaluate(model)({}, n)}[interpret]
    line = model.__code__.co_firstlineno + 2
    match = rf"site 'y' at test_branches.py:{line}: .*cannot be recorded(.|\n)*fix: use ppl.log_density"
    with pytest.raises(UnsupportedPrimitiveError, match=match):
        run(jnp.array(3))


def test_while_that_writes_nothing_may_stand_beside_records():
    def model(n):
        ppl.observe("y", STANDARD, 2.0)
        lax.while_loop(lambda c: c < n, lambda c: (ppl.factor("f", 1.0), c + 1)[1], 0)

    trace = ppl.simulate(model)(0, jnp.array(3))
    np.testing.assert_allclose(trace.log_prob, normal(2.0) + 3.0)
    assert list(trace.log_probs) == ["y"]


def test_records_of_different_shapes_are_refused():
    def model(p):
        lax.cond(
            p,
            lambda: ppl.observe("y", STANDARD, jnp.zeros(3)).sum(),
            lambda: ppl.observe("y", STANDARD, jnp.ones(2)).sum(),
        )

    with pytest.raises(ShapeError, match=r"site 'y' at test_branches.py:\d+: (.|\n)*one shape (.|\n)*\[2\].*\[3\]"):
        ppl.simulate(model)(0, jnp.array(True))


def test_lanes_take_their_own_branch_of_a_branch():
    """Two conds, one in the other: a site in the inner one is reached where both say so; deterministics too."""

    def model(ps, qs):
        def lane(p, q):
            def outer():
                x = ppl.sample("x", STANDARD)
                lax.cond(q, lambda: ppl.observe("y", dist.Normal(x, 1.0), 2.0), lambda: ppl.deterministic("d", 3 * x))

            lax.cond(p, outer, lambda: ppl.factor("f", 5.0))

        jax.vmap(lane)(ps, qs)

    ps, qs = jnp.array([True, True, False, False]), jnp.array([True, False, True, False])
    x = jnp.array([0.5, -1.0, 7.0, 8.0])
    expected = normal([0.5, -1.0]) + normal(2.0 - 0.5) + 2 * 5.0
    np.testing.assert_allclose(ppl.log_density(model)({"x": x}, ps, qs), expected)
    slope = jax.grad(ppl.log_density(model))({"x": x}, ps, qs)["x"]
    np.testing.assert_allclose(slope, [-0.5 + (2.0 - 0.5), 1.0, 0.0, 0.0])
    trace = ppl.evaluate(model)({"x": x}, ps, qs)
    np.testing.assert_array_equal(trace.active["x"], ps)
    np.testing.assert_array_equal(trace.active["y"], ps & qs)
    np.testing.assert_array_equal(trace.active["d"], ps & ~qs)
    np.testing.assert_allclose(trace.values["d"], [np.nan, -3.0, np.nan, np.nan])
    np.testing.assert_allclose(trace.log_prob, expected)
