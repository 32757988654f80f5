"""What can be computed of draws: R-hat and effective sample sizes of scalars, E-BFMI, and chains that are stuck."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import numpy as np

type Draws = Mapping[str, np.ndarray]

# R-hat and ESS of more scalars than this are those of a selection: they cost milliseconds each.
MAX_SCALARS = 500
# So many numbers of a chain are looked at at once: the memory of a run stays that of its draws.
BLOCK = 2**18
# Fewer draws per chain tell nothing.
MIN_DRAWS = 8
# A chain stands still if it moves in fewer than this share of the later half of its draws, and sits apart if its
# log-densities there lie below those of another, by so many times the sum of their standard deviations.
MIN_MOVES, APART = 0.05, 3.0


def load() -> None:
    """Import what the diagnostics are computed with, which takes a second: while something is compiled."""
    import arviz_stats.base.array  # noqa: F401


def _difference(array: np.ndarray) -> np.ndarray:
    """The variance between the halves of chains over that within, for each scalar; NaN where nothing varies."""
    half, size = array.shape[1] // 2, math.prod(array.shape[2:])
    if half < 2:
        return np.zeros(size)
    halves = [chain[start : start + half].reshape(half, size) for chain in array for start in (0, half)]
    means = [x.mean(0, dtype=float) for x in halves]

    def variance(x: np.ndarray, mean: np.ndarray) -> np.ndarray:
        return np.sum([((block - mean) ** 2).sum(0) for block in _blocks(x)], axis=0) / (half - 1)

    return np.var(means, axis=0, ddof=1) / np.mean(list(map(variance, halves, means)), axis=0)


def _blocks(rows: np.ndarray) -> list[np.ndarray]:
    """The rows, some at a time."""
    return np.array_split(rows, max(rows.size // BLOCK, 1))


def _halves(values: np.ndarray) -> np.ndarray:
    """One chain as two, since R-hat asks for more than one."""
    half = values.shape[1] // 2
    return values[:, : 2 * half].reshape(2, half)


def selection(posterior: Draws) -> tuple[list[tuple[str, tuple[int, ...]]], int]:
    """Names and indices of the scalars to judge, and how many there are.

    Where there are too many, those whose halves of chains differ most, by a split R-hat of all that costs one pass.
    """
    sizes = [math.prod(array.shape[2:]) for array in posterior.values()]
    starts, total = np.cumsum([0, *sizes]), sum(sizes)
    numbers = np.arange(total)
    if total > MAX_SCALARS:
        with np.errstate(all="ignore"):
            scores = np.concatenate([_difference(array) for array in posterior.values()])
        numbers = np.sort(np.argsort(-np.nan_to_num(scores, nan=-1.0), kind="stable")[:MAX_SCALARS])
    chosen = []
    for owner, (name, array) in enumerate(posterior.items()):
        own = numbers[(numbers >= starts[owner]) & (numbers < starts[owner + 1])] - starts[owner]
        chosen += [(name, tuple(map(int, np.unravel_index(number, array.shape[2:])))) for number in own]
    return chosen, total


def convergence(
    scalars: Iterable[np.ndarray], num_scalars: int, num_draws: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """R-hat, bulk and tail ESS of scalars, taken one by one; NaN for constants and where there are too few draws."""
    from arviz_stats.base.array import array_stats  # imported when used: it costs a second

    results = np.full((3, num_scalars), np.nan)
    for number, draws in enumerate(scalars if num_draws >= MIN_DRAWS else []):
        values = np.ascontiguousarray(draws, float)
        if not np.isfinite(values).all() or np.ptp(values) == 0:
            continue
        with np.errstate(divide="ignore"):  # chains that stand still, each elsewhere: R-hat is infinite
            results[0, number] = array_stats.rhat(
                _halves(values) if len(values) == 1 else values, chain_axis=0, draw_axis=1
            )
        results[1, number] = array_stats.ess(values, chain_axis=0, draw_axis=1, method="bulk")
        results[2, number] = array_stats.ess(values, chain_axis=0, draw_axis=1, method="tail", prob=(0.05, 0.95))
    return results[0], results[1], results[2]


def bfmi(energy: np.ndarray) -> np.ndarray:
    """E-BFMI of each chain; empty where there are too few draws."""
    from arviz_stats.base.array import array_stats  # imported when used: it costs a second

    if energy.shape[1] < 4 or not np.isfinite(energy).all():
        return np.zeros(0)
    with np.errstate(invalid="ignore"):  # a chain whose energy never changes
        return np.nan_to_num(array_stats.bfmi(np.asarray(energy, float)))


def num_nans(array: np.ndarray) -> int:
    """How many numbers are NaN."""
    return sum(int(np.isnan(block).sum()) for chain in array for block in _blocks(chain))


def moves(chain: int, later: np.ndarray, posterior: Draws) -> float:
    """The share of draws at which a chain is elsewhere than before.

    A log-density may be too large for its precision to show a move, so that where it is the same, the draws are asked.
    """
    moved = later[1:] != later[:-1]
    for array in posterior.values() if moved.mean() < MIN_MOVES else ():
        rows = array[chain, -later.size :].reshape(later.size, -1)
        moved |= (rows[1:] != rows[:-1]).any(1)
    return float(moved.mean())


def apart(later: np.ndarray, moving: list[int]) -> tuple[list[int], int]:
    """Chains far below the one of the highest log-densities, without overlap, and the number of that one."""
    if len(moving) < 2:
        return [], -1
    middle, spread = np.median(later, axis=1), later.std(axis=1)
    best = max(moving, key=lambda chain: middle[chain])
    return [
        chain
        for chain in moving
        if later[chain].max() < later[best].min()
        and middle[best] - middle[chain] > APART * (spread[best] + spread[chain])
    ], best


def worst(names: list[str], values: np.ndarray) -> tuple[float, str]:
    """The smallest value and its name; NaN where there is none."""
    if not values.size or np.isnan(values).all():
        return math.nan, ""
    number = int(np.nanargmin(values))
    return float(values[number]), names[number]
