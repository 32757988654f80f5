"""What ``mcmc`` returns of padded rows and of groups: none of the padding, and everything in the caller's order."""

import functools
import warnings

import jax
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import DiagnosticsWarning, SettingsError

pytestmark = [
    pytest.mark.skipif(jax.device_count() < 4, reason="the meshes have four devices: set PPLEFFECTS_TEST_DEVICES=4"),
    pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning"),
]

NUM_ROWS = 11
SCHOOLS = np.array([3, 0, 1, 1, 4, 3, 0, 1, 4, 4, 2])
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(2, NUM_ROWS))
SIZE = np.linspace(-1.0, 1.0, 5)  # of the schools

SHORT = {"num_warmup": 5, "num_samples": 6, "num_chains": 2, "progress": False}


MESHES = {"4, explicit": ({"data": 4}, AxisType.Explicit), "2x2, auto": ({"chains": 2, "data": 2}, AxisType.Auto)}


@pytest.fixture(params=MESHES)
def mesh(request):
    sizes, axis_type = MESHES[request.param]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes))


def latents_of_rows(mesh, x, y, mask):
    def shard(slope, x, y, mask):
        z = ppl.sample("z", dist.Normal(0.0, 1.0).expand(mask.shape), spec=P("data"), dims=["row"])
        mean = ppl.deterministic("mean", slope * x + z, dims=["row"])
        ppl.observe("y", dist.Normal(mean, 0.5), y, mask=mask, dims=["row"])

    slope = ppl.sample("slope", dist.Normal(0.0, 2.0))
    jax.shard_map(shard, mesh=mesh, in_specs=(P(), *[P("data")] * 3), out_specs=None)(slope, x, y, mask)


def schools(mesh, data):
    def shard(mean, data):
        z = ppl.sample("z", dist.Normal(data.per_group, 1.0), spec=P("data"), dims=["school"])
        effect = ppl.deterministic("effect", mean + z, dims=["school"])
        ppl.observe("y", dist.Normal(effect[data.group], 0.5), data.rows, mask=data.mask, dims=["pupil"])

    mean = ppl.sample("mean", dist.Normal(0.0, 2.0))
    jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=None)(mean, data)


def log_normal(x, mean, scale):
    return -0.5 * ((x - mean) / scale) ** 2 - np.log(scale) - 0.5 * np.log(2 * np.pi)


def test_latents_of_rows(mesh):
    """Draws of several sites fit together, row by row, as the caller has them."""
    (x, y), mask = ppl.shard_rows((X, Y), mesh)
    run = ppl.mcmc(
        functools.partial(latents_of_rows, mesh),
        ppl.HMC(max_num_steps=3),
        mesh=mesh,
        groups=["warmup", "log_likelihood"],
        coords={"row": list("abcdefghijk")},
        **SHORT,
    )
    tree = run(0, x, y, mask)
    for group, num_draws in [("posterior", 6), ("warmup_posterior", 5)]:
        draws = tree[group].dataset
        assert dict(draws.sizes) == {"chain": 2, "draw": num_draws, "row": NUM_ROWS}
        assert draws["row"].values.tolist() == list("abcdefghijk")
        assert len(np.unique(draws["z"])) > NUM_ROWS
        mean = draws["slope"].values[..., None] * X + draws["z"].values
        np.testing.assert_allclose(draws["mean"], mean, rtol=1e-12, atol=1e-12)
    expected = log_normal(Y, tree["posterior"]["mean"].values, 0.5)
    np.testing.assert_allclose(tree["log_likelihood"]["y"], expected, rtol=1e-10)
    np.testing.assert_array_equal(tree["observed_data"]["y"], Y)
    assert set(tree["constant_data"].dataset) == {"x"}
    np.testing.assert_array_equal(tree["constant_data"]["x"], X)


@pytest.mark.parametrize("engine", ["ppleffects", "numpyro"])
def test_latents_of_groups(mesh, engine):
    """Of chains that go each at its own pace, and of chains that wait for each other."""
    kernel = ppl.HMC(max_num_steps=3, engine=engine)
    data = ppl.shard_groups(Y, SCHOOLS, mesh, per_group=SIZE)
    coords = {"school": list("ABCDE"), "pupil": np.arange(NUM_ROWS)}
    run = ppl.mcmc(
        functools.partial(schools, mesh), kernel, mesh=mesh, groups=["log_likelihood"], coords=coords, **SHORT
    )
    tree = run(0, data)
    draws = tree["posterior"].dataset
    assert dict(draws.sizes) == {"chain": 2, "draw": 6, "school": 5}
    np.testing.assert_allclose(draws["effect"], draws["mean"].values[..., None] + draws["z"].values, rtol=1e-12)
    expected = log_normal(Y, draws["effect"].values[..., SCHOOLS], 0.5)
    np.testing.assert_allclose(tree["log_likelihood"]["y"], expected, rtol=1e-10)
    np.testing.assert_array_equal(tree["observed_data"]["y"], Y)


def test_chains_are_those_of_the_rows_without_padding(mesh):
    """The density is the same, and so are starts and first transitions."""

    def model(mesh, x, y, mask):
        def shard(slope, x, y, mask):
            ppl.observe("y", dist.Normal(slope * x, 0.5), y, mask=mask)

        slope = ppl.sample("slope", dist.Normal(0.0, 2.0))
        if mesh is not None:
            shard = jax.shard_map(shard, mesh=mesh, in_specs=(P(), *[P("data")] * 3), out_specs=None)
        shard(slope, x, y, mask)

    settings = {"groups": ["warmup", "log_likelihood"], **SHORT}
    plain = ppl.mcmc(functools.partial(model, None), **settings)(3, X, Y, np.ones(NUM_ROWS, bool))
    (x, y), mask = ppl.shard_rows((X, Y), mesh)
    padded = ppl.mcmc(functools.partial(model, mesh), mesh=mesh, **settings)(3, x, y, mask)
    for group in ("warmup_posterior", "posterior"):
        np.testing.assert_allclose(padded[group]["slope"], plain[group]["slope"], rtol=1e-8)
    np.testing.assert_allclose(padded["sample_stats"]["lp"], plain["sample_stats"]["lp"], rtol=1e-8)
    np.testing.assert_allclose(padded["log_likelihood"]["y"], plain["log_likelihood"]["y"], rtol=1e-8)


def test_a_run_starts_where_another_ended(mesh_data):
    mesh = mesh_data
    data = ppl.shard_groups(Y, SCHOOLS, mesh, per_group=SIZE)
    model = functools.partial(schools, mesh)
    last = ppl.mcmc(model, mesh=mesh, **SHORT)(0, data)["posterior"].isel(draw=-1)
    still = ppl.HMC(step_size=1e-12, adapt_step_size=False, adapt_mass_matrix=False, max_num_steps=1)
    settings = SHORT | {"num_warmup": 0}
    for init in (last, {"mean": last["mean"].values, "z": last["z"].values}):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DiagnosticsWarning)
            found = ppl.mcmc(model, still, mesh=mesh, init=init, **settings)(1, data)["posterior"]
        np.testing.assert_allclose(found["z"].isel(draw=0), last["z"], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(found["mean"].isel(draw=0), last["mean"], rtol=1e-6, atol=1e-6)


def test_coordinates_are_those_of_the_callers_rows():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    (x, y), mask = ppl.shard_rows((X, Y), mesh)
    run = ppl.mcmc(functools.partial(latents_of_rows, mesh), coords={"row": np.arange(12)}, **SHORT)
    with pytest.raises(SettingsError, match=r"(?s)'row' have the wrong length.*11 values.*\(12,\)"):
        run(0, x, y, mask)
