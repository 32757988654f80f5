"""Several effects in one interpretation, which leaves the effects of others in the program."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, override

from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core.primitives import while_p

from examples.effects.parts import Written
from ppleffects.effects import (
    Dispatcher,
    Frame,
    HandlerResult,
    Interpreter,
    default_handlers,
    default_shard_map_handler,
    default_while_handler,
    reinterpret,
    shard_map_p,
)


@dataclasses.dataclass(frozen=True)
class Effect:
    """One effect: where its context starts, and what its primitives do to it.

    Attributes:
        start: the context before the program.
        handlers: ``(part, eqn, invals) -> (part, outvals)`` for each of its own primitives.
        observe: ``(part, eqn, scope) -> part``, called for every equation without a body; ``scope`` names the
            ``jax.named_scope``s around it.
    """

    start: Written
    handlers: Mapping[Primitive, Callable[..., Any]] = dataclasses.field(default_factory=dict)
    observe: Callable[[Any, JaxprEqn, str], Any] | None = None


def interpreted(fn: Callable[..., Any], **effects: Effect) -> Callable[..., Any]:
    """Returns ``(*args, **kwargs) -> (out, {name: part})``; effects that are not given stay in the function."""
    start = {name: effect.start for name, effect in effects.items()}

    @functools.wraps(fn)
    def call(*args, **kwargs):
        return reinterpret(fn, _interpreter(effects))(start, *args, **kwargs)

    return call


def _interpreter(effects: Mapping[str, Effect]) -> _Scoped:
    observers = {name: effect.observe for name, effect in effects.items() if effect.observe is not None}
    owners = {primitive: name for name, effect in effects.items() for primitive in effect.handlers}

    def leaf(interpreter, ctx, eqn, invals):
        for name, observe in observers.items():
            ctx = {**ctx, name: observe(ctx[name], eqn, interpreter.scope_of(eqn))}
        if eqn.primitive not in owners:
            return HandlerResult(ctx, interpreter.bound(eqn, invals))
        name = owners[eqn.primitive]
        part, outs = effects[name].handlers[eqn.primitive](ctx[name], eqn, invals)
        return HandlerResult({**ctx, name: part}, outs)

    control_flow = {**default_handlers(), shard_map_p: _shard_map}
    if observers:
        control_flow[while_p] = _while_with_predicate
    handlers = {primitive: _scoped(handler) for primitive, handler in control_flow.items()}
    return _Scoped(_Leaves({**handlers, **dict.fromkeys(owners, leaf)}, leaf, bool(observers)), ", ".join(effects))


class _Leaves(Dispatcher[Any]):
    """Gives ``leaf`` each equation that has no handler: all of them, or only effects of others."""

    def __init__(self, handlers: Mapping[Primitive, Any], leaf: Any, everything: bool):
        super().__init__(handlers)
        self.leaf, self.everything = leaf, everything

    @override
    def handler(self, primitive):
        return super().handler(primitive) or self.leaf

    @override
    def concerns(self, eqn):
        return self.everything or super().concerns(eqn)


@dataclasses.dataclass(frozen=True)
class _Scoped(Interpreter[Any]):
    """Knows the named scopes around the body that it runs, since those of an equation start at its body."""

    scope: str = ""

    def scope_of(self, eqn: JaxprEqn) -> str:
        own, nested = str(eqn.source_info.name_stack), 1
        while nested:  # "vmap(jvp(a))/b" is "a/b"; what runs backward stays apart, as "transpose(a)/b"
            own, nested = re.subn(r"\b(?:jvp|vmap)\(([^()]*)\)", r"\1", own)
        return "/".join(filter(None, [self.scope, *own.split("/")]))


def _scoped(handler: Callable[..., Any]) -> Callable[..., Any]:
    def within(interpreter, ctx, eqn, invals):
        return handler(dataclasses.replace(interpreter, scope=interpreter.scope_of(eqn)), ctx, eqn, invals)

    return within


def _shard_map(interpreter, ctx, eqn, invals):
    """Each shard starts with nothing written; each part says how the pieces leave."""
    frame = Frame("shard_map", eqn, eqn.params["jaxpr"])
    axes = tuple(a for a in eqn.params["mesh"].axis_names if a in eqn.params["newly_manual_axes"])
    left = default_shard_map_handler(
        interpreter,
        {name: part.empty() for name, part in ctx.items()},
        eqn,
        invals,
        reduce_ctx=lambda ctx: {n: part.out_of_shards(axes, eqn.params["check_vma"]) for n, part in ctx.items()},
        declare_ctx_out_specs=lambda ctx: {name: part.specs(axes) for name, part in ctx.items()},
    )
    pieces = {name: part.leave(frame)[1] for name, part in left.ctx.items()}
    return HandlerResult({name: part.rejoin(frame, (), pieces[name]) for name, part in ctx.items()}, left.outvals)


def _while_with_predicate(interpreter, ctx, eqn, invals):
    """The default handler, but the predicate is observed too: once before the loop, and after each iteration."""
    predicate, count = eqn.params["cond_jaxpr"], eqn.params["cond_nconsts"]
    consts, carry = invals[:count], invals[count + eqn.params["body_nconsts"] :]

    class WithPredicate(_Scoped):
        @override
        def __call__(self, jaxpr, ctx, *args):
            outs, ctx = super().__call__(jaxpr, ctx, *args)
            if jaxpr is eqn.params["body_jaxpr"]:
                _, ctx = super().__call__(predicate, ctx, *consts, *outs)
            return outs, ctx

    _, ctx = interpreter(predicate, ctx, *consts, *carry)
    return default_while_handler(WithPredicate(**vars(interpreter)), ctx, eqn, invals)
