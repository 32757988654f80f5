"""The two compiled programs of a run whose chains do not wait for each other: starts, and a chunk of leapfrogs."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ppleffects.inference.chain import Chain, Rows
from ppleffects.inference.chunks import Draws, Plan, view
from ppleffects.inference.layout import Layout
from ppleffects.inference.machine import Machine
from ppleffects.inference.metric import Metric
from ppleffects.inference.starts import Start, Strategies, find_start, zeros_of

# Starts that are drawn for each that is tried, and what is absurd: a log-density below the best by so many times its
# size. (A recursion that explodes has log-densities of -1e80, which no trajectory can leave.)
STARTS_PER_TRIAL, ABSURD = 4, 1e4


class Chunk(NamedTuple):
    """What a call of the program hands back.

    Attributes:
        counts: rows that each chain has filled. ``(chain,)``
        numbers: trajectories that each chain has ended since its start. ``(chain,)``
        iterations: leapfrog steps that the slowest group of chains has made.
        infos: what happened in each trajectory, by name. ``(row, chain)``
        draws: what is kept of it. ``(row, chain, *site)``
    """

    counts: Array
    numbers: Array
    iterations: Array
    infos: dict[str, Array]
    draws: Draws


# It runs once and briefly, so that it should rather compile fast: at XLA's highest level, 3, it takes twice as long.
@partial(
    jax.jit,
    static_argnames=("machine", "layout", "max_tries", "strategies"),
    compiler_options={"xla_backend_optimization_level": 2},
)
def begin_chains(
    target: Any, key: Array, chains: Array, given: dict[str, Array], metric: Metric | None = None, *, machine: Machine,
    layout: Layout, max_tries: int, strategies: Strategies = (),
) -> tuple[Chain, Start]:  # fmt: skip
    """Draw the starts of each chain until their densities and gradients are finite, and begin its first trajectory.

    Args:
        target: the density.
        key: the run's key; a chain's key is this one folded with its number.
        chains: numbers of the chains. ``(chain,)``
        given: constrained values at which to start, instead of drawn ones. ``(chain, *site)``
        metric: what chains begin with; the identity by default.
        machine: the sampler.
        layout: where chains run.
        max_tries: tries per start.
        strategies: names of latents that start otherwise than uniformly, and how.
    """

    def one_chain(
        target: Any, key: Array, metric: Metric | None, chain: Array, given: dict[str, Array]
    ) -> tuple[Chain, Start]:
        chain_key = jax.random.fold_in(key, chain)
        number = 1 if machine.num_trials == 1 else STARTS_PER_TRIAL * machine.num_trials

        def search(number: Array) -> Start:
            return find_start(
                target, chain_key, given, max_tries, strategies, machine.coordinates, tries_before=number * max_tries
            )

        starts = jax.lax.map(search, jnp.arange(number))  # one by one: some memory per row of data is that of one chain
        tried, first = _sane(starts, machine.num_trials)
        points = tried.log_density, tried.gradient
        return machine.init(target, tried.position, chain_key, metric, points=points), first

    def shard(
        target: Any, key: Array, metric: Metric | None, chains: Array, given: dict[str, Array]
    ) -> tuple[Chain, Start]:
        return jax.vmap(one_chain, in_axes=(None, None, None, 0, 0))(target, key, metric, chains, given)

    per_chain, shared = layout.spec(), PartitionSpec()
    run = layout.over_chains(shard, (shared, shared, shared, per_chain, per_chain), (per_chain, per_chain))
    return run(target, key, metric, chains, given)


@partial(jax.jit, static_argnames=("machine", "layout", "plan"), donate_argnames="chains")
def advance_chains(
    target: Any, chains: Chain, last: Array, budget: Array, record_warmup: Array, *, machine: Machine, layout: Layout,
    plan: Plan,
) -> tuple[Chain, Chunk]:  # fmt: skip
    """Make leapfrog steps in all chains, each through as many trajectories as it comes to.

    Args:
        target: the density.
        chains: the chains. They are used up.
        last: trajectories, counted from the start, at which a chain ends.
        budget: leapfrog steps per chain.
        record_warmup: whether draws of the warm-up are kept.
        machine: the sampler.
        layout: where chains run.
        plan: what to keep, and the rows that each chain can fill.
    """

    def shard(target: Any, chains: Chain, last: Array, budget: Array, record_warmup: Array) -> tuple[Chain, Chunk]:
        rows = _buffers(chains, len(machine.stats), plan.capacity)
        chains, rows, counts, iterations = machine.run(target, chains, rows, last, budget)
        keep = jax.jit(jax.vmap(partial(view, plan=plan), in_axes=(None, 0)))

        def viewed(at: tuple) -> Draws:
            index, packed, warm = at
            wanted = jnp.any((index < counts) & (record_warmup | ~warm))
            position = jax.vmap(machine.coordinates.unpack)
            shapes = jax.eval_shape(lambda x: keep(target, position(x)), packed)
            return jax.lax.cond(wanted, lambda: keep(target, position(packed)), lambda: zeros_of(shapes))

        infos = {name: rows.stats[..., i].astype(dtype) for i, (name, dtype) in enumerate(machine.stats.items())}
        draws = jax.lax.map(viewed, (jnp.arange(plan.capacity), rows.positions, infos["warmup"]))
        return chains, Chunk(counts, chains.number, iterations[None], infos, draws)

    per_chain, shared, rows = layout.spec(), PartitionSpec(), layout.spec(leading=1)
    out_specs = (per_chain, Chunk(per_chain, per_chain, per_chain, rows, rows))  # pyright: ignore[reportArgumentType]
    run = layout.over_chains(shard, (shared, per_chain, shared, shared, shared), out_specs)
    return run(target, chains, last, budget, record_warmup)


def _sane(starts: Start, count: int) -> tuple[Start, Start]:
    """The first starts that are not absurdly worse than the best, each found one, and the first of all."""
    log_density = jnp.where(starts.found, starts.log_density, -jnp.inf)
    best = jnp.max(log_density)
    absurd = ~(log_density >= best - ABSURD * (1 + jnp.abs(best)))
    order = jnp.argsort(absurd + 1 * ~starts.found, stable=True)[:count]
    chosen = jax.tree.map(lambda x: x[order], starts)
    first = jax.tree.map(lambda x: x[0], chosen)

    def whole(values: Array) -> Array:
        return jnp.where(chosen.found.reshape(-1, *[1] * (values.ndim - 1)), values, values[:1])

    return jax.tree.map(whole, chosen), first


def _buffers(chains: Chain, num_stats: int, num_rows: int) -> Rows:
    """Zeros for the rows of all chains."""
    point = chains.path.point
    row = Rows(point.position, jnp.zeros((*point.energy.shape, num_stats), point.energy.dtype))
    return jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (num_rows, *x.shape)), row)
