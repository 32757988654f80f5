"""``deterministic``: a computed value that is recorded."""

from __future__ import annotations

from collections.abc import Sequence

from jax import Array
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike

from ppleffects.effects import effect_primitive
from ppleffects.language.arguments import as_array
from ppleffects.language.site import activate, bind_params, new_site, through_lane


def deterministic(
    name: str, value: ArrayLike, *, dims: Sequence[str | None] | None = None, spec: PartitionSpec | None = None
) -> Array:
    """Records a computed value under a name, in traces and in the posterior.

    Args:
        name: name of the site; each name stands once in a model.
        value: an array of any shape.
        dims: names of its axes.
        spec: as for ``observe``: ``P()`` says that a value typed as varying is equal on all shards.

    Returns:
        The value.

    Example:
        >>> import ppleffects as ppl
        >>> def model():
        ...     ppl.deterministic("two", 2.0)
        >>> float(ppl.evaluate(model)({}).values["two"])
        2.0
    """
    value = as_array(value, "value", name)
    site = new_site(name, spec=spec, dims=dims, shape=value.shape)
    return deterministic_p.bind(value, **bind_params(site))[0]


def _batch(lane, operands, *, site, **_):
    return through_lane(deterministic_p.bind, lane, operands, site), [0 if lane.mapped[0] else None]


deterministic_p = effect_primitive("deterministic", lambda value, *_, **__: [value], _batch, activate)
