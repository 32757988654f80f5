"""Parameters of masked entries: they may be NaN, and are replaced by ones that do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from ppleffects.language.distribution import is_tfp


def with_safe_parameters(distribution: Any, keep: Array) -> Any:
    """Gives masked entries the parameters of an entry that counts, or, where none does, parameters of their domain.

    A masked entry's parameters may be NaN, and NaN times a zero cotangent is NaN. Only what is known to be a parameter
    with batch axes is changed: NumPyro says so by ``arg_constraints``, TFP by ``parameter_properties``.

    Args:
        distribution: a distribution.
        keep: which entries count, in the shape of the value without event axes.
    """
    leaves, tree = jax.tree.flatten(distribution)
    known = dict(_parameters(distribution, 0))
    return jax.tree.unflatten(tree, [_safe(x, keep, *known[id(x)]) if id(x) in known else x for x in leaves])


def _parameters(owner: Any, inner: int) -> Iterator[tuple[int, tuple[Any, int, int]]]:
    """For each parameter: its constraint, its event axes, and its batch axes that the whole does not have."""
    for value, constraint, event_dim in _own_parameters(owner):
        yield id(value), (constraint, event_dim, inner)
    members = owner.parameters if is_tfp(owner) else getattr(owner, "__dict__", {})
    for value in members.values():
        for child in value if isinstance(value, list | tuple) else (value,):
            if isinstance(child, dist.Distribution) or is_tfp(child):
                own, of_child = tuple(owner.batch_shape), tuple(child.batch_shape)
                more = max(len(of_child) - len(own), 0)
                if not more or of_child[: len(own)] == own:
                    yield from _parameters(child, inner + more)


def _own_parameters(owner: Any) -> Iterator[tuple[Any, Any, int]]:
    if is_tfp(owner):
        for name, properties in type(owner).parameter_properties().items():
            if isinstance(properties.event_ndims, int):
                yield owner.parameters.get(name), None, properties.event_ndims
    elif isinstance(owner, dist.Distribution):
        for name, value in vars(owner).items():
            constraint = owner.arg_constraints.get(name)
            if constraint is not None and hasattr(constraint, "event_dim"):
                yield value, constraint, constraint.event_dim


def _safe(parameter: Any, keep: Array, constraint: Any, event_dim: int, inner: int) -> Any:
    """Replaces the entries of a parameter that serve no entry of the value that counts."""
    parameter = jnp.asarray(parameter)
    batch = parameter.shape[: max(parameter.ndim - event_dim - inner, 0)]
    if len(batch) > keep.ndim:
        return parameter
    used = keep.any(axis=tuple(range(keep.ndim - len(batch))))
    used = used.any(axis=tuple(i for i, size in enumerate(batch) if size == 1), keepdims=True)
    if used.shape != batch:
        return parameter
    rows = jax.lax.stop_gradient(parameter).reshape(-1, *parameter.shape[len(batch) :])
    row = rows[jnp.argmax(used)]
    safe = jnp.where(used.any(), row, _of_domain(constraint, row))
    return jnp.where(used.reshape(*batch, *[1] * (parameter.ndim - len(batch))), parameter, safe)


def _of_domain(constraint: Any, parameter: Array) -> Array:
    """A point of the domain of a parameter; one half, which lies in most, where it is not known."""
    half = jnp.full_like(parameter, 0.5)
    try:
        return half if constraint is None else constraint.feasible_like(parameter)
    except (AttributeError, NotImplementedError):
        return half
