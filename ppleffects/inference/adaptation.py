"""Warm-up: the step size by dual averaging, the metric from draws and gradients of recent windows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.inference.coordinates import VECTOR
from ppleffects.inference.metric import Metric, Tree

# Hoffman and Gelman 2014, section 3.2.
GAMMA, T0, KAPPA = 0.05, 10.0, 0.75
# The metric is estimated anew at the end of each window, from the later half of the draws so far, but no more than:
MAX_WINDOW = 160
# Regularisation and cutoff of the eigenvalues, as Seyboldt, Carlson and Carpenter 2026 have them.
RIDGE, CUTOFF = 1e-5, 2.0


class StepSize(NamedTuple):
    """Dual averaging of the log of the step size.

    Attributes:
        log_step: the step size to use now.
        log_average: the step size to use when warm-up ends.
        error: running mean of the target minus the acceptance rate.
        number: transitions since the start.
        centre: what the log of the step size is drawn to.
    """

    log_step: Array
    log_average: Array
    error: Array
    number: Array
    centre: Array


def start_step(log_step: Array) -> StepSize:
    """The adaptation at its start, from a step size."""
    zero = jnp.zeros_like(log_step)
    return StepSize(log_step, log_step, zero, zero, log_step + jnp.log(2.0))


def adapt_step(state: StepSize, acceptance: Array, target: float) -> StepSize:
    """The adaptation after a transition with a mean acceptance probability."""
    number = state.number + 1
    weight = 1 / (number + T0)
    error = (1 - weight) * state.error + weight * (target - acceptance)
    log_step = state.centre - jnp.sqrt(number) / GAMMA * error
    share = number**-KAPPA
    return StepSize(log_step, share * log_step + (1 - share) * state.log_average, error, number, state.centre)


def window_ends(num_warmup: int) -> list[int]:
    """Draws after which the metric is estimated anew: often at first, then less and less."""
    ends: list[int] = []
    last = num_warmup - min(max(num_warmup // 5, 60), num_warmup // 2)
    end = 10
    while end <= last:
        ends.append(end)
        end += 10 if end < 60 else 20 if end < 120 else 40 if end < 320 else 80
    return ends


def first_metric(gradient: Tree, rank: int) -> Metric:
    """A first scale from the gradient at the start."""

    def scale(g: Array) -> Array:
        return jnp.clip(jax.lax.rsqrt(jnp.maximum(jnp.abs(g), 1e-20)), 1e-10, 1e10)

    metric = Metric({name: scale(g) for name, g in gradient.items()})
    if not rank:
        return metric
    vector = gradient[VECTOR]
    return metric._replace(vectors=jnp.zeros((rank, vector.size), vector.dtype), values=jnp.ones(rank, vector.dtype))


def diagonal(draws: Array, gradients: Array, used: Array) -> tuple[Array, Array, Array]:
    """The scale of each coordinate that minimises the Fisher divergence, and centred draws and gradients.

    Args:
        draws: positions. ``(draw, *leaf)``
        gradients: gradients of the log-density at them.
        used: which of them count. ``(draw,)``
    """
    flags = used.reshape(-1, *[1] * (draws.ndim - 1))
    count = jnp.maximum(jnp.sum(used), 1)

    def centred(x: Array) -> Array:
        x = jnp.where(flags, x, 0.0)
        return jnp.where(flags, x - jnp.sum(x, 0, keepdims=True) / count, 0.0)

    draws, gradients = centred(draws), centred(gradients)
    ratio = jnp.sum(draws**2, 0) / jnp.maximum(jnp.sum(gradients**2, 0), 1e-20 * count)
    scale = jnp.clip(ratio**0.25, 1e-10, 1e10)
    return jnp.where(scale > 0, scale, 1.0), draws, gradients


def fisher_vector(draws: Array, gradients: Array, used: Array, rank: int) -> tuple[Array, Array, Array]:
    """Scale, directions and eigenvalues of the metric of a vector (Seyboldt, Carlson and Carpenter 2026, algorithm 1).

    The metric is the geometric mean of the covariance of draws and the inverse covariance of gradients, both of
    standardised coordinates and regularised; directions whose eigenvalue is near 1 are left as they are.
    """
    scale, draws, gradients = diagonal(draws, gradients, used)
    x, g = draws / scale[None], gradients * scale[None]
    size = x.shape[1]
    ridge = RIDGE * jnp.eye(size, dtype=x.dtype)
    mean = _geometric_mean(x.T @ x + ridge, g.T @ g + ridge)
    values, vectors = jnp.linalg.eigh(mean)
    values = jnp.maximum(values, 1e-10)
    informative = jnp.abs(jnp.log(values))
    order = jnp.argsort(-informative)[:rank]
    kept = jnp.where(informative[order] > jnp.log(CUTOFF), values[order], 1.0)
    return scale, vectors[:, order].T, kept


def _geometric_mean(a: Array, b: Array) -> Array:
    """The symmetric ``m`` with ``m b m = a``: the geometric mean of ``a`` and the inverse of ``b``."""
    lower = jnp.linalg.cholesky(b)
    values, vectors = jnp.linalg.eigh(lower.T @ a @ lower)
    root = (vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None]) @ vectors.T
    half = jax.scipy.linalg.solve_triangular(lower, root, lower=True, trans="T")
    mean = jax.scipy.linalg.solve_triangular(lower, half.T, lower=True, trans="T")
    return 0.5 * (mean + mean.T)
