"""What tracing costs: handler calls in nested scans, a model of many sites, programs of many equations.

    python benchmarks/tracing.py [--rounds 7] [--json benchmarks/results/tracing.json]

Every time is the processor time of a fresh trace: jax's caches are emptied before it, and the collector of garbage is
off during it. The times that are compared are taken in turns, and each ratio is the median over rounds.
"""

from __future__ import annotations

import argparse
import gc
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
import numpyro
import numpyro.distributions as dist
from jax import lax
from jax.extend.core.primitives import scan_p, sin_p
from numpyro.infer.util import log_density as numpyro_log_density

import ppleffects as ppl
from ppleffects.effects import HandlerResult, Interpreter, default_dispatcher, default_scan_handler, reinterpret

PACKAGES = ("ppleffects", "jax", "jaxlib", "numpyro")
SITES = 1000
EQUATIONS = (2_000, 20_000)


def handler_calls(depth: int) -> dict[str, int]:
    """How often handlers are called for one sine in scans nested ``depth`` deep."""
    calls = {"sin": 0, "scan": 0}

    def on_sin(interpreter, ctx, eqn, invals):
        calls["sin"] += 1
        return HandlerResult(ctx + 1, [eqn.primitive.bind(*invals, **eqn.params)])

    def on_scan(interpreter, ctx, eqn, invals):
        calls["scan"] += 1
        return default_scan_handler(interpreter, ctx, eqn, invals)

    def nested(level):
        if level == 0:
            return jnp.sin
        return lambda x: lax.scan(lambda x, _: (nested(level - 1)(x), None), x, length=2)[0]

    interpreter = Interpreter(default_dispatcher().extended({sin_p: on_sin, scan_p: on_scan}))
    reinterpret(nested(depth), interpreter)(jnp.zeros((), int), 1.0)
    return calls


def fresh(fn: Callable[..., Any], *args: Any) -> float:
    """Seconds to trace ``fn`` with nothing in jax's caches."""
    jax.clear_caches()
    gc.collect()
    gc.disable()
    began = time.process_time()
    jax.make_jaxpr(fn)(*args)
    took = time.process_time() - began
    gc.enable()
    return took


def many_sites() -> tuple[Callable[..., Any], Callable[..., Any], dict[str, Any]]:
    """The density of the same model of ``SITES`` latents on both libraries, and values for them."""

    def model(sample):
        x = 0.0
        for i in range(SITES):
            x = sample(f"x{i}", dist.Normal(x, 1.0))

    ours = ppl.log_density(lambda: model(ppl.sample))
    values = {f"x{i}": jnp.asarray(0.1 * (i % 7)) for i in range(SITES)}
    return ours, lambda values: numpyro_log_density(lambda: model(numpyro.sample), (), {}, values)[0], values


def sines(x: Any, count: int) -> Any:
    """``count`` equations."""
    for _ in range(count):
        x = lax.sin(x)
    return x


def many_equations(count: int) -> Callable[..., Any]:
    """The density of a model with some ``count`` equations around two sites."""

    def model():
        x = sines(ppl.sample("x", dist.Normal(0.0, 1.0)), count)
        ppl.observe("y", dist.Normal(x, 1.0), 0.5)

    return ppl.log_density(model)


def measure(rounds: int) -> dict[str, Any]:
    """All figures."""
    calls = {depth: handler_calls(depth) for depth in range(1, 11)}
    ours, theirs, values = many_sites()
    if not np.allclose(ours(values), theirs(values)):
        raise AssertionError("the two models differ")
    for density in (ours, theirs):  # imports that happen when used
        fresh(density, values)
    pairs = [(fresh(ours, values), fresh(theirs, values)) for _ in range(rounds)]
    seconds = {count: [] for count in EQUATIONS}
    alone = {count: [] for count in EQUATIONS}
    for _ in range(max(rounds // 2, 1)):
        for count in EQUATIONS:
            seconds[count].append(fresh(many_equations(count), {"x": 0.5}))
            alone[count].append(fresh(lambda x, count=count: sines(x, count), 0.5))
    per_equation = {count: float(np.median(times)) / count for count, times in seconds.items()}
    by_jax = {count: float(np.median(times)) / count for count, times in alone.items()}
    return {
        "handler_calls": calls,
        "sites": {
            "count": SITES,
            "ppleffects_seconds": float(np.median([a for a, _ in pairs])),
            "numpyro_seconds": float(np.median([b for _, b in pairs])),
            "ratio": float(np.median([a / b for a, b in pairs])),
        },
        "seconds_per_equation": per_equation,
        "seconds_per_equation_jax": by_jax,
        "per_equation_ratio": per_equation[EQUATIONS[1]] / per_equation[EQUATIONS[0]],
    }


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Costs of tracing.")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of timing")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "tracing.json")
    options = parser.parse_args()
    versions = {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    found = measure(options.rounds)
    print("\nscans nested   handler calls: of the sine, of scans")
    for depth, calls in found["handler_calls"].items():
        print(f"{depth:12}   {calls['sin']:3} {calls['scan']:3}")
    sites = found["sites"]
    print(
        f"\n{SITES} sites, a fresh trace of the density: {sites['ppleffects_seconds']:.3f} s, NumPyro "
        f"{sites['numpyro_seconds']:.3f} s, ratio {sites['ratio']:.2f}"
    )
    for count, seconds in found["seconds_per_equation"].items():
        alone = found["seconds_per_equation_jax"][count]
        print(f"{count:6} equations: {1e6 * seconds:.1f} microseconds each, of which jax's own trace {1e6 * alone:.1f}")
    print(f"ratio of these: {found['per_equation_ratio']:.2f} (1: linear)")
    settings = {"cores": os.cpu_count(), "machine": platform.machine(), "rounds": options.rounds}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps({"versions": versions, **settings, **found}, indent=2) + "\n")
    print(f"\nwrote {options.json}")


if __name__ == "__main__":
    main()
