"""Two effects that observe every equation: how often each primitive runs, and the flops of each named scope."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Primitive
from jax.extend.core import primitives as p

from examples.effects.interpretation import Effect, interpreted
from examples.effects.parts import Sums
from ppleffects.errors import UnsupportedPrimitiveError

# --- how often each primitive runs ------------------------------------------------------------------------------------

COUNT = Effect(Sums(), observe=lambda part, eqn, scope: part.plus({eqn.primitive.name: 1}))


def counts(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``(*args) -> (out, {primitive: number})``: how often each primitive runs, on all shards together."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        out, ctx = interpreted(fn, count=COUNT)(*args, **kwargs)
        return out, ctx["count"].terms

    return call


# --- floating-point operations by named scope -------------------------------------------------------------------------


def _type(var: Any) -> Any:
    return var.aval


def _size(var: Any) -> int:
    return math.prod(_type(var).shape)


def _dot(eqn: JaxprEqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    return 2 * _size(eqn.outvars[0]) * math.prod(_type(eqn.invars[0]).shape[d] for d in contracted)


def _elementwise(eqn: JaxprEqn) -> int:
    return _size(eqn.outvars[0])


def _reduction(eqn: JaxprEqn) -> int:
    return _size(eqn.invars[0]) - _size(eqn.outvars[0])


def _none(eqn: JaxprEqn) -> int:
    return 0


type Rules = Mapping[Primitive, Callable[[JaxprEqn], int]]


def _rules(rule: Callable[[JaxprEqn], int], names: str) -> Rules:
    found = (getattr(p, f"{name}_p", None) for name in names.split())  # an older JAX has not all of them
    return {primitive: rule for primitive in found if primitive is not None}


FLOPS: Rules = {
    p.dot_general_p: _dot,
    **_rules(
        _elementwise,
        "add sub mul div rem neg abs sign max min square sqrt rsqrt cbrt pow integer_pow exp exp2 log log1p expm1 sin "
        "cos tan asin acos atan atan2 sinh cosh tanh logistic erf erfc erf_inv lgamma digamma floor ceil round clamp "
        "one_minus_square add_jaxvals cumsum cumprod cummax cummin",
    ),
    **_rules(_reduction, "reduce_sum reduce_prod reduce_max reduce_min"),
    **_rules(
        _none,
        "broadcast_in_dim reshape transpose squeeze slice dynamic_slice dynamic_update_slice concatenate pad rev "
        "gather scatter select_n convert_element_type bitcast_convert_type copy stop_gradient iota empty2 device_put "
        "name reduce_precision psum pmax pmin all_gather ppermute sharding_constraint",
    ),
}
# Primitives that JAX does not export, by name.
MOVES = {"stack", "unstack", "split", "tile", "pvary", "psum_invariant", "all_gather_invariant", "reshard"}


def _observe_flops(rules: Rules, part: Sums, eqn: JaxprEqn, scope: str) -> Sums:
    if eqn.effects or not any(jnp.issubdtype(_type(v).dtype, jnp.inexact) for v in eqn.outvars):
        return part  # an effect of others, which costs nothing until it is interpreted, or no floating point
    if eqn.primitive.name in MOVES:
        return part
    if eqn.primitive not in rules:
        raise UnsupportedPrimitiveError(
            f"no rule says how many flops '{eqn.primitive}' takes",
            expected="a rule (eqn) -> flops for each primitive whose result is floating-point",
            found="none",
            fix="give one: flops(fn, {primitive: rule})",
        )
    amount = rules[eqn.primitive](eqn)
    return part.plus({scope: amount}) if amount else part


def flops_effect(rules: Rules | None = None) -> Effect:
    """The effect whose context is the flops by scope; ``rules`` are added to ``FLOPS``."""
    observe = functools.partial(_observe_flops, {**FLOPS, **(rules or {})})
    return Effect(Sums(dtype=float, over_shards=lax.pmax), observe=observe)


def flops(fn: Callable[..., Any], rules: Rules | None = None) -> Callable[..., Any]:
    """Returns ``(*args) -> (out, {scope: flops})``: of one device; inside of a shard_map, of the one with most."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        out, ctx = interpreted(fn, flops=flops_effect(rules))(*args, **kwargs)
        return out, ctx["flops"].terms

    return call
