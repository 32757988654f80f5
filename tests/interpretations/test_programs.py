"""Data are arguments of what is compiled; a program is found by its equations, and walked once."""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax

import ppleffects as ppl
from tests.language.test_distribution_contract import compilations

STANDARD = dist.Normal(0.0, 1.0)


def regression(x, y):
    b = ppl.sample("b", STANDARD)

    def step(c, xy):
        ppl.observe("y", dist.Normal(b * xy[0], 1.0), xy[1])
        return c, None

    lax.scan(step, 0.0, (x, y))


def test_repeated_calls_compile_nothing():
    x, y = jnp.arange(5.0), jnp.ones(5)
    runs = [
        lambda x, y, b: ppl.log_density(regression)({"b": b}, x, y),
        lambda x, y, b: ppl.evaluate(regression)({"b": b}, x, y),
        lambda x, y, b: ppl.simulate(regression)(jax.random.key(0), x, y),
        lambda x, y, b: jax.grad(ppl.log_density(regression))({"b": b}, x, y),
    ]
    b, c, z = jnp.array(0.5), jnp.array(0.7), x + 1.0
    for run in runs:
        run(x, y, b)
        run(x, y, b)
        with compilations() as messages:
            run(z, x, c)
        assert messages == []


def test_a_model_made_anew_by_each_call_compiles_nothing():
    def make(y):
        def model():
            b = ppl.sample("b", STANDARD)
            jax.checkpoint(lambda b: ppl.observe("y", dist.Normal(b, 1.0), y))(b)
            lax.cond(b > 0, lambda: ppl.factor("f", 1.0), lambda: None)

        return model

    arrays = [jnp.zeros(7), jnp.ones(7)]
    values = {"b": jnp.array(0.5)}
    ppl.log_density(make(arrays[0]))(values)
    with compilations() as messages:
        found = [float(ppl.log_density(make(y))(values)) for y in arrays]
    assert [m for m in messages if "call" in m] == []
    expected = [float(STANDARD.log_prob(0.5) + dist.Normal(0.5, 1.0).log_prob(y).sum() + 1.0) for y in arrays]
    np.testing.assert_allclose(found, expected)


@pytest.mark.parametrize("place", ["plain", "jit", "scan", "checkpoint", "jit in jit", "shard_map"])
def test_closed_over_arrays_are_data(place, mesh_data):
    """New arrays of one shape compile nothing: they are no constants of the program."""
    wraps = {
        "plain": lambda f: f(),
        "jit": lambda f: jax.jit(f)(),
        "scan": lambda f: lax.scan(lambda c, _: (c, (f(), None)[1]), 0.0, length=1),
        "checkpoint": lambda f: jax.checkpoint(f)(),
        "jit in jit": lambda f: jax.jit(lambda: jax.jit(f)())(),
        "shard_map": lambda f: jax.shard_map(f, mesh=mesh_data, in_specs=(), out_specs=None)(),
    }

    def make(y):
        def site():
            ppl.observe("y", STANDARD, y)

        return lambda: wraps[place](site)

    arrays = [jnp.full(11, float(i)) for i in range(3)]
    ppl.log_density(make(arrays[0]))({})
    with compilations() as messages:
        found = [float(ppl.log_density(make(y))({})) for y in arrays]
    np.testing.assert_allclose(found, [float(STANDARD.log_prob(y).sum()) for y in arrays])
    assert [m for m in messages if "call" in m] == []


LEVEL = 1.0


def test_a_changed_global_is_seen(monkeypatch):
    def model():
        ppl.observe("y", STANDARD, LEVEL)

    first = float(ppl.log_density(model)({}))
    monkeypatch.setattr(f"{__name__}.LEVEL", 2.0)
    second = float(ppl.log_density(model)({}))
    np.testing.assert_allclose([first, second], [STANDARD.log_prob(1.0), STANDARD.log_prob(2.0)])


def test_a_changed_closure_is_seen():
    scale, data, branch, names = [1.0], [jnp.zeros(2)], [True], ["a"]

    def model():
        ppl.sample(names[0], dist.Normal(0.0, scale[0]))
        if branch[0]:
            ppl.observe("y", STANDARD, data[0])

    density = ppl.log_density(model)
    found = [density({"a": 1.0})]
    scale[0] = 2.0
    found.append(density({"a": 1.0}))
    data[0] = jnp.ones(2)
    found.append(density({"a": 1.0}))
    branch[0] = False
    found.append(density({"a": 1.0}))
    names[0] = "b"
    found.append(density({"b": 1.0}))
    one, two, three = (dist.Normal(0.0, s).log_prob(1.0) for s in (1.0, 2.0, 2.0))
    zeros, ones = 2 * STANDARD.log_prob(0.0), 2 * STANDARD.log_prob(1.0)
    np.testing.assert_allclose(found, [one + zeros, two + zeros, two + ones, three, three])


def test_functions_that_differ_only_in_their_constants():
    def make(a):
        def model():
            ppl.factor("f", jnp.array([1.0, 2.0]) * a)
            lax.scan(lambda c, x: (c, ppl.factor("g", x * a)), 0.0, np.array([1.0, 2.0]))
            jax.jit(lambda: ppl.factor("h", np.full(2, a)))()

        return model

    assert [float(ppl.log_density(make(a))({})) for a in (1.0, 2.0, 1.0)] == [8.0, 16.0, 8.0]


def test_functions_that_differ_only_in_their_derivative():
    def make(slope):
        @jax.custom_jvp
        def odd(x):
            return x

        odd.defjvp(lambda p, t: (p[0], slope * t[0]))
        return lambda: ppl.factor("f", odd(ppl.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))))

    found = [float(jax.grad(ppl.log_density(make(s)))({"x": 1.0})["x"]) for s in (2.0, 3.0)]
    assert found == [2.0, 3.0]


def test_functions_that_differ_only_in_a_callback():
    float_dtype = jnp.zeros(()).dtype

    def make(a):
        def model():
            x = jax.pure_callback(lambda: np.asarray(a, float_dtype), jax.ShapeDtypeStruct((), float_dtype))
            ppl.factor("f", x)

        return model

    assert [float(ppl.log_density(make(a))({})) for a in (1.0, 2.0)] == [1.0, 2.0]


def test_static_arguments_and_arrays():
    calls = []

    def model(x, n, flag, *, label="a", scale=1.0):
        calls.append((n, flag, label))
        assert isinstance(n, int)
        assert isinstance(flag, bool)
        for i in range(n):
            ppl.observe(f"{label}{i}", dist.Normal(0.0, scale), x)

    first = ppl.log_density(model)({}, 0.5, 2, True, scale=2.0)
    np.testing.assert_allclose(first, 2 * dist.Normal(0.0, 2.0).log_prob(0.5))
    assert ppl.evaluate(model)({}, 0.5, 1, False, label="b").observed == ("b0",)
    assert calls == [(2, True, "a"), (1, False, "b")]

    class Settings(dict):
        __hash__ = None

    class Unhashable:
        __hash__ = None

    with pytest.raises(ppl.errors.PPLError, match="neither an array nor hashable(.|\n)*Unhashable"):
        ppl.log_density(lambda s: None)({}, Unhashable())


def test_donation_inside_of_a_model_deletes_nothing():
    donating = jax.jit(lambda y: ppl.observe("y", STANDARD, y), donate_argnums=0)
    other = jax.jit(lambda y: y * 2, donate_argnums=0)

    def model(y):
        donating(y)
        ppl.factor("f", other(y))

    y = jnp.arange(3.0)
    for _ in range(2):
        np.testing.assert_allclose(ppl.log_density(model)({}, y), STANDARD.log_prob(jnp.arange(3.0)).sum() + 6.0)
        ppl.evaluate(model)({}, y)
        ppl.simulate(model)(0, y)
    assert not y.is_deleted()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Counted:
    """A standard normal that counts how often its density is traced."""

    loc: jax.Array
    label: tuple = dataclasses.field(default=(), metadata={"static": True})
    batch_shape = ()
    event_shape = ()
    dtype = jnp.result_type(float)
    support = dist.constraints.real
    calls: ClassVar[list[int]] = []

    def sample(self, key, sample_shape=()):
        return self.loc + jax.random.normal(key, sample_shape)

    def log_prob(self, value):
        self.calls.append(1)
        return -0.5 * (value - self.loc) ** 2


NESTING = {
    "scan": lambda f: lambda: lax.scan(lambda c, _: (c, (f(), None)[1]), 0.0, length=1),
    "jit": lambda f: jax.jit(lambda: (f(), None)[1]),
    "checkpoint": lambda f: jax.checkpoint(lambda: (f(), None)[1]),
    "cond": lambda f: lambda: lax.cond(jnp.array(True), lambda: (f(), None)[1], lambda: None),
    "vmap": lambda f: lambda: jax.vmap(lambda _: (f(), 0.0)[1])(jnp.zeros(1)),
}


@pytest.mark.parametrize("kind", NESTING)
@pytest.mark.parametrize("interpret", ["log_density", "simulate"])
def test_a_site_is_read_once_whatever_the_nesting(kind, interpret):
    counts = []
    for depth in (1, 2, 4, 8):
        nested = functools.partial(ppl.sample, "x", Counted(jnp.zeros(()), (kind, interpret, depth)))

        for _ in range(depth):
            nested = NESTING[kind](nested)
        shape = ppl.sites(nested)()["x"].shape
        Counted.calls.clear()
        if interpret == "log_density":
            jax.make_jaxpr(lambda x, f=nested: ppl.log_density(f)({"x": x}))(jnp.zeros(shape))
        else:
            jax.make_jaxpr(lambda f=nested: ppl.simulate(f)(0).log_prob)()
        counts.append(len(Counted.calls))
    assert counts == [1] * 4


def test_a_pure_part_of_the_model_is_bound_unchanged():
    @jax.jit
    def a_pure_part(x):
        return lax.fori_loop(0, 3, lambda i, c: c * 1.5, x)

    def model(x):
        ppl.factor("f", a_pure_part(x))

    before = jax.make_jaxpr(a_pure_part)(1.0).jaxpr.eqns[0]
    text = str(jax.make_jaxpr(lambda x: ppl.log_density(model)({}, x))(1.0))
    assert "a_pure_part" in text
    assert str(before.params["jaxpr"].eqns[-1].primitive) in text
