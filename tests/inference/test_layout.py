"""Which mesh a run has, also where none is named, how chains are spread over it, and where data go."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import DiagnosticsWarning, MeshError
from ppleffects.inference import default_layout
from ppleffects.inference.default_layout import ArraySize, choose
from ppleffects.inference.layout import Layout, trace

MB = 10**6


def target_on(mesh):
    return lambda: types.SimpleNamespace(mesh=mesh, context=jax.sharding.get_abstract_mesh())


@pytest.mark.parametrize(
    ("num_chains", "expected"), [(1, [0, 0]), (2, [0, 1]), (3, [0, 1, 2, 2]), (5, [0, 1, 2, 3, 4, 4])]
)
def test_chains_fill_the_mesh(mesh_2x2, num_chains, expected):
    assert Layout(mesh_2x2, "chains", num_chains).chains.tolist() == expected
    assert Layout(mesh_2x2, None, num_chains).chains.tolist() == list(range(num_chains))


def test_mesh_given_set_named_or_none(mesh_2x2, mesh_data):
    _, given = trace(target_on(None), mesh_2x2, "chains", 4)
    assert (given.mesh, given.chain_axis) == (mesh_2x2, "chains")
    with jax.set_mesh(mesh_data):
        _, set_ = trace(target_on(None), None, "chains", 4)
    assert (set_.mesh, set_.chain_axis) == (mesh_data, None)
    target, named = trace(target_on(mesh_2x2), None, "chains", 4)
    assert named.mesh == mesh_2x2
    assert target.context == mesh_2x2.abstract_mesh  # traced again, under the mesh
    _, none = trace(target_on(None), None, "chains", 4)
    assert none == Layout(None, None, 4)


def test_other_name_of_the_chain_axis(mesh_2x2):
    assert trace(target_on(None), mesh_2x2, "data", 4)[1].chain_axis == "data"


def test_another_mesh_in_the_model(mesh_2x2, mesh_data):
    with pytest.raises(MeshError, match=r"(?s)\(chains: 2 Auto, data: 2 Auto\), the mesh of mcmc.*\(data: 4 Auto\)"):
        trace(target_on(mesh_data), mesh_2x2, "chains", 4)


def test_other_errors_of_the_model_are_its_own(mesh_2x2):
    def broken():
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="^of the model$"):
        trace(broken, mesh_2x2, "chains", 4)


def test_data_are_placed_once_and_kept_where_they_are(mesh_2x2):
    layout = Layout(mesh_2x2, "chains", 4)
    sharded = jax.device_put(np.arange(8.0), NamedSharding(mesh_2x2, P("data")))
    over_both = jax.device_put(np.arange(8.0), NamedSharding(mesh_2x2, P(("chains", "data"))))
    host = np.arange(3.0)
    placed = layout.place_data({"a": sharded, "b": over_both, "c": host, "d": host})
    assert placed["a"] is sharded
    assert placed["b"].sharding.spec == P("data")
    assert placed["c"].sharding.is_fully_replicated
    assert placed["c"] is placed["d"]


def test_over_chains_is_manual_in_chains_alone(mesh_2x2):
    seen = []

    def fn(x):
        seen.append((x.shape, jax.sharding.get_abstract_mesh().manual_axes))
        return x

    layout = Layout(mesh_2x2, "chains", 4)
    jax.eval_shape(layout.over_chains(fn, (layout.spec(),), layout.spec()), jnp.zeros((4, 3)))
    assert seen == [((2, 3), ("chains",))]


@pytest.mark.parametrize("axis_type", [AxisType.Auto])
def test_permutes_wait_only_among_groups_of_chains(axis_type, mesh_2x2, mesh_data):
    assert Layout(mesh_2x2, "chains", 4).waits_on_permutes
    assert not Layout(mesh_2x2, "chains", 4).together().waits_on_permutes
    assert not Layout(mesh_data, None, 4).waits_on_permutes
    assert not Layout(None, None, 4).waits_on_permutes


@pytest.mark.parametrize(
    ("mesh", "chain_axis", "num_chains", "expected"),
    [
        (None, None, 1, "1 chain on one device: why"),
        ("mesh_2x2", "chains", 4, "4 chains over 2 groups of devices: why"),
        ("mesh_2x2", None, 4, "4 chains on each of 4 devices: why"),
        ("mesh_data", "data", 8, "8 chains over 4 devices: why"),
    ],
)
def test_a_layout_in_words(request, mesh, chain_axis, num_chains, expected):
    mesh = mesh and request.getfixturevalue(mesh)
    assert str(Layout(mesh, chain_axis, num_chains, "why")) == expected


# Where no mesh is named.

SMALL = [ArraySize((1000, 20), 1000 * 20 * 4), ArraySize((1000,), 4000)]
LARGE = [ArraySize((20,), 80), ArraySize((8 * 10**6, 20), 640 * MB), ArraySize((8 * 10**6,), 32 * MB)]


@pytest.mark.parametrize(
    ("data", "gradient_bytes", "num_chains", "num_devices", "expected"),
    [
        (LARGE, 80, 4, 1, (1, None, "no other")),
        ([], 80, 4, 4, (4, None, r"the data \(0 B\) are small")),
        ([ArraySize((), 4)], 80, 4, 4, (4, None, r"the data \(4 B\) are small")),
        (SMALL, 80, 4, 4, (4, None, r"the data \(84 kB\) are small")),
        (SMALL, 80, 4, 8, (4, None, "small")),
        (SMALL, 80, 6, 4, (3, None, "small")),  # no device runs a chain twice
        (SMALL, 80, 10, 4, (2, None, "small")),
        (SMALL, 80, 5, 4, (1, None, "^5 chains cannot be split evenly, and the data")),
        (SMALL, 80, 1, 4, (1, None, "^1 chain cannot")),
        (LARGE, 80, 4, 4, (4, 8 * 10**6, r"^their 8000000 rows \(672 MB\) weigh$")),
        (LARGE, 80, 1, 8, (8, 8 * 10**6, "weigh")),
        (LARGE, 80, 4, 3, (2, None, r"^8000000 rows \(672 MB\) do not divide over 3 devices$")),
        (LARGE, 6 * MB, 4, 4, (4, None, r"the gradients \(24 MB\) are large")),
        (LARGE, 6 * MB, 2, 4, (4, 8 * 10**6, "weigh")),
        # the weight is that of the arrays that share the rows, not of all
        ([ArraySize((i, 1), 100 * MB) for i in range(1, 9)], 80, 4, 4, (4, None, r"\(800 MB\) are small")),
        (
            [ArraySize((4, 1), 200 * MB), ArraySize((8, 1), 150 * MB), ArraySize((8,), 150 * MB)],
            8,
            4,
            8,
            (8, 8, r"8 rows \(300 MB\)"),
        ),
    ],
)
def test_rows_are_spread_where_they_weigh_and_chains_elsewhere(data, gradient_bytes, num_chains, num_devices, expected):
    choice = choose(data, gradient_bytes, num_chains, num_devices)
    assert choice[:2] == expected[:2]
    assert re.search(expected[2], choice.reason)


def test_rows_that_move_are_not_spread():
    assert choose(LARGE, 80, 4, 8, rows_move=True)[:2] == (4, None)


X, Y = np.random.default_rng(0).normal(size=(2, 8))


def regression(x, y):
    slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
    ppl.observe("y", dist.Normal(slope * x, 1.0), y)


def random_walk(x, y):
    def step(level, row):
        ppl.observe("y", dist.Normal(level, 1.0), row[1])
        return level + drift * row[0], None

    drift = ppl.sample("drift", dist.Normal(0.0, 1.0))
    jax.lax.scan(step, jnp.zeros(()), (x, y))


def latent_per_row(x, y):
    effect = ppl.sample("effect", dist.Normal(0.0, 1.0).expand(y.shape))
    ppl.observe("y", dist.Normal(effect * x, 1.0), y)


def neighbours(x, y):
    slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
    ppl.observe("y", dist.Normal(slope * jnp.roll(x, 1), 1.0), y)


def calls_the_host(x, y):
    regression(jax.pure_callback(np.sin, x, x, vmap_method="sequential"), y)


def prints(x, y):
    jax.debug.print("rows {n}", n=x.sum())
    regression(x, y)


def names_devices(x, y):
    mesh = jax.sharding.Mesh(jax.devices()[:1], ("one",))
    regression(jax.jit(lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P())))(x), y)


def has_own_shard_map(x, y):
    mesh = jax.make_mesh((2,), ("two",), axis_types=(AxisType.Auto,))
    regression(jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("two"), out_specs=P("two"))(x), y)


@pytest.fixture
def own_cores(monkeypatch):
    """Four devices, each with cores of its own as far as the rule knows."""
    if jax.device_count() != 4:
        pytest.skip("needs 4 devices")
    monkeypatch.setattr(default_layout, "SHARING_CORES", ())


@pytest.fixture
def rows_weigh(own_cores, monkeypatch):
    """As ``own_cores``, and the data of these tests are large."""
    monkeypatch.setattr(default_layout, "MIN_BYTES", X.nbytes)
    monkeypatch.setattr(default_layout, "MIN_RATIO", 0)


def default_of(model, x=X, y=Y, num_chains=4):
    return trace(lambda: ppl.target(model)(x, y), None, "chains", num_chains)


def test_devices_of_a_cpu_count_as_one():
    if jax.device_count() == 1 or jax.default_backend() != "cpu":
        pytest.skip("needs several devices of a CPU")
    assert str(default_of(regression)[1]) == "4 chains on one device: the devices of a CPU share its cores"


def test_chains_are_spread_over_devices(own_cores):
    target, layout = default_of(regression, num_chains=6)
    assert (dict(layout.mesh.shape), layout.chain_axis) == ({"chains": 3}, "chains")
    assert layout.chains.tolist() == list(range(6))
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(layout.place_data(target)))


def test_rows_are_spread_over_devices(rows_weigh):
    scales = jnp.arange(3.0)

    def with_constants(x, y):
        regression(x * scales.sum(), y)

    target, layout = default_of(with_constants)
    assert (dict(layout.mesh.shape), layout.chain_axis, layout.num_chains) == ({"data": 4}, None, 4)
    leaves = jax.tree.leaves(layout.place_data(target))
    specs = {leaf.shape: leaf.sharding.spec for leaf in leaves}
    assert specs.pop((8,)) == P("data")
    assert (3,) in specs
    assert set(specs.values()) == {P()}
    assert [shard.data.shape for shard in next(x for x in leaves if x.shape == (8,)).addressable_shards] == [(2,)] * 4


@pytest.mark.parametrize("model", [random_walk, latent_per_row, neighbours])
def test_rows_of_models_that_mix_them_stay_together(rows_weigh, model):
    target, layout = default_of(model)
    assert str(layout) == "4 chains over 4 devices: rows (128 B) would move among devices in each step"
    assert all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(layout.place_data(target)))


@pytest.mark.parametrize("model", [calls_the_host, prints, names_devices, has_own_shard_map])
def test_models_that_are_bound_to_devices_stay_where_they_are(own_cores, model):
    assert default_of(model)[1] == Layout(None, None, 4)
    assert default_of(model)[1].reason == "the model names devices, or calls the host"


def test_named_devices_are_respected(own_cores):
    third = jax.devices()[2]
    target, layout = default_of(regression, x=jax.device_put(X, third))
    assert layout == Layout(None, None, 4)
    assert layout.reason == "the data were put there"
    placed = [
        leaf for leaf in jax.tree.leaves(layout.place_data(target)) if isinstance(leaf, jax.Array) and leaf.committed
    ]
    assert placed
    assert all(leaf.devices() == {third} for leaf in placed)
    with jax.default_device(third):
        assert default_of(regression)[1].reason == "jax.default_device names it"


@pytest.fixture(scope="module")
def first_draws():
    """A function that returns the first ten draws, warm-up included, and the attributes of a run."""

    def run(mesh=None, progress=False):
        sampler = ppl.mcmc(regression, num_warmup=5, num_samples=5, mesh=mesh, groups=["warmup"], progress=progress)
        tree = sampler(0, X, Y)
        slopes = [tree[group]["slope"].values for group in ("warmup_posterior", "posterior")]
        return np.concatenate(slopes, axis=1), tree.attrs

    return run


@pytest.fixture(scope="module")
def draws_of_one_device(first_draws):
    draws, attrs = first_draws(jax.make_mesh((1,), ("chains",), devices=jax.devices()[:1]))
    assert attrs["layout"] == "4 chains on one device: mesh= says so"
    return draws


@pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")
@pytest.mark.parametrize(
    ("rule", "mesh", "layout"),
    [
        ("own_cores", '{"chains": 4}', r"4 chains over 4 devices: the data \(\d+ B\) are small"),
        ("rows_weigh", '{"data": 4}', r"4 chains on each of 4 devices: their 8 rows \(128 B\) weigh"),
    ],
)
def test_default_layouts_draw_as_one_device_does(request, rule, mesh, layout, first_draws, draws_of_one_device):
    request.getfixturevalue(rule)
    with pytest.warns(DiagnosticsWarning, match=f"\n{layout}$"):  # ten draws are too few: the report is a warning
        draws, attrs = first_draws(progress=True)
    assert attrs["mesh"] == mesh
    assert re.fullmatch(layout, attrs["layout"])
    assert draws.shape == (4, 10)
    np.testing.assert_allclose(draws, draws_of_one_device, rtol=1e-8)
