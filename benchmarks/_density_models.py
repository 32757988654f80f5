"""Six sharded models, each as a ppleffects model (sharded and not), a density by hand in JAX, and a NumPyro model.

The tests of the sharded density and ``benchmarks/density.py`` share them. Every variant takes the case's data as
arguments. The densities by hand come with two sets of formulas: NumPyro's, for costs, and plain ones, for values.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpyro.contrib.control_flow import scan as numpyro_scan
from numpyro.infer.util import log_density as numpyro_log_density

import ppleffects as ppl

type Values = Mapping[str, Any]


def _poisson_plain(y: Array, rate: Array) -> Array:
    return y * jnp.log(rate) - lax.lgamma(y + 1.0) - rate


def _bernoulli_plain(y: Array, logit: Array) -> Array:
    return y * logit - (jnp.maximum(logit, 0.0) + jnp.log1p(jnp.exp(-jnp.abs(logit))))


def _normal_plain(x: Any, mean: Any, sd: Any) -> Array:
    return -0.5 * ((x - mean) / sd) ** 2 - jnp.log(math.sqrt(2 * math.pi) * sd)


@dataclass(frozen=True)
class Formulas:
    """Pointwise log densities, from which a density by hand is written.

    Attributes:
        normal: ``(x, mean, sd)``.
        half_normal: ``(x, sd)``.
        bernoulli: ``(y, logit)``.
        poisson: ``(y, rate)``.
    """

    normal: Callable[..., Array]
    half_normal: Callable[..., Array]
    bernoulli: Callable[..., Array]
    poisson: Callable[..., Array]


PLAIN = Formulas(
    normal=_normal_plain,
    half_normal=lambda x, sd: _normal_plain(x, 0.0, sd) + math.log(2.0),
    bernoulli=_bernoulli_plain,
    poisson=_poisson_plain,
)
# The formulas that a ppleffects model with NumPyro's distributions uses, so that a comparison of costs shows what the
# interpretation adds and not how two authors write one formula. A value out of the support has log density -inf; on the
# real line there is none.
NUMPYRO = Formulas(
    normal=lambda x, mean, sd: dist.Normal(mean, sd, validate_args=False).log_prob(x),
    half_normal=lambda x, sd: dist.HalfNormal(sd, validate_args=True).log_prob(x),
    bernoulli=lambda y, logit: dist.Bernoulli(logits=logit, validate_args=True).log_prob(y),
    poisson=lambda y, rate: dist.Poisson(rate, validate_args=True).log_prob(y),
)


@dataclass(frozen=True)
class Case:
    """One model in its four variants, with data and a point at which to compare them.

    Attributes:
        name: what the model shows.
        axes: the mesh, as sizes by axis.
        data: arrays by argument name.
        data_specs: how the data lie on the mesh.
        values: a value for each latent of the sharded model.
        value_specs: how latents lie on the mesh, where they are not replicated.
        sharded: mesh -> the ppleffects model with ``jax.shard_map``.
        rowwise: mesh -> the same with a ``jax.vmap`` inside: the body speaks of one row, group or series.
        unsharded: the same model without ``shard_map`` and without control flow.
        by_hand: mesh, formulas -> ``(values, **data) -> log density``, in plain JAX with ``jax.shard_map``.
        numpyro: the NumPyro model, None where it cannot express it.
        split: values of the sharded model -> values of the unsharded one.
    """

    name: str
    axes: dict[str, int]
    data: dict[str, np.ndarray]
    data_specs: dict[str, P]
    values: dict[str, Any]
    sharded: Callable[[Mesh], Callable[..., None]]
    rowwise: Callable[[Mesh], Callable[..., None]]
    unsharded: Callable[..., None]
    by_hand: Callable[[Mesh, Formulas], Callable[..., Array]]
    numpyro: Callable[..., None] | None = None
    value_specs: dict[str, P] = field(default_factory=dict)
    split: Callable[[Values], Values] = dict

    def mesh(self, axis_type: AxisType = AxisType.Auto) -> Mesh:
        """The mesh that the case is for."""
        return jax.make_mesh(tuple(self.axes.values()), tuple(self.axes), axis_types=(axis_type,) * len(self.axes))

    def place(self, mesh: Mesh) -> tuple[dict[str, Array], dict[str, Array]]:
        """Values and data, on the devices where the sharded model wants them."""
        values = {
            n: jax.device_put(v, NamedSharding(mesh, self.value_specs.get(n, P()))) for n, v in self.values.items()
        }
        data = {n: jax.device_put(v, NamedSharding(mesh, self.data_specs[n])) for n, v in self.data.items()}
        return values, data

    def densities(self, mesh: Mesh) -> dict[str, Callable[..., Array]]:
        """``(values, data) -> log density`` by variant, each a function of the sharded model's values.

        ``"by_hand"`` uses NumPyro's formulas, ``"plain"`` the ones written here.
        """
        by_hand, plain = self.by_hand(mesh, NUMPYRO), self.by_hand(mesh, PLAIN)
        variants = {
            "sharded": lambda values, data: ppl.log_density(self.sharded(mesh))(values, **data),
            "rowwise": lambda values, data: ppl.log_density(self.rowwise(mesh))(values, **data),
            "unsharded": lambda values, data: ppl.log_density(self.unsharded)(self.split(values), **data),
            "by_hand": lambda values, data: by_hand(values, **data),
            "plain": lambda values, data: plain(values, **data),
        }
        if self.numpyro is not None:
            variants["numpyro"] = lambda values, data: jnp.asarray(
                numpyro_log_density(self.numpyro, (), data, values)[0]
            )
        return variants


# --- regression: rows on the shards, all latents shared


def _regression_sharded(mesh: Mesh) -> Callable[..., None]:
    def rows(beta, sigma, x, y):
        ppl.observe("y", dist.Normal(x @ beta, sigma), y)

    def model(x, y):
        beta = ppl.sample("beta", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
        sigma = ppl.sample("sigma", dist.HalfNormal(1.0))
        jax.shard_map(rows, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=None)(beta, sigma, x, y)

    return model


def _regression_rowwise(mesh: Mesh) -> Callable[..., None]:
    def row(beta, sigma, x, y):
        ppl.observe("y", dist.Normal(x @ beta, sigma), y)

    def model(x, y):
        beta = ppl.sample("beta", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
        sigma = ppl.sample("sigma", dist.HalfNormal(1.0))
        rows = jax.vmap(row, in_axes=(None, None, 0, 0))
        jax.shard_map(rows, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=None)(beta, sigma, x, y)

    return model


def _regression_unsharded(x, y):
    beta = ppl.sample("beta", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
    sigma = ppl.sample("sigma", dist.HalfNormal(1.0))
    ppl.observe("y", dist.Normal(x @ beta, sigma), y)


def _regression_by_hand(mesh: Mesh, f: Formulas) -> Callable[..., Array]:
    def rows(beta, sigma, x, y):
        return lax.psum(f.normal(y, x @ beta, sigma).sum(), "data")

    def density(values, x, y):
        beta, sigma = values["beta"], values["sigma"]
        likelihood = jax.shard_map(rows, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=P())
        return f.normal(beta, 0.0, 2.0).sum() + f.half_normal(sigma, 1.0) + likelihood(beta, sigma, x, y)

    return density


def _regression_numpyro(x, y):
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def _regression() -> Case:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(4096, 16))
    beta = rng.normal(size=16)
    return Case(
        name="regression",
        axes={"data": 4},
        data={"x": x, "y": x @ beta + 0.7 * rng.normal(size=4096)},
        data_specs={"x": P("data"), "y": P("data")},
        values={"beta": beta + 0.1, "sigma": np.float64(0.9)},
        sharded=_regression_sharded,
        rowwise=_regression_rowwise,
        unsharded=_regression_unsharded,
        by_hand=_regression_by_hand,
        numpyro=_regression_numpyro,
    )


# --- gather: shared group intercepts, read by index inside the shard_map


def _gather_sharded(mesh: Mesh) -> Callable[..., None]:
    def rows(intercept, beta, x, group, y):
        ppl.observe("y", dist.Bernoulli(logits=intercept[group] + x @ beta), y)

    def model(x, group, y, num_groups=64):
        beta = ppl.sample("beta", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
        scale = ppl.sample("scale", dist.HalfNormal(1.0))
        z = ppl.sample("z", dist.Normal(0.0, 1.0).expand([num_groups]))
        specs = (P(), P(), P("data"), P("data"), P("data"))
        jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=None)(scale * z, beta, x, group, y)

    return model


def _gather_rowwise(mesh: Mesh) -> Callable[..., None]:
    def row(intercept, beta, x, group, y):
        ppl.observe("y", dist.Bernoulli(logits=intercept[group] + x @ beta), y)

    def model(x, group, y, num_groups=64):
        beta = ppl.sample("beta", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
        scale = ppl.sample("scale", dist.HalfNormal(1.0))
        z = jax.vmap(lambda _: ppl.sample("z", dist.Normal(0.0, 1.0)))(jnp.arange(num_groups))
        rows = jax.vmap(row, in_axes=(None, None, 0, 0, 0))
        specs = (P(), P(), P("data"), P("data"), P("data"))
        jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=None)(scale * z, beta, x, group, y)

    return model


def _gather_unsharded(x, group, y, num_groups=64):
    beta = ppl.sample("beta", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
    scale = ppl.sample("scale", dist.HalfNormal(1.0))
    z = ppl.sample("z", dist.Normal(0.0, 1.0).expand([num_groups]))
    ppl.observe("y", dist.Bernoulli(logits=(scale * z)[group] + x @ beta), y)


def _gather_by_hand(mesh: Mesh, f: Formulas) -> Callable[..., Array]:
    def rows(intercept, beta, x, group, y):
        return lax.psum(f.bernoulli(y, intercept[group] + x @ beta).sum(), "data")

    def density(values, x, group, y):
        beta, scale, z = values["beta"], values["scale"], values["z"]
        specs = (P(), P(), P("data"), P("data"), P("data"))
        likelihood = jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=P())(scale * z, beta, x, group, y)
        return f.normal(beta, 0.0, 2.0).sum() + f.half_normal(scale, 1.0) + f.normal(z, 0.0, 1.0).sum() + likelihood

    return density


def _gather_numpyro(x, group, y, num_groups=64):
    beta = numpyro.sample("beta", dist.Normal(0.0, 2.0).expand([x.shape[1]]))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    z: Any = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([num_groups]))
    numpyro.sample("y", dist.Bernoulli(logits=(scale * z)[group] + x @ beta), obs=y)


def _gather() -> Case:
    rng = np.random.default_rng(2)
    x, group = rng.normal(size=(4096, 8)), rng.integers(64, size=4096).astype(np.int32)
    beta, z = rng.normal(size=8), rng.normal(size=64)
    chance = 1 / (1 + np.exp(-(0.8 * z[group] + x @ beta)))
    return Case(
        name="hierarchical with gather",
        axes={"data": 4},
        data={"x": x, "group": group, "y": (rng.uniform(size=4096) < chance).astype(np.float64)},
        data_specs={"x": P("data"), "group": P("data"), "y": P("data")},
        values={"beta": beta - 0.1, "scale": np.float64(0.6), "z": z + 0.2},
        sharded=_gather_sharded,
        rowwise=_gather_rowwise,
        unsharded=_gather_unsharded,
        by_hand=_gather_by_hand,
        numpyro=_gather_numpyro,
    )


# --- local latents: one latent per group, on the shard where the rows of the group are


def _local_sharded(mesh: Mesh) -> Callable[..., None]:
    groups = 1024 // mesh.shape["data"]

    def rows(mu, tau, group, y):
        theta = ppl.sample("theta", dist.Normal(mu, tau).expand([groups]), spec=P("data"))
        ppl.observe("y", dist.Normal(theta[group - groups * lax.axis_index("data")], 1.0), y)

    def model(group, y):
        mu = ppl.sample("mu", dist.Normal(0.0, 5.0))
        tau = ppl.sample("tau", dist.HalfNormal(2.0))
        jax.shard_map(rows, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=None)(mu, tau, group, y)

    return model


def _local_rowwise(mesh: Mesh) -> Callable[..., None]:
    groups = 1024 // mesh.shape["data"]

    def rows(mu, tau, group, y):
        own = jax.vmap(lambda _: ppl.sample("theta", dist.Normal(mu, tau), spec=P("data")))
        theta = own(jnp.arange(groups))
        local = group - groups * lax.axis_index("data")
        jax.vmap(lambda group, y: ppl.observe("y", dist.Normal(theta[group], 1.0), y))(local, y)

    def model(group, y):
        mu = ppl.sample("mu", dist.Normal(0.0, 5.0))
        tau = ppl.sample("tau", dist.HalfNormal(2.0))
        jax.shard_map(rows, mesh=mesh, in_specs=(P(), P(), P("data"), P("data")), out_specs=None)(mu, tau, group, y)

    return model


def _local_unsharded(group, y):
    mu = ppl.sample("mu", dist.Normal(0.0, 5.0))
    tau = ppl.sample("tau", dist.HalfNormal(2.0))
    theta = ppl.sample("theta", dist.Normal(mu, tau).expand([1024]))
    ppl.observe("y", dist.Normal(theta[group], 1.0), y)


def _local_by_hand(mesh: Mesh, f: Formulas) -> Callable[..., Array]:
    groups = 1024 // mesh.shape["data"]

    def rows(mu, tau, theta, group, y):
        local = group - groups * lax.axis_index("data")
        return lax.psum(f.normal(theta, mu, tau).sum() + f.normal(y, theta[local], 1.0).sum(), "data")

    def density(values, group, y):
        mu, tau = values["mu"], values["tau"]
        specs = (P(), P(), P("data"), P("data"), P("data"))
        shards = jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=P())(mu, tau, values["theta"], group, y)
        return f.normal(mu, 0.0, 5.0) + f.half_normal(tau, 2.0) + shards

    return density


def _local_numpyro(group, y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 5.0))
    tau = numpyro.sample("tau", dist.HalfNormal(2.0))
    theta: Any = numpyro.sample("theta", dist.Normal(mu, tau).expand([1024]))
    numpyro.sample("y", dist.Normal(theta[group], 1.0), obs=y)


def _local() -> Case:
    rng = np.random.default_rng(3)
    group = np.repeat(np.arange(1024, dtype=np.int32), 8)
    theta = 1.0 + 0.5 * rng.normal(size=1024)
    return Case(
        name="local latents",
        axes={"data": 4},
        data={"group": group, "y": theta[group] + rng.normal(size=group.size)},
        data_specs={"group": P("data"), "y": P("data")},
        values={"mu": np.float64(0.8), "tau": np.float64(0.7), "theta": theta + 0.1},
        value_specs={"theta": P("data")},
        sharded=_local_sharded,
        rowwise=_local_rowwise,
        unsharded=_local_unsharded,
        by_hand=_local_by_hand,
        numpyro=_local_numpyro,
    )


# --- scan: many series on the shards, each a random walk with noise; a scan over time runs in every shard


def _scan_sharded(mesh: Mesh) -> Callable[..., None]:
    def series(drift, sd, y):
        # Typed as varying before the loop, so that their gradients are summed over shards after it, not in each step.
        drift, sd = lax.pcast((drift, sd), "data", to="varying")

        def step(state, y_t):
            state = ppl.sample("state", dist.Normal(state + drift, sd))
            ppl.observe("y", dist.Normal(state, 0.5), y_t)
            return state, None

        lax.scan(step, jnp.zeros_like(y[0]), y)

    def model(y):
        drift = ppl.sample("drift", dist.Normal(0.0, 1.0))
        sd = ppl.sample("sd", dist.HalfNormal(1.0))
        jax.shard_map(series, mesh=mesh, in_specs=(P(), P(), P(None, "data")), out_specs=None)(drift, sd, y)

    return model


def _scan_rowwise(mesh: Mesh) -> Callable[..., None]:
    def one(drift, sd, y):
        def step(state, y_t):
            state = ppl.sample("state", dist.Normal(state + drift, sd))
            ppl.observe("y", dist.Normal(state, 0.5), y_t)
            return state, None

        lax.scan(step, jnp.zeros_like(y[0]), y)

    def series(drift, sd, y):
        drift, sd = lax.pcast((drift, sd), "data", to="varying")
        jax.vmap(one, in_axes=(None, None, 1))(drift, sd, y)

    def model(y):
        drift = ppl.sample("drift", dist.Normal(0.0, 1.0))
        sd = ppl.sample("sd", dist.HalfNormal(1.0))
        jax.shard_map(series, mesh=mesh, in_specs=(P(), P(), P(None, "data")), out_specs=None)(drift, sd, y)

    return model


def _scan_unsharded(y):
    drift = ppl.sample("drift", dist.Normal(0.0, 1.0))
    sd = ppl.sample("sd", dist.HalfNormal(1.0))
    state = jnp.zeros_like(y[0])
    for t in range(y.shape[0]):
        state = ppl.sample(f"state{t}", dist.Normal(state + drift, sd))
        ppl.observe(f"y{t}", dist.Normal(state, 0.5), y[t])


def _scan_split(values: Values) -> Values:
    states = {f"state{t}": state for t, state in enumerate(values["state"])}
    return {"drift": values["drift"], "sd": values["sd"], **states}


def _scan_by_hand(mesh: Mesh, f: Formulas) -> Callable[..., Array]:
    def series(drift, sd, states, y):
        drift, sd = lax.pcast((drift, sd), "data", to="varying")

        def step(before, inputs):
            state, y_t = inputs
            return state, f.normal(state, before + drift, sd).sum() + f.normal(y_t, state, 0.5).sum()

        # Terms are summed after the loop: a running total is some percent faster, but loses digits in long loops.
        return lax.psum(lax.scan(step, jnp.zeros_like(y[0]), (states, y))[1].sum(), "data")

    def density(values, y):
        drift, sd = values["drift"], values["sd"]
        specs = (P(), P(), P(None, "data"), P(None, "data"))
        shards = jax.shard_map(series, mesh=mesh, in_specs=specs, out_specs=P())(drift, sd, values["state"], y)
        return f.normal(drift, 0.0, 1.0) + f.half_normal(sd, 1.0) + shards

    return density


def _scan_numpyro(y):
    drift = numpyro.sample("drift", dist.Normal(0.0, 1.0))
    sd = numpyro.sample("sd", dist.HalfNormal(1.0))

    def step(state, y_t):
        state = numpyro.sample("state", dist.Normal(state + drift, sd))
        numpyro.sample("y", dist.Normal(state, 0.5), obs=y_t)
        return state, None

    numpyro_scan(step, jnp.zeros_like(y[0]), y)


def _scan() -> Case:
    rng = np.random.default_rng(4)
    states = np.cumsum(0.1 + 0.3 * rng.normal(size=(24, 512)), axis=0)
    return Case(
        name="scan over time",
        axes={"data": 4},
        data={"y": states + 0.5 * rng.normal(size=states.shape)},
        data_specs={"y": P(None, "data")},
        values={"drift": np.float64(0.2), "sd": np.float64(0.4), "state": states + 0.05},
        value_specs={"state": P(None, "data")},
        sharded=_scan_sharded,
        rowwise=_scan_rowwise,
        unsharded=_scan_unsharded,
        by_hand=_scan_by_hand,
        numpyro=_scan_numpyro,
        split=_scan_split,
    )


# --- two shard_maps: a measured exposure per row, and counts that depend on what the first shard_map returns


def _two_sharded(mesh: Mesh) -> Callable[..., None]:
    def exposures(gamma, x, measured):
        exposure = x @ gamma
        ppl.observe("measured", dist.Normal(exposure, 0.5), measured)
        return exposure

    def counts(slope, exposure, y):
        ppl.observe("y", dist.Poisson(jnp.exp(slope * exposure)), y)

    def model(x, measured, y):
        gamma = ppl.sample("gamma", dist.Normal(0.0, 1.0).expand([x.shape[1]]))
        slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
        first = jax.shard_map(exposures, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P("data"))
        second = jax.shard_map(counts, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=None)
        second(slope, first(gamma, x, measured), y)

    return model


def _two_rowwise(mesh: Mesh) -> Callable[..., None]:
    def exposure(gamma, x, measured):
        value = x @ gamma
        ppl.observe("measured", dist.Normal(value, 0.5), measured)
        return value

    def count(slope, exposure, y):
        ppl.observe("y", dist.Poisson(jnp.exp(slope * exposure)), y)

    def model(x, measured, y):
        gamma = ppl.sample("gamma", dist.Normal(0.0, 1.0).expand([x.shape[1]]))
        slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
        each = {"mesh": mesh, "in_specs": (P(), P("data"), P("data"))}
        first = jax.shard_map(jax.vmap(exposure, in_axes=(None, 0, 0)), **each, out_specs=P("data"))
        second = jax.shard_map(jax.vmap(count, in_axes=(None, 0, 0)), **each, out_specs=None)
        second(slope, first(gamma, x, measured), y)

    return model


def _two_unsharded(x, measured, y):
    gamma = ppl.sample("gamma", dist.Normal(0.0, 1.0).expand([x.shape[1]]))
    slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
    ppl.observe("measured", dist.Normal(x @ gamma, 0.5), measured)
    ppl.observe("y", dist.Poisson(jnp.exp(slope * (x @ gamma))), y)


def _two_by_hand(mesh: Mesh, f: Formulas) -> Callable[..., Array]:
    def exposures(gamma, x, measured):
        exposure = x @ gamma
        return exposure, lax.psum(f.normal(measured, exposure, 0.5).sum(), "data")

    def counts(slope, exposure, y):
        return lax.psum(f.poisson(y, jnp.exp(slope * exposure)).sum(), "data")

    def density(values, x, measured, y):
        gamma, slope = values["gamma"], values["slope"]
        first = jax.shard_map(exposures, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=(P("data"), P()))
        second = jax.shard_map(counts, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P())
        exposure, measurements = first(gamma, x, measured)
        return f.normal(gamma, 0.0, 1.0).sum() + f.normal(slope, 0.0, 1.0) + measurements + second(slope, exposure, y)

    return density


def _two_numpyro(x, measured, y):
    gamma = numpyro.sample("gamma", dist.Normal(0.0, 1.0).expand([x.shape[1]]))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    exposure = x @ gamma
    numpyro.sample("measured", dist.Normal(exposure, 0.5), obs=measured)
    numpyro.sample("y", dist.Poisson(jnp.exp(slope * exposure)), obs=y)


def _two() -> Case:
    rng = np.random.default_rng(5)
    x, gamma = rng.normal(size=(4096, 8)), 0.3 * rng.normal(size=8)
    exposure = x @ gamma
    return Case(
        name="two shard_maps",
        axes={"data": 4},
        data={
            "x": x,
            "measured": exposure + 0.5 * rng.normal(size=4096),
            "y": rng.poisson(np.exp(0.7 * exposure)).astype(np.float64),
        },
        data_specs={"x": P("data"), "measured": P("data"), "y": P("data")},
        values={"gamma": gamma + 0.05, "slope": np.float64(0.6)},
        sharded=_two_sharded,
        rowwise=_two_rowwise,
        unsharded=_two_unsharded,
        by_hand=_two_by_hand,
        numpyro=_two_numpyro,
    )


# --- two mesh axes: rows on one, columns of the design and their coefficients on the other


def _grid_sharded(mesh: Mesh) -> Callable[..., None]:
    columns = 64 // mesh.shape["model"]

    def block(scale, sigma, x, y):
        beta = ppl.sample("beta", dist.Normal(0.0, scale).expand([columns]), spec=P("model"))
        ppl.observe("y", dist.Normal(lax.psum(x @ beta, "model"), sigma), y)

    def model(x, y):
        scale = ppl.sample("scale", dist.HalfNormal(1.0))
        sigma = ppl.sample("sigma", dist.HalfNormal(1.0))
        specs = (P(), P(), P("data", "model"), P("data"))
        jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=None)(scale, sigma, x, y)

    return model


def _grid_rowwise(mesh: Mesh) -> Callable[..., None]:
    columns = 64 // mesh.shape["model"]

    def block(scale, sigma, x, y):
        own = jax.vmap(lambda _: ppl.sample("beta", dist.Normal(0.0, scale), spec=P("model")))
        beta = own(jnp.arange(columns))
        jax.vmap(lambda x, y: ppl.observe("y", dist.Normal(lax.psum(x @ beta, "model"), sigma), y))(x, y)

    def model(x, y):
        scale = ppl.sample("scale", dist.HalfNormal(1.0))
        sigma = ppl.sample("sigma", dist.HalfNormal(1.0))
        specs = (P(), P(), P("data", "model"), P("data"))
        jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=None)(scale, sigma, x, y)

    return model


def _grid_unsharded(x, y):
    scale = ppl.sample("scale", dist.HalfNormal(1.0))
    sigma = ppl.sample("sigma", dist.HalfNormal(1.0))
    beta = ppl.sample("beta", dist.Normal(0.0, scale).expand([64]))
    ppl.observe("y", dist.Normal(x @ beta, sigma), y)


def _grid_by_hand(mesh: Mesh, f: Formulas) -> Callable[..., Array]:
    def block(scale, sigma, beta, x, y):
        mean = lax.psum(x @ beta, "model")
        return lax.psum(f.normal(beta, 0.0, scale).sum(), "model") + lax.psum(f.normal(y, mean, sigma).sum(), "data")

    def density(values, x, y):
        scale, sigma = values["scale"], values["sigma"]
        specs = (P(), P(), P("model"), P("data", "model"), P("data"))
        shards = jax.shard_map(block, mesh=mesh, in_specs=specs, out_specs=P())(scale, sigma, values["beta"], x, y)
        return f.half_normal(scale, 1.0) + f.half_normal(sigma, 1.0) + shards

    return density


def _grid_numpyro(x, y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
    beta = numpyro.sample("beta", dist.Normal(0.0, scale).expand([64]))
    numpyro.sample("y", dist.Normal(x @ beta, sigma), obs=y)


def _grid() -> Case:
    rng = np.random.default_rng(6)
    x, beta = rng.normal(size=(1024, 64)), 0.5 * rng.normal(size=64)
    return Case(
        name="two mesh axes",
        axes={"data": 2, "model": 2},
        data={"x": x, "y": x @ beta + 0.8 * rng.normal(size=1024)},
        data_specs={"x": P("data", "model"), "y": P("data")},
        values={"scale": np.float64(0.6), "sigma": np.float64(0.9), "beta": beta + 0.02},
        value_specs={"beta": P("model")},
        sharded=_grid_sharded,
        rowwise=_grid_rowwise,
        unsharded=_grid_unsharded,
        by_hand=_grid_by_hand,
        numpyro=_grid_numpyro,
    )


CASES = [_regression(), _gather(), _local(), _scan(), _two(), _grid()]
