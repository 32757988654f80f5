"""NUTS over the chains of one device: a loop whose every iteration is one leapfrog step of every chain.

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
    MAX_WINDOW,
    StepSize,
    adapt_step,
    diagonal,
    first_metric,
    fisher_vector,
    start_step,
    window_ends,
)
from ppleffects.inference.coordinates import VECTOR, Coordinates
from ppleffects.inference.metric import Metric, Tree
from ppleffects.inference.trajectory import Density, Point, Trajectory, advance, begin
from ppleffects.interpretations.draw import name_digest

# The first trajectories are doubled at most so many times: without a metric they would be long and of little use.
EARLY_DEPTH, NUM_EARLY = 6, 20
# Momenta are drawn for at most so many trajectories at once, and for one where they have more scalars than this.
MAX_NOISE_DRAWS, MAX_NOISE = 32, 4096


class Window(NamedTuple):
    """The latest draws of a chain and their gradients, the newest at ``number % length``.

    Attributes:
        draws: positions. ``(row, *leaf)``
        gradients: gradients of the log-density.
    """

    draws: Tree
    gradients: Tree


class Noise(NamedTuple):
    """What the next trajectories of a chain begin with, drawn for several at once.

    Attributes:
        momenta: standard normal. ``(trajectory, *leaf)``
        forward: first directions. ``(trajectory,)``
    """

    momenta: Tree
    forward: Array


class Effort(NamedTuple):
    """How long the trajectories of a window are, which tells whether a new metric still helps.

    Attributes:
        num_steps: leapfrog steps since the window began.
        num_paths: trajectories since.
        before: steps per trajectory in the window before.
    """

    num_steps: Array
    num_paths: Array
    before: Array


class Chain(NamedTuple):
    """One chain between two leapfrog steps.

    Attributes:
        path: the trajectory under way.
        metric: the inverse mass matrix.
        step: the step size and its adaptation.
        effort: leapfrog steps per trajectory, in this window and the last.
        window: what the metric is estimated from.
        noise: what the trajectories begin with.
        number: trajectories ended so far, warm-up included.
        waiting: whether the next trajectory has not begun, since noise or metric are to be renewed first.
        key: the chain's key.
    """

    path: Trajectory
    metric: Metric
    step: StepSize
    effort: Effort
    window: Window
    noise: Noise
    number: Array
    waiting: Array
    key: Array


class Rows(NamedTuple):
    """Buffers for what trajectories leave behind.

    Attributes:
        positions: draws, unconstrained. ``(row, chain, *leaf)``
        stats: what happened, in the order of ``STATS``. ``(row, chain, stat)``
    """

    positions: Tree
    stats: Array


# By name: the dtype and the meaning of each statistic of a trajectory.
STATS: dict[str, Any] = {
    "lp": float,  # log-density at the draw, in unconstrained space
    "energy": float,  # Hamiltonian there
    "acceptance_rate": float,  # Metropolis acceptance probability averaged over the trajectory
    "diverging": bool,  # whether an energy error ended it
    "n_steps": int,  # leapfrog steps, each one gradient
    "tree_depth": int,  # number of doublings
    "reached_max_treedepth": bool,  # whether the largest depth ended it
    "step_size": float,  # length of each step
    "warmup": bool,  # whether it adapted the sampler
}
# Warm-up may end after so many trajectories, when those of a window are no longer shorter than this share of those of
# the window before; so many more then adapt the step size alone.
MIN_WARMUP, SHORTER, NUM_FINAL = 200, 0.8, 60
# So many chains are written one by one, more by one scatter. (With a scatter in it, XLA does not compile the loop as
# one function on CPUs, which costs more than all else in a small model.)
MAX_WRITES = 16


class Machine(NamedTuple):
    """The sampler of one target: static settings and pure functions.

    Attributes:
        coordinates: the layout of a position.
        num_warmup: trajectories that adapt.
        max_tree_depth: a trajectory doubles at most so many times.
        max_delta_energy: an energy error beyond it is a divergence.
        target_accept: mean acceptance probability that the step size is adapted to.
        rank: directions of the metric beside its diagonal.
        step_size: length of all steps; None to adapt it.
        adapt_metric: whether the metric is estimated; the identity otherwise.
        early_stop: whether warm-up ends when a new metric no longer makes trajectories shorter.
    """

    coordinates: Coordinates
    num_warmup: int
    max_tree_depth: int
    max_delta_energy: float
    target_accept: float
    rank: int
    step_size: float | None = None
    adapt_metric: bool = True
    early_stop: bool = True

    def density(self, target: Any) -> Density:
        """The log-density of a packed position and its gradient."""

        def log_density(packed: Tree) -> Array:
            return jnp.asarray(target.log_density(self.coordinates.unpack(packed)), jnp.result_type(float))

        return jax.jit(jax.value_and_grad(log_density))

    def init(self, target: Any, position: dict[str, Array], key: Array) -> Chain:
        """A chain that starts at an unconstrained position."""
        density = self.density(target)
        packed = self.coordinates.pack(position)
        log_density, gradient = density(packed)
        metric = first_metric(gradient if self.adapt_metric else jax.tree.map(jnp.ones_like, gradient), self.rank)
        zero = jnp.zeros((), jnp.int32)
        noise = self._noise(key, zero)
        path = self._path(metric, Point(packed, log_density, gradient, log_density), noise, key, zero)
        if self.step_size is None:
            step = start_step(_reasonable_step(density, metric, path, self.target_accept))
        else:
            step = start_step(jnp.full_like(log_density, np.log(self.step_size)))
        window = Window(*(_repeated(jax.tree.map(jnp.zeros_like, packed), self._window_length) for _ in range(2)))
        effort = Effort(*[jnp.zeros_like(log_density)] * 3)
        return Chain(path, metric, step, effort, window, noise, zero, zero > 0, key)

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
            chains = self._renew_all(chains)
            fixed = chains.metric, chains.noise, chains.key

            def whole(moving: Chain) -> Chain:
                return moving._replace(metric=fixed[0], noise=fixed[1], key=fixed[2])

            def iteration(state: tuple) -> tuple:
                moving, rows, counts, iterations = state
                chains, rows, ended = self._iteration(density, whole(moving), rows, counts, last)
                return _moving(chains), rows, counts + ended, iterations + 1

            def unhindered(state: tuple) -> Array:
                return going(state) & ~jnp.any(state[0].waiting)

            moving, *rest = jax.lax.while_loop(unhindered, iteration, (_moving(chains), rows, counts, iterations))
            return whole(moving), *rest

        counts = jnp.zeros_like(chains.number)
        return jax.lax.while_loop(going, stretch, (chains, rows, counts, jnp.zeros((), jnp.int32)))

    def _iteration(
        self, density: Density, chains: Chain, rows: Rows, counts: Array, last: Array
    ) -> tuple[Chain, Rows, Array]:
        """Chains that have ended a trajectory write a row, adapt, and begin the next; then all make a leapfrog step.

        The step comes last: what it computes is then written once, not anew for each of its uses.
        """
        path = chains.path
        ended = path.ended & ~chains.waiting & (chains.number < last)
        row = Rows(path.point.position, jax.vmap(self._stats)(chains))
        rows = jax.tree.map(lambda buffer, new: _written(buffer, new, counts, ended, 1), rows, row)
        slot, warm = chains.number % self._window_length, ended & (chains.number < self.num_warmup)
        latest = Window(path.point.position, path.point.gradient)
        window = jax.tree.map(lambda buffer, new: _written(buffer, new, slot, warm, 0), chains.window, latest)
        step = _where(ended, jax.vmap(self._adapted)(chains), chains.step)
        num_steps = chains.effort.num_steps + jnp.where(ended, path.num_steps, 0)
        effort = chains.effort._replace(num_steps=num_steps, num_paths=chains.effort.num_paths + ended)
        chains = chains._replace(window=window, step=step, effort=effort, number=chains.number + ended)
        waiting = jnp.where(ended, jax.vmap(self._must_wait)(chains.number), chains.waiting)
        begun = jax.vmap(lambda c: self._path(c.metric, c.path.point, c.noise, c.key, c.number))(chains)
        chains = chains._replace(path=_where(ended & ~waiting, begun, path), waiting=waiting)
        moves = ~waiting & (chains.number < last)
        path = _where(moves, jax.vmap(lambda chain: self._advance(density, chain))(chains), chains.path)
        return chains._replace(path=path), rows, ended

    def _advance(self, density: Density, chain: Chain) -> Trajectory:
        early = jnp.minimum(self.max_tree_depth, EARLY_DEPTH)
        depth = jnp.where(chain.number < min(NUM_EARLY, self.num_warmup), early, self.max_tree_depth)
        step_size = jnp.exp(self._log_step(chain))
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
        return jnp.stack([values[name].astype(path.energy.dtype) for name in STATS])

    def _adapted(self, chain: Chain) -> StepSize:
        if self.step_size is not None:
            return chain.step
        step = adapt_step(chain.step, chain.path.acceptance / chain.path.num_steps, self.target_accept)
        return _where(chain.number < self.num_warmup, step, chain.step)

    def _must_wait(self, number: Array) -> Array:
        """Whether something is to be renewed before the trajectory of this number begins."""
        return (number % self._noise_length == 0) | self._ends_window(number)

    def _ends_window(self, number: Array) -> Array:
        ends = window_ends(self.num_warmup) if self.adapt_metric else []
        return jnp.any(number == jnp.asarray(ends, number.dtype)) if ends else jnp.zeros(number.shape, bool)

    def _renew_all(self, chains: Chain) -> Chain:
        """Renew noise and metric of the chains that wait for it, one after the other, and begin their trajectories."""

        def one(chains: Chain) -> Chain:
            index = jnp.argmax(chains.waiting)
            renewed = self._renewed(jax.tree.map(lambda x: x[index], chains))
            window = chains.window  # only read
            changed = jax.tree.map(
                lambda all, new: all.at[index].set(new), chains._replace(window=()), renewed._replace(window=())
            )
            return changed._replace(window=window)

        return jax.lax.while_loop(lambda chains: jnp.any(chains.waiting), one, chains)

    def _renewed(self, chain: Chain) -> Chain:
        number = chain.number
        metric, step, effort, later = jax.lax.cond(
            self._ends_window(number),
            self._estimated,
            lambda chain: (chain.metric, chain.step, chain.effort, chain.number),
            chain,
        )
        noise = jax.lax.cond(
            (later % self._noise_length == 0) | (later != number),
            lambda: self._noise(chain.key, later),
            lambda: chain.noise,
        )
        path = self._path(metric, chain.path.point, noise, chain.key, later)
        return chain._replace(
            path=path, metric=metric, step=step, effort=effort, noise=noise, number=later,
            waiting=jnp.zeros_like(chain.waiting),
        )  # fmt: skip

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

    def _estimated(self, chain: Chain) -> tuple[Metric, StepSize, Effort, Array]:
        """The metric from the later half of the draws, the step size to adapt anew, and the number to go on with."""
        length = self._window_length
        wanted = jnp.clip(chain.number // 2, 10, length)
        age = (chain.number - 1 - jnp.arange(length)) % length  # of the row in each slot; 0 is the newest
        used = (age < wanted) & (age < chain.number)
        scales, vectors, values = {}, chain.metric.vectors, chain.metric.values
        for name, draws in chain.window.draws.items():
            gradients = chain.window.gradients[name]
            if name == VECTOR and self.rank:
                scales[name], vectors, values = fisher_vector(draws, gradients, used, self.rank)
            else:
                scales[name] = diagonal(draws, gradients, used)[0]
        new = Metric(scales, vectors, values)
        finite = jnp.all(jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(new)]))
        step = chain.step if self.step_size is not None else start_step(chain.step.log_step)
        effort = chain.effort.num_steps / jnp.maximum(chain.effort.num_paths, 1)
        settled = self.early_stop & (chain.number >= MIN_WARMUP) & (effort > SHORTER * chain.effort.before)
        number = jnp.where(settled, jnp.maximum(chain.number, self.num_warmup - NUM_FINAL), chain.number)
        nothing = jnp.zeros_like(effort)
        return _where(finite, new, chain.metric), step, Effort(nothing, nothing, effort), number

    @property
    def _window_length(self) -> int:
        return max(min(MAX_WINDOW, self.num_warmup // 2), 10)

    @property
    def _noise_length(self) -> int:
        return int(np.clip(MAX_NOISE // max(self.coordinates.size, 1), 1, MAX_NOISE_DRAWS))


def _moving(chains: Chain) -> Any:
    """What an iteration changes."""
    return chains._replace(metric=(), noise=(), key=())


def _written(buffer: Array, new: Array, index: Array, flags: Array, chain_axis: int) -> Array:
    """A buffer with one entry for each flagged chain written at the chain's own index, along the axis beside chains."""
    number = jnp.arange(index.size)
    length = buffer.shape[1 - chain_axis]
    if index.size > MAX_WRITES:
        where = jnp.where(flags, index, length)  # out of bounds, which drops the write
        return buffer.at[(where, number) if chain_axis else (number, where)].set(new, mode="drop")
    for chain in range(index.size):
        at = jnp.minimum(index[chain], length - 1)
        start = [at, chain] if chain_axis else [chain, at]
        starts = [jnp.asarray(i, index.dtype) for i in (*start, *[0] * (new.ndim - 1))]
        sizes = (1, 1, *new.shape[1:])
        entry = new[chain].reshape(sizes)
        kept = jnp.where(flags[chain], entry, jax.lax.dynamic_slice(buffer, starts, sizes))
        buffer = jax.lax.dynamic_update_slice(buffer, kept, starts)
    return buffer


def _repeated(tree: Tree, length: int) -> Tree:
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (length, *x.shape)), tree)


def _reasonable_step(density: Density, metric: Metric, path: Trajectory, target: float) -> Array:
    """The log of a step size of which one step is accepted about as often as the target, by doubling and halving."""

    def acceptance(log_step: Array) -> Array:
        return advance(density, metric, jnp.exp(log_step), path, 1, jnp.inf).acceptance

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
