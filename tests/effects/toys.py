"""Two effects built by user code alone: ``tally`` adds up numbers, ``note`` writes values down by name."""

import dataclasses

import jax
import jax.numpy as jnp

from ppleffects.effects import (
    Crossing,
    HandlerResult,
    Interpreter,
    Part,
    default_dispatcher,
    default_shard_map_handler,
    effect_primitive,
    reinterpret,
)


def _batch_tally(lane, operands, **params):
    (amount,) = operands
    total = jnp.sum(amount, axis=0) if lane.mapped[0] else amount * lane.size
    return tally_p.bind(total, **params), []


def _batch_note(lane, operands, **params):
    (value,) = operands
    whole = value if lane.mapped[0] else jnp.broadcast_to(value, (lane.size, *value.shape))
    return note_p.bind(whole, **params), []


tally_p = effect_primitive("tally", lambda amount, **_: [], _batch_tally)
note_p = effect_primitive("note", lambda value, **_: [], _batch_note)


def tally(amount=1.0) -> None:
    """Adds to the sum that the interpretation keeps."""
    tally_p.bind(jnp.asarray(amount, float), name="tally")


def note(name, value) -> None:
    """Writes ``value`` down."""
    note_p.bind(jnp.asarray(value), name=name)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Notes(Part):
    """A part that grows: stacked along scans."""

    entries: dict

    def enter(self, frame):
        return Crossing()

    def inside(self, frame, crossing):
        return Notes({})

    def leave(self, frame):
        return (), self.entries

    def rejoin(self, frame, carried, emitted):
        return Notes({**self.entries, **emitted})


class Counter:
    """Counts the calls of the handlers: how often a body is walked."""

    def __init__(self):
        self.calls = 0


def tallying(calls: Counter | None = None, **handlers) -> Interpreter:
    """The interpreter of ``tally``; its context is one number."""

    def handle(interpreter, ctx, eqn, invals):
        if calls is not None:
            calls.calls += 1
        return HandlerResult(ctx + jnp.sum(invals[0]), [])

    return Interpreter(default_dispatcher().extended({tally_p: handle, **handlers}), "tallying")


def tally_of(fn, *args, start=0.0, interpreter=None):
    """The function's result and its tally."""
    return reinterpret(fn, interpreter or tallying())(jnp.asarray(start, float), *args)


def per_shard(axes):
    """A handler of shard_map that starts each shard from zero and adds their sum to what was there."""

    def handle(interpreter, ctx, eqn, invals):
        def inner(jaxpr, ctx, *args):
            return interpreter(jaxpr, jax.lax.pcast(ctx, axes, to="varying"), *args)

        inside = default_shard_map_handler(
            inner, jnp.zeros_like(ctx), eqn, invals, reduce_ctx=lambda c: jax.lax.psum(c, axes)
        )
        return HandlerResult(ctx + inside.ctx, inside.outvals)

    return handle


def noting() -> Interpreter:
    """The interpreter of ``note``; its context is ``Notes``."""

    def handle(interpreter, ctx, eqn, invals):
        return HandlerResult(Notes({**ctx.entries, eqn.params["name"]: invals[0]}), [])

    return Interpreter(default_dispatcher().extended({note_p: handle}), "noting")


def notes_of(fn, *args):
    """The function's result and its notes."""
    out, ctx = reinterpret(fn, noting())(Notes({}), *args)
    return out, ctx.entries
