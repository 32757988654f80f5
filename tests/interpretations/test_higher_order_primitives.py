"""A site in the body of any higher-order primitive of JAX counts as it does without, or is refused by name and line."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu
from jax.extend.core import Jaxpr, Primitive, jaxpr_as_fun
from jax.extend.core.primitives import call_p, closed_call_p
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.effects import Interpreter, default_dispatcher
from ppleffects.errors import UnhandledEffectError, UnsupportedPrimitiveError

START, DRAWN = 0.3, 0.7
X = jnp.asarray(START)


def site(x):
    return x + ppl.sample("z", dist.Normal(x, jnp.exp(x)))


SITE_LINE = site.__code__.co_firstlineno + 1


def by_hand(x, z):
    """The density of ``site(x)`` plus, as a factor, its value."""
    return -0.5 * ((z - x) / jnp.exp(x)) ** 2 - x - 0.5 * jnp.log(2 * jnp.pi) + x + z


# --- handled: primitive -> programs that call the body once, on X, and return its value -------------------------------


def with_reference(body):
    ref = jax.new_ref(X)
    ref[...] = body(ref[...])
    return ref[...]


def with_closure_converted(body):
    converted, consts = jax.closure_convert(body, X)
    return converted(X, *consts)


def checkified(body):
    from jax.experimental import checkify

    return checkify.checkify(jax.jit(body), errors=checkify.all_checks)(X)[1]


def sparsified(body):
    from jax.experimental.sparse import sparsify

    return sparsify(body)(X)


def tagged(body):
    from jax.experimental.xla_metadata import set_xla_metadata

    with set_xla_metadata(tag="x"):
        return body(X)


def sharded(body):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(lambda x: body(x), mesh=mesh, in_specs=P("data"), out_specs=P("data"))(X[None])[0]


def forward_rule(body):
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (body(x), None), lambda _, slope: (slope,))
    return jax.value_and_grad(fn)(X)[0]


def backward_rule(body):
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (x, x), lambda x, _: (body(x),))
    return jax.grad(fn)(X)


def tangent_rule(body):
    fn = jax.custom_jvp(lambda x: x)
    fn.defjvp(lambda primals, tangents: (primals[0], body(tangents[0])))
    return jax.jvp(fn, (X,), (X,))[1]


def batching_rule(body):
    fn = jax.custom_batching.custom_vmap(lambda x: x)
    fn.def_vmap(lambda size, batched, x: (body(x[0]), False))
    return jax.vmap(fn, out_axes=None)(X[None])


POLICY = jax.checkpoint_policies.nothing_saveable
HANDLED = {
    "jit": [
        lambda body: jax.jit(body)(X),
        lambda body: jnp.piecewise(X, [X > 0], [body, jnp.sin]),
        lambda body: jax.jit(jaxpr_as_fun(jax.make_jaxpr(body)(X)))(X)[0],
        checkified,
    ],
    "remat2": [
        lambda body: jax.checkpoint(body)(X),
        lambda body: jax.checkpoint(body, policy=POLICY)(X),
        lambda body: jax.checkpoint(body, prevent_cse=False)(X),
    ],
    "scan": [
        lambda body: lax.scan(lambda carry, x: (carry, body(x)), None, X[None])[1][0],
        lambda body: lax.scan(lambda carry, _: (body(carry), None), X, None, length=1, reverse=True)[0],
        lambda body: lax.map(body, X[None])[0],
        lambda body: lax.fori_loop(0, 1, lambda _, carry: body(carry), X),
    ],
    "cond": [
        lambda body: lax.cond(X > 0, body, lambda x: x, X),
        lambda body: lax.switch(jnp.asarray(1), [jnp.sin, body, jnp.cos], X),
        lambda body: lax.platform_dependent(X, cpu=body, default=jnp.sin),
    ],
    "shard_map": [sharded],
    "sample": [  # these leave no equation of their own
        lambda body: jax.named_call(body, name="called")(X),
        lambda body: jax.vmap(body)(X[None])[0],
        lambda body: jnp.vectorize(body)(X[None])[0],
        lambda body: jnp.apply_along_axis(lambda row: body(row[0]), 0, X[None]),
        lambda body: jaxpr_as_fun(jax.make_jaxpr(body)(X))(X)[0],
        with_reference,
        with_closure_converted,
        sparsified,
        tagged,
        forward_rule,
        backward_rule,
        tangent_rule,
        batching_rule,
    ],
}


def primitives_of(jaxpr):
    """The names of all primitives in a jaxpr and in the bodies within it."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    found = {eqn.primitive.name for eqn in inner.eqns}
    for eqn in inner.eqns:
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple) else (value,):
                if hasattr(body, "eqns") or isinstance(getattr(body, "jaxpr", None), Jaxpr):
                    found |= primitives_of(body)
    return found


@pytest.mark.parametrize(
    ("primitive", "number"), [(name, i) for name, programs in HANDLED.items() for i in range(len(programs))]
)
def test_a_site_in_its_body_counts_once(primitive, number):
    def model():
        ppl.factor("value", HANDLED[primitive][number](site))

    assert primitive in primitives_of(jax.make_jaxpr(model)())
    shape = ppl.sites(model)()["z"].shape

    def density(z):
        return ppl.log_density(model)({"z": jnp.full(shape, z)})

    leaks = primitive == "shard_map" and jax.config.jax_check_tracer_leaks  # the gradient, within JAX itself
    for fn in (lambda f: f,) if leaks else (lambda f: f, jax.grad):
        ours, plain = fn(density)(DRAWN), fn(lambda z: by_hand(START, z))(DRAWN)
        np.testing.assert_allclose(ours, plain, rtol=1e-10 if jax.config.jax_enable_x64 else 1e-5)


# --- refused: primitive -> programs whose body holds the site ---------------------------------------------------------


def with_own_gradient(body):
    return jax.custom_gradient(lambda x: (body(x), lambda slope: slope))(X)


def with_own_jvp(body):
    fn = jax.custom_jvp(body)
    fn.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    return fn(X)


def with_own_vjp(body):
    fn = jax.custom_vjp(body)
    fn.defvjp(lambda x: (x, None), lambda _, slope: (slope,))
    return fn(X)


def with_optimized_remat(body):
    fn = jax.custom_vjp(lambda x: x)
    fn.defvjp(lambda x: (body(x), None), lambda _, slope: (slope,), optimize_remat=True)
    return jax.grad(fn)(X)


def with_own_vmap(body):
    fn = jax.custom_batching.custom_vmap(lambda x: body(x))
    fn.def_vmap(lambda size, batched, x: (x, batched[0]))
    return fn(X)


def with_own_partitioning(body):
    from jax.experimental.custom_partitioning import custom_partitioning

    fn = custom_partitioning(body)
    fn.def_partition(partition=lambda *_: None, sharding_rule="->", infer_sharding_from_operands=lambda *_: None)
    return fn(X)


def kernel(inside=lambda run, *refs: run(*refs)):
    def program(body):
        def run(x_ref, o_ref):
            def write(x_ref, o_ref):
                o_ref[...] = body(x_ref[...])

            inside(write, x_ref, o_ref)

        out = jax.ShapeDtypeStruct((1,), X.dtype)
        return pl.pallas_call(run, out_shape=out, interpret=True)(X[None])[0]

    return program


def scoped(run, x_ref, o_ref):
    def inner(scratch):
        run(x_ref, scratch)
        o_ref[...] = scratch[...]

    pl.run_scoped(inner, tpu.VMEM((1,), X.dtype))


def state(body):
    def run(ref):
        ref[...] = body(ref[...])

    return pl.run_state(run)(X)


def on_device(body):
    from jax.experimental import compute_on

    options = {"compute_type": "device_host", "out_memory_spaces": jax.memory.Space.Device}
    return getattr(compute_on, "compute_on2", compute_on.compute_on)(body, **options)(X)


def fused(body):
    from jax.experimental.fused import fused

    return fused(out_spaces=(jax.memory.Space.Device,))(body)(X)


def in_group(body):
    from jax.experimental.scheduling_groups import scheduling_group

    return scheduling_group(name="group")(body)(X)


def ordered(body):
    overlap = pytest.importorskip("jax.experimental.overlap", reason="newer versions of jax have it")
    return overlap.program_order(body, enforce=False)(X)


def added(body):
    return lambda a, b: body(a) + b


def solved(matvec=lambda v: 2 * v, solve=lambda _, b: b / 2):
    return lax.custom_linear_solve(matvec, X, solve, symmetric=True)


def pipelined(run, x_ref, o_ref):
    block = pl.BlockSpec((1,), lambda i: (i,))
    tpu.emit_pipeline(run, grid=(1,), in_specs=[block], out_specs=[block])(x_ref, o_ref)


def called(primitive):
    def program(body):
        options = primitive.get_bind_params({"call_jaxpr": jax.make_jaxpr(body)(X)})
        return primitive.bind(X, **options)[0]

    return program


REFUSED = {
    "custom_jvp_call": [with_own_jvp],
    "custom_vjp_call": [with_own_vjp, with_own_gradient],
    "remat_opt": [with_optimized_remat],
    "custom_vmap_call": [with_own_vmap, lambda body: jax.vmap(jax.custom_batching.sequential_vmap(body))(X[None])],
    "custom_partitioning": [with_own_partitioning],
    "custom_linear_solve": [
        lambda body: solved(matvec=lambda v: 2 * v + 0 * body(v)),
        lambda body: solved(solve=lambda _, b: body(b)),
        lambda body: jax.scipy.sparse.linalg.cg(lambda v: (body(v), 2 * v)[1], X)[0],
    ],
    "linear_call": [lambda body: jax.custom_derivatives.linear_call(lambda _, x: body(x), lambda _, y: y, (), X)],
    "while": [
        lambda body: lax.while_loop(lambda x: x < 0, body, X),
        lambda body: lax.while_loop(lambda x: body(x) < 0, lambda x: x, X),
        lambda body: lax.fori_loop(0, jnp.asarray(1), lambda _, x: body(x), X),
    ],
    "reduce": [lambda body: lax.reduce(X[None], np.asarray(0, X.dtype), added(body), (0,))],
    "reduce_window": [lambda body: lax.reduce_window(X[None], np.asarray(0, X.dtype), added(body), (1,), (1,), "SAME")],
    "scatter": [lambda body: X[None].at[0].apply(body)],
    "run_state": [state],
    "pallas_call": [kernel(), kernel(scoped), kernel(pipelined)],
    "composite": [lambda body: lax.composite(body, "an.operation")(X)],
    "compute_on": [on_device],
    "fused_call": [fused],
    "xla_metadata_call": [in_group],
    "program_order": [ordered],
    call_p.name: [called(call_p)],
    closed_call_p.name: [called(closed_call_p)],
}
WRAPS = {
    "": lambda body: lambda: body(),
    "jit": lambda body: lambda: jax.jit(body)(),
    "scan": lambda body: lambda: lax.scan(lambda carry, _: (carry, body()), 0.0, length=1)[1],
    "vmap": lambda body: lambda: jax.vmap(lambda _: body())(jnp.ones(1)),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize(
    ("primitive", "number"), [(name, i) for name, programs in REFUSED.items() for i in range(len(programs))]
)
def test_a_site_in_its_body_is_refused(primitive, number, wrap):
    if primitive == "pallas_call" and number > 0 and jax.config.jax_check_tracer_leaks:
        pytest.skip("kernels with bodies of their own leak tracers within JAX itself")
    model = WRAPS[wrap](lambda: REFUSED[primitive][number](site))
    match = rf"site 'z' at test_higher_order_primitives.py:{SITE_LINE}: .*\b{re.escape(primitive)}\b"
    for run in (ppl.sites(model), lambda: ppl.simulate(model)(0), lambda: ppl.log_density(model)({"z": DRAWN})):
        with pytest.raises(UnsupportedPrimitiveError, match=match):
            run()


DERIVATIVES = {
    "grad": jax.grad,
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[0],
    "linearize": lambda f: lambda x: jax.linearize(f, x)[0],
    "hessian": jax.hessian,
    "jacrev": jax.jacrev,
    "a batched gradient": lambda f: lambda x: jax.vmap(jax.grad(f))(x[None])[0],
    "an optimizer": lambda f: lambda x: jax.scipy.optimize.minimize(lambda v: f(v[0]), x[None], method="BFGS").x,
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("derivative", DERIVATIVES)
def test_a_site_under_a_derivative_is_refused(derivative, wrap):
    model = WRAPS[wrap](lambda: DERIVATIVES[derivative](site)(X))
    match = rf"site 'z' at test_higher_order_primitives.py:{SITE_LINE}: an effect in 'sample' is differentiated"
    with pytest.raises(UnsupportedPrimitiveError, match=match):
        ppl.simulate(model)(0)


def hosted(call):
    def program(body):
        return call(lambda x: np.asarray(body(x)))

    return program


CALLBACKS = {
    "pure_callback": hosted(lambda fn: jax.pure_callback(fn, X, X)),
    "io_callback": hosted(lambda fn: io_callback(fn, X, X)),
    "debug_callback": hosted(lambda fn: (jax.debug.callback(fn, X), X)[1]),
}


@pytest.mark.parametrize("primitive", CALLBACKS)
def test_a_site_in_python_that_runs_on_the_host_is_outside_of_the_model(primitive):
    """JAX wraps what is raised there in an error of its own, which shows it."""
    match = rf"site 'z' at test_higher_order_primitives.py:{SITE_LINE}: 'sample' ran outside of an interpretation"
    with pytest.raises((jax.errors.JaxRuntimeError, UnhandledEffectError), match=match):
        jax.block_until_ready(ppl.simulate(lambda: CALLBACKS[primitive](site))(0).retval)


def test_what_is_never_run_is_no_part_of_the_model():
    def model():
        jax.eval_shape(site, X)
        jax.make_jaxpr(site)(X)
        return jax.custom_derivatives.linear_call(lambda _, x: 2 * x, lambda _, y: site(y), (), X)

    assert ppl.sites(model)() == {}
    np.testing.assert_allclose(ppl.simulate(model)(0).retval, 2 * X)


# --- the enumeration --------------------------------------------------------------------------------------------------

# Prints the primitives of jax of which a rule takes a parameter that can hold a body.
FIND = """
import importlib, inspect, pkgutil, sys, jax
from jax.extend.core import Primitive

def parameters(fn, depth=6):
    if not callable(fn) or depth == 0:
        return set()
    inner = [getattr(fn, "func", None)]
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:
            pass
    try:
        own = set(inspect.signature(fn, follow_wrapped=False).parameters)
    except (TypeError, ValueError):
        own = set()
    return own.union(*(parameters(f, depth - 1) for f in inner))

def holds_a_body(name):
    return "jaxpr" in name or "branches" in name or name in ("call", "callee", "callback")

SKIPPED = "test", "tools", "jax2tf", "examples", "collect_profile"
for module in pkgutil.walk_packages(jax.__path__, "jax."):
    if not any(word in module.name for word in SKIPPED):
        try:
            importlib.import_module(module.name)
        except Exception:
            pass
for name, module in list(sys.modules.items()):
    if name.split(".")[0] == "jax":
        for value in list(vars(module).values()):
            if isinstance(value, Primitive):
                rules = [rule for rule in vars(value).values() if callable(rule)]
                if any(map(holds_a_body, set().union(*map(parameters, rules)))):
                    print(value.name)
"""

# primitive: why no program above binds it
NOT_BOUND = {
    "cudnn_fusion": "no public function makes one",
    "custom_fusion": "JAX refuses any effect in its body",
    "fusible": "internal to the fuser of Pallas kernels; its public function only traces",
    "inspect_sharding": "its function gets a sharding, when the program is compiled",
    "jaxpr_call": "stands in a Pallas kernel, which is refused",
    "core_map": "stands in a Pallas kernel, which is refused",
    "emit_pipeline": "stands in a Pallas kernel, which is refused",
    "mpmd_map": "stands in a Pallas kernel, which is refused",
    "parallel_loop": "stands in a Pallas kernel, which is refused",
    "pipeline_body": "stands in a Pallas kernel, which is refused",
    "run_scoped": "stands in a Pallas kernel, which is refused",
    "eval_jaxpr": "inlined when traced, unless a primitive binds it",
}


def test_every_primitive_that_holds_a_body_is_tested():
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", FIND], capture_output=True, text=True, check=True)
    found = {
        name for name in run.stdout.split() if not name.startswith("thunky.")
    }  # those make programs of GPU buffers
    assert {"jit", "scan", "while", "cond", "remat2", "shard_map", "custom_linear_solve", "pallas_call"} <= found
    assert found - {*HANDLED, *REFUSED, *CALLBACKS, *NOT_BOUND} == set()


@pytest.mark.parametrize("nested", [lambda body: body, lambda body: (body, body)], ids=["one", "a tuple"])
def test_a_body_of_an_unknown_primitive_is_refused(nested):
    """The rule behind all this: an equation of a primitive without a handler, whatever its name and parameters."""
    traced = jax.make_jaxpr(jax.jit(site))(X)
    (eqn,) = traced.eqns
    unknown = eqn.replace(primitive=Primitive("unknown"), params={"anything": nested(eqn.params["jaxpr"])})
    inner = getattr(traced, "jaxpr", traced)
    match = rf"site 'z' at test_higher_order_primitives.py:{SITE_LINE}: 'unknown' holds an effect, and .* no rule"
    with pytest.raises(UnsupportedPrimitiveError, match=match):
        Interpreter(default_dispatcher()).run(inner.replace(eqns=[unknown]), (), (), X)
