"""What the driver costs: beside its compiled program, in memory, and until a first posterior is there.

- first: eight schools, 4 chains, 1000 + 1000, in a new process, from the imports to the summary; NumPyro's beside it,
  both again with JAX's compilation cache filled, and the imports that either needs. Seconds on the clock, and seconds
  of the processor, which other programs disturb less.
- import: ``import ppleffects`` beside ``import jax, numpyro``.
- loop: flights of so many rows, progress and checkpoint on: the share of the time in which no program runs, and
  the time of all calls beside one call that does the same.
- stream: draws of 1000 values to a checkpoint: the largest memory of the process, beside what it has without draws.

    python benchmarks/driver.py [--parts first,import,loop,stream] [--rows N] [--draws N] [--repeats 3] [--json FILE]

The whole of it writes ``results/driver.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results" / "driver.json"
HERE = Path(__file__).parent

SCHOOLS = """
y, s = np.array([28.0, 8, -3, 7, -1, 1, 18, 12]), np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
"""
PPLEFFECTS = f"""
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, numpyro.distributions as dist
import ppleffects as ppl
{SCHOOLS}
def model(y, s):
    mu = ppl.sample("mu", dist.Normal(0.0, 5.0))
    tau = ppl.sample("tau", dist.HalfCauchy(5.0))
    theta = ppl.sample("theta", dist.Normal(jnp.zeros(8), 1.0))
    ppl.observe("y", dist.Normal(mu + tau * theta, s), y)
tree = ppl.mcmc(model, progress=False)(0, y, s)
import arviz
arviz.summary(tree)
"""
NUMPYRO = f"""
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp, numpy as np, numpyro, numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
{SCHOOLS}
def model(y, s):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfCauchy(5.0))
    with numpyro.plate("school", 8):
        theta = numpyro.sample("theta", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(mu + tau * theta, s), obs=y)
mcmc = MCMC(NUTS(model), num_warmup=1000, num_samples=1000, num_chains=4, chain_method="METHOD", progress_bar=False)
mcmc.run(jax.random.key(0), y=y, s=s)
import arviz
arviz.summary(arviz.from_dict({{"posterior": mcmc.get_samples(group_by_chain=True)}}))
"""
FIRST = {
    "ppleffects": PPLEFFECTS,
    "numpyro sequential": NUMPYRO.replace("METHOD", "sequential"),
    "numpyro vectorized": NUMPYRO.replace("METHOD", "vectorized"),
}
IMPORTS = {"import ppleffects": "import ppleffects", "import jax, numpyro": "import jax, numpyro"}


def in_a_new_process(code: str, cache: str | None = None) -> dict[str, float]:
    """Seconds of a program in a process of its own, on the clock and of the processor."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION_CACHE")}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent), "PYTHONWARNINGS": "ignore"}
    if cache is not None:
        environment |= {"JAX_COMPILATION_CACHE_DIR": cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True)
    wall, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"clock": wall, "processor": after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime}


def alternating(programs: dict[str, Callable[[], dict[str, float]]], repeats: int) -> dict[str, dict[str, float]]:
    """The least seconds of each program, which are run in turns."""
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in programs}
    for _ in range(repeats):
        for name, program in programs.items():
            runs[name].append(program())
    return {name: {key: min(run[key] for run in found) for key in found[0]} for name, found in runs.items()}


def first(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds until a first posterior is there."""
    with tempfile.TemporaryDirectory() as folder:
        programs: dict[str, Callable[[], dict[str, float]]] = {}
        for name, code in FIRST.items():
            cache = str(Path(folder) / name.replace(" ", "_"))
            in_a_new_process(code, cache)
            programs[name] = lambda code=code: in_a_new_process(code)
            programs[f"{name}, cached"] = lambda code=code, cache=cache: in_a_new_process(code, cache)
        programs["imports alone"] = lambda: in_a_new_process("import jax, numpyro, arviz")
        return beside(alternating(programs, options.repeats), "numpyro vectorized", "numpyro sequential")


def imports(options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of the imports."""
    programs = {name: lambda code=code: in_a_new_process(code) for name, code in IMPORTS.items()}
    return beside(alternating(programs, 3 * options.repeats), "import jax, numpyro")


def beside(seconds: dict[str, dict[str, float]], *references: str) -> dict[str, Any]:
    """The seconds, and their ratios to those of some programs."""
    for name, found in seconds.items():
        ratios = {f"{key} / {other}": found[key] / seconds[other][key] for other in references for key in list(found)}
        print(f"  {name}: " + ", ".join(f"{key} {value:.2f}" for key, value in (found | ratios).items()), flush=True)
    return {"seconds": seconds, "references": list(references)}


def loop(options: argparse.Namespace) -> dict[str, Any]:
    """The share of the time between calls of the compiled program, and what cutting the run into calls costs."""
    import jax
    import numpy as np
    from _scale_models import flights, flights_rows
    from jax.sharding import AxisType

    import ppleffects as ppl
    from ppleffects.inference import run as driver

    rng = np.random.default_rng(0)
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))

    def column(shape: tuple[int, ...], dtype: Any, below: int) -> Any:
        return (rng.integers(0, below, shape) if dtype is np.int32 else rng.normal(size=shape)).astype(dtype)

    rows = flights_rows(options.rows, column)
    data, mask = ppl.shard_rows(rows, mesh)
    settings = {"num_warmup": 60, "num_samples": 60, "num_chains": 4, "mesh": mesh}

    def timed(**changes: Any) -> dict[str, float]:
        in_program, call = [0.0], driver.Run._call

        def recorded(self: Any, *args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(self, *args, **kwargs)
            finally:
                in_program[0] += time.perf_counter() - began

        advance, total = driver.Run.advance, [0.0]

        def advanced(self: Any, make_tree: Any) -> None:
            began = time.perf_counter()
            advance(self, make_tree)
            total[0] += time.perf_counter() - began

        driver.Run._call, driver.Run.advance = recorded, advanced
        try:
            ppl.mcmc(flights(mesh), **(settings | changes))(0, data, mask)
        finally:
            driver.Run._call, driver.Run.advance = call, advance
        return {"all": total[0], "in the program": in_program[0]}

    timed(progress=False)
    with tempfile.TemporaryDirectory() as folder:
        timed(progress=False, num_samples=2, checkpoint=Path(folder) / "first.zarr")  # zarr is imported
        number = iter(range(1000))
        seconds = alternating(
            {
                "one call": lambda: timed(progress=False, chunk_size=500),
                "driver": lambda: timed(progress=True, checkpoint=Path(folder) / f"{next(number)}.zarr"),
            },
            options.repeats,
        )
    between = 1 - seconds["driver"]["in the program"] / seconds["driver"]["all"]
    ratio = seconds["driver"]["all"] / seconds["one call"]["in the program"]
    print(
        f"  {options.rows} rows: outside of the program {100 * between:.2f} % of the time; all / one call {ratio:.3f}"
    )
    return {"rows": options.rows, "seconds": seconds, "share between calls": between, "all / one call": ratio}


STREAM = """
import resource, sys
import jax, jax.numpy as jnp, numpyro.distributions as dist
import ppleffects as ppl
def model():
    ppl.sample("x", dist.Normal(jnp.zeros(1000), 1.0))
draws, path = int(sys.argv[1]), sys.argv[2]
kernel = ppl.NUTS(max_tree_depth=2)
tree = ppl.mcmc(model, kernel, num_warmup=50, num_samples=draws, num_chains=1, progress=False, checkpoint=path)(0)
assert tree.posterior["x"].shape == (1, draws, 1000)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, tree.posterior["x"].nbytes)
"""


def stream(options: argparse.Namespace) -> dict[str, Any]:
    """The largest memory of a process that writes many draws, and of one that writes few."""
    memory = {}
    for draws in (100, options.draws):
        with tempfile.TemporaryDirectory() as folder:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", "-c", STREAM, str(draws), str(Path(folder) / "run.zarr")],
                env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(HERE.parent)},
                capture_output=True, text=True, check=True,
            )  # fmt: skip
        largest, size = (int(word) for word in done.stdout.split()[-2:])
        memory[draws] = {"process": largest, "draws": size}
        print(f"  {draws} draws, {size / 1e6:.0f} MB: the process takes {largest / 1e6:.0f} MB at most", flush=True)
    few, many = memory.values()
    return {"bytes": memory, "growth / draws": (many["process"] - few["process"]) / many["draws"]}


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "first": first,
    "import": imports,
    "loop": loop,
    "stream": stream,
}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="What the driver costs.")
    parser.add_argument("--parts", default=",".join(PARTS), help="names, by comma")
    parser.add_argument("--rows", type=int, default=327_346, help="of the flights")
    parser.add_argument("--draws", type=int, default=100_000, help="that are written to a checkpoint")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where results go")
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(PARTS)}")
    warnings.simplefilter("ignore")
    path = options.json or (RESULTS if names == list(PARTS) else None)
    results: dict[str, Any] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    for name in names:
        print(name, flush=True)
        results[name] = PARTS[name](options)
        if path is not None:
            path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
