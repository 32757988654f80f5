"""What a progress bar shows, on a terminal, in a log, and when it is off."""

import io

import numpy as np
import pytest
from rich.console import Console

from ppleffects.inference import progress
from ppleffects.inference.progress import Progress


def shown(monkeypatch, *, terminal, enabled=True):
    """A run of three chains, its clock set by hand: 30 draws per second in warm-up, 50 in sampling."""
    out, now = io.StringIO(), [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    console = Console(file=out, force_terminal=terminal, width=200)

    def update(seconds, phase, counts, **values):
        now[0] = seconds
        bar.update(phase, min(counts), counts=np.array(counts), **values)

    with Progress(100, 200, 3, enabled=enabled, console=console) as bar:
        update(1.0, "warm-up", [30, 30, 30], num_diverging=0, step_size=0.5)
        update(3.0, "warm-up", [50, 40, 60], num_diverging=1, step_size=0.5)
        update(8.0, "warm-up", [100, 100, 100], num_diverging=2, step_size=0.25)
        update(9.0, "sampling", [10, 20, 20], num_diverging=0, step_size=0.25)
        update(11.0, "sampling", [50, 50, 50], num_diverging=0, step_size=0.25)
        update(20.0, "sampling", [200, 200, 200], num_diverging=0, step_size=0.25)
    return out.getvalue()


def test_lines_without_a_terminal(monkeypatch):
    assert shown(monkeypatch, terminal=False).splitlines() == [
        "compiling: 3 chains",
        "warm-up 100/100: 3 chains, 30 draws/s, 0:00:00 left in warm-up, step size 0.25, 2 divergences",
        "sampling 200/200: 3 chains, 50 draws/s, 0:00:00 left in sampling, step size 0.25, 0 divergences",
    ]


def test_lines_come_also_after_some_time(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", 1.5)
    lines = shown(monkeypatch, terminal=False).splitlines()
    assert lines[1].startswith("warm-up 40/100: 3 chains, 30 draws/s, 0:00:05 left in warm-up, step size 0.5")
    assert lines[1].endswith(", 1 divergences, slowest is chain 1")
    assert lines[3].startswith("sampling 50/200: 3 chains, 50 draws/s, 0:00:09 left in sampling")


def test_the_rate_is_that_of_the_last_seconds():
    bar = Progress(1, 1, 1, enabled=False)
    clock = iter([*range(30), *range(30, 60)])
    rates = []
    for i in range(60):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(progress.time, "monotonic", lambda: float(next(clock)))
            rates.append(bar._rate("sampling", 10 * min(i, 29) + 100 * max(i - 29, 0)))
    assert rates[0] == 0.0
    assert rates[29] == 10.0
    assert rates[-1] == 100.0


def test_bar_on_a_terminal(monkeypatch):
    text = shown(monkeypatch, terminal=True)
    assert "300/300" in text
    assert "sampling" in text
    assert "compiling" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_when_off(monkeypatch, terminal):
    assert shown(monkeypatch, terminal=terminal, enabled=False) == ""


@pytest.mark.parametrize(("widgets", "live"), [(True, True), (False, False)])
def test_a_notebook_without_widgets_gets_lines(monkeypatch, widgets, live):
    monkeypatch.setattr(progress.importlib.util, "find_spec", lambda name: "a spec" if widgets else None)
    assert progress._is_live(Console(file=io.StringIO(), force_jupyter=True)) is live
