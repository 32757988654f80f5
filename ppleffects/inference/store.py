"""The host's copy of a run: draws and statistics, which leave the device chunk by chunk."""

from __future__ import annotations

from typing import Any

import numpy as np


class Series:
    """Arrays by name that grow by rows, allocated once.

    Args:
        num_chains: chains to keep; those that only fill up a mesh are dropped.
        num_rows: rows that fit.
    """

    def __init__(self, num_chains: int, num_rows: int):
        self._num_chains, self._num_rows = num_chains, num_rows
        self._arrays: dict[str, np.ndarray] = {}
        self.length = 0

    def append(self, rows: dict[str, Any]) -> None:
        """Add arrays ``(row, chain, ...)``, all with as many rows."""
        length = self.length
        for name, value in rows.items():
            value = np.asarray(value)
            if name not in self._arrays:
                self._arrays[name] = np.empty((self._num_chains, self._num_rows, *value.shape[2:]), value.dtype)
            length = self.length + value.shape[0]
            self._arrays[name][:, self.length : length] = np.moveaxis(value[:, : self._num_chains], 0, 1)
        # Set last, so that an interruption leaves whole rows.
        self.length = length

    def arrays(self) -> dict[str, np.ndarray]:
        """The arrays so far, each ``(chain, draw, ...)``."""
        return {name: array[:, : self.length] for name, array in self._arrays.items()}


class Phase:
    """What one phase of a run, warm-up or sampling, leaves behind.

    Args:
        num_chains: chains to keep.
        num_steps: transitions of the phase.
        thinning: every so-many-th draw is kept.
    """

    def __init__(self, num_chains: int, num_steps: int, thinning: int):
        rows = num_steps // thinning
        self._num_chains, self._thinning = num_chains, thinning
        self.posterior, self.log_likelihood = Series(num_chains, rows), Series(num_chains, rows)
        self.sample_stats = Series(num_chains, rows)
        self.num_steps = 0
        self.num_diverging = np.zeros(num_chains, int)
        self.num_saturated = np.zeros(num_chains, int)
        self.num_leapfrogs = np.zeros(num_chains, int)
        self.step_size = float("nan")

    def append(self, count: int, infos: dict[str, Any], draws: Any, *, record: bool) -> None:
        """Add a chunk of which ``count`` transitions were made; the counts are of all of them, kept or thinned away."""
        stats = {name: np.asarray(value)[:count] for name, value in infos.items()}
        if record:
            rows = count // self._thinning
            kept = slice(self._thinning - 1, rows * self._thinning, self._thinning)
            self.posterior.append({name: np.asarray(value)[:rows] for name, value in draws.posterior.items()})
            self.log_likelihood.append({name: np.asarray(value)[:rows] for name, value in draws.log_likelihood.items()})
            self.sample_stats.append({name: value[kept] for name, value in stats.items()})
        self.num_diverging += self._total(stats["diverging"])
        if "reached_max_treedepth" in stats:
            self.num_saturated += self._total(stats["reached_max_treedepth"])
        self.num_leapfrogs += self._total(stats["n_steps"])
        self.step_size = float(np.mean(stats["step_size"][-1, : self._num_chains]))
        self.num_steps += count

    def _total(self, values: np.ndarray) -> np.ndarray:
        return values[:, : self._num_chains].sum(axis=0).astype(int)
