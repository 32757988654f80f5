"""What each of two processes runs in ``test_processes.py``: ``two_processes.py SCENARIO FOLDER ADDRESS NUMBER``.

It leaves what it found in ``FOLDER/SCENARIO-NUMBER.npz`` or ``.json``.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import numpy as np
import numpyro.distributions as dist
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import PPLError
from ppleffects.inference import checkpoint as checkpoint_module
from ppleffects.inference import processes, state_file

X = np.linspace(-1.0, 1.0, 8)
Y = 0.7 * X + np.random.default_rng(0).normal(0.0, 0.3, size=8)
SHORT = {"num_warmup": 12, "num_samples": 18, "chunk_size": 5, "groups": ("warmup",), "progress": False}


def mesh_of(over: str) -> Mesh:
    """A mesh of 2 x 2, in which the processes, where there are two, lie along the axis of that name."""
    devices = np.array(jax.devices()).reshape(2, 2)
    return Mesh(devices if over == "chains" else devices.T, ("chains", "data"), axis_types=(AxisType.Auto,) * 2)


def sharded(mesh: Mesh):
    """A regression whose rows, and a latent for each, are on the shards of `data`."""

    def model(data, mask):
        def rows(slope, data, mask):
            z = ppl.sample("z", dist.Normal(0.0, 0.5).expand(mask.shape), spec=P("data"))
            ppl.observe("y", dist.Normal(slope * data["x"] + z, 0.5), data["y"], mask=mask)

        slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
        jax.shard_map(rows, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=None)(slope, data, mask)

    return model


def plain(x, y):
    """A regression that names no mesh."""
    ppl.observe("y", dist.Normal(ppl.sample("slope", dist.Normal(0.0, 1.0)) * x, 0.5), y)


def sample(mesh: Mesh, *, local: bool = False, **options):
    """Draws of the sharded model; with ``local`` each process knows its own half of the rows alone."""
    own = slice(4 * jax.process_index(), 4 * jax.process_index() + 4) if local else slice(None)
    data, mask = ppl.shard_rows({"x": X[own], "y": Y[own]}, mesh, local=local)
    return ppl.mcmc(sharded(mesh), mesh=mesh, **{**SHORT, **options})(0, data, mask)


def arrays_of(tree) -> dict[str, np.ndarray]:
    """All arrays of a tree, by group and name."""
    return {f"{group}/{name}": x.values for group, node in tree.children.items() for name, x in node.data_vars.items()}


def interrupted():
    """A run during which the second process, and it alone, hears Ctrl-C."""
    decided, calls = processes.decided, []

    def hear(*told):
        calls.append(told)
        if len(calls) == 5 and jax.process_index() == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return decided(*told)

    with mock.patch.object(processes, "decided", hear):
        return sample(mesh_of("chains"))


def layouts(folder: Path) -> dict[str, np.ndarray]:
    """The same run on two meshes, one of them kept; another whose mesh is left to the rule."""
    with mock.patch.object(state_file, "write", wraps=state_file.write) as write:
        kept = sample(mesh_of("chains"), checkpoint=folder / "run.zarr")
    runs = {
        "chains": arrays_of(kept),
        "interrupted": arrays_of(interrupted()),
        "data": arrays_of(sample(mesh_of("data"), local=True)),
        "plain": arrays_of(tree := ppl.mcmc(plain, **SHORT)(0, X, Y)),
    }
    found = {f"{run}/{name}": array for run, arrays in runs.items() for name, array in arrays.items()}
    return {**found, "layout": np.array(tree.attrs["layout"]), "num_writes": np.array(write.call_count)}


def refusals(folder: Path) -> dict[str, str]:
    """What is said where processes do not agree, or are brought together twice."""
    own = jax.process_index()
    attempts = {
        "again": lambda: ppl.distributed.initialize("localhost:1", 2, own),
        "data": lambda: ppl.mcmc(plain, **SHORT)(0, X, Y + own),
        "key": lambda: ppl.mcmc(plain, **SHORT)(own, X, Y),
        "model": lambda: ppl.mcmc(ppl.scale(plain, 2.0) if own else plain, **SHORT)(0, X, Y),
        "not shared": lambda: ppl.mcmc(plain, **SHORT, checkpoint=folder / f"own-{own}" / "run.zarr")(0, X, Y),
    }
    said = {}
    with mock.patch.object(checkpoint_module, "SECONDS_TO_APPEAR", 1.0):
        for name, attempt in attempts.items():
            try:
                attempt()
                said[name] = "nothing"
            except PPLError as error:
                said[name] = str(error)
    return said


def slowly(folder: Path) -> dict[str, np.ndarray]:
    """A run that is kept after each call, and takes its time, so that it can be killed at any moment."""
    decided = processes.decided

    def wait(*told):
        time.sleep(0.5)
        return decided(*told)

    with mock.patch.object(processes, "decided", wait), mock.patch.object(checkpoint_module, "MIN_SECONDS", 0.0):
        return arrays_of(sample(mesh_of("chains"), checkpoint=folder / "run.zarr"))


def resumed(folder: Path) -> dict[str, np.ndarray]:
    """The rest of such a run."""
    return arrays_of(sample(mesh_of("chains"), checkpoint=folder / "run.zarr"))


def raising(folder: Path) -> dict[str, str]:
    """One process finds an error while the other waits for it."""
    (folder / f"pid-{jax.process_index()}").write_text(str(os.getpid()))
    if jax.process_index() == 1:
        raise ValueError("no rows")
    multihost_utils.sync_global_devices("never")
    return {}


def main(scenario: str, folder: Path, address: str, number: int) -> None:
    """Run a scenario and leave its result."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the background of a shell lets programs ignore it
    ppl.distributed.initialize(address, 2, number, initialization_timeout=120)
    found: dict[str, Any] = {f.__name__: f for f in (layouts, refusals, slowly, resumed, raising)}[scenario](folder)
    if all(isinstance(value, str) for value in found.values()):
        (folder / f"{scenario}-{number}.json").write_text(json.dumps(found))
    else:
        np.savez(folder / f"{scenario}-{number}.npz", **found)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
