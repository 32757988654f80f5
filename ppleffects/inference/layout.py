"""Where chains run: the mesh of a run, how many chains each device has, and what is sharded over them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from ppleffects.errors import MeshError
from ppleffects.inference.checksum import check_same
from ppleffects.inference.default_layout import default_mesh, row_sharding
from ppleffects.inference.processes import put


@dataclass(frozen=True)
class Layout:
    """The mesh of a run and its chains; hashable, so that it is part of the key of a compiled program.

    Attributes:
        mesh: devices of the run; None for JAX's default device and for data that bring their own sharding.
        chain_axis: axis of ``mesh`` over which chains are sharded; None where all chains are vmapped.
        num_chains: chains that the user asked for.
        reason: why, for the user; no part of the key.
    """

    mesh: Mesh | None
    chain_axis: str | None
    num_chains: int
    reason: str = dataclasses.field(default="", compare=False)

    def __str__(self) -> str:
        """Where chains run and why, for the user."""
        chains = "1 chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        size = 1 if self.mesh is None else self.mesh.size
        groups = 1 if self.mesh is None or self.chain_axis is None else self.mesh.shape[self.chain_axis]
        if size == 1:
            return f"{chains} on one device: {self.reason}"
        if groups == 1:
            return f"{chains} on each of {size} devices: {self.reason}"
        return f"{chains} over {groups} {'devices' if groups == size else 'groups of devices'}: {self.reason}"

    @property
    def chains(self) -> np.ndarray:
        """Numbers of the chains that run; the last is repeated until the chain axis divides them. ``(padded,)``."""
        size = 1 if self.chain_axis is None or self.mesh is None else self.mesh.shape[self.chain_axis]
        padded = -(-self.num_chains // size) * size
        return np.minimum(np.arange(padded, dtype=np.int32), self.num_chains - 1)

    @property
    def waits_on_permutes(self) -> bool:
        """Whether a collective permute among the shards of one chain waits for all chains.

        On CPUs XLA lets every device take part in it, whichever pairs it names: groups of chains whose loops differ in
        length then wait for each other for ever.
        """
        if self.mesh is None or self.chain_axis is None or self.mesh.shape[self.chain_axis] == 1:
            return False
        return self.mesh.devices.flat[0].platform == "cpu"

    def together(self) -> Layout:
        """The layout on the same mesh in which each device runs every chain."""
        return dataclasses.replace(self, chain_axis=None)

    def context(self) -> contextlib.AbstractContextManager:
        """The context in which the model is traced and its programs are called."""
        return contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)

    def spec(self, *, leading: int = 0) -> PartitionSpec:
        """The spec of an array whose chains are on axis ``leading``."""
        return PartitionSpec(*[None] * leading, self.chain_axis)

    def over_chains(self, fn: Callable, in_specs: Any, out_specs: Any) -> Callable:
        """``fn`` of the chains of one shard, as a function of all chains.

        Only the chain axis is manual. ``check_vma`` is off for it: loops of a sampler start from constants, whose types
        would not vary; the density's own ``shard_map`` over the data checks its types as ever.
        """
        if self.chain_axis is None:
            return fn
        return jax.shard_map(
            fn, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, axis_names={self.chain_axis}, check_vma=False
        )

    def place_chains(self, tree: Any) -> Any:
        """Arrays with a leading chain axis, on their devices."""
        if self.mesh is None:
            return tree
        sharding = NamedSharding(self.mesh, self.spec())
        return jax.tree.map(lambda leaf: put(leaf, sharding), tree)

    def place_data(self, tree: Any) -> Any:
        """Arrays that all chains read, on every device that runs chains; what is on the mesh already stays as it is."""
        if self.mesh is None:
            return tree
        mesh = self.mesh

        def move(leaf: Any) -> Any:
            sharding = getattr(leaf, "sharding", None)
            if isinstance(sharding, NamedSharding) and sharding.mesh == mesh:
                spec = PartitionSpec(*(_without(part, self.chain_axis) for part in sharding.spec))
                return leaf if spec == sharding.spec else put(leaf, NamedSharding(mesh, spec))
            if sharding is not None and len(sharding.device_set) > 1 and sharding.device_set == set(mesh.devices.flat):
                return leaf
            return put(leaf, NamedSharding(mesh, PartitionSpec()))

        return _map_once(move, tree)


def _map_once(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` of each leaf; of one that stands in several places once, so that it is copied once."""
    done: dict[int, Any] = {}

    def once(leaf: Any) -> Any:
        if id(leaf) not in done:
            done[id(leaf)] = fn(leaf)
        return done[id(leaf)]

    return jax.tree.map(once, tree)


def trace(trace_model: Callable[[], Any], mesh: Mesh | None, chain_axis: str, num_chains: int) -> tuple[Any, Layout]:
    """The target of a model and the layout of its run.

    The mesh is ``mesh``, else the one set by ``jax.set_mesh``, else the one that the model's own ``shard_map`` names,
    else the one that its data lie on, else that of the default. The model is traced with that mesh set.

    Args:
        trace_model: traces the model in the context that it is called in.
        mesh: the mesh that the caller asked for.
        chain_axis: name of the axis of chains.
        num_chains: number of chains.

    Raises:
        MeshError: the model names a mesh of other axes than the run's, or is another in another process.
    """
    reason, num_rows = "mesh= says so", None
    if mesh is None and not jax.sharding.get_mesh().empty:
        mesh, reason = jax.sharding.get_mesh(), "jax.set_mesh says so"
    if mesh is None:
        target = trace_model()
        mesh, reason = _named_mesh(target)
        if mesh is None:
            mesh, (_, num_rows, reason) = default_mesh(target, chain_axis, num_chains)
        if mesh is None:
            check_same(target, is_model=True)
            return target, Layout(None, None, num_chains, reason)
    shards_chains = chain_axis in mesh.axis_names and num_rows is None
    layout = Layout(mesh, chain_axis if shards_chains else None, num_chains, reason)
    try:
        with layout.context():
            target = trace_model()
    except ValueError as error:  # as JAX raises where the mesh of a shard_map is not that of the context
        _check_mesh(mesh, _mesh_without_context(trace_model), error)
        raise
    _check_mesh(mesh, target.mesh, None)
    check_same(target, is_model=True)
    if num_rows is not None:
        target = _map_once(lambda leaf: put(leaf, row_sharding(leaf, num_rows, mesh)), target)
    return target, layout


def _named_mesh(target: Any) -> tuple[Mesh | None, str]:
    """The mesh that a model names, else that of several devices on which its data lie, and how it is known."""
    if isinstance(target.mesh, Mesh):
        return target.mesh, "the model's shard_map says so"
    for leaf in jax.tree.leaves(target):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 1:
            return sharding.mesh, "the data lie there"
    return None, ""


def _mesh_without_context(trace_model: Callable[[], Any]) -> Mesh | AbstractMesh | None:
    """The mesh that the model names, or None where it cannot be traced without one either."""
    try:
        return trace_model().mesh
    except Exception:
        return None


def _check_mesh(mesh: Mesh, named: Mesh | AbstractMesh | None, cause: Exception | None) -> None:
    if named is None or (dict(named.shape) == dict(mesh.shape) and named.axis_types == mesh.axis_types):
        return
    raise MeshError(
        "the model's shard_map names another mesh than the one of the run",
        expected=f"{_describe(mesh)}, the mesh of mcmc",
        found=f"{_describe(named)}, the mesh in the model",
        fix="build one mesh and give it to both, or leave out mesh= in the model's shard_map",
    ) from cause


def _describe(mesh: Mesh | AbstractMesh) -> str:
    axes = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return "(" + ", ".join(f"{name}: {mesh.shape[name]} {kind.name}" for name, kind in axes) + ")"


def _without(part: Any, axis: str | None) -> Any:
    """One entry of a PartitionSpec without ``axis``."""
    if part == axis:
        return None
    if isinstance(part, tuple):
        left = tuple(name for name in part if name != axis)
        return left[0] if len(left) == 1 else (left or None)
    return part
