"""What a site depends on: found by following values through the equations, without computing any."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ppleffects.effects import _jax
from ppleffects.effects._jax import Jaxpr, JaxprEqn, Literal
from ppleffects.interpretations.layout import KINDS
from ppleffects.language import blocked_p

type Names = frozenset[Any]  # of sites, and what inputs of the program are marked with

NOTHING: Names = frozenset()


def parents(jaxpr: Jaxpr, marks: Sequence[Names] | None = None) -> dict[str, Names]:
    """For each site, the sites whose values reach its operands without passing through another site.

    A site in a branch or a loop also depends on what decides whether it is reached.

    Args:
        jaxpr: the program.
        marks: for each of its inputs, what is found in the place of a site's name where it reaches one.
    """
    edges: dict[str, Names] = {}
    _follow(jaxpr, [NOTHING] * len(jaxpr.invars) if marks is None else marks, NOTHING, edges)
    return edges


def _follow(jaxpr: Jaxpr, given: Sequence[Names], around: Names, edges: dict[str, Names]) -> list[Names]:
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    env: dict[Any, Names] = dict(zip(jaxpr.invars, given, strict=True))

    def read(var: Any) -> Names:
        return NOTHING if isinstance(var, Literal) else env.get(var, NOTHING)

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if eqn.primitive in KINDS:
            name = eqn.params["name"]
            edges[name] = edges.get(name, NOTHING).union(around, *operands) - {name}
            results = [frozenset({name})] * len(eqn.outvars)
        elif any(_jax.has_effect(body) for body in _jax.bodies(eqn)):
            results = _FLOWS[eqn.primitive](eqn, operands, around, edges)
        else:
            results = [NOTHING.union(*operands)] * len(eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(v) for v in jaxpr.outvars]


type Flow = Callable[[JaxprEqn, list[Names], Names, dict[str, Names]], list[Names]]


def _call(eqn: JaxprEqn, operands: list[Names], around: Names, edges: dict[str, Names]) -> list[Names]:
    (body,) = _jax.bodies(eqn)
    return _follow(body, operands, around, edges)


def _scan(eqn: JaxprEqn, operands: list[Names], around: Names, edges: dict[str, Names]) -> list[Names]:
    scan = _jax.scan_parts(eqn, operands)
    carry = list(scan.carry)
    while True:
        outs = _follow(scan.body, [*scan.consts, *carry, *scan.xs], around, edges)
        grown = [old | new for old, new in zip(carry, outs[: len(carry)], strict=True)]
        if grown == carry:
            return [*grown, *outs[len(carry) :]]
        carry = grown


def _while(eqn: JaxprEqn, operands: list[Names], around: Names, edges: dict[str, Names]) -> list[Names]:
    loop = _jax.while_parts(eqn, operands)
    carry = list(loop.carry)
    while True:
        (decides,) = _follow(loop.predicate, [*loop.predicate_consts, *carry], around, edges)
        outs = _follow(loop.body, [*loop.body_consts, *carry], around | decides, edges)
        grown = [old | new | decides for old, new in zip(carry, outs, strict=True)]
        if grown == carry:
            return grown
        carry = grown


def _cond(eqn: JaxprEqn, operands: list[Names], around: Names, edges: dict[str, Names]) -> list[Names]:
    index, *rest = operands
    taken = [[NOTHING, *rest], rest][eqn.primitive is _jax.CONTROL_FLOW["cond"]]
    outs = [_follow(body, taken, around | index, edges) for body in _jax.bodies(eqn)]
    return [index.union(*choices) for choices in zip(*outs, strict=True)]


_FLOWS: dict[Any, Flow] = {
    _jax.CONTROL_FLOW["jit"]: _call,
    _jax.CONTROL_FLOW["checkpoint"]: _call,
    _jax.CONTROL_FLOW["shard_map"]: _call,
    blocked_p: _call,
    _jax.CONTROL_FLOW["scan"]: _scan,
    _jax.CONTROL_FLOW["while"]: _while,
    _jax.CONTROL_FLOW["cond"]: _cond,
    _jax.CONTROL_FLOW["lane_cond"]: _cond,
}
