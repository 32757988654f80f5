"""Two processes with two devices each, over gloo on loopback: the same bits on both, agreement, and one that dies.

The oracle is one process with four devices.
"""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

import ppleffects as ppl
from ppleffects.effects import _jax
from ppleffects.errors import DistributedError, LayoutWarning
from ppleffects.inference import processes, watch
from ppleffects.inference.checksum import check_same, checksum
from tests.conftest import ROOT
from tests.inference import two_processes
from tests.inference.two_processes import SHORT, arrays_of, mesh_of, sample

pytestmark = [
    pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning"),
    pytest.mark.skipif(jax.device_count() != 4, reason="what two processes do on four devices, one does on four"),
]
# A scenario takes some seconds alone on a machine.
LIMIT = 400


def launch(scenario: str, folder: Path) -> list[subprocess.Popen]:
    """Starts two processes; what they say goes to ``SCENARIO-NUMBER.txt``."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_NUM_CPU_DEVICES": "2",
        "JAX_CHECK_TRACER_LEAKS": "0",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }
    running = []
    for number in range(2):
        with (folder / f"{scenario}-{number}.txt").open("w") as said:
            arguments = [sys.executable, two_processes.__file__, scenario, str(folder), address, str(number)]
            running.append(subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=said, stderr=said))
    return running


def ends(running: list[subprocess.Popen], limit: float = LIMIT) -> list[int]:
    """The exit codes, when all have ended."""
    until = time.monotonic() + limit
    try:
        return [process.wait(max(until - time.monotonic(), 0.1)) for process in running]
    finally:
        for process in running:
            process.kill()


def said(scenario: str, folder: Path, number: int, awaited: str = "") -> str:
    """What a process has said, and the program beside it, for which there is some time after the process has ended."""
    until = time.monotonic() + 20
    while True:
        text = (folder / f"{scenario}-{number}.txt").read_text()
        if re.search(awaited, text) or time.monotonic() > until:
            return text
        time.sleep(0.1)


def run(scenario: str, folder: Path) -> list[dict]:
    """What both processes found."""
    codes = ends(launch(scenario, folder))
    assert codes == [0, 0], "\n".join(said(scenario, folder, number)[-4000:] for number in range(2))
    suffix = "json" if (folder / f"{scenario}-0.json").exists() else "npz"
    paths = [folder / f"{scenario}-{number}.{suffix}" for number in range(2)]
    return [json.loads(p.read_text()) if suffix == "json" else dict(np.load(p)) for p in paths]


def assert_same_bits(found: dict, expected: dict):
    assert found.keys() == expected.keys()
    for name, array in found.items():
        assert array.dtype == expected[name].dtype
        assert array.tobytes() == expected[name].tobytes(), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def both(folder):
    return run("layouts", folder)


@pytest.fixture(scope="module")
def alone():
    """The same run by one process."""
    return arrays_of(sample(mesh_of("chains")))


def test_both_have_the_same_bits(both):
    for name in ("posterior/z", "warmup_posterior/slope", "sample_stats/lp", "observed_data/y"):
        assert f"chains/{name}" in both[0]
    writes = [int(found.pop("num_writes")) for found in both]
    assert writes[0] > 0
    assert writes[1] == 0  # the checkpoint is the first one's
    assert_same_bits(both[0], both[1])


def test_ctrl_c_in_one_ends_the_run_in_both(both):
    found, whole = both[0]["interrupted/posterior/slope"], both[0]["chains/posterior/slope"]
    assert 0 < found.shape[1] < whole.shape[1]
    assert found.tobytes() == whole[:, : found.shape[1]].tobytes()


@pytest.mark.parametrize("over", ["chains", "data"])
def test_first_draws_are_those_of_one_process(both, alone, over):
    for name in ("warmup_posterior/slope", "warmup_posterior/z", "warmup_sample_stats/lp"):
        found = both[0][f"{over}/{name}"]
        assert found.shape == alone[name].shape
        np.testing.assert_allclose(found[:, :10], alone[name][:, :10], rtol=0, atol=1e-8)
    np.testing.assert_array_equal(both[0][f"{over}/observed_data/y"], two_processes.Y)


def test_without_a_mesh_they_share_chains_out(both):
    assert str(both[0]["layout"]) == "4 chains over 2 devices: 2 processes share them out"
    expected = arrays_of(ppl.mcmc(two_processes.plain, **SHORT)(0, two_processes.X, two_processes.Y))
    found, expected = (x[:, :10] for x in (both[0]["plain/warmup_posterior/slope"], expected["warmup_posterior/slope"]))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-8)


def test_one_process_goes_on_from_the_checkpoint_of_two(both, folder):
    with pytest.warns(LayoutWarning, match="processes: 1, was 2"):
        more = arrays_of(sample(mesh_of("chains"), checkpoint=folder / "run.zarr", num_samples=30))
    for name, array in more.items():
        before = both[0][f"chains/{name}"]
        if name.startswith(("posterior", "sample_stats")):
            assert array.shape[1] == 30
            array = array[:, :18]
        assert array.tobytes() == before.tobytes(), name
    # The chains move on from where they were.
    moved = np.abs(np.diff(more["posterior/slope"][:, 17:], axis=1))
    assert (moved > 0).mean() > 0.5


def test_what_they_do_not_agree_on_is_refused(tmp_path):
    first, second = run("refusals", tmp_path)
    assert "together already" in first["again"]
    for found in (first, second):
        assert "different numbers" in found["data"]
        assert "local=True" in found["data"]
        assert "different numbers" in found["key"]
        assert "different equations" in found["model"]
    assert "process 1 cannot use the checkpoint" in first["not shared"]
    assert "a file system that all processes share" in second["not shared"]


def test_an_error_in_one_ends_the_other(tmp_path):
    running = launch("raising", tmp_path)
    codes = ends(running)
    assert 0 not in codes
    pid = (tmp_path / "pid-1").read_text()
    line = rf"ppleffects: process 1 of 2 \(.*, pid {pid}\) raised ValueError: no rows"
    for number in range(2):
        text = said("raising", tmp_path, number, line)
        assert re.search(line, text), text
    assert "Traceback" in said("raising", tmp_path, 1)


def killed(folder: Path, victim: int, seconds: float) -> float:
    """Kills one of two processes so long after the run was first kept; returns how long the other lived on."""
    running = launch("slowly", folder)
    began = time.monotonic()
    while not any((folder / "run.zarr" / "sampler").glob("*.npz")):
        assert time.monotonic() - began < LIMIT
        assert running[0].poll() is None, said("slowly", folder, 0)
        time.sleep(0.02)
    time.sleep(seconds)
    assert running[victim].poll() is None, "it has ended before it was killed"
    running[victim].kill()
    began = time.monotonic()
    codes = ends(running, 60)
    lived = time.monotonic() - began
    assert codes[victim] == -signal.SIGKILL
    assert codes[1 - victim] != 0
    who = rf"ppleffects: process {victim} of 2 \(.*, pid {running[victim].pid}\) died"
    for number in range(2):
        text = said("slowly", folder, number, who)
        assert len(re.findall(who, text)) == 1, text
        assert f"To go on from {folder / 'run.zarr'}, run the same command again" in text
    return lived


def check_kill(folder: Path, victim: int, seconds: float, expected: dict) -> None:
    lived = killed(folder, victim, seconds)
    assert lived < 60
    for found in run("resumed", folder):
        assert_same_bits(found, {name[7:]: x for name, x in expected.items() if name.startswith("chains/")})


def test_a_process_is_killed(tmp_path, both):
    check_kill(tmp_path, 1, 0.4, both[0])


@pytest.mark.validate
@pytest.mark.parametrize("number", range(5))
def test_a_process_is_killed_at_a_random_moment(tmp_path, both, number):
    rng = np.random.default_rng(number)
    check_kill(tmp_path, number % 2, rng.uniform(0.0, 2.0), both[0])


# --- what one process can tell ----------------------------------------------------------------------------------------


def test_it_is_too_late_after_a_computation():
    with pytest.raises(DistributedError, match="too late"):
        ppl.distributed.initialize("localhost:1234", 2, 0)


def test_what_jax_refuses_is_told(monkeypatch):
    monkeypatch.setattr(_jax, "has_backends", lambda: False)
    with pytest.raises(DistributedError, match=r"do not come together: .*\n.*\n  found: .*num_processes=2, "):
        ppl.distributed.initialize("localhost:1234", 2, 0)
    assert not jax.distributed.is_initialized()


def test_one_process_needs_nothing():
    ppl.distributed.initialize(num_processes=1)
    assert not jax.distributed.is_initialized()


def test_what_is_not_watched_is_told_once(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(watch, "_has_warned", False)
    with pytest.warns(RuntimeWarning, match=r"ppl\.distributed\.initialize"), watch.running(None):
        pass
    with watch.running(None):
        pass


def test_with_one_process_nothing_is_asked():
    assert processes.decided(3, True, False) == (3, True, False)
    assert processes.as_first(3) == 3
    with pytest.raises(KeyError):
        processes.together(lambda: {}["x"])
    check_same({"x": np.zeros(3)})


def test_checksum_of_padded_rows_is_that_of_the_table(mesh_2x2):
    table = np.random.default_rng(0).normal(size=(7, 3))
    rows, _ = ppl.shard_rows(table, mesh_2x2, ("chains", "data"))
    assert rows.shape == (8, 3)
    numbers = np.array([0, 1, 2, 3, 4, 5, 6, -1])
    assert checksum(rows, numbers) == checksum(table)
    assert checksum(rows, numbers[::-1]) != checksum(table)
