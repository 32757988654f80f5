"""NUTS of NumPyro and BlackJAX for ``leapfrog.py``: compiled, ready to be timed again and again.

Each is a function without arguments that makes some transitions of all chains and returns the leapfrog steps of each,
``(chain, transition)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from numpyro.infer import NUTS

type Transitions = Callable[[], np.ndarray]


def _numpyro_scan(kernel: NUTS, data: tuple, length: int, state: Any) -> tuple[Any, tuple[Any, Array]]:
    def transition(state: Any, _: Any) -> tuple[Any, Any]:
        state = kernel.sample(state, data, {})
        return state, (state.z, state.num_steps)

    return lax.scan(transition, state, None, length)


def numpyro_adapted(model: Callable, data: tuple, chains: int, num_warmup: int, num_samples: int) -> Transitions:
    """Transitions after a warm-up by NumPyro's defaults, of all chains at once: its chain method "vectorized"."""
    kernel = NUTS(model)
    keys = jax.random.split(jax.random.key(0), chains)
    start = kernel.init(keys, num_warmup, None, data, {})
    start, _ = jax.jit(functools.partial(_numpyro_scan, kernel, data, num_warmup))(start)
    program = jax.jit(functools.partial(_numpyro_scan, kernel, data, num_samples)).lower(start).compile()
    return lambda: np.asarray(jax.block_until_ready(program(start))[1][1]).T


def numpyro_fixed(
    model: Callable, data: tuple, position: dict[str, Array], step_size: float, num_samples: int, method: str
) -> Transitions:
    """Transitions with a fixed step size and metric.

    Args:
        model: NumPyro's.
        data: its arguments.
        position: where chains start. Leading axis of chains.
        step_size: length of a step.
        num_samples: transitions.
        method: NumPyro's chain method: "vectorized", "parallel" (a chain on each device), or "sequential" (one chain is
            run, since the others would take as long).
    """
    kernel = NUTS(model, step_size=step_size, adapt_step_size=False, adapt_mass_matrix=False)
    chains = len(jax.tree.leaves(position)[0])
    keys = jax.random.split(jax.random.key(0), chains)
    if method == "sequential":
        keys, position = keys[0], jax.tree.map(lambda x: x[0], position)
    start = kernel.init(keys, 0, position, data, {})

    def program(state: Any, *data: Any) -> Array:
        return _numpyro_scan(kernel, data, num_samples, state)[1][1]

    if method == "parallel":
        mesh = jax.make_mesh((chains,), ("chains",), axis_types=(AxisType.Auto,))

        specs = (P("chains"), *[P()] * len(data))
        program_of_all = jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P(None, "chains"), check_vma=False)
        start = jax.device_put(start, jax.NamedSharding(mesh, P("chains")))
        data = jax.device_put(data, jax.NamedSharding(mesh, P()))
    else:
        program_of_all = program
    compiled = jax.jit(program_of_all).lower(start, *data).compile()
    return lambda: np.atleast_2d(np.asarray(jax.block_until_ready(compiled(start, *data))).T)


def blackjax_adapted(
    log_density: Callable, positions: Any, chains: int, num_warmup: int, num_samples: int
) -> Transitions:
    """Transitions after BlackJAX's ``window_adaptation``, vmapped over chains."""
    adaptation: Any = blackjax.window_adaptation(blackjax.nuts, log_density)

    def warm(key: Array, position: Any) -> Any:
        (state, parameters), _ = adaptation.run(key, position, num_steps=num_warmup)
        return state, parameters

    def sample(key: Array, state: Any, parameters: Any) -> Any:
        step: Callable[..., Any] = blackjax.nuts(log_density, **parameters).step

        def transition(state: Any, key: Array) -> tuple[Any, Any]:
            state, info = step(key, state)
            return state, (state.position, info.num_integration_steps)

        return lax.scan(transition, state, jax.random.split(key, num_samples))[1]

    keys = jax.random.split(jax.random.key(0), chains)
    state, parameters = jax.jit(jax.vmap(warm))(keys, positions)
    program = jax.jit(jax.vmap(sample)).lower(keys, state, parameters).compile()
    return lambda: np.asarray(jax.block_until_ready(program(keys, state, parameters))[1])


def per_chain(position: dict[str, Array], chains: int) -> dict[str, Array]:
    """The same position for each chain."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (chains, *x.shape)), position)
