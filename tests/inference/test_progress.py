"""What a progress bar shows, on a terminal, in a log, and when it is off."""

import io

import pytest
from rich.console import Console

from ppleffects.inference import progress
from ppleffects.inference.progress import Progress


def shown(*, terminal, enabled=True):
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=200)
    with Progress(100, 200, 3, enabled=enabled, console=console) as bar:
        bar.update("warm-up", 50, num_diverging=1, step_size=0.5)
        bar.update("warm-up", 100, num_diverging=2, step_size=0.25)
        bar.update("sampling", 200, num_diverging=0, step_size=0.25)
    return out.getvalue()


def test_lines_without_a_terminal():
    assert shown(terminal=False).splitlines() == [
        "warm-up 100/100: 3 chains, step size 0.25, 2 divergences",
        "sampling 200/200: 3 chains, step size 0.25, 0 divergences",
    ]


def test_lines_come_also_after_some_time(monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_PER_LINE", -1.0)
    assert shown(terminal=False).startswith("warm-up 50/100: 3 chains, step size 0.5, 1 divergences\n")


def test_bar_on_a_terminal():
    text = shown(terminal=True)
    assert "300/300" in text
    assert "sampling" in text


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_when_off(terminal):
    assert shown(terminal=terminal, enabled=False) == ""
