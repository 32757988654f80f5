"""``observe``: a value that was seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ppleffects.effects import effect_primitive
from ppleffects.errors import ShapeError
from ppleffects.language import distribution as protocol
from ppleffects.language.arguments import as_array
from ppleffects.language.sample import bind_sample
from ppleffects.language.site import SiteParams, activate, bind_params, checked_mask, new_site, through_lane


def observe(
    name: str,
    dist: Any,
    value: ArrayLike | None,
    *,
    mask: ArrayLike | None = None,
    dims: Sequence[str | None] | None = None,
    spec: PartitionSpec | None = None,
) -> Array:
    """An observation ``value ~ dist``: adds ``dist.log_prob(value)`` to the log density of the model.

    Args:
        name: name of the site; each name stands once in a model.
        dist: a distribution, as for ``sample``; it is broadcast to the value, never the value to it.
        value: what was seen, of shape ``(*batch, *dist.event_shape)``; None makes the site a latent, to be predicted.
        mask: where False, the entry counts 0, and neither it nor its gradient may spoil the others, NaN included.
        dims: names of the non-event axes.
        spec: inside of ``jax.shard_map``: ``P()`` says that a value typed as varying is equal on all shards and counts
            once; an axis says that the site counts on every shard of it.

    Returns:
        The value.

    Raises:
        ShapeError: the distribution is larger than the value, so that a term would count more than once.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist, jax.numpy as jnp
        >>> def model(y):
        ...     ppl.observe("y", dist.Normal(0.0, 1.0), y)
        >>> round(float(ppl.log_density(model)({}, jnp.zeros(2))), 5)
        -1.83788
    """
    if value is None:
        return bind_sample(name, dist, dims=dims, spec=spec, mask=mask, predicted=True)
    value = as_array(value, "observed value", name)
    site = new_site(name, spec=spec, dims=dims, shape=value.shape)
    arrays, structure = protocol.take_apart(dist, site.name, site.source)
    site = site.replace(event_dim=len(protocol.event_shape(dist)), structure=structure)
    _check_shape(site, dist)
    return rebind_observe(site, arrays, value, mask)


def rebind_observe(site: SiteParams, arrays: Sequence[Any], value: Array, mask: Any) -> Array:
    """Binds the primitive with parameters that are known already."""
    mask = checked_mask(site, mask)
    operands = [*arrays, value] if mask is None else [*arrays, value, mask]
    return observe_p.bind(*operands, **bind_params(site.replace(masked=mask is not None)))[0]


def _check_shape(site: SiteParams, dist: Any) -> None:
    shape = protocol.shape(dist)
    try:
        fits = jnp.broadcast_shapes(shape, site.shape) == site.shape and (
            len(site.shape) >= len(shape) and site.event_shape == protocol.event_shape(dist)
        )
    except ValueError:
        fits = False
    if not fits:
        raise ShapeError(
            "the distribution does not fit the observed value, and the value is never broadcast to it",
            site=site.name,
            source=site.source,
            expected=f"a value of shape {shape}, or with more leading axes (batch {tuple(dist.batch_shape)}, "
            f"event {tuple(dist.event_shape)})",
            found=f"a value of shape {site.shape}",
            fix="give parameters and value the same shape, as in observe(name, Normal(mu, 1.0), y) with "
            "mu.shape == y.shape",
        )


def _abstract(*operands, site, **_):
    return [operands[_value_at(site, operands)]]


def _batch(lane, operands, *, site, **_):
    mapped = lane.mapped[_value_at(site, operands)]
    return through_lane(observe_p.bind, lane, operands, site), [0 if mapped else None]


def _value_at(site, operands):
    return len(operands) - 1 - site.masked - site.scaled - site.conditional


observe_p = effect_primitive("observe", _abstract, _batch, activate)
