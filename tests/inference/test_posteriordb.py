"""NUTS on meshes of every shape against the reference posteriors of posteriordb, and the same chains on each."""

import functools
import itertools
import json
import math
from pathlib import Path

import arviz as az
import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

pytestmark = pytest.mark.filterwarnings("ignore:mcmc.*:ppleffects.errors.DiagnosticsWarning")

FOLDER = Path(__file__).resolve().parent.parent / "data" / "posteriordb"
# chains x data, with axes of both types
LAYOUTS = {
    "2x2": (2, 2, AxisType.Explicit),
    "1x4": (1, 4, AxisType.Auto),
    "4x1": (4, 1, AxisType.Explicit),
    "1x1": (1, 1, AxisType.Auto),
}
MIN_ESS, MAX_STANDARD_ERRORS = 400, 5
NUM_FIRST = 10


def make_mesh(layout: str) -> Mesh:
    *sizes, axis_type = LAYOUTS[layout]
    count = math.prod(sizes)
    if jax.device_count() < count:
        pytest.skip(f"needs {count} devices and finds {jax.device_count()}")
    if jax.config.jax_check_tracer_leaks:
        pytest.skip("jit(grad(shard_map(f))) of plain JAX fails under the check for leaks")
    return jax.make_mesh(sizes, ("chains", "data"), axis_types=(axis_type,) * 2, devices=jax.devices()[:count])


def place(data, mesh: Mesh):
    """Rows along the axis of data, as `in_specs` has them: on Explicit axes JAX takes no other place."""
    return jax.device_put(data, NamedSharding(mesh, P("data")))


def schools_noncentred(mesh: Mesh):
    """Schools and their latents live on the shards."""

    def schools(mu, tau, y, sigma):
        z = ppl.sample("z", dist.Normal(0.0, 1.0).expand(y.shape), spec=P("data"))
        theta = ppl.deterministic("theta", mu + tau * z)
        ppl.observe("y", dist.Normal(theta, sigma), y)

    return over_schools(schools, mesh)


def schools_centred(mesh: Mesh):
    def schools(mu, tau, y, sigma):
        theta = ppl.sample("theta", dist.Normal(mu, tau).expand(y.shape), spec=P("data"))
        ppl.observe("y", dist.Normal(theta, sigma), y)

    return over_schools(schools, mesh)


def over_schools(schools, mesh: Mesh):
    def model(y, sigma):
        mu = ppl.sample("mu", dist.Normal(0.0, 5.0))
        tau = ppl.sample("tau", dist.HalfCauchy(5.0))
        specs = (P(), P(), P("data"), P("data"))
        jax.shard_map(schools, mesh=mesh, in_specs=specs, out_specs=None)(mu, tau, y, sigma)

    return model


def schools_data(data):
    return {"y": np.asarray(data["y"], float), "sigma": np.asarray(data["sigma"], float)}


def regression(mesh: Mesh):
    """Rows live on the shards, coefficients are shared."""

    def rows(beta, sigma, x, y):
        ppl.observe("y", dist.Normal(x @ beta, sigma), y)

    def model(x, y):
        beta = ppl.sample("beta", dist.Normal(0.0, 10.0).expand([x.shape[1]]))
        sigma = ppl.sample("sigma", dist.HalfNormal(10.0))
        specs = (P(), P(), P("data"), P("data"))
        jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=None)(beta, sigma, x, y)

    return model


def regression_data(data):
    return {"x": np.asarray(data["X"], float), "y": np.asarray(data["y"], float)}


def masked_regression(mesh: Mesh):
    """Flat priors, and rows without a score, masked: the number of children is no multiple of four."""

    def rows(beta, sigma, x, y, keep):
        ppl.observe("y", dist.Normal(x @ beta, sigma), y, mask=keep)

    def model(x, y, keep):
        beta = ppl.sample("beta", dist.ImproperUniform(dist.constraints.real, (x.shape[1],), ()))
        sigma = ppl.sample("sigma", dist.ImproperUniform(dist.constraints.positive, (), ()))
        specs = (P(), P(), P("data"), P("data"), P("data"))
        jax.shard_map(rows, mesh=mesh, in_specs=specs, out_specs=None)(beta, sigma, x, y, keep)

    return model


def kidiq_data(data):
    hs, iq, score = (np.asarray(data[name], float) for name in ("mom_hs", "mom_iq", "kid_score"))
    hs, iq = ((x - x.mean()) / (2 * x.std(ddof=1)) for x in (hs, iq))
    x = np.column_stack([np.ones_like(hs), hs, iq, hs * iq])
    padding = -len(score) % 4
    score = np.concatenate([score, np.full(padding, np.nan)])
    x = np.concatenate([x, np.zeros((padding, x.shape[1]))])
    return {"x": x, "y": score, "keep": ~np.isnan(score)}


# name: folder, model, data, settings of NUTS, draws after warm-up
POSTERIORS = {
    "schools": (
        "eight_schools-eight_schools_noncentered",
        schools_noncentred,
        schools_data,
        {"target_accept": 0.9},
        500,
    ),
    "schools centred": (
        "eight_schools-eight_schools_centered",
        schools_centred,
        schools_data,
        {"target_accept": 0.99},
        8000,
    ),
    "regression": ("sblrc-blr", regression, regression_data, {}, 500),
    "masked regression": (
        "kidiq_with_mom_work-kidscore_interaction_z",
        masked_regression,
        kidiq_data,
        {},
        500,
    ),
}
QUICK = ["schools", "regression"]


@functools.cache
def sample(name: str, layout: str):
    """A run of four chains, warm-up included; shared by the tests below."""
    folder, model, prepare, settings, num_samples = POSTERIORS[name]
    mesh = make_mesh(layout)
    data = place(prepare(json.loads((FOLDER / folder / "data.json").read_text())), mesh)
    sampler = ppl.mcmc(
        model(mesh),
        ppl.NUTS(**settings),
        num_warmup=300,
        num_samples=num_samples,
        num_chains=4,
        mesh=mesh,
        groups=("warmup",),
        progress=False,
    )
    return sampler(1, **data)


def assert_posterior(name: str, trace):
    """First the effective sample size, then each mean, in standard errors of run and reference together."""
    folder, *_ = POSTERIORS[name]
    reference = json.loads((FOLDER / folder / "reference.json").read_text())["parameters"]
    assert trace.attrs["complete"]
    summary = {}
    for scalar, expected in reference.items():
        site, _, index = scalar.partition("[")
        draws = trace.posterior[site].values
        draws = draws[:, :, int(index.rstrip("]")) - 1] if index else draws
        errors = np.hypot(az.mcse(draws, method="mean"), expected["mcse_mean"])
        summary[scalar] = float(az.ess(draws, method="mean")), (draws.mean() - expected["mean"]) / errors
    assert min(ess for ess, _ in summary.values()) >= MIN_ESS, summary
    assert max(abs(z) for _, z in summary.values()) <= MAX_STANDARD_ERRORS, summary


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", QUICK)
def test_posterior_means(name, layout):
    assert_posterior(name, sample(name, layout))


@pytest.mark.validate
@pytest.mark.parametrize("layout", LAYOUTS)
def test_posterior_means_with_masked_rows(layout):
    assert_posterior("masked regression", sample("masked regression", layout))


@pytest.mark.validate
def test_posterior_means_of_centred_schools():
    """A funnel: hundreds of leapfrogs per draw, and thousands of draws. On one device, where a leapfrog is cheap."""
    assert_posterior("schools centred", sample("schools centred", "1x1"))


@pytest.mark.parametrize("layout", [layout for layout in LAYOUTS if layout != "1x1"])
@pytest.mark.parametrize("name", QUICK)
def test_first_transitions_are_those_of_one_device(name, layout):
    """Every draw and statistic of the first ten warm-up transitions, of each of the four chains."""
    here, one = sample(name, layout), sample(name, "1x1")
    for group in ("warmup_posterior", "warmup_sample_stats"):
        assert set(here[group].data_vars) == set(one[group].data_vars)
        for variable in one[group].data_vars:
            first, expected = (tree[group][variable].values[:, :NUM_FIRST] for tree in (here, one))
            assert expected.shape[:2] == (4, NUM_FIRST)
            np.testing.assert_allclose(first, expected, rtol=1e-8, atol=1e-8, err_msg=f"{group}/{variable}")


@functools.cache
def starts(layout: str):
    """Where the chains start: the draws of a sampler that goes nowhere."""
    mesh = make_mesh(layout)
    data = place(schools_data(json.loads((FOLDER / POSTERIORS["schools"][0] / "data.json").read_text())), mesh)
    still = ppl.NUTS(step_size=1e-15, adapt_step_size=False, adapt_mass_matrix=False, max_tree_depth=1)
    settings = {"num_warmup": 0, "num_samples": 1, "num_chains": 4, "progress": False}
    return ppl.mcmc(schools_noncentred(mesh), still, mesh=mesh, **settings)(1, **data).posterior


def assert_starts_are_those_of_one_device(layout: str):
    here, one = starts(layout), starts("1x1")
    for name in ("mu", "tau", "z"):
        np.testing.assert_allclose(here[name].values, one[name].values, rtol=1e-8, atol=1e-8)
        chains = one[name].values.reshape(4, -1)
        assert all(not np.allclose(a, b) for a, b in itertools.combinations(chains, 2))


def test_starts_are_those_of_one_device():
    assert_starts_are_those_of_one_device("2x2")


@pytest.mark.validate
@pytest.mark.parametrize("layout", ["1x4", "4x1"])
def test_starts_on_other_layouts(layout):
    assert_starts_are_those_of_one_device(layout)
