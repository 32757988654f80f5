"""When are two traced programs the same? Their equations are compared, not the functions that made them."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ppleffects.effects import _jax
from ppleffects.effects._jax import Jaxpr, Literal


class _Same:
    """An object that equals only itself; it is kept alive, so that its identity is not used again."""

    def __init__(self, value: Any):
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def structure_of(jaxpr: Jaxpr) -> Any:
    """Returns a hashable object that is equal for programs of equal equations, types, parameters, literals and scopes.

    Constants are not part of it: they are data. Parameters that cannot be compared (a function, a rule for
    derivatives) are the same only if they are one object: a program is then compiled once too often, never once too
    seldom.
    """
    names: dict[Any, int] = {}

    def name(var: Any) -> Any:
        if isinstance(var, Literal):
            return (_array(var.val), var.aval)
        return names.setdefault(var, len(names))

    inputs = tuple((name(v), v.aval) for v in [*jaxpr.constvars, *jaxpr.invars])
    equations = tuple(
        (
            eqn.primitive,
            _Same(eqn.ctx),
            str(eqn.source_info.name_stack),
            tuple(map(name, eqn.invars)),
            tuple((name(v), v.aval) for v in eqn.outvars),
            tuple(sorted(((k, _parameter(v)) for k, v in eqn.params.items()), key=lambda item: item[0])),
        )
        for eqn in jaxpr.eqns
    )
    return (inputs, equations, tuple(map(name, jaxpr.outvars)))


def _array(value: Any) -> Any:
    if isinstance(value, jax.Array) and not jax.dtypes.issubdtype(value.dtype, jax.dtypes.extended):
        value = np.asarray(value)
    if isinstance(value, np.ndarray | np.generic):
        return (value.shape, str(value.dtype), value.tobytes())
    return _Same(value) if isinstance(value, jax.Array) else _parameter(value)  # pragma: no cover - JAX has no others


def _parameter(value: Any) -> Any:
    if hasattr(value, "eqns"):
        inner = getattr(value, "jaxpr", value)
        return ("jaxpr", structure_of(inner), tuple(map(_Same, value.consts)))
    if isinstance(value, tuple | list):
        return (type(value).__name__, tuple(map(_parameter, value)))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return _array(value)
    if isinstance(value, dict):  # pragma: no cover - JAX refuses parameters that cannot be hashed
        return ("dict", tuple(sorted(((str(k), _parameter(v)) for k, v in value.items()), key=lambda item: item[0])))
    if isinstance(value, float | complex):
        return _array(np.asarray(value))
    if callable(value) and not isinstance(value, type | _jax.Primitive):
        return _Same(value)
    try:
        hash(value)
    except TypeError:  # pragma: no cover - the same
        return _Same(value)
    return (type(value), value)
