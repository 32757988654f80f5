"""What the four site primitives share: their parameters, their types, and how they pass a vmap."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec

from ppleffects.effects import Lane, _jax, mesh
from ppleffects.errors import PPLError, ShapeError, SpecError
from ppleffects.language.arguments import as_booleans, as_names
from ppleffects.language.distribution import Structure


@dataclasses.dataclass(frozen=True)
class SiteParams:
    """The parameters of a site's equation.

    Attributes:
        name: the site's name.
        source: ``file.py:line`` of the call.
        shape: shape of the value in one lane: its non-event axes, then ``event_dim`` event axes.
        event_dim: number of event axes.
        dims: names of the non-event axes, or None.
        spec: what the user said about the mesh axes, or None.
        lanes: the vmaps around the site, outermost first.
        structure: the static half of the distribution, if there is one.
        masked: whether an operand after those of the distribution and the value is a mask.
        scaled: whether an operand after the mask multiplies the log density.
        conditional: whether the last operand says if the site is reached, one boolean for each lane.
        predicted: whether this latent is an observation whose value was left open.
    """

    name: str
    source: str = dataclasses.field(repr=False)
    shape: tuple[int, ...]
    event_dim: int = 0
    dims: tuple[str | None, ...] | None = None
    spec: PartitionSpec | None = None
    lanes: tuple[Lane, ...] = ()
    structure: Structure | None = None
    masked: bool = False
    scaled: bool = False
    conditional: bool = False
    predicted: bool = False

    def replace(self, **fields: Any) -> SiteParams:
        """Returns a copy with some fields changed."""
        return dataclasses.replace(self, **fields)

    def distribution(self, arrays: Sequence[Any]) -> Any:
        """Puts the distribution together from its array leaves."""
        if self.structure is None:  # pragma: no cover - handlers ask only sites that have one
            raise PPLError("this site has no distribution", site=self.name, source=self.source)
        return self.structure.build(arrays)

    def with_operand(self, at: int, lanes: bool) -> SiteParams:
        """The parameters for one more operand at position ``at``, which has all lanes or none."""
        return self.replace(
            lanes=tuple(
                dataclasses.replace(lane, mapped=(*lane.mapped[:at], lanes, *lane.mapped[at:])) for lane in self.lanes
            )
        )

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The non-event axes in one lane."""
        return self.shape[: len(self.shape) - self.event_dim]

    @property
    def event_shape(self) -> tuple[int, ...]:
        """The event axes."""
        return self.shape[len(self.batch_shape) :]

    @property
    def full_shape(self) -> tuple[int, ...]:
        """The shape of the value where the site stands: lanes first."""
        return (*(lane.size for lane in self.lanes), *self.shape)


def bind_params(site: SiteParams) -> dict[str, Any]:
    """The parameters to bind a site's primitive with; name and source stand apart, for JAX's printer and for errors."""
    return {"name": site.name, "source": site.source, "site": site}


def through_lane(
    bind: Callable[..., list[Array]], lane: Lane, operands: Sequence[Array], site: SiteParams
) -> list[Array]:
    """Binds a site again inside of one more vmap, whose lane becomes the outermost."""
    return bind(*operands, **bind_params(site.replace(lanes=(lane, *site.lanes))))


def activate(
    flag: Array, operands: Sequence[Any], *, site: SiteParams, **params: Any
) -> tuple[list[Any], dict[str, Any]]:
    """The rule for a branch that only some lanes of a vmap take: the site is reached where ``flag`` is True."""
    if site.conditional:
        return [*operands[:-1], operands[-1] & flag], {**params, "site": site}
    site = site.with_operand(len(operands), lanes=False).replace(conditional=True)
    return [*operands, flag], {**params, "site": site}


def over_lanes(fn: Callable[..., Any], lanes: Sequence[Lane], *, extra: int = 0) -> Callable[..., Any]:
    """Vmaps ``fn``, which speaks of one lane, over all lanes of a site.

    Args:
        fn: function of the site's operands, and of ``extra`` more arguments that have every lane.
        lanes: outermost first.
        extra: number of additional arguments.
    """
    for lane in reversed(lanes):
        in_axes = (*(0 if mapped else None for mapped in lane.mapped), *[0] * extra)
        fn = jax.vmap(fn, in_axes=in_axes, axis_size=lane.size)
    return fn


def new_site(name: str, *, spec: PartitionSpec | None, dims: Sequence[str | None] | None, **fields: Any) -> SiteParams:
    """Checks what every site is given and notes the line of the call.

    Raises:
        PPLError: the name is no string.
        ValuesError: ``dims`` are no names.
        SpecError: ``spec`` is no partition spec or names an axis that is not manual here.
    """
    source = _jax.current_line()
    if not isinstance(name, str) or not name:
        raise PPLError(
            "a site needs a name",
            source=source,
            expected="a string that is not empty",
            found=repr(name),
            fix='the name comes first, as in ppl.sample("x", distribution)',
        )
    _check_spec(name, source, spec)
    names = None if dims is None else as_names(dims, "dims=", name, optional=True)
    return SiteParams(name=name, source=source, spec=spec, dims=names, **fields)


def _check_spec(name: str, source: str, spec: PartitionSpec | None) -> None:
    if spec is None:
        return
    if not isinstance(spec, PartitionSpec):
        raise SpecError(
            "spec= is no partition spec",
            site=name,
            source=source,
            expected='spec=P() for one shared site, spec=P("data") for a site whose pieces live on the shards, '
            "with P = jax.sharding.PartitionSpec",
            found=repr(spec),
            fix="from jax.sharding import PartitionSpec as P",
        )
    manual = _jax.manual_axes()
    unknown = sorted(_jax.spec_axes(spec) - manual)
    if unknown:
        raise SpecError(
            f"spec= names the mesh axis '{unknown[0]}', which no shard_map around the site maps over",
            site=name,
            source=source,
            expected=f"one of the axes {sorted(manual)}" if manual else "a site inside of jax.shard_map",
            found=f"spec={spec}",
            fix="name an axis of the shard_map that holds the site, or leave spec= out outside of shard_map",
        )


def checked_mask(site: SiteParams, mask: Any) -> Array | None:
    """Returns a mask as booleans.

    Raises:
        DTypeError: it is not boolean.
        ShapeError: it does not broadcast to the non-event axes of the site; it may never enlarge it.
    """
    if mask is None:
        return None
    mask = as_booleans(mask, "mask", site.name)
    try:
        fits = jnp.broadcast_shapes(mask.shape, site.batch_shape) == site.batch_shape
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            "the mask does not fit the site",
            site=site.name,
            source=site.source,
            expected=f"a shape that broadcasts to the non-event axes {site.batch_shape}",
            found=f"{mask.shape}",
            fix="one entry for each event",
        )
    return mask


def value_type(site: SiteParams, dtype: Any, operands: Sequence[Any]) -> Any:
    """The type of a site's value: it varies over the axes of its operands and over those that ``spec=`` names."""
    axes = frozenset().union(*map(_jax.varying, operands))
    if _jax.checks_varying():
        axes |= _jax.spec_axes(site.spec) | frozenset(mesh.ambient_axes.value)
    return _jax.array_type(site.full_shape, dtype, axes)
