"""Runs a program that was traced without mesh axes inside of manual axes, where every value must be typed with them.

A sampler with a loop in it cannot be traced inside of ``shard_map``: its carries start out as constants, typed as
equal on all shards, and end as values that vary. Here it is traced outside, and its equations are bound inside with
every operand, literal and carry cast to the axes over which the result shall vary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, override

import jax

from ppleffects.effects import _jax, mesh, tracing
from ppleffects.effects.handlers import default_dispatcher
from ppleffects.effects.interpreter import HandlerResult, Interpreter


@dataclasses.dataclass(frozen=True)
class _Casting(Interpreter[Any]):
    axes: frozenset[str] = frozenset()

    def _cast(self, values: Any) -> list[Any]:
        return [mesh.cast_varying(x, self.axes) for x in values]

    @override
    def run(self, jaxpr, consts, ctx, *args):
        outs, ctx = super().run(jaxpr, consts, ctx, *args)
        return self._cast(outs), ctx

    @override
    def _apply(self, ctx, eqn, invals):
        invals = self._cast(invals)
        inner = _jax.bodies(eqn)
        handler = self.dispatcher.handler(eqn.primitive)
        if not inner or handler is None:
            return HandlerResult(ctx, self._cast(_jax.bind(eqn, invals)))
        if eqn.primitive in (_jax.custom_jvp_call_p, _jax.custom_vjp_call_p, _jax.jit_p):
            return HandlerResult(ctx, self(inner[0], ctx, *invals)[0])
        return handler(self, ctx, eqn, invals)


def run_varying(fn: Callable[..., Any], axes: frozenset[str], *args: Any) -> Any:
    """Returns ``fn(*args)``, every leaf of it typed as varying over ``axes`` and over all that an argument varies over.

    Args:
        fn: a function of arrays that knows nothing of a mesh.
        axes: manual axes of the context.
        args: its arguments.
    """
    leaves, tree = jax.tree.flatten(args)
    axes = axes.union(*map(_jax.varying, leaves))
    if not axes:
        return fn(*args)
    with _jax.no_mesh():
        traced = tracing.trace(lambda *xs: fn(*jax.tree.unflatten(tree, xs)), *map(_jax.without_axes, leaves))
    outs, _ = _Casting(default_dispatcher(), axes=axes).run(traced.jaxpr, traced.consts, (), *leaves)
    return jax.tree.unflatten(traced.out_tree, outs)
