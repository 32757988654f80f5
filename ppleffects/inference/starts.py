"""Where chains start: what ``init=`` asks for, and the search for a point with a finite density and gradient."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from ppleffects.errors import DTypeError, SettingsError, ShapeError, ValuesError
from ppleffects.inference.climb import climb
from ppleffects.inference.coordinates import Coordinates
from ppleffects.inference.kernel import potential
from ppleffects.inference.start_rules import place
from ppleffects.interpretations import Site
from ppleffects.interpretations.run import as_numbers, cast
from ppleffects.language.arguments import as_mapping

MAX_TRIES = 100
UNIFORM, PRIOR, MODE = STRATEGIES = ("uniform", "prior", "mode")

type Strategies = tuple[tuple[str, str], ...]


class Start(NamedTuple):
    """The search for one chain's starting point.

    Attributes:
        position: unconstrained values of the last try.
        log_density: log-density there; a scalar.
        gradient: gradient there.
        outside: for each latent that was given a value, whether it lies outside of its support.
        found: whether density and gradient are finite, and all that was given lies in its support.
        num_tries: tries made.
    """

    position: dict[str, Array]
    log_density: Array
    gradient: dict[str, Array]
    outside: dict[str, Array]
    found: Array
    num_tries: Array


class Given(NamedTuple):
    """What ``init=`` asks for.

    Attributes:
        values: constrained values to start at, by name. ``(chain, *site)``
        strategies: names of latents that start otherwise than uniformly, and how.
        max_tries: how often to try.
    """

    values: dict[str, np.ndarray]
    strategies: Strategies
    max_tries: int


def find_start(
    target: Any,
    key: Array,
    given: dict[str, Array],
    max_tries: int,
    strategies: Strategies = (),
    coordinates: Coordinates | None = None,
    *,
    tries_before: Array | int = 0,
) -> Start:
    """Draw a start of one chain until its density and gradient are finite; then climb, where that is asked for.

    Args:
        target: the density.
        key: the chain's key.
        given: constrained values by name.
        max_tries: how often to try.
        strategies: names of latents that start otherwise than uniformly, and how.
        coordinates: where latents lie; without, they are whole on every device of the chain.
        tries_before: what tries are numbered from; each number stands for another draw.
    """
    drawn = tuple(name for name, strategy in strategies if strategy == PRIOR)
    climbing = tuple(name for name, strategy in strategies if strategy == MODE)
    evaluate = functools.partial(_evaluate, _energy(target, coordinates))

    def attempt(start: Start) -> Start:
        own = jax.random.fold_in(key, tries_before + start.num_tries)
        free = {name: u for name, u in target.init(own).items() if name not in given and name not in drawn}
        position, outside = place(target, free, given, own, drawn) if given or drawn else (free, {})
        return evaluate(position, outside, start.num_tries + 1)

    def first() -> Start:
        zero = jnp.zeros((), jnp.int32)
        return attempt(Start({}, zero, {}, {}, zero, zero))

    nothing = zeros_of(jax.eval_shape(first))
    start = jax.lax.while_loop(lambda start: ~start.found & (start.num_tries < max_tries), attempt, nothing)
    if not climbing:
        return start

    def moved(position: dict[str, Array], best: Start) -> Start:
        if not given:
            return evaluate(position, {}, best.num_tries)
        free = {name: u for name, u in position.items() if name not in given}
        return evaluate(*place(target, free, given, key), best.num_tries)

    return climb(moved, start, climbing)


def _energy(target: Any, coordinates: Coordinates | None) -> Callable[[dict[str, Array]], Array]:
    """Minus the log-density as a function of a position."""
    if coordinates is None:
        return potential(target)
    return lambda position: (
        -jnp.asarray(target.log_density(coordinates.unpack(coordinates.pack(position))), jnp.result_type(float))
    )


def _evaluate(
    energy: Callable[[dict[str, Array]], Array], position: dict[str, Array], outside: dict[str, Array], num_tries: Array
) -> Start:
    """The start at a position."""
    position = {name: jnp.asarray(value, jnp.result_type(float)) for name, value in position.items()}
    value, slope = jax.value_and_grad(energy)(position)
    finite = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves((position, value, slope))]
    found = jnp.stack([*finite, *(~flag for flag in outside.values())]).all()
    return Start(position, -value, jax.tree.map(jnp.negative, slope), outside, found, num_tries)


def zeros_of(shapes: Any, *leading: int) -> Any:
    """Zeros of the given shapes, types of an Explicit mesh included, behind new leading axes."""

    def zeros(leaf: jax.ShapeDtypeStruct) -> Array:
        shape = (*leading, *leaf.shape)
        if isinstance(leaf.sharding, NamedSharding) and any(leaf.sharding.spec):
            spec = PartitionSpec(*[None] * len(leading), *leaf.sharding.spec)
            return jnp.zeros(shape, leaf.dtype, out_sharding=spec)
        return jnp.zeros(shape, leaf.dtype)

    return jax.tree.map(zeros, shapes)


# --- what init= asks for ----------------------------------------------------------------------------------------------


def given_starts(init: Any, target: Any, chains: np.ndarray, num_chains: int) -> Given:
    """What ``init`` asks for, of each chain.

    Args:
        init: None, a strategy, a mapping from latents to values or strategies, or a draw of a former posterior: a
            Dataset, of which what are no latents is left out.
        target: the density.
        chains: numbers of the chains that run. ``(padded,)``
        num_chains: chains that were asked for.

    Raises:
        SettingsError: a strategy is unknown.
        ValuesError: ``init`` names something else than a latent, or a value is not finite.
        DTypeError: a value is no array of numbers, or a cast to the site's dtype would lose.
        ShapeError: a value has neither the site's shape nor that with a leading axis of chains.
    """
    latents = {name: site for name, site in target.sites.items() if site.kind == "sample"}
    if isinstance(init, str):
        init = dict.fromkeys(latents, _strategy(init))
    elif hasattr(init, "data_vars"):
        init = {name: array.values for name, array in init.data_vars.items() if name in latents}
    asked = as_mapping({} if init is None else init, "init=")
    for name in asked:
        if name not in latents:
            raise ValuesError(
                f"init= names '{name}', which is no latent site",
                expected=f"among {sorted(latents)}",
                found=f"'{name}'",
                fix="leave it out: only latents start somewhere",
            )
    named = {name: _strategy(value, f" for '{name}'") for name, value in asked.items() if isinstance(value, str)}
    values = {
        name: _value(latents[name], value, num_chains)[chains] for name, value in asked.items() if name not in named
    }
    strategies = tuple((name, named[name]) for name in latents if named.get(name, UNIFORM) != UNIFORM)
    return Given(values, strategies, 1 if len(values) == len(latents) else MAX_TRIES)


def _strategy(strategy: str, of: str = "") -> str:
    if strategy not in STRATEGIES:
        raise SettingsError(
            "init= names an unknown way to start",
            expected=f"one of {STRATEGIES}, or values",
            found=f"'{strategy}'{of}",
            fix='init="prior" for all latents, or init={"x": 0.5, "y": "prior"} for each its own',
        )
    return strategy


def _value(site: Site, value: Any, num_chains: int) -> np.ndarray:
    """The value of a site for each chain, ``(chain, *site)``."""
    value = as_numbers(value, site.name, site.source)
    each = (num_chains, *site.shape)
    if np.shape(value) not in (tuple(site.shape), each):
        raise ShapeError(
            "the value of init= has the wrong shape",
            site=site.name,
            source=site.source,
            expected=f"{tuple(site.shape)} for all chains, or {each} for each",
            found=f"{np.shape(value)}",
            fix="give the site's shape, or stack the starts of the chains along a new leading axis",
        )
    array = np.asarray(cast(value, site.dtype, site.name, site.source))
    if np.issubdtype(np.asarray(value).dtype, np.integer) and (array.astype(object) != np.asarray(value, object)).any():
        raise DTypeError(
            "an integer of init= is too large for the dtype of the site",
            site=site.name,
            source=site.source,
            expected=f"integers that {array.dtype} holds",
            found=f"{np.asarray(value).dtype}, up to {np.max(np.abs(value))}",
            fix="round it yourself: give floats",
        )
    if not np.isfinite(array).all():
        per_chain = np.shape(value) == each and num_chains > 1
        chains = np.flatnonzero(~np.isfinite(array).reshape(num_chains, -1).all(1)) if per_chain else []
        raise ValuesError(
            "a value of init= is not finite",
            site=site.name,
            source=site.source,
            expected="finite numbers",
            found=f"{array[~np.isfinite(array)][0]}" + (f" in chain {chains[0]}" if len(chains) else ""),
            fix='leave the site out, or name a way to start, as "uniform": it then starts there as a whole',
        )
    return np.broadcast_to(array, each)
