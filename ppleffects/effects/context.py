"""The context algebra: how each part of a context passes a control-flow boundary.

A context is any frozen pytree. A leaf of it is state: it is threaded through loops, and every branch of a cond must
hand it on. A node that is a ``Part`` says itself what happens: whether it is sliced along a scan, summed, stacked, or
merged over the branches of a cond. Handlers know parts only by this interface, so each control-flow rule is written
once, for every interpretation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, override

import jax

from ppleffects.effects._jax import Jaxpr, JaxprEqn, equation_line
from ppleffects.errors import ContextStructureError


@dataclasses.dataclass(frozen=True)
class Frame:
    """One boundary that a context passes.

    Attributes:
        kind: ``"scan"``, ``"while"``, ``"cond"`` or ``"shard_map"``.
        eqn: the equation.
        body: what is interpreted inside; the first branch of a cond.
        length: number of steps of a scan, else 0.
        axes: the manual mesh axes over which the predicate of a cond or while varies: what is inside may be reached on
            some shards and not on others.
    """

    kind: str
    eqn: JaxprEqn
    body: Jaxpr
    length: int = 0
    axes: frozenset[str] = frozenset()


class Crossing(NamedTuple):
    """What a part gives to a loop: ``shared`` by all steps, ``carried`` from step to step, ``sliced`` along axis 0."""

    shared: Any = ()
    carried: Any = ()
    sliced: Any = ()


class Part:
    """One part of a context. The methods are called in the order in which they stand here."""

    def enter(self, frame: Frame) -> Crossing:
        """Returns what goes into the body."""
        raise NotImplementedError

    def inside(self, frame: Frame, crossing: Crossing) -> Part:
        """Returns the part as the body sees it; ``crossing`` holds the values of the present step."""
        raise NotImplementedError

    def leave(self, frame: Frame) -> tuple[Any, Any]:
        """Returns, from the part after the body, what is carried on and what this step or branch emits."""
        raise NotImplementedError

    def align(self, frame: Frame, emitted: Sequence[Any]) -> list[Callable[[Any], Any]]:
        """Returns, for each branch of a cond, a function that gives what it emits the structure of all branches.

        ``emitted`` holds the abstract emissions of the branches.
        """
        return [lambda value: value for _ in emitted]

    def select(self, frame: Frame, emitted: Sequence[Any]) -> Any:
        """Returns the emissions of all branches of a cond that each lane of a vmap takes its own branch of, as one."""
        if not jax.tree.leaves(emitted):
            return emitted[0]
        raise ContextStructureError(
            f"{type(self).__name__} does not say what becomes of it where each lane of a vmap takes its own branch",
            source=equation_line(frame.eqn),
            expected="select= on the Part",
            found="a Part without it",
            fix="define select= on the Part, or use lax.map over the lanes instead of vmap",
        )

    def start(self, frame: Frame, zeros: Any) -> Any:
        """Returns the running total of a while loop before its first iteration; ``zeros`` are zero emissions."""
        return zeros

    def accumulate(self, frame: Frame, total: Any, emitted: Any) -> Any:
        """Returns the running total after one more iteration of a while loop."""
        return jax.tree.map(lambda t, e: t + e, total, emitted)

    def rejoin(self, frame: Frame, carried: Any, emitted: Any) -> Part:
        """Returns, from the part before the boundary, the part after it.

        A scan's emissions are stacked; of a while loop it is the running total.
        """
        raise NotImplementedError


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class State(Part):
    """A value that is threaded through: what a bare leaf of a context is."""

    value: Any

    @override
    def enter(self, frame):
        return Crossing(carried=self.value)

    @override
    def inside(self, frame, crossing):
        return State(crossing.carried)

    @override
    def leave(self, frame):
        return self.value, ()

    @override
    def rejoin(self, frame, carried, emitted):
        return State(carried)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shared(Part):
    """A value that is the same at every step and in every branch."""

    value: Any

    @override
    def enter(self, frame):
        return Crossing(shared=self.value)

    @override
    def inside(self, frame, crossing):
        return Shared(crossing.shared)

    @override
    def leave(self, frame):
        return (), ()

    @override
    def rejoin(self, frame, carried, emitted):
        return self


def _is_part(node: Any) -> bool:
    return isinstance(node, Part)


def split(context: Any) -> tuple[list[Part], Callable[[Sequence[Part]], Any]]:
    """Returns the parts of a context, bare leaves wrapped as ``State``, and the function that puts them together."""
    nodes, tree = jax.tree.flatten(context, is_leaf=_is_part)
    bare = [not _is_part(node) for node in nodes]

    def join(parts: Sequence[Part]) -> Any:
        values = [part.value if b and isinstance(part, State) else part for part, b in zip(parts, bare, strict=True)]
        return jax.tree.unflatten(tree, values)

    return [State(node) if b else node for node, b in zip(nodes, bare, strict=True)], join


def parts_like(context: Any, before: Any, frame: Frame) -> list[Part]:
    """Returns the parts of the context after a body; they must be as many, and alike, as before it."""
    parts, _ = split(context)
    tree, tree_before = (jax.tree.structure(c, is_leaf=_is_part) for c in (context, before))
    if tree != tree_before:
        raise ContextStructureError(
            f"a handler changed the structure of the context inside '{frame.kind}'",
            source=equation_line(frame.eqn),
            expected=f"{tree_before}",
            found=f"{tree}",
            fix="give the context all its entries before the loop or branch, or keep them in a Part that grows",
        )
    return parts
