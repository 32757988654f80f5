"""A running sum as an effect on slub, as its own interface suggests, for the cases that slub can express."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching
from slub import handlers
from slub.interpreter import Dispatcher, HandlerResult, Interpreter, reinterpret

term_p = Primitive("term")
term_p.multiple_results = True
term_p.def_abstract_eval(lambda amount: [])


def _batch(operands, axes):
    return term_p.bind(operands[0].sum(axes[0])), []


def _jvp(primals, tangents):
    return term_p.bind(*primals), []


batching.primitive_batchers[term_p] = _batch
ad.primitive_jvps[term_p] = _jvp


def term(amount: Any) -> None:
    """Adds ``amount`` to the sum."""
    term_p.bind(jnp.asarray(amount))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Total:
    """The sum so far, and that of the surrounding body."""

    parent: Any
    value: Any

    def push(self) -> Any:
        """An empty sum inside of this one."""
        return Total(self, jnp.zeros_like(self.value))

    def pop(self) -> Any:
        """The surrounding sum, this one added."""
        return Total(self.parent.parent, self.parent.value + self.value)


def _handle_term(interpreter, ctx, eqn, invals):
    return HandlerResult(Total(ctx.parent, ctx.value + invals[0]), [])


def _initializer(ctx, sentinel):
    return ctx.push()


def _updater(old, new):
    return Total(old.parent, old.value + new.value)


def _reduce(eqn):
    axes = tuple(eqn.params["newly_manual_axes"])
    return lambda ctx: jax.tree.map(lambda x: lax.psum(x, axes), ctx)


def _whole(interpreter, ctx, eqn, invals):
    """All of the context enters the body, and all of it is summed over the shards."""
    return handlers.default_shard_map_handler(interpreter, ctx, eqn, invals, reduce_ctx=_reduce(eqn))


def _apart(interpreter, ctx, eqn, invals):
    """The body starts from an empty sum, of which the shards' pieces are added to the surrounding one."""
    left = _whole(interpreter, Total(None, jnp.zeros_like(ctx.value)), eqn, invals)
    return HandlerResult(Total(ctx.parent, ctx.value + left.ctx.value), left.outvals)


def summing(*, apart: bool = False, **more: Any) -> Interpreter:
    """The interpreter; with ``apart`` the context does not enter a ``shard_map``, else all of it is summed there."""
    loops = {"initializer": _initializer, "updater": _updater}
    scan = functools.partial(handlers.default_scan_handler, threading=handlers.ScanSemantics.CARRY, **loops)
    # slub tells primitives by name, and that of jax.checkpoint is no longer the one that its documentation gives
    remat_p = jax.make_jaxpr(jax.checkpoint(lambda x: x))(0.0).eqns[0].primitive
    table: dict[Any, Any] = {
        "term": _handle_term,
        "jit": handlers.default_jit_handler,
        "scan": scan,
        "while": functools.partial(handlers.default_while_handler, **loops),
        "cond": handlers.default_cond_handler,
        remat_p: handlers.default_checkpoint_handler,
        "shard_map": _apart if apart else _whole,
        **more,
    }
    return Interpreter(Dispatcher(table), label="sum")


def total(program: Any, *args: Any, interpreter: Interpreter | None = None, dtype: Any = float) -> Any:
    """The sum of all terms of ``program``."""
    found = reinterpret(program, interpreter or summing(apart=True))(Total(None, jnp.zeros((), dtype)), *args)
    return found[1].value
