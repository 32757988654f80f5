"""BlackJAX's transitions and warm-up, a step at a time: for ``engine="blackjax"``.

The library is optional, and imported when it is first used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.errors import MissingDependencyError

type LogDensity = Callable[[dict[str, Array]], Array]


class Adaptation(NamedTuple):
    """What its warm-up adapts.

    Attributes:
        step_size: the step size to use now.
        inverse_mass_matrix: the metric to use now: variances, or a covariance, of the latents in the order of their
            names.
        averaging: dual averaging of the step size.
        moments: of the positions of the window, from which the next metric comes.
    """

    step_size: Array
    inverse_mass_matrix: Array
    averaging: Any
    moments: Any


class Point(NamedTuple):
    """A position of a chain, with log-density and gradient there."""

    position: dict[str, Array]
    log_density: Array
    gradient: dict[str, Array]


def require() -> None:
    """Check that BlackJAX is there.

    Raises:
        MissingDependencyError: BlackJAX is not installed.
    """
    _module("")


def begin(point: Point, step_size: float, target_accept: float, *, dense: bool) -> Adaptation:
    """The adaptation at its start: a given step size and the identity."""
    size = sum(x.size for x in point.position.values())
    moments = _moments(dense)[0](size)
    averaging = _averaging(target_accept)[0](step_size)
    adaptation = Adaptation(jnp.asarray(step_size), moments.inverse_mass_matrix, averaging, moments)
    return jax.tree.map(_strong, adaptation)


def adapt(
    adaptation: Adaptation, iteration: Array, num_warmup: int, position: dict[str, Array], acceptance_rate: Array,
    target_accept: float, *, dense: bool, step_size: bool, metric: bool,
) -> Adaptation:  # fmt: skip
    """The adaptation after a transition of the warm-up (Stan's: windows that double, between two without a metric).

    Args:
        adaptation: before.
        iteration: the number of the transition, less than ``num_warmup``.
        num_warmup: transitions of the warm-up.
        position: where the transition led.
        acceptance_rate: its mean acceptance probability.
        target_accept: what that is adapted to.
        dense: whether the metric has correlations.
        step_size: whether the step size is adapted.
        metric: whether the metric is.
    """
    _, add, estimate = _moments(dense)
    restart, average, averaged = _averaging(target_accept)
    slow, ends = _module("adaptation.window_adaptation").build_schedule(num_warmup)[iteration].astype(bool)

    def window_ended(new: Adaptation) -> Adaptation:
        moments, averaging = estimate(new.moments), restart(averaged(new.averaging))
        return _alike(new, Adaptation(new.step_size, moments.inverse_mass_matrix, averaging, moments))

    new = adaptation._replace(averaging=average(adaptation.averaging, acceptance_rate))
    if metric:
        moments = jax.lax.cond(
            slow, lambda: _alike(new.moments, add(new.moments, position)), lambda: adaptation.moments
        )
        new = jax.lax.cond(ends, window_ended, lambda new: new, _alike(adaptation, new._replace(moments=moments)))
    if step_size:
        last = iteration == num_warmup - 1
        log_step = jnp.where(last, new.averaging.log_step_size_avg, new.averaging.log_step_size)
        new = new._replace(step_size=jnp.exp(log_step))
    return _alike(adaptation, new)


def nuts(
    log_density: LogDensity, point: Point, adaptation: Adaptation, key: Array, max_doublings: int, max_error: float
) -> tuple[Point, Any]:
    """A transition of NUTS: the new point, and what BlackJAX tells of it."""
    kernel = _module("mcmc.nuts").build_kernel(divergence_threshold=max_error)
    step_size, metric = adaptation.step_size, adaptation.inverse_mass_matrix
    state, info = kernel(key, _state(point), log_density, step_size, metric, max_doublings)
    return Point(*state), info


def hmc(
    log_density: LogDensity, point: Point, metric: Array, key: Array, step_size: Array, num_steps: Array,
    max_error: float,
) -> tuple[Point, Any]:  # fmt: skip
    """A transition of HMC: the new point, and what BlackJAX tells of it, with the energy at the new point."""
    kernel = _module("mcmc.hmc").build_kernel(divergence_threshold=max_error)
    state, info = kernel(key, _state(point), log_density, step_size, metric, num_steps)
    kinetic = _module("mcmc.metrics").default_metric(metric).kinetic_energy
    stayed = kinetic(info.momentum) - point.log_density
    return Point(*state), info._replace(energy=jnp.where(info.is_accepted, info.energy, stayed))


def _module(name: str) -> Any:
    try:
        return importlib.import_module(f"blackjax.{name}" if name else "blackjax")
    except ImportError as error:
        raise MissingDependencyError(
            'engine="blackjax" needs BlackJAX, which is not installed, or does not import',
            expected="a release for the JAX installed here",
            found=f"{type(error).__name__}: {error}",
            fix="pip install 'ppleffects[blackjax]'",
        ) from error


def _state(point: Point) -> Any:
    return _module("mcmc.hmc").HMCState(*point)


def _moments(dense: bool) -> tuple[Callable, Callable, Callable]:
    return _module("adaptation.mass_matrix").mass_matrix_adaptation(is_diagonal_matrix=not dense)


def _averaging(target_accept: float) -> tuple[Callable, Callable, Callable]:
    return _module("adaptation.step_size").dual_averaging_adaptation(target_accept)


def _strong(x: Any) -> Array:
    """An array of the default dtype of its kind: BlackJAX begins with numbers of Python."""
    return jnp.asarray(x, jnp.result_type(float if jnp.issubdtype(jnp.result_type(x), jnp.floating) else int))


def _alike(old: Any, new: Any) -> Any:
    """``new`` with the dtypes of ``old``."""
    return jax.tree.map(lambda a, b: jnp.asarray(b, a.dtype), old, new)
