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
    """The collectives of the innermost loop that holds the gradient of the density."""
    bodies = {name: text for name, text in _computations(hlo).items() if re.search(rf"body={re.escape(name)}\b", hlo)}
    gradients = {name: text for name, text in bodies.items() if "transpose(jvp" in text}
    innermost = [text for text in gradients.values() if not any(f"body={name}," in text for name in gradients)]
    (loop,) = innermost
    return collectives(loop)
