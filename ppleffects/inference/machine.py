"""NUTS over the chains of one device: a loop whose every iteration is one leapfrog step of every chain.

A chain that ends a trajectory begins the next in the same iteration, so that no chain waits for the tree of another.
What happens rarely (momenta, rows, the metric) hangs on one predicate for all chains.
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
from ppleffects.inference.trajectory import Density, Trajectory, advance, begin

# The first trajectories are doubled at most so many times: without a metric they would be long and of little use.
EARLY_DEPTH, NUM_EARLY = 6, 20


class Window(NamedTuple):
    """The latest draws of a chain and their gradients, the newest at ``number % length``.

    Attributes:
        draws: positions. ``(row, *leaf)``
        gradients: gradients of the log-density.
    """

    draws: Tree
    gradients: Tree


class Chain(NamedTuple):
    """One chain between two leapfrog steps.

    Attributes:
        path: the trajectory under way.
        metric: the inverse mass matrix.
        step: the step size and its adaptation.
        window: what the metric is estimated from.
        number: trajectories ended so far, warm-up included.
        stale: whether a window has ended and the metric is to be estimated.
        key: the chain's key.
    """

    path: Trajectory
    metric: Metric
    step: StepSize
    window: Window
    number: Array
    stale: Array
    key: Array


class Row(NamedTuple):
    """What a trajectory leaves behind; scalars but for the position.

    Attributes:
        position: the draw, unconstrained.
        lp: log-density there.
        energy: Hamiltonian there.
        acceptance_rate: Metropolis acceptance probability averaged over the trajectory.
        diverging: whether an energy error ended it.
        n_steps: leapfrog steps, each one gradient.
        tree_depth: number of doublings.
        reached_max_treedepth: whether the largest depth ended it.
        step_size: length of each step.
    """

    position: Tree
    lp: Array
    energy: Array
    acceptance_rate: Array
    diverging: Array
    n_steps: Array
    tree_depth: Array
    reached_max_treedepth: Array
    step_size: Array


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
    """

    coordinates: Coordinates
    num_warmup: int
    max_tree_depth: int
    max_delta_energy: float
    target_accept: float
    rank: int
    step_size: float | None = None
    adapt_metric: bool = True

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
        first = begin(metric, packed, log_density, gradient, jax.random.fold_in(key, 0), self.max_tree_depth)
        if self.step_size is None:
            key_of_search = jax.random.fold_in(key, 1 << 30)
            step = start_step(_reasonable_step(density, metric, first, key_of_search, self.target_accept))
        else:
            step = start_step(jnp.full_like(log_density, np.log(self.step_size)))
        length = self._window_length()
        window = Window(*(jax.tree.map(lambda x: jnp.zeros((length, *x.shape), x.dtype), packed) for _ in range(2)))
        zero = jnp.zeros((), jnp.int32)
        return Chain(first, metric, step, window, zero, zero > 0, key)

    def run(self, target: Any, chains: Chain, rows: Any, last: Array, budget: Array) -> tuple[Chain, Any, Array, Array]:
        """Make leapfrog steps until the budget is spent, a chain's rows are full, or all chains have ended.

        Args:
            target: the density.
            chains: the chains of this device. Leading axis of chains.
            rows: a ``Row`` of buffers. ``(row, chain, ...)``
            last: trajectories at which a chain ends.
            budget: leapfrog steps per chain.

        Returns:
            The chains, the buffers, the number of rows that each chain has filled, and the iterations made.
        """
        num_rows = rows.lp.shape[0]
        density = self.density(target)

        def going(state: tuple) -> Array:
            chains, _, counts, iterations = state
            return (iterations < budget) & jnp.any(chains.number < last) & jnp.all(counts < num_rows)

        def iteration(state: tuple) -> tuple:
            chains, rows, counts, iterations = state
            active = chains.number < last
            path = jax.vmap(lambda chain: self._advance(density, chain))(chains)
            path = _where(active, path, chains.path)
            chains = chains._replace(path=path)
            ended = active & path.ended
            chains, rows = jax.lax.cond(
                jnp.any(ended), self._end, lambda chains, rows, *_: (chains, rows), chains, rows, counts, ended
            )
            return chains, rows, counts + ended, iterations + 1

        counts = jnp.zeros_like(chains.number)
        return jax.lax.while_loop(going, iteration, (chains, rows, counts, jnp.zeros((), jnp.int32)))

    def _advance(self, density: Density, chain: Chain) -> Trajectory:
        early = jnp.minimum(self.max_tree_depth, EARLY_DEPTH)
        depth = jnp.where(chain.number < min(NUM_EARLY, self.num_warmup), early, self.max_tree_depth)
        key = jax.random.fold_in(chain.key, chain.number)
        return advance(
            density, chain.metric, jnp.exp(self._log_step(chain)), chain.path, key, depth, self.max_delta_energy
        )

    def _log_step(self, chain: Chain) -> Array:
        return jnp.where(chain.number < self.num_warmup, chain.step.log_step, chain.step.log_average)

    def _end(self, chains: Chain, rows: Any, counts: Array, ended: Array) -> tuple[Chain, Any]:
        """Write a row for each chain that has ended its trajectory, adapt it, and begin its next."""
        row = jax.vmap(self._row)(chains)
        where = jnp.where(ended, counts, rows.lp.shape[0])  # out of bounds, which drops the write
        numbers = jnp.arange(counts.size)
        rows = jax.tree.map(lambda buffer, new: buffer.at[where, numbers].set(new, mode="drop"), rows, row)
        chains = _where(ended, jax.vmap(self._adapted)(chains), chains)
        chains = jax.lax.cond(jnp.any(chains.stale), self._estimate_all, lambda chains: chains, chains)
        return _where(ended, jax.vmap(self._begun)(chains), chains), rows

    def _row(self, chain: Chain) -> Row:
        path = chain.path
        cut = path.turning | path.diverging
        return Row(
            position=path.point.position,
            lp=path.point.log_density,
            energy=path.point.energy,
            acceptance_rate=path.acceptance / path.num_steps,
            diverging=path.diverging,
            n_steps=path.num_steps,
            tree_depth=path.depth + (path.leaf > 0),
            reached_max_treedepth=(path.depth >= self.max_tree_depth) & ~cut,
            step_size=jnp.exp(self._log_step(chain)),
        )

    def _adapted(self, chain: Chain) -> Chain:
        path, number = chain.path, chain.number
        warm = number < self.num_warmup
        step = adapt_step(chain.step, path.acceptance / path.num_steps, self.target_accept)
        slot = number % self._window_length()

        def kept(buffer: Array, new: Array) -> Array:
            return buffer.at[slot].set(jnp.where(warm, new, buffer[slot]))

        window = Window(
            jax.tree.map(kept, chain.window.draws, path.point.position),
            jax.tree.map(kept, chain.window.gradients, path.point.gradient),
        )
        ends = np.asarray(window_ends(self.num_warmup) if self.adapt_metric else [], np.int32)
        stale = jnp.any(number + 1 == ends) if ends.size else jnp.zeros((), bool)
        adapt = warm & (self.step_size is None)
        return chain._replace(step=_where(adapt, step, chain.step), window=window, number=number + 1, stale=stale)

    def _begun(self, chain: Chain) -> Chain:
        point, key = chain.path.point, jax.random.fold_in(chain.key, chain.number)
        path = begin(chain.metric, point.position, point.log_density, point.gradient, key, self.max_tree_depth)
        return chain._replace(path=path)

    def _estimate_all(self, chains: Chain) -> Chain:
        """Estimate the metric of each chain whose window has ended, one after the other."""

        def one(chains: Chain) -> Chain:
            index = jnp.argmax(chains.stale)
            chain = self._estimated(jax.tree.map(lambda x: x[index], chains))
            return jax.tree.map(lambda all, new: all.at[index].set(new), chains, chain)

        return jax.lax.while_loop(lambda chains: jnp.any(chains.stale), one, chains)

    def _estimated(self, chain: Chain) -> Chain:
        length = self._window_length()
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
        return chain._replace(
            metric=Metric(scales, vectors, values),
            step=chain.step if self.step_size is not None else start_step(chain.step.log_step),
            stale=jnp.zeros_like(chain.stale),
        )

    def _window_length(self) -> int:
        return max(min(MAX_WINDOW, self.num_warmup // 2), 10)


def _reasonable_step(density: Density, metric: Metric, path: Trajectory, key: Array, target: float) -> Array:
    """The log of a step size of which one step is accepted about as often as the target, by doubling and halving."""

    def acceptance(log_step: Array) -> Array:
        return advance(density, metric, jnp.exp(log_step), path, key, 1, jnp.inf).acceptance

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
