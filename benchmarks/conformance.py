"""What each library makes of programs on which libraries differ: right, an error, a wrong number, or no way to say it.

Each case is one small program per library that can express it, run by itself in a fresh process with a time limit. The
right number comes from a closed form or scipy.

    python benchmarks/conformance.py [--only TEXT] [--write-docs] [--json benchmarks/results/conformance.json]

GenJAX and Oryx cannot be installed beside this version of jax and are left out.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import multiprocessing
import os
import platform
import re
import sys
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
MODULES = ("flow", "shards", "draws", "models", "effects", "inference", "runs")
PACKAGES = ("ppleffects", "jax", "jaxlib", "numpyro", "tfp-nightly", "blackjax", "slub", "numpy", "scipy")
OUTCOMES = ("right", "error", "wrong", "costly", "cannot express")
SECTIONS = {"lost": "Silently wrong or lost, somewhere", "fails": "Fails or costs, somewhere"}


def load_cases() -> dict[str, Any]:
    """All cases, in the order of the modules.

    These must not start JAX's backend when they are imported, since a server imports them and forks: BlackJAX, which
    starts it, is imported by the programs.
    """
    for module in MODULES:
        importlib.import_module(f"_conformance_{module}")
    return importlib.import_module("_conformance_case").CASES


def run_here(name: str, library: str, pipe: Any) -> None:
    """Runs one program in this process, and sends outcome and detail."""
    import jax

    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    chosen = load_cases()[name]
    jax.config.update("jax_enable_x64", chosen.x64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            judged = chosen.judge(chosen.programs[library]())
    except BaseException as error:
        judged = chosen.judge_error(library, error)
    pipe.send(judged)
    pipe.close()
    os._exit(0)  # a thread of a sampler or a collective may still wait


def run_apart(chosen: Any, library: str) -> dict[str, str]:
    """Runs one program in a process of its own."""
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=run_here, args=(chosen.name, library, sender), daemon=True)
    process.start()
    sender.close()
    if not receiver.poll(chosen.timeout):
        process.kill()
        process.join()
        return {"outcome": "error", "detail": f"no end within {chosen.timeout:.0f} s"}
    try:
        outcome, detail = receiver.recv()
    except EOFError:
        process.join()
        outcome, detail = "error", f"the process died with exit code {process.exitcode}"
    process.join()
    return {"outcome": outcome, "detail": detail}


def run_case(chosen: Any, libraries: tuple[str, ...]) -> dict[str, Any]:
    """All outcomes of one case."""
    outcomes = {}
    for library in libraries:
        if library in chosen.programs:
            outcomes[library] = run_apart(chosen, library)
        else:
            outcomes[library] = {"outcome": "cannot express", "detail": chosen.cannot[library]}
    return {"case": chosen.name, "demand": chosen.demand, "section": chosen.section, "outcomes": outcomes}


def print_row(row: dict[str, Any]) -> None:
    """One case."""
    print(f"\n{row['case']}: {row['demand']}")
    for library, found in row["outcomes"].items():
        print(f"  {library:<11} {found['outcome']:<15} {found['detail']}", flush=True)


def counts(rows: list[dict[str, Any]]) -> dict[str, Counter]:
    """How often each outcome, by library."""
    libraries = rows[0]["outcomes"]
    return {library: Counter(row["outcomes"][library]["outcome"] for row in rows) for library in libraries}


def cell(found: dict[str, str]) -> str:
    """An outcome in the page's table."""
    outcome, detail = found["outcome"], found["detail"].replace("|", "\\|")
    error = re.match(r"[A-Za-z]\w*(?=:|$)", detail)
    if outcome == "cannot express":
        return "–"
    if outcome == "right":
        return f"right (`{error[0]}`)" if error else "right"
    if outcome == "error":
        return f"error: `{error[0]}`" if error else f"error: {detail}"
    return f"**{outcome}**: {detail}"


def write_page(path: Path, record: dict[str, Any]) -> None:
    """Writes docs/conformance.md."""
    rows = record["cases"]
    libraries = list(rows[0]["outcomes"])
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    found = counts(rows)
    reasons: dict[str, dict[str, int]] = {library: {} for library in libraries}
    for row in rows:
        for library, outcome in row["outcomes"].items():
            if outcome["outcome"] == "cannot express":
                reasons[library][outcome["detail"]] = reasons[library].get(outcome["detail"], 0) + 1
    lines = [PAGE.format(count=len(rows), date=record["date"], versions=versions)]
    lines += ["| | " + " | ".join(OUTCOMES) + " |", "|---|" + "---|" * len(OUTCOMES)]
    lines += [f"| {library} | " + " | ".join(str(n[o]) for o in OUTCOMES) + " |" for library, n in found.items()]
    for section, title in SECTIONS.items():
        lines += ["", f"## {title}", "", "| | " + " | ".join(libraries) + " |", "|---|" + "---|" * len(libraries)]
        for row in rows:
            if row["section"] == section:
                cells = " | ".join(cell(outcome) for outcome in row["outcomes"].values())
                lines.append(f"| **{row['case'].replace('|', chr(92) + '|')}**: {row['demand']} | {cells} |")
    lines += ["", "## What a library cannot express", "", "With the number of cases.", ""]
    for library, why in reasons.items():
        lines += [f"- {library} {reason} ({number})." for reason, number in why.items()]
    path.write_text("\n".join(lines) + "\n")


PAGE = """# Conformance

Libraries differ in what they make of the same program. Here are {count} cases on which one of them is wrong, fails or
costs more than it must, each a small program per library, run by itself. The right number comes from a closed form or
from scipy, not from a library. This page is written by `python benchmarks/conformance.py --write-docs`, which also
prints the numbers and messages in full; the programs are in `benchmarks/_conformance_*.py`.

Run on {date}, on CPU with four host devices: {versions}.
GenJAX and Oryx cannot be installed beside this version of jax, and are left out.

- *right*: the right number; where an error is demanded, or a refusal is as good, the error.
- *error*: an exception, a crash, or no end within minutes.
- *wrong*: a wrong number, or the demand is not met, without a word.
- *costly*: the right result, for more work than it must take.
- –: the library cannot express the case; why is said at the end.

NumPyro's programs use JAX's own control flow except where a comment in them says that NumPyro's own is used. slub is an
interpreter of JAX programs; its programs add up the terms of a density by a plain JAX primitive that it is told to
handle. For BlackJAX and TFP, cases about sampling take densities written by hand.
"""


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description="What each library makes of the same programs.")
    parser.add_argument("--only", default="", help="run only the cases whose names hold this text; writes nothing")
    parser.add_argument("--library", help="run only this library; writes nothing")
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--json", type=Path, default=HERE / "results" / "conformance.json")
    parser.add_argument("--write-docs", action="store_true", help="write docs/conformance.md")
    options = parser.parse_args()
    cases = [c for c in load_cases().values() if options.only in c.name]
    every = importlib.import_module("_conformance_case").LIBRARIES
    libraries = (options.library,) if options.library else every
    versions = {name: metadata.version(name) for name in PACKAGES} | {"python": platform.python_version()}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    print("GenJAX and Oryx cannot be installed beside this version of jax and are left out.")
    multiprocessing.get_context("forkserver").set_forkserver_preload([f"_conformance_{name}" for name in MODULES])
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for row in pool.map(lambda c: run_case(c, libraries), cases):
            print_row(row)
            rows.append(row)
    print()
    for library, found in counts(rows).items():
        print(f"{library:<11}", ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES))
    if options.only or options.library:
        return
    record = {"date": datetime.date.today().isoformat(), "versions": versions, "cases": rows}
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(record, indent=2) + "\n")
    print(f"\nwrote {options.json}")
    if options.write_docs:
        write_page(HERE.parent / "docs" / "conformance.md", record)


if __name__ == "__main__":
    main()
