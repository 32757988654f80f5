"""Tables of rows on a mesh: what lies where, what of a table is read, and what the density of padded rows is."""

import ast
import dataclasses
import functools
import os
import re
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import zarr
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import DTypeError, MeshError, ShapeError, ValuesError
from ppleffects.inference import placing
from tests.conftest import SHARDED_GRADIENT

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(
    jax.device_count() < 4, reason="the meshes have four devices: set PPLEFFECTS_TEST_DEVICES=4"
)


def make_mesh(axis_type=AxisType.Auto, **sizes):
    count = int(np.prod(list(sizes.values())))
    return jax.make_mesh(
        tuple(sizes.values()), tuple(sizes), axis_types=(axis_type,) * len(sizes), devices=jax.devices()[:count]
    )


MESHES = {
    "1 device": ({"data": 1}, "data"),
    "4": ({"data": 4}, "data"),
    "1x4": ({"chains": 1, "data": 4}, "data"),
    "2x2": ({"chains": 2, "data": 2}, "data"),
    "two axes": ({"a": 2, "b": 2}, ("a", "b")),
    "two axes, inner first": ({"a": 2, "b": 2}, ("b", "a")),
}


@pytest.fixture(params=MESHES)
def layout(request, axis_type):
    """A mesh, the axis of rows, and the number of shards."""
    sizes, axis = MESHES[request.param]
    names = axis if isinstance(axis, tuple) else (axis,)
    return make_mesh(axis_type, **sizes), axis, int(np.prod([sizes[name] for name in names]))


def pieces(array):
    """What each shard holds, in the order of the rows."""
    found = {}
    for shard in array.addressable_shards:
        found[shard.index[0].indices(array.shape[0])[0]] = np.asarray(shard.data)
    return [found[start] for start in sorted(found)]


# --- where rows lie ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 3, 10, 11, 12, 13])
def test_rows_lie_in_order_and_are_padded_by_copies(layout, num_rows):
    mesh, axis, num_shards = layout
    x, y = np.arange(2.0 * num_rows).reshape(num_rows, 2), np.arange(num_rows) % 3
    tree, mask = ppl.shard_rows({"x": x, "y": [y]}, mesh, axis)
    per_shard = -(-num_rows // num_shards)
    numbers = np.minimum(np.arange(num_shards * per_shard), num_rows - 1)
    for found, table in [(tree["x"], x), (tree["y"][0], y)]:
        np.testing.assert_array_equal(found, table[numbers])
        assert found.sharding == NamedSharding(mesh, P(axis))
        assert [len(piece) for piece in pieces(found)] == [per_shard] * num_shards
    np.testing.assert_array_equal(mask, np.arange(len(numbers)) < num_rows)
    assert (mask.dtype, mask.sharding) == (bool, NamedSharding(mesh, P(axis)))


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "int32", "uint8", "float16", "float32", "float64", "bfloat16", ">f4"]
)
def test_dtypes_are_kept(mesh_data, dtype):
    table = np.arange(6).astype(jnp.bfloat16 if dtype == "bfloat16" else dtype)
    found = ppl.shard_rows(table, mesh_data)[0]
    assert found.dtype == jnp.asarray(table.astype(table.dtype.newbyteorder("="))).dtype
    np.testing.assert_array_equal(found[:6], jnp.asarray(table.astype(table.dtype.newbyteorder("="))))


def test_placed_rows_are_copies(mesh_data):
    table = np.arange(8.0)
    found, _ = ppl.shard_rows(table, mesh_data)
    table[:] = 0.0
    np.testing.assert_array_equal(found, np.arange(8.0))


@pytest.mark.parametrize("num_rows", [12, 16])
@pytest.mark.parametrize("spec", [P(), P("chains"), P("data"), P(None, "data"), P(("chains", "data")), None])
def test_arrays_that_are_on_devices_already(axis_type, spec, num_rows):
    mesh = make_mesh(axis_type, chains=2, data=2)
    table = np.arange(2.0 * num_rows).reshape(num_rows, 2)
    given = jnp.asarray(table) if spec is None else jax.device_put(table, NamedSharding(mesh, spec))
    onto = make_mesh(axis_type, data=3) if num_rows == 16 else mesh
    found, mask = ppl.shard_rows(given, onto)
    np.testing.assert_array_equal(np.asarray(found)[np.asarray(mask)], table)
    assert found.sharding == NamedSharding(onto, P("data"))


def test_a_column_of_pandas_goes_by_position(mesh_data):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": [1.0, 2.0, 3.0], "b": [4.0, 5.0, 6.0]}, index=[2.5, 0.5, 1.5])
    found, _ = ppl.shard_rows({"a": frame["a"], "both": frame}, mesh_data)
    assert found["a"].tolist() == [1.0, 2.0, 3.0, 3.0]
    assert found["both"].tolist() == [[1.0, 4.0], [2.0, 5.0], [3.0, 6.0], [3.0, 6.0]]


# --- what is read -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Recording:
    """An array that can be sliced and nothing else, and remembers the slices."""

    table: np.ndarray
    slices: list = dataclasses.field(default_factory=list)

    @property
    def shape(self):
        return self.table.shape

    @property
    def dtype(self):
        return self.table.dtype

    def __getitem__(self, index):
        assert isinstance(index, slice)
        assert index.step is None
        self.slices.append((index.start, index.stop))
        return self.table[index]


@pytest.mark.parametrize("num_rows", [5, 16, 29, 32])
def test_each_row_is_read_once_and_no_slice_is_longer_than_a_shard(layout, num_rows):
    mesh, axis, num_shards = layout
    table = Recording(np.arange(float(num_rows)))
    found, mask = ppl.shard_rows(table, mesh, axis)
    np.testing.assert_array_equal(np.asarray(found)[np.asarray(mask)], table.table)
    per_shard = -(-num_rows // num_shards)
    assert max(stop - start for start, stop in table.slices) <= per_shard
    assert len(table.slices) == num_shards
    rows = [row for start, stop in table.slices for row in range(start, stop)]
    assert sorted(set(rows)) == list(range(num_rows))
    assert [row for row in rows if rows.count(row) > 1] in ([], [num_rows - 1] * rows.count(num_rows - 1))


def test_groups_are_read_in_slices_no_longer_than_a_shard(mesh_data):
    groups = np.random.default_rng(0).permutation(np.repeat(np.arange(9), np.arange(1, 10)))
    table = Recording(np.arange(45.0))
    data = ppl.shard_groups(table, groups, mesh_data)
    assert max(stop - start for start, stop in table.slices) <= data.mask.shape[0] // 4
    assert sorted(np.asarray(data.rows)[np.asarray(data.mask)]) == list(range(45))


def test_files_are_read_shard_by_shard(mesh_data, tmp_path, monkeypatch):
    """Of a file of 16 MB the host holds one of four shards at a time, and the slice that is being read."""
    shape, per_shard = (2**15 - 3, 64), 2**13
    table = np.memmap(tmp_path / "table", dtype=np.float64, mode="w+", shape=shape)
    table[:] = np.arange(shape[0])[:, None]
    stored = zarr.open_array(tmp_path / "table.zarr", mode="w", shape=shape, chunks=(1000, 64), dtype=table.dtype)
    stored[:] = table[:]
    shard_bytes = per_shard * 64 * 8

    def peak(leaf):
        """Of the host's memory, apart from what the devices hold, which on CPUs is the host's as well."""
        with monkeypatch.context() as patch:
            patch.setattr(jax, "device_put", lambda rows, device: jnp.zeros(rows.shape, rows.dtype, device=device))
            patch.setattr(placing, "MAX_BYTES", 2**20)
            tracemalloc.start()
            ppl.shard_rows(leaf, mesh_data)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        return peak

    for leaf in (np.memmap(tmp_path / "table", dtype=np.float64, mode="r", shape=shape), stored):
        assert shard_bytes < peak(leaf) < 2 * shard_bytes
        held, mask = ppl.shard_rows(leaf, mesh_data)
        np.testing.assert_array_equal(np.asarray(held)[np.asarray(mask)], table)


# --- groups -----------------------------------------------------------------------------------------------------------


def a_table_of_groups(num_groups, num_rows, seed=0):
    rng = np.random.default_rng(seed)
    first = np.arange(num_groups)
    return rng.permutation(
        np.concatenate([first, rng.integers(0, num_groups, num_rows - num_groups) ** 2 // num_groups])
    )


@pytest.mark.parametrize(("num_groups", "num_rows"), [(1, 5), (3, 20), (7, 30), (20, 20), (12, 90)])
def test_groups_are_whole_and_known_where_they_lie(layout, num_groups, num_rows):
    mesh, axis, num_shards = layout
    groups = a_table_of_groups(num_groups, num_rows)
    y, size = np.arange(float(num_rows)), np.bincount(groups)
    data = ppl.shard_groups({"y": y, "group": groups}, groups, mesh, axis, per_group=np.arange(num_groups))
    assert {leaf.sharding for leaf in jax.tree.leaves(data)} == {NamedSharding(mesh, P(axis))}
    columns = (data.rows["y"], data.rows["group"], data.mask, data.group, data.per_group, data.group_mask)
    seen_rows, seen_groups = [], []
    for ys, numbers, mask, local, codes, group_mask in zip(*map(pieces, columns), strict=True):
        np.testing.assert_array_equal(codes[local][mask], numbers[mask])  # the group of each row, by its local number
        np.testing.assert_array_equal(groups[ys.astype(int)], numbers)  # padding, too, is a row as it was
        assert group_mask[local[mask]].all()
        assert codes[group_mask].tolist() == sorted(codes[group_mask])
        order = np.lexsort((ys[mask], numbers[mask]))
        np.testing.assert_array_equal(order, np.arange(mask.sum()))  # by group, and as they came within it
        for group in codes[group_mask]:
            assert (numbers[mask] == group).sum() == size[group]
        seen_rows += ys[mask].astype(int).tolist()
        seen_groups += codes[group_mask].tolist()
    assert sorted(seen_rows) == list(range(num_rows))
    assert sorted(seen_groups) == list(range(num_groups))
    assert data.group_mask.shape != data.mask.shape
    assert data.group.dtype == jnp.int32
    heaviest = max(mask.sum() for mask in pieces(data.mask))
    assert len(data.mask) == num_shards * heaviest
    assert heaviest <= num_rows / num_shards + size.max() + num_groups


def test_groups_are_balanced():
    """As many rows on each shard where that is possible; groups without rows are spread as well."""
    mesh = make_mesh(data=4)
    sizes = [40, 30, 20, 20, 10, 10, 10, 10, 10]  # 160 rows: 40 each
    data = ppl.shard_groups(np.zeros(160), np.repeat(np.arange(9), sizes), mesh)
    assert [int(mask.sum()) for mask in pieces(data.mask)] == [40, 40, 40, 40]
    empty = ppl.shard_groups(np.zeros(4), np.arange(4), mesh, num_groups=40)
    assert [int(mask.sum()) for mask in pieces(empty.group_mask)] == [10, 10, 10, 10]


def test_where_groups_go_depends_on_sizes_alone(mesh_data):
    groups = a_table_of_groups(7, 40)
    shuffled = np.random.default_rng(1).permutation(groups)
    first, second = (ppl.shard_groups(g, g, mesh_data) for g in (groups, shuffled))
    np.testing.assert_array_equal(first.rows, second.rows)
    np.testing.assert_array_equal(first.group, second.group)


# --- the density ------------------------------------------------------------------------------------------------------


def regression(mesh, data, mask):
    def shard(slope, data, mask):
        ppl.observe("y", dist.Normal(slope * data["x"], 0.5), data["y"], mask=mask)

    slope = ppl.sample("slope", dist.Normal(0.0, 2.0))
    jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=None)(slope, data, mask)


def normal(x, mean, scale):
    return -0.5 * ((x - mean) / scale) ** 2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi)


@SHARDED_GRADIENT
@pytest.mark.parametrize("num_rows", [10, 11, 13])
@pytest.mark.parametrize("sizes", [{"chains": 1, "data": 4}, {"chains": 2, "data": 2}], ids=str)
def test_density_and_gradient_of_padded_rows(axis_type, sizes, num_rows):
    mesh = make_mesh(axis_type, **sizes)
    rng = np.random.default_rng(num_rows)
    x, y = rng.normal(size=(2, num_rows))
    data, mask = ppl.shard_rows({"x": x, "y": y}, mesh)
    values = {"slope": jax.device_put(0.7, NamedSharding(mesh, P()))}
    model = functools.partial(regression, mesh)
    found = jax.jit(jax.value_and_grad(ppl.log_density(model)))(values, data, mask)
    expected = normal(0.7, 0.0, 2.0) + normal(y, 0.7 * x, 0.5).sum()
    slope = -0.7 / 4 + (x * (y - 0.7 * x)).sum() / 0.25
    np.testing.assert_allclose(found[0], expected, rtol=1e-10)
    np.testing.assert_allclose(found[1]["slope"], slope, rtol=1e-10)
    trace = ppl.evaluate(model)(values, data, mask)
    np.testing.assert_allclose(np.asarray(trace.log_probs["y"])[:num_rows], normal(y, 0.7 * x, 0.5), rtol=1e-10)
    assert not np.asarray(trace.log_probs["y"])[num_rows:].any()
    simulated = ppl.simulate(model)(0, data, mask)
    expected = normal(simulated.latents["slope"], 0.0, 2.0) + normal(y, simulated.latents["slope"] * x, 0.5).sum()
    np.testing.assert_allclose(simulated.log_prob, expected, rtol=1e-10)


def hierarchy(mesh, data, *, masked=False):
    """A mean for each group, on the group's shard."""

    def shard(mean, scale, data):
        mask = data.group_mask if masked else None
        prior = dist.Normal(mean + data.per_group, scale).expand(data.group_mask.shape)
        effect = ppl.sample("effect", prior, spec=P("data"), dims=["school"], mask=mask)
        ppl.observe("y", dist.Normal(effect[data.group], 0.5), data.rows, mask=data.mask, dims=["pupil"])

    mean = ppl.sample("mean", dist.Normal(0.0, 2.0))
    scale = ppl.sample("scale", dist.HalfNormal(1.0))
    jax.shard_map(shard, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=None)(mean, scale, data)


def plain_hierarchy(values, groups, per_group, y):
    """The same density in the caller's order, without a mesh."""
    scale, effect = values["scale"], values["effect"]
    total = normal(values["mean"], 0.0, 2.0) + jnp.log(2.0) + normal(scale, 0.0, 1.0)
    return total + normal(effect, values["mean"] + per_group, scale).sum() + normal(y, effect[groups], 0.5).sum()


GROUPS = a_table_of_groups(6, 23)


@pytest.fixture(params=[{"data": 4}, {"chains": 2, "data": 2}, {"data": 1}], ids=str)
def grouped(request, axis_type):
    """A mesh, and the pupils of six schools on it."""
    mesh = make_mesh(axis_type, **request.param)
    y, per_group = np.random.default_rng(0).normal(size=23), np.linspace(-1.0, 1.0, 6)
    return mesh, ppl.shard_groups(y, GROUPS, mesh, per_group=per_group), per_group, y


@SHARDED_GRADIENT
def test_density_and_gradient_of_groups(grouped):
    mesh, data, per_group, y = grouped
    place = np.flatnonzero(np.asarray(data.group_mask))
    codes = np.searchsorted(per_group, np.asarray(data.per_group))[place]
    effect = np.random.default_rng(1).normal(size=6)
    padded = np.zeros(len(data.group_mask))
    padded[place] = effect[codes]
    plain = {"mean": jnp.array(0.3), "scale": jnp.array(0.8), "effect": jnp.array(effect)}
    values = jax.device_put(plain, NamedSharding(mesh, P()))
    values["effect"] = jax.device_put(padded, NamedSharding(mesh, P("data")))
    model = functools.partial(hierarchy, mesh, masked=True)
    value, gradient = jax.jit(jax.value_and_grad(ppl.log_density(model)))(values, data)
    expected, slopes = jax.value_and_grad(plain_hierarchy)(plain, GROUPS, per_group, y)
    np.testing.assert_allclose(value, expected, rtol=1e-10)
    np.testing.assert_allclose(np.asarray(gradient["effect"])[place], slopes["effect"][codes], rtol=1e-10)
    np.testing.assert_allclose([gradient["mean"], gradient["scale"]], [slopes["mean"], slopes["scale"]], rtol=1e-10)
    assert gradient["effect"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 1)


def test_latents_of_padding_integrate_to_one(grouped):
    """Without a mask: what the padded density is once those latents are integrated out, on a grid, is the plain one."""
    mesh, data, per_group, y = grouped
    mask = np.asarray(data.group_mask)
    place, pads = np.flatnonzero(mask), np.flatnonzero(~mask)
    codes = np.searchsorted(per_group, np.asarray(data.per_group))[place]
    effect = np.linspace(-1.0, 1.0, 6)
    plain = {"mean": jnp.array(0.3), "scale": jnp.array(0.8), "effect": jnp.array(effect)}
    expected = plain_hierarchy(plain, GROUPS, per_group, y)
    grid = np.linspace(-12.0, 12.0, 401)
    density = jax.jit(ppl.log_density(functools.partial(hierarchy, mesh)))
    shared = jax.device_put({"mean": plain["mean"], "scale": plain["scale"]}, NamedSharding(mesh, P()))

    def at(number):  # all latents of padding at the same point of the grid: their densities are independent
        padded = np.full(len(mask), 0.0)
        padded[place] = effect[codes]
        padded[pads] = number
        return float(density({**shared, "effect": jax.device_put(padded, NamedSharding(mesh, P("data")))}, data))

    if not len(pads):
        np.testing.assert_allclose(at(0.0), expected, rtol=1e-10)
        return
    own = np.asarray(data.per_group)[pads]
    excess = np.array([at(number) for number in grid[::80]]) - expected
    np.testing.assert_allclose(
        excess, [normal(number, 0.3 + own, 0.8).sum() for number in grid[::80]], rtol=1e-8, atol=1e-10
    )
    mass = np.trapezoid(np.exp(normal(grid[:, None], 0.3 + own, 0.8)), grid, axis=0)
    np.testing.assert_allclose(mass, 1.0, rtol=1e-10)


# --- errors -----------------------------------------------------------------------------------------------------------

TEN = np.arange(10.0)

ERRORS = {
    "another axis": (lambda mesh: ppl.shard_rows(TEN, mesh, "rows"), MeshError, r"no axis 'rows'.*among \['data'\]"),
    "of two": (lambda mesh: ppl.shard_rows(TEN, mesh, ("data", "b")), MeshError, r"no axis 'b'.*axis=\('data', 'b'\)"),
    "no mesh": (lambda mesh: ppl.shard_rows(TEN, 4), MeshError, r"a jax.sharding.Mesh.*found: int.*make_mesh"),
    "abstract mesh": (lambda mesh: ppl.shard_rows(TEN, mesh.abstract_mesh), MeshError, "found: AbstractMesh"),
    "no rows": (lambda mesh: ppl.shard_rows({"x": TEN[:0]}, mesh), ShapeError, r"no rows.*tree\['x'\] with 0 rows"),
    "no arrays": (lambda mesh: ppl.shard_rows({}, mesh), ShapeError, r"no rows.*found: no arrays"),
    "other length": (
        lambda mesh: ppl.shard_rows({"x": TEN, "y": (TEN, TEN[1:])}, mesh),
        ShapeError,
        r"tree\['y'\]\[1\] has another number of rows than tree\['x'\].*expected: 10, as.*found: 9",
    ),
    "a list": (
        lambda mesh: ppl.shard_rows([1.0, 2.0], mesh),
        DTypeError,
        r"tree\[0\] is no array.*float\n.*np.asarray",
    ),
    "a scalar": (
        lambda mesh: ppl.shard_rows(np.float64(1), mesh),
        DTypeError,
        r"found: float64 of dtype float64, shape",
    ),
    "labels": (
        lambda mesh: ppl.shard_rows(np.array(["a"]), mesh),
        DTypeError,
        r"ndarray of dtype <U1.*numbers for lab",
    ),
    "objects": (lambda mesh: ppl.shard_rows(np.array([None]), mesh), DTypeError, r"ndarray of dtype object"),
    "masked": (
        lambda mesh: ppl.shard_rows(np.ma.array(TEN), mesh),
        DTypeError,
        r"found: MaskedArray.*a mask of its own",
    ),
    "in jit": (lambda mesh: jax.jit(lambda x: ppl.shard_rows(x, mesh))(TEN), DTypeError, r"outside of jit.*Tracer"),
    "keys": (lambda mesh: ppl.shard_rows(jax.random.split(jax.random.key(0), 4), mesh), DTypeError, r"dtype key"),
    "twice": (
        lambda mesh: ppl.shard_rows(ppl.shard_rows({"x": TEN}, mesh)[0], mesh),
        MeshError,
        r"tree\['x'\] is laid out already.*10 rows laid out as 12.*the former table",
    ),
    "after groups": (
        lambda mesh: ppl.shard_rows(ppl.shard_groups(TEN[:4], [3, 2, 1, 0], mesh).rows, mesh),
        MeshError,
        r"tree is laid out already.*4 rows laid out as 4",
    ),
    "groups of other rows": (
        lambda mesh: ppl.shard_groups(TEN, [0, 1], mesh),
        ShapeError,
        r"groups has not one number.*expected: shape \(10,\).*found: shape \(2,\)",
    ),
    "group labels": (lambda mesh: ppl.shard_groups(TEN, TEN, mesh), ValuesError, r"integers.*float64.*return_inverse"),
    "no group": (
        lambda mesh: ppl.shard_groups(TEN[:2], [0, -1], mesh),
        ValuesError,
        r"a row is in no group.*from 0 to 0.*from -1 to 0.*num_groups=",
    ),
    "too many groups": (
        lambda mesh: ppl.shard_groups(TEN[:2], [0, 4], mesh, num_groups=4),
        ValuesError,
        r"a row is in no group.*from 0 to 3.*from 0 to 4",
    ),
    "a group without rows": (
        lambda mesh: ppl.shard_groups(TEN[:2], [0, 3], mesh),
        ValuesError,
        r"group 1 has no row.*from 0 to 3.*2 groups without any.*num_groups= if they are meant",
    ),
    "another number of groups": (
        lambda mesh: ppl.shard_groups(TEN[:2], [0, 1], mesh, per_group=TEN[:2], num_groups=3),
        ShapeError,
        r"per_group has another number of groups than num_groups=.*expected: 3.*found: 2",
    ),
    "covariates of other groups": (
        lambda mesh: ppl.shard_groups(TEN[:2], [0, 1], mesh, per_group={"a": TEN[:2], "b": TEN}),
        ShapeError,
        r"per_group\['b'\] has another number of groups than per_group\['a'\]",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case, mesh_data):
    fn, error, match = ERRORS[case]
    with pytest.raises(error, match=f"(?s){match}"):
        fn(mesh_data)


def test_integers_that_jax_would_wrap(mesh_data):
    with (
        jax.enable_x64(False),
        pytest.raises(DTypeError, match=r"(?s)tree\['id'\] holds integers.*int32.*int64, 1099511627776 among"),
    ):
        ppl.shard_rows({"id": np.array([7, 2**40])}, mesh_data)
    with jax.enable_x64(False):
        found, _ = ppl.shard_rows({"x": np.array([0.1, 2.0]), "id": np.array([7, 2**30])}, mesh_data)
    assert (found["x"].dtype, found["id"].dtype) == (np.float32, np.int32)
    assert found["id"].tolist() == [7, 2**30, 2**30, 2**30]


# --- several processes ------------------------------------------------------------------------------------------------

PROCESS = """
import sys
import jax, jax.numpy as jnp, numpy as np, numpyro.distributions as dist
from jax.sharding import NamedSharding, PartitionSpec as P
number, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"localhost:{port}", 2, number)
import ppleffects as ppl

class Recording:
    def __init__(self, table): self.table, self.shape, self.dtype, self.read = table, table.shape, table.dtype, []
    def __getitem__(self, index): self.read += range(*index.indices(len(self.table))); return self.table[index]

def model(data, mask):
    def shard(slope, data, mask):
        ppl.observe("y", dist.Normal(slope, 1.0), data, mask=mask)
    slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
    jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=None)(slope, data, mask)

def report(what, data, mask):
    slope = jax.device_put(jnp.asarray(0.5), NamedSharding(mesh, P()))
    density = float(jax.jit(ppl.log_density(model))({"slope": slope}, data, mask))
    shards = zip(data.addressable_shards, mask.addressable_shards)
    held = [np.asarray(rows.data)[np.asarray(real.data)].tolist() for rows, real in shards]
    print("RESULT", repr((what, number, density, held)), flush=True)

def attempt(what, fn):
    try:
        fn()
    except ppl.errors.PPLError as error:
        print("RESULT", repr((what, number, type(error).__name__, str(error))), flush=True)

table = np.arange(10.0)
mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
whole = Recording(table)
report("whole", *ppl.shard_rows(whole, mesh))
print("RESULT", repr(("read", number, 0.0, sorted(set(whole.read)))), flush=True)
report("local", *ppl.shard_rows([table[:7], table[7:]][number], mesh, local=True))
grouped = ppl.shard_groups(table, [0, 0, 1, 1, 2, 2, 3, 3, 3, 3], mesh)
report("groups", grouped.rows, grouped.mask)
mesh = jax.make_mesh((2, 2), ("chains", "data"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
report("replicas", *ppl.shard_rows(table, mesh, local=True))
attempt("replicas differ", lambda: ppl.shard_rows(table[: 4 + number], mesh, local=True))
mesh = jax.sharding.Mesh(np.array(jax.devices())[[0, 2, 1, 3]].reshape(2, 2), ("chains", "data"))
report("one shard each", *ppl.shard_rows([table[:4], table[4:]][number], mesh, local=True))
mesh = jax.sharding.Mesh(np.array(jax.devices())[:2], ("data",))
attempt("no device", lambda: ppl.shard_rows(table, mesh, local=True))
"""


def free_port():
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.fixture(scope="module")
def two_processes():
    """What two processes of two devices each have printed, by what they did."""
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROCESS]
    port = str(free_port())
    running = [
        subprocess.Popen([*command, str(n), port], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(err[-3000:] for _, err in outputs)
    found = {}
    for out, _ in outputs:
        for line in out.splitlines():
            if line.startswith("RESULT "):
                what, number, *rest = ast.literal_eval(line.removeprefix("RESULT "))
                found.setdefault(what, {})[number] = rest
    return found


def test_each_process_holds_its_own_rows(two_processes):
    held = {
        "whole": ([[0, 1, 2], [3, 4, 5]], [[6, 7, 8], [9]]),
        "local": ([[0, 1, 2, 3], [4, 5, 6]], [[7, 8, 9], []]),
        "groups": ([[6, 7, 8, 9], [0, 1]], [[2, 3], [4, 5]]),
        "replicas": ([[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]],) * 2,
        "one shard each": ([[0, 1, 2, 3]] * 2, [[4, 5, 6, 7, 8, 9]] * 2),
    }
    assert {what: tuple(found[n][1] for n in range(2)) for what, found in two_processes.items() if what in held} == held


def test_density_over_processes(two_processes):
    """Each has the same number, that of all rows."""
    expected = normal(0.5, 0.0, 1.0) + normal(np.arange(10.0), 0.5, 1.0).sum()
    for what in ("whole", "local", "groups", "replicas", "one shard each"):
        np.testing.assert_allclose([two_processes[what][n][0] for n in range(2)], [expected] * 2, rtol=1e-5)


def test_a_process_reads_its_own_rows_alone(two_processes):
    assert [two_processes["read"][n][1] for n in range(2)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]


def test_errors_of_processes(two_processes):
    for number in range(2):
        kind, text = two_processes["replicas differ"][number]
        assert kind == "ShapeError"
        assert re.search(r"(?s)table of a process has another number of rows.*expected: 4,.*found: 5", text)
    kind, text = two_processes["no device"][0]
    assert kind == "MeshError"
    assert re.search(r"(?s)local=True.*share the mesh axis.*\{0: \[0, 1\], 1: \[\]\}.*order the devices", text)
