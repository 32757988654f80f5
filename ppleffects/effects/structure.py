"""When are two traced programs the same? Their equations are compared, not the functions that made them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
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


def described(jaxpr: Jaxpr) -> list[str]:
    """Returns the equations in words that are the same in every process: a line for each, and none of its source.

    Functions, rules for derivatives among them, are told by their names alone, and constants, which are data, not at
    all. Of a dataclass its ``repr`` says which fields count.
    """
    names: dict[Any, int] = {}

    def name(var: Any) -> str:
        return f"{_worded(var.val)}" if isinstance(var, Literal) else f"v{names.setdefault(var, len(names))}"

    def typed(variables: Any) -> str:
        return " ".join(f"{name(v)}:{_stable(str(v.aval))}" for v in variables)

    lines = [f"in {typed([*jaxpr.constvars, *jaxpr.invars])}"]
    for eqn in jaxpr.eqns:
        inputs, inner = " ".join(map(name, eqn.invars)), []
        parameters = []
        for key, value in sorted(eqn.params.items()):
            if key == "source":
                continue
            bodies = [x for x in (value if isinstance(value, tuple | list) else (value,)) if hasattr(x, "eqns")]
            parameters += [] if bodies else [f"{key}={_worded(value)}"]
            inner += [f"  {key}: {line}" for body in bodies for line in described(getattr(body, "jaxpr", body))]
        lines += [f"{typed(eqn.outvars)} = {eqn.primitive}[{' '.join(parameters)}] {inputs}", *inner]
    return [*lines, f"out {' '.join(map(name, jaxpr.outvars))}"]


def _worded(value: Any) -> str:
    """A parameter or literal in words that tell nothing of this process."""
    if hasattr(value, "eqns"):  # a program within a parameter
        return "; ".join(described(getattr(value, "jaxpr", value)))
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        array = np.asarray(value)
        return f"{array.dtype}{list(array.shape)}{array.tobytes().hex() if array.size <= 4 else _digest(array)}"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(_worded, value))})"
    if isinstance(value, set | frozenset):
        return f"{{{', '.join(sorted(map(_worded, value)))}}}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.repr}
        return f"{type(value).__name__}({', '.join(f'{key}={_worded(x)}' for key, x in fields.items())})"
    if isinstance(value, jax.tree_util.PyTreeDef):  # what NumPyro calls static is in another order in each process
        return f"({' '.join(sorted(re.findall(r'[\w.]+', str(value))))})"
    if callable(value) and not isinstance(value, type | _jax.Primitive):
        return getattr(value, "__qualname__", type(value).__qualname__)
    return _stable(repr(value)) if isinstance(value, str | float | complex) else _stable(str(value))


def _digest(array: np.ndarray) -> str:
    return hashlib.blake2b(array.tobytes(), digest_size=8).hexdigest()


def _stable(text: str) -> str:
    """A text without addresses, and with the members of sets in order."""
    text = " ".join(re.sub(r" at 0x[0-9a-f]+", "", text).split())
    return re.sub(r"\{([^{}:]*)\}", lambda found: "{" + ", ".join(sorted(found[1].split(", "))) + "}", text)
