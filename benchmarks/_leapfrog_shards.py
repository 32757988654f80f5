"""A model whose latents lie on the shards: what one program for all of its leapfrog steps holds and sends.

Run by ``leapfrog.py`` with the number of latents and the metric, on all devices; prints a line of JSON. Nothing is
sampled: the chain begins, and the program that would advance it is compiled.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from _cost import collectives, leapfrog_collectives
from _leapfrog_record import first_call
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.inference import run as driver

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def shard(mean: jax.Array, y: jax.Array) -> None:
    """The latents of one device."""
    z = ppl.sample("z", dist.Normal(0.0, 1.0).expand(y.shape), spec=P("data"))
    ppl.observe("y", dist.Normal(mean + z, 0.5), y)


def model(y: jax.Array) -> None:
    """A latent for each row, which lives where the row does."""
    mean = ppl.sample("mean", dist.Normal(0.0, 2.0))
    jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=None)(mean, y)


def halted(y: jax.Array, metric: str) -> tuple[tuple, dict[str, Any]]:
    """Arguments of the first call of ``advance_chains``."""
    return first_call(lambda: ppl.mcmc(model, ppl.NUTS(metric=metric), num_chains=1, progress=False)(0, y))


def main() -> None:
    """Compile, read, print."""
    size, metric = int(sys.argv[1]), sys.argv[2]
    y = jax.device_put(jnp.ones(size), NamedSharding(mesh, P("data")))
    args, static = halted(y, metric)
    with jax.set_mesh(mesh):
        compiled = driver.advance_chains.lower(*args, **static).compile()
    memory: Any = compiled.memory_analysis()
    hlo = compiled.as_text() or ""
    total = memory.argument_size_in_bytes + memory.output_size_in_bytes + memory.temp_size_in_bytes
    before, after = jax.tree.leaves(compiled.input_shardings[0]), jax.tree.leaves(compiled.output_shardings[0])
    state = before[-len(after) - 3 : -3]  # after the target, before three numbers
    ndims = [leaf.ndim for leaf in jax.tree.leaves(args[1])]
    same = all(a.is_equivalent_to(b, ndim) for a, b, ndim in zip(state, after, ndims, strict=True))
    result = {
        "devices": mesh.size,
        "latents": size,
        "metric": metric,
        "bytes_per_device": total - memory.alias_size_in_bytes,
        "bytes_of_state_per_device": memory.argument_size_in_bytes,
        "collectives": collectives(hlo),
        "collectives_per_leapfrog": leapfrog_collectives(hlo),
        "compiled_once": same,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
