"""The default handlers of jit, scan, while, cond and checkpoint, against plain Python."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from ppleffects.effects import (
    Crossing,
    HandlerResult,
    Interpreter,
    Part,
    default_dispatcher,
    effect_primitive,
    reinterpret,
)
from ppleffects.errors import ContextStructureError, UnhandledEffectError, UnsupportedPrimitiveError
from tests.effects.toys import note, notes_of, tally, tally_of, tally_p, tallying


def equations(fn, *args):
    """The jaxpr of the interpreted function, with all names in it."""
    return jax.make_jaxpr(reinterpret(fn, tallying()))(jnp.zeros(()), *args)


def find(jaxpr, name):
    """All equations of one primitive, in inner bodies too."""
    found = []
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == name:
            found.append(eqn)
        for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            if hasattr(value, "eqns"):
                found += find(value, name)
    return found


def test_straight_line():
    def fn(x):
        tally(x)
        tally(2.0)
        return x + 1.0

    out, total = tally_of(fn, 3.0, start=1.0)
    assert (float(out), float(total)) == (4.0, 6.0)


def test_no_effect_leaves_the_context():
    out, total = tally_of(lambda x: jnp.sin(x), 3.0, start=5.0)
    assert float(total) == 5.0
    np.testing.assert_allclose(out, np.sin(3.0))


def test_pytrees_go_in_and_out():
    out, total = tally_of(lambda d, k=2.0: (tally(d["a"]), {"b": (d["a"] * k, None)})[1], {"a": 3.0})
    assert float(out["b"][0]) == 6.0
    assert out["b"][1] is None
    assert float(total) == 3.0


def test_jit_keeps_its_name():
    @jax.jit
    def a_name_to_find(x):
        tally(x)
        return 2 * x

    assert float(tally_of(a_name_to_find, 3.0)[1]) == 3.0
    names = [eqn.params["name"] for eqn in find(equations(a_name_to_find, 3.0).jaxpr, "jit")]
    assert "a_name_to_find" in names


def test_a_cached_jit_counts_at_each_call():
    @jax.jit
    def once(x):
        tally(x)
        return x

    def fn(x):
        return once(x) + once(x) + once(2 * x)

    for _ in range(2):
        assert float(tally_of(fn, 1.0)[1]) == 4.0


def test_scan_threads_the_context():
    def fn(x):
        def step(c, y):
            tally(y)
            return c * y, c

        return lax.scan(step, x, jnp.array([1.0, 2.0, 3.0]))

    (last, before), total = tally_of(fn, 2.0)
    assert float(total) == 6.0
    assert float(last) == 12.0
    np.testing.assert_allclose(before, [2.0, 2.0, 4.0])


def test_scan_in_reverse():
    def fn(_):
        return lax.scan(lambda c, y: (c * 10 + y, note("y", y)), 0.0, jnp.arange(3.0), reverse=True)[0]

    out, notes = notes_of(fn, 0.0)
    assert float(out) == 210.0
    np.testing.assert_allclose(notes["y"], [0.0, 1.0, 2.0])


def test_scan_of_length_zero():
    def fn(x):
        return lax.scan(lambda c, y: (c, (tally(y), y)[1]), x, jnp.zeros((0,)))

    (out, ys), total = tally_of(fn, 2.0, start=3.0)
    assert (float(out), float(total), ys.shape) == (2.0, 3.0, (0,))
    _, notes = notes_of(lambda x: lax.scan(lambda c, y: (c, note("y", y)), x, jnp.zeros((0, 2))), 1.0)
    assert notes["y"].shape == (0, 2)


@pytest.mark.parametrize("option", [{"unroll": 2}, {"reverse": True}, {"unroll": 3, "reverse": True}])
def test_scan_keeps_its_options(option):
    def fn(x):
        return lax.scan(lambda c, y: (c, tally(y)), x, jnp.arange(6.0), **option)[0]

    (eqn,) = find(equations(fn, 1.0).jaxpr, "scan")
    assert {k: eqn.params[k] for k in option} == option
    assert float(tally_of(fn, 1.0)[1]) == 15.0


def test_scan_of_a_context_of_python_numbers():
    def fn(x):
        return lax.scan(lambda c, y: (c, tally(y)), x, jnp.arange(3.0))[0]

    assert float(reinterpret(fn, tallying())(0.0, 1.0)[1]) == 3.0


def test_nested_notes_are_stacked_outermost_first():
    def fn(x):
        def outer(c, a):
            lax.scan(lambda c, b: (c, note("ab", 10 * a + b)), 0.0, jnp.arange(3.0))
            return c, None

        return lax.scan(outer, x, jnp.arange(2.0))[0]

    _, notes = notes_of(fn, 0.0)
    np.testing.assert_allclose(notes["ab"], [[0, 1, 2], [10, 11, 12]])


def test_while_counts_what_runs():
    def fn(n):
        def body(c):
            tally(c)
            return c + 1.0

        return lax.while_loop(lambda c: c < n, body, 0.0)

    for n in (0.0, 4.0):
        out, total = tally_of(fn, n, start=1.0)
        assert (float(out), float(total)) == (n, 1.0 + n * (n - 1) / 2)


def test_fori_loop_with_a_dynamic_bound():
    def fn(n):
        return lax.fori_loop(0, n, lambda i, c: (tally(2.0), c + i)[1], 0)

    assert float(tally_of(jax.jit(fn), 5)[1]) == 10.0


def test_effect_in_a_while_predicate_is_refused():
    from ppleffects.errors import UnsupportedPrimitiveError

    def fn(x):
        return lax.while_loop(lambda c: (tally(1.0), c < 3.0)[1], lambda c: c + 1.0, x)

    with pytest.raises(UnsupportedPrimitiveError, match="predicate of 'while'"):
        tally_of(fn, 0.0)


@pytest.mark.parametrize("pred", [True, False])
def test_cond_of_two_branches(pred):
    def fn(p, x):
        return lax.cond(p, lambda x: (tally(1.0), x)[1], lambda x: (tally(10.0), tally(x), -x)[2], x)

    out, total = tally_of(fn, jnp.array(pred), 3.0)
    assert (float(out), float(total)) == ((3.0, 1.0) if pred else (-3.0, 13.0))


@pytest.mark.parametrize("index", [-1, 0, 1, 2, 5])
@pytest.mark.parametrize("reverse", [False, True])
def test_switch_of_three_branches(index, reverse):
    amounts = [1.0, 10.0, 100.0][:: -1 if reverse else 1]
    branches = [lambda x, a=a: (tally(a), x * a)[1] for a in amounts]
    out, total = tally_of(lambda i, x: lax.switch(i, branches, x), jnp.array(index), 2.0)
    taken = amounts[min(max(index, 0), 2)]
    assert (float(out), float(total)) == (2 * taken, taken)


def test_cond_where_one_branch_has_no_effect():
    def fn(p):
        return lax.cond(p, lambda: tally(1.0), lambda: None)

    assert [float(tally_of(fn, jnp.array(p))[1]) for p in (True, False)] == [1.0, 0.0]


def test_cond_in_scan_in_jit_in_checkpoint():
    @jax.checkpoint
    @jax.jit
    def fn(xs):
        def step(c, x):
            return c, lax.cond(x > 1, lambda: (tally(x), x)[1], lambda: 0.0)

        return lax.scan(step, 0.0, xs)[1]

    out, total = tally_of(fn, jnp.arange(4.0))
    assert float(total) == 5.0
    np.testing.assert_allclose(out, [0, 0, 2, 3])


def test_checkpoint_keeps_its_policy():
    policy = jax.checkpoint_policies.everything_saveable
    fn = jax.checkpoint(lambda x: (tally(jnp.sin(x)), jnp.sin(x))[1], policy=policy, prevent_cse=False)
    (eqn,) = find(equations(fn, 1.0).jaxpr, "remat2")
    assert eqn.params["policy"] is policy
    assert not np.any(eqn.params["prevent_cse"])


def test_a_gradient_through_all_of_it():
    def fn(x):
        def step(c, y):
            jax.checkpoint(lambda c: tally(jnp.sin(c)))(c)
            lax.cond(y > 1, lambda c: tally(c * c), lambda c: None, c)
            return c * 1.1, None

        return lax.scan(step, x, jnp.arange(3.0))[0]

    def plain(x):
        return sum(jnp.sin(x * 1.1**i) for i in range(3)) + (x * 1.1**2) ** 2

    def total(x):
        return tally_of(fn, x)[1]

    np.testing.assert_allclose(jax.grad(total)(0.7), jax.grad(plain)(0.7), rtol=1e-12)
    np.testing.assert_allclose(jax.jvp(jax.grad(total), (0.7,), (1.0,))[1], jax.hessian(plain)(0.7), rtol=1e-12)


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("wrap", ["plain", "jit", "checkpoint", "scan", "while", "cond"])
def test_vmap_sees_every_lane(wrap, mapped):
    wraps = {
        "plain": lambda f: f(),
        "jit": lambda f: jax.jit(f)(),
        "checkpoint": lambda f: jax.checkpoint(f)(),
        "scan": lambda f: lax.scan(lambda c, _: (c, f()), 0.0, length=2),
        "while": lambda f: lax.while_loop(lambda c: c < 2, lambda c: (f(), c + 1)[1], 0),
        "cond": lambda f: lax.cond(jnp.array(True), lambda: f(), lambda: None),
    }

    def fn(xs):
        return jax.vmap(lambda x: (wraps[wrap](lambda: tally(x if mapped else 1.0)), x)[1])(xs)

    _, total = tally_of(fn, jnp.ones(3))
    assert float(total) == (6.0 if wrap in ("scan", "while") else 3.0)


def test_an_unhandled_effect_raises_eagerly_and_under_jit():
    for fn in (lambda: tally(1.0), jax.jit(lambda: tally(1.0))):
        with pytest.raises(UnhandledEffectError, match="site 'tally'.*'tally' ran outside of an interpretation"):
            fn()


def test_a_context_may_not_change_its_structure_in_a_loop():
    grow = Interpreter(default_dispatcher().extended({tally_p: lambda i, c, e, v: HandlerResult({**c, "n": v[0]}, [])}))

    def fn(x):
        return lax.scan(lambda c, _: (c, tally(1.0)), x, length=2)[0]

    with pytest.raises(ContextStructureError, match="structure of the context inside 'scan'"):
        reinterpret(fn, grow)({}, 1.0)
    shape = Interpreter(
        default_dispatcher().extended({tally_p: lambda i, c, e, v: HandlerResult(jnp.append(c, v[0]), [])})
    )
    with pytest.raises(ContextStructureError, match="shape of a value that 'scan' threads"):
        reinterpret(fn, shape)(jnp.zeros(1), 1.0)


# --- lanes that take their own branch ---------------------------------------------------------------------------------


def _batch_hit(lane, operands, **params):
    amount, flag = (
        x if mapped else jnp.broadcast_to(x, (lane.size, *jnp.shape(x)))
        for x, mapped in zip(operands, lane.mapped, strict=True)
    )
    hit_p.bind(amount, flag, **params)
    return [], []


hit_p = effect_primitive(
    "hit",
    lambda amount, flag, **_: [],
    _batch_hit,
    activate=lambda flag, operands, **params: ([operands[0], operands[1] & flag], params),
)


def hit(amount):
    """Adds to the sum that the interpretation keeps, in the lanes that are here."""
    hit_p.bind(jnp.asarray(amount, float), jnp.asarray(True), name="hit")


def hits_of(fn, *args, context=0.0, add=lambda ctx, amount: ctx + amount):
    def handle(interpreter, ctx, eqn, invals):
        return HandlerResult(add(ctx, jnp.sum(jnp.where(invals[1], invals[0], 0.0))), [])

    interpreter = Interpreter(default_dispatcher().extended({hit_p: handle}), "hitting")
    return reinterpret(fn, interpreter)(context, *args)[1]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sum(Part):
    """A sum that starts from zero in each body; it says what becomes of it in lanes."""

    value: jax.Array

    def enter(self, frame):
        return Crossing()

    def inside(self, frame, crossing):
        return type(self)(jnp.zeros(()))

    def leave(self, frame):
        return (), self.value

    def select(self, frame, emitted):
        return sum(emitted)

    def rejoin(self, frame, carried, emitted):
        return type(self)(self.value + jnp.sum(emitted))


class Unsaid(Sum):
    """The same, but it does not say what becomes of it."""

    select = Part.select


jax.tree_util.register_dataclass(Unsaid, data_fields=["value"], meta_fields=[])


def signed(x):
    lax.cond(x > 0, lambda: hit(x), lambda: hit(10.0))
    return x


SIGNS = jnp.array([[1.0, -1.0], [-2.0, 4.0], [5.0, -3.0]])


def add_to(ctx, amount):
    return type(ctx)(ctx.value + amount)


def test_lanes_take_their_own_branch_in_nested_vmaps():
    total = hits_of(jax.vmap(jax.vmap(signed)), SIGNS, context=Sum(jnp.zeros(())), add=add_to)
    assert float(total.value) == 1 + 4 + 5 + 3 * 10


def test_a_predicate_that_comes_to_differ_between_lanes():
    """Nothing that decides is batched at first; it becomes so after two iterations, by way of another carry."""

    def loop(limit):
        def body(carry):
            count, stop, soon = carry
            hit(1.0)
            return count + 1.0, soon, limit

        return lax.while_loop(lambda carry: carry[0] < carry[1], body, (0.0, 2.0, 3.0))

    total = hits_of(jax.vmap(loop), jnp.array([0.0, 3.0, 6.0]), context=Sum(jnp.zeros(())), add=add_to)
    assert float(total.value) == sum([2, 3, 6])


@pytest.mark.parametrize(
    ("context", "add", "match"),
    [
        (0.0, lambda ctx, amount: ctx + amount, "changed the state of the context in a branch that only some lanes"),
        (Unsaid(jnp.zeros(())), add_to, "Unsaid does not say what becomes of it where each lane"),
    ],
    ids=["state", "a part that does not say"],
)
def test_a_context_that_cannot_be_told_apart_by_lanes(context, add, match):
    line = signed.__code__.co_firstlineno + 1
    with pytest.raises(
        ContextStructureError, match=rf"at test_handlers.py:{line}: (.|\n)*{match}(.|\n)*fix: .*lax.map"
    ):
        hits_of(jax.vmap(signed), SIGNS[0], context=context, add=add)


def test_an_effect_that_cannot_be_told_apart_by_lanes():
    def fn(x):
        lax.cond(x > 0, lambda: tally(x), lambda: None)
        return x

    match = r"site 'tally' at .*: 'tally' stands in a cond or while whose predicate differs(.|\n)*fix: .*activate="
    with pytest.raises(UnsupportedPrimitiveError, match=match):
        tally_of(jax.vmap(fn), SIGNS[0])


def test_what_a_part_carries_keeps_its_structure():
    class Growing(Sum):
        def enter(self, frame):
            return Crossing(carried=self.value)

        def leave(self, frame):
            return (self.value, self.value), ()

    jax.tree_util.register_dataclass(Growing, data_fields=["value"], meta_fields=[])

    def fn(x):
        return lax.scan(lambda c, _: (c, hit(1.0)), x, length=2)[0]

    with pytest.raises(ContextStructureError, match="structure of a value that 'scan' threads through"):
        hits_of(fn, 1.0, context=Growing(jnp.zeros(())), add=add_to)


def test_jit_keeps_its_shardings(mesh_data):
    rows, whole = NamedSharding(mesh_data, P("data")), NamedSharding(mesh_data, P())

    def fn(x):
        tally(jnp.sum(x))
        return 2 * x

    for shardings in ({"in_shardings": rows}, {"out_shardings": rows}, {"in_shardings": whole, "out_shardings": rows}):
        inner = jax.jit(fn, **shardings)
        (eqn,) = find(equations(inner, jnp.arange(8.0)).jaxpr, "jit")
        assert shardings.get("in_shardings") in (None, eqn.params["in_shardings"][-1])
        assert shardings.get("out_shardings") in (None, eqn.params["out_shardings"][0])
        out, total = tally_of(inner, jnp.arange(8.0))
        assert float(total) == 28.0
        assert "out_shardings" not in shardings or out.sharding.is_equivalent_to(rows, 1)
