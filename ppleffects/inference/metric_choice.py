"""What a user asks of a metric, as a sampler's static shape and its first value."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from ppleffects.errors import SettingsError, ShapeError, ValuesError
from ppleffects.inference.coordinates import VECTOR, Coordinates
from ppleffects.inference.metric import Metric, Shape, identity
from ppleffects.language.arguments import as_names

AUTO, DIAGONAL, DENSE, LOW_RANK = CHOICES = ("auto", "diagonal", "dense", "low_rank")
# By default, positions with at most so many replicated coordinates get a metric with as many directions; larger ones,
# and a metric of low rank, get so many. A direction is then used where its eigenvalue differs from 1 by a factor.
MAX_DENSE, NUM_DIRECTIONS, CUTOFF = 256, 16, 2.0


def checked_choice(metric: Any) -> Any:
    """``metric=`` as a choice by name or as a tuple of blocks of names.

    Raises:
        SettingsError: it is neither.
    """
    if isinstance(metric, str) and metric in CHOICES:
        return metric
    if isinstance(metric, list | tuple) and metric and not any(isinstance(block, str) for block in metric):
        return tuple(as_names(block, "metric=") for block in metric)
    raise SettingsError(
        "metric= takes a choice by name or blocks of names",
        expected=f'one of {CHOICES}, or blocks such as (("a", "b"), ("c",))',
        found=f"{metric!r}",
        fix='leave it out, or write metric="dense" for one block of all latents',
    )


def shape_of(metric: Any, coordinates: Coordinates) -> Shape:
    """The shape of the metric that was chosen.

    Raises:
        SettingsError: a dense metric or block is to reach latents that live on shards, or a block names no latent.
    """
    size = coordinates.vector_size
    sharded = tuple(name for name, *_ in coordinates.sharded)
    if metric == AUTO:
        if size > MAX_DENSE:
            return Shape(NUM_DIRECTIONS, CUTOFF, wide=True)
        return Shape(size, CUTOFF)
    if metric == DIAGONAL:
        return Shape()
    if metric == LOW_RANK:
        return Shape(min(NUM_DIRECTIONS, coordinates.size), CUTOFF, wide=True)
    asked = sharded if metric == DENSE else tuple(name for block in metric for name in block if name in sharded)
    if asked:
        raise SettingsError(
            "a dense metric is to reach latents that live on the shards, and would gather them on every device",
            expected='metric="low_rank" or "diagonal", or blocks of other latents',
            found=f"metric={metric!r}; on the shards: {', '.join(asked)}",
            fix='leave metric= out: "auto" is dense for the other latents',
        )
    return Shape(size, blocks=None if metric == DENSE else _blocks(metric, coordinates))


def _blocks(metric: tuple[tuple[str, ...], ...], coordinates: Coordinates) -> tuple[int, ...]:
    """The number of the block of each coordinate; what is in none has one for itself."""
    latents = {name for name, *_ in coordinates.replicated}
    named = [name for block in metric for name in block]
    if not latents.issuperset(named) or len(set(named)) < len(named):
        raise SettingsError(
            "the blocks of a metric must name latent sites, each in one block",
            expected=f"names among {sorted(latents)}",
            found=f"{metric}",
            fix='metric="dense" for one block of all latents, or each name once',
        )
    block_of = {name: number for number, block in enumerate(metric) for name in block}
    numbers: list[int] = []
    for name, shape, _ in coordinates.replicated:
        own = range(len(metric) + len(numbers), len(metric) + len(numbers) + math.prod(shape))
        numbers += [block_of[name]] * len(own) if name in block_of else own
    return tuple(numbers)


def first_metric(given: Any, shape: Shape, coordinates: Coordinates) -> Metric:
    """The metric that a user gives to begin with: variances by latent, or a covariance of all, in unconstrained space.

    Raises:
        ValuesError: a name is no latent's, or something is not positive (definite).
        ShapeError: an array has not the latent's unconstrained shape.
    """
    if isinstance(given, Mapping):
        return _of_variances(given, shape, coordinates)
    return _of_covariance(np.asarray(given, float), shape, coordinates)


def _of_variances(given: Mapping[str, Any], shape: Shape, coordinates: Coordinates) -> Metric:
    described = [(name, site_shape) for name, site_shape, *_ in (*coordinates.replicated, *coordinates.sharded)]
    latents = dict(described)
    scale = {name: np.ones(site_shape) for name, site_shape in described}
    for name, value in given.items():
        if name not in latents:
            raise ValuesError(
                f"inverse_mass_matrix= names '{name}', which is no latent site",
                expected=f"among {sorted(latents)}",
                found=f"'{name}'",
                fix="leave it out",
            )
        variance = np.asarray(value, float)
        if variance.shape not in ((), tuple(latents[name])):
            raise ShapeError(
                "a variance of inverse_mass_matrix= has the wrong shape",
                site=name,
                expected=f"{tuple(latents[name])}, the unconstrained shape, or a number",
                found=f"{variance.shape}",
                fix="give variances of the unconstrained values",
            )
        if not (np.isfinite(variance).all() and (variance > 0).all()):
            raise ValuesError(
                "a variance of inverse_mass_matrix= is not positive",
                site=name,
                expected="positive, finite numbers",
                found=f"{variance!r}",
                fix="give variances of the unconstrained values",
            )
        scale[name] = np.broadcast_to(np.sqrt(variance), latents[name])
    packed = coordinates.pack({name: jnp.asarray(value) for name, value in scale.items()})
    return identity(packed, shape)._replace(scale=packed)


def _of_covariance(matrix: np.ndarray, shape: Shape, coordinates: Coordinates) -> Metric:
    size = coordinates.vector_size
    if coordinates.sharded or matrix.shape != (size, size) or shape.num_directions < size:
        raise ShapeError(
            "inverse_mass_matrix= is no matrix for these latents and this metric",
            expected=f"({size}, {size}), the covariance of all unconstrained values, where none live on shards and "
            'the metric is dense; or variances by latent, as in {"a": 2.0}',
            found=f"{matrix.shape}" + (", latents on shards" if coordinates.sharded else ""),
            fix='metric="dense", or give variances by latent',
        )
    variances = np.diag(matrix)
    correlations = matrix / np.sqrt(np.outer(variances, variances)) if (variances > 0).all() else matrix * np.nan
    finite = np.isfinite(correlations).all() and np.allclose(matrix, matrix.T)
    values, vectors = np.linalg.eigh(correlations) if finite else (np.zeros(1), None)
    if vectors is None or values.min() <= 0:
        raise ValuesError(
            "inverse_mass_matrix= is no covariance",
            expected="a symmetric, positive definite matrix",
            found="one that is not" if finite else "one that is not finite, not symmetric, or has no variances",
            fix="give the covariance of the unconstrained values of all latents",
        )
    return Metric({VECTOR: jnp.sqrt(variances)}, {VECTOR: jnp.asarray(vectors.T)}, jnp.asarray(values))
