"""The mesh of a run that names none: a rule from shapes, counts and the model's equations, never from timing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from ppleffects.effects._jax import Jaxpr, bodies, interpreted_effect

ROWS = "data"  # the axis of rows
# A gradient reads the data some three times: 256 MiB take 0.3 ms at 3 TB/s, the sum over devices that sharded rows need
# in each step 0.02 to 0.1 ms. With fewer data the sum weighs, and chains on devices of their own need none.
MIN_BYTES = 256 * 2**20
# So many times larger than what is summed must the data be: devices talk at a tenth of the speed at which they read.
MIN_RATIO = 32
# Devices of one CPU share cores and memory: four chains of a logistic regression (20,000 x 20) took 0.37 ms a leapfrog
# on one of them and 0.48 ms over two, on two cores.
SHARING_CORES = ("cpu",)
# What a partitioned gradient holds where it does more with sharded rows than sum over them.
MOVING = ("all-gather", "all-to-all", "collective-permute", " while(")


class Choice(NamedTuple):
    """What is spread over how many devices.

    Attributes:
        num_devices: devices that take part; one means JAX's default device.
        num_rows: length of the leading axis of the arrays whose rows are spread; None where chains are.
        reason: why, for the user.
    """

    num_devices: int
    num_rows: int | None
    reason: str


class ArraySize(NamedTuple):
    """An array among the data."""

    shape: tuple[int, ...]
    num_bytes: int


def choose(
    data: Sequence[ArraySize], gradient_bytes: int, num_chains: int, num_devices: int, *, rows_move: bool = False
) -> Choice:
    """What to spread over devices: rows of data that weigh, else chains, in groups of one size.

    Args:
        data: the arrays that the model reads.
        gradient_bytes: size of one chain's gradient.
        num_chains: number of chains.
        num_devices: number of devices, at least 1.
        rows_move: whether a gradient does more with rows on several devices than sum over them.
    """
    if num_devices == 1:
        return Choice(1, None, "there is no other")
    num_rows, weight = _heaviest_rows(data)
    if weight < MIN_BYTES:
        reason = f"the data ({_size(sum(array.num_bytes for array in data))}) are small"
    elif num_rows % num_devices:
        reason = f"{num_rows} rows ({_size(weight)}) do not divide over {num_devices} devices"
    elif weight < MIN_RATIO * gradient_bytes * num_chains:
        reason = f"the gradients ({_size(gradient_bytes * num_chains)}) are large to be summed over devices"
    elif rows_move:
        reason = f"rows ({_size(weight)}) would move among devices in each step"
    else:
        return Choice(num_devices, num_rows, f"their {num_rows} rows ({_size(weight)}) weigh")
    groups = max(n for n in range(1, min(num_chains, num_devices) + 1) if num_chains % n == 0)
    if groups == 1:
        reason = f"{num_chains} chain{'s' * (num_chains > 1)} cannot be split evenly, and {reason}"
    return Choice(groups, None, reason)


def default_mesh(target: Any, chain_axis: str, num_chains: int) -> tuple[Mesh | None, Choice]:
    """The mesh on which a target runs that names none, None for JAX's default device, and the choice behind it."""
    reason = _stays(target)
    if reason is not None:
        return None, Choice(1, None, reason)
    if jax.process_count() > 1:
        return _mesh_of_processes(chain_axis, num_chains)
    devices = jax.devices()
    types = [jax.typeof(leaf) for leaf in {id(leaf): leaf for leaf in jax.tree.leaves(target)}.values()]
    data = [ArraySize(type_.shape, type_.size * type_.dtype.itemsize) for type_ in types]
    gradient_bytes = sum(type_.size * type_.dtype.itemsize for type_ in target.position_type.values())
    choice = choose(data, gradient_bytes, num_chains, len(devices))
    if choice.num_rows is not None and _rows_move(target, choice.num_rows, num_chains, _mesh(devices, ROWS)):
        choice = choose(data, gradient_bytes, num_chains, len(devices), rows_move=True)
    if choice.num_devices == 1:
        return None, choice
    return _mesh(devices[: choice.num_devices], chain_axis if choice.num_rows is None else ROWS), choice


def _mesh_of_processes(chain_axis: str, num_chains: int) -> tuple[Mesh, Choice]:
    """Chains over as many devices of each process as they can be split over evenly, and over one at least."""
    own = [[d for d in jax.devices() if d.process_index == process] for process in range(jax.process_count())]
    limit = 1 if jax.default_backend() in SHARING_CORES else min(map(len, own))
    each = max((n for n in range(1, limit + 1) if num_chains % (n * len(own)) == 0), default=1)
    devices = [device for devices in own for device in devices[:each]]
    return _mesh(devices, chain_axis), Choice(len(devices), None, f"{len(own)} processes share them out")


def row_sharding(leaf: Any, num_rows: int, mesh: Mesh) -> NamedSharding:
    """How an array lies on the mesh of rows: along its leading axis where this is that of the rows, else whole."""
    aligned = np.ndim(leaf) > 0 and np.shape(leaf)[0] == num_rows
    return NamedSharding(mesh, PartitionSpec(ROWS) if aligned else PartitionSpec())


def _heaviest_rows(data: Sequence[ArraySize]) -> tuple[int, int]:
    """The length of the leading axis that most bytes share, and these bytes."""
    weights = {0: 0}
    for array in data:
        if array.shape:
            weights[array.shape[0]] = weights.get(array.shape[0], 0) + array.num_bytes
    return max(weights.items(), key=lambda item: item[1])


def _size(num_bytes: int) -> str:
    """Bytes in decimal units."""
    units = {"GB": 1e9, "MB": 1e6, "kB": 1e3}
    unit = next((unit for unit, size in units.items() if num_bytes >= size), None)
    return f"{num_bytes} B" if unit is None else f"{num_bytes / units[unit]:.3g} {unit}"


def _mesh(devices: Sequence[Any], axis: str) -> Mesh:
    return Mesh(np.array(devices), (axis,), axis_types=(AxisType.Auto,))


def _stays(target: Any) -> str | None:
    """Why a target runs where JAX runs it; None where it may run anywhere."""
    if jax.process_count() == 1 and jax.device_count() > 1 and jax.default_backend() in SHARING_CORES:
        return "the devices of a CPU share its cores"
    if jax.config.jax_default_device is not None:  # pyright: ignore[reportAttributeAccessIssue]
        return "jax.default_device names it"
    if any(isinstance(leaf, jax.Array) and leaf.committed for leaf in jax.tree.leaves(target)):
        return "the data were put there"
    if _is_bound(target.program.jaxpr, set()):
        return "the model names devices, or calls the host"
    return None


def _is_bound(jaxpr: Jaxpr, seen: set[int]) -> bool:
    """Whether equations name a mesh or devices, or have effects on the host; each body is walked once."""
    if id(jaxpr) in seen:
        return False
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        inner = bodies(eqn)
        if "callback" in eqn.params or (not inner and set(eqn.effects) - {interpreted_effect}):
            return True
        flat = [x for value in eqn.params.values() for x in (value if isinstance(value, tuple) else (value,))]
        if any(isinstance(x, Sharding | jax.Device) or _is_mesh(x) for x in flat):
            return True
        if any(_is_bound(body, seen) for body in inner):
            return True
    return False


def _is_mesh(x: Any) -> bool:
    return isinstance(x, Mesh | AbstractMesh) and not x.empty


def _rows_move(target: Any, num_rows: int, num_chains: int, mesh: Mesh) -> bool:
    """Whether the gradient, partitioned along the rows, moves them, or has loops, which may sum in each step."""

    def on_mesh(leaf: Any) -> jax.ShapeDtypeStruct:
        type_, sharding = jax.typeof(leaf), row_sharding(leaf, num_rows, mesh)
        return jax.ShapeDtypeStruct(type_.shape, type_.dtype, sharding=sharding, weak_type=type_.weak_type)

    whole = NamedSharding(mesh, PartitionSpec())
    positions = {
        name: jax.ShapeDtypeStruct((num_chains, *type_.shape), type_.dtype, sharding=whole)
        for name, type_ in target.position_type.items()
    }
    with jax.set_mesh(mesh):
        text = _gradients.lower(positions, jax.tree.map(on_mesh, target)).compile().as_text() or ""
    return any(sign in text for sign in MOVING)


@jax.jit
def _gradients(positions: dict[str, Any], target: Any) -> Any:
    """Log density and gradient of each chain, whole on every device."""
    gradient = jax.value_and_grad(lambda position, target: target.log_density(position))
    found = jax.vmap(gradient, in_axes=(0, None))(positions, target)
    return jax.lax.with_sharding_constraint(found, PartitionSpec())
