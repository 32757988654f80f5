"""Effects of a user's own (examples/effects): each against plain Python loops, alone and several at once."""

import functools
import inspect
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from examples.effects import (
    CHECK,
    COUNT,
    LOG,
    Axis,
    CheckFailed,
    check,
    checks,
    counts,
    flops,
    flops_effect,
    interpreted,
    log,
    logs,
)
from ppleffects.errors import DuplicateSiteError, ShapeError, UnhandledEffectError, UnsupportedPrimitiveError
from tests.conftest import SHARDED_GRADIENT, _mesh

ROWS = P("data")
STEP, LANE, DATA = Axis("step", "step"), Axis("lane", "lane"), Axis("shard", "data")


def placed(mesh, x, spec=ROWS):
    return jax.device_put(jnp.asarray(x), NamedSharding(mesh, spec))


def over_rows(mesh, body, out_specs=ROWS, **options):
    return lambda x: jax.shard_map(body, mesh=mesh, in_specs=ROWS, out_specs=out_specs, **options)(x)


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


def line_of(text):
    """The line of this file that ends in ``text``."""
    source = inspect.getsource(inspect.getmodule(line_of)).splitlines()
    (number,) = [i for i, line in enumerate(source, 1) if line.endswith(text)]
    return f"test_user_effects.py:{number}"


# --- counts -----------------------------------------------------------------------------------------------------------


def nested(x):
    """Scan over cond and while, a jit that is called twice, a checkpoint and a function with its own derivative."""

    @jax.jit
    def twice(x):
        return jnp.sin(jnp.sin(x))

    def step(x, limit):
        x = lax.cond(x > 0.5, lambda x: jnp.tan(x), lambda x: jnp.cos(jnp.cos(x)), x)
        return lax.while_loop(lambda x: jnp.abs(x) > limit, lambda x: 0.5 * jnp.tanh(x), x), None

    x, _ = lax.scan(step, twice(x), jnp.array([0.3, 0.2, 0.1]))
    return jax.checkpoint(jnp.exp)(twice(x)) + jax.nn.relu(x)


def nested_by_hand(x):
    ran = dict.fromkeys(["sin", "tan", "cos", "tanh", "abs", "exp"], 0)

    def call(name, x):
        ran[name] += 1
        return getattr(math, name)(x) if name != "abs" else abs(x)

    x = call("sin", call("sin", x))
    for limit in [0.3, 0.2, 0.1]:
        x = call("tan", x) if x > 0.5 else call("cos", call("cos", x))
        while call("abs", x) > limit:
            x = 0.5 * call("tanh", x)
    call("exp", call("sin", call("sin", x)))
    return ran


@pytest.mark.parametrize("x", [-3.0, 0.4, 1.4, 2.0])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_counts_are_those_of_plain_loops(x, transform):
    out, found = transform(counts(nested))(x)
    expected = nested_by_hand(x)
    assert {name: int(found[name]) for name in expected} == expected
    assert int(found["max"]) == 1
    np.testing.assert_allclose(out, nested(x), rtol=1e-15)


def test_counting_does_not_change_the_gradient():
    def counted(x):
        return counts(nested)(x)[0]

    def without_while(x):
        return lax.scan(lambda x, _: (jnp.sin(x) * jax.nn.relu(x), None), x, length=3)[0]

    np.testing.assert_allclose(
        jax.grad(lambda x: counts(without_while)(x)[0])(1.3), jax.grad(without_while)(1.3), rtol=1e-14
    )
    np.testing.assert_allclose(*[jax.jvp(f, (1.3,), (1.0,))[1] for f in (counted, nested)], rtol=1e-14)


def test_a_gradient_is_counted_forward_and_backward():
    def f(x):
        return lax.scan(lambda x, _: (jnp.sin(x), None), x, length=5)[0]

    found = counts(jax.grad(f))(0.3)[1]
    assert (int(found["sin"]), int(found["cos"]), int(found["mul"])) == (5, 5, 5)


def test_lanes_run_one_larger_primitive_and_go_on_until_the_last_is_done():
    def lane(x):
        x = lax.while_loop(lambda x: x > 1.0, lambda x: x - jnp.sin(0.0 * x) - 1.0, x)
        return lax.cond(x > 0.5, jnp.cos, jnp.tan, x)

    x = np.array([0.2, 3.9, 7.4])
    found = counts(jax.vmap(lane))(x)[1]
    assert int(found["sin"]) == max(math.ceil(v - 1.0) for v in x)
    assert (int(found["cos"]), int(found["tan"])) == (1, 1)  # of a cond whose lanes differ JAX runs both branches


@pytest.mark.parametrize("check_vma", [True, False])
def test_counts_of_shards_are_summed(axis_type, check_vma):
    mesh = _mesh(axis_type, data=4)
    start = np.array([0.2, 1.5, 3.9, 7.4])

    def body(x):
        x = lax.while_loop(lambda x: jnp.max(x) > 1.0, lambda x: x - jnp.cos(0.0 * x), x)
        return jnp.sin(x)

    def program(x):
        x = over_rows(mesh, body, check_vma=check_vma)(x)
        return jnp.sin(x)

    found = jax.jit(counts(program))(placed(mesh, start))[1]
    assert int(found["cos"]) == sum(max(math.ceil(x - 1.0), 0) for x in start)
    assert int(found["sin"]) == 4 + 1


# --- log --------------------------------------------------------------------------------------------------------------


def logged(x):
    def outer(carry, row):
        def inner(carry, x):
            carry = carry + x
            log("carry", carry)
            lax.cond(carry > 4.0, lambda: log("above", jnp.stack([carry, x])), lambda: log("count", 1))
            return carry, None

        carry, _ = jax.checkpoint(lambda c: lax.scan(inner, c, row))(carry)
        log("row", row)
        return carry, None

    return jax.jit(lambda x: lax.scan(outer, 0.0, x)[0])(x)


def logged_by_hand(x):
    rows, columns = x.shape
    found = {
        "carry": np.zeros((rows, columns)),
        "above": np.full((rows, columns, 2), np.nan),
        "count": np.zeros((rows, columns)),
        "row": x,
    }
    carry = 0.0
    for i, j in itertools.product(range(rows), range(columns)):
        carry += x[i, j]
        found["carry"][i, j] = carry
        if carry > 4.0:
            found["above"][i, j] = carry, x[i, j]
        else:
            found["count"][i, j] = 1
    return found


X = np.array([[1.0, 2.5, 1.0], [-3.0, 2.0, 4.0]])


def test_values_are_stacked_along_scans_and_active_where_reached():
    out, found = logs(logged)(X)
    expected = logged_by_hand(X)
    assert set(found) == set(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(found[name].value, value, rtol=1e-15)
    reached = expected["carry"] > 4.0
    np.testing.assert_array_equal(found["above"].active, reached)
    np.testing.assert_array_equal(found["count"].active, ~reached)
    assert found["carry"].active.all()
    assert (found["carry"].axes, found["row"].axes) == ((STEP, STEP), (STEP,))
    assert found["carry"].source == line_of('log("carry", carry)')
    np.testing.assert_allclose(out, X.sum())


def test_lanes_follow_the_steps_and_take_their_own_branch():
    lanes = np.stack([X, 2.0 * X, -X])
    _, found = logs(jax.vmap(logged, axis_name="chain"))(lanes)
    for i, x in enumerate(lanes):
        for name, value in logged_by_hand(x).items():
            place = (slice(None), i) if name == "row" else (slice(None), slice(None), i)
            np.testing.assert_allclose(found[name].value[place], value, rtol=1e-15)
    np.testing.assert_array_equal(found["above"].active, found["carry"].value > 4.0)
    assert found["above"].axes == (STEP, STEP, Axis("lane", "chain"))


def test_a_vmap_of_the_interpreted_function_puts_lanes_first():
    lanes = np.stack([X, 2.0 * X])
    _, found = jax.vmap(logs(logged))(lanes)
    np.testing.assert_allclose(found["above"].value, [logged_by_hand(x)["above"] for x in lanes], rtol=1e-15)


def test_lanes_that_no_operand_has():
    _, found = logs(jax.vmap(lambda x: (log("same", 2.0), x)[1]))(jnp.arange(3.0))
    np.testing.assert_array_equal(found["same"].value, [2.0, 2.0, 2.0])


@pytest.mark.parametrize("check_vma", [True, False])
def test_each_shard_that_differs_has_its_entry(axis_type, check_vma):
    mesh = _mesh(axis_type, data=4)
    x = np.arange(8.0)

    def body(x):
        def step(total, x):
            total = total + x
            log("total", total)
            lax.cond(x % 3 == 0, lambda: log("third", x), lambda: None)
            return total, None

        log("same", 7.0)
        log("rows", x)
        jax.vmap(lambda x: log("lane", 2.0 * x))(x)
        return lax.scan(step, 0.0 * x[0], x)[0][None]

    def program(x):
        lax.cond(x[7] > 0, lambda: log("outside", x), lambda: None)
        shifted = over_rows(mesh, body, check_vma=check_vma)
        return lax.scan(lambda c, shift: (c, shifted(x + shift)), 0.0, jnp.arange(3.0))

    found = on_host(jax.jit(logs(program))(placed(mesh, x))[1])
    assert found["total"].axes == (STEP, DATA, STEP)
    assert found["lane"].axes == (STEP, DATA, LANE)
    assert found["rows"].axes == (STEP, DATA)
    assert found["same"].axes == ((STEP,) if check_vma else (STEP, DATA))
    assert found["outside"].axes == ()
    np.testing.assert_array_equal(found["outside"].value, x)
    np.testing.assert_array_equal(np.unique(found["same"].value), [7.0])
    for shift, shard in itertools.product(range(3), range(4)):
        piece = x.reshape(4, 2)[shard] + shift
        np.testing.assert_array_equal(found["rows"].value[shift, shard], piece)
        np.testing.assert_array_equal(found["lane"].value[shift, shard], 2.0 * piece)
        np.testing.assert_array_equal(found["total"].value[shift, shard], np.cumsum(piece))
        np.testing.assert_array_equal(found["third"].active[shift, shard], piece % 3 == 0)
        np.testing.assert_array_equal(found["third"].value[shift, shard], np.where(piece % 3 == 0, piece, np.nan))


def test_two_mesh_axes_and_nested_shard_maps():
    mesh = _mesh(AxisType.Auto, chains=2, data=2)
    x = np.arange(8.0).reshape(2, 4)

    def inner(x):
        log("both", x.sum())
        return x

    def outer(x):
        log("chains", x.sum())
        return jax.shard_map(
            inner, mesh=None, in_specs=P(None, "data"), out_specs=P(None, "data"), axis_names={"data"}
        )(x)

    def program(x):
        spec = P("chains", None)
        x = jax.shard_map(outer, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"chains"})(x)
        return jax.shard_map(
            lambda x: (log("at once", x.sum()), x)[1],
            mesh=mesh,
            in_specs=P("chains", "data"),
            out_specs=P("chains", "data"),
        )(x)

    _, found = jax.jit(logs(program))(x)
    pieces = x.reshape(2, 2, 2).sum(2)
    both = (Axis("shard", "chains"), Axis("shard", "data"))
    assert (found["both"].axes, found["at once"].axes, found["chains"].axes) == (both, both, both[:1])
    np.testing.assert_array_equal(found["both"].value, pieces)
    np.testing.assert_array_equal(found["at once"].value, pieces)
    np.testing.assert_array_equal(found["chains"].value, pieces.sum(1))


def test_logged_values_have_derivatives():
    def last(x):
        return logs(logged)(x)[1]["carry"].value[-1, -1]

    np.testing.assert_allclose(jax.grad(last)(X), np.ones_like(X))


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(f).lower], ids=["eager", "jit", "lower"])
def test_without_an_interpretation_it_fails_with_its_line(transform):
    def program(x):
        log("lost", 2.0 * x)  # its result is not used by anything
        return x

    line = line_of("# its result is not used by anything")
    with pytest.raises(UnhandledEffectError, match=f"site 'lost' at {line}: 'log' ran outside"):
        transform(program)(1.0)


def logged_again(x):
    log("a", x)
    return x + 1.0


@pytest.mark.parametrize(
    ("program", "error", "match"),
    [
        (
            lambda x: lax.while_loop(lambda x: x < 9, lambda x: (log("a", x), x + 1)[1], x),
            UnsupportedPrimitiveError,
            "'a'",
        ),
        (lambda x: (log("a", x), log("a", x)), DuplicateSiteError, "this name stands twice"),
        (
            lambda x: (log("a", x), lax.scan(lambda c, _: (log("a", c), c)[::-1], x, length=2)),
            DuplicateSiteError,
            "'a'",
        ),
        (lambda x: lax.cond(x > 0, lambda: log("a", x), lambda: log("a", 1)), ShapeError, "different shapes or dtypes"),
    ],
    ids=["while", "twice", "twice in scan", "branches"],
)
def test_what_cannot_be_logged_says_so(program, error, match):
    with pytest.raises(error, match=match):
        logs(program)(1.0)


# --- check ------------------------------------------------------------------------------------------------------------


def checked(x):
    """The check fails where the running sum leaves [-4, 4]."""

    def step(total, x):
        total = total + x
        check("in range", jnp.abs(jnp.stack([total, 0.0])) <= 4.0)
        return total, jnp.sin(total)

    return lax.scan(step, 0.0 * x[0], x)[1]


def test_failures_say_step_lane_and_shard(axis_type):
    mesh = _mesh(axis_type, data=4)
    x = np.random.default_rng(0).normal(scale=2.0, size=(8, 6))  # rows over shards, two lanes on each
    program = over_rows(mesh, jax.jit(jax.vmap(jax.checkpoint(checked))))
    out, failures = jax.jit(checks(program))(placed(mesh, x, P("data", None)))
    expected = np.abs(np.cumsum(x, axis=1)) > 4.0
    entry = on_host(failures.entries["in range"])
    assert entry.axes == (DATA, STEP, LANE)
    np.testing.assert_array_equal(entry.value, expected.reshape(4, 2, 6).swapaxes(1, 2))
    np.testing.assert_allclose(out, np.sin(np.cumsum(x, axis=1)), rtol=1e-12)
    shard, step, lane = np.argwhere(entry.value)[0]
    place = f"failed in data {shard}, step {step}, lane {lane} \\({expected.sum()} of 48 failed\\)"
    line = line_of('check("in range", jnp.abs(jnp.stack([total, 0.0])) <= 4.0)')
    with pytest.raises(CheckFailed, match=f"^check 'in range' at {line} {place}$"):
        failures.throw()


def test_what_holds_does_not_raise():
    _, failures = checks(checked)(np.full(5, 0.1))
    failures.throw()
    assert not failures.entries["in range"].value.any()


def test_every_check_that_fails_is_told_and_only_on_the_branch_taken():
    def program(x):
        check("first", x < 0)
        check("second", x > 0)
        check("third", jnp.isnan(x))
        lax.cond(x > 0, lambda: check("taken", False), lambda: check("not taken", False))

    with pytest.raises(CheckFailed) as raised:
        checks(program)(1.0)[1].throw()
    assert [line.split("'")[1] for line in str(raised.value).splitlines()] == ["first", "taken", "third"]


def test_checks_in_a_while_loop_keep_whether_one_failed():
    def lane(x):
        def body(x):
            check("small", x < 3.0)
            lax.cond(x > 6.0, lambda: check("never above", False), lambda: None)
            return x + 1.0

        return lax.while_loop(lambda x: x < 5.0, body, x)

    start = np.array([-2.0, 1.5, 4.5, 7.0])
    failed = [any(x + i >= 3.0 for i in range(20) if x + i < 5.0) for x in start]
    ran = [x < 5.0 for x in start]
    for x, fails, runs in zip(start, failed, ran, strict=True):
        entry = checks(lane)(x)[1].entries["small"]
        assert (bool(entry.value), bool(entry.active)) == (fails, runs)
    entries = checks(jax.vmap(lane))(start)[1].entries
    np.testing.assert_array_equal(entries["small"].value, failed)
    np.testing.assert_array_equal(entries["small"].active, ran)
    assert not entries["never above"].value.any()


def test_lanes_are_checked_on_their_own_branch():
    def lane(x):
        lax.cond(x > 0, lambda: check("sign", x > 2.0), lambda: check("sign", x < -2.0))
        lax.cond(x > 0, lambda: None, lambda: lax.cond(x > -2.0, lambda: check("inner", x > 9.0), lambda: None))

    x = np.array([-3.0, -1.0, 1.0, 3.0])
    entries = checks(jax.vmap(lane))(x)[1].entries
    np.testing.assert_array_equal(entries["sign"].value, np.abs(x) <= 2.0)
    np.testing.assert_array_equal(entries["inner"].value, (x <= 0) & (x > -2.0))
    outside = jax.vmap(checks(lane))(x)[1]
    np.testing.assert_array_equal(outside.entries["sign"].value, np.abs(x) <= 2.0)
    with pytest.raises(CheckFailed, match=r"check 'inner' at .* failed in lane 1 \(1 of 1 failed\)"):
        outside.throw()


def test_lanes_within_shards_are_checked_on_their_own_branch(axis_type):
    mesh = _mesh(axis_type, data=4)
    x = np.array([-3.0, -1.0, 1.0, 3.0, 5.0, -5.0, 0.5, -0.5])

    def lane(x):
        lax.cond(x > 0, lambda: lax.cond(x > 2.0, lambda: check("deep", x < 4.0), lambda: None), lambda: None)
        return x

    entry = jax.jit(checks(over_rows(mesh, jax.vmap(lane))))(placed(mesh, x))[1].entries["deep"]
    assert entry.axes == (DATA, LANE)
    np.testing.assert_array_equal(entry.value, (x >= 4.0).reshape(4, 2))
    np.testing.assert_array_equal(entry.active, (x > 2.0).reshape(4, 2))


def test_checks_in_loops_that_differ_from_shard_to_shard(axis_type):
    mesh = _mesh(axis_type, data=4)
    start = np.array([5.0, 2.5, 0.5, 1.0])

    def body(x):
        def iteration(x):
            check("below", x[0] < 2.5)
            lax.cond(x[0] < 1.0, lambda: check("never below 1", False), lambda: None)
            return x + 1.0

        return lax.while_loop(lambda x: x[0] < 3.0, iteration, x)

    entries = jax.jit(checks(over_rows(mesh, body)))(placed(mesh, start))[1].entries
    np.testing.assert_array_equal(entries["below"].active, start < 3.0)
    failed = [any(2.5 <= x + i < 3.0 for i in range(9)) for x in start]
    np.testing.assert_array_equal(entries["below"].value, failed)
    np.testing.assert_array_equal(entries["never below 1"].value, start < 1.0)


def test_the_gradient_of_a_checked_function_is_unchanged(axis_type):
    mesh = _mesh(axis_type, data=4)
    x = np.random.default_rng(1).normal(size=(4, 6))

    def loss(program, x):
        return jnp.sum(program(x) ** 2)

    def plain(x):
        return jnp.sin(jnp.cumsum(x[0]))[None]

    def body(x):
        return checked(x[0])[None]

    safe = over_rows(mesh, body)
    x = placed(mesh, x, P("data", None))
    value, slope = jax.jit(jax.value_and_grad(functools.partial(loss, lambda x: checks(safe)(x)[0])))(x)
    expected, expected_slope = jax.jit(jax.value_and_grad(functools.partial(loss, over_rows(mesh, plain))))(x)
    np.testing.assert_allclose(value, expected, rtol=1e-13)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-11)


def test_a_check_inside_of_a_gradient_within_the_program():
    """Differentiated before it is interpreted an effect is refused; interpreted first, its failures are a result."""

    def loss(x):
        check("positive", x > 0.0)
        return x**2

    def refused(x):
        return jax.grad(loss)(x)

    def descend(x, _):
        slope, failures = jax.grad(lambda x: checks(loss)(x), has_aux=True)(x)
        return x - slope, failures

    with pytest.raises(UnsupportedPrimitiveError, match="differentiated inside"):
        checks(refused)(1.0)
    _, failures = lax.scan(descend, 1.0, length=3)
    np.testing.assert_array_equal(failures.entries["positive"].value, [False, True, False])


# --- flops ------------------------------------------------------------------------------------------------------------


def network(weights, x):
    with jax.named_scope("encoder"):
        for w in weights:
            x = jnp.tanh(x @ w)
    with jax.named_scope("head"):
        return jnp.sum((x @ weights[0]) ** 2)


def cost(fn, *args):
    found = jax.jit(fn).lower(*args).compile().cost_analysis()
    return found["flops"] + found.get("transcendentals", 0.0)


@pytest.mark.parametrize("fn", [network, jax.grad(network)], ids=["value", "gradient"])
def test_flops_agree_with_those_of_the_compiled_program(fn):
    keys = jax.random.split(jax.random.key(0), 3)
    weights, x = [jax.random.normal(k, (32, 32)) for k in keys], jnp.ones((64, 32))
    _, found = flops(fn)(weights, x)
    np.testing.assert_allclose(sum(found.values()), cost(fn, weights, x), rtol=0.03)


def test_flops_by_scope():
    weights, x = [jnp.ones((5, 5))] * 3, jnp.ones((7, 5))
    _, found = flops(network)(weights, x)
    assert found == {"encoder": 3 * (2 * 7 * 5 * 5 + 7 * 5), "head": 2 * 7 * 5 * 5 + 7 * 5 + (7 * 5 - 1)}
    _, found = jax.jit(flops(jax.value_and_grad(network)))(weights, x)
    backward = sum(float(v) for scope, v in found.items() if scope.startswith("transpose(encoder)"))
    assert backward >= (2 * 3 - 1) * 2 * 7 * 5 * 5  # two products for each layer, but for the first layer's input


def test_a_loop_counts_each_step_and_scopes_nest():
    w, x = jnp.ones((6, 6)), jnp.ones((3, 6))

    def layer(x):
        with jax.named_scope("layer"):
            return jax.jit(lambda x: x @ w)(x)

    def program(x):
        with jax.named_scope("outer"):
            x, _ = lax.scan(lambda x, _: (jax.checkpoint(layer)(x), None), x, length=5)
            x = lax.while_loop(lambda c: c[1] < 4, lambda c: (layer(c[0]), c[1] + 1), (x, 0))[0]
            x = lax.cond(x[0, 0] > 0, layer, lambda x: x + 1.0, x)
        return jax.vmap(layer)(jnp.stack([x, x]))

    def unrolled(x):
        for _ in range(10):
            x = layer(x)
        return jax.vmap(layer)(jnp.stack([x, x]))

    one = 2 * 3 * 6 * 6
    found = {scope: float(amount) for scope, amount in flops(program)(x)[1].items()}
    assert found == {"outer/layer": 10 * one, "outer": 0.0, "layer": 2 * one}  # the branch not taken adds nothing
    assert cost(unrolled, x) == 12 * one


@pytest.mark.parametrize("check_vma", [True, False])
def test_flops_of_shards_are_those_of_the_busiest_device(axis_type, check_vma):
    mesh = _mesh(axis_type, data=4)
    w = jnp.ones((6, 6))
    steps = np.array([1, 5, 2, 3])

    def body(steps, x):
        with jax.named_scope("rows"):
            x = x @ w
        with jax.named_scope("loop"):
            return lax.while_loop(lambda c: c[1] < steps[0], lambda c: (c[0] @ w, c[1] + 1), (x, 0 * steps[0]))[0]

    def program(steps, x):
        specs = (P("data"), P("data", None))
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs[1], check_vma=check_vma)(steps, x)

    args = placed(mesh, steps), placed(mesh, np.ones((8, 6)), P("data", None))
    _, found = jax.jit(flops(program))(*args)
    one = 2 * 2 * 6 * 6
    amounts = {scope: float(amount) for scope, amount in found.items() if float(amount)}
    assert amounts == {"rows": one, "loop": steps.max() * one} or amounts == {
        "rows": one,
        "loop/while": steps.max() * one,
    }


def test_a_primitive_without_a_rule_is_no_zero():
    x = jnp.eye(3)
    with pytest.raises(UnsupportedPrimitiveError, match="no rule says how many flops 'cholesky' takes"):
        flops(lambda x: lax.linalg.cholesky(x, symmetrize_input=False))(x)
    rules = {jax.extend.core.primitives.cholesky_p: lambda eqn: 9}
    _, found = flops(lambda x: lax.linalg.cholesky(x, symmetrize_input=False), rules)(x)
    assert found[""] == 9 + 0


def test_flops_of_a_model_by_the_scope_of_its_sites(axis_type):
    mesh = _mesh(axis_type, data=4)
    rows, columns = 8, 3

    def model(x, y):
        with jax.named_scope("prior"):
            w = ppl.sample("w", dist.Normal(0.0, 1.0).expand([columns]).to_event(1))

        def likelihood(w, x, y):
            with jax.named_scope("likelihood"):
                ppl.observe("y", dist.Normal(x @ w, 1.0), y)

        specs = (P(), P("data", None), P("data"))
        jax.shard_map(likelihood, mesh=mesh, in_specs=specs, out_specs=None)(w, x, y)

    x, y = np.ones((rows, columns)), np.ones(rows)
    density = jax.jit(flops(lambda w, x, y: ppl.log_density(model)({"w": w}, x, y)))
    _, found = density(jnp.ones(columns), placed(mesh, x, P("data", None)), placed(mesh, y))
    by_site = {site: sum(float(v) for k, v in found.items() if k.startswith(site)) for site in ("prior", "likelihood")}
    product = 2 * rows / 4 * columns
    per_entry = 8  # z = (y - mean) / scale, z**2, / -2, - log(sqrt(2 pi) * scale), summed: at most these
    assert product < by_site["likelihood"] <= product + per_entry * rows / 4
    assert 0 < by_site["prior"] <= per_entry * columns


# --- several effects in one program -----------------------------------------------------------------------------------


def regression(mesh, effects=True):
    """Sites and effects under shard_map, scan, checkpoint, cond, vmap and jit."""
    write, claim = (log, check) if effects else (lambda *_: None, lambda *_: None)

    def step(slope, total, row):
        x, y, z = row
        mean = slope * x + z
        write("mean", mean)
        claim("small", jnp.abs(mean) < 4.0)

        def above():
            write("above", mean)
            ppl.factor("penalty", -mean)

        lax.cond(mean > 0.0, above, lambda: None)
        ppl.observe("y", dist.Normal(mean, 1.0), y)
        return total + mean, None

    def lane(x, z):
        def taken():
            write("lane", x)
            ppl.observe("late", dist.Normal(x, 1.0), z)

        lax.cond(x > z, taken, lambda: None)

    def rows(slope, x, y):
        z = ppl.sample("z", dist.Normal(jnp.sin(x), 1.0))
        body = jax.checkpoint(functools.partial(step, slope))
        total, _ = lax.scan(body, 0.0 * x[0], (x, y, z))
        jax.jit(jax.vmap(lane))(x, z)
        return lax.psum(total, "data")

    def model(x, y):
        slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
        write("square", slope**2)
        claim("finite", jnp.isfinite(slope))
        specs = (P(), P("data"), P("data"))
        return jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=P())(slope, x, y)

    return model


def by_hand(slope, z, x, y):
    """The joint log-density of ``regression``, and what it logs and checks, by Python loops."""
    density, means = dist.Normal(0.0, 1.0).log_prob(slope), []
    for xi, yi, zi in zip(x, y, z, strict=True):
        mean = slope * xi + zi
        means.append(mean)
        density += dist.Normal(math.sin(xi), 1.0).log_prob(zi) + dist.Normal(mean, 1.0).log_prob(yi)
        density -= max(mean, 0.0)
        density += dist.Normal(xi, 1.0).log_prob(zi) if xi > zi else 0.0
    return float(density), np.array(means)


@pytest.fixture
def program(axis_type):
    mesh = _mesh(axis_type, data=4)
    x, slope, z = np.arange(8.0) / 2, 0.7, np.linspace(1.5, 3.0, 8)
    values = {"slope": jnp.asarray(slope), "z": placed(mesh, z)}
    return mesh, values, (placed(mesh, x), placed(mesh, x**2 / 4)), by_hand(slope, z, x, x**2 / 4)


EFFECTS = {"log": LOG, "check": CHECK, "count": COUNT, "flops": flops_effect()}


def equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(np.testing.assert_array_equal, a, b)


def test_all_effects_of_a_model_in_one_interpretation(program):
    mesh, values, data, (density, means) = program
    handled = interpreted(regression(mesh), **EFFECTS)
    np.testing.assert_allclose(ppl.log_density(handled)(values, *data), density, rtol=1e-12)
    total, found = ppl.evaluate(handled)(values, *data).retval
    np.testing.assert_allclose(total, means.sum(), rtol=1e-12)
    entries, x = found["log"].entries, np.asarray(data[0])
    np.testing.assert_allclose(entries["mean"].value, means.reshape(4, 2), rtol=1e-12)
    np.testing.assert_allclose(entries["square"].value, 0.49, rtol=1e-12)
    np.testing.assert_array_equal(entries["above"].active, means.reshape(4, 2) > 0)
    np.testing.assert_array_equal(entries["lane"].active, (x > np.asarray(values["z"])).reshape(4, 2))
    np.testing.assert_array_equal(found["check"].entries["small"].value, np.abs(means).reshape(4, 2) >= 4.0)
    expected = {"sample": 1 + 4, "factor": int((means > 0).sum()), "sin": 4, "check": 1 + 8}
    assert {name: int(found["count"].terms[name]) for name in expected} == expected
    with pytest.raises(CheckFailed, match="check 'small' at test_user_effects.py"):
        found["check"].throw()


@SHARDED_GRADIENT
def test_gradients_sites_and_draws_are_those_of_the_model_without_effects(program):
    mesh, values, data, _ = program
    plain, handled = regression(mesh, effects=False), interpreted(regression(mesh), **EFFECTS)
    slopes = [jax.jit(jax.grad(ppl.log_density(m)))(values, *data) for m in (plain, handled)]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-12), *slopes)
    assert list(ppl.sites(plain)(*data)) == list(ppl.sites(handled)(*data))
    equal(*[ppl.simulate(m)(0, *data).values for m in (plain, handled)])


def test_together_or_apart_is_the_same(program):
    mesh, values, data, _ = program
    model = regression(mesh)
    _, together = ppl.evaluate(interpreted(model, **EFFECTS))(values, *data).retval

    def outermost(order):
        """The effects in ``order`` from the innermost, each interpreted alone, on what the others have left."""
        fn = model
        for name in order:
            fn = interpreted(fn, **{name: EFFECTS[name]})
        found, result = {}, ppl.evaluate(fn)(values, *data).retval
        for _ in order:
            result, ctx = result
            found.update(ctx)
        return found

    observers_first = outermost(["count", "log", "check"])
    equal({name: together[name] for name in observers_first}, observers_first)
    others = outermost(["flops", "check", "log"])
    equal({name: together[name] for name in others}, others)
    late = outermost(["log", "check"])
    equal({name: together[name] for name in late}, late)


def test_a_model_with_an_effect_that_no_one_handles_is_refused(program):
    mesh, values, data, _ = program
    with pytest.raises(UnsupportedPrimitiveError, match="'square'"):
        ppl.log_density(regression(mesh))(values, *data)
    with pytest.raises(UnsupportedPrimitiveError, match="'finite'"):
        ppl.log_density(interpreted(regression(mesh), log=LOG))(values, *data)
