"""Two effects with primitives of their own: ``log`` writes values down by name, ``check`` says what must hold."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any, override

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive

from examples.effects.interpretation import Effect, interpreted
from examples.effects.parts import Axis, Entry, Records, wide
from ppleffects.effects import effect_primitive


def _recording_primitive(name: str) -> Primitive:
    """A primitive of two operands: a value, and whether it is reached; both have all lanes."""

    def batch(lane, operands, *, lanes, **params):
        whole = [
            x if mapped else jnp.broadcast_to(x, (lane.size, *jnp.shape(x)))
            for x, mapped in zip(operands, lane.mapped, strict=True)
        ]
        label = Axis("lane", "lane" if lane.name is None else str(lane.name))
        return primitive.bind(*whole, lanes=(label, *lanes), **params), []

    def activate(flag, operands, **params):
        value, active = operands
        return [value, active & flag], params

    primitive = effect_primitive(name, lambda value, active, **_: [], batch, activate)
    return primitive


log_p = _recording_primitive("log")
check_p = _recording_primitive("check")


def log(name: str, value: Any) -> None:
    """Writes ``value`` down by name."""
    log_p.bind(jnp.asarray(value), jnp.asarray(True), name=name, source=_callers_line(), lanes=())


def check(name: str, predicate: Any) -> None:
    """Says that ``predicate``, all entries of it, must be True."""
    failed = ~jnp.all(jnp.asarray(predicate, bool))
    check_p.bind(failed, jnp.asarray(True), name=name, source=_callers_line(), lanes=())


def _callers_line() -> str:
    frame = inspect.stack(0)[2]
    return f"{Path(frame.filename).name}:{frame.lineno}"


def _handle_log(part, eqn, invals):
    value, active = map(jnp.asarray, invals)
    missing = jnp.asarray(jnp.nan if jnp.issubdtype(value.dtype, jnp.inexact) else 0, value.dtype)
    value = jnp.where(wide(active, value), value, missing)
    return part.plus({eqn.params["name"]: Entry(value, active, eqn.params["lanes"], eqn.params["source"])}), []


def _handle_check(part, eqn, invals):
    failed, active = map(jnp.asarray, invals)
    entry = Entry(failed & active, active, eqn.params["lanes"], eqn.params["source"])
    return part.plus({eqn.params["name"]: entry}), []


class CheckFailed(AssertionError):
    """A check did not hold."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Failures(Records):
    """Checks by name: the value of an entry is True where its check has failed; a while loop keeps whether one has."""

    @override
    def accumulate(self, frame, total, emitted):
        return jax.tree.map(jnp.logical_or, total, emitted)

    def throw(self) -> None:
        """Raises ``CheckFailed`` on the host, if a check has failed."""
        lines = [_failure(name, entry) for name, entry in sorted(self.entries.items()) if np.any(entry.value)]
        if lines:
            raise CheckFailed("\n".join(lines))


def _failure(name: str, entry: Entry) -> str:
    failed = np.asarray(entry.value)
    outer = (Axis("lane", "lane"),) * (failed.ndim - len(entry.axes))  # of a vmap around the interpreted function
    found = np.argwhere(failed)
    where = [f"{axis.name} {i}" for axis, i in zip([*outer, *entry.axes], found[0], strict=True)]
    more = f" ({len(found)} of {np.sum(entry.active)} failed)" if failed.ndim else ""
    return f"check '{name}' at {entry.source} failed" + (f" in {', '.join(where)}" if where else "") + more


LOG = Effect(Records(), {log_p: _handle_log})
CHECK = Effect(Failures(), {check_p: _handle_check})


def logs(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``(*args) -> (out, {name: Entry})``: all that ``fn`` logs."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        out, ctx = interpreted(fn, log=LOG)(*args, **kwargs)
        return out, ctx["log"].entries

    return call


def checks(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``(*args) -> (out, Failures)``; ``throw()`` of these raises on the host."""

    @functools.wraps(fn)
    def call(*args, **kwargs):
        out, ctx = interpreted(fn, check=CHECK)(*args, **kwargs)
        return out, ctx["check"]

    return call
