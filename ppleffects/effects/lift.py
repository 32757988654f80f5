"""Arrays that a jit inside of a program closes over become arguments of the program."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, override

import jax

from ppleffects.effects import _jax, tracing
from ppleffects.effects._jax import Jaxpr
from ppleffects.effects.context import Shared
from ppleffects.effects.handlers import default_dispatcher, rebind_lane_cond
from ppleffects.effects.interpreter import HandlerResult, Interpreter


def _inner_constants(jaxpr: Jaxpr) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        for body in _jax.closed_bodies(eqn):
            yield from (c for c in body.consts if isinstance(c, jax.Array))
            yield from _inner_constants(body)


@dataclasses.dataclass(frozen=True)
class _Lifting(Interpreter[Shared]):
    """Its context holds, by the identity of a constant, the argument that takes its place."""

    @override
    def run(self, jaxpr, consts, ctx, *args):
        return super().run(jaxpr, [ctx.value.get(id(c), c) for c in consts], ctx, *args)

    @override
    def _apply(self, ctx, eqn, invals):
        handler = self.dispatcher.handler(eqn.primitive)
        if handler is None or not any(c for body in _jax.closed_bodies(eqn) for c in _constants_below(body)):
            return HandlerResult(ctx, _jax.bind(eqn, invals))
        return handler(self, ctx, eqn, invals)


def _constants_below(body: Jaxpr) -> Iterator[bool]:
    yield from (True for c in body.consts if isinstance(c, jax.Array))
    yield from (True for _ in _inner_constants(body))


def lift_constants(traced: tracing.Traced, args: tuple[Any, ...]) -> tuple[tracing.Traced, tuple[Any, ...]]:
    """Returns an equal program, and its arguments, in which no body closes over an array.

    Args:
        traced: the program.
        args: its arguments.
    """
    arrays = list({id(c): c for c in _inner_constants(traced.jaxpr)}.values())
    if not arrays:
        return traced, args

    def run(arrays, consts, args):
        handlers = default_dispatcher().extended({_jax.lane_cond_p: rebind_lane_cond})
        ctx = Shared(dict(zip(ids, arrays, strict=True)))
        outs, _ = _Lifting(handlers).run(traced.jaxpr, consts, ctx, *args)
        return jax.tree.unflatten(traced.out_tree, outs)

    ids = [id(c) for c in arrays]
    given = (arrays, traced.consts, args)
    return tracing.trace(run, *given), tuple(jax.tree.leaves(given))
