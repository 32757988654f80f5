"""The handlers of the four site primitives, written once for every interpretation of a model."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ppleffects.effects import HandlerResult, Interpreter, Lane, _jax, default_dispatcher, mesh
from ppleffects.errors import DistributionError, PPLError
from ppleffects.interpretations.blocks import blocked_rule
from ppleffects.interpretations.draw import draw
from ppleffects.interpretations.parts import Context, Record
from ppleffects.interpretations.shards import shard_map_rule
from ppleffects.language import (
    SiteParams,
    blocked_p,
    deterministic_p,
    factor_p,
    observe_p,
    over_lanes,
    sample_p,
)
from ppleffects.language import distribution as protocol
from ppleffects.language.distribution import Structure
from ppleffects.language.safe import with_safe_parameters


@dataclasses.dataclass(frozen=True)
class Reading:
    """How an interpretation reads the values of latents.

    Attributes:
        unconstrained: whether given values are unconstrained; the log-determinant of the map is then a part of the
            density.
        invert: whether to record unconstrained values in place of values.
    """

    unconstrained: bool = False
    invert: bool = False


GIVEN = Reading()


def interpreter(reading: Reading, label: str) -> Interpreter[Context]:
    """The interpreter of models that reads latents in one way."""
    return Interpreter(
        default_dispatcher().extended(
            {
                sample_p: functools.partial(_sample, reading),
                observe_p: _observe,
                factor_p: _factor,
                deterministic_p: _deterministic,
                _jax.shard_map_p: shard_map_rule,
                blocked_p: blocked_rule,
            }
        ),
        label,
    )


@dataclasses.dataclass(frozen=True)
class _Operands:
    """The operands of a site's equation by role.

    Attributes:
        site: the site's parameters.
        arrays: the array leaves of its distribution.
        value: the observed or computed value, if there is one.
        mask: which entries count, or None for all.
        scale: what the log density is multiplied by, or None.
        active: whether the site is reached, or None if it is in every lane.
    """

    site: SiteParams
    arrays: list[Any]
    value: Any = None
    mask: Any = None
    scale: Any = None
    active: Any = None

    def mapped(self, operand: int) -> list[bool]:
        """Which lanes an operand has."""
        return [lane.mapped[operand] for lane in self.site.lanes]

    def whole_value(self) -> Array:
        """The value with all lanes."""
        mapped = self.mapped(len(self.arrays))
        return _with_all_lanes(self.value, mapped, self.site.full_shape)

    def keep(self) -> list[tuple[Any, list[bool]]]:
        """The booleans that say which entries count, each with the lanes it has."""
        at = len(self.site.lanes[0].mapped) if self.site.lanes else 0
        found = []
        if self.mask is not None:
            found.append((self.mask, self.mapped(at - 1 - self.site.scaled - self.site.conditional)))
        if self.active is not None:
            found.append((self.active, self.mapped(at - 1)))
        return found

    def scaled(self, terms: Array) -> Array:
        """Pointwise terms, lanes in front, times the scale."""
        if self.scale is None:
            return terms
        count = len(self.site.lanes)
        if not count:
            return terms * self.scale
        mapped = self.mapped(len(self.site.lanes[0].mapped) - 1 - self.site.conditional)
        inner = jnp.shape(self.scale)[sum(mapped) :]
        scale = _with_all_lanes(self.scale, mapped, (*terms.shape[:count], *inner))
        return terms * scale.reshape(*terms.shape[:count], *[1] * (terms.ndim - count - len(inner)), *inner)

    def reached(self, shape: tuple[int, ...]) -> Array | None:
        """Whether the site is reached, broadcast to ``shape``, which has the lanes in front; None: everywhere."""
        if self.active is None:
            return None
        count = len(self.site.lanes)
        lanes = _with_all_lanes(self.active, self.mapped(len(self.site.lanes[0].mapped) - 1), shape[:count])
        return jnp.broadcast_to(lanes.reshape(*lanes.shape, *[1] * (len(shape) - count)), shape)

    def where_reached(self, x: Array, otherwise: float) -> Array:
        """``x`` where the site is reached."""
        reached = self.reached(x.shape)
        return x if reached is None else jnp.where(reached, x, jnp.asarray(otherwise, x.dtype))

    def record(self, value: Array, log_prob: Array | None) -> Record:
        """What is recorded: where the site is not reached, its value is NaN, or 0 if it is an integer."""
        missing = jnp.nan if jnp.issubdtype(value.dtype, jnp.inexact) else 0
        shape = value.shape if log_prob is None else log_prob.shape
        return Record(self.where_reached(value, missing), log_prob, self.reached(shape))


def _operands(site: SiteParams, invals: list[Any], *, valued: bool) -> _Operands:
    at = len(invals) - site.masked - site.scaled - site.conditional - valued
    return _Operands(
        site,
        list(invals[:at]),
        invals[at] if valued else None,
        invals[at + valued] if site.masked else None,
        invals[at + valued + site.masked] if site.scaled else None,
        invals[-1] if site.conditional else None,
    )


def _sample(reading, interpreter, ctx: Context, eqn, invals) -> HandlerResult[Context]:
    site: SiteParams = eqn.params["site"]
    operands = _operands(site, invals, valued=False)
    axes = _site_axes(site, invals, ctx)
    given = ctx.inputs.values.get(site.name)
    log_det = None
    if given is None:
        value = _drawn(ctx, operands, axes)
    elif reading.unconstrained:
        value, log_det = _through_bijector(operands, lambda bijector, u: bijector.forward(u), given)
    else:
        value = given
    value = _like(eqn.outvars[0].aval, jnp.asarray(value, eqn.params["dtype"]))
    log_prob = _log_prob(operands, value, inside=given is None or reading.unconstrained)
    recorded = value
    if reading.invert:
        recorded = _through_bijector(operands, lambda bijector, x: bijector.inverse(x), value)
    ctx = ctx.written(site.name, operands.record(recorded, log_prob))
    term = jnp.sum(log_prob)
    if log_det is not None:
        term = term + jnp.sum(operands.where_reached(log_det, 0.0))
    return HandlerResult(_count(ctx, site, term, axes), [_harmless(operands, value)])


def _harmless(operands: _Operands, value: Array) -> Array:
    """The value as the branch sees it: in lanes that are not in the branch, a point of the support.

    What the branch computes there is dropped, but a NaN among the given values would spoil gradients on its way.
    """
    reached = operands.reached(value.shape)
    if reached is None:
        return value
    safe = _in_lanes(operands, protocol.feasible, value)
    return jnp.where(reached, value, jax.lax.stop_gradient(safe))


def _drawn(ctx: Context, operands: _Operands, axes: frozenset[str]) -> Array:
    site = operands.site
    if ctx.draws is None:  # pragma: no cover - values or a key are given, and values are checked first
        raise PPLError(
            "no value is given for this latent",
            site=site.name,
            source=site.source,
            expected="a position with an entry for every latent",
            found=f"none for '{site.name}'",
            fix="Target.init(key) draws a position, Target.unconstrain(values) makes one from values",
        )
    try:
        value = draw(ctx.draws, site, operands.arrays, axes)
    except NotImplementedError as error:
        raise DistributionError(
            "the distribution cannot be drawn from",
            site=site.name,
            source=site.source,
            expected="a distribution whose sample() is implemented",
            found=type(site.distribution(operands.arrays)).__name__,
            fix="give the site a value (ppl.evaluate, ppl.condition), or use a distribution with a sampler",
        ) from error
    if value.shape != site.full_shape:
        raise _wrong_shape("sample", operands, value.shape, site.full_shape)
    return value


def _wrong_shape(method: str, operands: _Operands, found: Any, expected: Any) -> DistributionError:
    site = operands.site
    count = len(site.lanes)
    return DistributionError(
        f"{method} of the distribution returns an array of the wrong shape",
        site=site.name,
        source=site.source,
        expected=f"{tuple(expected[count:])}, by its batch_shape and event_shape",
        found=f"{tuple(found[count:])} from {type(site.distribution(operands.arrays)).__name__}.{method}",
        fix="one entry for each event (log_prob), or batch axes and event axes (sample)",
    )


def _observe(interpreter, ctx: Context, eqn, invals) -> HandlerResult[Context]:
    site: SiteParams = eqn.params["site"]
    operands = _operands(site, invals, valued=True)
    axes = _site_axes(site, invals, ctx)
    whole = operands.whole_value()
    log_prob = _log_prob(operands, whole)
    if ctx.records is not None:
        ctx = ctx.written(site.name, _claimed(operands.record(whole, log_prob), ctx, axes))
    return HandlerResult(_count(ctx, site, jnp.sum(log_prob), axes), [operands.value])


def _factor(interpreter, ctx: Context, eqn, invals) -> HandlerResult[Context]:
    site: SiteParams = eqn.params["site"]
    operands = _operands(site, invals, valued=True)
    terms = operands.where_reached(operands.scaled(operands.whole_value()), 0.0)
    return HandlerResult(_count(ctx, site, jnp.sum(terms), _site_axes(site, invals, ctx)), [])


def _deterministic(interpreter, ctx: Context, eqn, invals) -> HandlerResult[Context]:
    site: SiteParams = eqn.params["site"]
    operands = _operands(site, invals, valued=True)
    if ctx.records is not None:
        record = operands.record(operands.whole_value(), None)
        ctx = ctx.written(site.name, _claimed(record, ctx, _site_axes(site, invals, ctx)))
    return HandlerResult(ctx, [operands.value])


def _with_all_lanes(value: Array, mapped: list[bool], shape: tuple[int, ...]) -> Array:
    """Broadcasts a value to the lanes that it does not have."""
    missing = tuple(i for i, m in enumerate(mapped) if not m)
    if not missing:
        return jnp.asarray(value)
    return jnp.broadcast_to(jnp.expand_dims(value, missing), shape)


def _like(aval: Any, value: Array) -> Array:
    """Gives a value the type that the traced program has for it."""
    value = mesh.cast_varying(value, _jax.varying(aval))
    return mesh.placed_like(value, aval)


def _log_prob(operands: _Operands, value: Array, *, inside: bool = False) -> Array:
    """The pointwise log density: the value's non-event axes, lanes in front; entries that do not count are 0."""
    site, at = operands.site, len(operands.arrays)
    keeps = operands.keep()
    lanes = tuple(
        Lane(lane.name, lane.size, (*lane.mapped[:at], True, *(has[i] for _, has in keeps)))
        for i, lane in enumerate(site.lanes)
    )
    density = _density(site.structure, site.event_dim, lanes, inside)
    try:
        result = density(*operands.arrays, value, *(k for k, _ in keeps))
    except NotImplementedError as error:
        raise DistributionError(
            "mask=, and a site that only some lanes of a vmap reach, need a point of the distribution's support",
            site=site.name,
            source=site.source,
            expected="a distribution with a support",
            found=f"{type(site.distribution(operands.arrays)).__name__} without one",
            fix="give its class a property support, a constraint of numpyro.distributions.constraints",
        ) from error
    shape = site.full_shape[: len(site.lanes) + len(site.batch_shape)]
    if result.ndim > len(shape) or jnp.broadcast_shapes(result.shape, shape) != shape:
        raise _wrong_shape("log_prob", operands, result.shape, shape)
    return operands.scaled(jnp.broadcast_to(result, shape) if result.ndim < len(shape) else result)


@functools.lru_cache(maxsize=4096)
def _density(structure: Structure, event_dim: int, lanes: tuple[Lane, ...], inside: bool) -> Callable[..., Array]:
    """The log density of a kind of distribution as a function of its arrays, the value and what to keep.

    It is traced once for all sites of one kind and shape, and its equations are put in where it is called.
    """
    at = structure.num_arrays

    def one(*args):
        arrays, value, *keeps = args[:at], *args[at:]
        dist = structure.build(arrays)
        if not keeps:
            return protocol.log_prob(dist, value, inside=inside)
        batch = value.shape[: value.ndim - event_dim]
        keep = functools.reduce(jnp.logical_and, [jnp.broadcast_to(k, batch) for k in keeps])
        over_event = keep.reshape(*batch, *[1] * event_dim)
        dist = with_safe_parameters(dist, keep)
        safe = jnp.where(over_event, value, protocol.feasible(dist, value))
        return jnp.where(keep, protocol.log_prob(dist, safe, inside=inside), 0.0)

    return jax.jit(over_lanes(one, lanes), inline=True)


def _in_lanes(operands: _Operands, fn: Callable[..., Any], x: Array) -> Any:
    """``fn`` of the distribution and the entry of ``x`` of each lane; ``x`` has all lanes."""
    site = operands.site
    lanes = [Lane(lane.name, lane.size, lane.mapped[: len(operands.arrays)]) for lane in site.lanes]

    def one(*args):
        *arrays, x = args
        return fn(site.distribution(arrays), x)

    # Arguments of its own: TFP's bijectors remember results by the identity of their input, and the branches of a cond
    # may be given the same one.
    return jax.jit(over_lanes(one, lanes, extra=1), inline=True)(*operands.arrays, x)


def _through_bijector(operands: _Operands, fn: Callable[..., Any], x: Array) -> Any:
    site = operands.site
    try:
        return _in_lanes(operands, lambda dist, x: fn(protocol.bijector(dist), x), x)
    except NotImplementedError as error:
        raise DistributionError(
            "no map from the reals onto the support of this latent is known",
            site=site.name,
            source=site.source,
            expected="a support that numpyro.distributions.biject_to knows",
            found=type(site.distribution(operands.arrays)).__name__,
            fix="write it in other coordinates (ppl.reparam), or give the site a value (ppl.condition)",
        ) from error


def _site_axes(site: SiteParams, operands: list[Any], ctx: Context) -> frozenset[str]:
    """The mesh axes over which a site varies: its types say so, or ``spec=`` does."""
    varying = frozenset().union(*map(_jax.varying, operands))
    if site.spec is None:
        return varying
    return _jax.spec_axes(site.spec) | (varying - frozenset(ctx.totals.manual))


def _count(ctx: Context, site: SiteParams, term: Array, axes: frozenset[str]) -> Context:
    """Adds a term to the total of those axes over which its site varies; a replica counts by its mean over shards."""
    if site.spec is not None:
        term = _mean_over_replicas(term, ctx, axes)
    if _jax.checks_varying():
        term = mesh.cast_varying(term, axes)
    return ctx.added(term, axes)


def _mean_over_replicas(x: Array, ctx: Context, axes: frozenset[str]) -> Array:
    candidates = _jax.varying(x) if _jax.checks_varying() else frozenset(ctx.totals.manual)
    equal = tuple(sorted((candidates & frozenset(ctx.totals.manual)) - axes))
    return jax.lax.pmean(x, equal) if equal else x


def _claimed(record: Record, ctx: Context, axes: frozenset[str]) -> Record:
    """Types a record that ``spec=`` claims to be equal on the shards as equal."""
    manual = frozenset(ctx.totals.manual)
    return jax.tree.map(lambda x: mesh.of_first_shard(x, (_jax.varying(x) & manual) - axes), record)
