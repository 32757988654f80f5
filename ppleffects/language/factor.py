"""``factor``: a term of the log density."""

from __future__ import annotations

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ppleffects.effects import effect_primitive
from ppleffects.language.arguments import as_real
from ppleffects.language.site import activate, bind_params, new_site, through_lane


def factor(name: str, log_factor: ArrayLike, *, spec: PartitionSpec | None = None) -> None:
    """Adds ``log_factor`` to the log density of the model; an array is summed.

    Args:
        name: name of the site; each name stands once in a model.
        log_factor: the logarithm of a factor of the density, of any shape.
        spec: as for ``observe``.

    Example:
        >>> import ppleffects as ppl, jax.numpy as jnp
        >>> def model():
        ...     ppl.factor("penalty", jnp.array([-1.0, -2.0]))
        >>> float(ppl.log_density(model)({}))
        -3.0
    """
    value = as_real(log_factor, "factor", name)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        value = value.astype(float)
    site = new_site(name, spec=spec, dims=None, shape=value.shape)
    factor_p.bind(value, **bind_params(site))


def _batch(lane, operands, *, site, **_):
    return through_lane(factor_p.bind, lane, operands, site), []


factor_p = effect_primitive("factor", lambda *_, **__: [], _batch, activate)
