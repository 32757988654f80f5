"""NUTS of each library, driven as its documentation does, for densities written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Density = Callable[[Any], Any]


def numpyro_nuts(density: Density, start: Any, key: Any, warmup: int = 200, draws: int = 500) -> Any:
    """Draws of NumPyro's functional NUTS."""
    from numpyro.infer.hmc import hmc

    init, step = hmc(lambda z: -density(z), algo="NUTS")
    state = init(start, num_warmup=warmup, rng_key=key)
    return jax.lax.scan(lambda s, _: ((n := step(s)), n.z), state, None, length=warmup + draws)[1][warmup:]


def blackjax_nuts(density: Density, start: Any, key: Any, warmup: int = 200, draws: int = 500) -> Any:
    """Draws of BlackJAX's NUTS after its window adaptation."""
    import blackjax

    adapt, sample = jax.random.split(key)
    adaptation: Any = blackjax.window_adaptation(blackjax.nuts, density)
    (state, settings), _ = adaptation.run(adapt, start, num_steps=warmup)
    step: Any = blackjax.nuts(density, **settings).step

    def one(state, key):
        state, _ = step(key, state)
        return state, state.position

    return jax.lax.scan(one, state, jax.random.split(sample, draws))[1]


def tfp_nuts(density: Density, start: Any, key: Any, warmup: int = 200, draws: int = 500) -> Any:
    """Draws of TFP's NUTS with its step-size adaptation."""
    from tensorflow_probability.substrates import jax as tfp

    nuts = tfp.mcmc.NoUTurnSampler(density, step_size=jnp.full((), 0.1, start.dtype))
    kernel = tfp.mcmc.DualAveragingStepSizeAdaptation(nuts, num_adaptation_steps=int(0.8 * warmup))
    return tfp.mcmc.sample_chain(
        draws, current_state=start, kernel=kernel, num_burnin_steps=warmup, trace_fn=None, seed=key
    )


SAMPLERS: dict[str, Callable[..., Any]] = {"NumPyro": numpyro_nuts, "TFP": tfp_nuts, "BlackJAX": blackjax_nuts}
