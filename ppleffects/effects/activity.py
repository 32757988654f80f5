"""A cond or while under vmap whose predicate differs between lanes: effects happen only in the lanes that are in it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import Array

from ppleffects.effects import _jax
from ppleffects.effects._jax import Jaxpr, JaxprEqn
from ppleffects.effects.context import Shared
from ppleffects.effects.handlers import default_dispatcher, rebind_lane_cond
from ppleffects.effects.interpreter import HandlerResult, Interpreter
from ppleffects.effects.primitive import ACTIVATE
from ppleffects.errors import UnsupportedPrimitiveError


def _rebind(interpreter: Interpreter[Shared], ctx: Shared, eqn: JaxprEqn, invals: list[Any]) -> HandlerResult[Shared]:
    activate = ACTIVATE[eqn.primitive]
    if activate is None:
        raise UnsupportedPrimitiveError(
            f"'{eqn.primitive}' stands in a cond or while whose predicate differs between the lanes of a vmap",
            site=eqn.params.get("name"),
            source=eqn.params.get("source", _jax.equation_line(eqn)),
            expected="an effect primitive with an activate= rule",
            found=f"'{eqn.primitive}' without one",
            fix="give the effect primitive an activate= rule, or use lax.map over the lanes instead of vmap",
        )
    operands, params = activate(ctx.value, invals, **eqn.params)
    return HandlerResult(ctx, eqn.primitive.bind(*operands, **params))


def activated(body: Jaxpr) -> Callable[..., list[Any]]:
    """Returns ``(flag, *args) -> outs``: runs ``body``, whose effects happen only where ``flag`` is True."""
    handlers = {**dict.fromkeys(ACTIVATE, _rebind), _jax.lane_cond_p: rebind_lane_cond}
    interpreter = Interpreter(default_dispatcher().extended(handlers), "vmap")

    def run(flag: Array, *args: Any) -> list[Any]:
        return interpreter(body, Shared(flag), *args)[0]

    return run


_jax.batch_control_flow(activated)
