"""A progress bar that the host drives between chunks; it never touches what is sampled."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich import progress as bars
from rich.console import Console

# Where there is no terminal, a line each so many seconds: a log must show that a run is alive.
SECONDS_PER_LINE = 30.0


class Progress:
    """Shows how far warm-up and sampling are: a bar on a terminal, some lines elsewhere.

    Args:
        num_warmup: transitions of the warm-up, per chain.
        num_samples: transitions after it, per chain.
        num_chains: chains.
        enabled: whether to show anything.
        console: where to; standard error by default.
    """

    def __init__(
        self,
        num_warmup: int,
        num_samples: int,
        num_chains: int,
        *,
        enabled: bool = True,
        console: Console | None = None,
    ):
        self._totals = {"warm-up": num_warmup, "sampling": num_samples}
        self._chains = f"{num_chains} chain{'s' if num_chains > 1 else ''}"
        self._enabled, self._console = enabled, console or Console(stderr=True)
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        if self._enabled and self._console.is_terminal:
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}"),
                bars.BarColumn(),
                bars.MofNCompleteColumn(),
                bars.TimeElapsedColumn(),
                bars.TimeRemainingColumn(),
                bars.TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("compiling", total=sum(self._totals.values()), note=self._chains)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, phase: str, done: int, *, num_diverging: int, step_size: float) -> None:
        """Show that ``done`` transitions of ``phase`` are made.

        Args:
            phase: "warm-up" or "sampling".
            done: transitions of this phase so far, per chain.
            num_diverging: divergences of this phase so far, in all chains.
            step_size: the mean over chains.
        """
        if not self._enabled:
            return
        note = f"{self._chains}, step size {step_size:.2g}, {num_diverging} divergences"
        if self._bar is not None:
            before = self._totals["warm-up"] if phase == "sampling" else 0
            self._bar.update(self._task, description=phase, completed=before + done, note=note)
            return
        ended, now = done == self._totals[phase], time.monotonic()
        if ended or now - self._last_line > SECONDS_PER_LINE:
            self._last_line = now
            self._console.print(f"{phase} {done}/{self._totals[phase]}: {note}", highlight=False)
