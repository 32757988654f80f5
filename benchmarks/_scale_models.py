"""Models of many rows, for ``scale.py``: rows on the shards, latents of rows there, and latents of groups there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

FLIGHTS, COVARIATES, GROUPS = 327_346, 7, {"carrier": 16, "origin": 3, "dest": 104}
ROWS_PER_GROUP = 16

type Model = Callable[..., None]


def over_rows(body: Callable, mesh: Mesh, shared: int) -> Callable:
    """``shard_map`` of a body with some shared arguments, then some of rows."""

    def call(*args: Any) -> None:
        specs = (P(),) * shared + (P("data"),) * (len(args) - shared)
        jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=None)(*args)

    return call


def flights(mesh: Mesh) -> Model:
    """A logistic regression with three sets of effects, as ``examples/flights.py`` has it; all latents are shared."""

    def rows(intercept: Any, beta: Any, effects: Any, data: Any, mask: Any) -> None:
        logits = intercept + data["x"] @ beta + sum(effects[group][data[group]] for group in GROUPS)
        ppl.observe("late", dist.Bernoulli(logits=logits), data["late"], mask=mask)

    def model(data: Any, mask: Any) -> None:
        intercept = ppl.sample("intercept", dist.Normal(-1.0, 1.5))
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand([COVARIATES]))
        effects = {}
        for group, size in GROUPS.items():
            scale = ppl.sample(f"sd_{group}", dist.LogNormal(np.log(0.2), 0.5))
            effects[group] = scale * ppl.sample(f"z_{group}", dist.Normal(0.0, 1.0).expand([size]))
        over_rows(rows, mesh, 3)(intercept, beta, effects, data, mask)

    return model


def flights_rows(num_rows: int, make: Callable[..., Any]) -> dict[str, Any]:
    """The columns of the flights: ``make(shape, dtype, below)`` makes each."""
    columns = {group: make((num_rows,), np.int32, size) for group, size in GROUPS.items()}
    return {"x": make((num_rows, COVARIATES), np.float64, 1), "late": make((num_rows,), np.int32, 2), **columns}


def latents(mesh: Mesh) -> Model:
    """A latent for each row, on the row's shard."""

    def rows(mean: Any, y: Any, mask: Any) -> None:
        z = ppl.sample("z", dist.Normal(0.0, 1.0).expand(y.shape), spec=P("data"))
        ppl.observe("y", dist.Normal(mean + z, 0.5), y, mask=mask)

    def model(y: Any, mask: Any) -> None:
        over_rows(rows, mesh, 1)(ppl.sample("mean", dist.Normal(0.0, 2.0)), y, mask)

    return model


def groups(mesh: Mesh) -> Model:
    """A latent for each group of 16 rows, on the shard that has the whole group."""

    def rows(mean: Any, scale: Any, data: ppl.GroupedRows) -> None:
        z = ppl.sample("z", dist.Normal(0.0, 1.0).expand(data.group_mask.shape), spec=P("data"))
        ppl.observe("y", dist.Normal((mean + scale * z)[data.group], 0.5), data.rows, mask=data.mask)

    def model(data: ppl.GroupedRows) -> None:
        mean = ppl.sample("mean", dist.Normal(0.0, 2.0))
        over_rows(rows, mesh, 2)(mean, ppl.sample("scale", dist.HalfNormal(1.0)), data)

    return model


def abstract(name: str, num_rows: int) -> tuple[Any, ...]:
    """Shapes and dtypes of the data of a model, all of them sharded along their leading axis."""

    def make(shape: tuple[int, ...], dtype: Any, below: int = 0) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    column, mask = make((num_rows,), jnp.float64), make((num_rows,), bool)
    if name == "groups":
        group, group_mask = make((num_rows,), np.int32), make((num_rows // ROWS_PER_GROUP,), bool)
        leaves: list[Any] = [column, mask, group, None, group_mask]
        return (ppl.GroupedRows(*leaves),)
    return (flights_rows(num_rows, make) if name == "flights" else column, mask)


MODELS: dict[str, Callable[[Mesh], Model]] = {"flights": flights, "latents": latents, "groups": groups}
