"""Flights sampled on the devices of a CPU, one core to each: the seconds of a leapfrog step, whenever asked.

Run by ``scale.py`` with what is spread over the devices ("rows" or "chains") and the number of rows. Prints a line when
the program is compiled, and then, for each line that it reads, one with the seconds of a leapfrog step of all chains,
and those of all processors together.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import jax
import numpy as np
from _leapfrog_record import first_call
from _scale_models import flights, flights_rows
from jax.sharding import AxisType

import ppleffects as ppl
from ppleffects.inference import run as driver

NUM_CHAINS, LEAPFROGS = 4, 8
KERNEL = ppl.HMC(step_size=1e-3, adapt_step_size=False, adapt_mass_matrix=False, max_num_steps=LEAPFROGS)


def halted(model: Any, data: tuple, mesh: jax.sharding.Mesh) -> tuple[tuple, dict[str, Any]]:
    """Arguments of the first call of ``advance_chains``."""
    settings: dict[str, Any] = {"num_warmup": 0, "num_samples": 2**20, "num_chains": NUM_CHAINS, "chunk_size": 16}
    return first_call(lambda: ppl.mcmc(model, KERNEL, mesh=mesh, progress=False, **settings)(0, *data))


def main() -> None:
    """Compile, then answer."""
    spread, num_rows, devices = sys.argv[1], int(sys.argv[2]), jax.device_count()
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:devices]))
    sizes = (1, devices) if spread == "rows" else (devices, 1)
    mesh = jax.make_mesh(sizes, ("chains", "data"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(0)

    def make(shape: tuple[int, ...], dtype: Any, below: int) -> np.ndarray:
        return rng.normal(size=shape) if dtype is np.float64 else rng.integers(0, below, shape).astype(dtype)

    (target, chains, *_), static = halted(flights(mesh), ppl.shard_rows(flights_rows(num_rows, make), mesh), mesh)
    last, budget, record = np.int32(2**30), np.int32(LEAPFROGS), np.bool_(False)
    with jax.set_mesh(mesh):
        chains, chunk = driver.advance_chains(target, chains, last, budget, record, **static)
        print("ready", int(np.asarray(chunk.iterations).max()), flush=True)
        for _ in sys.stdin:
            began, worked = time.perf_counter(), time.process_time()
            chains, chunk = driver.advance_chains(target, chains, last, budget, record, **static)
            jax.block_until_ready(chains)
            seconds = time.perf_counter() - began, time.process_time() - worked
            steps = int(np.asarray(chunk.iterations).max())
            print(*(s / steps for s in seconds), flush=True)


if __name__ == "__main__":
    main()
