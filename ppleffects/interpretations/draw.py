"""Keys and draws: each site's key depends on the run's key, its name, its step, lane and shard, and nothing else."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ppleffects.effects import Lane, _jax, run_varying
from ppleffects.errors import PPLError
from ppleffects.interpretations.parts import Draws
from ppleffects.language import SiteParams, over_lanes
from ppleffects.language import distribution as protocol


def as_key(key: Any) -> Array:
    """Returns a typed key from a typed key, a legacy ``uint32`` key, or an ``int`` seed.

    Raises:
        PPLError: it is none of them, or a batch of keys.
    """
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        return jax.random.key(int(key))
    if hasattr(key, "dtype"):
        key = jnp.asarray(key)
        if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) and key.shape == ():
            return key
        if key.dtype == jnp.uint32 and key.ndim == 1:
            return jax.random.wrap_key_data(key)
    raise PPLError(
        "this is not a random key",
        expected="jax.random.key(seed), one legacy uint32 key, or an int seed",
        found=f"{jnp.asarray(key).dtype}{list(jnp.shape(key))}" if hasattr(key, "dtype") else repr(key),
        fix="pass one key, before the model's arguments; for many, jax.vmap over keys",
    )


def name_digest(name: str) -> int:
    """A number of 32 bits that is the same for a name in every process and release."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")


def draw(draws: Draws, site: SiteParams, arrays: list[Any], axes: frozenset[str]) -> Array:
    """Draws the value of a site where it stands: independent over steps, lanes and the shards it varies over.

    Args:
        draws: the run's key and the steps of the loops around the site.
        site: its parameters.
        arrays: the array leaves of its distribution, lanes in front.
        axes: the manual mesh axes over which it varies.
    """
    key = jax.random.fold_in(draws.key, jnp.uint32(name_digest(site.name)))
    shards = [jax.lax.axis_index(axis) for axis in sorted(axes)]
    typed = axes if _jax.checks_varying() else frozenset()
    return run_varying(
        lambda key, steps, shards, arrays: _draw(key, site, steps, shards, arrays),
        typed,
        key,
        list(draws.steps),
        shards,
        arrays,
    )


def _draw(key: Array, site: SiteParams, steps: list[Array], shards: list[Array], arrays: list[Any]) -> Array:
    for step in steps:
        key = jax.random.fold_in(key, step)
    keys = key
    for i, lane in enumerate(site.lanes):
        fold = jax.random.fold_in
        for _ in range(i):
            fold = jax.vmap(fold, in_axes=(0, None))
        keys = jax.vmap(fold, in_axes=(None, 0), out_axes=i)(keys, jnp.arange(lane.size, dtype=jnp.uint32))
    lanes = [Lane(lane.name, lane.size, lane.mapped[: len(arrays)]) for lane in site.lanes]

    def one(*operands):
        *arrays, key = operands
        for shard in shards:
            key = jax.random.fold_in(key, shard)
        return protocol.sample(site.distribution(arrays), key)

    return over_lanes(one, lanes, extra=1)(*arrays, keys)
