"""What ``ppl.mcmc`` does while it runs: each call of its compiled program, with its leapfrog steps and its time."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import ppleffects as ppl
from ppleffects.errors import DiagnosticsWarning
from ppleffects.inference import run as driver


@dataclass(frozen=True)
class Call:
    """One call of the program that makes leapfrog steps.

    Attributes:
        began: when, in seconds.
        ended: when what it returns was there.
        warm: whether all chains had ended their warm-up before.
        iterations: of the loop whose every iteration is a leapfrog step of each chain.
        leapfrogs: steps of the trajectories that ended in it. ``(chain,)``
    """

    began: float
    ended: float
    warm: bool
    iterations: int
    leapfrogs: np.ndarray


@dataclass(frozen=True)
class Steps:
    """Leapfrog steps and the time they took.

    Attributes:
        seconds: in all calls.
        fastest: seconds per iteration in the fastest call.
        iterations: of the loop.
        leapfrogs: of each chain. ``(chain,)``
    """

    seconds: float
    fastest: float
    iterations: int
    leapfrogs: np.ndarray


@dataclass
class Recorder:
    """Stands for ``advance_chains`` during a run.

    Attributes:
        program: the function it stands for.
        num_warmup: transitions of the run's warm-up.
        calls: the calls so far.
        arguments: positional and static arguments of the first call.
    """

    program: Any
    num_warmup: int
    calls: list[Call] = field(default_factory=list)
    arguments: tuple[tuple, dict[str, Any]] | None = None

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Calls the program."""
        self.arguments = self.arguments or (args, static)
        warm = bool((np.asarray(args[1].number) >= self.num_warmup).all())
        began = time.perf_counter()
        chains, chunk = jax.block_until_ready(self.program(*args, **static))
        ended = time.perf_counter()
        counts, steps = np.asarray(chunk.counts), np.asarray(chunk.infos["n_steps"])
        leapfrogs = np.where(np.arange(len(steps))[:, None] < counts, steps, 0).sum(0)
        iterations = int(np.asarray(chunk.iterations).max())
        if iterations:  # the first call compiles, and makes none
            self.calls.append(Call(began, ended, warm, iterations, leapfrogs))
        return chains, chunk

    def lower(self, *args: Any, **static: Any) -> Any:
        """The lowered program."""
        return self.program.lower(*args, **static)

    def steps(self, *, warm: bool) -> Steps:
        """Those of all calls, or of those that began after the warm-up."""
        calls = [call for call in self.calls if call.warm or not warm]
        seconds, iterations = [call.ended - call.began for call in calls], [call.iterations for call in calls]
        fastest = min(a / b for a, b in zip(seconds, iterations, strict=True))
        return Steps(sum(seconds), fastest, sum(iterations), np.sum([call.leapfrogs for call in calls], axis=0))


def record(model: Callable, kernel: Any, data: tuple, **settings: Any) -> tuple[Any, Recorder]:
    """The result of ``mcmc`` and its record."""
    program = driver.advance_chains
    recorder = Recorder(program, settings["num_warmup"])
    driver.advance_chains = recorder  # pyright: ignore[reportAttributeAccessIssue]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DiagnosticsWarning)
            return ppl.mcmc(model, kernel, progress=False, **settings)(0, *data), recorder
    finally:
        driver.advance_chains = program


class _Stop(Exception):
    """Ends a run before its first leapfrog."""


class _Halt(Recorder):
    """Stands for ``advance_chains``, and ends the run."""

    def __call__(self, *args: Any, **static: Any) -> Any:
        """Notes the arguments."""
        self.arguments = args, static
        raise _Stop


def first_call(run: Callable[[], Any]) -> tuple[tuple, dict[str, Any]]:
    """Arguments of the first call of ``advance_chains`` in a run, which then ends."""
    program = driver.advance_chains
    halt = _Halt(program, 0)
    driver.advance_chains = halt  # pyright: ignore[reportAttributeAccessIssue]
    try:
        run()
    except _Stop:
        assert halt.arguments is not None
        return halt.arguments
    finally:
        driver.advance_chains = program
    raise RuntimeError("the run made no leapfrog")
