"""Bodies are walked once, what holds no effect is bound unchanged, and nothing of the caller's is donated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import Primitive

from ppleffects.effects import (
    Dispatcher,
    HandlerResult,
    Interpreter,
    Uninitialized,
    default_dispatcher,
    default_handlers,
    reinterpret,
    structure_of,
)
from ppleffects.errors import UnsupportedPrimitiveError
from tests.effects.test_handlers import equations, find
from tests.effects.toys import Counter, tally, tally_of, tallying


def nested(kind, depth):
    """One tally inside of ``depth`` bodies of one kind."""

    def leaf(x):
        tally(x)
        return x

    wraps = {
        "jit": lambda f: jax.jit(f),
        "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0],
        "while": lambda f: lambda x: lax.fori_loop(0, jnp.int32(x) * 0 + 1, lambda i, c: f(c), x),
        "cond": lambda f: lambda x: lax.cond(x > 0, f, lambda y: -y, x),
        "checkpoint": lambda f: jax.checkpoint(f),
    }
    return functools.reduce(lambda f, _: wraps[kind](f), range(depth), leaf)


@pytest.mark.parametrize("kind", ["jit", "scan", "while", "cond", "checkpoint"])
def test_each_body_is_walked_once(kind):
    calls = []
    for depth in range(1, 9):
        counter = Counter()
        jax.make_jaxpr(reinterpret(nested(kind, depth), tallying(counter)))(jnp.zeros(()), 1.0)
        calls.append(counter.calls)
    assert calls == [1] * 8


def test_each_branch_and_each_call_is_walked_once():
    counter = Counter()

    def branch(x):
        return (tally(x), x)[1]

    def fn(x):
        return lax.switch(jnp.int32(x), [branch, branch, branch], x) + branch(x)

    jax.make_jaxpr(reinterpret(fn, tallying(counter)))(jnp.zeros(()), 1.0)
    assert counter.calls == 4


@jax.custom_jvp
def twisted(x):
    return jnp.sin(x)


@twisted.defjvp
def _(primals, tangents):
    return twisted(*primals), 100.0 * tangents[0]


@jax.custom_vjp
def bent(x):
    return jnp.sin(x)


bent.defvjp(lambda x: (bent(x), None), lambda _, g: (7.0 * g,))


@pytest.mark.parametrize(("fn", "slope"), [(twisted, 100.0), (bent, 7.0)])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint])
def test_derivative_rules_stay(fn, slope, wrap):
    def model(x):
        tally(wrap(fn)(x))
        return x

    def total(x):
        return tally_of(model, x)[1]

    np.testing.assert_allclose(total(0.3), np.sin(0.3))
    np.testing.assert_allclose(jax.grad(total)(0.3), slope)


@pytest.mark.parametrize(("fn", "slope"), [(twisted, 100.0), (bent, 7.0)])
def test_derivative_rules_stay_where_a_handler_looks_inside(fn, slope):
    sin_p = jax.make_jaxpr(jnp.sin)(1.0).jaxpr.eqns[0].primitive

    def count(interpreter, ctx, eqn, invals):
        return HandlerResult(ctx + 1, [eqn.primitive.bind(*invals, **eqn.params)])

    counting = Interpreter(default_dispatcher().extended({sin_p: count}))

    def out(x):
        return reinterpret(fn, counting)(jnp.zeros(()), x)

    assert float(out(0.3)[1]) == 1.0
    np.testing.assert_allclose(jax.grad(lambda x: out(x)[0])(0.3), slope)


@pytest.mark.parametrize("fn", ["custom_jvp", "custom_vjp"])
def test_an_effect_under_its_own_derivative_rule_is_refused(fn):
    @getattr(jax, fn)
    def inner(x):
        tally(x)
        return x

    if fn == "custom_jvp":
        inner.defjvp(lambda p, t: (p[0], t[0]))
    else:
        inner.defvjp(lambda x: (x, None), lambda _, g: (g,))
    with pytest.raises(UnsupportedPrimitiveError, match=f"site 'tally'.*own derivative rule.*{fn}"):
        tally_of(inner, 1.0)


def test_callbacks_and_solves_are_bound_unchanged():
    seen = []

    def fn(a, b):
        x = jnp.linalg.solve(a, b)
        y = jax.pure_callback(lambda v: (seen.append(1), np.asarray(v) * 2)[1], jax.ShapeDtypeStruct((2,), b.dtype), x)
        z = lax.custom_linear_solve(lambda v: 2 * v, y, lambda _, rhs: rhs / 2, symmetric=True)
        tally(jnp.sum(z))
        return z

    a, b = jnp.array([[2.0, 0.0], [0.0, 4.0]]), jnp.array([2.0, 4.0])
    out, total = tally_of(fn, a, b)
    np.testing.assert_allclose(out, [1.0, 1.0])
    assert float(total) == 2.0
    assert seen == [1]


def test_an_effect_in_a_primitive_without_rule_names_both():
    def fn(x):
        return lax.custom_linear_solve(lambda v: (tally(1.0), 2 * v)[1], x, lambda _, rhs: rhs / 2, symmetric=True)

    with pytest.raises(UnsupportedPrimitiveError, match=r"site 'tally'(.|\n)*'custom_linear_solve' holds an effect"):
        tally_of(fn, jnp.ones(2))


def test_bodies_without_effects_are_the_same_objects():
    @jax.jit
    def pure(x):
        return lax.scan(lambda c, y: (c * y, c), x, jnp.arange(1.0, 4.0))

    def fn(x):
        return (tally(x), pure(x))[1]

    before = find(jax.make_jaxpr(fn)(1.0).jaxpr, "jit")
    after = find(equations(fn, 1.0).jaxpr, "jit")
    assert [e.params["name"] for e in before] == [e.params["name"] for e in after]
    assert before[0].params["jaxpr"] is after[0].params["jaxpr"]


def test_donation_in_a_model_deletes_nothing_of_the_callers():
    donating = functools.partial(jax.jit, donate_argnums=0)

    @donating
    def with_effect(x):
        tally(x)
        return x + 1

    @donating
    def without(x):
        return x + 1

    x, y = jnp.arange(2.0), jnp.arange(3.0)

    def fn(x, y):
        tally(jnp.sum(y))
        return jax.jit(lambda x: (tally(jnp.sum(x)), x + 1)[1], donate_argnums=0)(x), without(y)

    for _ in range(2):
        _, total = tally_of(fn, x, y)
    assert float(total) == 4.0
    assert not x.is_deleted()
    assert not y.is_deleted()
    np.testing.assert_allclose(x + 0, [0, 1])


def test_literals_constants_and_closures():
    table = jnp.arange(3.0)

    def fn(x):
        tally(jnp.sum(table) + x)
        return table * x

    out, total = tally_of(fn, 2.0)
    assert float(total) == 5.0
    np.testing.assert_allclose(out, [0, 2, 4])


def test_dispatcher_is_immutable():
    base = default_dispatcher()
    (prim,) = {jax.make_jaxpr(jnp.cos)(1.0).jaxpr.eqns[0].primitive}
    more = base.extended({prim: lambda *_: None})
    assert isinstance(more, Dispatcher)
    assert base.handler(prim) is None
    assert more.handler(prim) is not None
    assert all(base.handler(p) is h for p, h in default_handlers().items())


def test_uninitialized_knows_shape_and_dtype_only():
    slot = Uninitialized(jax.typeof(jnp.zeros((2, 3))))
    assert (slot.shape, slot.dtype) == ((2, 3), jnp.zeros(()).dtype)


def test_reinterpret_under_jit_vmap_and_grad_outside():
    def fn(x):
        tally(x * x)
        return x

    def total(x):
        return tally_of(fn, x)[1]

    np.testing.assert_allclose(jax.jit(jax.vmap(jax.grad(total)))(jnp.arange(3.0)), [0, 2, 4])


def test_the_effect_shows_in_a_jaxpr():
    assert str(jax.make_jaxpr(lambda: tally(1.0))().effects) == "{Interpreted}"


def test_a_function_that_cannot_be_traced_is_left_to_its_derivative_rule():
    """Under a derivative JAX runs the rule alone; the search for effects in the body, which fails, is silent."""

    @jax.custom_jvp
    def concrete(x):
        return x if float(x) > 0 else -x

    concrete.defjvp(lambda primals, tangents: (jnp.abs(primals[0]), 5.0 * tangents[0]))

    def fn(x):
        tally(jax.grad(concrete)(x))
        return x

    assert float(tally_of(fn, -2.0)[1]) == 5.0


configured_p = Primitive("configured")
configured_p.def_abstract_eval(lambda x, **_: x)

PARAMETERS = {  # each is made anew when it is called, and differs from all others
    "tuple": lambda: (1, 2.0),
    "tuple of other values": lambda: (1, 2),
    "a shape": lambda: jax.ShapeDtypeStruct((2,), float),
    "one": lambda: 1,
    "one point": lambda: 1.0,
    "true": lambda: True,
    "zero": lambda: 0.0,
    "minus zero": lambda: -0.0,
    "nan": lambda: float("nan"),
    "imaginary": lambda: 1j,
    "text": lambda: "text",
    "none": lambda: None,
    "a class": lambda: float,
}


def structure_with(parameter):
    traced = jax.make_jaxpr(lambda x: configured_p.bind(x, parameter=parameter))(1.0)
    return structure_of(getattr(traced, "jaxpr", traced))


def test_programs_are_told_apart_by_parameters_of_every_kind():
    found = {name: structure_with(make()) for name, make in PARAMETERS.items()}
    for name, make in PARAMETERS.items():
        assert [other for other, structure in found.items() if structure == structure_with(make())] == [name]
        assert hash(found[name]) == hash(structure_with(make()))


def test_functions_as_parameters_equal_themselves_alone():
    one, other = (lambda x: x for _ in range(2))
    assert structure_with(one) == structure_with(one)
    assert structure_with(one) != structure_with(other)
