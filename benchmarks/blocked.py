"""What a likelihood in blocks of rows costs, against all rows at once, and against both written by hand in JAX.

The density is a logistic regression of 524,288 rows and 55 columns. Measured are the wall time and the temporary memory
of its value and gradient, for one chain and for eight that are vectorised, and whether the results are equal. By hand,
in blocks, is a scan that adds up ``jax.value_and_grad`` of a block's density.

    python benchmarks/blocked.py [--rounds 30] [--json benchmarks/results/blocked.json]

In each round all programs run, one after the other, so that a change of load hits all; times are minima over rounds.
The temporary memory is what XLA allocates beside arguments and results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import lax

import ppleffects as ppl

ROWS, COLUMNS = 524_288, 55
PACKAGES = ("ppleffects", "jax", "jaxlib", "numpyro", "numpy")
TIME_BAR, MEMORY_BAR = 0.6, 0.1  # of all rows at once
CHAINS = (1, 8)

type Density = Callable[[dict[str, jax.Array], jax.Array, jax.Array], jax.Array]


def likelihood(values: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> jax.Array:
    """The log-likelihood of some rows, by hand."""
    logits = x @ values["beta"] + values["alpha"]
    return jnp.sum(y * logits - jax.nn.softplus(logits))


def prior(values: dict[str, jax.Array]) -> jax.Array:
    """The prior of standard normals, by hand."""
    flat = jnp.concatenate([values["alpha"][None], values["beta"]])
    return -0.5 * jnp.sum(flat**2) - 0.5 * flat.size * jnp.log(2 * jnp.pi).astype(flat.dtype)


def by_hand(values: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> Any:
    """Value and gradient of all rows at once."""
    return jax.value_and_grad(lambda v: likelihood(v, x, y) + prior(v))(values)


def by_hand_in_blocks(rows: int) -> Callable[..., Any]:
    """Value and gradient, added up over blocks."""

    def value_and_gradient(values, x, y):
        def step(total, number):
            block = [lax.dynamic_slice_in_dim(a, number * rows, rows) for a in (x, y)]
            found = jax.value_and_grad(likelihood)(values, *block)
            return jax.tree.map(jnp.add, total, found), None

        return lax.scan(step, jax.value_and_grad(prior)(values), jnp.arange(ROWS // rows))[0]

    return value_and_gradient


def model(rows: int | None) -> Callable[..., None]:
    """The regression as a model; in blocks by default, all rows at once if ``rows`` is 0."""

    def regression(x, y):
        zero = jnp.zeros((), x.dtype)
        alpha = ppl.sample("alpha", dist.Normal(zero, 1.0))
        beta = ppl.sample("beta", dist.Normal(zero, 1.0).expand((COLUMNS,)))

        def likelihood(block):
            x, y = block
            ppl.observe("y", dist.Bernoulli(logits=x @ beta + alpha), y)

        (likelihood if rows == 0 else ppl.blocked(likelihood, rows))((x, y))

    return regression


def block_rows(x: jax.Array, y: jax.Array) -> int:
    """The rows of a block by default."""
    (path,) = ppl.sites(model(None))(x, y)["y"].path
    return int(path.removeprefix("blocked[").removesuffix("]"))


def minima(programs: dict[str, Any], arguments: Any, rounds: int) -> dict[str, float]:
    """The least wall time of one call of each program, in seconds."""
    best = dict.fromkeys(programs, float("inf"))
    for _ in range(rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready(program(*arguments))
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def relative_difference(found: Any, expected: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of each array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.float64(a) - b).max() / np.abs(b).max()) for a, b in pairs)


def measure(dtype: Any, chains: int, rounds: int) -> dict[str, Any]:
    """All figures in one precision, for one number of chains."""
    rng = np.random.default_rng(0)
    wide = rng.normal(size=(ROWS, COLUMNS))
    slopes = rng.normal(size=COLUMNS) / np.sqrt(COLUMNS)
    seen = rng.random(ROWS) < 1 / (1 + np.exp(-wide @ slopes))
    x, y = jnp.asarray(wide, dtype), jnp.asarray(seen, dtype)
    spread = rng.normal(size=(chains, COLUMNS)) / 10
    values = {"alpha": jnp.asarray(spread[:, 0], dtype), "beta": jnp.asarray(slopes + spread, dtype)}
    rows = block_rows(x, y)
    functions: dict[str, Callable[..., Any]] = {
        "by_hand": by_hand,
        "by_hand_in_blocks": by_hand_in_blocks(rows),
        "at_once": jax.value_and_grad(ppl.log_density(model(0))),
        "blocked": jax.value_and_grad(ppl.log_density(model(None))),
    }
    if chains == 1:
        values = jax.tree.map(lambda v: v[0], values)
    else:
        functions = {name: jax.vmap(fn, in_axes=(0, None, None)) for name, fn in functions.items()}
    programs = {name: jax.jit(fn).lower(values, x, y).compile() for name, fn in functions.items()}
    seconds = minima(programs, (values, x, y), rounds)
    results = {name: jax.device_get(program(values, x, y)) for name, program in programs.items()}
    analyses: dict[str, Any] = {name: program.memory_analysis() for name, program in programs.items()}
    memory = {name: int(analysis.temp_size_in_bytes) for name, analysis in analyses.items()}
    return {
        "dtype": np.dtype(dtype).name,
        "chains": chains,
        "block_rows": rows,
        "time_ratio": seconds["blocked"] / seconds["at_once"],
        "memory_ratio": memory["blocked"] / memory["at_once"],
        "time_ratio_to_blocks_by_hand": seconds["blocked"] / seconds["by_hand_in_blocks"],
        "memory_ratio_to_blocks_by_hand": memory["blocked"] / memory["by_hand_in_blocks"],
        "difference_at_once": relative_difference(results["blocked"], results["at_once"]),
        "difference_by_hand": relative_difference(results["blocked"], results["by_hand"]),
        "programs": {name: {"seconds": seconds[name], "temporary_bytes": memory[name]} for name in programs},
    }


def print_row(row: dict[str, Any]) -> None:
    """The figures of one setting."""
    print(f"\n{row['dtype']}, chains: {row['chains']}, rows of a block: {row['block_rows']}")
    for name, found in row["programs"].items():
        print(f"  {name:<20} {1e3 * found['seconds']:8.2f} ms {found['temporary_bytes'] / 2**20:9.2f} MiB")
    print(
        f"  blocked / at once: time {row['time_ratio']:.2f}, memory {row['memory_ratio']:.3f}; "
        f"blocked / blocks by hand: time {row['time_ratio_to_blocks_by_hand']:.2f}, "
        f"memory {row['memory_ratio_to_blocks_by_hand']:.2f}\n"
        f"  value and gradient differ by {row['difference_at_once']:.1e} from those at once, "
        f"by {row['difference_by_hand']:.1e} from those by hand (relative)"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Cost of a likelihood in blocks of rows.")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of timing")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "blocked.json")
    options = parser.parse_args()
    versions = {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"{ROWS} rows x {COLUMNS} columns; {jax.devices()[0].device_kind}, {os.cpu_count()} cores")
    rows = []
    for dtype in (np.float64, np.float32):
        for chains in CHAINS:
            rows.append(measure(dtype, chains, options.rounds))
            print_row(rows[-1])
    bar = next(row for row in rows if row["dtype"] == "float64" and row["chains"] == 1)
    met = {"time": bar["time_ratio"] <= TIME_BAR, "memory": bar["memory_ratio"] <= MEMORY_BAR}
    print(f"\nfloat64, one chain: time at most {TIME_BAR}: {met['time']}; memory at most {MEMORY_BAR}: {met['memory']}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    settings = {"cores": os.cpu_count(), "machine": platform.machine(), "rounds": options.rounds}
    bars = {"time_bar": TIME_BAR, "memory_bar": MEMORY_BAR, "met": met}
    options.json.write_text(json.dumps({"versions": versions, **settings, **bars, "settings": rows}, indent=2) + "\n")
    print(f"wrote {options.json}")


if __name__ == "__main__":
    main()
