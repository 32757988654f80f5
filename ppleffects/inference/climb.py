"""A climb to a mode: L-BFGS, leaf by leaf, so that latents on the shards stay there (Nocedal and Wright 2006, 7.2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

type Tree = dict[str, Array]

# Pairs of steps and changes of the gradient that are kept; points that are tried.
HISTORY, NUM_POINTS = 10, 150
# A step has to gain this share of what the slope promises, and is shortened by this factor until it does.
GAIN, SHORTER = 1e-4, 0.3
# It is at a mode where the slope promises less; further steps would follow the rounding, which the layout decides.
ENOUGH = 1e-6


class Path(NamedTuple):
    """A climb under way.

    Attributes:
        best: the point so far, of which ``climb``'s caller says what it holds.
        direction: where the next point lies.
        length: how far along ``direction`` it lies.
        steps: the latest steps, the newest last. ``(row, *leaf)``
        changes: by how much the gradient fell along each.
    """

    best: Any
    direction: Tree
    length: Array
    steps: Tree
    changes: Tree


def climb(evaluate: Callable[[Tree, Any], Any], start: Any, names: tuple[str, ...]) -> Any:
    """The highest point that was found on the way up from a start, in some coordinates.

    Every iteration evaluates one point: it is taken if the log-density gained enough, and a shorter step is tried else.
    Their number is fixed, so that chains on a mesh do not wait for each other.

    Args:
        evaluate: from a position and the best point so far, the point there: something with ``position``,
            ``log_density``, ``gradient``, and ``found``, which says whether they are finite.
        start: such a point.
        names: the coordinates to move.
    """

    def iteration(_: Any, path: Path) -> Path:
        best = path.best
        own = _only(best.position, names)
        there = {name: own[name] + path.length * path.direction[name] for name in names}
        point = evaluate({**best.position, **there}, best)
        promised = path.length * _dot(_only(best.gradient, names), path.direction)
        gained = (point.log_density - best.log_density >= GAIN * promised) & (promised > ENOUGH)
        better = point.found & (gained | ~best.found)
        step = {name: there[name] - own[name] for name in names}
        change = {name: best.gradient[name] - point.gradient[name] for name in names}
        squared = _dot(change, change)
        useful = better & best.found & jnp.isfinite(squared)
        useful &= _dot(step, change) > jnp.finfo(squared.dtype).eps * squared
        steps = _where(useful, _appended(path.steps, step), path.steps)
        changes = _where(useful, _appended(path.changes, change), path.changes)
        best = _where(better, point, best)
        direction = _where(better, _direction(_only(best.gradient, names), steps, changes), path.direction)
        return Path(best, direction, jnp.where(better, 1.0, SHORTER * path.length), steps, changes)

    gradient = _only(start.gradient, names)
    nothing = jax.tree.map(lambda x: jnp.broadcast_to(jnp.zeros_like(x), (HISTORY, *x.shape)), gradient)
    path = Path(start, _direction(gradient, nothing, nothing), jnp.ones_like(start.log_density), nothing, nothing)
    return jax.lax.fori_loop(0, NUM_POINTS, iteration, path).best


def _direction(gradient: Tree, steps: Tree, changes: Tree) -> Tree:
    """The gradient times the inverse of the curvature along the steps; at most 1 long where there are none yet."""
    curvatures = jax.vmap(_dot)(steps, changes)
    inverses = jnp.where(curvatures > 0, 1 / jnp.where(curvatures > 0, curvatures, 1.0), 0.0)

    def backwards(direction: Tree, row: tuple) -> tuple[Tree, Array]:
        step, change, inverse = row
        share = inverse * _dot(step, direction)
        return _plus(direction, -share, change), share

    def forwards(direction: Tree, row: tuple) -> tuple[Tree, None]:
        step, change, inverse, share = row
        return _plus(direction, share - inverse * _dot(change, direction), step), None

    direction, shares = jax.lax.scan(backwards, gradient, (steps, changes, inverses), reverse=True)
    newest = {name: x[-1] for name, x in changes.items()}
    first = 1 / jnp.maximum(jnp.stack([jnp.abs(x).max(initial=0.0) for x in gradient.values()]).max(), 1.0)
    squared = jnp.where(inverses[-1] > 0, _dot(newest, newest), 1.0)
    scale = jnp.where(inverses[-1] > 0, curvatures[-1] / squared, first)
    direction = {name: scale * x for name, x in direction.items()}
    return jax.lax.scan(forwards, direction, (steps, changes, inverses, shares))[0]


def _dot(a: Tree, b: Tree) -> Array:
    return jnp.stack([jnp.sum(a[name] * b[name]) for name in a]).sum()


def _plus(a: Tree, factor: Array, b: Tree) -> Tree:
    return {name: a[name] + factor * b[name] for name in a}


def _appended(rows: Tree, new: Tree) -> Tree:
    return {name: jnp.concatenate([x[1:], new[name][None]]) for name, x in rows.items()}


def _only(tree: Tree, names: tuple[str, ...]) -> Tree:
    return {name: tree[name] for name in names}


def _where(flag: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(flag, a, b), new, old)
