"""NUTS and HMC over the chains of one device: a loop whose every iteration is one leapfrog step of every chain.

A chain that ends a trajectory begins the next in the same iteration, so that no chain waits for the tree of another.
What happens rarely (a new metric, momenta for the next trajectories) is done between stretches of that loop.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ppleffects.inference.adaptation import (
    FIRST_WINDOW,
    MAX_WINDOW,
    MAX_WINDOW_SCALARS,
    MIN_WINDOW,
    StepSize,
    adapt_step,
    estimate,
    start_step,
    window_ends,
)
from ppleffects.inference.chain import STATS, Chain, Effort, Noise, Rows, Trials, Window
from ppleffects.inference.coordinates import Coordinates
from ppleffects.inference.metric import Metric, Shape, Tree, identity
from ppleffects.inference.trajectory import Density, Point, Trajectory, advance, advance_fixed, begin, once
from ppleffects.interpretations.draw import name_digest

# A chain tries several starts, each for so many trajectories. Until there is a metric they are doubled at most so many
# times: they would be long and of little use.
TRIAL, TRIAL_DEPTH = 20, 6
# A start is left for another only where the log-density says that hardly any mass can be near it: by a difference of
# more than so much, and so much per coordinate.
HOPELESS, HOPELESS_PER_COORDINATE = 10.0, 2.0
# Momenta are drawn for at most so many trajectories at once, and for one where they have more scalars than this.
MAX_NOISE_DRAWS, MAX_NOISE = 512, 8192
# Warm-up may end after so many trajectories, when those of a window are no longer shorter than this share of those of
# the window before; so many more then adapt the step size alone.
MIN_WARMUP, SHORTER, NUM_FINAL = 200, 0.8, 60
# The acceptance probability that step sizes are adapted to. A window of which a trajectory diverges halves its distance
# from 1, down to a least; the first windows, whose metric is a rough one, do not count.
TARGET_ACCEPT, CAREFUL, CAREFUL_FROM = 0.8, 0.95, 120
# What changes only between stretches of leapfrog steps.
FIXED = ("metric", "target", "trials", "noise", "key")


class Machine(NamedTuple):
    """The sampler of one target: static settings and pure functions.

    Attributes:
        coordinates: the layout of a position.
        num_warmup: trajectories that adapt.
        max_tree_depth: a trajectory doubles at most so many times.
        max_delta_energy: an energy error beyond it is a divergence.
        target_accept: mean acceptance probability that the step size is adapted to; None for one that rises where
            trajectories diverge.
        shape: what the metric has beside its diagonal.
        step_size: length of all steps; None to adapt it.
        adapt_metric: whether the metric is estimated; the identity otherwise.
        early_stop: whether warm-up ends when a new metric no longer makes trajectories shorter.
        pool_chains: whether the metric of a chain is estimated from the draws of all chains of its device.
        num_trials: starts that a chain tries.
        length: of each trajectory, and the most steps that it takes; None for trajectories that end at a U-turn.
    """

    coordinates: Coordinates
    num_warmup: int
    max_tree_depth: int
    max_delta_energy: float
    target_accept: float | None
    shape: Shape
    step_size: float | None = None
    adapt_metric: bool = True
    early_stop: bool = True
    pool_chains: bool = False
    num_trials: int = 1
    length: tuple[float, int] | None = None

    @property
    def stats(self) -> dict[str, Any]:
        """The statistics of its trajectories, as ``STATS`` has them: without trees there is no depth."""
        return {name: kind for name, kind in STATS.items() if self.length is None or "depth" not in name}

    def density(self, target: Any) -> Density:
        """The log-density of a packed position and its gradient."""

        def log_density(packed: Tree) -> Array:
            return jnp.asarray(target.log_density(self.coordinates.unpack(packed)), jnp.result_type(float))

        return jax.jit(jax.value_and_grad(log_density))

    def init(self, target: Any, positions: dict[str, Array], key: Array, metric: Metric | None = None) -> Chain:
        """A chain that tries some unconstrained positions as its start, given on a leading axis.

        Args:
            target: the density.
            positions: unconstrained values by site. ``(start, *site)``
            key: the chain's key.
            metric: what to begin with; the identity by default.
        """
        density = self.density(target)
        zero = jnp.zeros((), jnp.int32)
        noise = self._noise(key, zero)
        packed = jax.vmap(self.coordinates.pack)(positions)
        first = self._first_metric(jax.tree.map(lambda x: x[0], packed)) if metric is None else metric

        def trial(packed: Tree) -> Trials:
            log_density, gradient = density(packed)
            point = Point(packed, log_density, gradient, log_density)
            if self.step_size is not None:
                return Trials(point, jnp.full_like(log_density, np.log(self.step_size)))
            path = self._path(first, point, noise, key, zero)
            return Trials(point, _reasonable_step(density, first, path, self._first_target))

        trials = jax.vmap(trial)(packed)
        point, log_step = jax.tree.map(lambda x: x[0], trials)
        path = self._path(first, point, noise, key, zero)
        blank = self.coordinates.laid_out(path.checkpoints.momenta, leading=1)
        path = path._replace(checkpoints=path.checkpoints._replace(momenta=blank, middles=blank))
        rows = _repeated(jax.tree.map(jnp.zeros_like, point.position), self._window_length)
        window = Window(*[self.coordinates.laid_out(rows, leading=1)] * 2)
        effort, target_accept = Effort(*[jnp.zeros_like(log_step)] * 4), jnp.full_like(log_step, self._first_target)
        step = start_step(log_step)
        return Chain(path, first, step, target_accept, effort, trials, window, noise, zero, zero > 0, key)

    def run(
        self, target: Any, chains: Chain, rows: Rows, last: Array, budget: Array
    ) -> tuple[Chain, Rows, Array, Array]:
        """Make leapfrog steps until the budget is spent, a chain's rows are full, or all chains have ended.

        Args:
            target: the density.
            chains: the chains of this device. Leading axis of chains.
            rows: buffers.
            last: trajectories at which a chain ends.
            budget: leapfrog steps per chain.

        Returns:
            The chains, the buffers, the number of rows that each chain has filled, and the iterations made.
        """
        num_rows = rows.stats.shape[0]
        density = self.density(target)

        def going(state: tuple) -> Array:
            chains, _, counts, iterations = state
            return (iterations < budget) & jnp.any(chains.number < last) & jnp.all(counts < num_rows)

        def stretch(state: tuple) -> tuple:
            # What the loop within only reads stays out of what it carries.
            chains, rows, counts, iterations = state
            begun = self._renew_all(chains)

            def iteration(state: tuple) -> tuple:
                moving, rows, counts, iterations = state
                chains, rows, counts = self._iteration(density, _with_fixed(moving, begun), rows, counts, last)
                return _moving(chains), rows, counts, iterations + 1

            def unhindered(state: tuple) -> Array:
                return going(state) & ~jnp.any(state[0].waiting)

            moving, *rest = jax.lax.while_loop(unhindered, iteration, (_moving(begun), rows, counts, iterations))
            return _with_fixed(moving, begun), *rest

        counts = jnp.zeros_like(chains.number)
        return jax.lax.while_loop(going, stretch, (chains, rows, counts, jnp.zeros((), jnp.int32)))

    def _iteration(
        self, density: Density, chains: Chain, rows: Rows, counts: Array, last: Array
    ) -> tuple[Chain, Rows, Array]:
        """All chains make a leapfrog step; then those that have ended a trajectory begin the next, one after the other.

        What the end of a trajectory takes is no part of the step, and is done for no other chain.
        """
        moves = once(~chains.waiting & (chains.number < last))
        path = jax.vmap(lambda chain: self._advance(density, chain))(chains)
        checkpoints = path.checkpoints  # of no use to a chain that does not move
        path, old = path._replace(checkpoints=()), chains.path._replace(checkpoints=())
        chains = chains._replace(path=_where(moves, path, old))

        def ended(moving: Chain) -> Array:
            return moving.path.ended & ~moving.waiting & (moving.number < last)

        def end_one(state: tuple) -> tuple:
            moving, rows, counts = state
            index = jnp.argmax(ended(moving))
            chain = jax.tree.map(lambda x: x[index], _with_fixed(moving._replace(window=()), chains))
            point = chain.path.point
            row = Rows(point.position, self._stats(chain))
            rows = jax.tree.map(lambda all, new: _written(all, new, counts[index], index), rows, row)
            slot, latest = chain.number % self._window_length, Window(point.position, point.gradient)
            window = jax.tree.map(lambda all, new: _written(all, new, index, slot), moving.window, latest)
            begun = _moving(self._begun(chain))._replace(window=())
            moving = jax.tree.map(lambda all, new: _written(all, new, index), moving._replace(window=()), begun)
            return moving._replace(window=window), rows, counts.at[index].add(1)

        state = _moving(chains), rows, counts
        if counts.size == 1:  # in a loop, XLA does beforehand, at each step, what is the same in all its iterations
            moving, rows, counts = jax.lax.cond(jnp.any(ended(chains)), end_one, lambda state: state, state)
        else:
            moving, rows, counts = jax.lax.while_loop(lambda state: jnp.any(ended(state[0])), end_one, state)
        chains = _with_fixed(moving, chains)
        return chains._replace(path=chains.path._replace(checkpoints=checkpoints)), rows, counts

    def _begun(self, chain: Chain) -> Chain:
        """A chain that has ended a trajectory: its step size adapted, and the next begun."""
        number, path = chain.number + 1, chain.path
        effort = chain.effort._replace(
            num_steps=chain.effort.num_steps + path.num_steps,
            num_paths=chain.effort.num_paths + 1,
            num_diverging=chain.effort.num_diverging + path.diverging,
        )
        begun = self._path(chain.metric, path.point, chain.noise, chain.key, number)
        return chain._replace(
            path=begun._replace(checkpoints=()), step=self._adapted(chain), effort=effort, number=number,
            waiting=self._must_wait(number),
        )  # fmt: skip

    def _advance(self, density: Density, chain: Chain) -> Trajectory:
        step_size = jnp.exp(self._log_step(chain))
        if self.length is not None:
            wanted = jnp.ceil(self.length[0] / step_size)
            num_steps = jnp.clip(wanted, 1, self.length[1])
            # The length is exact, whatever the step size, except where the number of steps is cut.
            step_size = jnp.where(wanted > num_steps, step_size, self.length[0] / num_steps)
            return advance_fixed(density, chain.metric, step_size, chain.path, num_steps, self.max_delta_energy)
        trying = min(self.max_tree_depth, TRIAL_DEPTH)
        estimated = self._trials_end + FIRST_WINDOW
        depth = jnp.where(chain.number < min(estimated, self.num_warmup), trying, self.max_tree_depth)
        return advance(density, chain.metric, step_size, chain.path, depth, self.max_delta_energy)

    def _log_step(self, chain: Chain) -> Array:
        return jnp.where(chain.number < self.num_warmup, chain.step.log_step, chain.step.log_average)

    def _stats(self, chain: Chain) -> Array:
        path = chain.path
        values = {
            "lp": path.point.log_density,
            "energy": path.point.energy,
            "acceptance_rate": path.acceptance / path.num_steps,
            "diverging": path.diverging,
            "n_steps": path.num_steps,
            "tree_depth": path.depth + (path.leaf > 0),
            "reached_max_treedepth": (path.depth >= self.max_tree_depth) & ~path.turning & ~path.diverging,
            "step_size": jnp.exp(self._log_step(chain)),
            "warmup": chain.number < self.num_warmup,
        }
        return jnp.stack([values[name].astype(path.energy.dtype) for name in self.stats])

    def _adapted(self, chain: Chain) -> StepSize:
        if self.step_size is not None:
            return chain.step
        step = adapt_step(chain.step, chain.path.acceptance / chain.path.num_steps, chain.target)
        return _where(chain.number < self.num_warmup, step, chain.step)

    def _must_wait(self, number: Array) -> Array:
        """Whether something is to be renewed before the trajectory of this number begins."""
        return (number % self._noise_length == 0) | self._ends_trial(number) | self._ends_window(number)

    def _ends_trial(self, number: Array) -> Array:
        return (number > 0) & (number <= self._trials_end) & (number % self._trial_length == 0)

    def _ends_window(self, number: Array) -> Array:
        ends = [self._trials_end + end for end in window_ends(self.num_warmup - self._trials_end)]
        ends = ends if self.adapt_metric else []
        return jnp.any(number == jnp.asarray(ends, number.dtype)) if ends else jnp.zeros(number.shape, bool)

    def _renew_all(self, chains: Chain) -> Chain:
        """Renew noise and metric of the chains that wait for it, one after the other, and begin their trajectories."""

        def one(chains: Chain) -> Chain:
            index = jnp.argmax(chains.waiting)
            renewed = self._renewed(jax.tree.map(lambda x: x[index], chains), chains if self.pool_chains else None)
            window = chains.window  # only read
            changed = jax.tree.map(
                lambda all, new: all.at[index].set(new), chains._replace(window=()), renewed._replace(window=())
            )
            return changed._replace(window=window)

        return jax.lax.while_loop(lambda chains: jnp.any(chains.waiting), one, chains)

    def _renewed(self, chain: Chain, pool: Chain | None) -> Chain:
        number = chain.number
        adapted = self._chosen(chain)
        adapted = jax.lax.cond(
            self._ends_window(number), lambda chain: self._estimated(chain, pool), lambda chain: chain, adapted
        )
        later = adapted.number
        noise = jax.lax.cond(
            (later % self._noise_length == 0) | (later != number),
            lambda: self._noise(chain.key, later),
            lambda: chain.noise,
        )
        path = self._path(adapted.metric, adapted.path.point, noise, chain.key, later)
        return adapted._replace(path=path, noise=noise, waiting=jnp.zeros_like(chain.waiting))

    def _chosen(self, chain: Chain) -> Chain:
        """After a trial, the next start, or the best of those that were tried; else the chain as it is."""
        if self.num_trials == 1:
            return chain
        ends, point = self._ends_trial(chain.number), chain.path.point
        last = jnp.clip(chain.number // self._trial_length - 1, 0, self.num_trials - 1)
        ended = Trials(point, chain.step.log_step)
        trials = jax.tree.map(lambda all, new: all.at[last].set(jnp.where(ends, new, all[last])), chain.trials, ended)
        log_density = trials.point.log_density
        hopeless = HOPELESS + HOPELESS_PER_COORDINATE * self.coordinates.size
        hopeful = log_density > jnp.max(log_density) - hopeless
        next = jnp.where(chain.number < self._trials_end, last + 1, jnp.argmax(hopeful))
        start = jax.tree.map(lambda x: x[next], trials)
        step = start_step(start.log_step) if self.step_size is None else chain.step
        return chain._replace(
            path=chain.path._replace(point=_where(ends, start.point, point)),
            step=_where(ends, step, chain.step),
            trials=trials,
        )

    def _path(self, metric: Metric, point: Point, noise: Noise, key: Array, number: Array) -> Trajectory:
        """The trajectory of this number, begun at a point."""
        momentum, forward = jax.tree.map(lambda x: x[number % self._noise_length], noise)
        key = jax.random.fold_in(jax.random.fold_in(key, 0), number)
        return begin(
            metric, point.position, point.log_density, point.gradient, momentum, forward, key, self.max_tree_depth
        )

    def _noise(self, key: Array, number: Array) -> Noise:
        """Momenta and directions from this number on; those of a site depend on no other site, nor on where it lies."""
        key = jax.random.fold_in(jax.random.fold_in(key, 1), number // self._noise_length)
        forward = jax.random.bernoulli(jax.random.fold_in(key, 0), shape=(self._noise_length,))

        def normal(name: str, shape: tuple[int, ...]) -> Array:
            own = jax.random.fold_in(jax.random.fold_in(key, 1), jnp.uint32(name_digest(name)))
            return jax.random.normal(own, (self._noise_length, *shape), jnp.result_type(float))

        return Noise(self.coordinates.pack_rows(normal), forward)

    def _estimated(self, chain: Chain, pool: Chain | None) -> Chain:
        """The chain with the metric of the later half of its draws, its step size to adapt anew, and its number.

        Args:
            chain: a chain at the end of a window.
            pool: all chains of this device, where the draws of all count.
        """
        since = chain.number - self._trials_end
        if pool is None:
            window, (used, order) = chain.window, self._used(chain.number)
        else:
            window = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), pool.window)
            used = jax.vmap(self._used)(pool.number)[0].reshape(-1)
            order = jnp.argsort(~used)
        new = estimate(self.shape, window.draws, window.gradients, used, order)
        finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(new)]))
        effort = chain.effort.num_steps / jnp.maximum(chain.effort.num_paths, 1)
        settled = self.early_stop & (since >= MIN_WARMUP) & (effort > SHORTER * chain.effort.before)
        nothing = jnp.zeros_like(effort)
        careful = (since >= CAREFUL_FROM) & (chain.effort.num_diverging > 0) & (self.target_accept is None)
        target = jnp.where(careful, jnp.minimum(0.5 + 0.5 * chain.target, CAREFUL), chain.target)
        # A step size that suits the identity tells nothing of one that suits the first metric.
        usual = jnp.full_like(chain.step.log_step, -0.25 * np.log(max(self.coordinates.size, 1)))
        log_step = jnp.where((since <= FIRST_WINDOW) & finite, usual, chain.step.log_step)
        return chain._replace(
            metric=_where(finite, new, chain.metric),
            step=chain.step if self.step_size is not None else start_step(log_step),
            target=target,
            effort=Effort(nothing, nothing, nothing, effort),
            number=jnp.where(settled, jnp.maximum(chain.number, self.num_warmup - NUM_FINAL), chain.number),
        )

    def _used(self, number: Array) -> tuple[Array, Array]:
        """Which rows of a window the metric is estimated from, the later half of them, and all, the newest first."""
        length, since = self._window_length, number - self._trials_end
        wanted = jnp.clip(since // 2, FIRST_WINDOW, length)
        age = (number - 1 - jnp.arange(length)) % length  # of the row in each slot; 0 is the newest
        return (age < wanted) & (age < since), jnp.argsort(age)

    def _first_metric(self, position: Tree) -> Metric:
        metric = identity(position, self.shape)
        vectors = self.coordinates.laid_out(metric.vectors, leading=1)
        return metric._replace(scale=self.coordinates.laid_out(metric.scale), vectors=vectors)

    @property
    def _first_target(self) -> float:
        return TARGET_ACCEPT if self.target_accept is None else self.target_accept

    @property
    def _trial_length(self) -> int:
        """Trajectories of a trial; less than ``TRIAL`` in a short warm-up."""
        return max(min(TRIAL, self.num_warmup // (5 * self.num_trials)), 1)

    @property
    def _trials_end(self) -> int:
        """Trajectories until a start is chosen."""
        return self.num_trials * self._trial_length if self.num_warmup else 0

    @property
    def _window_length(self) -> int:
        fits = max(MAX_WINDOW_SCALARS // max(self.coordinates.size, 1), MIN_WINDOW)
        return max(min(MAX_WINDOW, fits, self.num_warmup // 2), FIRST_WINDOW)

    @property
    def _noise_length(self) -> int:
        return int(np.clip(MAX_NOISE // max(self.coordinates.size, 1), 1, MAX_NOISE_DRAWS))


def _moving(chains: Chain) -> Any:
    """What an iteration changes."""
    return chains._replace(**dict.fromkeys(FIXED, ()))


def _with_fixed(moving: Chain, chains: Chain) -> Chain:
    """What an iteration has changed, with what it does not change."""
    return moving._replace(**{name: getattr(chains, name) for name in FIXED})


def _written(buffer: Array, new: Array, *index: Array) -> Array:
    """A buffer with an entry overwritten: by no scatter, with which XLA compiles no loop as one function on CPUs."""
    starts = [jnp.asarray(i, jnp.int32) for i in (*index, *[0] * new.ndim)]
    return jax.lax.dynamic_update_slice(buffer, new.reshape(*[1] * len(index), *new.shape), starts)


def _repeated(tree: Tree, length: int) -> Tree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), tree)


def _reasonable_step(density: Density, metric: Metric, path: Trajectory, target: float) -> Array:
    """The log of a step size of which one step is accepted about as often as the target, by doubling and halving."""

    def acceptance(log_step: Array) -> Array:
        return advance_fixed(density, metric, jnp.exp(log_step), path, jnp.ones(()), jnp.inf).acceptance

    start = jnp.zeros_like(path.energy)
    up = acceptance(start) > target

    def going(state: tuple) -> Array:
        log_step, above, number = state
        return (above == up) & (number < 40)

    def step(state: tuple) -> tuple:
        log_step, _, number = state
        log_step = log_step + jnp.where(up, jnp.log(2.0), -jnp.log(2.0))
        return log_step, acceptance(log_step) > target, number + 1

    return jax.lax.while_loop(going, step, (start, up, 0))[0]


def _where(flags: Array, new: Any, old: Any) -> Any:
    """``new`` where a flag, or that of the chain on the leading axis, is set."""

    def where(a: Array, b: Array) -> Array:
        return jnp.where(flags.reshape(*flags.shape, *[1] * (a.ndim - flags.ndim)), a, b)

    return jax.tree.map(where, new, old)
