"""What a run leaves behind: the draws of warm-up and sampling, in memory or in a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from ppleffects.inference.checkpoint import Checkpoint, Saved
from ppleffects.inference.chunks import Draws
from ppleffects.inference.options import Options
from ppleffects.inference.rows import RowAxis, restore
from ppleffects.inference.store import Phase
from ppleffects.inference.stream import Chunk

# Groups of draws: the phase that they are of, and what of it.
GROUPS = {
    "posterior": ("sampling", "posterior"),
    "sample_stats": ("sampling", "sample_stats"),
    "log_likelihood": ("sampling", "log_likelihood"),
    "warmup_posterior": ("warm-up", "posterior"),
    "warmup_sample_stats": ("warm-up", "sample_stats"),
}


class Record:
    """The draws of a run and what is counted of them.

    Args:
        options: the settings of the run.
        axes: where padded rows lie in the values of sites; they are left out.
        checkpoint: where draws go; None for memory.
    """

    def __init__(self, options: Options, axes: Mapping[str, RowAxis], checkpoint: Checkpoint | None):
        self._options, self._axes, self._checkpoint = options, axes, checkpoint
        self.warmup = Phase(options.num_chains, options.num_warmup, options.thinning)
        self.sampling = Phase(options.num_chains, options.num_samples, options.thinning)
        self._is_open = False
        self.phases = {"warm-up": self.warmup, "sampling": self.sampling}

    def open(self, infos: dict[str, Any], draws: Draws, make_tree: Callable[[dict[str, Any]], Any]) -> None:
        """Make the checkpoint for draws like these, where there is to be one and none was loaded.

        Args:
            infos: what happened in each transition, with any number of rows. ``(row, chain)``
            draws: what is kept of it. ``(row, chain, *site)``
            make_tree: a tree of groups of draws.
        """
        if self._checkpoint is None or self._is_open:
            return
        draws = self._restored(draws)
        parts = {"posterior": draws.posterior, "log_likelihood": draws.log_likelihood, "sample_stats": infos}
        empty = {
            group: {
                name: np.zeros((self._options.num_chains, 0, *x.shape[2:]), x.dtype)
                for name, x in parts[part].items()
                if name != "warmup"
            }
            for group, (phase, part) in GROUPS.items()
            if phase == "sampling" or (self._keeps_warmup and part in ("posterior", "sample_stats"))
        }
        tree = make_tree(empty)
        self._checkpoint.create(tree, tree.attrs, self.sampling.num_asked)
        self._store(self._checkpoint, {})

    def load(self, checkpoint: Checkpoint, saved: Saved) -> None:
        """Go on from what a checkpoint holds."""
        for name, counts in saved.phases.items():
            self.phases[name].restore(counts)
        self._store(checkpoint, saved.rows)

    def add(self, chunk: Chunk) -> None:
        """Keep what chains at their own pace have handed back: of each the rows it has filled, warm-up first."""
        all_draws = self._restored(chunk.draws)
        for chain in range(self._options.num_chains):
            count = int(chunk.counts[chain])
            num_warm = int(chunk.infos["warmup"][:count, chain].sum())
            infos = {name: value for name, value in chunk.infos.items() if name != "warmup"}
            infos, draws = jax.tree.map(lambda x, chain=chain: x[:, chain], (infos, all_draws))
            for phase, part, kept in (
                (self.warmup, slice(0, num_warm), self._keeps_warmup),
                (self.sampling, slice(num_warm, count), True),
            ):
                own, rows = jax.tree.map(lambda x, part=part: x[part], (infos, draws))
                phase.append(chain, own, rows if kept else None, thinned=False)

    def add_steps(self, phase: Phase, count: int, infos: dict[str, Any], draws: Draws) -> None:
        """Keep what chains in step have handed back: ``count`` transitions of a phase, thinned already."""
        kept = self._keeps_warmup or phase is self.sampling
        draws = self._restored(draws)
        for chain in range(self._options.num_chains):
            own = {name: value[:count, chain] for name, value in infos.items()}
            rows = jax.tree.map(lambda x, chain=chain: x[:, chain], draws) if kept else None
            phase.append(chain, own, rows, thinned=True)

    @property
    def is_due(self) -> bool:
        """Whether draws are to be written now."""
        return self._checkpoint is not None and self._checkpoint.is_due

    def commit(
        self,
        state: dict[str, np.ndarray],
        specs: dict[str, Any],
        seconds: dict[str, float],
        attrs: dict[str, Any],
    ) -> None:
        """Write draws and state to the checkpoint."""
        if self._checkpoint is not None:
            self._checkpoint.commit(state, specs, self.phases, self._series, seconds, attrs)

    def groups(self) -> dict[str, Mapping[str, np.ndarray]]:
        """The draws that every chain has, by group; those that have none are left out."""
        return {group: series.arrays() for group, series in self._series.items() if series.length}

    @property
    def _keeps_warmup(self) -> bool:
        return "warmup" in self._options.groups

    @property
    def _series(self) -> dict[str, Any]:
        return {group: getattr(self.phases[phase], part) for group, (phase, part) in GROUPS.items()}

    def _store(self, checkpoint: Checkpoint, rows: dict[str, list[int]]) -> None:
        """Let draws go to the arrays of the checkpoint."""
        self._is_open = True
        for group, (name, part) in GROUPS.items():
            phase = self.phases[name]
            lengths = rows.get(group, [0] * phase.num_chains)
            setattr(phase, part, checkpoint.series(group, phase.num_rows, lengths))

    def _restored(self, draws: Draws) -> Draws:
        return Draws(*(restore(part, self._axes, leading=2) for part in draws))
