"""The rules of ``blocked``: the density is summed over blocks; records and draws come from all rows at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ppleffects.effects import HandlerResult, Interpreter
from ppleffects.effects._jax import Jaxpr
from ppleffects.interpretations.block_sum import sum_over_blocks
from ppleffects.interpretations.parts import Context, Inputs, Totals
from ppleffects.interpretations.rows import row_axes
from ppleffects.language.blocked import Blocks, assembled, blocked_p, changed


def blocked_rule(interpreter: Interpreter[Context], ctx: Context, eqn, invals) -> HandlerResult[Context]:
    """The totals of all blocks are added to those of the context."""
    whole: Jaxpr = eqn.params["whole"]
    blocks: Blocks = eqn.params["blocks"]
    if ctx.records is not None or ctx.draws is not None:
        _, ctx = interpreter(whole, ctx, *invals)
        return HandlerResult(ctx, [])
    operands, axes, entered = _entering(ctx, eqn, invals)

    def terms(body: Jaxpr) -> Callable[..., Any]:
        def run(*operands):
            inner, args = entered(operands)
            _, after = interpreter(body, dataclasses.replace(inner, totals=Totals({}, ctx.totals.manual)), *args)
            return after.totals.sums

        return run

    rest = None if blocks.rest is None else terms(blocks.rest)
    for key, term in sum_over_blocks(terms(blocks.block), rest, blocks.rows, axes, operands).items():
        ctx = ctx.added(term, frozenset(key))
    return HandlerResult(ctx, [])


def rebind_blocked(interpreter: Interpreter[Context], ctx: Context, eqn, invals) -> HandlerResult[Context]:
    """For transformations of models: the sites in all bodies are bound again, and stay in blocks."""
    blocks: Blocks = eqn.params["blocks"]
    operands, axes, entered = _entering(ctx, eqn, invals)

    def rewritten(body: Jaxpr) -> Callable[..., Any]:
        def run(*operands):
            inner, args = entered(operands)
            return interpreter(body, inner, *args)[0]

        return run

    runs = changed(rewritten, eqn.params["whole"], blocks, invals)
    operands, params = assembled(runs, operands, axes, eqn.params["source"])
    blocked_p.bind(*operands, **params)
    return HandlerResult(ctx, [])


def _entering(ctx: Context, eqn: Any, invals: Sequence[Any]) -> Any:
    """What a body is given as flat operands: its own, values that its sites read, and what all sites share.

    Returns:
        The operands, the axis of the rows of each, and a function from the operands of a block to the context and the
        arguments of a body.
    """
    values = ctx.inputs.within(eqn.params["whole"])
    leaves, tree = jax.tree.flatten(ctx.shared)
    along = row_axes(eqn) if values else {}
    operands = [jnp.asarray(x) for x in (*invals, *values.values(), *leaves)]
    axes = (*eqn.params["blocks"].axes, *(along[name] for name in values), *[None] * len(leaves))

    def entered(operands: Sequence[Any]) -> tuple[Context, Sequence[Any]]:
        own, rest = operands[: len(invals)], operands[len(invals) :]
        given = dict(zip(values, rest[: len(values)], strict=True))
        return Context(Inputs(given), None, None, Totals({}), jax.tree.unflatten(tree, rest[len(values) :])), own

    return operands, axes, entered
