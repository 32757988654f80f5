"""Padded rows among the sites of a model: which axes hold them, and how they come back into the caller's order."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import MeshError
from ppleffects.inference import rows
from ppleffects.inference.rows import RowAxis, RowOrder, lay_out, restore, restore_arguments, restored_sites, row_axes

pytestmark = pytest.mark.skipif(
    jax.device_count() < 4, reason="the meshes have four devices: set PPLEFFECTS_TEST_DEVICES=4"
)

standard = dist.Normal(0.0, 1.0)
TEN = np.arange(10.0)
GROUPS = np.array([2, 0, 1, 1, 3, 2, 0, 1, 4, 4])


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request):
    return jax.make_mesh((4,), ("data",), axis_types=(request.param,))


def axes_of(model, *args):
    target = ppl.target(model)(*args)
    return row_axes(target.model, target.sites)


def per_shard(mesh, body, *args, specs=None):
    jax.shard_map(body, mesh=mesh, in_specs=specs or (P("data"),) * len(args), out_specs=None)(*args)


# --- the order itself -------------------------------------------------------------------------------------------------

ORDERS = {
    "at the end": RowOrder(5, 8, ("data",), slice(0, 5)),
    "no padding": RowOrder(8, 8, ("data",), slice(0, 8)),
    "reordered": RowOrder(5, 8, ("data",), np.array([6, 0, 3, 1, 2])),
}
SOURCES = {
    "at the end": [0, 1, 2, 3, 4, 4, 4, 4],
    "no padding": [0, 1, 2, 3, 4, 5, 6, 7],
    "reordered": [1, 3, 4, 2, 2, 2, 0, 0],  # padding holds the row before
}


@pytest.mark.parametrize("name", ORDERS)
def test_laid_out_and_restored(name):
    order, table = ORDERS[name], np.random.default_rng(0).normal(size=(2, ORDERS[name].num_rows, 3))
    laid_out = order.lay_out(table, 1)
    np.testing.assert_array_equal(laid_out, table[:, SOURCES[name]])
    np.testing.assert_array_equal(order.restore(laid_out, 1), table)
    np.testing.assert_array_equal(order.sources(2, 7), SOURCES[name][2:7])
    real = sorted(order.positions) if isinstance(order.positions, np.ndarray) else range(order.num_rows)
    assert np.flatnonzero(order.mask()).tolist() == list(real)


def test_orders_agree_that_restore_alike():
    for name, order in ORDERS.items():
        same = RowOrder(order.num_rows, order.num_padded, order.axes, order.positions)
        assert [other for other in ORDERS if order.agrees_with(ORDERS[other])] == [name]
        assert order.agrees_with(same)
        assert not order.agrees_with(RowOrder(order.num_rows, order.num_padded, ("rows",), order.positions))


def test_an_array_is_remembered_while_it_lives(mesh):
    before = len(rows._registered)
    data, mask = ppl.shard_rows({"x": TEN, "y": TEN}, mesh)
    assert len(rows._registered) == before + 3
    assert rows.registered(data["x"]).order.num_rows == 10
    assert rows.registered(mask).bookkeeping
    assert rows.registered(jnp.zeros(12)) is None
    del data, mask
    gc.collect()
    assert len(rows._registered) == before


# --- which sites hold rows --------------------------------------------------------------------------------------------


def test_sites_inside_and_outside_of_shard_map(mesh):
    (x, y), mask = ppl.shard_rows((TEN, TEN), mesh)

    def body(slope, x, y, mask):
        noise = ppl.sample("noise", standard.expand(y.shape), spec=P("data"))
        wide = ppl.sample("wide", standard.expand([y.shape[0], 2]), spec=P("data"))
        ppl.sample("event", dist.Dirichlet(jnp.ones(3)).expand(y.shape), spec=P("data"))
        mean = ppl.deterministic("mean", slope * x + noise + wide.sum(1))
        ppl.observe("y", dist.Normal(mean, 1.0), y, mask=mask)
        lax.scan(lambda c, _: (c, ppl.sample("steps", standard.expand(y.shape), spec=P("data"))), None, length=5)
        ppl.sample("lanes", standard.expand([2]), spec=P("data"))  # two on each shard, whatever the rows

    def model(x, y, mask):
        slope = ppl.sample("slope", standard)
        ppl.sample("coefficients", dist.Normal(x.mean(), 1.0).expand([12]))  # as many as padded rows, and none of them
        per_shard(mesh, body, slope, x, y, mask, specs=(P(), P("data"), P("data"), P("data")))
        ppl.deterministic("outside", slope * x)

    target = ppl.target(model)(x, y, mask)
    axes = row_axes(target.model, target.sites)
    assert {name: axis.axis for name, axis in axes.items()} == {
        "noise": 0,
        "wide": 0,
        "event": 0,
        "mean": 0,
        "y": 0,
        "steps": 1,
        "outside": 0,
    }
    assert {axis.order.num_rows for axis in axes.values()} == {10}
    shapes = {name: site.shape for name, site in restored_sites(target.sites, axes).items()}
    assert shapes == {
        "slope": (),
        "coefficients": (12,),
        "noise": (10,),
        "wide": (10, 2),
        "event": (10, 3),
        "mean": (10,),
        "y": (10,),
        "steps": (5, 10),
        "lanes": (8,),
        "outside": (10,),
    }


def test_arrays_that_the_model_closes_over(mesh):
    (x, y), mask = ppl.shard_rows((TEN, TEN), mesh)

    def model(y):
        per_shard(mesh, lambda x, y, m: _observe(standard, y, m), x, y, mask)

    assert set(axes_of(model, y)) == {"y"}
    both = ppl.shard_rows({"y": TEN}, mesh)
    assert set(axes_of(lambda both: per_shard(mesh, lambda b, m: _observe(standard, b["y"], m), *both), both)) == {"y"}


def _observe(prior, y, mask, name="y"):
    ppl.observe(name, prior, y, mask=mask)


def test_one_known_array_will_do(mesh):
    """Masks are combined, and columns computed: what is new is not known, and need not be."""
    y, mask = ppl.shard_rows(np.where(TEN == 3.0, np.nan, TEN), mesh)
    seen = jax.jit(lambda y, mask: mask & ~jnp.isnan(y))(y, mask)
    assert set(axes_of(lambda y, seen: per_shard(mesh, lambda y, s: _observe(standard, y, s), y, seen), y, seen)) == {
        "y"
    }


def test_no_row_is_known_without_such_an_array(mesh):
    y = jax.device_put(np.arange(12.0), NamedSharding(mesh, P("data")))
    assert axes_of(lambda y: per_shard(mesh, lambda y: _observe(standard, y, None), y), y) == {}


def test_groups_and_their_rows(mesh):
    data = ppl.shard_groups(TEN, GROUPS, mesh)

    def body(mean, data):
        effect = ppl.sample("effect", standard.expand(data.group_mask.shape), spec=P("data"))
        ppl.observe("y", dist.Normal(mean + effect[data.group], 1.0), data.rows, mask=data.mask)

    def model(data):
        mean = ppl.sample("mean", standard)
        per_shard(mesh, body, mean, data, specs=(P(), P("data")))

    target = ppl.target(model)(data)
    axes = row_axes(target.model, target.sites)
    assert {name: (axis.axis, axis.order.num_rows) for name, axis in axes.items()} == {"effect": (0, 5), "y": (0, 10)}
    observed = restore({name: np.asarray(value) for name, value in target.observed().items()}, axes)
    np.testing.assert_array_equal(observed["y"], TEN)
    effects = lay_out({"effect": np.arange(5.0)}, target.sites, axes)["effect"]
    per_row = np.concatenate(
        [
            np.asarray(effect.data)[np.asarray(local.data)]
            for effect, local in zip(
                jax.device_put(effects, NamedSharding(mesh, P("data"))).addressable_shards,
                data.group.addressable_shards,
                strict=True,
            )
        ]
    )
    np.testing.assert_array_equal(axes["y"].order.restore(per_row, 0), GROUPS)


def test_of_two_tables_it_is_the_one_that_reaches_the_site(mesh):
    """Both padded to twelve: the site knows which by what it is computed from, also through other sites."""
    (y, mask), (z, other) = ppl.shard_rows(TEN, mesh), ppl.shard_rows(np.arange(11.0), mesh)

    def body(y, mask, z, other):
        first = ppl.sample("first", dist.Normal(y, 1.0))
        ppl.deterministic("twice", 2 * first)
        _observe(standard, y, mask)
        _observe(standard, z, other, "z")

    axes = axes_of(lambda *args: per_shard(mesh, body, *args), y, mask, z, other)
    lengths = {name: axis.order.num_rows for name, axis in axes.items()}
    assert lengths == {"first": 10, "twice": 10, "y": 10, "z": 11}

    def unknown(y, mask, z, other):
        ppl.sample("latent", standard.expand(y.shape), spec=P("data"))
        body(y, mask, z, other)

    match = r"(?s)site 'latent' at test_rows.py:\d+: axis 0 .* either of two tables.*10 rows padded to 12 and 11 rows"
    with pytest.raises(MeshError, match=match):
        axes_of(lambda *args: per_shard(mesh, unknown, *args), y, mask, z, other)


def test_equal_orders_are_one(mesh):
    (x, _), (y, mask) = ppl.shard_rows(TEN, mesh), ppl.shard_rows(TEN, mesh)

    def body(x, y, mask):
        ppl.sample("latent", standard.expand(y.shape), spec=P("data"))
        _observe(dist.Normal(x, 1.0), y, mask)

    assert set(axes_of(lambda *args: per_shard(mesh, body, *args), x, y, mask)) == {"latent", "y"}


def test_other_axes_of_the_mesh_are_not_those_of_the_rows():
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    (x, mask), (both, both_mask) = ppl.shard_rows(TEN[:3], mesh, "b"), ppl.shard_rows(TEN[:3], mesh, ("a", "b"))

    def body(x, mask, both, both_mask):
        ppl.sample("a", standard.expand([2]), spec=P("a"))
        ppl.sample("b", standard.expand([2]), spec=P("b"))
        ppl.sample("both", standard.expand([1]), spec=P(("a", "b")))
        _observe(standard, x, mask, "x")
        _observe(standard, both, both_mask, "y")

    def model(*args):
        per_shard(mesh, body, *args, specs=(P("b"), P("b"), P(("a", "b")), P(("a", "b"))))

    axes = axes_of(model, x, mask, both, both_mask)
    assert {name: axis.order.axes for name, axis in axes.items()} == {
        "b": ("b",),
        "both": ("a", "b"),
        "x": ("b",),
        "y": ("a", "b"),
    }


# --- back to the caller's order ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("leading", [0, 1, 2])
def test_draws_are_restored_along_their_axis(leading):
    axes = {"steps": RowAxis(1, ORDERS["reordered"]), "y": RowAxis(0, ORDERS["at the end"])}
    draws = np.random.default_rng(0).normal(size=(*[2, 3][:leading], 4, 8, 6))
    found = restore({"steps": draws, "y": np.moveaxis(draws, -2, leading), "other": draws}, axes, leading=leading)
    np.testing.assert_array_equal(found["steps"], draws[..., [6, 0, 3, 1, 2], :])
    np.testing.assert_array_equal(found["y"], np.moveaxis(draws, -2, leading)[(slice(None),) * leading + (slice(5),)])
    assert found["other"] is draws


def test_arguments_are_restored_and_masks_left_out(mesh):
    data = ppl.shard_groups(TEN, GROUPS, mesh, per_group=np.arange(5))
    fresh = np.ones(12)
    given = {"y": data.rows, "m": data.mask, "g": data.group, "gm": data.group_mask, "p": data.per_group, "f": fresh}
    found = restore_arguments(given)
    assert set(found) == {"y", "p", "f"}
    np.testing.assert_array_equal(found["y"], TEN)
    np.testing.assert_array_equal(found["p"], np.arange(5))
    assert found["f"] is fresh


def test_starts_are_laid_out(mesh):
    import xarray

    order = ORDERS["reordered"]
    target = ppl.target(lambda: (ppl.sample("z", standard.expand([8, 2])), ppl.sample("m", standard.expand([5]))))()
    axes, values = {"z": RowAxis(0, order)}, np.random.default_rng(0).normal(size=(3, 5, 2))
    laid_out = values[:, SOURCES["reordered"]]
    found = lay_out({"z": values[0], "m": values[0, :, 0]}, target.sites, axes)
    np.testing.assert_array_equal(found["z"], laid_out[0])
    np.testing.assert_array_equal(found["m"], values[0, :, 0])
    for given in ({"z": values}, xarray.Dataset({"z": (("chain", "row", "z_dim"), values), "other": 1.0})):
        found = lay_out(given, target.sites, axes)
        assert set(found) == {"z"}
        np.testing.assert_array_equal(found["z"], laid_out)
    kept = {"z": "prior"}
    assert lay_out(kept, target.sites, axes) == kept
    assert lay_out({"z": laid_out}, target.sites, axes)["z"] is laid_out
    assert [lay_out(given, target.sites, axes) for given in (None, "mode")] == [None, "mode"]
