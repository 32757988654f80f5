"""The one file that knows JAX's internals: every name, parameter and rule that moves between releases.

Everything above it speaks in terms of the helpers below. Supported: jax 0.11 and 0.12.
"""

from __future__ import annotations

import dataclasses
import os
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import jax
from jax import Array
from jax._src import config, core, distributed, effects, source_info_util, xla_bridge
from jax._src import linear_util as lu
from jax._src.custom_batching import custom_vmap_p
from jax._src.interpreters import ad, batching, mlir
from jax._src.interpreters import partial_eval as pe
from jax._src.lax.control_flow.conditionals import cond_p
from jax._src.lax.control_flow.loops import scan_p, while_p
from jax._src.named_sharding import UNSPECIFIED
from jax._src.pjit import jit_p
from jax._src.shard_map import shard_map_p
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive, Var
from jax.extend.core.primitives import custom_jvp_call_p, custom_vjp_call_p, remat_p
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

__all__ = ["Jaxpr", "JaxprEqn", "Literal", "Primitive", "Var"]

pvary_p = core.pvary_p
CONTROL_FLOW = {
    "jit": jit_p,
    "scan": scan_p,
    "while": while_p,
    "cond": cond_p,
    "checkpoint": remat_p,
    "custom_jvp": custom_jvp_call_p,
    "custom_vjp": custom_vjp_call_p,
    "shard_map": shard_map_p,
}

# The user's own frame is the first one outside of this package.
source_info_util.register_exclusion(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


# --- effect primitives ----------------------------------------------------------------------------------------------


class InterpretedEffect(effects.Effect):
    """The JAX effect of every primitive that an interpretation must handle: no pass may drop its equation."""

    def __repr__(self) -> str:
        return "Interpreted"


interpreted_effect = InterpretedEffect()
_effect_primitives: set[Primitive] = set()
for _allowed in (
    effects.control_flow_allowed_effects,
    effects.remat_allowed_effects,
    effects.custom_derivatives_allowed_effects,
    effects.lowerable_effects,
):
    _allowed.add_type(InterpretedEffect)


def has_effect(jaxpr: Jaxpr) -> bool:
    """Whether an effect primitive stands anywhere in ``jaxpr``, also in a body that does not pass its effects on."""
    return interpreted_effect in jaxpr.effects or not _effect_primitives.isdisjoint(primitives_in(jaxpr))


@dataclasses.dataclass(frozen=True)
class Lane:
    """One vmap around an effect primitive.

    Attributes:
        name: the ``axis_name`` of the vmap, or None.
        size: number of lanes.
        mapped: for each operand, whether it has this vmap's axis.
        depth: how many ``shard_map`` stand between the vmap and the primitive.
    """

    name: str | None
    size: int
    mapped: tuple[bool, ...]
    depth: int = 0


def register_effect_rules(
    primitive: Primitive,
    abstract_eval: Callable[..., Any],
    batch: Callable[..., Any],
    unhandled: Callable[..., Exception],
    refuse_lane: Callable[..., Exception],
) -> None:
    """Registers all of JAX's rules for an effect primitive.

    Args:
        primitive: the primitive; it returns a list of results.
        abstract_eval: from abstract operands and parameters to abstract results.
        batch: ``(lane, operands, **params) -> (results, axes)``; the batched operands have the lane's axis in front.
        unhandled: from parameters to the error for running outside of an interpretation.
        refuse_lane: from parameters to the error for a vmap whose lanes lie on a mesh axis (``spmd_axis_name``).
    """
    primitive.multiple_results = True
    _effect_primitives.add(primitive)

    def effectful(*avals, **params):
        return abstract_eval(*avals, **params), {interpreted_effect}

    def run(*_, **params):
        raise unhandled(**params)

    def lower(_ctx, *_, **params):
        raise unhandled(**params)

    def batched(axis_data, operands, dims, **params):
        if axis_data.spmd_name is not None:
            raise refuse_lane(**params)
        operands = [x if d is None else jax.numpy.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
        name = None if axis_data.name is core.no_axis_name else axis_data.name
        depth = getattr(axis_data, "depth", 0)
        lane = Lane(name, axis_data.size, tuple(d is not None for d in dims), depth)
        return batch(lane, operands, **params)

    primitive.def_effectful_abstract_eval(effectful)
    primitive.def_impl(run)
    mlir.register_lowering(primitive, lower)
    batching.fancy_primitive_batchers[primitive] = batched


# --- derivatives and batching of control flow that holds an effect ----------------------------------------------------


MAX_RACES = 20


def refuse_derivatives(refuse: Callable[[Primitive, dict[str, Any]], Exception]) -> None:
    """Makes JAX refuse to differentiate an effect, before it is interpreted, in every form.

    A rule for ``jvp`` is not enough: JAX does not call it where no tangent reaches the equation, and then drops,
    hoists or repeats the equation as it sees fit.

    Args:
        refuse: from the differentiated primitive and its parameters to the error to raise.
    """

    def guarded(process):
        def process_primitive(self, primitive, tracers, params, /):
            if primitive in _effect_primitives or any(_holds_effect(value) for value in params.values()):
                raise refuse(primitive, params)
            return process(self, primitive, tracers, params)

        return process_primitive

    def guarded_custom(process):
        def process_custom(self, primitive, fun, *rest, **params):
            body = _primal_with_effect(self, fun, rest[-1])
            if body is not None:
                raise refuse(primitive, {"jaxpr": body})
            for _ in range(MAX_RACES):
                # JAX traces the rule of a traced function when it is first asked for, without a lock: where two threads
                # ask at once, one of them finds its place taken. It is there when asked for again.
                with suppress(lu.StoreException):
                    return process(self, primitive, fun, *rest, **params)
            return process(self, primitive, fun, *rest, **params)  # pragma: no cover - raced in each of MAX_RACES tries

        return process_custom

    for trace in (ad.JVPTrace, ad.LinearizeTrace):
        trace.process_primitive = guarded(trace.process_primitive)
        trace.process_custom_jvp_call = guarded_custom(trace.process_custom_jvp_call)
        trace.process_custom_vjp_call = guarded_custom(trace.process_custom_vjp_call)


def _primal_with_effect(trace: Any, fun: Any, tracers: Sequence[Any]) -> Jaxpr | None:
    """The body of a function with its own derivative rule, if it holds an effect, of which the rule knows nothing.

    JAX calls the rule alone and never traces the body, so it is traced here; where nothing is staged there is no
    interpretation that could miss an effect.
    """
    while trace is not None and not isinstance(trace, pe.DynamicJaxprTrace):
        trace = getattr(trace, "parent_trace", None)
    if trace is None:
        return None
    empty = [store for store in fun.stores if store is not None and not store]
    try:
        body = jax.make_jaxpr(fun.call_wrapped)(*map(jax.typeof, tracers))
    except Exception:
        return None
    finally:
        for store in empty:
            store.reset()
    return body if has_effect(body) else None


def _holds_effect(param: Any) -> bool:
    if isinstance(param, tuple):
        return any(isinstance(p, Jaxpr) and has_effect(p) for p in param)
    return isinstance(param, Jaxpr) and has_effect(param)


@dataclasses.dataclass(frozen=True, slots=True)
class _OutsideAxisData(batching.AxisData):
    """The axis of a vmap as seen from inside ``depth`` shard_maps within it."""

    depth: int = 0


def _outside(axis_data: batching.AxisData) -> _OutsideAxisData:
    fields = {f.name: getattr(axis_data, f.name) for f in dataclasses.fields(batching.AxisData)}
    return _OutsideAxisData(**fields, depth=getattr(axis_data, "depth", 0) + 1)


_batch_shard_map = batching.BatchTrace.process_shard_map  # pyright: ignore[reportAttributeAccessIssue]


def _batch_shard_map_marked(trace, *args, **params):
    # JAX batches a shard_map's body with the axis of the vmap around it; without a mark a site in the body could not
    # tell a vmap outside of the shard_map from one inside.
    marked = batching.BatchTrace(trace.parent_trace, trace.tag, _outside(trace.axis_data))
    return _batch_shard_map(marked, *args, **params)


batching.BatchTrace.process_shard_map = _batch_shard_map_marked  # pyright: ignore[reportAttributeAccessIssue]

_batch_custom_vmap = batching.fancy_primitive_batchers[custom_vmap_p]


def refuse_custom_vmap(refuse: Callable[[Primitive, dict[str, Any]], Exception]) -> None:
    """Makes JAX refuse a function with its own batching rule that holds an effect, of which the rule knows nothing."""

    def batched(axis_data, args, dims, *, call, **params):
        if has_effect(call):
            raise refuse(custom_vmap_p, {"jaxpr": call})
        return _batch_custom_vmap(axis_data, args, dims, call=call, **params)

    batching.fancy_primitive_batchers[custom_vmap_p] = batched


_batch_cond = batching.fancy_primitive_batchers[cond_p]
_batch_while = batching.fancy_primitive_batchers[while_p]


# A cond whose predicate differs between the lanes of a vmap and whose branches hold an effect. Operands: the branch of
# each lane, then the operands of the branches; all have the lane's axis in front. A branch takes, before its operands,
# whether each lane is in it. The last ``shared`` operands are the same for all lanes, and have no such axis.
lane_cond_p = Primitive("lane_cond")


def batch_control_flow(activated: Callable[[Jaxpr], Callable[..., list[Any]]]) -> None:
    """Installs batching rules for a cond and a while whose predicate differs between lanes and that hold an effect.

    JAX would run all branches and select, and go on in all lanes until the last is done, before any interpretation sees
    it: each lane would count every branch, and every iteration of every lane.

    Args:
        activated: from a body to a function that takes, before the body's operands, whether the effects inside happen.
    """

    def cond(axis_data, args, dims, *, branches, **params):
        if dims[0] is None or not any(map(has_effect, branches)):
            return _batch_cond(axis_data, args, dims, branches=branches, **params)
        args = [_at_front(axis_data, x, d) for x, d in zip(args, dims, strict=True)]
        flag = array_type((), bool, varying(args[0]))
        flagged = [jax.make_jaxpr(activated(b))(flag, *b.in_avals) for b in branches]
        outs = lane_cond_p.bind(*args, branches=tuple(_batched(axis_data, b) for b in flagged), shared=0)
        return outs, [0] * len(outs)

    def loop(axis_data, args, dims, *, cond_jaxpr, body_jaxpr, cond_nconsts, body_nconsts):
        sizes = {"cond_nconsts": cond_nconsts, "body_nconsts": body_nconsts}
        if not has_effect(body_jaxpr) or not _predicate_batched(axis_data, dims, cond_jaxpr, body_jaxpr, **sizes):
            return _batch_while(axis_data, args, dims, cond_jaxpr=cond_jaxpr, body_jaxpr=body_jaxpr, **sizes)
        args = [_at_front(axis_data, x, d) for x, d in zip(args, dims, strict=True)]
        before, inner = args[:cond_nconsts], args[cond_nconsts : cond_nconsts + body_nconsts]
        predicate = core.jaxpr_as_fun(_batched(axis_data, cond_jaxpr))
        flag = array_type((), bool, varying(cond_jaxpr.out_avals[0]))
        body = core.jaxpr_as_fun(_batched(axis_data, jax.make_jaxpr(activated(body_jaxpr))(flag, *body_jaxpr.in_avals)))

        def iteration(carry):
            (active,) = predicate(*before, *carry)
            after = body(active, *inner, *carry)
            return [jax.numpy.where(_fit(active, new), new, old) for new, old in zip(after, carry, strict=True)]

        start = list(args[cond_nconsts + body_nconsts :])
        outs = jax.lax.while_loop(lambda carry: predicate(*before, *carry)[0].any(), iteration, start)
        return outs, [0] * len(outs)

    batching.fancy_primitive_batchers[cond_p] = cond
    batching.fancy_primitive_batchers[while_p] = loop


def _fit(flag: Array, x: Array) -> Array:
    return flag.reshape(flag.shape + (1,) * (x.ndim - flag.ndim))


def _at_front(axis_data: Any, x: Any, dim: int | None) -> Any:
    return batching.bdim_at_front(x, dim, axis_data.size, mesh_axis=axis_data.explicit_mesh_axis)


def _batched(axis_data: Any, jaxpr: Jaxpr) -> Jaxpr:
    n, m = len(jaxpr.in_avals), len(jaxpr.out_avals)
    return batching.batch_jaxpr(jaxpr, axis_data, [True] * n, [True] * m)[0]


def _batch_lane_cond(axis_data, args, dims, *, branches, shared):
    args = [_at_front(axis_data, x, d) for x, d in zip(args, dims, strict=True)]
    outs = lane_cond_p.bind(*args, branches=tuple(_batched(axis_data, b) for b in branches), shared=shared)
    return outs, [0] * len(outs)


def refuse_lane_cond(unhandled: Callable[..., Exception]) -> None:
    """Makes a cond of lanes fail outside of an interpretation, with an error from its parameters."""

    def run(*_, **params):
        raise unhandled(**params)

    lane_cond_p.def_impl(run)
    mlir.register_lowering(lane_cond_p, run)


lane_cond_p.multiple_results = True
lane_cond_p.def_effectful_abstract_eval(lambda *_, branches, **__: (branches[0].out_avals, {interpreted_effect}))
batching.fancy_primitive_batchers[lane_cond_p] = _batch_lane_cond
CONTROL_FLOW["lane_cond"] = lane_cond_p


def _predicate_batched(axis_data, dims, cond_jaxpr, body_jaxpr, *, cond_nconsts, body_nconsts) -> bool:
    batched = [d is not None for d in dims]
    in_cond, in_body = batched[:cond_nconsts], batched[cond_nconsts : cond_nconsts + body_nconsts]
    carry = batched[cond_nconsts + body_nconsts :]
    while True:
        _, after = batching.batch_jaxpr(body_jaxpr, axis_data, in_body + carry, instantiate=carry)
        grown = [a or b for a, b in zip(carry, after, strict=True)]
        if grown == carry:
            break
        carry = grown
    return batching.batch_jaxpr(cond_jaxpr, axis_data, in_cond + carry, instantiate=False)[1][0]


def over_lane(body: Jaxpr, lane: Lane) -> Jaxpr:
    """Batches a body over a lane as the vmap that made it did; the lane's axis is in front, in all results."""
    axis = batching.AxisData(core.no_axis_name if lane.name is None else lane.name, lane.size, None, None)
    for _ in range(lane.depth):
        axis = _outside(axis)
    return batching.batch_jaxpr(body, axis, list(lane.mapped), [True] * len(body.out_avals))[0]


# --- types ------------------------------------------------------------------------------------------------------------


def aval_of(var: Any) -> core.ShapedArray:
    """The type of a variable of a jaxpr."""
    return var.aval


def varying(x: Any) -> frozenset[str]:
    """The manual mesh axes over which a value, or an abstract value, varies."""
    aval = x if isinstance(x, core.AbstractValue) else jax.typeof(x)
    mat = getattr(aval, "manual_axis_type", None)
    return frozenset() if mat is None else frozenset(mat.varying)


def manual_axes() -> frozenset[str]:
    """The mesh axes that are manual where the code runs now."""
    return frozenset(getattr(jax.sharding.get_abstract_mesh(), "manual_axes", ()))


def checks_varying() -> bool:
    """Whether values are typed with the axes they vary over (``check_vma``) where the code runs now."""
    return bool(manual_axes()) and bool(config._check_vma.value)


def without_axes(x: Any) -> core.ShapedArray:
    """The type of ``x`` without any mesh."""
    aval = jax.typeof(x)
    return core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


@contextmanager
def no_mesh() -> Iterator[None]:
    """Traces as if no mesh were set and no axis manual."""
    empty = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(empty), config._check_vma(False):
        yield


def array_type(shape: tuple[int, ...], dtype: Any, axes: frozenset[str] = frozenset()) -> core.ShapedArray:
    """The type of an array that varies over ``axes`` and is replicated over the explicit axes of the context's mesh."""
    mesh = jax.sharding.get_abstract_mesh()
    sharding = None if mesh.empty else NamedSharding(mesh, P(*[None] * len(shape)))
    return core.ShapedArray(shape, dtype, sharding=sharding).update(manual_axis_type=core.ManualAxisType(varying=axes))


# --- tracing and binding ----------------------------------------------------------------------------------------------


def moved(eqn: JaxprEqn) -> bool:
    """Whether an equation was traced under a mesh some of whose explicit axes are manual here."""
    traced, here = eqn.ctx.cur_abstract_mesh, jax.sharding.get_abstract_mesh()
    return AxisType.Explicit in traced.axis_types and traced != here and traced.shape == here.shape


def _moved_sharding(param: Any, mesh: AbstractMesh) -> Any:
    if not isinstance(param, NamedSharding) or param.mesh.shape != mesh.shape:
        return param
    types = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    explicit = {axis for axis, kind in types.items() if kind == AxisType.Explicit}
    return NamedSharding(mesh, P(*(e if spec_axes(P(e)) <= explicit else None for e in param.spec)))


def bind(eqn: JaxprEqn, invals: Sequence[Any]) -> list[Any]:
    """Binds an equation's primitive again on new operands; a jit donates none of them, since they are the caller's."""
    params = eqn.params
    if eqn.primitive is jit_p and any(params["donated_invars"]):
        params = {**params, "donated_invars": (False,) * len(invals)}
    if moved(eqn):
        mesh = jax.sharding.get_abstract_mesh()
        params = {name: _moved_sharding(value, mesh) for name, value in params.items()}
    bind_params = eqn.primitive.get_bind_params(params)
    outs = eqn.primitive.bind(*invals, **bind_params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def has_own_rule(eqn: JaxprEqn) -> bool:
    """Whether an equation is a function with its own derivative rule."""
    return eqn.primitive in (custom_jvp_call_p, custom_vjp_call_p)


def bind_rules(eqn: JaxprEqn, invals: Sequence[Any], run: Callable[..., list[Any]]) -> list[Any]:
    """Binds a function with its own derivative rule where the types inside of it do not hold.

    Args:
        eqn: a custom_jvp or custom_vjp.
        invals: new operands.
        run: ``(jaxpr, consts, *args) -> results``, which evaluates the function, and its rule when JAX asks for it.
    """
    body, n, is_jvp = eqn.params["call_jaxpr"], eqn.params["num_consts"], eqn.primitive is custom_jvp_call_p
    thunk = eqn.params["jvp_jaxpr_fun" if is_jvp else "fwd_jaxpr_thunk"]

    def rule(*flags):  # JAX traces a rule when it is first asked for, with the types of the trace
        with jax.sharding.use_abstract_mesh(eqn.ctx.cur_abstract_mesh):
            return thunk.call_wrapped(*flags)

    def fun(*args):
        return run(body, body.consts, *args)

    def jvp(*args):
        primals, tangents = args[n : len(args) // 2], args[len(args) // 2 + n :]
        jaxpr, consts, zeros = rule(*(type(t) is SymbolicZero for t in tangents))
        outs = run(jaxpr, consts, *primals, *(t for t in tangents if type(t) is not SymbolicZero))
        values, slopes = outs[: len(zeros)], iter(outs[len(zeros) :])
        types = [jax.typeof(x).to_tangent_aval() for x in values]
        return [*values, *(SymbolicZero(t) if zero else next(slopes) for t, zero in zip(types, zeros, strict=True))]

    def fwd(*args):  # each operand is followed by whether it has a derivative
        if any(args[1 : 2 * n : 2]):
            raise ad.CustomVJPException()
        jaxpr, consts = rule(*args[2 * n + 1 :: 2])
        return run(jaxpr, consts, *args[2 * n :: 2])

    shared = [tuple(sorted(varying(x) - varying(aval_of(v)))) for x, v in zip(invals, eqn.invars, strict=True)]

    def bwd(*args):  # it has summed over the shards what was the same on all of them; the caller will again
        found = old[2].call_wrapped(*args)
        cts, *logs = found if isinstance(found, tuple) else (found,)  # jax 0.12 returns logs beside
        cts = [x if type(x) is ad.Zero or not axes else _share(x, axes) for x, axes in zip(cts, shared, strict=True)]
        return (cts, *logs) if logs else cts

    params = eqn.primitive.get_bind_params(eqn.params)
    old = params["subfuns"]
    new = (fun, jvp) if is_jvp else (fun, fwd, bwd)
    wrapped = tuple(lu.wrap_init(f, debug_info=o.debug_info) for f, o in zip(new, old, strict=True))
    return list(eqn.primitive.bind(*invals, **{**params, "subfuns": wrapped}))


def _share(x: Array, axes: tuple[str, ...]) -> Array:
    return jax.lax.pcast(x / jax.lax.axis_size(axes), axes, to="varying")


@contextmanager
def equation_context(eqn: JaxprEqn) -> Iterator[None]:
    """The source line, name stack, compute type and metadata of ``eqn``, but the mesh of the caller."""
    mesh = jax.sharding.get_abstract_mesh()
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with ExitStack() as stack:
        stack.enter_context(source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack))
        stack.enter_context(eqn.ctx.manager)
        if eqn.ctx.cur_abstract_mesh != mesh:
            stack.enter_context(jax.sharding.use_abstract_mesh(mesh))
        yield


def current_line() -> str:
    """``file.py:line`` of the user's code that runs now."""
    return _line(source_info_util.current().traceback)


def equation_line(eqn: JaxprEqn) -> str:
    """``file.py:line`` of the user's code that made ``eqn``."""
    return _line(eqn.source_info.traceback)


def raised_line(error: BaseException) -> str:
    """``file.py:line`` of the innermost of the user's frames that an error went through."""
    line, step = "an unknown line", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if source_info_util.is_user_filename(name):
            line = f"{os.path.basename(name)}:{step.tb_lineno}"
        step = step.tb_next
    return line


def _line(traceback: Any) -> str:
    frame = source_info_util.user_frame(traceback)
    return "an unknown line" if frame is None else f"{os.path.basename(frame.file_name)}:{frame.start_line}"


def bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters."""
    return jaxprs_in(eqn.params)


def closed_bodies(eqn: JaxprEqn) -> list[Jaxpr]:
    """The jaxprs among an equation's parameters, with the constants that they hold."""
    return [
        j
        for value in eqn.params.values()
        for j in (value if isinstance(value, tuple) else (value,))
        if hasattr(j, "consts") and hasattr(j, "eqns")
    ]


def without_constants(jaxpr: Jaxpr) -> Jaxpr:
    """The equations with what they close over as first inputs: they then keep no array alive, and no tracer."""
    return pe.convert_constvars_jaxpr(jaxpr)


def jaxprs_in(params: dict[str, Any]) -> list[Jaxpr]:
    """The jaxprs among the parameters of an equation, in order."""
    return [j if hasattr(j, "eqns") else j.jaxpr for j in core.jaxprs_in_params(params)]


_primitives: weakref.WeakKeyDictionary[Jaxpr, frozenset[Primitive]] = weakref.WeakKeyDictionary()


def primitives_in(jaxpr: Jaxpr) -> frozenset[Primitive]:
    """All primitives of ``jaxpr`` and of the bodies within it; each body is walked once."""
    found = _primitives.get(jaxpr)
    if found is None:
        found = frozenset(eqn.primitive for eqn in jaxpr.eqns).union(
            *(primitives_in(body) for eqn in jaxpr.eqns for body in bodies(eqn))
        )
        _primitives[jaxpr] = found
    return found


# --- parameters of the higher-order primitives --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ScanParts:
    """The operands of a scan by role, and its parameters."""

    body: Jaxpr
    consts: list[Any]
    carry: list[Any]
    xs: list[Any]
    length: int
    reverse: bool
    unroll: int


def scan_parts(eqn: JaxprEqn, invals: Sequence[Any]) -> ScanParts:
    """Splits a scan's operands into constants, carry and scanned arrays."""
    p = eqn.params
    consts, carry, xs = (list(part) for part in p["ft_in"].update(list(invals)).unpack())
    return ScanParts(p["jaxpr"], consts, carry, xs, p["length"], p["reverse"], p["unroll"])


@dataclasses.dataclass(frozen=True)
class WhileParts:
    """The operands of a while loop by role, and its bodies."""

    predicate: Jaxpr
    body: Jaxpr
    predicate_consts: list[Any]
    body_consts: list[Any]
    carry: list[Any]


def while_parts(eqn: JaxprEqn, invals: Sequence[Any]) -> WhileParts:
    """Splits a while loop's operands into the constants of its two bodies and the carry."""
    p = eqn.params
    n, m = p["cond_nconsts"], p["body_nconsts"]
    return WhileParts(
        p["cond_jaxpr"], p["body_jaxpr"], list(invals[:n]), list(invals[n : n + m]), list(invals[n + m :])
    )


def jit_options(eqn: JaxprEqn) -> tuple[Jaxpr, dict[str, Any]]:
    """The body of a jit and the options to jit its replacement with; nothing is donated."""
    p = eqn.params
    options: dict[str, Any] = {"keep_unused": p["keep_unused"], "inline": p["inline"]}
    if any(s is not UNSPECIFIED for s in p["in_shardings"]):
        options["in_shardings"] = (UNSPECIFIED, *p["in_shardings"])
    if any(s is not UNSPECIFIED for s in p["out_shardings"]):
        options["out_shardings"] = (list(p["out_shardings"]), UNSPECIFIED)
    return p["jaxpr"], options


def checkpoint_options(eqn: JaxprEqn) -> tuple[Jaxpr, dict[str, Any]]:
    """The body of a checkpoint and the options to checkpoint its replacement with."""
    p = eqn.params
    cse = p["prevent_cse"]
    return p["jaxpr"], {"policy": p["policy"], "prevent_cse": (True, *cse) if isinstance(cse, tuple) else cse}


@dataclasses.dataclass(frozen=True)
class ShardMapParts:
    """The parameters of a shard_map, as they hold where it is bound now.

    Attributes:
        body: what each shard runs.
        mesh: the mesh to bind on: the context's own if there is one, since JAX refuses any other within it.
        axes: the mesh axes that become manual here.
        in_specs: one per operand.
        out_specs: one per result.
        check_vma: whether values inside are typed with the axes they vary over.
    """

    body: Jaxpr
    mesh: Mesh | AbstractMesh
    axes: frozenset[str]
    in_specs: tuple[P, ...]
    out_specs: tuple[P, ...]
    check_vma: bool

    @property
    def explicit(self) -> bool:
        types = dict(zip(self.mesh.axis_names, self.mesh.axis_types, strict=True))
        return all(types[a] == AxisType.Explicit for a in self.axes)


def shard_map_parts(eqn: JaxprEqn) -> ShardMapParts:
    """Reads a shard_map's parameters."""
    p = eqn.params
    context = jax.sharding.get_abstract_mesh()
    mesh = p["mesh"] if context.empty else context
    axes = frozenset(p["newly_manual_axes"]) - frozenset(getattr(mesh, "manual_axes", ()))
    return ShardMapParts(p["jaxpr"], mesh, axes, tuple(p["in_specs"]), tuple(p["out_specs"]), p["check_vma"])


def spec_axes(spec: P | None) -> frozenset[str]:
    """The mesh axes that a partition spec names."""
    entries = () if spec is None else tuple(spec)
    return frozenset(a for e in entries if e is not None for a in (e if isinstance(e, tuple) else (e,)))


# --- several processes ----------------------------------------------------------------------------------------------


def has_backends() -> bool:
    """Whether JAX has looked for devices."""
    return xla_bridge.backends_are_initialized()


def coordination() -> Any:
    """What jax.distributed.initialize has found: process_id, num_processes, coordinator_address."""
    return distributed.global_state


def tell_all(name: str, text: str) -> None:
    """Leave a text for all processes, under a name."""
    client: Any = distributed.global_state.client
    client.key_value_set(name, text)


def told_to_all(name: str) -> str:
    """The text that a process leaves under a name, once it has."""
    client: Any = distributed.global_state.client
    return client.blocking_key_value_get(name, 60_000)
