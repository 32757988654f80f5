"""The program beside each process: who died, who is ended, and who lives, with processes that do nothing but wait."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ppleffects.inference.watch import PROGRAM

COUNT = 3
# A process that starts its watcher, tells it what it reads, line by line, and waits.
WAITING = """
import os, socket, subprocess, sys
own = sys.stdin.readline()
descriptors = [int(x) for x in sys.argv[2:]]
watcher = subprocess.Popen(
    [sys.executable, "-I", "-S", sys.argv[1], *map(str, descriptors)], stdin=subprocess.PIPE, pass_fds=descriptors
)
print(os.getpid(), watcher.pid, flush=True)
watcher.stdin.write((own.replace('"PID"', str(os.getpid()))).encode())
watcher.stdin.flush()
for line in sys.stdin:
    watcher.stdin.write(line.encode())
    watcher.stdin.flush()
    if "bye" in line:
        break
"""


class Waiting:
    """A process that waits, and the watcher beside it."""

    def __init__(self, number: int, address: list, listener: socket.socket | None, folder: Path):
        descriptors = () if listener is None else (listener.fileno(),)
        self.said_path = folder / f"{number}.txt"
        with self.said_path.open("w") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-S", "-c", WAITING, str(PROGRAM), *map(str, descriptors)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=said,
                pass_fds=descriptors,
                text=True,
            )
        own = {"process": number, "num_processes": COUNT, "host": f"host{number}", "pid": "PID", "heartbeat": 20}
        self.tell(**own, address=address, token="secret", first_pid=1)
        assert self.process.stdout is not None
        self.pid, self.watcher = map(int, self.process.stdout.readline().split())

    def tell(self, **message):
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(message) + "\n")
        self.process.stdin.flush()

    @property
    def said(self) -> str:
        return self.said_path.read_text()

    def watcher_ends(self, seconds: float) -> bool:
        """Whether the watcher is gone within so many seconds."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with contextlib.suppress(ChildProcessError, ProcessLookupError):
                os.kill(self.watcher, 0)
                time.sleep(0.05)
                continue
            return True
        return False

    def close(self):
        for pid in (self.pid, self.watcher):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.communicate()


@pytest.fixture
def address():
    return []


@pytest.fixture
def waiting(tmp_path, address):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address += ["127.0.0.1", listener.getsockname()[1]]
        running = [Waiting(number, address, None if number else listener, tmp_path) for number in range(COUNT)]
    time.sleep(1.0)  # until all are connected
    yield running
    for each in running:
        each.close()


def who(number: int, each: Waiting) -> str:
    return f"ppleffects: process {number} of {COUNT} (host{number}, pid {each.pid}) "


@pytest.mark.parametrize("victim", [0, 2])
def test_who_is_killed_is_told_and_the_others_end(waiting, victim):
    for each in waiting:
        each.tell(checkpoint="/shared/run.zarr")
    time.sleep(0.2)
    waiting[victim].process.kill()
    for number, each in enumerate(waiting):
        assert each.process.wait(20) == -signal.SIGKILL, number
        assert each.watcher_ends(40)
        assert each.said.startswith(who(victim, waiting[victim]) + "died, and the others stop. To go on from /shared/")
        assert each.said.count("\n") == 1


def test_an_exception_is_told(waiting):
    waiting[1].tell(checkpoint="")
    waiting[1].tell(raised="ValueError: no rows")
    waiting[1].tell(bye=True)
    assert waiting[1].process.wait(20) == 0
    for number in (0, 2):
        assert waiting[number].process.wait(20) == -signal.SIGKILL
        assert waiting[number].said == who(1, waiting[1]) + "raised ValueError: no rows, and the others stop.\n"
    assert "Its draws are lost" in waiting[1].said


def test_what_follows_from_a_death_is_not_taken_for_the_cause(waiting):
    waiting[0].tell(raised="RuntimeError: connection reset by peer")
    waiting[0].tell(bye=True)
    time.sleep(0.3)
    waiting[1].process.kill()
    for each in waiting:
        each.process.wait(20)
        assert each.watcher_ends(40)
        assert each.said == who(1, waiting[1]) + "died, and the others stop.\n"


def test_the_same_exception_in_all_is_told_once(waiting):
    for each in waiting:
        each.tell(raised="ValueError: no rows")
        each.tell(bye=True)
    assert [each.process.wait(20) for each in waiting] == [0] * COUNT
    assert all(each.watcher_ends(40) for each in waiting)
    assert sum(each.said.count("raised ValueError") for each in waiting) == 1


def test_what_is_cut_off_is_told_and_nobody_is_ended(waiting):
    for pid in (waiting[2].watcher, waiting[2].pid):
        os.kill(pid, signal.SIGKILL)
    time.sleep(8.0)  # longer than one that has died is waited for
    for number in (0, 1):
        assert waiting[number].process.poll() is None
        expected = "cannot be reached any more: if it has died, the others stop within 20 s.\n"
        assert waiting[number].said == who(2, waiting[2]) + expected


def test_an_end_is_silent(waiting):
    for each in waiting:
        each.tell(bye=True)
    assert [each.process.wait(20) for each in waiting] == [0] * COUNT
    assert all(each.watcher_ends(40) for each in waiting)
    assert [each.said for each in waiting] == [""] * COUNT


@pytest.mark.parametrize(
    "line", ['{"failed": {"process": 1}}', '{"token": "guessed", "process": 1}', "GET / HTTP", "3"]
)
def test_a_stranger_is_not_heard(waiting, address, line):
    with socket.create_connection(tuple(address)) as stranger:
        stranger.sendall(line.encode() + b"\n")
        assert stranger.recv(1) == b""  # hung up on
    for each in waiting:
        assert re.fullmatch("", each.said)
        assert each.process.poll() is None
        os.kill(each.watcher, 0)


def test_ctrl_c_does_not_end_it(waiting):
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(waiting[1].watcher, number)
    time.sleep(0.5)
    assert not waiting[1].watcher_ends(0.2)
