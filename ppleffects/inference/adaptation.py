"""Warm-up: the step size by dual averaging, the metric from draws and gradients of recent windows."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ppleffects.inference.coordinates import VECTOR
from ppleffects.inference.metric import Metric, Shape, Tree, is_sharded

# Hoffman and Gelman 2014, section 3.2.
GAMMA, T0, KAPPA = 0.05, 10.0, 0.75
# The search for a first step size: what stands for no direction yet, and the most doublings or halvings.
UNDECIDED, MAX_SEARCH = 2.0, 40
# The metric is estimated anew at the end of each window, from the later half of the draws so far, but no more than:
MAX_WINDOW = 160
# Large positions are kept for fewer draws, so that all of them have at most so many scalars; but for so many draws.
MAX_WINDOW_SCALARS, MIN_WINDOW = 2**25, 40
FIRST_WINDOW = 10
# Where directions reach all leaves they are looked for in what so many draws and their gradients span.
MAX_SPAN = 64
# Regularisation, as Seyboldt, Carlson and Carpenter 2026 have it; where numbers are coarse, so many square roots of a
# rounding error, below which second moments are noise.
RIDGE, ROUNDING = 1e-5, 100.0


class StepSize(NamedTuple):
    """The log of the step size: first doubled or halved until it is about right, then adapted by dual averaging.

    Attributes:
        log_step: the step size to use now.
        log_average: the step size to use when warm-up ends.
        error: running mean of the target minus the acceptance rate.
        number: transitions since the start.
        centre: what the log of the step size is drawn to.
        search: 1 while it is doubled, -1 while it is halved, 2 before either, and 0 afterwards.
    """

    log_step: Array
    log_average: Array
    error: Array
    number: Array
    centre: Array
    search: Array

    @property
    def searching(self) -> Array:
        """Whether it is doubled or halved: a transition then is one step, and no draw."""
        return self.search != 0


def start_step(log_step: Array) -> StepSize:
    """Dual averaging at its start, from a step size."""
    zero = jnp.zeros_like(log_step)
    return StepSize(log_step, log_step, zero, zero, log_step + jnp.log(2.0), zero)


def start_search(log_step: Array) -> StepSize:
    """The search at its start, which is a step size of 1, of the type of ``log_step``."""
    start = start_step(jnp.zeros_like(log_step))
    return start._replace(search=start.search + UNDECIDED)


def adapt_step(state: StepSize, acceptance: Array, target: Array) -> StepSize:
    """The adaptation after a transition with a mean acceptance probability."""
    number = state.number + 1
    weight = 1 / (number + T0)
    error = (1 - weight) * state.error + weight * (target - acceptance)
    log_step = state.centre - jnp.sqrt(number) / GAMMA * error
    share = number**-KAPPA
    averaged = StepSize(
        log_step, share * log_step + (1 - share) * state.log_average, error, number, state.centre, state.search
    )

    # The search ends with the first step size on the other side of the target.
    direction = jnp.where(acceptance > target, 1.0, -1.0)
    going_on = ((state.search == direction) | (state.search == UNDECIDED)) & (number <= MAX_SEARCH)
    found = start_step(state.log_step)
    tried = found._replace(log_step=state.log_step + direction * np.log(2.0), number=number, search=direction)
    searched = jax.tree.map(lambda a, b: jnp.where(going_on, a, b), tried, found)
    return jax.tree.map(lambda a, b: jnp.where(state.searching, a, b), searched, averaged)


def window_ends(num_warmup: int) -> list[int]:
    """Draws after which the metric is estimated anew: often at first, then less and less."""
    ends: list[int] = []
    last = num_warmup - min(max(num_warmup // 5, 60), num_warmup // 2)
    end = FIRST_WINDOW
    while end <= last:
        ends.append(end)
        end += 10 if end < 60 else 20 if end < 120 else 40 if end < 320 else 80
    return ends


def estimate(shape: Shape, draws: Tree, gradients: Tree, used: Array, latest: Array) -> Metric:
    """The metric of a posterior from draws and the gradients there.

    Args:
        shape: what the metric has beside its diagonal.
        draws: positions. ``(draw, *leaf)``
        gradients: gradients of the log-density at them.
        used: which of them count. ``(draw,)``
        latest: indices of all draws, the newest first. ``(draw,)``
    """
    scale, x, g = {}, {}, {}
    for name in draws:
        scale[name], centred_draws, centred_gradients = diagonal(draws[name], gradients[name], used)
        x[name], g[name] = centred_draws / scale[name][None], centred_gradients * scale[name][None]
    if not shape.num_directions:
        return Metric(scale, {}, jnp.zeros(0))
    if not shape.wide:
        vectors, values = fisher_directions(x[VECTOR], g[VECTOR], shape)
        return Metric(scale, {VECTOR: vectors}, values)
    newest = latest[:MAX_SPAN]
    x, g = ({name: leaf[newest] for name, leaf in tree.items()} for tree in (x, g))
    vectors, values = spanned_directions(x, g, shape)
    return Metric(scale, vectors, values)


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


def fisher_directions(x: Array, g: Array, shape: Shape) -> tuple[Array, Array]:
    """Directions and eigenvalues of the metric of a vector (Seyboldt, Carlson and Carpenter 2026, algorithm 1).

    The metric is the geometric mean of the covariance of draws and the inverse covariance of gradients, both of
    standardised coordinates and regularised; directions whose eigenvalue is near 1 are left as they are.

    Args:
        x: draws, standardised. ``(draw, coordinate)``
        g: gradients there, too.
        shape: what to look for.
    """
    second_moments = x.T @ x, g.T @ g
    if shape.blocks is not None:
        number = np.asarray(shape.blocks)
        within = number[:, None] == number[None, :]
        second_moments = [jnp.where(within, moment, 0.0) for moment in second_moments]
    vectors, values = _informative(*second_moments, shape)
    return vectors.T, values


def spanned_directions(x: Tree, g: Tree, shape: Shape) -> tuple[Tree, Array]:
    """The same over all leaves, within what draws and gradients span; the cost is linear in the size of a position.

    Args:
        x: draws, standardised. ``(draw, *leaf)``
        g: gradients there, too.
        shape: what to look for.
    """
    rows = {name: jnp.concatenate([x[name], g[name]]) for name in x}
    gram = jnp.sum(jnp.stack([_products(leaf) for leaf in rows.values()]), 0)
    sizes, combinations = jnp.linalg.eigh(gram)
    real = sizes > 1e-10 * sizes[-1]
    weights = jnp.where(real, jax.lax.rsqrt(jnp.where(real, sizes, 1.0)), 0.0)
    basis = combinations * weights[None]  # (row, direction)
    count = gram.shape[0] // 2
    along = gram @ basis
    vectors, values = _informative(along[:count].T @ along[:count], along[count:].T @ along[count:], shape)
    weights = (basis @ vectors).T
    return {name: jnp.tensordot(weights, leaf, 1) for name, leaf in rows.items()}, values


def _products(rows: Array) -> Array:
    """Inner products of all pairs of rows."""
    if rows.ndim == 2 and not is_sharded(rows):
        return rows @ rows.T
    return jax.lax.map(lambda row: jnp.sum(rows * row[None], tuple(range(1, rows.ndim))), rows)


def _informative(draws: Array, gradients: Array, shape: Shape) -> tuple[Array, Array]:
    """The directions, as columns, in which the metric of these second moments is farthest from 1, and how it is."""
    least = max(RIDGE, ROUNDING * float(jnp.finfo(draws.dtype).eps) ** 0.5)
    ridge = least * jnp.eye(draws.shape[0], dtype=draws.dtype)
    values, vectors = jnp.linalg.eigh(_geometric_mean(draws + ridge, gradients + ridge))
    values = jnp.maximum(values, 1e-10)
    informative = jnp.abs(jnp.log(values))
    order = jnp.argsort(-informative)[: shape.num_directions]
    return vectors[:, order], jnp.where(informative[order] > np.log(shape.cutoff), values[order], 1.0)


def _geometric_mean(a: Array, b: Array) -> Array:
    """The symmetric ``m`` with ``m b m = a``: the geometric mean of ``a`` and the inverse of ``b``."""
    lower = jnp.linalg.cholesky(b)
    values, vectors = jnp.linalg.eigh(lower.T @ a @ lower)
    root = (vectors * jnp.sqrt(jnp.maximum(values, 0.0))[None]) @ vectors.T
    half = jax.scipy.linalg.solve_triangular(lower, root, lower=True, trans="T")
    mean = jax.scipy.linalg.solve_triangular(lower, half.T, lower=True, trans="T")
    return 0.5 * (mean + mean.T)
