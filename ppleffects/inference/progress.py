"""A progress bar that the host drives between chunks; it never touches what is sampled."""

from __future__ import annotations

import datetime
import importlib.util
import time
from types import TracebackType
from typing import Self

import numpy as np
from rich import progress as bars
from rich.console import Console

# Where there is no terminal, a line each so many seconds: a log must show that a run is alive.
SECONDS_PER_LINE = 30.0
# Draws per second are those of about so many last seconds.
SECONDS_OF_RATE = 10.0


class Progress:
    """Shows how far warm-up and sampling are: a bar on a terminal or in a notebook, some lines elsewhere.

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
        self._seen: list[tuple[float, int]] = []
        self._phase = ""

    def __enter__(self) -> Self:
        if self._enabled and _is_live(self._console):
            self._bar = bars.Progress(
                bars.TextColumn("{task.description}"),
                bars.BarColumn(),
                bars.MofNCompleteColumn(),
                bars.TimeElapsedColumn(),
                bars.TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("compiling", total=sum(self._totals.values()), note=self._chains)
            self._bar.start()
        elif self._enabled:
            self._print(f"compiling: {self._chains}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, phase: str, done: int, *, counts: np.ndarray, num_diverging: int, step_size: float) -> None:
        """Show that every chain has made ``done`` transitions of ``phase``.

        Args:
            phase: "warm-up" or "sampling".
            done: transitions of this phase so far, of the slowest chain.
            counts: those of each chain. ``(chain,)``
            num_diverging: divergences of this phase so far, in all chains.
            step_size: the mean over chains.
        """
        if not self._enabled:
            return
        rate, total = self._rate(phase, int(counts.sum())), self._totals[phase]
        note = [self._chains, f"step size {step_size:.2g}", f"{num_diverging} divergences"]
        if rate:
            left = datetime.timedelta(seconds=round((total * counts.size - int(counts.sum())) / rate))
            note = [note[0], f"{rate:.3g} draws/s", f"{left} left in {phase}", *note[1:]]
        if counts.max() > done:
            note += [f"slowest is chain {int(counts.argmin())}"]
        if self._bar is not None:
            before = self._totals["warm-up"] if phase == "sampling" else 0
            self._bar.update(self._task, description=phase, completed=before + done, note=", ".join(note))
        elif done == total or time.monotonic() - self._last_line > SECONDS_PER_LINE:
            self._print(f"{phase} {done}/{total}: {', '.join(note)}")

    def _print(self, line: str) -> None:
        self._last_line = time.monotonic()
        self._console.print(line, highlight=False, soft_wrap=True)

    def _rate(self, phase: str, number: int) -> float:
        """Draws per second, of all chains together, in the last seconds of a phase; 0 where it is not known yet."""
        if phase != self._phase:
            self._phase, self._seen = phase, []
        now = time.monotonic()
        self._seen.append((now, number))
        while len(self._seen) > 2 and now - self._seen[1][0] > SECONDS_OF_RATE:
            self._seen.pop(0)
        then, before = self._seen[0]
        return (number - before) / (now - then) if now > then else 0.0


def _is_live(console: Console) -> bool:
    """Whether lines can be drawn over: on a terminal, and in a notebook that has the widgets for it."""
    return console.is_terminal or (console.is_jupyter and importlib.util.find_spec("ipywidgets") is not None)
