"""One run of a sampler: the loop on the host that calls the compiled programs and keeps what they return."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import PartitionSpec

from ppleffects.errors import CheckpointError, LayoutWarning
from ppleffects.inference import diagnostics, processes, state_file
from ppleffects.inference.ahead import compile_ahead, is_uncommitted, without_collection
from ppleffects.inference.checkpoint import Checkpoint, Saved
from ppleffects.inference.chunks import Plan, run_chunk, run_start
from ppleffects.inference.failure import check_starts
from ppleffects.inference.identity import PADDED
from ppleffects.inference.interrupt import Interrupt
from ppleffects.inference.kernel import density_arguments
from ppleffects.inference.layout import Layout
from ppleffects.inference.machine import Machine
from ppleffects.inference.options import Options
from ppleffects.inference.progress import Progress
from ppleffects.inference.record import GROUPS, Record
from ppleffects.inference.report import Report, diagnose
from ppleffects.inference.rows import RowAxis
from ppleffects.inference.starts import PRIOR, UNIFORM, given_starts
from ppleffects.inference.store import Phase
from ppleffects.inference.stream import advance_chains, begin_chains

# Without chunk_size=, calls are sized to take about this long: often enough for a progress bar and for Ctrl-C.
SECONDS_PER_CALL = 0.5
# Starts of these kinds differ from key to key, so that a chain can try several.
DRAWN = (None, UNIFORM, PRIOR)
FIRST_CALL_ROWS = 10
FIRST_CALL_STEPS = 100


class Run:
    """One run, from the starts of its chains to the arrays of its draws.

    Args:
        kernel: the sampler.
        options: the settings of the run.
        layout: where it runs.
        target: the density.
        axes: where padded rows lie in the values of sites.
        progress: whether to show how far it is.
        checkpoint: where it is kept; None for memory alone.
        about: further attributes of its result.

    Attributes:
        bar: shows how far it is, where it is entered.
    """

    def __init__(
        self, kernel: Any, options: Options, layout: Layout, target: Any, axes: Mapping[str, RowAxis], *,
        progress: bool, checkpoint: Checkpoint | None, about: dict[str, Any],
    ):  # fmt: skip
        self._kernel, self._options, self._layout = kernel, options, layout
        self.target = layout.place_data(target)
        self.bar = Progress(options.num_warmup, options.num_samples, options.num_chains, enabled=progress)
        self._checkpoint, self._about = checkpoint, about
        self._plan: Plan = options.plan(target)
        self._state: Any = None
        self._compiling: Future | None = None
        self._machine: Machine | None = kernel.machine(target, int(options.num_warmup), drawn=options.init in DRAWN)
        self._calls = _CallSize(options, self._plan)
        self._budget = _Budget(fixed=options.chunk_size is not None)
        self._record = Record(options, axes, checkpoint)
        self.warmup, self.sampling = self._record.warmup, self._record.sampling
        self.seconds = {"compiling": 0.0, "warm-up": 0.0, "sampling": 0.0}

    @property
    def complete(self) -> bool:
        """Whether all draws are there."""
        return self.sampling.num_steps >= self._num_kept

    def start(self, key: Array, arguments: dict[str, Any]) -> None:
        """Find a starting point for each chain, or go on where an earlier run has ended.

        Args:
            key: a typed key.
            arguments: the model's arguments by name, for messages.
        """
        began = time.perf_counter()
        saved = self._load()
        if self._checkpoint is not None and saved is not None and saved.commit and not self.complete:
            self._resume(self._checkpoint, saved, key)
        elif not self.complete and not self._start(key, arguments):
            warnings.warn(
                "the density permutes values among shards, which on CPUs makes groups of chains wait for each other; "
                "each device runs every chain instead",
                LayoutWarning,
                stacklevel=4,
            )
            self._layout = self._layout.together()
            self._start(key, arguments)
        self.seconds["compiling"] += time.perf_counter() - began

    def _load(self) -> Saved | None:
        """What an earlier run has left in the checkpoint; its draws are taken over."""
        if self._checkpoint is None:
            return None
        saved = self._checkpoint.load(self._options.num_samples)
        if saved is not None:
            self._record.load(self._checkpoint, saved)
            self.seconds.update(saved.seconds)
        return saved

    def _start(self, key: Array, arguments: dict[str, Any]) -> bool:
        """Find the starting points, or return False where the programs would never end on this layout."""
        layout = self._layout
        find, args, static, given = self._start_program(key)
        if layout.waits_on_permutes and _permutes(find.lower(*args, **static)):
            return False
        if is_uncommitted(args):
            with without_collection():
                self._state, _ = find.eval_shape(*args, **static)
                self._compiling = compile_ahead(*self._program(0, record=False))  # first, since it takes longer
                compile_ahead(find, args, static).result()
        self._state, start = find(*args, **static)
        check_starts(self.target, start, layout, arguments, given.values)
        if layout.waits_on_permutes:
            advance, args, static = self._program(0, record=False)
            return not _permutes(advance.lower(*args, **static))
        return True

    def _start_program(self, key: Array) -> tuple[Any, tuple, dict[str, Any], Any]:
        """The compiled program that finds starts, its arguments, what is static in it, and the given starts."""
        layout, chains = self._layout, self._layout.chains
        given = given_starts(self._options.init, self.target, chains, self._options.num_chains)
        args = (self.target, layout.place_data(key), layout.place_chains(chains), layout.place_chains(given.values))
        static = {"layout": layout, "max_tries": given.max_tries, "strategies": given.strategies}
        if self._machine is not None:
            args = (*args, layout.place_data(self._kernel.first_metric(self._machine)))
            return begin_chains, args, {**static, "machine": self._machine}, given
        return run_start, args, {**static, "kernel": self._kernel, "num_warmup": self._options.num_warmup}, given

    def _resume(self, checkpoint: Checkpoint, saved: Saved, key: Array) -> None:
        """Take the state of an earlier run."""
        find, args, static, _ = self._start_program(key)
        expected, _ = find.eval_shape(*args, **static)
        now, before = checkpoint.identity.layout, saved.identity.layout
        if now[PADDED] != before[PADDED]:
            raise CheckpointError(
                "latents lie along rows that this mesh pads to another length than that of the checkpoint",
                expected=f"{before[PADDED]}, as in {checkpoint.path}",
                found=f"{now[PADDED]}",
                fix="go on with as many shards of rows as before, on whatever devices",
            )
        arrays = state_file.read(checkpoint.state_path, expected, self._state_axes, self._options.num_chains)

        def spec_of(path: str, ndim: int) -> list[Any] | PartitionSpec | None:
            if now == before:
                return saved.specs.get(path)
            return None if self._machine is None else self._machine.coordinates.spec_of(path, ndim, self._layout.spec())

        self._state = state_file.restored(arrays, expected, self._state_axes, self._layout, spec_of, key)
        if now != before:
            self._check_density(checkpoint)
            names = [name for name in now if now[name] != before.get(name)]
            warnings.warn(
                "the run goes on elsewhere or with other versions than it began: saved draws stay, and those to come "
                f"are the same in law alone ({', '.join(f'{x}: {now[x]}, was {before.get(x)}' for x in names)})",
                LayoutWarning,
                stacklevel=5,
            )

    def _check_density(self, checkpoint: Checkpoint) -> None:
        """Where equations cannot be compared, see that the density is what it was where the chains stand.

        Raises:
            CheckpointError: it is another.
        """
        if self._machine is None:
            position, before = self._state.position, self._state.log_density
            unpack = partial(density_arguments, self.target)
        else:
            point = self._state.path.point
            position, before, unpack = point.position, point.log_density, self._machine.coordinates.unpack
        density = jax.jit(jax.vmap(lambda target, x: target.log_density(unpack(x)), in_axes=(None, 0)))
        before, now = (np.asarray(processes.fetch(x)) for x in (before, density(self.target, position)))
        tolerance = 1e-6 if before.dtype == np.float64 else 1e-3
        if not np.allclose(now, before, rtol=tolerance, atol=tolerance):
            raise CheckpointError(
                "the checkpoint belongs to another run: the density differs",
                expected=f"log-densities {before.tolist()} where the chains stand, as in {checkpoint.path}",
                found=f"{now.tolist()}",
                fix="call mcmc with the same model, or give another path; what is there stays as it is",
            )

    def advance(self, make_tree: Callable[[dict[str, Any]], Any]) -> None:
        """Warm up and sample; Ctrl-C ends it early, and goes on up where there is no draw yet.

        Args:
            make_tree: a tree of groups of draws, with the attributes so far.
        """
        if self.complete:
            return
        try:
            began = time.perf_counter()
            with without_collection():
                diagnostics.load()
                if self._compiling is not None:
                    self._compiling.result()
                blank = self._call(0, record=False)  # compiles where that is not done
            self.seconds["compiling"] += time.perf_counter() - began
            self._record.open(*self._parts(blank), make_tree)
            with Interrupt() as interrupt:
                advance = self._in_step if self._machine is None else self._at_own_pace
                advance(interrupt)
            self._commit()
        except KeyboardInterrupt:
            if jax.process_count() > 1:
                raise  # the others are in the middle of a call
            self._load()  # draws that are not written yet may lack a part
        if not (self.complete or self.sampling.sample_stats.length or self.warmup.sample_stats.length):
            raise KeyboardInterrupt

    @property
    def layout(self) -> Layout:
        """Where it runs."""
        return self._layout

    def result(self, make_tree: Callable[[Mapping[str, Any], dict[str, Any]], Any], report: dict[str, Any]) -> Any:
        """The tree of all that is there.

        Args:
            make_tree: a tree of groups of draws and attributes.
            report: the attributes of the report.
        """
        attrs = {**self.attrs(), **report}
        if self._checkpoint is None:
            return make_tree(self._record.groups(), attrs)
        self._checkpoint.publish(attrs)
        return self._checkpoint.tree(list(GROUPS), attrs)

    def report(self) -> Report:
        """The diagnostics of the draws after warm-up."""
        phase = self.sampling
        stats = phase.sample_stats.arrays()
        energy = stats.get("energy", np.zeros((self._options.num_chains, 0)))
        return diagnose(
            phase.posterior.arrays(),
            energy,
            num_transitions=phase.num_steps * self._options.num_chains,
            num_diverging=int(phase.num_diverging.sum()),
            num_saturated=int(phase.num_saturated.sum()),
            lp=stats.get("lp"),
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
            **self._about,
        }

    @property
    def _num_kept(self) -> int:
        """Transitions of the sampling phase up to the last draw that thinning keeps."""
        return self._options.num_samples // self._options.thinning * self._options.thinning

    def _at_own_pace(self, interrupt: Interrupt) -> None:
        """Warm up and sample, each chain at its own pace."""
        options = self._options
        while not self.complete:
            before = self.warmup.num_leapfrogs.sum(), self.sampling.num_leapfrogs.sum()
            called = time.perf_counter()
            chunk = self._call(self._budget.size, record="warmup" in options.groups)
            self._record.add(chunk)
            seconds = time.perf_counter() - called
            self._share(
                seconds, self.warmup.num_leapfrogs.sum() - before[0], self.sampling.num_leapfrogs.sum() - before[1]
            )
            self._budget.adapt(int(chunk.iterations.max()), seconds)
            name, phase = ("sampling", self.sampling) if self.sampling.num_steps else ("warm-up", self.warmup)
            if self._between_calls(name, phase, self._budget, interrupt):
                return

    def _in_step(self, interrupt: Interrupt) -> None:
        """Warm up and sample, all chains making a transition together."""
        for name, phase in (("warm-up", self.warmup), ("sampling", self.sampling)):
            record = phase is self.sampling or "warmup" in self._options.groups
            num_steps = self._num_kept if phase is self.sampling else self._options.num_warmup
            while phase.num_steps < num_steps:
                count = min(self._calls.size, num_steps - phase.num_steps)
                called = time.perf_counter()
                infos, draws = self._call(count, record=record)
                self._record.add_steps(phase, count, infos._asdict(), draws)
                seconds = time.perf_counter() - called
                self.seconds[name] += seconds
                self._calls.adapt(seconds)
                if self._between_calls(name, phase, self._calls, interrupt):
                    return

    def _between_calls(self, name: str, phase: Phase, next_call: _CallSize | _Budget, interrupt: Interrupt) -> bool:
        """Show how far it is, write what is due, agree with all processes on the next call, and whether to stop."""
        self.bar.update(
            name,
            phase.num_steps,
            counts=phase.steps_of_chains,
            num_diverging=int(phase.num_diverging.sum()),
            step_size=phase.step_size,
        )
        next_call.size, is_due, stop = processes.decided(next_call.size, self._record.is_due, interrupt.requested)
        if is_due and not stop:
            self._commit()
        return stop

    def _commit(self) -> None:
        """Write draws and state to the checkpoint, where there is one."""
        if self._checkpoint is not None:
            began = time.monotonic()
            arrays = state_file.host_copy(self._state, self._state_axes, self._options.num_chains)
            self._record.commit(arrays, state_file.spec_names(self._state), self.seconds, self.attrs())
            self._checkpoint.took(time.monotonic() - began)

    @property
    def _state_axes(self) -> Any:
        """A prefix of the state: 0 for what each chain has of its own, None for what all have in common."""
        return self._kernel.state_axes if self._machine is None else 0

    def _share(self, seconds: float, warming: int, sampling: int) -> None:
        """Add the time of a call to both phases, by the leapfrogs of the rows that it has handed back."""
        total = warming + sampling
        share = float(warming / total) if total else float(self.sampling.num_steps == 0)
        self.seconds["warm-up"] += share * seconds
        self.seconds["sampling"] += (1 - share) * seconds

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
        out = processes.fetch(out)
        self._state = state
        return out[0] if self._machine is not None else out

    def _parts(self, out: Any) -> tuple[dict[str, Any], Any]:
        """What happened, and the draws, of what a call has handed back."""
        return (out[0]._asdict(), out[1]) if self._machine is None else (out.infos, out.draws)


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
