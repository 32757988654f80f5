"""NUTS of several libraries on the 16 posteriors of ``_posteriors.py``: effective draws per second and per gradient.

Four chains of 1000 transitions of warm-up and 1000 draws, each library by its defaults, float64, one CPU device;
``_samplers_peers.py`` tells how each is run. Compilation comes before the clock starts. For each posterior, peer and
seed:

- ESS: the least bulk effective sample size over all quantities of the reference, by ArviZ,
- ESS / s: by the wall time of warm-up and sampling together,
- ESS / gradient: by the gradients of warm-up and sampling together,
- gradients in warm-up and in sampling, and divergences, each over all chains,
- R-hat: the largest; errors: the largest distance of a mean from the reference, in standard errors of both together.
  An ESS says nothing where these are large.

    python benchmarks/samplers.py [--posteriors a,b] [--peers x,y] [--seeds 1] [--quick] [--json FILE]

The whole of it writes ``results/samplers.json`` and ``results/samplers.png``, after each posterior anew; a part of it
writes only what ``--json`` names. A peer whose package is not installed is told as absent, one that fails has its
error in its row.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_ENABLE_X64", "1")

import arviz as az
import jax
import numpy as np
from _posteriors import POSTERIORS, Posterior
from _samplers_peers import PEERS, Peer, Run, Settings
from _samplers_report import FORMAT, HEAD, line, plot, print_summary, summarise

PACKAGES = ("ppleffects", "jax", "jaxlib", "numpyro", "blackjax", "nutpie", "arviz", "numpy")
RESULTS = Path(__file__).parent / "results" / "samplers.json"
LENGTHS = {"num_warmup": 1000, "num_samples": 1000, "num_chains": 4}
QUICK_LENGTHS = {"num_warmup": 300, "num_samples": 300, "num_chains": 4}
QUICK = ("eight_schools-eight_schools_noncentered", "garch-garch11", "sblrc-blr")


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def judge(posterior: Posterior, run: Run) -> dict[str, Any]:
    """The figures of one run; None where chains stand still, so that ArviZ has none."""
    scalars = posterior.scalars(run.draws)
    ess = min(float(az.ess(draws, method="bulk")) for draws in scalars.values())
    errors = {
        name: abs(draws.mean() - posterior.reference[name]["mean"])
        / np.hypot(az.mcse(draws, method="mean"), posterior.reference[name]["mcse_mean"])
        for name, draws in scalars.items()
    }
    return {
        "min_ess": _finite(ess),
        "ess_per_second": _finite(ess / run.seconds),
        "ess_per_gradient": _finite(ess / (run.gradients_warmup + run.gradients)),
        "ess_per_gradient_after_warmup": _finite(ess / run.gradients),
        "gradients_warmup": run.gradients_warmup,
        "gradients": run.gradients,
        "divergences": run.divergences,
        "max_rhat": _finite(max(float(az.rhat(draws)) for draws in scalars.values())),
        "max_errors": _finite(max(errors.values())),
        "seconds": run.seconds,
        "seconds_compile": run.seconds_compile,
    }


def measure(posterior: Posterior, peer: Peer, settings: Settings) -> dict[str, Any]:
    """One row of the results; a peer that raises has its error there."""
    row: dict[str, Any] = {"posterior": posterior.name, "peer": peer.name, "seed": settings.seed}
    load = os.getloadavg()[0]
    try:
        row |= judge(posterior, peer.run(posterior, settings))
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return row | {"load": load}


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _names(text: str, known: dict[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    return names


def arguments() -> tuple[list[str], list[str], int, bool, Path | None]:
    """Posteriors, peers, seeds, whether runs are short, and where results go."""
    parser = argparse.ArgumentParser(description="NUTS of several libraries on 16 posteriors.")
    parser.add_argument("--posteriors", help="names, by comma; all by default")
    parser.add_argument("--peers", help="names, by comma; all by default")
    parser.add_argument("--seeds", type=int, default=1, help="so many runs of each")
    parser.add_argument("--quick", action="store_true", help="three posteriors and short runs")
    parser.add_argument("--json", type=Path, help="where results go")
    options = parser.parse_args()
    whole = not (options.posteriors or options.peers or options.quick)
    posteriors = list(QUICK if options.quick else POSTERIORS)
    if options.posteriors:
        posteriors = _names(options.posteriors, POSTERIORS, parser)
    peers = _names(options.peers, PEERS, parser) if options.peers else list(PEERS)
    return posteriors, peers, options.seeds, options.quick, options.json or (RESULTS if whole else None)


def main() -> None:
    """Measure, print, write."""
    posteriors, names, seeds, quick, path = arguments()
    warnings.filterwarnings("ignore", message="arviz.InferenceData is no longer available")
    lengths = QUICK_LENGTHS if quick else LENGTHS
    versions = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
    device = jax.devices()[0].device_kind
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print(f"device: {device}; {os.cpu_count()} cores; {lengths}")
    peers = [PEERS[name] for name in names]
    absent = [peer.name for peer in peers if not peer.present]
    print(*(f"{name} is absent: its package is not installed" for name in absent), sep="\n")
    print(FORMAT.format(*HEAD), flush=True)
    settings = {"device": device, "cores": os.cpu_count(), "machine": platform.machine(), **lengths, "seeds": seeds}
    rows: list[dict[str, Any]] = []
    for posterior in posteriors:
        for seed in range(seeds):
            for peer in peers:
                if peer.name not in absent:
                    rows.append(measure(POSTERIORS[posterior], peer, Settings(**lengths, seed=seed)))
                    print(line(rows[-1]), flush=True)
        jax.clear_caches()
        if path is not None:
            results = {"versions": versions, **settings, "absent": absent, "summary": summarise(rows), "runs": rows}
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(results, indent=2) + "\n")
            plot(rows, path.with_suffix(".png"))
    print_summary(summarise(rows))
    if path is not None:
        print(f"\nwrote {path} and {path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
