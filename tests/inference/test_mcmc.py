"""The driver: layouts, independence of how it is called, groups, starts, errors. Models are tiny, runs are short."""

import logging
import re
import threading
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import (
    DiagnosticsWarning,
    LayoutWarning,
    MeshError,
    NoValidStartError,
    PPLError,
    SettingsError,
    ShapeError,
    ValuesError,
)
from ppleffects.inference import HMC, NUTS, mcmc
from ppleffects.inference.progress import Progress

pytestmark = pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")

Y = np.random.default_rng(0).normal(1.0, 1.0, size=8)
# Normal(0, 1) prior, unit noise: the posterior of the mean is Normal(sum(y) / (n + 1), 1 / sqrt(n + 1)).
MEAN, SD = Y.sum() / 9, 1 / 3
SHORT = {"num_warmup": 20, "num_samples": 40, "progress": False}


def model(y):
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
    rate = ppl.sample("rate", dist.Gamma(3.0, 1.0))
    ppl.deterministic("ratio", mu / rate)
    ppl.observe("y", dist.Normal(mu, 1.0), y)


def sharded(y):
    """As ``model``, its likelihood on the shards of `data` and a latent there too."""
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
    ppl.sample("rate", dist.Gamma(3.0, 1.0))

    def body(mu, y):
        local = ppl.sample("local", dist.Normal(jnp.zeros_like(y), 1.0), dims=("row",))
        ppl.observe("y", dist.Normal(mu + 0 * local, 1.0), y)

    jax.shard_map(body, in_specs=(P(), P("data")), out_specs=P())(mu, y)


def unsharded(y):
    """The same density as ``sharded``."""
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
    ppl.sample("rate", dist.Gamma(3.0, 1.0))
    local = ppl.sample("local", dist.Normal(jnp.zeros_like(y), 1.0), dims=("row",))
    ppl.observe("y", dist.Normal(mu + 0 * local, 1.0), y)


def layout(axis_type, chains, data):
    if jax.device_count() < chains * data:
        pytest.skip("needs 4 devices")
    if jax.config.jax_check_tracer_leaks:
        pytest.skip("jit(grad(shard_map(f))) of plain JAX reports a leak that is none")
    mesh = jax.make_mesh((chains, data), ("chains", "data"), axis_types=(axis_type,) * 2)
    return mesh, jax.device_put(Y, NamedSharding(mesh, P("data")))


@pytest.fixture(scope="module")
def long_run():
    with warnings.catch_warnings():
        warnings.simplefilter("error", DiagnosticsWarning)  # a run without problems says nothing
        return mcmc(model, num_warmup=400, num_samples=1000, progress=False)(3, Y)


@pytest.fixture(scope="module")
def short_run():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DiagnosticsWarning)
        return mcmc(model, groups=("warmup", "log_likelihood"), **SHORT)(0, Y)


def test_closed_form_posterior(long_run):
    assert min(long_run.attrs["min_ess_bulk"], long_run.attrs["min_ess_tail"]) >= 400
    ess = long_run.attrs["min_ess_bulk"]
    posterior = long_run.posterior
    assert abs(float(posterior.mu.mean()) - MEAN) < 5 * SD / ess**0.5
    assert abs(float(posterior.rate.mean()) - 3.0) < 5 * 3**0.5 / ess**0.5
    assert abs(float(posterior.mu.std()) - SD) < 5 * SD / ess**0.5
    assert abs(float((posterior.rate < 2.6741).mean()) - 0.5) < 5 * 0.5 / ess**0.5  # the median of Gamma(3, 1)
    np.testing.assert_allclose(posterior.ratio, posterior.mu / posterior.rate)


def test_posterior_on_a_mesh_with_latents_on_the_shards():
    mesh, y = layout(AxisType.Explicit, 2, 2)
    tree = mcmc(sharded, mesh=mesh, num_warmup=200, num_samples=500, progress=False)(3, y)
    ess = tree.attrs["min_ess_bulk"]
    assert ess >= 400
    assert abs(float(tree.posterior.mu.mean()) - MEAN) < 5 * SD / ess**0.5
    assert abs(float(tree.posterior.rate.mean()) - 3.0) < 5 * 3**0.5 / ess**0.5
    assert tree.posterior.local.dims == ("chain", "draw", "row")
    assert (abs(tree.posterior.local.mean(("chain", "draw"))) < 5 / ess**0.5).all()


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (4, 1)], ids=str)
def test_layouts_start_and_step_alike(axis_type, sizes, reference_of_layouts):
    mesh, y = layout(axis_type, *sizes)
    with jax.set_mesh(mesh):
        tree = mcmc(sharded, groups=("warmup",), num_warmup=10, num_samples=10, progress=False)(0, y)
    for name in ("mu", "rate", "local"):
        np.testing.assert_allclose(tree.warmup_posterior[name], reference_of_layouts[name], atol=1e-8)


@pytest.fixture(scope="module")
def reference_of_layouts():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DiagnosticsWarning)
        return mcmc(unsharded, groups=("warmup",), num_warmup=10, num_samples=10, progress=False)(0, Y).warmup_posterior


@pytest.mark.parametrize("num_chains", [1, 3, 5])
def test_any_number_of_chains(num_chains, reference_of_layouts):
    mesh, y = layout(AxisType.Auto, 2, 2)
    tree = mcmc(
        sharded, mesh=mesh, num_chains=num_chains, groups=("warmup",), num_warmup=10, num_samples=5, progress=False
    )(0, y)
    assert tree.posterior.sizes["chain"] == num_chains
    both = min(num_chains, 4)
    np.testing.assert_allclose(tree.warmup_posterior.mu[:both], reference_of_layouts.mu[:both], atol=1e-8)
    assert len(np.unique(tree.posterior.mu[:, -1])) == num_chains


def test_a_mesh_without_chains():
    both, _ = layout(AxisType.Explicit, 1, 4)
    mesh = jax.make_mesh((4,), ("data",), devices=both.devices.flat, axis_types=(AxisType.Explicit,))
    y = jax.device_put(Y, NamedSharding(mesh, P("data")))
    tree = mcmc(sharded, mesh=mesh, **SHORT)(0, y)
    assert tree.posterior.sizes == {"chain": 4, "draw": 40, "row": 8}


def test_the_mesh_of_the_model(reference_of_layouts):
    mesh, y = layout(AxisType.Auto, 2, 2)

    def names_it(y):
        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
        ppl.sample("rate", dist.Gamma(3.0, 1.0))

        def body(mu, y):
            ppl.sample("local", dist.Normal(jnp.zeros_like(y), 1.0))
            ppl.observe("y", dist.Normal(mu, 1.0), y)

        jax.shard_map(body, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())(mu, y)

    tree = mcmc(names_it, groups=("warmup",), num_warmup=10, num_samples=5, progress=False)(0, y)
    assert tree.attrs["mesh"] == '{"chains": 2, "data": 2}'
    np.testing.assert_allclose(tree.warmup_posterior.mu, reference_of_layouts.mu, atol=1e-8)
    other = jax.make_mesh((4, 1), ("chains", "data"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(MeshError, match=r"(?s)\(chains: 4 Auto, data: 1 Auto\).*\(chains: 2 Auto, data: 2 Auto\)"):
        mcmc(names_it, mesh=other, progress=False)(0, Y)


def test_permutes_among_shards_on_cpus():
    def ring(y):
        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))

        def body(mu, y):
            size = jax.lax.axis_size("data")
            left = jax.lax.ppermute(y + 0 * mu, "data", [(i, (i + 1) % size) for i in range(size)])
            ppl.observe("y", dist.Normal(mu + 0.5 * left, 1.0), y)

        jax.shard_map(body, in_specs=(P(), P("data")), out_specs=P())(mu, y)

    mesh, y = layout(AxisType.Auto, 2, 2)
    with pytest.warns(LayoutWarning, match="the density permutes values among shards"):
        tree = mcmc(ring, mesh=mesh, num_warmup=100, num_samples=200, progress=False)(0, y)
    mean = (Y - 0.5 * np.roll(Y, 4)).sum() / 9
    assert abs(float(tree.posterior.mu.mean()) - mean) < 5 * SD / tree.attrs["min_ess_bulk"] ** 0.5


def test_data_not_yet_on_the_mesh(short_run):
    mesh, _ = layout(AxisType.Auto, 2, 2)
    tree = mcmc(model, mesh=mesh, groups=("warmup",), **SHORT)(0, jax.device_put(Y, jax.devices()[0]))
    np.testing.assert_allclose(tree.warmup_posterior.mu[:, :10], short_run.warmup_posterior.mu[:, :10], atol=1e-8)


@pytest.mark.parametrize("chunk_size", [1, 7, 64])
def test_draws_do_not_depend_on_chunks(chunk_size, short_run):
    tree = mcmc(model, groups=("warmup", "log_likelihood"), **SHORT, chunk_size=chunk_size)(0, Y)
    for group in ("posterior", "warmup_posterior", "sample_stats", "log_likelihood"):
        assert short_run[group].to_dataset().equals(tree[group].to_dataset())


def test_draws_do_not_depend_on_progress(short_run, capsys):
    tree = mcmc(model, **(SHORT | {"progress": True}))(0, Y)
    assert short_run.posterior.to_dataset().equals(tree.posterior.to_dataset())
    assert "sampling 40/40" in capsys.readouterr().err


def test_thinning_keeps_every_third(short_run):
    tree = mcmc(model, thinning=3, groups=("warmup",), **SHORT)(0, Y)
    np.testing.assert_array_equal(tree.posterior.mu, short_run.posterior.mu[:, 2:39:3])
    np.testing.assert_array_equal(tree.sample_stats.lp, short_run.sample_stats.lp[:, 2:39:3])
    np.testing.assert_array_equal(tree.warmup_posterior.mu, short_run.warmup_posterior.mu[:, 2::3])
    assert tree.attrs["num_transitions"] == 4 * 39


@pytest.mark.parametrize("key", [0, np.array([0, 0], np.uint32), jax.random.key(0)], ids=["seed", "uint32", "typed"])
def test_keys(key, short_run):
    assert short_run.posterior.to_dataset().equals(mcmc(model, **SHORT)(key, Y).posterior.to_dataset())


def test_other_key_other_draws(short_run):
    assert not np.isin(mcmc(model, **SHORT)(1, Y).posterior.mu, short_run.posterior.mu).any()


def test_groups_and_attributes(short_run):
    assert set(short_run.children) == {
        "posterior",
        "sample_stats",
        "log_likelihood",
        "warmup_posterior",
        "warmup_sample_stats",
        "observed_data",
    }
    assert set(short_run.posterior.data_vars) == {"mu", "rate", "ratio"}
    assert set(short_run.sample_stats.data_vars) == {
        "lp",
        "energy",
        "acceptance_rate",
        "diverging",
        "n_steps",
        "tree_depth",
        "reached_max_treedepth",
        "step_size",
    }
    np.testing.assert_array_equal(short_run.observed_data.y, Y)
    mu = short_run.posterior.mu.values[..., None]
    np.testing.assert_allclose(short_run.log_likelihood.y, -0.5 * (Y - mu) ** 2 - 0.5 * np.log(2 * np.pi))
    attrs = short_run.attrs
    assert attrs["inference_library"] == "ppleffects"
    assert attrs["complete"] is True
    assert attrs["seed"] == 0
    assert attrs["kernel"] == "NUTS"
    assert '"target_accept": null' in attrs["kernel_settings"]
    assert attrs["sampling_time"] > 0


def test_lp_has_the_sign_of_a_log_density(short_run):
    mu, rate = (short_run.posterior[name].values for name in ("mu", "rate"))
    prior = -0.5 * mu**2 - 0.5 * np.log(2 * np.pi) + 2 * np.log(rate) - rate - np.log(2.0)
    likelihood = short_run.log_likelihood.y.sum("y_dim_0").values
    np.testing.assert_allclose(short_run.sample_stats.lp, prior + likelihood + np.log(rate), atol=1e-8)


def test_constant_data_and_coords():
    def regression(x, y):
        slope = ppl.sample("slope", dist.Normal(jnp.zeros(2), 1.0), dims=("feature",))
        ppl.observe("y", dist.Normal(x @ slope, 1.0), y, dims=("row",))

    x = np.random.default_rng(1).normal(size=(8, 2))
    tree = mcmc(regression, coords={"feature": ["a", "b"]}, **SHORT)(0, x, y=Y)
    assert list(tree.posterior.slope.coords["feature"].values) == ["a", "b"]
    assert set(tree.constant_data.data_vars) == {"x"}
    assert tree.observed_data.y.dims == ("row",)


def test_keep(short_run):
    tree = mcmc(model, keep=["ratio"], **SHORT)(0, Y)
    assert set(tree.posterior.data_vars) == {"ratio"}
    np.testing.assert_array_equal(tree.posterior.ratio, short_run.posterior.ratio)


def test_hmc():
    tree = mcmc(model, HMC(), num_warmup=200, num_samples=400, progress=False)(0, Y)
    assert tree.attrs["min_ess_bulk"] > 200
    assert abs(float(tree.posterior.mu.mean()) - MEAN) < 5 * SD / tree.attrs["min_ess_bulk"] ** 0.5


def test_data_are_arguments_and_compilation_is_by_program(caplog):
    big = np.zeros(12345)

    def closes_over(y):
        offset = ppl.sample("offset", dist.Normal(0.0, 1.0))
        ppl.observe("y", dist.Normal(offset + jnp.asarray(shift), 1.0), y)

    shift = big
    run = mcmc(closes_over, **SHORT)
    run(0, big)
    shift = big + 1.0  # a changed closure is seen, and needs no compilation
    with jax.log_compiles(), caplog.at_level(logging.WARNING, logger="jax"):
        tree = run(0, big)
    assert not re.search(r"Finished XLA compilation of jit\(run_", caplog.text)
    assert abs(float(tree.posterior.offset.mean()) + 1.0) < 0.2


def test_no_constants_in_the_program():
    from ppleffects.inference.chunks import Plan, run_chunk, run_start
    from ppleffects.inference.layout import Layout
    from ppleffects.inference.target import target as make_target

    target = make_target(model)(np.arange(12345.0))
    layout = Layout(None, None, 2)
    args = (target, jax.random.key(0), layout.chains, {})
    static = {"kernel": NUTS(), "layout": layout}
    lowered = run_start.lower(*args, **static, num_warmup=5, max_tries=3)
    state, _ = lowered.out_info
    zero = jax.ShapeDtypeStruct((), jnp.int32)
    record = jax.ShapeDtypeStruct((), jnp.bool_)
    chunk = run_chunk.lower(target, state, zero, record, **static, plan=Plan(10, 1, ("mu",), ()))
    for text in (lowered.as_text(), chunk.as_text()):
        constants = [line for line in text.splitlines() if "stablehlo.constant" in line]
        assert "12345" in text
        assert not any("12345" in line for line in constants)
        assert max(len(line) for line in constants) < 4000


def test_init_for_all_and_for_each_chain():
    settings = {"num_warmup": 0, "num_samples": 1, "num_chains": 2, "progress": False}
    kernel = NUTS(step_size=1e-8, adapt_step_size=False, max_tree_depth=1)
    tree = mcmc(model, kernel, init={"mu": 0.5, "rate": [1.0, 2.0]}, **settings)(0, Y)
    np.testing.assert_allclose(tree.posterior.mu[:, 0], [0.5, 0.5], atol=1e-6)
    np.testing.assert_allclose(tree.posterior.rate[:, 0], [1.0, 2.0], atol=1e-6)
    partial = mcmc(model, kernel, init={"rate": 4.0}, **settings)(0, Y)
    np.testing.assert_allclose(partial.posterior.rate[:, 0], [4.0, 4.0], atol=1e-6)
    assert float(partial.posterior.mu[0, 0]) != float(partial.posterior.mu[1, 0])


def test_bad_starts_are_drawn_again():
    def picky():
        x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ppl.factor("only_right", jnp.where(x > 1.5, 0.0, -jnp.inf))

    kernel = NUTS(step_size=1e-8, adapt_step_size=False, max_tree_depth=1)
    tree = mcmc(picky, kernel, num_chains=8, num_warmup=0, num_samples=1, progress=False)(0)
    assert (tree.posterior.x > 1.5).all()


def test_no_valid_start_gives_a_table():
    def impossible(y, weight):
        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
        scale = ppl.sample("scale", dist.HalfNormal(1.0))
        ppl.observe("y", dist.Normal(mu * weight, scale), y)

    with pytest.raises(NoValidStartError) as caught:
        mcmc(impossible, progress=False)(0, Y, weight=np.array([np.nan] + [1.0] * 7))
    text = str(caught.value)
    assert re.search(r"in 100 tries \(chains without: \[0, 1, 2, 3\]\)", text)
    assert re.search(r"mu +sample +-?\d\.\d+ +-\d\.\d+ +nan +NO +\S*test_mcmc\.py:\d+", text)
    assert re.search(r"y +observe +.* to .* \(8,\) +nan +- +NO +\S*test_mcmc\.py:\d+", text)
    assert "NaN in the model's argument weight" in text


def test_no_valid_start_of_given_values():
    with pytest.raises(NoValidStartError, match=r"in 1 tries \(chains without: \[1\]\); chain 1 ended at"):
        mcmc(model, init={"mu": [0.0, 1e200], "rate": 1.0}, num_chains=2, progress=False)(0, Y)


def interrupt_at(monkeypatch, phase, raise_it):
    def update(self, name, done, **_):
        if name == phase and done >= 10:
            raise_it()

    monkeypatch.setattr(Progress, "update", update)


def test_interruption_returns_the_draws_so_far(monkeypatch, short_run):
    def interrupt():
        raise KeyboardInterrupt

    interrupt_at(monkeypatch, "sampling", interrupt)
    with pytest.warns(DiagnosticsWarning, match="interrupted; the draws so far are returned"):
        tree = mcmc(model, chunk_size=5, **SHORT)(0, Y)
    assert tree.attrs["complete"] is False
    number = tree.posterior.sizes["draw"]
    assert 10 <= number < 15
    np.testing.assert_array_equal(tree.posterior.mu, short_run.posterior.mu[:, :number])


def test_interruption_without_draws_goes_on_up(monkeypatch):
    def interrupt():
        raise KeyboardInterrupt

    interrupt_at(monkeypatch, "warm-up", interrupt)
    with pytest.raises(KeyboardInterrupt):
        mcmc(model, chunk_size=5, **SHORT)(0, Y)
    tree = mcmc(model, chunk_size=5, groups=("warmup",), **SHORT)(0, Y)
    assert 5 <= tree.warmup_posterior.sizes["draw"] < 20
    assert "posterior" not in tree.children


def test_threads(short_run):
    trees = [None, None]

    def work(index):
        trees[index] = mcmc(model, **SHORT)(0, Y)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(short_run.posterior.to_dataset().equals(tree.posterior.to_dataset()) for tree in trees)


def test_problems_are_told():
    def funnel():
        scale = ppl.sample("scale", dist.Normal(0.0, 3.0))
        ppl.sample("x", dist.Normal(jnp.zeros(5), jnp.exp(scale / 2)))

    with pytest.warns(DiagnosticsWarning, match="divergences"):
        tree = mcmc(funnel, num_warmup=100, num_samples=200, progress=False)(0)
    assert tree.attrs["num_diverging"] == int(tree.sample_stats.diverging.sum()) > 0
    assert any("divergences" in problem for problem in tree.attrs["problems"])


BAD_CALLS = {
    "num_chains": ({"num_chains": 0}, SettingsError, "num_chains is out of its range"),
    "num_warmup": ({"num_warmup": -1}, SettingsError, "num_warmup is out of its range"),
    "num_samples": ({"num_samples": 1.5}, SettingsError, "num_samples is out of its range"),
    "thinning": ({"thinning": 50}, SettingsError, "thinning leaves no draw"),
    "groups": ({"groups": ("prior",)}, SettingsError, "groups= names an unknown group"),
    "keep": ({"keep": ["nu"]}, SettingsError, "keep= names an unknown site"),
    "coords": ({"coords": {"school": [1]}}, SettingsError, "coords= names the dimension 'school', which no site has"),
    "coords length": ({"coords": {"y_dim_0": [1]}}, SettingsError, "'y_dim_0' have the wrong length"),
    "checkpoint": ({"checkpoint": 3}, SettingsError, "checkpoint= is no path"),
    "init name": ({"init": {"nu": 1.0}}, ValuesError, "init= names 'nu', which is no latent site"),
    "init shape": ({"init": {"mu": np.zeros(3)}}, ShapeError, r"'mu' at \S*test_mcmc\.py:\d+: the value of init="),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls(name):
    settings, error, message = BAD_CALLS[name]
    with pytest.raises(error, match=message):
        mcmc(model, **(SHORT | settings))(0, Y)


def test_the_key_is_missing():
    with pytest.raises(PPLError, match="not a random key"):
        mcmc(model, progress=False)(Y, Y)
