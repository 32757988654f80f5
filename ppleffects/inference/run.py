"""One run of a sampler: the loop on the host that calls the compiled programs and keeps what they return."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ppleffects.errors import LayoutWarning
from ppleffects.inference.chunks import MAX_TRIES, Plan, run_chunk, run_start
from ppleffects.inference.failure import check_starts
from ppleffects.inference.layout import Layout
from ppleffects.inference.options import Options
from ppleffects.inference.progress import Progress
from ppleffects.inference.report import Report, diagnose
from ppleffects.inference.store import Phase

# Without chunk_size=, calls are sized to take about this long: often enough for a progress bar and for Ctrl-C.
SECONDS_PER_CALL = 0.5
FIRST_CALL_ROWS = 10


class Run:
    """One run, from the starts of its chains to the arrays of its draws."""

    def __init__(self, kernel: Any, options: Options, layout: Layout, target: Any, progress: bool):
        self._kernel, self._options, self._layout = kernel, options, layout
        self.target = target
        self._progress = progress
        self._plan: Plan = options.plan(target)
        self._state: Any = None
        self._calls = _CallSize(options, self._plan)
        self.warmup = Phase(options.num_chains, options.num_warmup, options.thinning)
        self.sampling = Phase(options.num_chains, options.num_samples, options.thinning)
        self.seconds = {"compiling": 0.0, "warm-up": 0.0, "sampling": 0.0}
        self.complete = False

    def start(self, key: Array, arguments: dict[str, Any]) -> None:
        """Find a starting point for each chain."""
        began = time.perf_counter()
        if not self._start(key, arguments):
            warnings.warn(
                "the density permutes values among shards, which on CPUs makes groups of chains wait for each other; "
                "each device runs every chain instead",
                LayoutWarning,
                stacklevel=4,
            )
            self._layout = self._layout.together()
            self._start(key, arguments)
        self.seconds["compiling"] += time.perf_counter() - began

    def _start(self, key: Array, arguments: dict[str, Any]) -> bool:
        """Find the starting points, or return False where the programs would never end on this layout."""
        layout, chains = self._layout, self._layout.chains
        given, all_given = self._options.given_starts(self.target, chains)
        args = (self.target, layout.place_data(key), layout.place_chains(chains), layout.place_chains(given))
        static = {"kernel": self._kernel, "layout": layout}
        starts = {**static, "num_warmup": self._options.num_warmup, "max_tries": 1 if all_given else MAX_TRIES}
        if layout.waits_on_permutes and _permutes(run_start.lower(*args, **starts)):
            return False
        self._state, start = run_start(*args, **starts)
        check_starts(self.target, start, layout, arguments)
        if layout.waits_on_permutes:
            count, record = jnp.zeros((), jnp.int32), jnp.zeros((), bool)
            lowered = run_chunk.lower(self.target, self._state, count, record, **static, plan=self._plan)
            return not _permutes(lowered)
        return True

    def advance(self) -> None:
        """Warm up and sample; Ctrl-C ends it early, and goes on up where there is no draw yet."""
        options = self._options
        with Progress(options.num_warmup, options.num_samples, options.num_chains, enabled=self._progress) as bar:
            try:
                began = time.perf_counter()
                self._call(0, record=False)  # compiles
                self.seconds["compiling"] += time.perf_counter() - began
                keep_warmup = "warmup" in options.groups
                self._advance_phase("warm-up", self.warmup, options.num_warmup, bar, record=keep_warmup)
                kept_steps = options.num_samples // options.thinning * options.thinning
                self._advance_phase("sampling", self.sampling, kept_steps, bar, record=True)
                self.complete = True
            except KeyboardInterrupt:
                if self.sampling.sample_stats.length == 0 and self.warmup.sample_stats.length == 0:
                    raise

    def groups(self) -> dict[str, dict[str, np.ndarray]]:
        """The groups of draws, by name."""
        groups = {"posterior": self.sampling.posterior.arrays(), "sample_stats": self.sampling.sample_stats.arrays()}
        groups["log_likelihood"] = self.sampling.log_likelihood.arrays()
        groups["warmup_posterior"] = self.warmup.posterior.arrays()
        groups["warmup_sample_stats"] = self.warmup.sample_stats.arrays()
        return groups

    def report(self) -> Report:
        """The diagnostics of the draws after warm-up."""
        phase = self.sampling
        energy = phase.sample_stats.arrays().get("energy", np.zeros((self._options.num_chains, 0)))
        return diagnose(
            phase.posterior.arrays(),
            energy,
            num_transitions=phase.num_steps * self._options.num_chains,
            num_diverging=int(phase.num_diverging.sum()),
            num_saturated=int(phase.num_saturated.sum()),
        )

    def attrs(self) -> dict[str, Any]:
        """What was run, on what, how long it took, and whether it is complete."""
        options, mesh = self._options, self._layout.mesh
        return {
            "jax_version": jax.__version__,
            "kernel": type(self._kernel).__name__,
            "kernel_settings": json.dumps(self._kernel.settings()),
            "num_warmup": int(options.num_warmup),
            "num_samples": int(options.num_samples),
            "num_chains": int(options.num_chains),
            "thinning": int(options.thinning),
            "mesh": json.dumps(dict(mesh.shape) if mesh is not None else {}),
            "platform": jax.default_backend(),
            "compile_time": self.seconds["compiling"],
            "warmup_time": self.seconds["warm-up"],
            "sampling_time": self.seconds["sampling"],
            "num_leapfrogs_warmup": int(self.warmup.num_leapfrogs.sum()),
            "num_leapfrogs": int(self.sampling.num_leapfrogs.sum()),
            "complete": self.complete,
        }

    def _advance_phase(self, name: str, phase: Phase, num_steps: int, bar: Progress, *, record: bool) -> None:
        began = time.perf_counter()
        try:
            while phase.num_steps < num_steps:
                count = min(self._calls.size, num_steps - phase.num_steps)
                called = time.perf_counter()
                infos, draws = self._call(count, record=record)
                phase.append(count, infos, draws, record=record)
                self._calls.adapt(time.perf_counter() - called)
                bar.update(
                    name, phase.num_steps, num_diverging=int(phase.num_diverging.sum()), step_size=phase.step_size
                )
        finally:
            self.seconds[name] += time.perf_counter() - began

    def _call(self, count: int, *, record: bool) -> tuple[dict[str, Array], Any]:
        """Make ``count`` transitions; what comes back is on the host."""
        count_array, record_array = jnp.asarray(count, jnp.int32), jnp.asarray(record)
        state, infos, draws = run_chunk(
            self.target,
            self._state,
            count_array,
            record_array,
            kernel=self._kernel,
            layout=self._layout,
            plan=self._plan,
        )
        infos, draws = jax.device_get((infos, draws if record else None))
        self._state = state
        return infos._asdict(), draws


def _permutes(lowered: Any) -> bool:
    """Whether the compiled program, which the next call finds compiled, holds a collective permute."""
    return "collective-permute" in lowered.compile().as_text()


class _CallSize:
    """How many transitions the next call makes: fixed by ``chunk_size``, else such that a call takes half a second."""

    def __init__(self, options: Options, plan: Plan):
        self._unit, self._capacity, self._fixed = plan.thinning, plan.capacity, options.chunk_size is not None
        self.size = plan.capacity if self._fixed else min(plan.capacity, FIRST_CALL_ROWS * plan.thinning)

    def adapt(self, seconds: float) -> None:
        """Learn from the last call."""
        if self._fixed:
            return
        wanted = self.size * min(SECONDS_PER_CALL / max(seconds, 1e-6), 4.0)
        rows = int(np.clip(wanted // self._unit, 1, self._capacity // self._unit))
        self.size = rows * self._unit
