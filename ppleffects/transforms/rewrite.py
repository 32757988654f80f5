"""How a model is made from a model: it is traced, and its sites are bound again, changed."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from ppleffects.effects import HandlerResult, Interpreter, Shared, _jax, default_dispatcher, mesh, rebind_lane_cond
from ppleffects.effects._jax import Primitive
from ppleffects.errors import ValuesError
from ppleffects.interpretations.blocks import rebind_blocked
from ppleffects.interpretations.parts import Context, Inputs, Totals
from ppleffects.interpretations.program import Program, trace_model
from ppleffects.interpretations.shards import shard_map_rule
from ppleffects.language import SiteParams, blocked_p, deterministic_p, factor_p, observe_p, sample_p
from ppleffects.language.site import bind_params

SITES = (sample_p, observe_p, factor_p, deterministic_p)

type Rule = Callable[[Context, Any, list[Any]], Sequence[Any] | None]
type Model = Callable[..., Any]


def rewrite(
    model: Model,
    rule: Rule,
    *,
    inputs: Callable[[Program], Mapping[str, Any]] = lambda _: {},
    shared: Any = (),
) -> Model:
    """Returns a model in which ``rule`` has bound the sites of ``model`` again.

    Args:
        model: a function with sites in it.
        rule: ``(ctx, eqn, operands) -> results``; None keeps the site as it is.
        inputs: from the traced model to values by name, in the layout of their sites; a rule finds its slice in
            ``ctx.inputs.values``.
        shared: a pytree of arrays that a rule finds in ``ctx.shared.value``, whatever surrounds the site.
    """

    def handle(interpreter, ctx, eqn, invals):
        outs = rule(ctx, eqn, invals)
        return HandlerResult(ctx, _jax.bind(eqn, invals) if outs is None else list(outs))

    handlers = {
        **dict.fromkeys(SITES, handle),
        _jax.shard_map_p: shard_map_rule,
        _jax.lane_cond_p: rebind_lane_cond,
        blocked_p: rebind_blocked,
    }
    interpreter = Interpreter(default_dispatcher().extended(handlers), "a transformation of the model")

    @functools.wraps(model)
    def transformed(*args: Any, **kwargs: Any) -> Any:
        traced = trace_model(model, args, kwargs, part=True)
        program = traced.program
        ctx = Context(Inputs(dict(inputs(program))), None, None, Totals({}), Shared(shared))
        outs, _ = interpreter.run(program.jaxpr, traced.consts, ctx, *traced.args)
        return jax.tree.unflatten(program.out_tree, outs)

    return transformed


def rebind(primitive: Primitive, site: SiteParams, operands: Sequence[Any], **params: Any) -> list[Any]:
    """Binds a site's primitive with changed parameters."""
    return primitive.bind(*operands, **params, **bind_params(site))


def typed_like(eqn: Any, value: Any) -> Any:
    """Gives a value the dtype and the mesh axes of the site's own value."""
    aval = _jax.aval_of(eqn.outvars[0])
    return mesh.cast_varying(jax.numpy.asarray(value, aval.dtype), _jax.varying(aval))


def check_names(program: Program, names: Sequence[str], kinds: Sequence[str], what: str) -> None:
    """Checks that every name is one of the model's sites.

    Raises:
        ValuesError: there is no such site.
    """
    known = program.named(*kinds)
    others = program.named("deterministic")
    for name in names:
        if name in others and name not in known:
            raise ValuesError(
                f"{what} names a deterministic, which has no density",
                site=name,
                source=others[name].site.source,
                expected=f"one of {list(known)}",
                found=f"'{name}'",
                fix="leave it out",
            )
        if name not in known:
            close = difflib.get_close_matches(name, list(known), 1)
            raise ValuesError(
                f"{what} names a site that the model '{program.label}' does not have",
                site=name,
                expected=f"one of {list(known)}",
                found=f"'{name}'",
                fix=f"did you mean '{close[0]}'?" if close else "leave it out",
            )
