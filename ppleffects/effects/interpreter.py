"""The interpreter: walks a jaxpr equation by equation and passes a context through the handlers of its primitives."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Concatenate, NamedTuple

import jax

from ppleffects.effects import _jax, mesh, tracing
from ppleffects.effects._jax import Jaxpr, JaxprEqn, Literal, Primitive
from ppleffects.errors import UnsupportedPrimitiveError

type TracerValue = Any


class HandlerResult[Context](NamedTuple):
    """What a handler returns.

    Attributes:
        ctx: the context after the equation.
        outvals: one value for each result of the equation.
    """

    ctx: Context
    outvals: list[TracerValue]


type Handler[Context] = Callable[[Interpreter[Context], Context, JaxprEqn, list[TracerValue]], HandlerResult[Context]]


class Uninitialized(jax.ShapeDtypeStruct):
    """The place of a value of which only shape and dtype are known yet, in an abstract context."""

    def __init__(self, aval: Any):
        super().__init__(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


class Dispatcher[Context]:
    """A table from primitives to handlers; immutable.

    Args:
        handlers: one handler for each primitive that the interpretation gives a meaning to.

    Example:
        >>> import jax
        >>> from jax.extend.core.primitives import sin_p
        >>> from ppleffects.effects import Dispatcher, HandlerResult, Interpreter, reinterpret
        >>> def count(interpreter, ctx, eqn, invals):
        ...     return HandlerResult(ctx + 1, [eqn.primitive.bind(*invals, **eqn.params)])
        >>> counting = Interpreter(Dispatcher({sin_p: count}))
        >>> reinterpret(lambda x: jax.lax.sin(jax.lax.sin(x)), counting)(0, 1.0)[1]
        2
    """

    def __init__(self, handlers: Mapping[Primitive, Handler[Context]]):
        self._handlers = dict(handlers)
        self._primitives = frozenset(self._handlers)

    def extended(self, handlers: Mapping[Primitive, Handler[Context]]) -> Dispatcher[Context]:
        """Returns a new dispatcher in which ``handlers`` are added or replaced."""
        return Dispatcher({**self._handlers, **handlers})

    def handler(self, primitive: Primitive) -> Handler[Context] | None:
        """Returns the handler of ``primitive``, or None."""
        return self._handlers.get(primitive)

    def without_effects(self) -> Dispatcher[Any]:
        """Returns a dispatcher with the handlers of the control flow alone."""
        return Dispatcher({p: h for p, h in self._handlers.items() if p in _jax.CONTROL_FLOW.values()})

    def concerns(self, eqn: JaxprEqn) -> bool:
        """Whether ``eqn`` must be interpreted: it, or an equation inside of it, has a handler or holds an effect."""
        inner = _jax.bodies(eqn)
        if not inner:
            return eqn.primitive in self._handlers or _jax.interpreted_effect in eqn.effects
        return any(_jax.has_effect(body) or self._leaves & _jax.primitives_in(body) for body in inner)

    @property
    def _leaves(self) -> frozenset[Primitive]:
        return self._primitives - frozenset(_jax.CONTROL_FLOW.values())


@dataclasses.dataclass(frozen=True)
class Interpreter[Context]:
    """Runs a jaxpr with a context.

    An equation that concerns none of the dispatcher's primitives is bound again unchanged, bodies and all, so that
    custom derivatives, kernels, callbacks and solves are what they were.

    Attributes:
        dispatcher: the handlers.
        label: what the interpretation is called in messages.
        varying: manual mesh axes over which every value is typed as varying, whatever the traced program says.
    """

    dispatcher: Dispatcher[Context]
    label: str = "interpretation"
    varying: frozenset[str] = frozenset()

    def __call__(self, jaxpr: Jaxpr, ctx: Context, *args: TracerValue) -> tuple[list[TracerValue], Context]:
        """Returns the results of ``jaxpr`` on ``args``, and the context after its last equation."""
        inner, consts = getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts
        return self.run(inner, consts, ctx, *args)

    def run(self, jaxpr: Jaxpr, consts: Any, ctx: Context, *args: TracerValue) -> tuple[list[TracerValue], Context]:
        """Like calling, with the constants apart."""
        env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        last = _last_uses(jaxpr)
        for index, eqn in enumerate(jaxpr.eqns):
            invals = [v.val if isinstance(v, Literal) else env[v] for v in eqn.invars]
            with _jax.equation_context(eqn):
                ctx, outvals = self._apply(ctx, eqn, self._cast(invals))
            env.update(zip(eqn.outvars, self._cast(outvals), strict=True))
            for var in last.get(index, ()):
                env.pop(var, None)
        return self._cast([v.val if isinstance(v, Literal) else env[v] for v in jaxpr.outvars]), ctx

    def _cast(self, values: list[TracerValue]) -> list[TracerValue]:
        return [mesh.cast_varying(x, self.varying) for x in values] if self.varying else values

    def _apply(self, ctx: Context, eqn: JaxprEqn, invals: list[TracerValue]) -> HandlerResult[Context]:
        handler = self.dispatcher.handler(eqn.primitive)
        as_it_is = not _jax.bodies(eqn) or handler is None or _jax.has_own_rule(eqn) or not self._retyped(eqn)
        if as_it_is and not self.dispatcher.concerns(eqn):
            return HandlerResult(ctx, self.bound(eqn, invals))
        if handler is None:
            raise _no_rule(self.label, eqn)
        return handler(self, ctx, eqn, invals)

    def _retyped(self, eqn: JaxprEqn) -> bool:
        """Whether the types inside of an equation's bodies do not hold here: they name other axes."""
        return bool(self.varying) or _jax.moved(eqn)

    def bound(self, eqn: JaxprEqn, invals: list[TracerValue]) -> list[TracerValue]:
        """Binds an equation again on new operands, with its own derivative rule if it has one."""
        if eqn.primitive is _jax.pvary_p:
            return [mesh.cast_varying(invals[0], frozenset(eqn.params["axes"]))]
        if not (_jax.has_own_rule(eqn) and self._retyped(eqn)):
            return _jax.bind(eqn, invals)
        plain = Interpreter(self.dispatcher.without_effects(), varying=self.varying)
        return _jax.bind_rules(eqn, invals, lambda jaxpr, consts, *args: plain.run(jaxpr, consts, (), *args)[0])


def _last_uses(jaxpr: Jaxpr) -> dict[int, list[Any]]:
    last: dict[Any, int] = {}
    for index, eqn in enumerate(jaxpr.eqns):
        last.update({v: index for v in [*eqn.invars, *eqn.outvars] if not isinstance(v, Literal)})
    for v in jaxpr.outvars:
        if not isinstance(v, Literal):
            last.pop(v, None)
    uses: dict[int, list[Any]] = {}
    for var, index in last.items():
        uses.setdefault(index, []).append(var)
    return uses


def first_effect(jaxpr: Jaxpr) -> JaxprEqn | None:
    """Returns the first effect equation in ``jaxpr`` or in a body within it."""
    for eqn in jaxpr.eqns:
        inner = _jax.bodies(eqn)
        if not inner and _jax.interpreted_effect in eqn.effects:
            return eqn
        for body in inner:
            if (found := first_effect(body)) is not None:
                return found
    return None


def _no_rule(label: str, eqn: JaxprEqn) -> UnsupportedPrimitiveError:
    found = next((e for body in _jax.bodies(eqn) if (e := first_effect(body)) is not None), eqn)
    return UnsupportedPrimitiveError(
        f"'{eqn.primitive}' holds an effect, and {label} has no rule for it",
        site=found.params.get("name"),
        source=found.params.get("source", _jax.equation_line(eqn)),
        expected=f"a handler for '{eqn.primitive}'",
        found="none",
        fix=f"take the site out of '{eqn.primitive}', or give the interpreter's dispatcher a handler for it",
    )


def reinterpret[Context, **P, R](
    fn: Callable[P, R], interpreter: Interpreter[Context]
) -> Callable[Concatenate[Context, P], tuple[R, Context]]:
    """Returns ``(ctx, *args, **kwargs) -> (out, ctx)``: traces ``fn`` once and interprets it.

    Args:
        fn: any function that JAX can trace.
        interpreter: gives the primitives their meaning.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from ppleffects.effects import HandlerResult, Interpreter, default_dispatcher, reinterpret
        >>> from jax.extend.core.primitives import sin_p
        >>> def count(interpreter, ctx, eqn, invals):
        ...     return HandlerResult(ctx + 1, [eqn.primitive.bind(*invals, **eqn.params)])
        >>> counting = Interpreter(default_dispatcher().extended({sin_p: count}))
        >>> def f(x):
        ...     return jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=5)[0]
        >>> out, sines = reinterpret(f, counting)(0, 1.0)
        >>> int(sines)
        5
    """

    def inner(ctx: Context, *args: P.args, **kwargs: P.kwargs) -> tuple[R, Context]:
        leaves, tree = jax.tree.flatten((args, kwargs))

        def flat(*leaves):
            args, kwargs = jax.tree.unflatten(tree, leaves)
            return fn(*args, **kwargs)  # pyright: ignore[reportCallIssue]

        traced = tracing.trace(flat, *leaves)
        outs, ctx = interpreter.run(traced.jaxpr, traced.consts, ctx, *leaves)
        return jax.tree.unflatten(traced.out_tree, outs), ctx

    return inner
