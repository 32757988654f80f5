"""The host's copy of a run: draws and statistics, which leave the device chunk by chunk."""

from __future__ import annotations

from typing import Any

import numpy as np

from ppleffects.inference.archive import StoredSeries


class Series:
    """Arrays by name that grow by rows, each chain at its own pace; allocated once.

    Args:
        num_chains: chains to keep; those that only fill up a mesh are dropped.
        num_rows: rows that fit.
    """

    def __init__(self, num_chains: int, num_rows: int):
        self._num_rows = num_rows
        self._arrays: dict[str, np.ndarray] = {}
        self._lengths = np.zeros(num_chains, int)

    @property
    def length(self) -> int:
        """Rows that every chain has."""
        return int(self._lengths.min())

    def append(self, chain: int, rows: dict[str, Any]) -> None:
        """Add arrays ``(row, ...)`` of one chain, all with as many rows."""
        end = start = self._lengths[chain]
        for name, value in rows.items():
            if name not in self._arrays:
                shape = (self._lengths.size, self._num_rows, *value.shape[1:])
                self._arrays[name] = np.empty(shape, value.dtype)
            end = start + value.shape[0]
            self._arrays[name][chain, start:end] = value
        # Set last, so that an interruption leaves whole rows.
        self._lengths[chain] = end

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays so far, each ``(chain, draw, ...)``; rows that some chain does not have yet are left out."""
        return {name: array[:, : self.length] for name, array in self._arrays.items()}


# Counts of a phase, one for each chain.
COUNTS = ("_num_steps", "num_diverging", "num_saturated", "num_leapfrogs", "_step_sizes")


class Phase:
    """What one phase of a run, warm-up or sampling, leaves behind.

    Args:
        num_chains: chains to keep.
        num_steps: transitions of the phase.
        thinning: every so-many-th draw is kept.

    Attributes:
        num_asked: transitions of the phase.
        num_rows: draws of them that are kept.
        posterior: latents and deterministics.
        log_likelihood: pointwise log-probabilities.
        sample_stats: statistics of the transitions.
    """

    def __init__(self, num_chains: int, num_steps: int, thinning: int):
        self.num_chains, self._thinning = num_chains, thinning
        self.num_asked, self.num_rows = num_steps, num_steps // thinning
        self.posterior: Series | StoredSeries = Series(num_chains, self.num_rows)
        self.log_likelihood: Series | StoredSeries = Series(num_chains, self.num_rows)
        self.sample_stats: Series | StoredSeries = Series(num_chains, self.num_rows)
        self._num_steps = np.zeros(num_chains, int)
        self.num_diverging = np.zeros(num_chains, int)
        self.num_saturated = np.zeros(num_chains, int)
        self.num_leapfrogs = np.zeros(num_chains, int)
        self._step_sizes = np.full(num_chains, np.nan)

    @property
    def num_steps(self) -> int:
        """Transitions that every chain has made."""
        return int(self._num_steps.min())

    def counts(self) -> dict[str, Any]:
        """What it knows beside the draws, as JSON has it."""
        return {name: getattr(self, name).tolist() for name in COUNTS}

    def restore(self, counts: dict[str, Any]) -> None:
        """Go on from what ``counts`` returned."""
        for name, values in counts.items():
            setattr(self, name, np.asarray(values, getattr(self, name).dtype))

    @property
    def steps_of_chains(self) -> np.ndarray:
        """Transitions that each chain has made."""
        return self._num_steps

    @property
    def step_size(self) -> float:
        """The mean over chains of the latest step size; NaN before the first transition."""
        return float(np.mean(self._step_sizes))

    def append(self, chain: int, infos: dict[str, np.ndarray], draws: Any, *, thinned: bool) -> None:
        """Add transitions of one chain; the counts are of all of them, kept or thinned away.

        Args:
            chain: its number.
            infos: what happened in each, by name. ``(transition,)``
            draws: what is kept, ``(row, *site)``; None if nothing is.
            thinned: whether ``draws`` hold the kept rows alone, rather than a row for each transition.
        """
        count = infos["lp"].shape[0]
        if not count:
            return
        if draws is not None:
            kept = slice(-(self._num_steps[chain] + 1) % self._thinning, count, self._thinning)
            rows = slice(None, len(range(count)[kept])) if thinned else kept
            self.posterior.append(chain, {name: value[rows] for name, value in draws.posterior.items()})
            self.log_likelihood.append(chain, {name: value[rows] for name, value in draws.log_likelihood.items()})
            self.sample_stats.append(chain, {name: value[kept] for name, value in infos.items()})
        self.num_diverging[chain] += int(infos["diverging"].sum())
        if "reached_max_treedepth" in infos:
            self.num_saturated[chain] += int(infos["reached_max_treedepth"].sum())
        self.num_leapfrogs[chain] += int(infos["n_steps"].sum())
        self._step_sizes[chain] = float(infos["step_size"][-1])
        self._num_steps[chain] += count
