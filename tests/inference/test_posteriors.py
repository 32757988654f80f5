"""The sampler as it comes, without a setting, on 16 posteriors with reference results; and the models themselves."""

import arviz as az
import jax
import numpy as np
import pytest
from numpyro.infer.util import log_density, potential_energy
from scipy.integrate import solve_ivp

import ppleffects as ppl
from benchmarks._posteriors import FOLDER, POSTERIORS, log_populations

SEEDS = range(3)
MIN_ESS, MEAN_ERRORS, SD_ERRORS = 400, 5, 6
FUNNEL = "eight_schools-eight_schools_centered"
# Its 4000 default draws are worth 280 to 500 of the slowest scalar: judged by three times as many.
SLOW = "gp_pois_regr-gp_pois_regr"
needs_float64 = pytest.mark.skipif(not jax.config.read("jax_enable_x64"), reason="these posteriors need float64")


def test_every_posterior_is_there():
    assert {folder.name for folder in FOLDER.iterdir() if folder.is_dir()} == set(POSTERIORS)


@needs_float64
@pytest.mark.parametrize("name", POSTERIORS)
def test_density_is_that_of_numpyro(name):
    """At three points: of the values, and of the unconstrained coordinates with their log-determinants."""
    posterior = POSTERIORS[name]
    arguments = posterior.arguments
    target = ppl.target(posterior.model)(**arguments)

    def ours(u):
        values = {site: value for site, value in target.constrain(u).items() if site in u}
        density, gradient = jax.value_and_grad(target.log_density)(u)
        return values, (ppl.log_density(posterior.model)(values, **arguments), density), gradient

    def theirs(u, values):
        density, _ = log_density(posterior.numpyro, (), arguments, values)
        energy, slope = jax.value_and_grad(lambda u: potential_energy(posterior.numpyro, (), arguments, u))(u)
        return (density, -energy), jax.tree.map(lambda leaf: -leaf, slope)

    points = jax.vmap(target.init)(jax.random.split(jax.random.key(0), 3))
    values, densities, gradient = jax.jit(jax.vmap(ours))(points)
    expected_densities, expected_gradient = jax.jit(jax.vmap(theirs))(points, values)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((densities, gradient)))
    np.testing.assert_allclose(densities, expected_densities, rtol=1e-10)
    for site, expected in expected_gradient.items():
        np.testing.assert_allclose(gradient[site], expected, rtol=1e-8, atol=1e-8, err_msg=site)


@needs_float64
def test_populations_solve_their_equations():
    """Near the posterior mean, and at the 5 % and 95 % quantiles of every unknown."""
    reference = POSTERIORS["hudson_lynx_hare-lotka_volterra"].reference
    times = np.arange(1.0, 21.0)
    for figure in ("mean", "q5", "q95"):
        theta = np.array([reference[f"theta[{i}]"][figure] for i in range(1, 5)])
        start = np.array([reference[f"z_init[{i}]"][figure] for i in (1, 2)])

        def slope(_, logs, theta=theta):
            u, v = np.exp(logs)
            return [theta[0] - theta[1] * v, -theta[2] + theta[3] * u]

        tight = {"method": "DOP853", "rtol": 1e-11, "atol": 1e-11}
        solution = solve_ivp(slope, (0.0, times[-1]), np.log(start), t_eval=times, **tight)
        np.testing.assert_allclose(log_populations(theta, start, times), solution.y.T, atol=1e-5)


def sample(name, seed, kernel=None, **settings):
    arguments = [] if kernel is None else [kernel]
    run = ppl.mcmc(POSTERIORS[name].model, *arguments, num_chains=4, progress=False, **settings)
    return run(seed, **POSTERIORS[name].arguments)


def assert_posterior(name, trace):
    """First the effective sample sizes; then means and sds, in standard errors of run and reference together."""
    posterior = POSTERIORS[name]
    assert trace.attrs["complete"]
    ess, errors_of_mean, errors_of_sd = {}, {}, {}
    for scalar, draws in posterior.scalars(trace["posterior"].dataset).items():
        expected = posterior.reference[scalar]
        ess[scalar] = min(float(az.ess(draws, method=method)) for method in ("bulk", "mean", "sd"))
        mean_error = np.hypot(az.mcse(draws, method="mean"), expected["mcse_mean"])
        sd_error = np.hypot(az.mcse(draws, method="sd"), expected["mcse_sd"])
        errors_of_mean[scalar] = abs(draws.mean() - expected["mean"]) / mean_error
        errors_of_sd[scalar] = abs(draws.std(ddof=1) - expected["sd"]) / sd_error
    assert min(ess.values()) >= MIN_ESS, (ess, trace.attrs["problems"])
    assert max(errors_of_mean.values()) <= MEAN_ERRORS, errors_of_mean
    assert max(errors_of_sd.values()) <= SD_ERRORS, errors_of_sd


@needs_float64
@pytest.mark.validate
@pytest.mark.filterwarnings("ignore:mcmc.*:ppleffects.errors.DiagnosticsWarning")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", [name for name in POSTERIORS if name != FUNNEL])
def test_default_sampler_finds_the_posterior(name, seed):
    assert_posterior(name, sample(name, seed, num_samples=5000 if name == SLOW else 1000))


@needs_float64
@pytest.mark.validate
@pytest.mark.filterwarnings("ignore:mcmc.*:ppleffects.errors.DiagnosticsWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_small_steps_find_the_funnel(seed):
    """In a funnel draws by default are few and biased (the posterior's ``model.md``): small steps, and many of them."""
    assert_posterior(FUNNEL, sample(FUNNEL, seed, ppl.NUTS(target_accept=0.99), num_samples=20000))


@needs_float64
@pytest.mark.validate
@pytest.mark.filterwarnings("ignore:mcmc.*:ppleffects.errors.DiagnosticsWarning")
@pytest.mark.parametrize("seed", SEEDS)
def test_default_sampler_knows_the_funnel(seed):
    """What it does not find it warns of."""
    trace = sample(FUNNEL, seed)
    if not trace.attrs["problems"]:
        assert_posterior(FUNNEL, trace)
