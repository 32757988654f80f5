"""The models of ``leapfrog.py``: logistic regression by hand and in two libraries, and eight schools."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

import ppleffects as ppl

NUMPYRO = types.SimpleNamespace(
    sample=numpyro.sample,
    observe=lambda name, distribution, value: numpyro.sample(name, distribution, obs=value),
)
SCHOOLS = (
    np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0]),
    np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0]),
)


def logistic(language: Any, x: Array, y: Array) -> None:
    """Logistic regression with standard normal coefficients."""
    w = language.sample("w", dist.Normal(0.0, 1.0).expand([x.shape[1]]).to_event(1))
    language.observe("y", dist.Bernoulli(logits=x @ w), y)


def logistic_by_hand(w: Array, x: Array, y: Array) -> Array:
    """The log-density of ``logistic``."""
    logits = x @ w
    likelihood = jnp.sum(y * logits - jnp.logaddexp(0.0, logits))
    return likelihood - 0.5 * jnp.sum(w * w) - 0.5 * w.size * jnp.log(2 * jnp.pi)


def logistic_data(rows: int, columns: int) -> tuple[Array, tuple[Array, Array]]:
    """Coefficients, and data drawn with them."""
    rng = np.random.default_rng(0)
    w, x = 0.3 * rng.normal(size=columns), rng.normal(size=(rows, columns))
    y = rng.uniform(size=rows) < 1 / (1 + np.exp(-x @ w))
    return jnp.asarray(w), (jnp.asarray(x), jnp.asarray(y.astype(float)))


def schools(language: Any, y: Array, sd: Array) -> None:
    """Eight schools, non-centred."""
    mean = language.sample("mean", dist.Normal(0.0, 5.0))
    scale = language.sample("scale", dist.HalfCauchy(5.0))
    z = language.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    language.observe("y", dist.Normal(mean + scale * z, sd), y)


def centred_schools(y: Array, sd: Array) -> None:
    """Eight schools, centred: a funnel, in which trajectories differ in length."""
    mean = ppl.sample("mean", dist.Normal(0.0, 5.0))
    scale = ppl.sample("scale", dist.HalfCauchy(5.0))
    effect = ppl.sample("effect", dist.Normal(mean, scale).expand([len(y)]).to_event(1))
    ppl.observe("y", dist.Normal(effect, sd), y)


def gradient_loop(log_density: Callable[..., Array]) -> Callable[..., Array]:
    """``(position, number, *data)``: so many evaluations of value and gradient, each where the one before led to."""

    @jax.jit
    def loop(position: Any, number: int, *data: Any) -> Any:
        def body(_: Any, state: tuple) -> tuple:
            position, total = state
            value, slope = jax.value_and_grad(log_density)(position, *data)
            return jax.tree.map(lambda x, g: x + 1e-9 * g, position, slope), total + value

        return jax.lax.fori_loop(0, number, body, (position, 0.0))

    return loop
