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
from ppleffects.inference.chunks import Plan, run_chunk, run_start
from ppleffects.inference.failure import check_starts
from ppleffects.inference.layout import Layout
from ppleffects.inference.machine import Machine
from ppleffects.inference.options import Options
from ppleffects.inference.progress import Progress
from ppleffects.inference.report import Report, diagnose
from ppleffects.inference.starts import PRIOR, UNIFORM, given_starts
from ppleffects.inference.store import Phase
from ppleffects.inference.stream import Chunk, advance_chains, begin_chains

# Without chunk_size=, calls are sized to take about this long: often enough for a progress bar and for Ctrl-C.
SECONDS_PER_CALL = 0.5
# Starts of these kinds differ from key to key, so that a chain can try several.
DRAWN = (None, UNIFORM, PRIOR)
FIRST_CALL_ROWS = 10
FIRST_CALL_STEPS = 100


class Run:
    """One run, from the starts of its chains to the arrays of its draws."""

    def __init__(self, kernel: Any, options: Options, layout: Layout, target: Any, progress: bool):
        self._kernel, self._options, self._layout = kernel, options, layout
        self.target = target
        self._progress = progress
        self._plan: Plan = options.plan(target)
        self._state: Any = None
        self._machine: Machine | None = kernel.machine(target, int(options.num_warmup), drawn=options.init in DRAWN)
        self._calls = _CallSize(options, self._plan)
        self._budget = _Budget(fixed=options.chunk_size is not None)
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
        given = given_starts(self._options.init, self.target, chains, self._options.num_chains)
        args = (self.target, layout.place_data(key), layout.place_chains(chains), layout.place_chains(given.values))
        static = {"layout": layout, "max_tries": given.max_tries, "strategies": given.strategies}
        if self._machine is not None:
            find, static = begin_chains, {**static, "machine": self._machine}
            args = (*args, layout.place_data(self._kernel.first_metric(self._machine)))
        else:
            find, static = run_start, {**static, "kernel": self._kernel, "num_warmup": self._options.num_warmup}
        if layout.waits_on_permutes and _permutes(find.lower(*args, **static)):
            return False
        self._state, start = find(*args, **static)
        check_starts(self.target, start, layout, arguments, given.values)
        if layout.waits_on_permutes:
            advance, args, static = self._program(0, record=False)
            return not _permutes(advance.lower(*args, **static))
        return True

    def advance(self) -> None:
        """Warm up and sample; Ctrl-C ends it early, and goes on up where there is no draw yet."""
        options = self._options
        with Progress(options.num_warmup, options.num_samples, options.num_chains, enabled=self._progress) as bar:
            try:
                began = time.perf_counter()
                self._call(0, record=False)  # compiles
                self.seconds["compiling"] += time.perf_counter() - began
                if self._machine is not None:
                    self._stream(bar)
                else:
                    keep_warmup = "warmup" in options.groups
                    self._advance_phase("warm-up", self.warmup, options.num_warmup, bar, record=keep_warmup)
                    self._advance_phase("sampling", self.sampling, self._num_kept, bar, record=True)
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
            lp=phase.sample_stats.arrays().get("lp"),
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
            "layout": str(self._layout),
            "platform": jax.default_backend(),
            "compile_time": self.seconds["compiling"],
            "warmup_time": self.seconds["warm-up"],
            "sampling_time": self.seconds["sampling"],
            "num_leapfrogs_warmup": int(self.warmup.num_leapfrogs.sum()),
            "num_leapfrogs": int(self.sampling.num_leapfrogs.sum()),
            "complete": self.complete,
        }

    @property
    def _num_kept(self) -> int:
        """Transitions of the sampling phase up to the last draw that thinning keeps."""
        return self._options.num_samples // self._options.thinning * self._options.thinning

    def _stream(self, bar: Progress) -> None:
        """Warm up and sample, each chain at its own pace."""
        options = self._options
        while self.sampling.num_steps < self._num_kept:
            before = self.warmup.num_leapfrogs.sum(), self.sampling.num_leapfrogs.sum()
            called = time.perf_counter()
            try:
                chunk = self._call(self._budget.size, record="warmup" in options.groups)
                self._keep(chunk)
            finally:
                seconds = time.perf_counter() - called
                self._share(
                    seconds, self.warmup.num_leapfrogs.sum() - before[0], self.sampling.num_leapfrogs.sum() - before[1]
                )
            self._budget.adapt(int(chunk.iterations.max()), seconds)
            name, phase = ("sampling", self.sampling) if self.sampling.num_steps else ("warm-up", self.warmup)
            bar.update(name, phase.num_steps, num_diverging=int(phase.num_diverging.sum()), step_size=phase.step_size)

    def _share(self, seconds: float, warming: int, sampling: int) -> None:
        """Add the time of a call to both phases, by the leapfrogs of the rows that it has handed back."""
        total = warming + sampling
        share = float(warming / total) if total else float(self.sampling.num_steps == 0)
        self.seconds["warm-up"] += share * seconds
        self.seconds["sampling"] += (1 - share) * seconds

    def _keep(self, chunk: Chunk) -> None:
        """Keep what a call has handed back: of each chain the rows it has filled, warm-up first."""
        options = self._options
        for chain in range(options.num_chains):
            count = int(chunk.counts[chain])
            num_warm = int(chunk.infos["warmup"][:count, chain].sum())
            infos = {name: value for name, value in chunk.infos.items() if name != "warmup"}
            infos, draws = jax.tree.map(lambda x, chain=chain: x[:, chain], (infos, chunk.draws))
            for phase, part, kept in (
                (self.warmup, slice(0, num_warm), "warmup" in options.groups),
                (self.sampling, slice(num_warm, count), True),
            ):
                own, rows = jax.tree.map(lambda x, part=part: x[part], (infos, draws))
                phase.append(chain, own, rows if kept else None, thinned=False)

    def _advance_phase(self, name: str, phase: Phase, num_steps: int, bar: Progress, *, record: bool) -> None:
        began = time.perf_counter()
        try:
            while phase.num_steps < num_steps:
                count = min(self._calls.size, num_steps - phase.num_steps)
                called = time.perf_counter()
                infos, draws = self._call(count, record=record)
                for chain in range(self._options.num_chains):
                    own = {name: value[:count, chain] for name, value in infos._asdict().items()}
                    rows = jax.tree.map(lambda x, chain=chain: x[:, chain], draws) if record else None
                    phase.append(chain, own, rows, thinned=True)
                self._calls.adapt(time.perf_counter() - called)
                bar.update(
                    name, phase.num_steps, num_diverging=int(phase.num_diverging.sum()), step_size=phase.step_size
                )
        finally:
            self.seconds[name] += time.perf_counter() - began

    def _program(self, count: int, *, record: bool) -> tuple[Any, tuple, dict[str, Any]]:
        """The compiled program of a chunk, its arguments, and what is static in it.

        Args:
            count: transitions of all chains, or leapfrog steps where each chain goes at its own pace.
            record: whether draws are kept, in the latter case those of the warm-up.
        """
        static = {"layout": self._layout, "plan": self._plan}
        if self._machine is None:
            numbers = jnp.asarray(count, jnp.int32), jnp.asarray(record)
            return run_chunk, (self.target, self._state, *numbers), {**static, "kernel": self._kernel}
        last = self._options.num_warmup + self._num_kept
        numbers = jnp.asarray(last, jnp.int32), jnp.asarray(count, jnp.int32), jnp.asarray(record)
        return advance_chains, (self.target, self._state, *numbers), {**static, "machine": self._machine}

    def _call(self, count: int, *, record: bool) -> Any:
        """Run a chunk; what comes back is on the host."""
        program, args, static = self._program(count, record=record)
        state, *out = program(*args, **static)
        out = jax.device_get(out)
        self._state = state
        return out[0] if self._machine is not None else out


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


class _Budget:
    """How many leapfrog steps the next call makes: such that it takes half a second, without end if rows end it."""

    def __init__(self, *, fixed: bool):
        self._fixed = fixed
        self.size = 2**31 - 1 if fixed else FIRST_CALL_STEPS

    def adapt(self, iterations: int, seconds: float) -> None:
        """Learn from the last call."""
        if self._fixed or not iterations:
            return
        wanted = iterations * SECONDS_PER_CALL / max(seconds, 1e-6)
        self.size = int(np.clip(wanted, self.size / 4, self.size * 4))
        self.size = min(max(self.size, 1), 2**30)
