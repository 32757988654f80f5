"""How a process of several is watched: a program beside it is told what it does, and tells if it or another dies."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from ppleffects.effects import _jax

PROGRAM = Path(__file__).with_name("watcher.py")

_watcher: subprocess.Popen | None = None
_has_warned = False


def start(heartbeat: int) -> None:
    """Start the program beside this process, as all others do.

    Args:
        heartbeat: seconds after which JAX takes a silent process for dead.
    """
    global _watcher
    state = _jax.coordination()
    own: dict[str, Any] = {
        "process": state.process_id,
        "num_processes": state.num_processes,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "heartbeat": heartbeat,
    }
    listener = None
    if state.process_id == 0:
        listener = _listener()
        host = state.coordinator_address.rsplit(":", 1)[0].strip("[]")
        told = {"address": [host, listener.getsockname()[1]], "token": secrets.token_hex(16), "first_pid": os.getpid()}
        _jax.tell_all("ppleffects/watcher", json.dumps(told))
    own |= json.loads(_jax.told_to_all("ppleffects/watcher"))
    descriptors = () if listener is None else (listener.fileno(),)
    _watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", str(PROGRAM), *map(str, descriptors)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=descriptors,
    )
    if listener is not None:
        listener.close()
    tell(**own)
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        before(kind, error, trace)
        tell(raised=f"{kind.__name__}: {error}".split("\n")[0].strip(": "))

    sys.excepthook = hook
    atexit.register(tell, bye=True)


def tell(**message: Any) -> None:
    """Tell the program beside this process, where there is one."""
    if _watcher is not None and _watcher.stdin is not None:
        with contextlib.suppress(OSError, ValueError):
            _watcher.stdin.write(json.dumps(message).encode() + b"\n")
            _watcher.stdin.flush()


@contextlib.contextmanager
def running(checkpoint: str | os.PathLike | None) -> Iterator[None]:
    """While a run goes on: where it is kept, None for nowhere.

    Warns:
        RuntimeWarning: there are several processes, and nothing watches them.
    """
    global _has_warned
    if jax.process_count() > 1 and _watcher is None and not _has_warned:
        _has_warned = True
        warnings.warn(
            "several processes were started by jax.distributed.initialize: if one dies, the others may wait for 100 s, "
            "and do not say which; ppl.distributed.initialize takes the same arguments, and sees to both",
            RuntimeWarning,
            stacklevel=4,
        )
    tell(checkpoint="" if checkpoint is None else os.path.abspath(checkpoint))
    yield
    tell(checkpoint=None)  # where it fails, its end is told after this


def _listener() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))
