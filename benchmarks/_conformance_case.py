"""What a case of the comparison is: a demand, the right number from an independent source, a program per library."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

LIBRARIES = ("ppleffects", "NumPyro", "TFP", "BlackJAX", "slub")

# Why a library has no program for a case about sites.
NO_SITES = {
    "TFP": "yields or lists its sites, so that none can stand inside a function that JAX traces",
    "BlackJAX": "takes a density: has no sites",
    "slub": "is an interpreter: has no distributions",
}
ONLY_EFFECTS = dict.fromkeys(("NumPyro", "TFP", "BlackJAX"), "does not interpret JAX's equations")
NO_SAMPLER = {"slub": "is an interpreter: has no samplers"}


@dataclass(frozen=True)
class Refused:
    """What a program returns that cannot raise at the right place: an error was demanded, and this came instead."""

    instead: str


@dataclass
class Case:
    """One demand, and how each library meets it.

    Attributes:
        name: short, unique.
        demand: what is asked, in one sentence.
        right: the right result; None if the right outcome is an error.
        section: of which kind: "lost" (silently wrong somewhere) or "fails" (an error or a cost somewhere).
        rtol: relative tolerance of numbers.
        atol: absolute tolerance; of posterior moments, five standard errors or more.
        refusal: whether a clear refusal, an error of the library's own, is as good as the right number.
        cost: whether the result counts work; then one that is off is "costly", not "wrong".
        x64: whether programs run with 64-bit floats.
        timeout: seconds until a program counts as hanging.
        cannot: by library, why it cannot express the case.
        programs: by library, a function without arguments that returns the result.
    """

    name: str
    demand: str
    right: Any = None
    section: str = "lost"
    rtol: float = 1e-6
    atol: float = 1e-9
    refusal: bool = False
    cost: bool = False
    x64: bool = True
    timeout: float = 120.0
    cannot: dict[str, str] = field(default_factory=dict)
    programs: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def on(self, library: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
        """Registers the decorated function as the program of ``library``."""
        if library not in LIBRARIES or library in self.programs:
            raise ValueError(f"{self.name}: '{library}' is unknown or has a program already")

        def register(program: Callable[[], Any]) -> Callable[[], Any]:
            self.programs[library] = program
            return program

        return register

    def judge(self, result: Any) -> tuple[str, str]:
        """Returns outcome and detail of a program that returned ``result``."""
        if isinstance(result, Refused):
            return "wrong", f"no error: {result.instead}"
        if self.right is None:
            return "wrong", f"no error: {text(result)}"
        found, right = np.asarray(result, float), np.asarray(self.right, float)
        if found.shape == right.shape and np.allclose(found, right, rtol=self.rtol, atol=self.atol):
            return "right", text(result)
        return "costly" if self.cost else "wrong", f"{text(result)} for {text(self.right)}"

    def judge_error(self, library: str, error: BaseException) -> tuple[str, str]:
        """Returns outcome and detail of a program that raised ``error``."""
        first = re.sub(r"\S*/(?=[\w.-]+\.py)| at 0x\w+", "", next(iter(str(error).strip().splitlines()), ""))
        detail = f"{type(error).__name__}: {first[:160]}" if first else type(error).__name__
        # What ppleffects refuses, it refuses with an error of its own; anything else that it raises is a fault.
        own = library != "ppleffects" or any(c.__name__ == "PPLError" for c in type(error).__mro__)
        right = own and (self.right is None or (self.refusal and library == "ppleffects"))
        return ("right" if right else "error"), detail


CASES: dict[str, Case] = {}


def case(name: str, demand: str, right: Any = None, **settings: Any) -> Case:
    """Adds a case to ``CASES`` and returns it."""
    if name in CASES:
        raise ValueError(f"two cases are named '{name}'")
    CASES[name] = Case(name, demand, right, **settings)
    return CASES[name]


def text(result: Any) -> str:
    """A result in a few characters."""
    values = np.asarray(result, float).ravel()
    shown = ", ".join(f"{v:.6g}" for v in values[:6]) + (", ..." if values.size > 6 else "")
    return shown if values.size == 1 else f"({shown})"


def mesh(axis_type: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    """A mesh of the first host devices."""
    shape = tuple(sizes.values())
    devices = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, tuple(sizes), axis_types=(axis_type,) * len(shape), devices=devices)
