"""Where the sites of a traced model stand, and how the value of each is laid out over scans, vmaps and shards."""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from ppleffects.effects import _jax
from ppleffects.effects._jax import Jaxpr, JaxprEqn
from ppleffects.errors import SpecError
from ppleffects.language import SiteParams, blocked_p, deterministic_p, factor_p, observe_p, sample_p
from ppleffects.language import distribution as protocol

KINDS = {sample_p: "sample", observe_p: "observe", factor_p: "factor", deterministic_p: "deterministic"}
_FLOW = {**{primitive: name for name, primitive in _jax.CONTROL_FLOW.items()}, blocked_p: "blocked"}


@dataclasses.dataclass(frozen=True)
class Step:
    """One equation around a site: its kind, and which of its bodies holds the site."""

    kind: str
    eqn: JaxprEqn
    branch: int

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes that a shard_map makes manual."""
        return frozenset(self.eqn.params["newly_manual_axes"]) if self.kind == "shard_map" else frozenset()

    @property
    def predicate_axes(self) -> frozenset[str]:
        """The mesh axes over which the predicate of a cond or while varies."""
        if self.kind in ("cond", "lane_cond"):
            return _jax.varying(_jax.aval_of(self.eqn.invars[0]))
        if self.kind == "while":
            return _jax.varying(_jax.aval_of(self.eqn.params["cond_jaxpr"].outvars[0]))
        return frozenset()

    @property
    def line(self) -> str:
        """``file.py:line`` of the equation."""
        return _jax.equation_line(self.eqn)

    def __str__(self) -> str:
        params = self.eqn.params
        detail = {
            "scan": lambda: str(params["length"]),
            "cond": lambda: f"branch {self.branch}",
            "lane_cond": lambda: f"branch {self.branch}",
            "jit": lambda: str(params["name"]),
            "blocked": lambda: str(params["blocks"].rows),
            "shard_map": lambda: ", ".join(f"{a}: {params['mesh'].shape[a]}" for a in self.mesh_order(self.axes)),
        }.get(self.kind)
        name = "cond" if self.kind == "lane_cond" else self.kind
        return name if detail is None else f"{name}[{detail()}]"

    def mesh_order(self, axes: frozenset[str]) -> tuple[str, ...]:
        """Sorts axes as the mesh of this shard_map has them."""
        return tuple(a for a in self.eqn.params["mesh"].axis_names if a in axes)

    def mesh_size(self, axes: tuple[str, ...]) -> int:
        """The number of shards along ``axes``."""
        return math.prod(self.eqn.params["mesh"].shape[a] for a in axes)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How the pieces of a site join at one shard_map.

    Attributes:
        joins: pairs of an axis, counted from the end of the non-event axes (1 is the last), and the mesh axes along it.
        stacked: whether the piece has no such axis, so that one is made for the joined value.
    """

    joins: tuple[tuple[int, tuple[str, ...]], ...] = ()
    stacked: bool = False

    def spec(self, ndim: int, event_dim: int) -> PartitionSpec:
        """The partition spec of a value with ``ndim`` axes, ``event_dim`` of them event axes."""
        entries: list[Any] = [None] * ndim
        for from_end, axes in self.joins:
            entries[ndim - event_dim - from_end] = axes
        return PartitionSpec(*entries)


@dataclasses.dataclass(frozen=True)
class Occurrence:
    """A site where it stands: its equation, and the equations around it, outermost first."""

    kind: str
    eqn: JaxprEqn
    path: tuple[Step, ...]

    @property
    def site(self) -> SiteParams:
        """The parameters of the site."""
        return self.eqn.params["site"]

    @property
    def dtype(self) -> Any:
        """The dtype of the value."""
        operand = self.eqn.outvars[0] if self.eqn.outvars else self.eqn.invars[0]
        return _jax.aval_of(operand).dtype

    @property
    def operand_axes(self) -> frozenset[str]:
        """The mesh axes over which the site's operands vary."""
        return frozenset().union(*(_jax.varying(v.aval) for v in self.eqn.invars))

    @property
    def predicate_axes(self) -> frozenset[str]:
        """The mesh axes over which it varies whether the site is reached."""
        return frozenset().union(*(step.predicate_axes for step in self.path))

    @property
    def axes(self) -> frozenset[str]:
        """The mesh axes over which the site varies: its pieces are different there."""
        own = frozenset().union(*(step.axes for step in self.path))
        if self.site.spec is not None:
            return _jax.spec_axes(self.site.spec) | (self.operand_axes - own)
        return self.operand_axes | self.predicate_axes

    @property
    def shards(self) -> list[int]:
        """Positions of the shard_maps in the path."""
        return [i for i, step in enumerate(self.path) if step.kind == "shard_map"]

    def placement(self, position: int) -> Placement:
        """How the pieces join at the shard_map that stands at ``position`` in the path."""
        step, inner = self.path[position], [i for i in self.shards if i > position]
        axes = self.axes & step.axes
        if not axes:
            return Placement()
        stacked = sum(self.placement(i).stacked for i in inner)
        lanes = sum(lane.depth <= len(inner) for lane in self.site.lanes)
        count = lanes + len(self.site.batch_shape) + stacked
        joins = []
        for index, entry in enumerate(self.site.spec or (tuple(axes),)):
            here = step.mesh_order(axes & _jax.spec_axes(PartitionSpec(entry)))
            if not here:
                continue
            if index >= max(count, 1):
                raise SpecError(
                    f"spec= shards axis {index} of a site whose piece has {count} non-event axes",
                    site=self.site.name,
                    source=self.site.source,
                    expected="mesh axes along non-event axes alone",
                    found=f"spec={self.site.spec}, piece of shape {self.site.full_shape}",
                    fix='spec=P("axis"): the pieces join along the first non-event axis, or along a new one',
                )
            joins.append((max(count, 1) - index, here))
        return Placement(tuple(joins), stacked=count == 0)

    def layout(self) -> tuple[tuple[int, ...], tuple[str | None, ...]]:
        """The shape of the whole value, and the names of its non-event axes."""
        site = self.site
        sizes = [*(lane.size for lane in site.lanes), *site.batch_shape]
        names: list[str | None] = [*(lane.name for lane in site.lanes), *[None] * len(site.batch_shape)]
        for position in reversed(self.shards):
            step, placement = self.path[position], self.placement(position)
            if placement.stacked:
                sizes.append(1)
                names.append(None)
            for from_end, axes in placement.joins:
                sizes[-from_end] *= step.mesh_size(axes)
                names[-from_end] = names[-from_end] or (axes[0] if len(axes) == 1 else None)
        if site.dims is not None:
            if len(site.dims) > len(sizes):
                raise SpecError(
                    "dims= names more axes than the site has",
                    site=site.name,
                    source=site.source,
                    expected=f"at most {len(sizes)} names, for non-event axes of shape {tuple(sizes)}",
                    found=f"dims={site.dims}",
                    fix="name non-event axes alone, the last of them last",
                )
            start = len(sizes) - len(site.dims)
            names[start:] = [d or n for d, n in zip(site.dims, names[start:], strict=True)]
        scans = [step.eqn.params["length"] for step in self.path if step.kind == "scan"]
        return (*scans, *sizes, *site.event_shape), (*[None] * len(scans), *names)

    def abstract_distribution(self) -> Any:
        """The distribution with abstract parameters, or None."""
        structure = self.site.structure
        if structure is None:
            return None
        avals = [_jax.aval_of(v) for v in self.eqn.invars][: structure.num_arrays]
        shapes = [
            jax.ShapeDtypeStruct(a.shape[sum(lane.mapped[i] for lane in self.site.lanes) :], a.dtype)
            for i, a in enumerate(avals)
        ]
        try:
            abstract = structure.build(shapes)
        except (TypeError, ValueError):
            abstract = None
        if abstract is not None and (protocol.is_tfp(abstract) or protocol.support(abstract) is not None):
            return abstract
        # Some constructors (TFP's) and supports (Levy's) compute with their parameters, and want numbers.
        return structure.build(np.ones(s.shape, s.dtype) for s in shapes)


_found: weakref.WeakKeyDictionary[Jaxpr, tuple[Occurrence, ...]] = weakref.WeakKeyDictionary()


def occurrences(jaxpr: Jaxpr) -> tuple[Occurrence, ...]:
    """All sites in ``jaxpr`` and in the bodies within it, in the order of the program; each body is walked once."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    if jaxpr not in _found:
        _found[jaxpr] = tuple(_walk(jaxpr))
    return _found[jaxpr]


def _walk(jaxpr: Jaxpr) -> Iterator[Occurrence]:
    for eqn in jaxpr.eqns:
        if eqn.primitive in KINDS:
            yield Occurrence(KINDS[eqn.primitive], eqn, ())
        for branch, body in enumerate(_jax.bodies(eqn)):
            if _jax.has_effect(body):
                step = Step(_FLOW.get(eqn.primitive, str(eqn.primitive)), eqn, branch)
                for inner in occurrences(body):
                    yield dataclasses.replace(inner, path=(step, *inner.path))
