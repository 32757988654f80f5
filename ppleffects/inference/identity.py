"""What a run is: all that its draws depend on, in words and numbers that another process can compare."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ppleffects.effects.structure import described
from ppleffects.inference.checksum import checksum
from ppleffects.inference.layout import Layout
from ppleffects.inference.options import Options
from ppleffects.inference.rows import registered

# In the layout: the shapes of latents along rows that are padded.
PADDED = "padded latents"
# Versions with which the same program may be compiled to other instructions.
PACKAGES = ("ppleffects", "jax", "jaxlib", "numpyro")


@dataclass(frozen=True)
class Identity:
    """What a run is.

    Attributes:
        settings: what must be the same for a run to go on: key, kernel, chains, data, sites; by name, as JSON has them.
        layout: where and with what it runs; where that differs, draws to come are the same in law alone.
        program: the model's equations, line by line. They can be compared on one layout.
    """

    settings: dict[str, Any]
    layout: dict[str, Any]
    program: tuple[str, ...]

    def difference(self, saved: Identity) -> tuple[str, Any, Any] | None:
        """What differs from a saved run, and how it was and is; None if nothing does that matters."""
        before, now = dict(_flat(saved.settings)), dict(_flat(self.settings))
        for name in [*before, *(name for name in now if name not in before)]:
            if before.get(name) != now.get(name):
                return name, before.get(name, "nothing"), now.get(name, "nothing")
        if not self.same_layout(saved):
            return None
        for old, new in zip(saved.program, self.program, strict=False):
            if old != new:
                return "equations of the model", old.strip(), new.strip()
        if len(saved.program) != len(self.program):
            return "equations of the model", f"{len(saved.program)} lines", f"{len(self.program)} lines"
        return None

    def same_layout(self, saved: Identity) -> bool:
        """Whether draws to come are the same to the last bit."""
        return self.layout == saved.layout


def identity_of(
    target: Any, sites: Mapping[str, Any], layout: Layout, key: Any, kernel: Any, options: Options,
    arguments: dict[str, Any],
) -> Identity:  # fmt: skip
    """What a run is.

    Args:
        target: the density.
        sites: its sites, without padded rows.
        layout: where it runs.
        key: a typed key.
        kernel: the sampler.
        options: settings of the driver.
        arguments: the model's arguments by name.
    """
    settings = {
        "key": [*np.asarray(jax.random.key_data(key)).ravel().tolist(), str(jax.random.key_impl(key))],
        "kernel": {"name": type(kernel).__name__, **kernel.settings()},
        "inverse_mass_matrix": _digest_of_tree(getattr(kernel, "inverse_mass_matrix", None)),
        "num_chains": int(options.num_chains),
        "num_warmup": int(options.num_warmup),
        "thinning": int(options.thinning),
        "keep": "all" if options.keep is None else list(options.keep),
        "groups": sorted(options.groups),
        "init": _digest_of_tree(options.init),
        "dtype": jnp.result_type(float).name,
        "site": {name: _site(site) for name, site in sites.items()},
        "data": dict(_data(target, arguments)),
    }
    mesh = layout.mesh
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    where = {
        "mesh": [] if mesh is None else [[name, size] for name, size in mesh.shape.items()],
        "axis_types": [] if mesh is None else [kind.name for kind in mesh.axis_types],
        "chain_axis": layout.chain_axis,
        "processes": jax.process_count(),
        PADDED: {
            name: list(site.shape)
            for name, site in target.sites.items()
            if site.kind == "sample" and site.shape != sites[name].shape
        },
        "device": f"{device.platform} {device.device_kind}",
        **{package: metadata.version(package) for package in PACKAGES if _is_installed(package)},
    }
    # As JSON brings it back, so that it compares with what is read.
    settings, where = json.loads(json.dumps([settings, where], default=str))
    return Identity(settings, where, tuple(described(target.program.jaxpr)))


def _site(site: Any) -> list[Any]:
    shape = None if site.shape is None else list(site.shape)
    return [site.kind, type(site.dist).__name__, shape, None if site.dtype is None else jnp.dtype(site.dtype).name]


def _data(target: Any, arguments: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    """Shape, dtype and checksum of the arrays that a model is given and of those that it closes over."""
    names: dict[int, str] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        names.setdefault(id(leaf), f"{path[0].key}{jax.tree_util.keystr(path[1:])}")
    for i, leaf in enumerate([*target.model.args, *target.model.consts]):
        name = names.get(id(leaf), f"array {i} that the model closes over")
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            leaf = jax.random.key_data(leaf)
        rows = registered(leaf)
        if rows is not None and rows.bookkeeping:
            continue
        shape, numbers = list(np.shape(leaf)), None
        if rows is not None:  # padded otherwise on another number of devices
            shape[0], numbers = rows.order.num_rows, rows.order.numbers
        yield name, [shape, jnp.result_type(leaf).name, checksum(leaf, numbers)]
    for name, value in arguments.items():
        if isinstance(value, bool | int | str | None):
            yield name, [[], type(value).__name__, str(value)]


def _digest_of_tree(tree: Any) -> Any:
    if tree is None or isinstance(tree, str):
        return tree
    digest = hashlib.blake2b(digest_size=8)
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        value = leaf if isinstance(leaf, str) else np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{getattr(value, 'dtype', '')}{np.shape(value)}".encode())
        digest.update(value.encode() if isinstance(value, str) else value.tobytes())
    return digest.hexdigest()


def _is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def _flat(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{name} {key}".strip())
    else:
        yield name, tree
