"""The law of the sampler's draws, against exact draws: where replicates start from their law, they must stay in it.

Each test starts very many independent replicates at exact draws, moves each, and compares means over replicates before
and after with their standard errors, so that no autocorrelation needs to be estimated. Each bound has its own test of a
kernel that is a little wrong.

- A transition with fixed settings leaves an asymmetric density as it is, and is reversible: ``E f(x) g(x')`` is
  ``E g(x) f(x')``, for a draw ``x`` and its successor ``x'``.
- Transitions alternate with new data given the parameters (Geweke 2004, "Getting it right"); parameters and data then
  keep their joint law. Priors and data are drawn by hand, so that the model's density is tested along with the sampler.
- Whole runs, adaptation included: among the draws from the posterior given data, the rank of the parameters that the
  data were drawn with is uniform (Talts et al. 2018).
"""

import contextlib
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import ppleffects as ppl
from ppleffects.inference import trajectory
from ppleffects.inference.metric import dot
from ppleffects.inference.target import Target
from tests.inference.exact_draws import CASES, DENSITIES, moved, replicates, statistics, z_scores

needs_float64 = pytest.mark.skipif(not jax.config.read("jax_enable_x64"), reason="the bounds are for float64")
pytestmark = [pytest.mark.validate, needs_float64]
MAX_Z, MIN_P = 5.0, 1e-6


def fixed(kernel, step_size, **settings):
    """A kernel that does not adapt."""
    return kernel(step_size=step_size, adapt_step_size=False, adapt_mass_matrix=False, **settings)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WrongTarget(Target):
    """The energy is a little wrong, the gradient right."""

    error: float

    def log_density(self, u):
        first = jax.lax.stop_gradient(u[min(u)]).reshape(-1)[0]
        return super().log_density(u) + self.error * first


def with_error(target, error):
    return WrongTarget(target.model, target.arguments, error) if error else target


# --- transitions alone

# For each density: the identity, or a variance or covariance.
METRICS = {"gumbel": {"x": 1.5}, "banana": np.array([[0.8, 0.5], [0.5, 1.6]])}


def with_metric(kernel, name, **settings):
    scale = 0.8 if name == "banana" else 1.0
    settings["inverse_mass_matrix"] = METRICS[name]
    return fixed(kernel, scale * DENSITIES[name].step_size, metric="dense", **settings)


KERNELS = {
    "NUTS": lambda name: fixed(ppl.NUTS, DENSITIES[name].step_size),
    "NUTS with a metric": lambda name: with_metric(ppl.NUTS, name),
    "NUTS of three steps at most": lambda name: fixed(ppl.NUTS, DENSITIES[name].step_size, max_tree_depth=2),
    "HMC": lambda name: fixed(ppl.HMC, DENSITIES[name].step_size, trajectory_length=3 * DENSITIES[name].step_size),
    "HMC with a metric": lambda name: with_metric(ppl.HMC, name, trajectory_length=2.0),
}


def transitions(name, kernel, error=0.0, number=200_000, seed=0):
    """Exact draws, their first and fourth successors, and the mean acceptance rate."""
    density = DENSITIES[name]
    target = with_error(ppl.target(density.model)(), error)

    def one(key):
        draw_key, key = jax.random.split(key)
        draw = density.draw(draw_key)  # both densities are on the reals, so that positions are values
        positions, acceptance = moved(kernel, target, draw, key, 4)
        successor, end = (jax.tree.map(lambda x, i=i: x[i], positions) for i in (0, -1))
        return draw, successor, end, acceptance

    *draws, acceptance = replicates(one, seed, number)
    return *draws, float(acceptance.mean())


def features(values, edges):
    return statistics(np.stack([values[name] for name in sorted(values)], axis=1), edges)


def departures(name, draws, successors, ends):
    """The largest |z| of stationarity and of reversibility, and the smallest p of the uniforms of the last draws."""
    edges = np.array([-1.0, 0.0, 0.8, 2.0])
    before, after, later = (features(values, edges) for values in (draws, successors, ends))
    stationary = z_scores(later - before)
    pairs = itertools.combinations(range(before.shape[1]), 2)
    reversible = [z_scores((before[:, i] * after[:, j] - before[:, j] * after[:, i])[:, None])[0] for i, j in pairs]
    uniforms = DENSITIES[name].uniforms(ends)
    p = min(stats.kstest(u, "uniform").pvalue for u in uniforms)
    return np.abs(stationary).max(), np.abs(reversible).max(), p


@pytest.mark.parametrize("kind", KERNELS)
@pytest.mark.parametrize("name", DENSITIES)
def test_transitions_are_reversible_and_leave_the_law_as_it_is(name, kind):
    *draws, acceptance = transitions(name, KERNELS[kind](name))
    assert 0.5 < acceptance < 0.95
    stationary, reversible, p = departures(name, *draws)
    assert stationary < MAX_Z
    assert reversible < MAX_Z
    assert p > MIN_P


def one_end(one, other, total):
    """A U-turn looked for at one end only."""
    middle = jax.tree.map(lambda t, a, b: t - 0.5 * (a + b), total, one, other)
    return dot(other, middle) <= 0


def nowhere(path, momentum, total):
    """Subtrees not looked into."""
    return jnp.zeros((), bool), path.checkpoints


@pytest.mark.parametrize(("part", "wrong"), [("_turning", one_end), ("_turning_inside", nowhere)])
def test_a_wrong_u_turn_is_seen(part, wrong, monkeypatch):
    monkeypatch.setattr(trajectory, part, wrong)
    *draws, _ = transitions("gumbel", KERNELS["NUTS"]("gumbel"))
    stationary, reversible, p = departures("gumbel", *draws)
    assert stationary > MAX_Z
    assert reversible > MAX_Z
    assert p < MIN_P


@pytest.mark.parametrize("kind", ["NUTS", "HMC"])
def test_a_wrong_energy_is_seen(kind):
    *draws, _ = transitions("gumbel", KERNELS[kind]("gumbel"), error=0.05)
    stationary, _, p = departures("gumbel", *draws)
    assert stationary > MAX_Z
    assert p < MIN_P


# --- transitions and data in turn


def alternated(name, mesh, error=0.0, rounds=4):
    """A function of a key: numbers that tell an exact draw of parameters and data, and one after some rounds."""
    case = CASES[name]
    model, kernel = case.model(mesh), fixed(ppl.NUTS, case.step_size)

    def told(theta, data):
        return jnp.stack([*case.scalars(theta), *case.summaries(data)])

    def one_round(theta, key):
        data_key, key = jax.random.split(key)
        data = case.data(data_key, theta)
        target = with_error(ppl.target(model)(data), error)
        positions, acceptance = moved(kernel, target, target.unconstrain(theta), key, 2)
        values = target.constrain(jax.tree.map(lambda x: x[-1], positions))
        new = {name: values[name] for name in theta}
        return new, (told(theta, data), told(new, data), acceptance)

    def one(key):
        first, key = jax.random.split(key)
        keys = jax.random.split(key, rounds)
        _, (before, after, acceptance) = jax.lax.scan(one_round, case.prior(first), keys)
        return before[0], after[-1], acceptance.mean()

    return one


def z_of_joint_law(name, mesh, number, error=0.0):
    with jax.set_mesh(mesh) if mesh is not None else contextlib.nullcontext():
        before, after, acceptance = replicates(alternated(name, mesh, error), 1, number)
    assert 0.6 < acceptance.mean() < 0.95
    edges = np.quantile(before, [0.1, 0.4, 0.8], axis=0)
    return np.abs(z_scores(statistics(after, edges) - statistics(before, edges)))


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_data_keep_their_joint_law(name):
    z = z_of_joint_law(name, None, 40_000)
    assert z.size >= 30
    assert z.max() < MAX_Z


@pytest.mark.parametrize("name", CASES)
def test_parameters_and_data_keep_their_joint_law_on_four_devices(name, mesh_data):
    assert z_of_joint_law(name, mesh_data, 16_000).max() < MAX_Z


def test_a_wrong_energy_changes_the_joint_law():
    assert z_of_joint_law("normal", None, 40_000, error=0.15).max() > MAX_Z


# --- runs with adaptation


def joint(name):
    """A function of a key: parameters and data."""
    case = CASES[name]

    def draw(key):
        first, second = jax.random.split(key)
        theta = case.prior(first)
        return theta, case.data(second, theta)

    return draw


def ranked(tree, theta, scalars, rng):
    """Ranks of the truth among the draws of a run, spread within their steps to fill (0, 1)."""
    flat = {site: (x := tree["posterior"][site].values).reshape(-1, *x.shape[2:]) for site in theta}
    draws, truth = np.asarray(jax.vmap(scalars)(flat)), np.asarray(scalars(theta))
    below = (draws < truth).sum(0)
    return (below + rng.uniform(size=below.shape)) / (draws.shape[0] + 1)


def runs(model, draw, scalars, number, thinning, mesh=None, **settings):
    """Ranks of the truth in runs on so many draws of parameters and data. ``(run, *scalars)``"""
    run = ppl.mcmc(model, mesh=mesh, progress=False, **settings)
    rng = np.random.default_rng(0)
    many, ranks = replicates(draw, 2, number), []
    for i in range(number):
        theta, data = jax.tree.map(lambda x, i=i: jnp.asarray(x[i]), many)
        tree = run(i, data).isel(draw=slice(None, None, thinning))
        ranks.append(ranked(tree, theta, scalars, rng))
    return np.stack(ranks)


def p_of_uniform(u):
    """The smallest p value of each column's shape, histogram, mean and spread."""
    bins = [np.histogram(column, bins=10, range=(0, 1))[0] for column in u.T]
    centred = (u - 0.5) / np.sqrt(1 / 12), ((u - 0.5) ** 2 - 1 / 12) / np.sqrt(1 / 180)  # of variance 1
    z = np.stack([x.mean(0) * np.sqrt(u.shape[0]) for x in centred])
    found = [stats.kstest(u, "uniform").pvalue, stats.chisquare(bins, axis=1).pvalue, 2 * stats.norm.sf(np.abs(z))]
    return min(np.min(p) for p in found)


@pytest.mark.filterwarnings("ignore:mcmc.*:ppleffects.errors.DiagnosticsWarning")
@pytest.mark.parametrize("name", CASES)
def test_ranks_of_the_true_parameters_are_uniform(name):
    case = CASES[name]
    u = runs(case.model(None), joint(name), lambda theta: jnp.stack(case.scalars(theta)), 500, thinning=40)
    assert p_of_uniform(u) > 1e-4


@pytest.mark.filterwarnings("ignore:mcmc.*:ppleffects.errors.DiagnosticsWarning")
@pytest.mark.parametrize("name", CASES)
def test_ranks_of_the_true_parameters_are_uniform_on_four_devices(name, mesh_data):
    """In each run are 16 data sets side by side, since one costs about as much."""
    case = CASES[name]
    one = joint(name)

    def model(data):
        jax.vmap(case.model(mesh_data))(data)

    def draw(key):
        return jax.vmap(one)(jax.random.split(key, 16))

    def scalars(theta):
        return jax.vmap(lambda theta: jnp.stack(case.scalars(theta)))(theta)

    u = runs(model, draw, scalars, 6, thinning=10, mesh=mesh_data, num_samples=250)
    assert p_of_uniform(u.reshape(6 * 16, -1)) > 1e-4


@pytest.mark.parametrize(("shift", "stretch"), [(0.25, 1.0), (0.0, 1.2), (0.0, 0.8)])
def test_ranks_that_are_not_uniform_are_seen(shift, stretch):
    z = stretch * np.random.default_rng(0).normal(size=(500, 3)) + shift
    u = stats.norm.cdf(z)
    assert p_of_uniform(u) < 1e-4
