"""Runs a program that was traced without mesh axes inside of manual axes, where every value must be typed with them.

A sampler with a loop in it cannot be traced inside of ``shard_map``: its carries start out as constants, typed as
equal on all shards, and end as values that vary. Here it is traced outside, and its equations are bound inside with
every operand, literal and carry cast to the axes over which the result shall vary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ppleffects.effects import _jax, tracing
from ppleffects.effects.handlers import default_dispatcher
from ppleffects.effects.interpreter import Interpreter


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
    outs, _ = Interpreter(default_dispatcher(), varying=axes).run(traced.jaxpr, traced.consts, (), *leaves)
    return jax.tree.unflatten(traced.out_tree, outs)
