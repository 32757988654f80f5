"""The default handler of shard_map: how a context enters the manual axes, is reduced there, and leaves."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ppleffects.effects import (
    HandlerResult,
    Interpreter,
    Uninitialized,
    default_dispatcher,
    default_shard_map_handler,
    reinterpret,
    shard_map_p,
)
from tests.conftest import SHARDED_GRADIENT, _mesh
from tests.effects.toys import Counter, note_p, per_shard, tally, tally_of, tally_p, tallying


def with_handler(handler, calls=None):
    base = tallying(calls)
    return Interpreter(base.dispatcher.extended({shard_map_p: handler}))


def placed(mesh, spec, x):
    return jax.device_put(x, NamedSharding(mesh, spec))


def test_ten_outside_and_four_inside_are_fourteen(axis_type):
    mesh = _mesh(axis_type, data=4)

    def fn():
        tally(10.0)
        jax.shard_map(lambda: tally(1.0), mesh=mesh, in_specs=(), out_specs=None)()

    _, total = tally_of(fn, interpreter=with_handler(per_shard("data")))
    assert float(total) == 14.0


def test_the_whole_context_summed_is_forty_four(mesh_data):
    def fn():
        tally(10.0)
        jax.shard_map(lambda: tally(1.0), mesh=mesh_data, in_specs=(), out_specs=None)()

    handler = functools.partial(default_shard_map_handler, reduce_ctx=lambda c: lax.psum(c, "data"))
    assert float(tally_of(fn, interpreter=with_handler(handler))[1]) == 44.0


def test_varying_amounts_with_collectives_and_axis_index(axis_type):
    mesh = _mesh(axis_type, data=4)
    x = placed(mesh, P("data"), jnp.arange(8.0))

    def fn(x):
        def body(x):
            index = lax.axis_index("data")
            mean = lax.pmean(jnp.sum(x), "data")
            gathered = lax.all_gather(x, "data", tiled=True)
            tally(jnp.sum(x) * index + mean + gathered[0])
            return x + mean

        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)

    out, total = tally_of(fn, x, start=1.0, interpreter=with_handler(per_shard("data")))
    sums = np.arange(8.0).reshape(4, 2).sum(1)
    np.testing.assert_allclose(total, 1.0 + sum(s * i + sums.mean() for i, s in enumerate(sums)))
    np.testing.assert_allclose(out, np.arange(8.0) + sums.mean())


def test_the_context_enters_and_leaves_by_the_declared_specs(axis_type):
    mesh = _mesh(axis_type, data=4)
    seen = []

    def in_specs(ctx):
        seen.append(jax.tree.map(type, ctx))
        return {"whole": P(), "pieces": P("data")}

    def out_specs(ctx):
        seen.append(sorted(ctx))
        return {"whole": P(), "pieces": P("data")}

    def handle(interpreter, ctx, eqn, invals):
        pieces = ctx["pieces"] + ctx["whole"] * invals[0]
        return HandlerResult({**ctx, "pieces": pieces}, [])

    handler = functools.partial(
        default_shard_map_handler, declare_ctx_in_specs=in_specs, declare_ctx_out_specs=out_specs
    )
    interpreter = Interpreter(default_dispatcher().extended({tally_p: handle, shard_map_p: handler}))

    def fn(x):
        def body(x):
            tally(x[0])
            return x

        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)

    ctx = {"whole": jnp.array(10.0), "pieces": placed(mesh, P("data"), jnp.arange(4.0))}
    _, after = reinterpret(fn, interpreter)(ctx, placed(mesh, P("data"), jnp.arange(4.0)))
    np.testing.assert_allclose(after["pieces"], np.arange(4.0) * 11)
    assert float(after["whole"]) == 10.0
    assert seen[0] == {"whole": Uninitialized, "pieces": Uninitialized}
    assert ["pieces", "whole"] in seen


def test_one_spec_is_a_prefix_for_the_whole_context(mesh_data):
    handler = functools.partial(
        default_shard_map_handler,
        declare_ctx_in_specs=lambda ctx: P("data"),
        declare_ctx_out_specs=lambda ctx: P("data"),
    )
    interpreter = Interpreter(
        default_dispatcher().extended(
            {tally_p: lambda i, c, e, v: HandlerResult({k: x + v[0] for k, x in c.items()}, []), shard_map_p: handler}
        )
    )

    def fn():
        return jax.shard_map(lambda: tally(1.0), mesh=mesh_data, in_specs=(), out_specs=None)()

    _, ctx = reinterpret(fn, interpreter)({"a": jnp.arange(4.0), "b": jnp.zeros((8, 2))})
    np.testing.assert_allclose(ctx["a"], np.arange(4.0) + 1)
    assert ctx["b"].shape == (8, 2)


def test_reduce_may_gather_and_change_the_structure(mesh_data):
    def gathering(interpreter, ctx, eqn, invals):
        seen = []
        inner = Interpreter(
            default_dispatcher().extended({note_p: lambda i, c, e, v: HandlerResult({**c, e.params["name"]: v[0]}, [])})
        )
        result = default_shard_map_handler(
            inner,
            ctx,
            eqn,
            invals,
            declare_ctx_out_specs=lambda c: seen.append(c) or P(),
            reduce_ctx=lambda c: {k: lax.psum(x, "data") for k, x in c.items()},
        )
        assert all(isinstance(x.shape, tuple) for c in seen for x in c.values())
        return result

    from tests.effects.toys import note

    def fn(x):
        return jax.shard_map(lambda x: note("x", x), mesh=mesh_data, in_specs=P("data"), out_specs=None)(x)

    _, ctx = reinterpret(fn, Interpreter(default_dispatcher().extended({shard_map_p: gathering, note_p: None})))(
        {}, jnp.arange(4.0)
    )
    np.testing.assert_allclose(ctx["x"], [6.0])


@pytest.mark.parametrize("depth", range(1, 9))
def test_the_body_is_walked_once(mesh_data, depth):
    counter = Counter()

    def body(x):
        def fn(x):
            return (tally(jnp.sum(x)), x)[1]

        for _ in range(depth - 1):
            fn = (lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=1)[0])(fn)
        return fn(x)

    def fn(x):
        return jax.shard_map(body, mesh=mesh_data, in_specs=P("data"), out_specs=P("data"))(x)

    interpreter = with_handler(per_shard("data"), counter)
    jax.make_jaxpr(reinterpret(fn, interpreter))(jnp.zeros(()), jnp.ones(4))
    assert counter.calls == 1


@pytest.mark.parametrize("where", ["argument", "set_mesh"])
def test_partly_manual_and_nested_meshes(axis_type, where):
    mesh = _mesh(axis_type, a=2, b=2)
    x = placed(mesh, P("a", "b"), jnp.arange(16.0).reshape(4, 4))

    def inner(x):
        tally(jnp.sum(x))
        return x

    def outer(x):
        tally(100.0 * jnp.sum(x[0]) if axis_type == AxisType.Auto else 100.0)
        return jax.shard_map(inner, in_specs=P(None, "b"), out_specs=P(None, "b"), axis_names={"b"})(x)

    def fn(x):
        own = {"mesh": mesh} if where == "argument" else {}
        return jax.shard_map(outer, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}, **own)(x)

    def handle(interpreter, ctx, eqn, invals):
        axes = tuple(eqn.params["newly_manual_axes"])
        return per_shard(axes)(interpreter, ctx, eqn, invals)

    with jax.set_mesh(mesh):
        out, total = tally_of(jax.jit(fn), x, interpreter=with_handler(handle))
    plain = np.arange(16.0).reshape(4, 4)
    hundred = 100 * (plain[0].sum() + plain[2].sum()) if axis_type == AxisType.Auto else 200.0
    np.testing.assert_allclose(total, plain.sum() + hundred)
    np.testing.assert_allclose(out, plain)


@SHARDED_GRADIENT
def test_gradient_through_the_context(axis_type):
    mesh = _mesh(axis_type, data=4)
    x = placed(mesh, P("data"), jnp.arange(4.0))

    def fn(w, x):
        def body(w, x):
            tally(jnp.sum(jnp.sin(w * x)))

        jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=None)(w, x)

    def total(w):
        return tally_of(fn, w, x, interpreter=with_handler(per_shard("data")))[1]

    def plain(w):
        return jnp.sum(jnp.sin(w * jnp.arange(4.0)))

    np.testing.assert_allclose(jax.jit(jax.grad(total))(0.7), jax.grad(plain)(0.7), rtol=1e-12)
    np.testing.assert_allclose(jax.jvp(total, (0.7,), (1.0,))[1], jax.grad(plain)(0.7), rtol=1e-12)


def test_a_context_that_still_varies_needs_a_spec(mesh_data):
    def fn(x):
        return jax.shard_map(lambda x: tally(jnp.sum(x)), mesh=mesh_data, in_specs=P("data"), out_specs=None)(x)

    with pytest.raises(ValueError, match="out_specs"):
        tally_of(fn, jnp.arange(4.0))
