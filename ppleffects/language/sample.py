"""``sample``: a random value of the model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ppleffects.effects import effect_primitive
from ppleffects.language import distribution as protocol
from ppleffects.language.site import SiteParams, activate, bind_params, checked_mask, new_site, through_lane, value_type


def sample(
    name: str,
    dist: Any,
    *,
    dims: Sequence[str | None] | None = None,
    spec: PartitionSpec | None = None,
    mask: ArrayLike | None = None,
) -> Array:
    """A latent value ``x ~ dist`` of the model.

    Its log density ``dist.log_prob(x)`` is added to the model's. What the value is, an interpretation says: a draw
    (``ppl.simulate``), a given value (``ppl.log_density``), a chain's position (``ppl.mcmc``).

    Args:
        name: name of the site; each name stands once in a model.
        dist: a NumPyro or TFP distribution, or a pytree with the protocol of ``ppleffects.language.Distribution``.
        dims: names of the non-event axes of the value.
        spec: inside of ``jax.shard_map``: ``P("data")``, the site's pieces live on the shards of ``data``; ``P()``, one
            site, the same on all shards. Needed where the parameters of ``dist`` do not vary over a mesh axis.
        mask: where False, the site has log density 0.

    Returns:
        The value, of shape ``(*dist.batch_shape, *dist.event_shape)``.

    Raises:
        UnhandledEffectError: the model was called instead of being given to an interpretation.
        DistributionError: ``dist`` is no distribution, or no pytree.
        SpecError: ``spec`` does not fit the mesh.

    Example:
        >>> import ppleffects as ppl, numpyro.distributions as dist
        >>> def model():
        ...     return ppl.sample("x", dist.Normal(0.0, 1.0))
        >>> round(float(ppl.log_density(model)({"x": 0.0})), 5)
        -0.91894
    """
    return bind_sample(name, dist, dims=dims, spec=spec, mask=mask, predicted=False)


def bind_sample(name: str, dist: Any, *, dims: Any, spec: Any, mask: Any, predicted: bool) -> Array:
    """Binds the primitive; ``predicted`` marks an observation whose value was left open."""
    site = new_site(name, spec=spec, dims=dims, shape=(), predicted=predicted)
    arrays, structure = protocol.take_apart(dist, site.name, site.source)
    fields = {"shape": protocol.shape(dist), "event_dim": len(protocol.event_shape(dist)), "structure": structure}
    return rebind_sample(site.replace(**fields), protocol.dtype(dist), arrays, mask)


def rebind_sample(site: SiteParams, dtype: Any, arrays: Sequence[Any], mask: Any) -> Array:
    """Binds the primitive with parameters that are known already."""
    mask = checked_mask(site, mask)
    operands = [*arrays] if mask is None else [*arrays, mask]
    site = site.replace(masked=mask is not None)
    return sample_p.bind(*operands, dtype=jnp.dtype(dtype), **bind_params(site))[0]


def _abstract(*operands, site, dtype, **_):
    return [value_type(site, dtype, operands)]


def _batch(lane, operands, *, site, dtype, **_):
    return through_lane(lambda *xs, **params: sample_p.bind(*xs, dtype=dtype, **params), lane, operands, site), [0]


sample_p = effect_primitive("sample", _abstract, _batch, activate)
