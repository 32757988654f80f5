"""Scale on paper and on two cores: what one of many devices holds and sends, and how much faster two are than one.

Compiled for 2, 8, 64 and 512 devices from shapes alone, in a process each, with one chain: the value and gradient of
the density, and the program that makes leapfrog steps. Of each device: bytes (arguments, results and temporaries),
flops, and collectives, of which those per leapfrog are the ones that the innermost loop around the gradient executes.
Three models of 2^26 rows (``_scale_models.py``): flights, where all latents are shared; a latent for each row, on the
row's shard; and a latent for each group of 16 rows, on the group's shard. Bars: bytes times devices grow by no more
than 1.3, all-reduces do not grow, and there is no other collective.

Run on 1, 2 and 4 devices of a CPU, a core to each while there are cores: 327,346 rows of flights, 4 chains, spread by
rows or by chains. Processes are compiled once and take turns; each has its fastest turn. Bars: two devices are 1.7
times faster than one, which says nothing on a machine that has other work, so that the load is noted; and the seconds
of all processors together, waiting for each other included, are no more than 2 / 1.7 times those of one device.

    python benchmarks/scale.py [--parts compile,run] [--devices 2,8,64,512] [--rounds 20] [--json FILE]

Writes ``results/scale.json`` and ``results/scale.png``, or what ``--json`` names; a part that is not run stays there.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE / "results" / "scale.json"
PACKAGES = ("ppleffects", "jax", "jaxlib", "numpyro", "numpy")
MODELS = ("flights", "latents", "groups")
NUM_ROWS, FLIGHTS = 2**26, 327_346
RUN_DEVICES = (1, 2, 4)
TIMEOUT = 900
type Row = dict[str, Any]


def environment(devices: int) -> dict[str, str]:
    """For a process with so many devices of one thread each."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_cpu_multi_thread_eigen=false"
    settings = {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "JAX_ENABLE_X64": "1", "OPENBLAS_NUM_THREADS": "1"}
    return {**os.environ, **settings}


def compile_for(model: str, devices: int) -> Row:
    """The figures of a model on so many devices, or why there are none."""
    command = [sys.executable, str(HERE / "_scale_compile.py"), model, str(NUM_ROWS)]
    try:
        done = subprocess.run(command, env=environment(devices), capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        return {"model": model, "devices": devices, "error": f"not compiled in {TIMEOUT} s"}
    if done.returncode:
        return {"model": model, "devices": devices, "error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


class Worker:
    """A process that samples on so many devices whenever it is asked."""

    def __init__(self, spread: str, devices: int):
        command = [sys.executable, str(HERE / "_scale_run.py"), spread, str(FLIGHTS)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=environment(devices), stdin=pipe, stdout=pipe, text=True)
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a worker has ended")
        return line

    def seconds(self) -> tuple[float, float]:
        """Of one leapfrog step of all chains, and of the processors together."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        wall, processors = map(float, self._read().split())
        return wall, processors

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def run_in_turns(rounds: int) -> list[Row]:
    """Seconds per leapfrog step, by what is spread and over how many devices."""
    workers = {(spread, devices): Worker(spread, devices) for spread in ("rows", "chains") for devices in RUN_DEVICES}
    found: dict[Any, list[tuple[float, float]]] = {key: [] for key in workers}
    load = os.getloadavg()[0]
    try:
        for _ in range(rounds):
            for key, worker in workers.items():
                found[key].append(worker.seconds())
    finally:
        for worker in workers.values():
            worker.end()
    loads = [round(load, 2), round(os.getloadavg()[0], 2)]
    rows = []
    for (spread, devices), times in found.items():
        wall, processors = zip(*times, strict=True)
        best = {"seconds": min(wall), "processor_seconds": min(processors)}
        rows.append({"spread": spread, "devices": devices, **best, "turns": times, "load": loads})
    return rows


def bar(name: str, value: float, limit: float, *, least: bool = False) -> Row:
    """A figure beside its bar."""
    return {"figure": name, "value": value, "bar": limit, "met": value >= limit if least else value <= limit}


def judge(compiled: list[Row], ran: list[Row]) -> list[Row]:
    """The figures that have bars."""
    figures = []
    for model in MODELS:
        rows = [row for row in compiled if row["model"] == model and "error" not in row]
        if len(rows) < 2:
            continue
        first, last = rows[0], rows[-1]
        for program in ("gradient", "sampler"):
            held = [row["devices"] * row[program]["bytes_per_device"] for row in (first, last)]
            where = f"{model}, {program}, {last['devices']} devices over {first['devices']}"
            figures.append(bar(f"bytes x devices, {where}", held[1] / held[0], 1.3))
            others = sum(n for row in rows for kind, n in row[program]["collectives"].items() if kind != "all-reduce")
            figures.append(bar(f"collectives that are no all-reduce, {model}, {program}", others, 0))
        reduces = [sum(row["sampler"]["per_leapfrog"].values()) for row in rows]
        figures.append(bar(f"all-reduces per leapfrog beyond those on {first['devices']} devices, {model}",
                           max(reduces) - reduces[0], 0))  # fmt: skip
    seconds = {(row["spread"], row["devices"]): row["seconds"] for row in ran}
    work_of = {(row["spread"], row["devices"]): row["processor_seconds"] for row in ran}
    for spread in ("rows", "chains"):
        if (spread, 2) in seconds:
            ratio = seconds[spread, 1] / seconds[spread, 2]
            figures.append(bar(f"two devices are faster than one, by {spread}", ratio, 1.7, least=True))
            work = work_of[spread, 2] / work_of[spread, 1]
            figures.append(bar(f"work of all processors, two devices over one, by {spread}", work, 2 / 1.7))
    return figures


def line(row: Row) -> str:
    """One row of the table of what was compiled."""
    head = f"{row['model']:<8} {row['devices']:>4}"
    if "error" in row:
        return f"{head}  {row['error']}"
    gradient, sampler = row["gradient"], row["sampler"]
    return (
        f"{head} {gradient['bytes_per_device'] / 1e6:>10.1f} {sampler['bytes_per_device'] / 1e6:>10.1f} "
        f"{gradient['flops_per_device'] / 1e6:>10.1f}  {gradient['collectives']} {sampler['per_leapfrog']}  "
        f"{sum(row['seconds_to_compile'].values()):.0f} s"
    )


def plot(compiled: list[Row], ran: list[Row], path: Path) -> None:
    """Bytes over devices beside the ideal, and speed over devices."""
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for index, model in enumerate(MODELS):
        rows = [row for row in compiled if row["model"] == model and "error" not in row]
        devices = [row["devices"] for row in rows]
        for program, style in (("sampler", "-o"), ("gradient", "--s")):
            held = [row[program]["bytes_per_device"] for row in rows]
            left.plot(devices, held, style, color=f"C{index}", markersize=4, label=f"{model}, {program}")
            if held:
                ideal = [held[0] * devices[0] / n for n in devices]
                left.plot(devices, ideal, ":", color="0.6", linewidth=1, zorder=0)
    left.set(
        xscale="log", yscale="log", xlabel="devices", ylabel="bytes on each", title="2^26 rows; dotted: 1 / devices"
    )
    left.legend(frameon=False, fontsize=8)
    for spread in ("rows", "chains"):
        rows = [row for row in ran if row["spread"] == spread]
        speeds = [rows[0]["seconds"] / row["seconds"] for row in rows]
        right.plot([row["devices"] for row in rows], speeds, "-o", label=f"by {spread}")
    right.axvline(os.cpu_count() or 1, color="0.6", linestyle=":", linewidth=1)
    right.set(xlabel="devices", ylabel="speed over one device", title="flights; dotted: cores of the machine")
    right.legend(frameon=False)
    fig.savefig(path, dpi=120)
    plt.close(fig)


def main() -> None:
    """Compile, run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--parts", default="compile,run")
    parser.add_argument("--devices", default="2,8,64,512")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path, default=RESULTS)
    options = parser.parse_args()
    path: Path = options.json

    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"compiled": [], "ran": []}
    compiled, ran = before["compiled"], before["ran"]
    if "compile" in options.parts:
        compiled = []
        print("model  devices  MB gradient MB sampler MFLOP gradient  collectives of a gradient and of a leapfrog")
        for model in MODELS:
            for devices in map(int, options.devices.split(",")):
                compiled.append(compile_for(model, devices))
                print(line(compiled[-1]), flush=True)
    if "run" in options.parts:
        ran = run_in_turns(options.rounds)
        for row in ran:
            milliseconds = 1e3 * row["seconds"]
            processors = 1e3 * row["processor_seconds"]
            print(
                f"{row['spread']:<7} on {row['devices']}: {milliseconds:.1f} ms per leapfrog, "
                f"{processors:.1f} ms of processors, load {row['load']}"
            )
    figures = judge(compiled, ran)
    for figure in figures:
        verdict = "" if figure["met"] else "  MISSED"
        print(f"{figure['figure']:<75} {figure['value']:>8.3g}  bar {figure['bar']}{verdict}")
    about = {"machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version()}
    versions = {name: metadata.version(name) for name in PACKAGES}
    found = {"figures": figures, "compiled": compiled, "ran": ran, "versions": versions, **about}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if compiled and ran:
        plot(compiled, ran, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
