"""The 16 posteriors of posteriordb in ``tests/data``: each model once, for ppleffects and for NumPyro.

A model takes the language it is written in, ``ppl`` or ``NUMPYRO``, and then its data; its sites are named as the
reference names its quantities. The folder of each posterior tells the model in formulas (``model.md``). A flat prior
contributes nothing, and normal densities restricted to a part of their support are left unnormalised where the
restricted part does not depend on other unknowns: neither changes the posterior.
"""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from numpyro.distributions import constraints

import ppleffects as ppl

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "data" / "posteriordb"
NUMPYRO = types.SimpleNamespace(
    sample=numpyro.sample,
    observe=lambda name, distribution, value: numpyro.sample(name, distribution, obs=value),
    factor=numpyro.factor,
    deterministic=numpyro.deterministic,
)
type Data = dict[str, np.ndarray]


@dataclass(frozen=True)
class Posterior:
    """One posterior.

    Attributes:
        name: its name in posteriordb, which is that of its folder.
        program: ``(language, **arguments)``, the model.
        prepare: the fields of ``data.json`` -> the model's arguments.
    """

    name: str
    program: Callable[..., None]
    prepare: Callable[[dict[str, Any]], Data]

    @functools.cached_property
    def model(self) -> Callable[..., None]:
        """The ppleffects model."""
        return functools.partial(self.program, ppl)

    @functools.cached_property
    def numpyro(self) -> Callable[..., None]:
        """The NumPyro model."""
        return functools.partial(self.program, NUMPYRO)

    @functools.cached_property
    def arguments(self) -> Data:
        """The model's arguments by name."""
        return self.prepare(json.loads((FOLDER / self.name / "data.json").read_text()))

    @functools.cached_property
    def reference(self) -> dict[str, dict[str, float]]:
        """Mean, sd, quantiles and Monte Carlo standard errors by scalar; ``"beta[1]"`` is the first of ``beta``."""
        return json.loads((FOLDER / self.name / "reference.json").read_text())["parameters"]

    def scalars(self, draws: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """The draws ``(chain, draw)`` of each scalar of the reference, from the sites' ``(chain, draw, ...)``."""
        found = {}
        for scalar in self.reference:
            site, _, index = scalar.partition("[")
            values = np.asarray(draws[site])
            found[scalar] = values[:, :, int(index.rstrip("]")) - 1] if index else values
        return found


def _flat(support: Any, *event: int, batch: tuple[int, ...] = ()) -> dist.Distribution:
    return dist.ImproperUniform(support, batch, event)


def _real(data: Mapping[str, Any], *names: str) -> list[np.ndarray]:
    return [np.asarray(data[name], float) for name in names]


# --- regressions


def _flat_regression(p: Any, x: Array, y: Array) -> None:
    beta = p.sample("beta", _flat(constraints.real, batch=(x.shape[1],)))
    sigma = p.sample("sigma", _flat(constraints.positive))
    p.observe("y", dist.Normal(x @ beta, sigma), y)


def _earnings(data: dict[str, Any]) -> Data:
    height, earn = _real(data, "height", "earn")
    return {"x": np.column_stack([np.ones_like(height), height]), "y": earn}


def _interaction(hs: np.ndarray, iq: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones_like(hs), hs, iq, hs * iq])


def _kidiq_standardised(data: dict[str, Any]) -> Data:
    hs, iq, score = _real(data, "mom_hs", "mom_iq", "kid_score")
    hs, iq = ((x - x.mean()) / (2 * x.std(ddof=1)) for x in (hs, iq))
    return {"x": _interaction(hs, iq), "y": score}


def _mesquite(data: dict[str, Any]) -> Data:
    names = ("diam1", "diam2", "canopy_height", "total_height", "weight")
    diam1, diam2, canopy, total, weight = (np.log(x) for x in _real(data, *names))
    (group,) = _real(data, "group")
    columns = [np.ones_like(group), diam1 + diam2 + canopy, diam1 + diam2, diam1 - diam2, total, group]
    return {"x": np.column_stack(columns), "y": weight}


def _nes(data: dict[str, Any]) -> Data:
    ideology, race, age, education, gender, income, party = _real(
        data, "real_ideo", "race_adj", "age_discrete", "educ1", "gender", "income", "partyid7"
    )
    ages = [(age == group).astype(float) for group in (2, 3, 4)]
    columns = [np.ones_like(party), ideology, race, *ages, education, gender, income]
    return {"x": np.column_stack(columns), "y": party}


def _kidiq(p: Any, x: Array, y: Array) -> None:
    beta = p.sample("beta", _flat(constraints.real, batch=(x.shape[1],)))
    sigma = p.sample("sigma", dist.HalfCauchy(2.5))
    p.observe("y", dist.Normal(x @ beta, sigma), y)


def _kidiq_raw(data: dict[str, Any]) -> Data:
    hs, iq, score = _real(data, "mom_hs", "mom_iq", "kid_score")
    return {"x": _interaction(hs, iq), "y": score}


def _blr(p: Any, x: Array, y: Array) -> None:
    beta = p.sample("beta", dist.Normal(0.0, 10.0).expand([x.shape[1]]))
    sigma = p.sample("sigma", dist.HalfNormal(10.0))
    p.observe("y", dist.Normal(x @ beta, sigma), y)


def _kilpisjarvi(p: Any, x: Array, y: Array, alpha_prior: Array, beta_prior: Array) -> None:
    alpha = p.sample("alpha", dist.Normal(alpha_prior[0], alpha_prior[1]))
    beta = p.sample("beta", dist.Normal(beta_prior[0], beta_prior[1]))
    sigma = p.sample("sigma", _flat(constraints.positive))
    p.observe("y", dist.Normal(alpha + beta * x, sigma), y)


def _kilpisjarvi_data(data: dict[str, Any]) -> Data:
    x, y = _real(data, "x", "y")
    alpha, beta = (np.array([data[f"pmu{name}"], data[f"ps{name}"]], float) for name in ("alpha", "beta"))
    return {"x": x, "y": y, "alpha_prior": alpha, "beta_prior": beta}


def _diamonds(p: Any, x: Array, y: Array) -> None:
    b = p.sample("b", dist.Normal(0.0, 1.0).expand([x.shape[1]]))
    intercept = p.sample("Intercept", dist.StudentT(3.0, 8.0, 10.0))
    sigma = p.sample("sigma", _flat(constraints.positive))
    p.factor("prior of sigma", dist.StudentT(3.0, 0.0, 10.0).log_prob(sigma))
    p.observe("y", dist.Normal(intercept + x @ b, sigma), y)


def _diamonds_data(data: dict[str, Any]) -> Data:
    x, y = _real(data, "X", "Y")
    return {"x": x[:, 1:] - x[:, 1:].mean(0), "y": y}


# --- eight schools


def _schools_centred(p: Any, y: Array, sigma: Array) -> None:
    mu = p.sample("mu", dist.Normal(0.0, 5.0))
    tau = p.sample("tau", dist.HalfCauchy(5.0))
    theta = p.sample("theta", dist.Normal(mu, tau).expand([len(y)]))
    p.observe("y", dist.Normal(theta, sigma), y)


def _schools_noncentred(p: Any, y: Array, sigma: Array) -> None:
    mu = p.sample("mu", dist.Normal(0.0, 5.0))
    tau = p.sample("tau", dist.HalfCauchy(5.0))
    z = p.sample("z", dist.Normal(0.0, 1.0).expand([len(y)]))
    theta = p.deterministic("theta", mu + tau * z)
    p.observe("y", dist.Normal(theta, sigma), y)


def _schools_data(data: dict[str, Any]) -> Data:
    y, sigma = _real(data, "y", "sigma")
    return {"y": y, "sigma": sigma}


# --- time series


def _ark(p: Any, lags: Array, y: Array) -> None:
    alpha = p.sample("alpha", dist.Normal(0.0, 10.0))
    beta = p.sample("beta", dist.Normal(0.0, 10.0).expand([lags.shape[1]]))
    sigma = p.sample("sigma", dist.HalfCauchy(2.5))
    p.observe("y", dist.Normal(alpha + lags @ beta, sigma), y)


def _ark_data(data: dict[str, Any]) -> Data:
    (y,), order = _real(data, "y"), data["K"]
    return {"lags": np.column_stack([y[order - k : -k] for k in range(1, order + 1)]), "y": y[order:]}


def _garch(p: Any, y: Array, sigma1: Array) -> None:
    mu = p.sample("mu", _flat(constraints.real))
    alpha0 = p.sample("alpha0", _flat(constraints.positive))
    alpha1 = p.sample("alpha1", _flat(constraints.unit_interval))
    beta1 = p.sample("beta1", _flat(constraints.interval(0.0, 1.0 - alpha1)))  # flat on the triangle

    def step(variance, before):
        after = alpha0 + alpha1 * (before - mu) ** 2 + beta1 * variance
        return after, after

    _, later = lax.scan(step, sigma1**2, y[:-1])
    variances = jnp.concatenate([sigma1[None] ** 2, later])
    p.observe("y", dist.Normal(mu, jnp.sqrt(variances)), y)


def _garch_data(data: dict[str, Any]) -> Data:
    y, sigma1 = _real(data, "y", "sigma1")
    return {"y": y, "sigma1": sigma1}


def _hmm(p: Any, y: Array) -> None:
    theta = [p.sample(name, dist.Dirichlet(jnp.ones(2))) for name in ("theta1", "theta2")]
    mu = p.sample("mu", _flat(constraints.positive_ordered_vector, 2))
    p.factor("prior of mu", dist.Normal(jnp.array([3.0, 10.0]), 1.0).log_prob(mu).sum())
    transition = jnp.log(jnp.stack(theta))
    emission = dist.Normal(mu, 1.0).log_prob(y[:, None])

    def step(forward, emitted):  # forward: log density of the series so far and the present state
        return emitted + jax.nn.logsumexp(forward[:, None] + transition, axis=0), None

    last, _ = lax.scan(step, emission[0], emission[1:])
    p.factor("y", jax.nn.logsumexp(last))


def _series(data: dict[str, Any]) -> Data:
    (y,) = _real(data, "y")
    return {"y": y}


# --- others


def _mixture(p: Any, y: Array) -> None:
    mu = p.sample("mu", _flat(constraints.ordered_vector, 2))
    p.factor("prior of mu", dist.Normal(0.0, 2.0).log_prob(mu).sum())
    sigma = p.sample("sigma", dist.HalfNormal(2.0).expand([2]))
    theta = p.sample("theta", dist.Beta(5.0, 5.0))
    weights = dist.Categorical(probs=jnp.stack([theta, 1.0 - theta]))
    p.observe("y", dist.MixtureSameFamily(weights, dist.Normal(mu, sigma)), y)


def _gp(p: Any, x: Array, k: Array) -> None:
    rho = p.sample("rho", dist.Gamma(25.0, 4.0))
    alpha = p.sample("alpha", dist.HalfNormal(2.0))
    whitened = p.sample("f_tilde", dist.Normal(0.0, 1.0).expand([len(x)]))
    distance = (x[:, None] - x[None, :]) / rho
    covariance = alpha**2 * jnp.exp(-0.5 * distance**2) + 1e-10 * jnp.eye(len(x))
    f = p.deterministic("f", jnp.linalg.cholesky(covariance) @ whitened)
    p.observe("k", dist.Poisson(jnp.exp(f)), k)


def _gp_data(data: dict[str, Any]) -> Data:
    return {"x": np.asarray(data["x"], float), "k": np.asarray(data["k"], int)}


STEPS = 25


def log_populations(theta: Array, start: Array, times: Array, steps: int = STEPS) -> Array:
    """Logs of prey ``u`` and predator ``v`` at ``times``, ``(time, 2)``, by the classical Runge-Kutta method.

    In logs the populations stay positive: ``d log u = (theta1 - theta2 v) dt``, ``d log v = (-theta3 + theta4 u) dt``.
    Each interval between times is cut into equal steps.
    """
    constant, interaction = jnp.stack([theta[0], -theta[2]]), jnp.stack([-theta[1], theta[3]])

    def slope(logs):
        return constant + interaction * jnp.exp(logs[::-1])

    def advance(logs, duration):
        h = duration / steps

        def step(logs, _):
            k1 = slope(logs)
            k2 = slope(logs + 0.5 * h * k1)
            k3 = slope(logs + 0.5 * h * k2)
            k4 = slope(logs + h * k3)
            return logs + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

        logs, _ = lax.scan(step, logs, None, length=steps)
        return logs, logs

    _, path = lax.scan(advance, jnp.log(start), jnp.diff(times, prepend=0.0))
    return path


def _lotka_volterra(p: Any, times: Array, y: Array, y_init: Array) -> None:
    positive = functools.partial(dist.TruncatedNormal, low=0.0)
    theta = p.sample("theta", positive(jnp.array([1.0, 0.05, 1.0, 0.05]), jnp.array([0.5, 0.05, 0.5, 0.05])))
    z_init = p.sample("z_init", dist.LogNormal(jnp.log(10.0), 1.0).expand([2]))
    sigma = p.sample("sigma", dist.LogNormal(-1.0, 1.0).expand([2]))
    p.observe("y_init", dist.LogNormal(jnp.log(z_init), sigma), y_init)
    p.observe("y", dist.LogNormal(log_populations(theta, z_init, times), sigma), y)


def _lotka_volterra_data(data: dict[str, Any]) -> Data:
    times, y, y_init = _real(data, "ts", "y", "y_init")
    return {"times": times, "y": y, "y_init": y_init}


def _regression_data(data: dict[str, Any]) -> Data:
    x, y = _real(data, "X", "y")
    return {"x": x, "y": y}


_ALL = (
    Posterior("eight_schools-eight_schools_centered", _schools_centred, _schools_data),
    Posterior("eight_schools-eight_schools_noncentered", _schools_noncentred, _schools_data),
    Posterior("arK-arK", _ark, _ark_data),
    Posterior("garch-garch11", _garch, _garch_data),
    Posterior("hmm_example-hmm_example", _hmm, _series),
    Posterior("low_dim_gauss_mix-low_dim_gauss_mix", _mixture, _series),
    Posterior("gp_pois_regr-gp_pois_regr", _gp, _gp_data),
    Posterior("hudson_lynx_hare-lotka_volterra", _lotka_volterra, _lotka_volterra_data),
    Posterior("diamonds-diamonds", _diamonds, _diamonds_data),
    Posterior("nes2000-nes", _flat_regression, _nes),
    Posterior("sblrc-blr", _blr, _regression_data),
    Posterior("kidiq-kidscore_interaction", _kidiq, _kidiq_raw),
    Posterior("kidiq_with_mom_work-kidscore_interaction_z", _flat_regression, _kidiq_standardised),
    Posterior("earnings-earn_height", _flat_regression, _earnings),
    Posterior("mesquite-logmesquite_logvash", _flat_regression, _mesquite),
    Posterior("kilpisjarvi_mod-kilpisjarvi", _kilpisjarvi, _kilpisjarvi_data),
)
POSTERIORS = {posterior.name: posterior for posterior in _ALL}
