"""Functions that are traced once: their equations, which can be run and interpreted again and again."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Jaxpr, jaxpr_as_fun


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A function that was traced once.

    Attributes:
        closed: its equations and the arrays and tracers that it closed over.
        out_tree: the tree of its result.
    """

    closed: Any
    out_tree: Any

    @property
    def jaxpr(self) -> Jaxpr:
        """The equations; constants are in ``consts``."""
        return getattr(self.closed, "jaxpr", self.closed)

    @property
    def consts(self) -> tuple[Any, ...]:
        """Arrays and tracers that the function closed over."""
        return tuple(self.closed.consts)

    @property
    def out_avals(self) -> list[Any]:
        """The abstract leaves of the result."""
        return list(self.closed.out_avals)

    @property
    def abstract_result(self) -> Any:
        """The result, its leaves abstract."""
        return jax.tree.unflatten(self.out_tree, self.out_avals)

    def __call__(self, *args: Any) -> Any:
        """Runs the traced equations; the function itself is not called again."""
        outs = jaxpr_as_fun(self.closed)(*jax.tree.leaves(args))
        return jax.tree.unflatten(self.out_tree, outs)


def trace(fn: Callable[..., Any], *args: Any) -> Traced:
    """Traces ``fn`` at the types of ``args`` (pytrees of arrays, tracers or abstract values)."""
    tree = None

    def flat(*args):
        nonlocal tree
        leaves, tree = jax.tree.flatten(fn(*args))
        return leaves

    return Traced(jax.make_jaxpr(flat)(*args), tree)


def closed(fn: Callable[..., Any], *args: Any) -> Jaxpr:
    """Traces ``fn`` once, arrays that it closes over included."""
    return jax.make_jaxpr(fn)(*args)


def call(body: Jaxpr, *args: Any) -> list[Any]:
    """Runs the equations of a traced body."""
    return jaxpr_as_fun(body)(*args)
