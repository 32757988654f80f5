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
    start_search,
    start_step,
    window_ends,
)
from ppleffects.inference.chain import STATS, Chain, Effort, Rows, Trials, Window
from ppleffects.inference.coordinates import Coordinates
from ppleffects.inference.metric import Metric, Shape, Tree, identity
from ppleffects.inference.noise import Noise, draw_noise, noise_length, quotient
from ppleffects.inference.trajectory import Density, Point, Trajectory, advance, advance_fixed, begin, begin_again, once

# A chain tries several starts, each for so many trajectories. Until there is a metric they are doubled at most so many
# times: they would be long and of little use.
TRIAL, TRIAL_DEPTH = 20, 6
# A start is left for another only where the log-density says that hardly any mass can be near it: by a difference of
# more than so much, and so much per coordinate.
HOPELESS, HOPELESS_PER_COORDINATE = 10.0, 2.0
# Warm-up may end after so many trajectories, when those of a window are no longer shorter than this share of those of
# the window before; so many more then adapt the step size alone.
MIN_WARMUP, SHORTER, NUM_FINAL = 200, 0.8, 60
# The acceptance probability that step sizes are adapted to. A window of which a trajectory diverges halves its distance
# from 1, down to a least; the first windows, whose metric is a rough one, do not count.
TARGET_ACCEPT, CAREFUL, CAREFUL_FROM = 0.8, 0.95, 120
# What changes only between stretches of leapfrog steps.
FIXED = ("metric", "target", "trials", "noise", "key")
# What of a trajectory is nothing when it begins, and what of a chain may change when a window ends.
COUNTED = ("depth", "leaf", "log_weight", "acceptance", "num_steps", "ended")
ESTIMATED = ("metric", "step", "target", "effort", "number")


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

    def init(
        self,
        target: Any,
        positions: dict[str, Array],
        key: Array,
        metric: Metric | None = None,
        *,
        points: tuple[Array, dict[str, Array]] | None = None,
    ) -> Chain:
        """A chain that tries some unconstrained positions as its start, given on a leading axis.

        Args:
            target: the density.
            positions: unconstrained values by site. ``(start, *site)``
            key: the chain's key.
            metric: what to begin with; the identity by default.
            points: log-densities and gradients there, where they are known; computed otherwise.
        """
        pack = jax.vmap(self.coordinates.pack)
        packed = pack(positions)
        if points is None:
            log_density, gradient = jax.vmap(self.density(target))(packed)
        else:
            log_density, gradient = points[0], pack(points[1])
        log_steps = jnp.full_like(log_density, 0.0 if self.step_size is None else np.log(self.step_size))
        trials = Trials(Point(packed, log_density, gradient, log_density), log_steps)
        point, log_step = _row(trials, 0)
        first = self._first_metric(point.position) if metric is None else metric

        nothing = self.coordinates.laid_out(jax.tree.map(jnp.zeros_like, point.position))
        zero, yes = jnp.zeros((), jnp.int32), jnp.ones((), bool)
        path = begin(first, point.position, point.log_density, point.gradient, nothing, key, self.max_tree_depth)
        blank = self.coordinates.laid_out(path.checkpoints.momenta, leading=1)
        path = path._replace(checkpoints=path.checkpoints._replace(momenta=blank, middles=blank))

        def rows(length: int) -> Tree:
            return self.coordinates.laid_out(_repeated(nothing, length), leading=1)

        window = Window(*[rows(self._window_length)] * 2)
        # What its trajectories begin with is drawn before the first.
        length = self._noise_length
        noise = Noise(rows(length), jnp.zeros(length, bool), jnp.broadcast_to(key, (length,)))
        effort, target_accept = Effort(*[jnp.zeros_like(log_step)] * 4), jnp.full_like(log_step, self._first_target)
        step = start_search(log_step) if self.step_size is None else start_step(log_step)
        return Chain(path, first, step, target_accept, effort, trials, window, noise, zero, yes, key)

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
        ended = once(path.ended & moves)

        def begin_one(state: tuple) -> tuple:
            path, window, rows, counts, left = state
            index = jnp.argmax(left)
            old = _row(path, index)
            chain = _row(chains._replace(path=()), index)._replace(path=old)
            row = Rows(old.point.position, self._stats(chain))
            rows = jax.tree.map(lambda all, new: _written(all, new, counts[index], index), rows, row)
            slot, latest = _remainder(chain.number, self._window_length), Window(old.point.position, old.point.gradient)
            window = jax.tree.map(lambda all, new: _written(all, new, index, slot), window, latest)
            new = self._begun(chain, jnp.where(chain.step.searching, chain.number, chain.number + 1))
            path = _with_row(path, index, old, new)
            counts = counts.at[index].add(jnp.where(chain.step.searching, 0, 1))
            return path, window, rows, counts, left & (jnp.arange(left.size) != index)

        state = chains.path, chains.window, rows, counts, ended
        if counts.size == 1:  # in a loop, XLA does beforehand, at each step, what is the same in all its iterations
            state = jax.lax.cond(ended[0], begin_one, lambda state: state, state)
        else:
            state = jax.lax.while_loop(lambda state: jnp.any(state[-1]), begin_one, state)
        path, window, rows, counts, _ = state
        chains = self._counted(chains, ended)
        nothing = {name: jnp.where(ended, 0, getattr(path, name)).astype(getattr(path, name).dtype) for name in COUNTED}
        return chains._replace(path=path._replace(checkpoints=checkpoints, **nothing), window=window), rows, counts

    def _counted(self, chains: Chain, ended: Array) -> Chain:
        """The chains with what adds up over their trajectories, where one has ended."""
        path, effort = chains.path, chains.effort
        step = _where(ended, jax.vmap(self._adapted)(chains), chains.step)
        ended = ended & ~chains.step.searching
        number = chains.number + ended
        return chains._replace(
            step=step,
            effort=effort._replace(
                num_steps=effort.num_steps + jnp.where(ended, path.num_steps, 0),
                num_paths=effort.num_paths + ended,
                num_diverging=effort.num_diverging + (ended & path.diverging),
            ),
            number=number,
            waiting=chains.waiting | (ended & jax.vmap(self._must_wait)(number)),
        )

    def _begun(self, chain: Chain, number: Array) -> Trajectory:
        """The trajectory of this number, begun where another has ended."""
        index = _remainder(number, self._noise_length)
        momentum, forward, key = _row(chain.noise, index)
        return begin_again(chain.metric, chain.path, momentum, forward, key)

    def _advance(self, density: Density, chain: Chain) -> Trajectory:
        step_size = jnp.exp(self._log_step(chain))
        if self.length is not None:
            wanted = jnp.ceil(self.length[0] / step_size)
            searching = chain.step.searching
            num_steps = jnp.where(searching, 1, jnp.clip(wanted, 1, self.length[1]))
            # The length is exact, whatever the step size, except where the number of steps is cut.
            step_size = jnp.where(searching | (wanted > num_steps), step_size, self.length[0] / num_steps)
            return advance_fixed(density, chain.metric, step_size, chain.path, num_steps, self.max_delta_energy)
        trying = min(self.max_tree_depth, TRIAL_DEPTH)
        estimated = self._trials_end + FIRST_WINDOW
        depth = jnp.where(chain.number < min(estimated, self.num_warmup), trying, self.max_tree_depth)
        depth = jnp.where(chain.step.searching, 1, depth)
        return advance(density, chain.metric, step_size, chain.path, depth, self.max_delta_energy)

    def _log_step(self, chain: Chain) -> Array:
        adapting = (chain.number < self.num_warmup) | chain.step.searching
        return jnp.where(adapting, chain.step.log_step, chain.step.log_average)

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
        return _where((chain.number < self.num_warmup) | chain.step.searching, step, chain.step)

    def _must_wait(self, number: Array) -> Array:
        """Whether something is to be renewed before the trajectory of this number begins."""
        return (_remainder(number, self._noise_length) == 0) | self._ends_trial(number) | self._ends_window(number)

    def _ends_trial(self, number: Array) -> Array:
        return (number > 0) & (number <= self._trials_end) & (_remainder(number, self._trial_length) == 0)

    def _ends_window(self, number: Array) -> Array:
        ends = self._window_ends
        return jnp.any(number == jnp.asarray(ends, number.dtype)) if ends else jnp.zeros(number.shape, bool)

    def _renew_all(self, chains: Chain) -> Chain:
        """Renew noise and metric of the chains that wait for it, one after the other, and begin their trajectories."""

        def one(chains: Chain) -> Chain:
            index = jnp.argmax(chains.waiting)
            chain = _row(chains, index)
            renewed = self._renewed(chain, chains if self.pool_chains else None)
            return _with_row(chains, index, chain, renewed)

        return jax.lax.while_loop(lambda chains: jnp.any(chains.waiting), one, chains)

    def _renewed(self, chain: Chain, pool: Chain | None) -> Chain:
        before = chain.number
        chain = self._chosen(chain)
        if self._window_ends:
            estimated = jax.lax.cond(
                self._ends_window(before),
                lambda: _named(self._estimated(chain, pool), ESTIMATED),
                lambda: _named(chain, ESTIMATED),
            )
            chain = chain._replace(**estimated)
        noise = jax.lax.cond(
            (_remainder(chain.number, self._noise_length) == 0) | (chain.number != before),
            lambda: draw_noise(self.coordinates, chain.key, chain.number, self._noise_length),
            lambda: chain.noise,
        )
        chain = chain._replace(noise=noise, waiting=jnp.zeros_like(chain.waiting))
        return chain._replace(path=self._begun(chain, chain.number))

    def _chosen(self, chain: Chain) -> Chain:
        """After a trial, the next start, or the best of those that were tried; else the chain as it is."""
        if self.num_trials == 1:
            return chain
        ends, point = self._ends_trial(chain.number), chain.path.point
        last = jnp.clip(quotient(chain.number, self._trial_length) - 1, 0, self.num_trials - 1)
        ended = _where(ends, Trials(point, chain.step.log_step), _row(chain.trials, last))
        trials = jax.tree.map(lambda all, new: _written(all, new, last), chain.trials, ended)
        log_density = trials.point.log_density
        hopeless = HOPELESS + HOPELESS_PER_COORDINATE * self.coordinates.size
        hopeful = log_density > jnp.max(log_density) - hopeless
        next = jnp.where(chain.number < self._trials_end, last + 1, jnp.argmax(hopeful))
        start = _row(trials, next)
        step = chain.step
        if self.step_size is None:
            chosen, untried = start_step(start.log_step), start_search(start.log_step)
            step = _where(chain.number < self._trials_end, untried, chosen)
        return chain._replace(
            path=chain.path._replace(point=_where(ends, start.point, point)),
            step=_where(ends, step, chain.step),
            trials=trials,
        )

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
    def _window_ends(self) -> list[int]:
        """Trajectories after which the metric is estimated anew."""
        ends = window_ends(self.num_warmup - self._trials_end) if self.adapt_metric else []
        return [self._trials_end + end for end in ends]

    @property
    def _window_length(self) -> int:
        fits = max(MAX_WINDOW_SCALARS // max(self.coordinates.size, 1), MIN_WINDOW)
        return max(min(MAX_WINDOW, fits, self.num_warmup // 2), FIRST_WINDOW)

    @property
    def _noise_length(self) -> int:
        return noise_length(self.coordinates.size)


def _moving(chains: Chain) -> Any:
    """What an iteration changes."""
    return chains._replace(**dict.fromkeys(FIXED, ()))


def _with_fixed(moving: Chain, chains: Chain) -> Chain:
    """What an iteration has changed, with what it does not change."""
    return moving._replace(**{name: getattr(chains, name) for name in FIXED})


def _written(buffer: Array, new: Array, *index: Array) -> Array:
    """A buffer with an entry overwritten: by no scatter, with which XLA compiles no loop as one function on CPUs."""
    starts = [jnp.asarray(i, jnp.uint32) for i in (*index, *[0] * new.ndim)]
    return jax.lax.dynamic_update_slice(buffer, new.reshape(*[1] * len(index), *new.shape), starts)


def _row(tree: Any, index: Array | int) -> Any:
    """An entry of the leading axis, in a state that of a chain."""
    place = jnp.asarray(index, jnp.uint32)  # without a sign, so that it is not taken for one from the end
    return jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, place, 0, keepdims=False), tree)


def _with_row(tree: Any, index: Array, old: Any, new: Any) -> Any:
    """A tree whose entry was ``old`` and becomes ``new``: what is the same object is not written."""
    return jax.tree.map(lambda all, old, new: all if new is old else _written(all, new, index), tree, old, new)


def _named(tuple_: Any, names: tuple[str, ...]) -> dict[str, Any]:
    return {name: getattr(tuple_, name) for name in names}


def _remainder(number: Array, divisor: int) -> Array:
    return jax.lax.rem(number, jnp.asarray(divisor, number.dtype))


def _repeated(tree: Tree, length: int) -> Tree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), tree)


def _where(flags: Array, new: Any, old: Any) -> Any:
    """``new`` where a flag, or that of the chain on the leading axis, is set."""

    def where(a: Array, b: Array) -> Array:
        return jnp.where(flags.reshape(*flags.shape, *[1] * (a.ndim - flags.ndim)), a, b)

    return jax.tree.map(where, new, old)
