"""The default handlers: how a context passes jit, checkpoint, scan, while, cond and custom derivatives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ppleffects.effects import _jax, mesh, tracing
from ppleffects.effects._jax import JaxprEqn
from ppleffects.effects.context import Crossing, Frame, Part, parts_like, split
from ppleffects.effects.interpreter import (
    Dispatcher,
    HandlerResult,
    Interpreter,
    TracerValue,
    first_effect,
)
from ppleffects.effects.shard_map import default_shard_map_handler
from ppleffects.errors import ContextStructureError, UnsupportedPrimitiveError


def default_jit_handler[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """The body is interpreted inside of a new jit of the same name; nothing is donated, since data are the caller's."""
    body, options = _jax.jit_options(eqn)

    def call(ctx, *args):
        outs, ctx = interpreter(body, ctx, *args)
        return outs, ctx

    call.__name__ = call.__qualname__ = eqn.params["name"]
    outs, ctx = jax.jit(call, **options)(ctx, *invals)
    return HandlerResult(ctx, outs)


def default_checkpoint_handler[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """The interpreted body is checkpointed with the same policy."""
    body, options = _jax.checkpoint_options(eqn)

    def call(ctx, *args):
        return interpreter(body, ctx, *args)

    outs, ctx = jax.checkpoint(call, **options)(ctx, *invals)
    return HandlerResult(ctx, outs)


def default_scan_handler[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """State is carried, inputs are sliced, what a step emits is stacked; unroll and reverse are kept."""
    scan = _jax.scan_parts(eqn, invals)
    frame = Frame("scan", eqn, scan.body, scan.length)
    parts, join = split(ctx)
    crossings = [part.enter(frame) for part in parts]

    def step(carry, x):
        carried, values = carry
        sliced, scanned = x
        entered = _entered(frame, parts, crossings, carried, sliced)
        before = join(entered)
        outs, after = interpreter(scan.body, before, *scan.consts, *values, *scanned)
        left = [part.leave(frame) for part in parts_like(after, before, frame)]
        carried = _same_types(frame, carried, [c for c, _ in left])
        return (carried, outs[: len(values)]), ([e for _, e in left], outs[len(values) :])

    (carried, values), (emitted, stacked) = jax.lax.scan(
        step,
        ([c.carried for c in crossings], scan.carry),
        ([c.sliced for c in crossings], scan.xs),
        length=scan.length,
        reverse=scan.reverse,
        unroll=scan.unroll,
    )
    return HandlerResult(join(_rejoined(frame, parts, carried, emitted)), [*values, *stacked])


def default_while_handler[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """State is carried, and what the iterations emit is summed; the predicate may hold no effect."""
    loop = _jax.while_parts(eqn, invals)
    if _jax.has_effect(loop.predicate):
        site = first_effect(loop.predicate)
        raise UnsupportedPrimitiveError(
            "an effect stands in the predicate of 'while'",
            site=None if site is None else site.params.get("name"),
            source=_jax.equation_line(eqn) if site is None else site.params.get("source"),
            expected="a predicate without effects",
            found="none known" if site is None else f"'{site.primitive}'",
            fix="move it into the body",
        )
    decides = _jax.aval_of(loop.predicate.outvars[0])
    frame = Frame("while", eqn, loop.body, axes=_jax.varying(decides))
    parts, join = split(ctx)
    crossings = [part.enter(frame) for part in parts]

    def iteration(carried, values):
        before = join(_entered(frame, parts, crossings, carried, [() for _ in parts]))
        outs, after = interpreter(loop.body, before, *loop.body_consts, *values)
        left = [part.leave(frame) for part in parts_like(after, before, frame)]
        return _same_types(frame, carried, [c for c, _ in left]), outs, [e for _, e in left]

    start = [c.carried for c in crossings]
    traced = tracing.trace(iteration, start, loop.carry)
    zeros = jax.tree.map(lambda a: _zeros(a, frame.axes), traced.abstract_result[2])
    begun = [part.start(frame, z) for part, z in zip(parts, zeros, strict=True)]

    def body(state):
        carried, before, totals = state
        carried, values, emitted = traced(carried, before)
        if decides.ndim:  # the loop of a vmap, in which each lane goes on until it is done
            active = predicate_of(before)
            values = [mesh.where_lane(active, new, old) for new, old in zip(values, before, strict=True)]
        totals = [p.accumulate(frame, t, e) for p, t, e in zip(parts, totals, emitted, strict=True)]
        return carried, values, totals

    def predicate_of(values):
        return interpreter(loop.predicate, ctx, *loop.predicate_consts, *values)[0][0]

    carried, values, totals = jax.lax.while_loop(lambda s: predicate_of(s[1]).any(), body, (start, loop.carry, begun))
    return HandlerResult(join(_rejoined(frame, parts, carried, totals)), list(values))


def default_cond_handler[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """Every branch starts from the same context; what the taken one emits counts, in a structure common to all.

    If the branch differs from shard to shard, everything inside varies as the predicate does: a cast inside of a branch
    would become, in reverse mode, a sum over shards that not all of them reach.
    """
    index, *operands = invals
    branches = eqn.params["branches"]
    parts, join = split(ctx)
    axes = _jax.varying(index)
    interpreter = dataclasses.replace(interpreter, varying=interpreter.varying | axes)
    operands = [mesh.cast_varying(x, axes) for x in operands]
    frames = [Frame("cond", eqn, body, axes=axes) for body in branches]
    crossings = [[part.enter(frame) for part in parts] for frame in frames]

    def branch(frame, crossing):
        def run(carried, *operands):
            before = join(_entered(frame, parts, crossing, carried, [() for _ in parts]))
            outs, after = interpreter(frame.body, before, *operands)
            left = [part.leave(frame) for part in parts_like(after, before, frame)]
            return _same_types(frame, carried, [c for c, _ in left]), outs, [e for _, e in left]

        return run

    start = [c.carried for c in crossings[0]]
    traced = [tracing.trace(branch(f, c), start, *operands) for f, c in zip(frames, crossings, strict=True)]
    emissions = [t.abstract_result[2] for t in traced]
    aligned = [part.align(frames[0], [e[i] for e in emissions]) for i, part in enumerate(parts)]

    def finished(b):
        def run(carried, *operands):
            carried, outs, emitted = traced[b](carried, *operands)
            return carried, outs, [functions[b](e) for functions, e in zip(aligned, emitted, strict=True)]

        return run

    runs = _alike([finished(b) for b in range(len(branches))], axes, start, *operands)
    carried, outs, emitted = jax.lax.switch(index, runs, start, *operands)
    return HandlerResult(join(_rejoined(frames[0], parts, carried, emitted)), list(outs))


def default_lane_cond_handler[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """A cond of which each lane of a vmap takes its own branch: all run, and what a lane takes counts for it.

    What a branch computes from a lane that is not in it has no derivative, so that a NaN in it stays there.
    """
    index, *operands = invals
    branches = eqn.params["branches"]
    parts, join = split(ctx)
    axes = _jax.varying(index)
    interpreter = dataclasses.replace(interpreter, varying=interpreter.varying | axes)
    operands = [mesh.cast_varying(x, axes) for x in operands]
    outs: list[list[Any]] = []
    emissions: list[list[Any]] = []
    for number, body in enumerate(branches):
        frame = Frame("cond", eqn, body)
        crossings = [part.enter(frame) for part in parts]
        before = join(_entered(frame, parts, crossings, [c.carried for c in crossings], [() for _ in parts]))
        taken = index == number
        own = len(operands) - eqn.params["shared"]
        safe = [mesh.where_lane(taken, x, jax.lax.stop_gradient(x)) for x in operands[:own]] + operands[own:]
        results, after = interpreter(body, before, taken, *safe)
        left = [part.leave(frame) for part in parts_like(after, before, frame)]
        _unchanged(frame, [c.carried for c in crossings], [c for c, _ in left])
        outs.append(results)
        emissions.append([e for _, e in left])
    frame = Frame("cond", eqn, branches[0])
    selected = []
    for part, emitted in zip(parts, zip(*emissions, strict=True), strict=True):
        functions = part.align(frame, emitted)
        selected.append(part.select(frame, [f(e) for f, e in zip(functions, emitted, strict=True)]))
    carried = [part.enter(frame).carried for part in parts]
    results = [mesh.select_lane(index, choices) for choices in zip(*outs, strict=True)]
    return HandlerResult(join(_rejoined(frame, parts, carried, selected)), results)


def rebind_lane_cond[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """For an interpretation that binds effects again: each branch is interpreted, and stays a branch."""
    index, *operands = invals
    leaves, tree = jax.tree.flatten(ctx)

    def rewritten(body):
        def run(flag, *args):
            return interpreter(body, jax.tree.unflatten(tree, args[len(operands) :]), flag, *args[: len(operands)])[0]

        return tracing.closed(run, index == 0, *operands, *leaves)

    branches = tuple(map(rewritten, eqn.params["branches"]))
    shared = eqn.params["shared"] + len(leaves)
    return HandlerResult(ctx, _jax.lane_cond_p.bind(index, *operands, *leaves, branches=branches, shared=shared))


def _unchanged(frame: Frame, before: Any, after: Any) -> None:
    leaves = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    if jax.tree.structure(before) != jax.tree.structure(after) or any(old is not new for old, new in leaves):
        raise ContextStructureError(
            "a handler changed the state of the context in a branch that only some lanes of a vmap take",
            source=_jax.equation_line(frame.eqn),
            expected="the state that the branch was given",
            found="another one",
            fix="use lax.map over the lanes instead of vmap, or keep the value in a Part that defines select=",
        )


def default_custom_jvp_handler[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """The values and derivatives are those of the function's own rule; its body is interpreted for the context alone.

    Raises:
        UnsupportedPrimitiveError: an effect primitive stands in the body. Its rule for derivatives knows nothing of the
            effect, so that a derivative would lose it.
    """
    (body,) = _jax.bodies(eqn)
    site = first_effect(body)
    if site is not None:
        raise own_rule_error(eqn, site)
    _, ctx = interpreter(body, ctx, *invals)
    return HandlerResult(ctx, interpreter.bound(eqn, invals))


def own_rule_error(eqn: JaxprEqn, site: JaxprEqn) -> UnsupportedPrimitiveError:
    """The error for an effect, ``site``, inside of a function with its own derivative rule."""
    return UnsupportedPrimitiveError(
        f"an effect stands inside of a function with its own derivative rule ('{eqn.primitive}')",
        site=site.params.get("name"),
        source=site.params.get("source"),
        expected="a function without effects",
        found=f"'{site.primitive}'",
        fix="take the site out of the function and pass its value in",
    )


def default_custom_vjp_handler[Context](
    interpreter: Interpreter[Context], ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]
) -> HandlerResult[Context]:
    """As for ``custom_jvp``."""
    return default_custom_jvp_handler(interpreter, ctx, eqn, invals)


def default_handlers() -> dict[_jax.Primitive, Any]:
    """Returns the default handler of each control-flow primitive."""
    by_name = {
        "jit": default_jit_handler,
        "scan": default_scan_handler,
        "while": default_while_handler,
        "cond": default_cond_handler,
        "lane_cond": default_lane_cond_handler,
        "checkpoint": default_checkpoint_handler,
        "custom_jvp": default_custom_jvp_handler,
        "custom_vjp": default_custom_vjp_handler,
        "shard_map": default_shard_map_handler,
    }
    return {_jax.CONTROL_FLOW[name]: handler for name, handler in by_name.items()}


def default_dispatcher() -> Dispatcher[Any]:
    """Returns a dispatcher with all default handlers, to be ``extended`` with the primitives of an effect."""
    return Dispatcher(default_handlers())


def _entered(
    frame: Frame, parts: Sequence[Part], crossings: Sequence[Crossing], carried: Any, sliced: Any
) -> list[Part]:
    return [
        part.inside(frame, Crossing(crossing.shared, c, x))
        for part, crossing, c, x in zip(parts, crossings, carried, sliced, strict=True)
    ]


def _rejoined(frame: Frame, parts: Sequence[Part], carried: Any, emitted: Any) -> list[Part]:
    return [part.rejoin(frame, c, e) for part, c, e in zip(parts, carried, emitted, strict=True)]


def _same_types(frame: Frame, before: Any, after: Any) -> Any:
    """Gives carried state the types that it had, or says which entry changed."""

    def same(old, new):
        old_type, new_type = jax.typeof(old), jax.typeof(new)
        if old_type.shape != new_type.shape:
            raise ContextStructureError(
                f"a handler changed the shape of a value that '{frame.kind}' threads through",
                source=_jax.equation_line(frame.eqn),
                expected=f"{old_type}",
                found=f"{new_type}",
                fix="give it its last shape before the loop or branch, or keep it in a Part",
            )
        return mesh.cast_varying(jnp.asarray(new, old_type.dtype), _jax.varying(old))

    if jax.tree.structure(before) != jax.tree.structure(after):
        raise ContextStructureError(
            f"a handler changed the structure of a value that '{frame.kind}' threads through",
            source=_jax.equation_line(frame.eqn),
            expected=f"{jax.tree.structure(before)}",
            found=f"{jax.tree.structure(after)}",
            fix="give it all its entries before the loop or branch, or keep it in a Part that grows",
        )
    return jax.tree.map(same, before, after)


def _zeros(aval: Any, axes: frozenset[str]) -> jax.Array:
    return mesh.cast_varying(jnp.zeros(aval.shape, aval.dtype), _jax.varying(aval) | axes)


def _alike(runs: Sequence[Callable[..., Any]], axes: frozenset[str], *args: Any) -> list[Callable[..., Any]]:
    """Gives the branches of a cond results of one type: what varies in one varies in all, or the predicate does."""
    traced = [tracing.trace(run, *args) for run in runs]
    leaves = zip(*(t.out_avals for t in traced), strict=True)
    types = [axes.union(*map(_jax.varying, leaf)) for leaf in leaves]

    def cast(branch: tracing.Traced) -> Callable[..., Any]:
        def run(*args):
            leaves, tree = jax.tree.flatten(branch(*args))
            return jax.tree.unflatten(tree, [mesh.cast_varying(x, a) for x, a in zip(leaves, types, strict=True)])

        return run

    return [cast(t) for t in traced]
