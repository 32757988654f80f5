"""Which mesh a run has, how chains are spread over it, and where data go."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from ppleffects.errors import MeshError
from ppleffects.inference.layout import Layout, trace


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
