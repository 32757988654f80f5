"""BlackJAX's transitions and warm-up, against BlackJAX, closed forms, and every layout."""

import subprocess
import sys
import warnings

import arviz as az
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import MissingDependencyError, SettingsError

blackjax = pytest.importorskip("blackjax")
pytestmark = pytest.mark.filterwarnings("ignore:mcmc.*:ppleffects.errors.DiagnosticsWarning")
RNG = np.random.default_rng(0)
SD = np.array([0.1, 1.0, 5.0])
QUIET = {"progress": False}


def normal():
    ppl.sample("x", dist.Normal(jnp.array([1.0, 2.0, 3.0]), SD))


@pytest.mark.parametrize("metric", ["diagonal", "dense"])
@pytest.mark.parametrize("num_warmup", [15, 60])  # without and with windows that estimate a metric
def test_warm_up_is_that_of_blackjax(metric, num_warmup):
    kernel = ppl.NUTS(engine="blackjax", metric=metric, target_accept=0.9, max_tree_depth=3)
    target, count = ppl.target(normal)(), num_warmup + 10
    start = {"x": jnp.array([0.5, -0.5, 1.0])}
    first = kernel.init(target, start, jax.random.key(3), num_warmup)
    _, (found, info) = jax.lax.scan(
        lambda state, _: (lambda new, info: (new, (new.position["x"], info)))(*kernel.step(target, state)),
        first,
        None,
        length=count,
    )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        begin, update, final = blackjax.adaptation.window_adaptation.base(metric == "diagonal", 0.9)
    schedule = blackjax.adaptation.window_adaptation.build_schedule(num_warmup)
    step = jax.jit(blackjax.mcmc.nuts.build_kernel(), static_argnums=(2, 5))
    state, adaptation = blackjax.mcmc.nuts.init(start, target.log_density), begin(start, 1.0)
    step_size, matrix, key = adaptation.step_size, adaptation.inverse_mass_matrix, first.key
    expected, sizes = [], []
    for i in range(count):
        key, own = jax.random.split(key)
        state, told = step(own, state, target.log_density, step_size, matrix, 3)
        expected.append(state.position["x"])
        sizes.append(float(step_size))
        if i < num_warmup:
            adaptation = update(adaptation, schedule[i], state.position, told.acceptance_rate)
            step_size, matrix = adaptation.step_size, adaptation.inverse_mass_matrix
        if i == num_warmup - 1:
            step_size, matrix = final(adaptation)
    np.testing.assert_allclose(found, jnp.stack(expected), rtol=1e-6)
    np.testing.assert_allclose(info.step_size, sizes, rtol=1e-6)
    assert np.allclose(matrix, np.eye(3) if metric == "dense" else 1.0) == (num_warmup < 20)


@pytest.mark.parametrize("kernel", [ppl.NUTS, ppl.HMC])
@pytest.mark.parametrize("metric", ["auto", "dense"])
def test_draws_have_the_moments_of_the_posterior(kernel, metric):
    run = ppl.mcmc(normal, kernel(engine="blackjax", metric=metric), num_warmup=500, num_samples=1000, **QUIET)
    tree = run(1)
    x = tree["posterior"]["x"].values
    for draws, mean in ((x, [1.0, 2.0, 3.0]), ((x - [1.0, 2.0, 3.0]) ** 2, SD**2)):
        ess, error = effective(draws)
        assert (ess > 400).all()
        assert (np.abs(draws.mean((0, 1)) - mean) < 5 * error).all()
    names = {"lp", "acceptance_rate", "diverging", "energy", "n_steps", "step_size"}
    depth = {"tree_depth", "reached_max_treedepth"} if kernel is ppl.NUTS else set()
    stats = tree["sample_stats"]
    assert set(stats.data_vars) == names | depth
    expected = -0.5 * ((x - [1.0, 2.0, 3.0]) / SD) ** 2 - np.log(SD) - 0.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(stats["lp"], expected.sum(-1), rtol=1e-9)
    # The kinetic energy of three standard normal momenta.
    kinetic = (stats["energy"] + stats["lp"]).values
    assert (kinetic > 0).all()
    assert abs(kinetic.mean() - 1.5) < 0.1


def effective(draws):
    """Effective sample sizes of ``(chain, draw, coordinate)``, and the standard errors of the means."""
    ess = np.array([float(az.ess(np.asarray(draws[..., i]), method="mean")) for i in range(draws.shape[-1])])
    return ess, draws.std((0, 1)) / np.sqrt(ess)


@pytest.mark.parametrize("settings", [{"chunk_size": 7}, {"num_chains": 2}], ids=str)
def test_draws_do_not_depend_on_chunks_nor_on_other_chains(settings):
    common = {"num_warmup": 40, "num_samples": 21, "num_chains": 3, **QUIET}
    kernel = ppl.NUTS(engine="blackjax")
    expected = ppl.mcmc(normal, kernel, **common)(5)["posterior"]["x"].values
    found = ppl.mcmc(normal, kernel, **common | settings)(5)["posterior"]["x"].values
    if "chunk_size" in settings:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found[:, :1], expected[: len(found), :1], rtol=1e-6)


@pytest.mark.skipif(jax.device_count() < 4, reason="the mesh has four devices")
@pytest.mark.skipif(jax.config.jax_check_tracer_leaks, reason="jit(grad(shard_map(f))) of plain JAX fails under it")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_posterior_of_sharded_rows_is_the_exact_one(axis_type):
    mesh = jax.make_mesh((2, 2), ("chains", "data"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    rows = RNG.normal(size=20) + 1.0

    def shard(mean, y):
        ppl.observe("y", dist.Normal(mean, 1.0), y)

    def model(y):
        mean = ppl.sample("mean", dist.Normal(0.0, 2.0))
        jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=None)(mean, y)

    y = jax.device_put(jnp.asarray(rows), jax.NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        run = ppl.mcmc(model, ppl.NUTS(engine="blackjax"), num_warmup=200, num_samples=500, num_chains=4, **QUIET)
        draws = run(2, y)["posterior"]["mean"].values
    precision = len(rows) + 0.25
    ess, error = effective(draws[..., None])
    assert ess[0] > 300
    assert abs(draws.mean() - rows.sum() / precision) < 5 * error[0]
    assert abs(draws.std() * np.sqrt(precision) - 1) < 5 / np.sqrt(2 * ess[0])


@pytest.mark.parametrize(
    "setting",
    [
        {"metric": "low_rank"},
        {"metric": (("x",),)},
        {"dense_mass": (("x",),)},
        {"pool_chains": True},
        {"inverse_mass_matrix": {"x": 1.0}},
    ],
    ids=str,
)
def test_settings_that_it_does_not_have(setting):
    with pytest.raises(SettingsError, match="BlackJAX's engine does not have this setting"):
        ppl.NUTS(engine="blackjax", **setting)


@pytest.mark.parametrize("setting", ["regularize_mass_matrix", "find_heuristic_step_size"])
def test_settings_of_numpyro_alone(setting):
    value = setting == "find_heuristic_step_size"
    with pytest.raises(SettingsError, match="which are NumPyro's"):
        ppl.HMC(engine="blackjax", **{setting: value})


def test_what_is_not_adapted_stays():
    kernel = ppl.NUTS(engine="blackjax", step_size=0.05, adapt_step_size=False, adapt_mass_matrix=False)
    stats = ppl.mcmc(normal, kernel, num_warmup=30, num_samples=10, **QUIET)(0)["sample_stats"]
    np.testing.assert_array_equal(stats["step_size"], 0.05)


def test_without_blackjax(monkeypatch):
    monkeypatch.setitem(sys.modules, "blackjax", None)
    with pytest.raises(MissingDependencyError, match=r"(?s)needs BlackJAX.*pip install 'ppleffects\[blackjax\]'"):
        ppl.mcmc(normal, ppl.NUTS(engine="blackjax"), **QUIET)(0)


def test_it_is_imported_when_it_is_used():
    code = "import sys, ppleffects as ppl; ppl.NUTS(engine='blackjax'); sys.exit('blackjax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
