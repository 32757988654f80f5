"""The ranges of all numbers that a run and its kernel are set up with."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from ppleffects.errors import SettingsError


@dataclasses.dataclass(frozen=True)
class Whole:
    """Whole numbers from a least one on; ``optional`` takes None, too."""

    at_least: int
    optional: bool = False

    def __contains__(self, value: Any) -> bool:
        if value is None:
            return self.optional
        return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(value >= self.at_least)

    def __str__(self) -> str:
        return f"an int >= {self.at_least}"


@dataclasses.dataclass(frozen=True)
class Real:
    """Real numbers above one number and, where another is given, below that; ``optional`` takes None, too."""

    above: float
    below: float = math.inf
    optional: bool = False

    def __contains__(self, value: Any) -> bool:
        if value is None:
            return self.optional
        if not isinstance(value, int | float | np.integer | np.floating) or isinstance(value, bool):
            return False
        return bool(value > self.above) and (math.isinf(self.below) or bool(value < self.below))

    def __str__(self) -> str:
        return f"a number > {self.above:g}" + ("" if math.isinf(self.below) else f" and < {self.below:g}")


RANGES: dict[str, Whole | Real] = {
    "num_warmup": Whole(0),
    "num_samples": Whole(1),
    "num_chains": Whole(1),
    "thinning": Whole(1),
    "chunk_size": Whole(1, optional=True),
    "step_size": Real(0),
    "target_accept": Real(0, 1, optional=True),
    "max_delta_energy": Real(0),
    "max_tree_depth": Whole(1),
    "trajectory_length": Real(0),
    "max_num_steps": Whole(1),
}


def check_numbers(settings: Any) -> None:
    """Checks those fields of a dataclass that are numbers with a range.

    Raises:
        SettingsError: one is out of its range.
    """
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name in RANGES and value not in RANGES[field.name]:
            raise SettingsError(
                f"{field.name} is out of its range",
                expected=f"{RANGES[field.name]}",
                found=f"{value!r}",
                fix="give a number in this range, or leave it out",
            )
