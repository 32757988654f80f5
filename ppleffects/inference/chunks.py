"""The two compiled programs of a run: one that finds starting points, one that makes transitions."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import Array
from jax.sharding import PartitionSpec

from ppleffects.inference.kernel import density_arguments
from ppleffects.inference.layout import Layout
from ppleffects.inference.starts import Start, Strategies, find_start, zeros_of


@dataclass(frozen=True)
class Plan:
    """What the chunk program is compiled for.

    Attributes:
        capacity: a call makes at most so many transitions; a multiple of ``thinning``.
        thinning: every so-many-th draw is kept.
        keep: names of latents and deterministics to return.
        log_likelihood: names of observed sites whose pointwise log-probabilities to return.
    """

    capacity: int
    thinning: int
    keep: tuple[str, ...]
    log_likelihood: tuple[str, ...]


class Draws(NamedTuple):
    """What is kept of a draw, by name.

    Attributes:
        posterior: constrained latents, and deterministics.
        log_likelihood: pointwise log-probabilities of observed sites.
    """

    posterior: dict[str, Array]
    log_likelihood: dict[str, Array]


@partial(jax.jit, static_argnames=("kernel", "layout", "num_warmup", "max_tries", "strategies"))
def run_start(
    target: Any, key: Array, chains: Array, given: dict[str, Array], *, kernel: Any, layout: Layout, num_warmup: int,
    max_tries: int, strategies: Strategies = (),
) -> tuple[Any, Start]:  # fmt: skip
    """Draw a start for each chain until its density and gradient are finite.

    Args:
        target: the density.
        key: the run's key; a chain's key is this one folded with its number.
        chains: numbers of the chains. ``(chain,)``
        given: constrained values at which to start, instead of drawn ones. ``(chain, *site)``
        kernel: the sampler.
        layout: where chains run.
        num_warmup: length of the warm-up.
        max_tries: tries per chain.
        strategies: names of latents that start otherwise than uniformly, and how.

    Returns:
        The state of each chain, and how its start was found.
    """

    def one_chain(target: Any, key: Array, chain: Array, given: dict[str, Array]) -> tuple[Any, Start]:
        start_key, kernel_key = jax.random.split(jax.random.fold_in(key, chain))
        start = find_start(target, start_key, given, max_tries, strategies)
        point = (start.log_density, start.gradient)
        return kernel.init(target, start.position, kernel_key, num_warmup, point=point), start

    def shard(target: Any, key: Array, chains: Array, given: dict[str, Array]) -> tuple[Any, Start]:
        all_chains = jax.vmap(one_chain, in_axes=(None, None, 0, 0), out_axes=(kernel.state_axes, 0))
        return all_chains(target, key, chains, given)

    per_chain, shared = layout.spec(), PartitionSpec()
    specs = (_specs(kernel.state_axes, per_chain), per_chain)
    return layout.over_chains(shard, (shared, shared, per_chain, per_chain), specs)(target, key, chains, given)


@partial(jax.jit, static_argnames=("kernel", "layout", "plan"))
def run_chunk(
    target: Any, state: Any, count: Array, record: Array, *, kernel: Any, layout: Layout, plan: Plan
) -> tuple[Any, Any, Draws]:
    """Make ``count`` transitions in each chain; warm-up and sampling alike.

    The number of iterations is no constant of the program, so that one program serves every chunk, and the compiler
    treats its body alike whatever the capacity: draws do not depend on it.

    Args:
        target: the density.
        state: state of all chains.
        count: transitions to make, at most ``plan.capacity``.
        record: whether to keep draws.
        kernel: the sampler.
        layout: where chains run.
        plan: what to keep.

    Returns:
        The new state; what happened in each transition ``(capacity, chain)``, of which the first ``count`` are filled;
        and the draws ``(capacity / thinning, chain, *site)``, of which the first ``count / thinning`` are.
    """
    axes = kernel.state_axes

    def shard(target: Any, state: Any, count: Array, record: Array) -> tuple[Any, Any, Draws]:
        # Each is asked for its shapes and then run: the jit makes that one trace.
        step = jax.jit(jax.vmap(kernel.step, in_axes=(None, axes), out_axes=(axes, 0)))
        keep = jax.jit(
            jax.vmap(lambda target, x: view(target, density_arguments(target, x), plan=plan), in_axes=(None, 0))
        )
        _, info_shapes = jax.eval_shape(step, target, state)
        draw_shapes = jax.eval_shape(keep, target, state.position)

        def body(index: Array, carry: tuple) -> tuple:
            state, infos, draws = carry
            state, info = step(target, state)
            kept = record & ((index + 1) % plan.thinning == 0)
            draw = jax.lax.cond(kept, lambda: keep(target, state.position), lambda: zeros_of(draw_shapes))
            return state, _write(infos, info, index), _write(draws, draw, index // plan.thinning)

        infos = zeros_of(info_shapes, plan.capacity)
        draws = zeros_of(draw_shapes, plan.capacity // plan.thinning)
        return jax.lax.fori_loop(0, count, body, (state, infos, draws))

    shared, rows = PartitionSpec(), layout.spec(leading=1)
    state_specs = _specs(axes, layout.spec())
    in_specs, out_specs = (shared, state_specs, shared, shared), (state_specs, rows, rows)
    return layout.over_chains(shard, in_specs, out_specs)(target, state, count, record)


def draw_shapes(target: Any, plan: Plan) -> Draws:
    """Shapes and dtypes of what one draw of one chain keeps."""
    return jax.eval_shape(lambda target, key: view(target, target.init(key), plan=plan), target, jax.random.key(0))


def view(target: Any, position: dict[str, Array], *, plan: Plan) -> Draws:
    """What is kept of the draw at an unconstrained position."""
    values = target.constrain(position)
    log_probs = target.log_probs(position) if plan.log_likelihood else {}
    return Draws({name: values[name] for name in plan.keep}, {name: log_probs[name] for name in plan.log_likelihood})


def _specs(axes: Any, per_chain: PartitionSpec) -> Any:
    """Partition specs for a prefix of 0 (one per chain) and None (shared)."""
    return jax.tree.map(
        lambda axis: PartitionSpec() if axis is None else per_chain, axes, is_leaf=lambda axis: axis is None
    )


def _write(buffers: Any, values: Any, row: Array) -> Any:
    """The buffers with ``values`` written at ``row``."""
    return jax.tree.map(
        lambda buffer, value: jax.lax.dynamic_update_index_in_dim(buffer, value.astype(buffer.dtype), row, 0),
        buffers,
        values,
    )
