"""A small program beside each process of a run, which tells who of them died and how to go on, and ends the others.

It runs without JAX, by its path, and so lives on when the process beside it is killed or aborted. The one beside the
first process hears from all the others and tells each who was first.

Lines of JSON come from the process beside it on standard input: what it is, then

    {"checkpoint": "run.zarr"}     a run goes on, and where it is kept: "" for nowhere; null where none goes on any more
    {"raised": "ValueError: ..."}  it ends by an exception
    {"bye": true}                  it ends
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

# So many seconds a process has to end by itself when another has died; so long an end may follow from another's.
GRACE, CONSEQUENCE = 5.0, 60.0
POLL, CONNECT, LINGER = 0.5, 30.0, 30.0
# An exception may follow from a death that is told a moment later.
PATIENCE = 1.0
MAX_LINE = 2**20
DIED = "died"


class Lines:
    """Lines of JSON from a file descriptor that does not block."""

    def __init__(self, descriptor: int):
        self.descriptor, self._rest = descriptor, b""
        os.set_blocking(descriptor, False)

    def read(self) -> tuple[list[dict[str, Any]], bool]:
        """What has come, and whether the other side is still there."""
        try:
            data = os.read(self.descriptor, 2**16)
        except BlockingIOError:
            return [], True
        except OSError:
            return [], False
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages = [dict(json.loads(line)) for line in lines if line]
        except (ValueError, TypeError):  # not one of them
            return [], False
        return messages, bool(data) and len(self._rest) < MAX_LINE


class Peer:
    """The watcher of another process.

    Attributes:
        about: its process, host and pid; empty until it has said so.
        ended: whether it has told the end of its process.
    """

    def __init__(self, connection: socket.socket):
        self.connection, self.lines = connection, Lines(connection.fileno())
        self.about: dict[str, Any] = {}
        self.ended = False

    def send(self, **message: Any) -> None:
        """Tell it something, if it is still there."""
        with contextlib.suppress(OSError):
            self.connection.sendall(json.dumps(message).encode() + b"\n")


class Watcher:
    """One of them.

    Args:
        own: what the process beside it is: process, num_processes, host, pid, address, token and heartbeat.
        listener: where the others connect to; None beside any process but the first.
    """

    def __init__(self, own: dict[str, Any], listener: socket.socket | None):
        self._own, self._listener = own, listener
        self._about = {name: own[name] for name in ("process", "host", "pid")}
        self._selector = selectors.DefaultSelector()
        self._parent = Lines(0)
        self._peers: list[Peer] = []
        self._checkpoint: str | None = None
        self._bye = self._told = self._done = self._closed = False
        # What has failed first, from when that is sure, and when it ends the process beside; what has failed here, and
        # how long it is waited for what was first.
        self._failure: dict[str, Any] | None = None
        self._sure = self._due = 0.0
        self._own_failure: dict[str, Any] | None = None
        self._answer_due = 0.0
        self._quiet_until = 0.0

    def run(self) -> None:
        """Watch until the process beside it has ended, and the first one until all have."""
        self._selector.register(self._parent.descriptor, selectors.EVENT_READ)
        if self._listener is not None:
            self._selector.register(self._listener, selectors.EVENT_READ)
        else:
            self._connect()
        ended = None
        while True:
            for key, _ in self._selector.select(POLL / 50 if self._closed and ended is None else POLL):
                self._hear(key)
            now = time.monotonic()
            if ended is None and not self._is_alive():
                ended = now
                self._see_end()
            if self._own_failure is not None and self._failure is None and now >= self._answer_due:
                self._learn(self._own_failure)
            if self._failure is not None and now >= self._sure:
                if self._listener is not None and not self._told:
                    self._told = True
                    self._tell(failed=self._failure)
                if not self._done and (ended is not None or now >= self._due):
                    self._act()
            if ended is not None:
                well = self._bye and self._own_failure is None and self._failure is None
                settled = self._done or well or now < self._quiet_until
                serves = self._listener is not None and self._peers
                if (settled and not serves) or now > ended + LINGER:
                    return

    def _is_alive(self) -> bool:
        return os.getppid() == self._own["pid"]

    def _hear(self, key: selectors.SelectorKey) -> None:
        if key.fileobj == self._parent.descriptor:
            self._hear_parent()
        elif key.fileobj is self._listener and self._listener is not None:
            self._add(Peer(_lively(self._listener.accept()[0])))
        else:
            self._hear_peer(key.data)

    def _hear_parent(self) -> None:
        messages, is_open = self._parent.read()
        if not is_open:
            self._closed = True
            self._selector.unregister(self._parent.descriptor)
        for message in messages:
            self._checkpoint = message.get("checkpoint", self._checkpoint)
            self._bye = self._bye or "bye" in message
            if "raised" in message:
                self._report({**self._about, "how": f"raised {message['raised']}"})

    def _see_end(self) -> None:
        """The process beside is gone: it has said why, or it has died."""
        if not self._bye and self._own_failure is None:
            self._report({**self._about, "how": DIED})
        elif self._failure is None:
            self._tell(bye=True)

    def _connect(self) -> None:
        host, port = self._own["address"]
        try:
            peer = Peer(_lively(socket.create_connection((host, port), CONNECT)))
        except OSError as error:
            _say(f"process {self._own['process']} does not hear from the others, at {host}:{port}: {error}")
            return
        peer.about = {"process": 0, "host": host, "pid": self._own["first_pid"]}
        self._add(peer)
        peer.send(token=self._own["token"], **self._about)

    def _add(self, peer: Peer) -> None:
        self._peers.append(peer)
        self._selector.register(peer.connection, selectors.EVENT_READ, peer)

    def _hear_peer(self, peer: Peer) -> None:
        messages, is_open = peer.lines.read()
        for message in messages:
            if not peer.about:
                if message.pop("token", None) != self._own["token"]:
                    is_open = False
                    break
                peer.about = message
            peer.ended = peer.ended or "bye" in message
            if "failed" in message:
                peer.ended = True
                self._learn(message["failed"])
            if "lost" in message:
                self._lose(message["lost"])
        if not is_open:
            self._selector.unregister(peer.connection)
            self._peers.remove(peer)
            peer.connection.close()
            if peer.about and not (peer.ended or self._bye or self._failure):
                self._lose(peer.about)

    def _report(self, failure: dict[str, Any]) -> None:
        """Of the process beside: the first process's watcher says what was first."""
        self._own_failure = failure
        if self._listener is None and self._peers:
            self._tell(failed=failure)
            self._answer_due = time.monotonic() + GRACE
        else:
            self._learn(failure)

    def _learn(self, failure: dict[str, Any]) -> None:
        """Take note of what has failed first."""
        now, raised = time.monotonic(), failure["how"] != DIED
        if self._failure is None and now >= self._quiet_until:
            self._sure = now + PATIENCE if raised and self._listener is not None else now
            self._failure, self._due = failure, now + GRACE
        elif self._failure is not None and now < self._sure and not raised:
            self._failure, self._sure = failure, now

    def _lose(self, about: dict[str, Any]) -> None:
        """Say that a process may have died; what follows from that is not told again."""
        if time.monotonic() < self._quiet_until:
            return
        self._quiet_until = time.monotonic() + CONSEQUENCE
        if self._listener is not None:
            self._tell(lost=about)
        heartbeat = self._own["heartbeat"]
        _say(self._text(about, f"cannot be reached any more: if it has died, the others stop within {heartbeat} s."))

    def _tell(self, **message: Any) -> None:
        for peer in self._peers:
            peer.send(**message)

    def _act(self) -> None:
        """Say what was first, and end the process beside if it has not ended by itself."""
        failure, self._done = self._failure or {}, True
        own = self._own_failure or {"how": DIED}
        is_other = failure["process"] != self._own["process"]
        if not (is_other and failure["how"] == own["how"] != DIED):  # what all raise is told once
            _say(self._text(failure, f"{failure['how']}, and the others stop."))
        if self._is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._own["pid"], signal.SIGKILL)

    def _text(self, about: dict[str, Any], what: str) -> str:
        who = f"process {about['process']} of {self._own['num_processes']} ({about['host']}, pid {about['pid']})"
        if self._checkpoint is None:
            return f"{who} {what}"
        if self._checkpoint:
            how = f"To go on from {self._checkpoint}, run the same command again, on as many processes or others."
        else:
            how = "Its draws are lost: give ppl.mcmc a checkpoint= to be able to go on."
        return f"{who} {what} {how}"


def _lively(connection: socket.socket) -> socket.socket:
    """A connection that ends when the machine on the other side is gone."""
    connection.settimeout(CONNECT)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name in ("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), 4)
    return connection


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"ppleffects: {text}\n".encode())


def main() -> None:
    """Read what the process beside it is, and watch it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    first = bytearray()
    while not first.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        first += byte
    own = json.loads(first)
    listener = socket.socket(fileno=int(sys.argv[1])) if len(sys.argv) > 1 else None
    Watcher(own, listener).run()


if __name__ == "__main__":
    main()
