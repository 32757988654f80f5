"""What a leapfrog step of ``ppl.mcmc`` costs, against the bare gradient and against other libraries.

Each figure is a ratio of things measured in one process, in turns, each by its best turn, so that other work on the
machine hits all alike; beside it stands the bar that it should not exceed. Letters choose figures:

- A: one chain of a logistic regression of 50,000 rows and 50 columns, per leapfrog, over the hand-written value and
  gradient in a compiled loop.
- B: eight chains of eight schools at once, per iteration, each a leapfrog of every chain, over NumPyro's and
  BlackJAX's. Theirs wait for the longest tree of all chains: "executed" are the iterations they make, "useful" the
  leapfrogs of a chain on average. Each by its fastest call of a few thousand iterations.
- C: eight chains of a logistic regression of 262,144 rows and 55 columns at once, per useful leapfrog, over one chain
  after the other, and over NumPyro's fastest chain method.
- D: iterations that eight chains of centred eight schools make, over the leapfrogs of the slowest chain alone; and what
  it would be if all waited for the longest tree in each transition.
- E: 2^20 latents on 8 devices, compiled and not run: bytes per device over an eighth of those of one device, and
  all-reduces per leapfrog, of which one would do for the density, one for the energy and one for all U-turns; with a
  metric of low rank one more, for projections.
- F: processor time of a short run with 16 chains, nearly all of it compilation, over that with one; compilations in a
  run; compilations in a run on new data.

    python benchmarks/leapfrog.py [--figures ABCDEF] [--rounds 5] [--json benchmarks/results/leapfrog.json]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import numpy as np
from _leapfrog_models import (
    NUMPYRO,
    SCHOOLS,
    centred_schools,
    gradient_loop,
    logistic,
    logistic_by_hand,
    logistic_data,
    schools,
)
from _leapfrog_peers import blackjax_adapted, numpyro_adapted, numpyro_fixed, per_chain
from _leapfrog_record import record

import ppleffects as ppl

PACKAGES = ("ppleffects", "jax", "jaxlib", "numpyro", "blackjax", "numpy")
HERE = Path(__file__).parent
KERNEL = ppl.NUTS()
CHAINS = 8
type Figure = dict[str, Any]


def figure(name: str, value: float, bar: float | None, **details: Any) -> Figure:
    """One figure, its bar, whether it is met, and what it was made from."""
    met = None if bar is None else bool(value <= bar)
    return {"figure": name, "value": float(value), "bar": bar, "met": met, "details": details}


def fixed(step_size: float) -> ppl.NUTS:
    """A kernel that adapts nothing."""
    return ppl.NUTS(step_size=step_size, adapt_step_size=False, adapt_mass_matrix=False)


def best(measures: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Any]:
    """The least of what each returns, or of each entry, over rounds in which all take their turn."""
    found: dict[str, Any] = {}
    for _ in range(rounds):
        for name, measure in measures.items():
            value = np.asarray(measure())
            found[name] = np.minimum(found.get(name, np.inf), value)
    return found


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """The wall time of a call, and its result."""
    began = time.perf_counter()
    result = jax.block_until_ready(call())
    return time.perf_counter() - began, result


def bare_gradient(rounds: int) -> list[Figure]:
    """A: a leapfrog of a model whose gradient is dear."""
    w, data = logistic_data(50_000, 50)
    loop, count = gradient_loop(logistic_by_hand), 100
    settings = {"num_warmup": 0, "num_samples": 20, "num_chains": 1, "init": {"w": w}}
    model, kernel = functools.partial(logistic, ppl), fixed(0.006)

    def ours() -> float:
        steps = record(model, kernel, data, **settings)[1].steps(warm=False)
        return steps.seconds / steps.iterations

    loop(w, 1, *data)
    ours()
    found = best({"by hand": lambda: seconds_of(lambda: loop(w, count, *data))[0] / count, "ours": ours}, rounds)
    ratio = found["ours"] / found["by hand"]
    return [figure("A leapfrog / gradient by hand, 50,000 x 50", ratio, 1.1, seconds=_floats(found))]


def small_model(rounds: int) -> list[Figure]:
    """B: a leapfrog of a model whose gradient is nearly free."""
    model = functools.partial(schools, ppl)
    target = ppl.target(model)(*SCHOOLS)
    starts = jax.vmap(target.init)(jax.random.split(jax.random.key(0), CHAINS))
    peers = {
        "NumPyro": numpyro_adapted(functools.partial(schools, NUMPYRO), SCHOOLS, CHAINS, 1000, 250),
        "BlackJAX": blackjax_adapted(target.log_density, starts, CHAINS, 1000, 250),
    }
    settings = {"num_warmup": 1000, "num_samples": 4000, "num_chains": CHAINS}
    loop = gradient_loop(lambda u: jax.vmap(target.log_density)(u).sum())

    def ours() -> tuple[float, float]:
        steps = record(model, KERNEL, SCHOOLS, **settings)[1].steps(warm=True)
        return steps.fastest, steps.fastest * steps.iterations / steps.leapfrogs.mean()

    def peer(transitions: Callable[[], np.ndarray]) -> tuple[float, float]:
        seconds, steps = min((seconds_of(transitions) for _ in range(10)), key=lambda pair: pair[0])
        return seconds / steps.max(0).sum(), seconds / steps.mean(0).sum()

    measures = {"ours": ours, **{name: functools.partial(peer, call) for name, call in peers.items()}}
    measures["gradient"] = lambda: min(seconds_of(lambda: loop(starts, 5000))[0] for _ in range(10)) / 5000
    best(measures, 1)  # compiles
    found = best(measures, rounds)
    figures = []
    for name in peers:
        for kind, index in (("executed", 0), ("useful", 1)):
            ratio = found["ours"][index] / found[name][index]
            figures.append(figure(f"B iteration / {name}'s {kind}, eight schools, 8 chains", ratio, 1.0))
    bare = found["ours"][0] / found["gradient"]
    return [*figures, figure("B iteration / bare gradient of all chains", bare, None, seconds=_floats(found))]


def chains_together(rounds: int) -> list[Figure]:
    """C: chains that share each read of the data."""
    w, data = logistic_data(262_144, 55)
    model, kernel, num_samples = functools.partial(logistic, ppl), fixed(0.0025), 4
    starts = {"w": w}

    def ours(chains: int) -> float:
        settings = {"num_warmup": 0, "num_samples": num_samples, "num_chains": chains, "init": starts}
        steps = record(model, kernel, data, **settings)[1].steps(warm=False)
        return steps.seconds / steps.leapfrogs.sum()

    arguments = functools.partial(logistic, NUMPYRO), data, per_chain(starts, CHAINS), 0.0025, num_samples
    peers = {method: numpyro_fixed(*arguments, method) for method in ("vectorized", "sequential")}

    def peer(transitions: Callable[[], np.ndarray]) -> float:
        seconds, steps = seconds_of(transitions)
        return seconds / steps.sum()

    measures = {"together": lambda: ours(CHAINS), "one": lambda: ours(1)}
    measures |= {f"NumPyro {name}": functools.partial(peer, call) for name, call in peers.items()}
    best(measures, 1)  # compiles
    found = _floats(best(measures, rounds))
    found["NumPyro parallel"] = float(_subprocess("_leapfrog_parallel.py", CHAINS, rounds)["seconds"])
    fastest = min(found[name] for name in found if name.startswith("NumPyro"))
    return [
        figure("C 8 chains together / one after the other, 262,144 x 55", found["together"] / found["one"], 1 / 3),
        figure("C leapfrog / NumPyro's by its fastest chain method", found["together"] / fastest, 1.0, seconds=found),
    ]


def waiting(_: int) -> list[Figure]:
    """D: chains whose trajectories differ in length."""
    settings = {"num_warmup": 1000, "num_samples": 2000, "num_chains": CHAINS}
    tree, recorder = record(centred_schools, KERNEL, SCHOOLS, **settings)
    steps = recorder.steps(warm=False)
    own = tree["sample_stats"]["n_steps"].values
    lock_step = own.max(0).sum() / own.sum(1).max()
    name = "of the slowest chain's leapfrogs, centred eight schools, 8 chains"
    return [
        figure(f"D iterations, {name}", steps.iterations / steps.leapfrogs.max(), 1.15),
        figure(f"D the same in lock step, {name}", lock_step, None),
    ]


def sharded_latents(_: int) -> list[Figure]:
    """E: latents that live on the shards."""
    return [found for metric, sums in (("auto", 3), ("low_rank", 4)) for found in _sharded(metric, sums)]


def _sharded(metric: str, most_sums: int) -> list[Figure]:
    many, one = (_subprocess("_leapfrog_shards.py", devices, 2**20, metric) for devices in (8, 1))
    ratio = 8 * many["bytes_per_device"] / one["bytes_per_device"]
    gathers = sum(count for kind, count in many["collectives"].items() if kind != "all-reduce")
    sums = many["collectives_per_leapfrog"].get("all-reduce", 0)
    name = f', metric="{metric}"'
    return [
        figure(f"E bytes per device x 8 / bytes of one device, 2^20 latents{name}", ratio, 1.3, programs=[many, one]),
        figure(f"E collectives that are no all-reduce{name}", gathers, 0),
        figure(f"E all-reduces per leapfrog{name}", sums, most_sums),
        figure(f"E compilations beyond one{name}", 0 if many["compiled_once"] else 1, 0),
    ]


def compilation(rounds: int) -> list[Figure]:
    """F: compile times, and how often it is compiled."""
    model = functools.partial(schools, ppl)
    count = [0]
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: count.__setitem__(0, count[0] + event.endswith("backend_compile_duration"))
    )

    def run(chains: int, data: tuple = SCHOOLS) -> Any:
        settings = {"num_warmup": 20, "num_samples": 20, "num_chains": chains}
        return record(model, KERNEL, data, **settings)

    def seconds(chains: int) -> float:
        jax.clear_caches()
        began = time.process_time()
        run(chains)
        return time.process_time() - began

    found = best({"1": lambda: seconds(1), "16": lambda: seconds(16)}, min(rounds, 3))
    program = run(1)[1].program
    before = program._cache_size()
    run(3)
    of_one_run = program._cache_size() - before
    before = count[0]
    run(3, (SCHOOLS[0] + 1.0, 2.0 * SCHOOLS[1]))
    return [
        figure("F processor time of compilation, 16 chains / 1", found["16"] / found["1"], 1.1, seconds=_floats(found)),
        figure("F compilations of the leapfrogs in a run", of_one_run, 1),
        figure("F compilations in a run on new data of the same shapes", count[0] - before, 0),
    ]


MEASURES = {
    "A": bare_gradient,
    "B": small_model,
    "C": chains_together,
    "D": waiting,
    "E": sharded_latents,
    "F": compilation,
}


def _floats(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: np.asarray(value).tolist() for name, value in tree.items()}


def _subprocess(script: str, devices: int, *arguments: Any) -> dict[str, Any]:
    """The last line that a script beside this one prints, as JSON, where the machine counts as so many devices."""
    command = [sys.executable, str(HERE / script), *map(str, arguments)]
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout
    return json.loads(out.strip().splitlines()[-1])


def line(found: Figure) -> str:
    """A figure as a row of the table."""
    bar = "" if found["bar"] is None else f"{found['bar']:.2f}"
    verdict = {None: "", True: "met", False: "MISSED"}[found["met"]]
    return f"{found['figure']:<78} {found['value']:>8.2f} {bar:>6} {verdict}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Cost of a leapfrog step.")
    parser.add_argument("--figures", default="".join(MEASURES), help="letters; all by default")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each measurement")
    parser.add_argument("--json", type=Path, help="where figures go; by default only all of them are written")
    options = parser.parse_args()
    path = options.json or (HERE / "results" / "leapfrog.json" if set(options.figures) == set(MEASURES) else None)
    versions = {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}
    device = f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores"
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"device: {device}; float64: {jax.config.read('jax_enable_x64')}\n")
    print(f"{'':<78} {'value':>8} {'bar':>6}")
    figures: list[Figure] = []
    for letter in options.figures:
        found = MEASURES[letter](options.rounds)
        figures += found
        print("\n".join(line(each) for each in found), flush=True)
        jax.clear_caches()
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        results = {"versions": versions, "device": device, "rounds": options.rounds, "figures": figures}
        path.write_text(json.dumps(results, indent=2) + "\n")
        print(f"\nwrote {path}")


if __name__ == "__main__":
    main()
