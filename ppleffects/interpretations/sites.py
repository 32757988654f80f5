"""``sites``: what a model holds, described before anything is computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, override

from jax.sharding import PartitionSpec

from ppleffects.interpretations.layout import Occurrence
from ppleffects.interpretations.program import Program, trace_model
from ppleffects.language import distribution as protocol


@dataclasses.dataclass(frozen=True)
class Site:
    """What is known of a site before anything is computed.

    Attributes:
        name: full name.
        kind: ``"sample"``, ``"observe"``, ``"factor"`` or ``"deterministic"``.
        dist: the distribution, its parameters abstract; None for factors and deterministics.
        shape: shape of the whole value: scans, vmaps (outermost first), batch axes, event axes; shards joined.
        dtype: dtype of the value.
        support: the set of values with positive density; None for factors and deterministics.
        event_dim: number of event axes.
        dims: names of the non-event axes, None where unnamed.
        spec: how the value lies on the mesh.
        axes: the mesh axes over which it varies.
        path: the control flow around it, outermost first, as text.
        source: ``file.py:line``.
        predicted: whether it is an observation whose value was left open.
    """

    name: str
    kind: str
    dist: Any
    shape: tuple[int, ...]
    dtype: Any
    support: Any
    event_dim: int
    dims: tuple[str | None, ...]
    spec: PartitionSpec
    axes: tuple[str, ...]
    path: tuple[str, ...]
    source: str
    predicted: bool = False

    @property
    def is_discrete(self) -> bool:
        """Whether its distribution has a mass function."""
        return self.dist is not None and protocol.is_discrete(self.dist)


def describe(occurrence: Occurrence) -> Site:
    """The public description of a site."""
    site = occurrence.site
    shape, dims = occurrence.layout()
    dist = occurrence.abstract_distribution()
    spec: list[Any] = [None] * len(shape)
    for position in occurrence.shards:
        for from_end, axes in occurrence.placement(position).joins:
            at = len(shape) - site.event_dim - from_end
            spec[at] = axes if spec[at] is None else (*spec[at], *axes)
    lanes = tuple(f"vmap[{lane.name or lane.size}]" for lane in site.lanes)
    return Site(
        name=site.name,
        kind=occurrence.kind,
        dist=dist,
        shape=shape,
        dtype=occurrence.dtype,
        support=None if dist is None else protocol.support(dist),
        event_dim=site.event_dim,
        dims=dims,
        spec=PartitionSpec(*(s[0] if s is not None and len(s) == 1 else s for s in spec)),
        axes=tuple(sorted(occurrence.axes)),
        path=(*map(str, occurrence.path), *lanes),
        source=site.source,
        predicted=site.predicted,
    )


class Sites(dict[str, Site]):
    """Sites by name; printed, a table of them."""

    @override
    def __repr__(self) -> str:
        head = ("name", "kind", "distribution", "shape", "support", "dims", "spec", "inside", "line")
        rows = [head, *(_row(site) for site in self.values())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)
        return "\n".join(lines)


def _row(site: Site) -> tuple[str, ...]:
    return (
        site.name,
        site.kind,
        "" if site.dist is None else type(site.dist).__name__,
        str(site.shape),
        "" if site.support is None else _support(site.support),
        ", ".join(d or "-" for d in site.dims),
        str(site.spec) if site.axes else "",
        " > ".join(site.path),
        site.source,
    )


def _support(constraint: Any) -> str:
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    return type(constraint).__name__.strip("_").lower()


def sites_of(program: Program) -> Sites:
    """The sites of a traced model; branches of a cond that share a name are described by the first."""
    found = Sites()
    for occurrence in program.sites:
        found.setdefault(occurrence.site.name, describe(occurrence))
    return found


def sites(model: Callable[..., Any]) -> Callable[..., dict[str, Site]]:
    """Returns ``(*args, **kwargs) -> {name: Site}``: all sites of the model, in order, without running it.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist, jax
        >>> def model():
        ...     jax.vmap(lambda _: ppl.sample("x", dist.Normal(0.0, 1.0)))(jax.numpy.zeros(3))
        >>> ppl.sites(model)()["x"].shape
        (3,)
    """

    def run(*args: Any, **kwargs: Any) -> dict[str, Site]:
        return sites_of(trace_model(model, args, kwargs).program)

    return run
