"""What a sharded density costs, against the same density by hand in JAX and against NumPyro on the same devices.

For each model of ``_density_models.py``: whether density and gradient equal those of the unsharded model and of plain
formulas, the collectives of the compiled value-and-gradient, its flops and bytes (as XLA counts them for one device;
the body of a loop counts once), and its wall time. NumPyro runs its own unsharded model on the same arrays, placed on
the same devices, so that XLA's partitioner decides what is sent.

    python benchmarks/density.py [--rounds 40] [--json benchmarks/results/density.json]

Times are medians over rounds; in each round all variants run, one after the other, so that a change of load hits all.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")

import jax
import numpy as np
from _cost import Cost, compile_gradient, cost
from _density_models import CASES, Case

PACKAGES = ("ppleffects", "jax", "jaxlib", "numpyro", "numpy")


def relative_difference(found: Any, expected: Any) -> float:
    """The largest difference of two trees, relative to the largest entry of each array."""
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def median_seconds(programs: dict[str, Any], arguments: Any, rounds: int) -> dict[str, float]:
    """The median wall time of one call of each program, in seconds."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    calls = 20
    for _ in range(rounds):
        for name, program in programs.items():
            began = time.perf_counter()
            jax.block_until_ready([program(*arguments) for _ in range(calls)])
            times[name].append((time.perf_counter() - began) / calls)
    return {name: float(np.median(seconds)) for name, seconds in times.items()}


def measure(case: Case, rounds: int) -> dict[str, Any]:
    """All figures of one model."""
    mesh = case.mesh()
    arguments = case.place(mesh)
    programs = {name: compile_gradient(density, *arguments) for name, density in case.densities(mesh).items()}
    results = {name: jax.device_get(program(*arguments)) for name, program in programs.items()}
    costs: dict[str, Cost] = {name: cost(program) for name, program in programs.items()}
    seconds = median_seconds(programs, arguments, rounds)
    return {
        "model": case.name,
        "mesh": case.axes,
        "difference_unsharded": relative_difference(results["sharded"], results["unsharded"]),
        "difference_plain": relative_difference(results["sharded"], results["plain"]),
        "variants": {
            name: {
                "collectives": costs[name].collectives,
                "flops": costs[name].flops,
                "bytes": costs[name].bytes,
                "seconds": seconds[name],
            }
            for name in programs
        },
    }


def short(collectives: dict[str, int]) -> str:
    """Collectives in a few characters: ``1 all-reduce``."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(collectives.items())) or "none"


def print_table(rows: list[dict[str, Any]]) -> None:
    """One line per variant; ratios are to the density by hand with the same formulas."""
    head = ("model", "variant", "collectives", "flops", "bytes", "ms", "flops", "bytes", "time")
    print("ratios (last three columns) are to the density by hand with NumPyro's formulas: 1.00 costs the same\n")
    print("{:<23} {:<11} {:<28} {:>9} {:>9} {:>7} {:>6} {:>6} {:>6}".format(*head))
    for row in rows:
        base = row["variants"]["by_hand"]
        for index, (name, found) in enumerate(row["variants"].items()):
            ratios = " ".join(f"{found[key] / base[key]:6.2f}" for key in ("flops", "bytes", "seconds"))
            print(
                f"{row['model'] if index == 0 else '':<23} {name:<11} {short(found['collectives']):<28} "
                f"{found['flops']:9.0f} {found['bytes']:9.0f} {1e3 * found['seconds']:7.3f} {ratios}"
            )
        print(
            f"{'':<23} sharded differs from unsharded by {row['difference_unsharded']:.1e}, "
            f"from plain formulas by {row['difference_plain']:.1e} (relative)"
        )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Cost of sharded densities.")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of timing")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "density.json")
    options = parser.parse_args()
    versions = {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}"
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"devices: {device}; {os.cpu_count()} cores; float64: {jax.config.read('jax_enable_x64')}")
    rows = [measure(case, options.rounds) for case in CASES]
    print_table(rows)
    options.json.parent.mkdir(parents=True, exist_ok=True)
    settings = {"devices": device, "cores": os.cpu_count(), "machine": platform.machine(), "rounds": options.rounds}
    options.json.write_text(json.dumps({"versions": versions, **settings, "models": rows}, indent=2) + "\n")
    print(f"\nwrote {options.json}")


if __name__ == "__main__":
    main()
