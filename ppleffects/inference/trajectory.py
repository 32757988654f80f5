"""One chain's No-U-Turn trajectory as a machine that takes one leapfrog step at a time.

A chain that is given a step at each iteration of one loop needs no loop of its own: chains of one device go through
trees of different sizes side by side, and one that has ended its trajectory begins the next at once (Dance, Glaser,
Orbanz and Adams 2025). Trajectories are multinomial (Hoffman and Gelman 2014; Betancourt 2017, A.3), and their U-turns
are found from checkpoints (Phan, Pradhan and Jankowiak 2019).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.inference.metric import Metric, Pull, Tree, components, dot, force, projections, velocity

type Density = Callable[[Tree], tuple[Array, Tree]]


class End(NamedTuple):
    """One end of a trajectory.

    Attributes:
        position: where it is.
        momentum: standard normal in the metric's coordinates.
        force: the gradient of the log-density there, in the metric's coordinates.
    """

    position: Tree
    momentum: Pull
    force: Pull


class Point(NamedTuple):
    """A state of the trajectory that may become the next draw.

    Attributes:
        position: where it is.
        log_density: the log-density there.
        gradient: the gradient of the log-density there.
        energy: kinetic energy minus log-density.
    """

    position: Tree
    log_density: Array
    gradient: Tree
    energy: Array


class Checkpoints(NamedTuple):
    """States at which smaller subtrees began. Leading axis of depths.

    Attributes:
        momenta: their momenta.
        middles: sums of the momenta of the states before them and half of their own.
        products: inner products of the two.
    """

    momenta: Tree
    middles: Tree
    products: Array


class Trajectory(NamedTuple):
    """A trajectory under way: a tree, and beside it the subtree that will double it.

    Attributes:
        near: the end that moves.
        far: the other end.
        forward: whether the moving end goes forward in time.
        depth: times that the tree was doubled.
        leaf: states of the subtree so far.
        point: the choice among the states of the tree.
        sub_point: the choice among the states of the subtree.
        log_weight: log of the sum of the weights of the tree's states, relative to the first state.
        sub_log_weight: that of the subtree.
        total: sum of the momenta of the tree.
        sub_total: sum of the momenta of the subtree.
        checkpoints: states of the subtree at which smaller ones began.
        energy: energy of the first state.
        acceptance: sum of the Metropolis probabilities of all states.
        num_steps: leapfrog steps so far.
        turning: whether a U-turn ended it.
        diverging: whether an energy error ended it.
        ended: whether it has ended.
        key: what its choices are drawn from.
    """

    near: End
    far: End
    forward: Array
    depth: Array
    leaf: Array
    point: Point
    sub_point: Point
    log_weight: Array
    sub_log_weight: Array
    total: Tree
    sub_total: Tree
    checkpoints: Checkpoints
    energy: Array
    acceptance: Array
    num_steps: Array
    turning: Array
    diverging: Array
    ended: Array
    key: Array


def begin(
    metric: Metric, position: Tree, log_density: Array, gradient: Tree, nothing: Tree, key: Array, max_depth: int
) -> Trajectory:
    """A trajectory of one state at rest, from which ``begin_again`` begins the first that moves.

    Nothing is summed over coordinates here: on sharded latents, a sum that waits for no other is one that XLA makes on
    each CPU device when it likes, and two of them in another order on another device wait for each other for ever.

    Args:
        metric: the inverse mass matrix.
        position: where it is.
        log_density: the log-density there.
        gradient: the gradient of the log-density there.
        nothing: a position of zeros.
        key: what is random in it.
        max_depth: a trajectory doubles at most so many times.
    """
    energy = -log_density
    zero, off, none = jnp.zeros((), jnp.int32), jnp.zeros((), bool), jnp.zeros_like(energy)
    rest = Pull(nothing, jnp.zeros_like(metric.values))
    end = End(position, rest, rest)
    point = Point(position, log_density, gradient, energy)
    blank = Checkpoints(nothing, nothing, none)
    checkpoints = jax.tree.map(lambda x: jnp.broadcast_to(x, (max_depth, *x.shape)), blank)
    return Trajectory(
        end, end, off, zero, zero, point, point, none, none, nothing, nothing, checkpoints, energy, none, zero, off,
        off, off, key,
    )  # fmt: skip


def begin_again(metric: Metric, path: Trajectory, momentum: Tree, forward: Array, key: Array) -> Trajectory:
    """The next trajectory from the choice of one that has ended; what is counted is the caller's to reset."""
    energy = 0.5 * dot(momentum, momentum) - path.point.log_density
    end = End(path.point.position, Pull(momentum, components(metric, momentum)), force(metric, path.point.gradient))
    point = path.point._replace(energy=energy)
    return path._replace(near=end, far=end, forward=forward, point=point, total=momentum, energy=energy, key=key)


def advance(
    density: Density, metric: Metric, step_size: Array, path: Trajectory, max_depth: Array | int,
    max_delta_energy: float,
) -> Trajectory:  # fmt: skip
    """The trajectory after one more leapfrog step: one evaluation of the density and its gradient.

    Args:
        density: from a position to the log-density and its gradient.
        metric: the inverse mass matrix.
        step_size: length of the step.
        path: a trajectory that has not ended.
        max_depth: the tree is doubled at most so many times.
        max_delta_energy: an energy error beyond this is a divergence.
    """
    end, state, error = _stepped(density, metric, step_size, path)
    momentum = end.momentum.whole
    diverging = error > max_delta_energy
    take_leaf, take_subtree, turn_back = _three_uniforms(path.key, path.num_steps, error.dtype)

    # The new state joins the subtree, and is its choice with the share of its weight.
    first = path.leaf == 0
    sub_log_weight = jnp.where(first, -error, jnp.logaddexp(path.sub_log_weight, -error))
    chosen = once(first | (jnp.log(take_leaf) < -error - sub_log_weight))
    sub_point = _where(chosen, state, path.sub_point)
    sub_total = jax.tree.map(lambda p, total: p + jnp.where(first, 0.0, total), momentum, path.sub_total)
    turning_inside, checkpoints = _turning_inside(path, momentum, sub_total)

    # A whole subtree joins the tree, and its choice replaces the tree's more often than its share.
    whole = once((path.leaf + 1 == 1 << path.depth) & ~turning_inside & ~diverging)
    replace = once(whole & (jnp.log(take_subtree) < sub_log_weight - path.log_weight))
    # (All sums over coordinates are computed before any is looked at: on sharded latents, they cross the mesh at once.)
    both = jax.tree.map(jnp.add, path.total, sub_total)
    turning = turning_inside | (whole & _turning(momentum, path.far.momentum.whole, both))
    total = _where(whole, both, path.total)
    depth = path.depth + whole
    ended = turning | diverging | (whole & (depth >= max_depth))

    # The next subtree grows from either end.
    turned = once(whole & ~ended & (turn_back < 0.5))
    near, far = _where(turned, path.far, end), _where(turned, end, path.far)
    return Trajectory(
        near=near,
        far=far,
        forward=path.forward ^ turned,
        depth=depth,
        leaf=jnp.where(whole, 0, path.leaf + 1),
        point=_where(replace, sub_point, path.point),
        sub_point=sub_point,
        log_weight=jnp.where(whole, jnp.logaddexp(path.log_weight, sub_log_weight), path.log_weight),
        sub_log_weight=sub_log_weight,
        total=total,
        sub_total=sub_total,
        checkpoints=checkpoints,
        energy=path.energy,
        acceptance=path.acceptance + jnp.exp(-jnp.maximum(error, 0.0)),
        num_steps=path.num_steps + 1,
        turning=turning,
        diverging=diverging,
        ended=ended,
        key=path.key,
    )


def advance_fixed(
    density: Density, metric: Metric, step_size: Array, path: Trajectory, num_steps: Array, max_delta_energy: float
) -> Trajectory:
    """The same for a trajectory of so many steps, whose end is accepted or not (Neal 2011)."""
    end, state, error = _stepped(density, metric, step_size, path)
    done = path.num_steps + 1
    ended = done >= num_steps
    accept, *_ = _three_uniforms(path.key, path.num_steps, error.dtype)
    accepted = ended & (jnp.log(accept) < -error)
    return path._replace(
        near=end,
        point=_where(accepted, state, path.point),
        acceptance=jnp.exp(-jnp.maximum(error, 0.0)) * done,  # whose share per step is that of the end
        num_steps=done,
        diverging=ended & (error > max_delta_energy),
        ended=ended,
    )


def _three_uniforms(key: Array, number: Array, dtype: jnp.dtype) -> Array:
    """Three uniform numbers of 32 bits for a step: words of two keys, which cost less than drawing from one."""
    words = jax.random.key_data(jax.vmap(jax.random.fold_in, (None, 0))(key, 2 * number + jnp.arange(2)))
    return words[:, :2].reshape(-1)[:3].astype(dtype) * 2.0**-32


def _stepped(density: Density, metric: Metric, step_size: Array, path: Trajectory) -> tuple[End, Point, Array]:
    """The moving end after a leapfrog step, the state there, and its energy error, infinite where it is none."""
    end, log_density, gradient = _leapfrog(density, metric, jnp.where(path.forward, step_size, -step_size), path.near)
    energy = 0.5 * dot(end.momentum.whole, end.momentum.whole) - log_density
    error = energy - path.energy
    error = jnp.where(jnp.isnan(error), jnp.inf, error)
    return end, Point(end.position, log_density, gradient, energy), error


def _leapfrog(density: Density, metric: Metric, step: Array, start: End) -> tuple[End, Array, Tree]:
    half = jax.tree.map(lambda p, f: p + 0.5 * step * f, start.momentum, start.force)
    position = jax.tree.map(lambda x, v: x + step * v, start.position, velocity(metric, half))
    log_density, gradient = density(position)
    pull = force(metric, gradient)
    momentum = jax.tree.map(lambda p, f: p + 0.5 * step * f, half, pull)
    return End(position, momentum, pull), log_density, gradient


def _turning(one: Tree, other: Tree, total: Tree) -> Array:
    """Whether a stretch of the trajectory with these ends and this sum of momenta turns back at either end."""
    middle = jax.tree.map(lambda t, a, b: t - 0.5 * (a + b), total, one, other)
    return (dot(one, middle) <= 0) | (dot(other, middle) <= 0)


def _turning_inside(path: Trajectory, momentum: Tree, total: Tree) -> tuple[Array, Checkpoints]:
    """Whether a smaller subtree that the new state completes turns back, and the checkpoints with the new state.

    The states of a subtree are numbered from 0. One of even number begins smaller subtrees, and is kept; one of odd
    number ends as many as its number has trailing ones in binary, and is compared with the state that began each.
    """
    number, kept = path.leaf, path.checkpoints
    highest = jax.lax.population_count(number >> 1)
    ends = jax.lax.population_count(number & ~(number + 1))  # trailing ones
    place = jnp.arange(kept.products.size)
    compared = (place <= highest) & (place > highest - ends)

    # The momenta between two states, and half of theirs, sum to a difference of their middles. Its products with both
    # momenta are multiplied out, so that each checkpoint is read once and none is copied.
    middle = jax.tree.map(lambda t, p: t - 0.5 * p, total, momentum)
    product = dot(momentum, middle)
    left = projections(kept.momenta, middle) - kept.products
    right = product - projections(kept.middles, momentum)
    turning = jnp.any(compared & ((left <= 0) | (right <= 0)))
    # The last place is of no use. That the place depends on U-turns lets XLA overwrite what was read before.
    where = jnp.where(turning | (number % 2 == 1), place.size - 1, highest)
    return turning, _overwritten(kept, Checkpoints(momentum, middle, product), where)


@jax.custom_batching.custom_vmap
def _overwritten(kept: Checkpoints, new: Checkpoints, place: Array) -> Checkpoints:
    """The checkpoints with one overwritten: no scatter under ``vmap``, which XLA does not compile well on CPUs."""
    return jax.tree.map(lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, place, 0), kept, new)


@_overwritten.def_vmap
def _overwritten_chains(
    count: int, batched: Any, kept: Checkpoints, new: Checkpoints, place: Array
) -> tuple[Checkpoints, Any]:
    def spread(x: Array, is_batched: bool) -> Array:
        return x if is_batched else jnp.broadcast_to(x, (count, *x.shape))

    kept, new, place = jax.tree.map(spread, (kept, new, place), tuple(batched))

    def write(chain: Any, kept: Checkpoints) -> Checkpoints:
        def written(all: Array, one: Array) -> Array:
            start = [jnp.asarray(i, jnp.uint32) for i in (chain, place[chain], *[0] * (one.ndim - 1))]
            return jax.lax.dynamic_update_slice(all, one[chain][None, None], start)

        return jax.tree.map(written, kept, new)

    out = write(0, kept) if count == 1 else jax.lax.fori_loop(0, count, write, kept)
    return out, jax.tree.map(lambda _: True, out)


def once(flag: Array) -> Array:
    """The flag as it is. XLA computes what is cheap anew for each element that it selects, but a square root once."""
    return jnp.sqrt(flag.astype(jnp.result_type(float))) > 0.5


def _where(flag: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)
