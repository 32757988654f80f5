"""What a compiled function costs: collectives, flops and bytes, read from the program that XLA made."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
# The name of an operation stands before its operands: `%x = f64[] all-reduce(...)`. On some platforms a collective is a
# pair, `all-reduce-start(...)` and `all-reduce-done(...)`, of which the first is counted.
_CALL = re.compile(rf"\s({'|'.join(COLLECTIVES)})(?:-start)?\(")
# What a computation calls: once, one of several, again and again.
_CALLED = re.compile(r"\b(?:calls|to_apply|condition|true_computation|false_computation)=(%[\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_BODY = re.compile(r"\bbody=(%[\w.\-]+)")


@dataclass(frozen=True)
class Cost:
    """What one call costs on one device.

    Attributes:
        collectives: number of collective operations in the program, by kind.
        flops: floating-point operations, as XLA counts them.
        bytes: bytes read and written, as XLA counts them.
    """

    collectives: dict[str, int]
    flops: float
    bytes: float


def compile_gradient(density: Callable[..., Any], *args: Any) -> jax.stages.Compiled:
    """The compiled value and gradient of a density, by its first argument."""
    return jax.jit(jax.value_and_grad(density)).lower(*args).compile()


def cost(compiled: jax.stages.Compiled) -> Cost:
    """What the compiled program costs."""
    analysis: Any = compiled.cost_analysis()
    return Cost(collectives(compiled.as_text() or ""), analysis["flops"], analysis["bytes accessed"])


def collectives(hlo: str) -> dict[str, int]:
    """The number of collective operations in the text of a compiled program, by kind."""
    return dict(Counter(_CALL.findall(hlo)))


def _computations(hlo: str) -> dict[str, str]:
    """The text of each computation of a program, by name."""
    found: dict[str, str] = {}
    for text in hlo.split("\n\n"):
        head = text.lstrip().partition("\n")[0]
        if head.endswith("{"):
            found[head.removeprefix("ENTRY ").split()[0]] = text
    return found


def leapfrog_collectives(hlo: str) -> dict[str, int]:
    """The collectives that one step of the innermost loop around the gradient of the density executes, at most.

    All branches of a conditional are counted. Those in a loop within, whose length is not known, count as another kind.
    """
    texts = _computations(hlo)
    bodies = {name for text in texts.values() for name in _BODY.findall(text)}
    gradients = {name for name in bodies if "transpose(jvp" in texts[name]}
    innermost = [name for name in gradients if not gradients & set(_BODY.findall(texts[name]))]
    (loop,) = innermost
    return dict(_executed(texts, loop))


def _executed(texts: dict[str, str], name: str) -> Counter[str]:
    """The collectives of a computation and of all that it calls."""
    found = Counter(collectives(texts[name]))
    branches = (part.strip() for group in _BRANCHES.findall(texts[name]) for part in group.split(","))
    for called in (*_CALLED.findall(texts[name]), *branches):
        found += _executed(texts, called)
    for body in _BODY.findall(texts[name]):
        found += Counter({f"{kind} in a loop": count for kind, count in _executed(texts, body).items()})
    return found
