"""How to make an effect primitive: an operation that means nothing until an interpretation handles it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ppleffects.effects import _jax
from ppleffects.effects._jax import Lane, Primitive
from ppleffects.effects.interpreter import first_effect
from ppleffects.errors import UnhandledEffectError, UnsupportedPrimitiveError

__all__ = ["Lane", "effect_primitive"]


type Activate = Callable[..., tuple[Sequence[Any], dict[str, Any]]]

ACTIVATE: dict[Primitive, Activate | None] = {}


def effect_primitive(
    name: str,
    abstract_eval: Callable[..., list[Any]],
    batch: Callable[..., tuple[Sequence[Any], Sequence[int | None]]],
    activate: Activate | None = None,
) -> Primitive:
    """Makes a primitive that every JAX transformation keeps, and that fails unless an interpretation handles it.

    Its parameters may hold ``name`` (the site) and ``source`` (``file.py:line``); errors show them.

    Args:
        name: the primitive's name, as shown in a jaxpr.
        abstract_eval: ``(*avals, **params) -> list of avals``: the types of its results.
        batch: ``(lane, operands, **params) -> (results, axes)``: binds the primitive again inside of one more
            ``vmap``. Batched operands have the axis of the lane in front. It is called for every vmap, also when no
            operand is batched.
        activate: ``(flag, operands, **params) -> (operands, params)``: what to bind so that the effect happens only
            where ``flag``, a boolean scalar, is True. It is needed in a cond or while whose predicate differs between
            the lanes of a vmap, which is refused otherwise.

    Returns:
        The primitive; ``bind`` returns a list.

    Example:
        >>> from ppleffects.effects import effect_primitive
        >>> log_p = effect_primitive(
        ...     "log", lambda x, **params: [], lambda lane, xs, **params: (log_p.bind(*xs, **params), [])
        ... )
        >>> log_p.bind(1.0, name="x")
        Traceback (most recent call last):
        ...
        ppleffects.errors.UnhandledEffectError: site 'x': 'log' ran outside of an interpretation...
    """
    primitive = Primitive(name)

    def unhandled(**params):
        return _unhandled_error(name, params)

    def refuse_lane(**params):
        return UnsupportedPrimitiveError(
            f"'{name}' stands in a vmap with spmd_axis_name=, which lays its lanes on a mesh axis",
            site=params.get("name"),
            source=params.get("source"),
            expected="a vmap whose lanes lie on no mesh axis",
            found="spmd_axis_name=",
            fix="leave spmd_axis_name= out, or map over the mesh axis by jax.shard_map",
        )

    _jax.register_effect_rules(primitive, abstract_eval, batch, unhandled, refuse_lane)
    ACTIVATE[primitive] = activate
    return primitive


def _unhandled_error(primitive: str, params: dict[str, Any]) -> Exception:
    return UnhandledEffectError(
        f"'{primitive}' ran outside of an interpretation, where it means nothing",
        site=params.get("name"),
        source=params.get("source"),
        expected="an interpretation around the function that holds it",
        found="a call of the function by itself",
        fix="pass the function that holds it to an interpretation (for a model: ppl.simulate(model)(key), "
        "ppl.log_density(model)(values) ...) instead of calling it",
    )


def _unhandled_lane_cond(**params: Any) -> Exception:
    found = (first_effect(body) for body in _jax.jaxprs_in(params))
    site = next(eqn for eqn in found if eqn is not None)
    return _unhandled_error(str(site.primitive), site.params)


def _first_site(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of the first effect equation in the bodies of an equation."""
    found = (first_effect(body) for body in _jax.jaxprs_in(params))
    return next((eqn.params for eqn in found if eqn is not None), {})


def _batching_error(primitive: Primitive, params: dict[str, Any]) -> Exception:
    params = _first_site(params)
    return UnsupportedPrimitiveError(
        f"'{primitive}', a function with its own rule for vmap, holds an effect of which the rule knows nothing",
        site=params.get("name"),
        source=params.get("source"),
        expected="a function without effects",
        found=f"an effect in '{primitive}'",
        fix="take the site out of the function and pass its value in",
    )


def _derivative_error(primitive: Primitive, params: dict[str, Any]) -> Exception:
    """The error for an effect that is differentiated before it is interpreted: it would be lost, or counted twice."""
    params = _first_site(params) or params
    return UnsupportedPrimitiveError(
        f"an effect in '{primitive}' is differentiated inside of the model (grad, jvp, linearize, hessian ...)",
        site=params.get("name"),
        source=params.get("source"),
        expected="a differentiated function without effects",
        found=f"a derivative through '{primitive}'",
        fix="take the site out of the differentiated function and pass its value in",
    )


_jax.refuse_derivatives(_derivative_error)
_jax.refuse_custom_vmap(_batching_error)
_jax.refuse_lane_cond(_unhandled_lane_cond)
