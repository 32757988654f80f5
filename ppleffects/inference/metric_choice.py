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
from ppleffects.language.arguments import as_real

AUTO, DIAGONAL, DENSE, LOW_RANK = CHOICES = ("auto", "diagonal", "dense", "low_rank")
# By default, positions with at most so many replicated coordinates get a metric with as many directions; those with at
# most so many coordinates in all, and a metric of low rank, get so many; larger ones none, which would cost more than
# many a gradient. A direction is then used where its eigenvalue differs from 1 by a factor.
MAX_DENSE, MAX_LOW_RANK, NUM_DIRECTIONS, CUTOFF = 256, 4096, 16, 2.0


def checked_choice(metric: Any) -> Any:
    """``metric=`` as a choice by name or as a tuple of blocks of names.

    Raises:
        SettingsError: it is neither.
    """
    if isinstance(metric, str) and metric in CHOICES:
        return metric
    return _as_blocks(metric, "metric=", f"one of {CHOICES}")


def choice_of_dense_mass(dense_mass: Any) -> Any:
    """``dense_mass=``, NumPyro's word, as ``metric=`` has it.

    Raises:
        SettingsError: it is neither a bool nor blocks of names.
    """
    if isinstance(dense_mass, bool | np.bool_):
        return DENSE if dense_mass else AUTO
    if isinstance(dense_mass, list | tuple) and not dense_mass:
        return AUTO
    return _as_blocks(dense_mass, "dense_mass=", "True, False")


def _as_blocks(blocks: Any, setting: str, others: str) -> tuple[tuple[str, ...], ...]:
    sequence = list | tuple
    if isinstance(blocks, sequence) and blocks and all(isinstance(block, sequence) and block for block in blocks):
        blocks = tuple(tuple(block) for block in blocks)
        if all(isinstance(name, str) for block in blocks for name in block):
            return blocks
    raise SettingsError(
        f"{setting} is neither a choice nor blocks of names",
        expected=f'{others}, or blocks such as (("a", "b"), ("c",))',
        found=f"{blocks!r}",
        fix='leave it out, or write metric="dense" for one block of all latents',
    )


def check_blocks(metric: Any, latents: list[str]) -> None:
    """Check that the blocks of a metric name latents.

    Raises:
        SettingsError: a block names no latent, or two name the same.
    """
    named = [] if isinstance(metric, str) else [name for block in metric for name in block]
    if not set(latents).issuperset(named) or len(set(named)) < len(named):
        raise SettingsError(
            "the blocks of a metric must name latent sites, each in one block",
            expected=f"names among {sorted(latents)}",
            found=f"{metric}",
            fix='metric="dense" for one block of all latents, or each name once',
        )


def shape_of(metric: Any, coordinates: Coordinates) -> Shape:
    """The shape of the metric that was chosen.

    Raises:
        SettingsError: a dense metric or block is to reach latents that live on shards.
    """
    size = coordinates.vector_size
    sharded = tuple(name for name, *_ in coordinates.sharded)
    if metric == AUTO:
        if size <= MAX_DENSE:
            return Shape(size, CUTOFF)
        return Shape(NUM_DIRECTIONS, CUTOFF, wide=True) if coordinates.size <= MAX_LOW_RANK else Shape()
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
    block_of = {name: number for number, block in enumerate(metric) for name in block}
    numbers: list[int] = []
    for name, shape, _ in coordinates.replicated:
        own = range(len(metric) + len(numbers), len(metric) + len(numbers) + math.prod(shape))
        numbers += [block_of[name]] * len(own) if name in block_of else own
    return tuple(numbers)


def first_metric(
    given: Any, shape: Shape, coordinates: Coordinates, sources: Mapping[str, str] | None = None
) -> Metric:
    """The metric that a user gives to begin with: variances by latent, or a covariance of all, in unconstrained space.

    Args:
        given: what ``inverse_mass_matrix=`` says.
        shape: of the metric that was chosen.
        coordinates: the layout of a position.
        sources: the line of each latent, for errors.

    Raises:
        ValuesError: a name is no latent's, or something is not positive (definite).
        ShapeError: an array has not the latent's unconstrained shape.
        DTypeError: something is no array of real numbers.
    """
    if isinstance(given, Mapping):
        return _of_variances(given, shape, coordinates, sources or {})
    return _of_covariance(_as_floats(given), shape, coordinates)


def _as_floats(value: Any, site: str | None = None) -> np.ndarray:
    return np.asarray(as_real(value, "inverse_mass_matrix=", site), float)


def _of_variances(
    given: Mapping[str, Any], shape: Shape, coordinates: Coordinates, sources: Mapping[str, str]
) -> Metric:
    described = [(name, site_shape) for name, site_shape, *_ in (*coordinates.replicated, *coordinates.sharded)]
    latents = dict(described)
    scale = {name: np.ones(site_shape) for name, site_shape in described}
    for name, value in given.items():
        if name not in latents:
            raise ValuesError(
                f"inverse_mass_matrix= names '{name}', which is no latent site",
                expected=f"among {sorted(latents)}",
                found=f"'{name}'",
                fix="leave it out: only latents have variances",
            )
        variance = _as_floats(value, name)
        if variance.shape not in ((), tuple(latents[name])):
            raise ShapeError(
                "the variances of inverse_mass_matrix= have the wrong shape",
                site=name,
                source=sources.get(name),
                expected=f"{tuple(latents[name])}, as the unconstrained value has it, or one number",
                found=f"{variance.shape}",
                fix="give one number for all entries, or a variance for each",
            )
        wrong = ~(np.isfinite(variance) & (variance > 0))
        if wrong.any():
            raise ValuesError(
                "a variance of inverse_mass_matrix= is not positive",
                site=name,
                source=sources.get(name),
                expected="positive, finite numbers",
                found=f"{variance[wrong][0]}",
                fix="give variances of the unconstrained value; 1.0 where nothing is known",
            )
        scale[name] = np.broadcast_to(np.sqrt(variance), latents[name])
    packed = coordinates.pack({name: jnp.asarray(value) for name, value in scale.items()})
    return identity(packed, shape)._replace(scale=packed)


def _of_covariance(matrix: np.ndarray, shape: Shape, coordinates: Coordinates) -> Metric:
    size = coordinates.vector_size
    if coordinates.sharded or matrix.shape != (size, size):
        sharded = ", ".join(name for name, *_ in coordinates.sharded)
        raise ShapeError(
            "inverse_mass_matrix= is no covariance of these latents",
            expected=f"variances by latent, as {{'{coordinates.sharded[0][0]}': 2.0}}: some latents live on the shards"
            if sharded
            else f"({size}, {size}): a row and a column for each unconstrained coordinate, in the order of the model",
            found=f"{matrix.shape}" + (f"; on the shards: {sharded}" if sharded else ""),
            fix="give variances by latent, or leave it out",
        )
    if shape.num_directions < size:
        raise SettingsError(
            "a covariance is given for a metric that has no room for it",
            expected='variances by latent, or metric="dense"',
            found=f"inverse_mass_matrix= of shape {matrix.shape}, for {shape.num_directions} directions",
            fix='write metric="dense"',
        )
    variances = np.diag(matrix)
    usable = np.isfinite(matrix).all() and np.allclose(matrix, matrix.T) and (variances > 0).all()
    deviations = np.sqrt(variances) if usable else np.ones(size)
    values, vectors = np.linalg.eigh(matrix / np.outer(deviations, deviations) if usable else -np.eye(size))
    if values.min() < size * np.finfo(float).eps:
        raise ValuesError(
            "inverse_mass_matrix= is no covariance",
            expected="a finite, symmetric, positive definite matrix",
            found=f"one whose correlations have the eigenvalue {values.min():.3g}"
            if usable
            else "one that is not finite, not symmetric, or has a variance that is not positive",
            fix="give the covariance of the unconstrained values of all latents",
        )
    return Metric({VECTOR: jnp.asarray(deviations)}, {VECTOR: jnp.asarray(vectors.T)}, jnp.asarray(values))
