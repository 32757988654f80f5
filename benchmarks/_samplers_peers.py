"""The samplers that ``samplers.py`` compares: each runs one posterior, compiled before the clock starts.

All see the same unconstrained coordinates, those of ``ppl.target``, which are NumPyro's too, and start uniformly in
(-2, 2). Settings are each library's defaults. Gradients are those of leapfrog steps as each library reports them.

- ppleffects: ``ppl.mcmc``, by the times and counts that its result tells. Its search for a start counts as warm-up.
- NumPyro: the steps of its kernel in a scan over all chains at once, as its driver does with
  ``chain_method="vectorized"``, which compiles anew in each run. Its search for a start and a first step size, which
  it compiles as it goes, does not count.
- BlackJAX: ``window_adaptation`` and ``nuts``, vmapped over chains. Low-rank is ``window_adaptation_low_rank``.
- nutpie: ``nutpie.compiled_pyfunc.from_pyfunc`` with the compiled value and gradient of the ppleffects target. Its
  chains run in as many threads as there are cores, and each gradient is a call from Python, which costs some tens of
  microseconds: its draws per gradient compare with the others', its draws per second only where a gradient is dear.
"""

from __future__ import annotations

import functools
import importlib.util
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import blackjax
import jax
import jax.numpy as jnp
import numpy as np
from _posteriors import Posterior
from jax import Array, lax
from jax.flatten_util import ravel_pytree
from numpyro.infer import NUTS

import ppleffects as ppl
from ppleffects.errors import DiagnosticsWarning


@dataclass(frozen=True)
class Settings:
    """Length of a run: transitions of each chain, chains, and a seed."""

    num_warmup: int
    num_samples: int
    num_chains: int
    seed: int

    def keys(self) -> Array:
        """One key for each chain."""
        return jax.random.split(jax.random.key(self.seed), self.num_chains)


@dataclass(frozen=True)
class Run:
    """What one sampler made of one posterior.

    Attributes:
        draws: ``(chain, draw, ...)`` of each site, after warm-up.
        seconds: warm-up and sampling.
        seconds_compile: compilation.
        gradients_warmup: over all chains.
        gradients: over all chains, after warm-up.
        divergences: over all chains, after warm-up.
    """

    draws: dict[str, Any]
    seconds: float
    seconds_compile: float
    gradients_warmup: int
    gradients: int
    divergences: int


@dataclass(frozen=True)
class Peer:
    """A sampler: its name, the package it needs, and what runs it."""

    name: str
    package: str
    run: Callable[[Posterior, Settings], Run]

    @property
    def present(self) -> bool:
        """Whether its package is installed."""
        return importlib.util.find_spec(self.package) is not None


def _constrained(target: ppl.Target, positions: Any) -> dict[str, Any]:
    """Draws of all sites from unconstrained ones ``(chain, draw, ...)``."""
    return jax.device_get(jax.jit(jax.vmap(jax.vmap(target.constrain)))(positions))


def _compile(program: Callable, *arguments: Any) -> tuple[Any, float]:
    began = time.perf_counter()
    compiled = jax.jit(program).lower(*arguments).compile()
    return compiled, time.perf_counter() - began


def _run_compiled(target: ppl.Target, program: Callable, *arguments: Any) -> Run:
    """``program`` returns positions, leapfrogs of warm-up, leapfrogs, and divergences."""
    compiled, seconds_compile = _compile(program, *arguments)
    began = time.perf_counter()
    positions, *counts = jax.block_until_ready(compiled(*arguments))
    seconds = time.perf_counter() - began
    return Run(_constrained(target, positions), seconds, seconds_compile, *(int(count.sum()) for count in counts))


def _ppleffects(posterior: Posterior, settings: Settings) -> Run:
    lengths = {name: getattr(settings, name) for name in ("num_warmup", "num_samples", "num_chains")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DiagnosticsWarning)
        tree = ppl.mcmc(posterior.model, progress=False, **lengths)(settings.seed, **posterior.arguments)
    return Run(
        draws={str(name): values.values for name, values in tree["posterior"].data_vars.items()},
        seconds=tree.attrs["warmup_time"] + tree.attrs["sampling_time"],
        seconds_compile=tree.attrs["compile_time"],
        gradients_warmup=tree.attrs["num_leapfrogs_warmup"],
        gradients=tree.attrs["num_leapfrogs"],
        divergences=int(tree["sample_stats"].dataset["diverging"].sum()),
    )


def _numpyro(posterior: Posterior, settings: Settings, *, dense: bool) -> Run:
    kernel = NUTS(posterior.numpyro, dense_mass=dense)
    target = ppl.target(posterior.model)(**posterior.arguments)
    began = time.perf_counter()
    start = kernel.init(settings.keys(), settings.num_warmup, None, (), posterior.arguments)
    seconds_start = time.perf_counter() - began

    def transition(state, _):
        state = kernel.sample(state, (), posterior.arguments)
        return state, (state.z, state.num_steps, state.diverging)

    def program(state):
        state, (_, warmup, _) = lax.scan(transition, state, None, settings.num_warmup)
        _, (positions, steps, diverging) = lax.scan(transition, state, None, settings.num_samples)
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), positions), warmup, steps, diverging

    run = _run_compiled(target, program, start)
    return Run(**{**vars(run), "seconds_compile": run.seconds_compile + seconds_start})


def _starts(target: ppl.Target, settings: Settings) -> Any:
    """Positions ``(chain, ...)``, checked to have a finite density."""
    starts = jax.vmap(target.init)(settings.keys())
    if not np.isfinite(jax.vmap(target.log_density)(starts)).all():
        raise RuntimeError("a start has no finite density: take another seed")
    return starts


def _blackjax(posterior: Posterior, settings: Settings, *, adapt: Callable[..., Any]) -> Run:
    target = ppl.target(posterior.model)(**posterior.arguments)

    def program(key, position):
        key_warmup, key = jax.random.split(key)
        warmup: Any = adapt(blackjax.nuts, target.log_density)
        (state, parameters), infos = warmup.run(key_warmup, position, num_steps=settings.num_warmup)
        step: Callable[..., Any] = blackjax.nuts(target.log_density, **parameters).step

        def transition(state, key):
            state, info = step(key, state)
            return state, (state.position, info.num_integration_steps, info.is_divergent)

        _, (positions, steps, diverging) = lax.scan(transition, state, jax.random.split(key, settings.num_samples))
        return positions, infos.info.num_integration_steps, steps, diverging

    return _run_compiled(target, jax.vmap(program), settings.keys(), _starts(target, settings))


def _arrow_column(batches: Any, name: str) -> np.ndarray:
    """``(chain, row, ...)``, from batches of rows in Arrow's format, one batch for each chain."""
    arrow = importlib.import_module("pyarrow")
    return np.stack([np.asarray(arrow.array(batch.column(name)).to_pylist()) for batch in batches])


def _nutpie(posterior: Posterior, settings: Settings, *, low_rank: bool) -> Run:
    nutpie = importlib.import_module("nutpie")
    from_pyfunc = importlib.import_module("nutpie.compiled_pyfunc").from_pyfunc
    target = ppl.target(posterior.model)(**posterior.arguments)
    starts = _starts(target, settings)
    example, unravel = ravel_pytree(jax.tree.map(lambda leaf: leaf[0], starts))
    gradient, seconds_compile = _compile(jax.value_and_grad(lambda x: target.log_density(unravel(x))), example)

    def log_density(x):
        value, slope = gradient(x)
        return float(value), np.asarray(slope)

    def start(seed):
        return np.random.default_rng(seed).uniform(-2.0, 2.0, example.size)

    model = from_pyfunc(
        ndim=example.size,
        make_logp_fn=lambda: log_density,
        make_expand_fn=lambda seed, other_seed, chain: lambda x: {"x": x},
        expanded_dtypes=[np.dtype("float64")],
        expanded_shapes=[(example.size,)],
        expanded_names=["x"],
        make_initial_point_fn=start,
    )
    lengths = {"tune": settings.num_warmup, "draws": settings.num_samples, "chains": settings.num_chains}
    began = time.perf_counter()
    result = nutpie.sample(
        model,
        seed=settings.seed,
        low_rank_modified_mass_matrix=low_rank,
        progress_bar=False,
        return_raw_trace=True,  # its conversion into a tree is for arviz before version 1
        **lengths,
    )
    seconds = time.perf_counter() - began
    draws, statistics = result.get_arrow_trace()
    tuning, steps, diverging = (_arrow_column(statistics, name) for name in ("tuning", "n_steps", "diverging"))
    rows = jnp.asarray(_arrow_column(draws, "x")[:, -settings.num_samples :])
    return Run(
        draws=_constrained(target, jax.vmap(jax.vmap(unravel))(rows)),
        seconds=seconds,
        seconds_compile=seconds_compile,
        gradients_warmup=int(steps[tuning].sum()),
        gradients=int(steps[~tuning].sum()),
        divergences=int(diverging[~tuning].sum()),
    )


_window = blackjax.window_adaptation
_dense_window = functools.partial(blackjax.window_adaptation, is_mass_matrix_diagonal=False)
_low_rank_window = blackjax.window_adaptation_low_rank

PEERS = {
    peer.name: peer
    for peer in (
        Peer("ppleffects", "ppleffects", _ppleffects),
        Peer("numpyro-diagonal", "numpyro", functools.partial(_numpyro, dense=False)),
        Peer("numpyro-dense", "numpyro", functools.partial(_numpyro, dense=True)),
        Peer("blackjax-diagonal", "blackjax", functools.partial(_blackjax, adapt=_window)),
        Peer("blackjax-dense", "blackjax", functools.partial(_blackjax, adapt=_dense_window)),
        Peer("blackjax-low-rank", "blackjax", functools.partial(_blackjax, adapt=_low_rank_window)),
        Peer("nutpie-diagonal", "nutpie", functools.partial(_nutpie, low_rank=False)),
        Peer("nutpie-low-rank", "nutpie", functools.partial(_nutpie, low_rank=True)),
    )
}
