"""The state of the sampler: a chain between two leapfrog steps, and what its trajectories leave behind."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from ppleffects.inference.adaptation import StepSize
from ppleffects.inference.metric import Metric, Tree
from ppleffects.inference.noise import Noise
from ppleffects.inference.trajectory import Point, Trajectory


class Window(NamedTuple):
    """The latest draws of a chain and their gradients, the newest at ``number % length``.

    Attributes:
        draws: positions. ``(row, *leaf)``
        gradients: gradients of the log-density.
    """

    draws: Tree
    gradients: Tree


class Trials(NamedTuple):
    """The starts of a chain: where each was found, then where its trajectories led. Leading axis of starts.

    Attributes:
        point: position, log-density and gradient.
        log_step: the log of a step size that suits it.
    """

    point: Point
    log_step: Array


class Effort(NamedTuple):
    """How the trajectories of a window went: whether a new metric still helps, and whether steps are too long.

    Attributes:
        num_steps: leapfrog steps since the window began.
        num_paths: trajectories since.
        num_diverging: how many of them diverged.
        before: steps per trajectory in the window before.
    """

    num_steps: Array
    num_paths: Array
    num_diverging: Array
    before: Array


class Chain(NamedTuple):
    """One chain between two leapfrog steps.

    Attributes:
        path: the trajectory under way.
        metric: the inverse mass matrix.
        step: the step size and its adaptation.
        target: mean acceptance probability that the step size is adapted to.
        effort: how the trajectories of this window and the last went.
        trials: its starts.
        window: what the metric is estimated from.
        noise: what the trajectories begin with.
        number: trajectories ended so far, warm-up included.
        waiting: whether the next trajectory has not begun, since noise or metric are to be renewed first.
        key: the chain's key.
    """

    path: Trajectory
    metric: Metric
    step: StepSize
    target: Array
    effort: Effort
    trials: Trials
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
