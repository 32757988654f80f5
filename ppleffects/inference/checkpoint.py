"""A run on disk: its draws as a zarr store that can be read while it goes on, and what is needed to go on with it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ppleffects.errors import CheckpointError
from ppleffects.inference import archive, state_file
from ppleffects.inference.checksum import check_same
from ppleffects.inference.identity import Identity, identity_of
from ppleffects.inference.processes import as_first, is_first, together, wait
from ppleffects.inference.store import COUNTS, Phase
from ppleffects.inference.watch import running

if TYPE_CHECKING:
    import xarray

FORMAT = 1
# What this is in the attributes of the store, and the folder in it that is no part of the tree.
ATTRIBUTE, FOLDER = "ppleffects_checkpoint", "sampler"
# Draws are written when so many seconds have passed, and at most so small a share of the time.
MIN_SECONDS, MAX_SHARE = 1.0, 0.01
# A network file system may show what another machine has written so many seconds later.
SECONDS_TO_APPEAR = 60.0


class Saved(NamedTuple):
    """What a checkpoint holds beside the draws.

    Attributes:
        identity: what the run is.
        num_samples: draws per chain that it was last asked for, before thinning.
        commit: how often it was written; 0 where there is no state yet.
        phases: counts of warm-up and sampling, by name.
        rows: draws that each chain has, by group.
        seconds: time spent, by phase.
        specs: how the arrays of the state lay on the mesh.
    """

    identity: Identity
    num_samples: int
    commit: int
    phases: dict[str, Any]
    rows: dict[str, list[int]]
    seconds: dict[str, float]
    specs: dict[str, Any]

    @property
    def num_steps(self) -> int:
        """Transitions after warm-up that every chain has made."""
        return min(self.phases["sampling"]["_num_steps"]) if self.phases else 0


class Checkpoint:
    """A folder that holds a run.

    Args:
        path: the folder; it need not exist.
        identity: what the run is.
    """

    def __init__(self, path: str | os.PathLike, identity: Identity):
        self.path, self.identity = Path(path), identity
        self._commit = 0
        self._last, self._cost = time.monotonic(), 0.0
        self._lock: Any = None
        self._published: tuple[dict[str, Any], dict[str, int]] | None = None

    @property
    def state_path(self) -> Path:
        """The file of the sampler's state."""
        return self.path / FOLDER / f"{self._commit}.npz"

    def load(self, num_samples: int) -> Saved | None:
        """What the folder holds; None if there is none.

        Raises:
            CheckpointError: it holds another run or something else, is damaged, or another process writes to it.
        """
        if as_first(not self.path.exists() or (self.path.is_dir() and not any(self.path.iterdir()))):
            return None

        def checked() -> Saved:
            saved = _read_saved(self.path)
            self._check(saved, num_samples)
            return saved

        saved = together(checked)
        if saved.num_steps < num_samples:
            together(self._hold)
            saved = together(lambda: _read_saved(self.path))  # no other run has written since
        self._commit = as_first(saved.commit)
        together(lambda: self._check_commit(saved))
        return saved

    def create(self, template: xarray.DataTree, attrs: dict[str, Any], num_samples: int) -> None:
        """Make the folder, all of it or nothing.

        Args:
            template: the tree without draws.
            attrs: its attributes.
            num_samples: draws per chain that are asked for.
        """

        def make() -> None:
            if not is_first():
                return
            partial = self.path.with_name(f".{self.path.name}.partial")
            with _told(self.path):
                shutil.rmtree(partial, ignore_errors=True)
                partial.parent.mkdir(parents=True, exist_ok=True)
                archive.create(partial, template)
                (partial / FOLDER).mkdir()
                (partial / FOLDER / "program.txt").write_text("\n".join(self.identity.program))
                empty = Saved(self.identity, num_samples, 0, {}, {}, {}, {})
                lengths = dict.fromkeys(template.children, 0)
                archive.publish(partial, {**attrs, ATTRIBUTE: _encoded(empty)}, lengths)
                if self.path.exists():
                    self.path.rmdir()
                partial.rename(self.path)
            self._hold()

        together(make)
        together(self._await)

    def series(self, group: str, num_rows: int, lengths: list[int]) -> archive.StoredSeries:
        """The arrays of a group of draws, as long as ``num_rows``."""

        def arrays() -> dict[str, Any]:
            with _told(self.path):
                return archive.open_arrays(self.path, group, num_rows)

        together(lambda: arrays() if is_first() else None)  # it makes them as long
        return archive.StoredSeries(together(arrays), self.path / group, np.asarray(lengths, int))

    @property
    def is_due(self) -> bool:
        """Whether it is time to write."""
        return time.monotonic() - self._last >= max(MIN_SECONDS, self._cost / MAX_SHARE)

    def took(self, seconds: float) -> None:
        """Know how long it has taken to write now, the state's way to the host included."""
        self._last, self._cost = time.monotonic(), seconds

    def commit(
        self,
        state: dict[str, np.ndarray],
        specs: dict[str, Any],
        phases: dict[str, Phase],
        series: dict[str, archive.StoredSeries],
        seconds: dict[str, float],
        attrs: dict[str, Any],
    ) -> None:
        """Write draws and state; whatever happens, the folder holds the last commit or this one.

        Args:
            state: the sampler's state, by path.
            specs: how it lies on the mesh.
            phases: warm-up and sampling.
            series: draws by group.
            seconds: time spent, by phase.
            attrs: attributes of the tree.
        """

        def write() -> None:
            written = [path for part in series.values() for path in part.flush()]
            archive.sync(written)
            before, self._commit = self.state_path, self._commit + 1
            state_file.write(self.state_path, state)
            saved = Saved(
                self.identity,
                phases["sampling"].num_asked,
                self._commit,
                {name: phase.counts() for name, phase in phases.items()},
                {name: part.lengths.tolist() for name, part in series.items()},
                seconds,
                specs,
            )
            self._published = {ATTRIBUTE: _encoded(saved)}, {name: part.length for name, part in series.items()}
            self.publish(attrs)
            before.unlink(missing_ok=True)

        def act() -> None:
            if is_first():
                with _told(self.path):
                    write()
            else:
                for part in series.values():
                    part.forget()

        together(act)

    def publish(self, attrs: dict[str, Any]) -> None:
        """Show readers these attributes, and the draws of the last commit of this run if there was one."""
        if self._published is not None and is_first():
            own, lengths = self._published
            with _told(self.path):
                archive.publish(self.path, {**attrs, **own}, lengths)

    def tree(self, groups: Sequence[str], attrs: dict[str, Any]) -> xarray.DataTree:
        """The draws as a tree, whose arrays are read when they are used.

        Args:
            groups: those that come first, in order.
            attrs: attributes of the tree.
        """
        wait("checkpoint complete")
        tree = archive.open_tree(self.path)
        order = [*groups, *(name for name in tree.children if name not in groups)]
        nodes = {name: tree.children[name].to_dataset() for name in order if name in tree.children}
        kept = {name: node for name, node in nodes.items() if node.sizes.get(archive.DRAW) != 0}
        result = type(tree).from_dict(kept)
        result.attrs = attrs
        return result

    def close(self) -> None:
        """Let others write to the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _check(self, saved: Saved, num_samples: int) -> None:
        difference = self.identity.difference(saved.identity)
        if difference is not None:
            name, before, now = difference
            raise CheckpointError(
                f"the checkpoint belongs to another run, which differs in: {name}",
                expected=f"{before}, as in {self.path}",
                found=f"{now}",
                fix="call mcmc as it was called, or give another path; what is there stays as it is",
            )
        if num_samples < saved.num_samples:
            raise CheckpointError(
                "the checkpoint has been asked for more draws than are asked for now",
                expected=f"num_samples >= {saved.num_samples}, as in {self.path}",
                found=f"num_samples={num_samples}",
                fix="ask for as many and take the first of them, or give another path",
            )

    def _check_commit(self, saved: Saved) -> None:
        if saved.commit != self._commit:
            raise CheckpointError(
                "processes see the checkpoint at different times",
                expected=f"write number {self._commit}, which the first process reads from {self.path}",
                found=f"write number {saved.commit}",
                fix="start again when the file system shows the same to all, some seconds later",
            )

    def _await(self) -> None:
        """Wait until the file system shows the folder that the first process has made."""
        until = time.monotonic() + SECONDS_TO_APPEAR
        while not self.path.exists():
            with contextlib.suppress(OSError):
                os.listdir(self.path.parent)  # so that a network file system looks again
            if time.monotonic() > until:
                raise CheckpointError(
                    "a process does not see the checkpoint that the first one has made",
                    expected="a path on a file system that all processes share",
                    found=f"nothing at {self.path}",
                    fix="give a path on such a file system",
                )
            time.sleep(0.1)

    def _hold(self) -> None:
        """Keep other processes from writing to the folder, as long as this one lives."""
        if self._lock is not None or not is_first():
            return
        try:
            import fcntl  # not on Windows, where nothing is held
        except ImportError:
            return
        with _told(self.path):
            self._lock = (self.path / FOLDER / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self.close()
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                return  # a file system that knows no locks
            raise CheckpointError(
                "another process writes to the checkpoint",
                expected="one run at a time",
                found=f"{self.path}",
                fix="wait for the other run, stop it, or give another path",
            ) from error


@contextlib.contextmanager
def opened(
    path: str | os.PathLike | None, target: Any, sites: Any, layout: Any, key: Any, kernel: Any, options: Any,
    arguments: dict[str, Any],
) -> Iterator[Checkpoint | None]:  # fmt: skip
    """The checkpoint of a run, as ``identity_of`` says what it is; None where there is to be none."""
    with running(path):
        check_same((key, options.init))
        if path is None:
            yield None
            return
        checkpoint = Checkpoint(path, identity_of(target, sites, layout, key, kernel, options, arguments))
        try:
            yield checkpoint
        finally:
            checkpoint.close()


def _encoded(saved: Saved) -> str:
    identity = {"settings": saved.identity.settings, "layout": saved.identity.layout}
    return json.dumps({"format": FORMAT, **saved._asdict(), "identity": identity})


def _valid(saved: Saved) -> Saved:
    """What was read, where it is of the kind that is written."""
    num_chains = saved.identity.settings["num_chains"]
    counts = [values for phase in saved.phases.values() for values in phase.values()]
    rows = list(saved.rows.values())
    if not (
        all(type(number) is int and number >= 0 for number in (saved.commit, saved.num_samples, *sum(rows, [])))
        and all(set(phase) == set(COUNTS) for phase in saved.phases.values())
        and set(saved.phases) <= {"warm-up", "sampling"}
        and all(len(values) == num_chains for values in [*counts, *rows])
        and all(type(number) in (int, float) for values in counts for number in values)
    ):
        raise ValueError("counts of transitions or draws that no run has")
    return saved


def _read_saved(path: Path) -> Saved:
    try:
        fields = json.loads(archive.read_attrs(path)[ATTRIBUTE])
        found = fields.pop("format")
        if found != FORMAT:
            raise ValueError(f"format {found}, where this version reads {FORMAT}")
        program = tuple((path / FOLDER / "program.txt").read_text().split("\n"))
        identity = Identity(**fields.pop("identity"), program=program)
        return _valid(Saved(identity=identity, **fields))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            "the path holds no checkpoint, or a damaged one",
            expected="a folder that an earlier run has written, an empty one, or a path that is free",
            found=f"{path}: {type(error).__name__}: {error}",
            fix="give another path; what is there stays as it is",
        ) from error


@contextlib.contextmanager
def _told(path: Path) -> Iterator[None]:
    """Says what could not be written, and where."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(
            "the checkpoint cannot be written",
            expected="a path on a disk with room that may be written to",
            found=f"{path}: {error}",
            fix="make room or give another path; what was written before stays, and the same call goes on from there",
        ) from error
