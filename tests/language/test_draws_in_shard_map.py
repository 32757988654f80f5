"""Every sampler works inside of shard_map: pieces that differ, shared sites that are the unsharded draw."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.language import distribution as protocol
from tests.conftest import _mesh
from tests.language.catalogue import CONTINUOUS, DISCRETE

CATALOGUE = {**CONTINUOUS, **DISCRETE}
CHOSEN = [
    "Normal",
    "Gamma",
    "Beta",
    "StudentT",
    "Dirichlet",
    "LKJ",
    "LKJCholesky",
    "NegativeBinomial2",
    "Binomial",
    "BetaBinomial",
    "VonMises",
    "Categorical",
    "Poisson",
    "MultivariateNormal",
    "TruncatedNormal",
]


def shared(name):
    """The distribution for one shard alone, its parameters the same everywhere."""
    constructor, parameters = CATALOGUE[name]
    return constructor(*(p[:1] for p in parameters))


def run_sharded(mesh, name):
    constructor, parameters = CATALOGUE[name]
    where = NamedSharding(mesh, P("data"))

    def model(parameters):
        def body(*parameters):
            own = ppl.sample("pieces", constructor(*parameters))
            one = ppl.sample("one", shared(name), spec=P())
            return own, jnp.expand_dims(one, 0) + jnp.zeros((1, *one.shape), one.dtype) * jax.lax.axis_index("data")

        specs = (P("data"),) * len(parameters)
        return jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=(P("data"), P("data")))(*parameters)

    return ppl.simulate(model)(3, [jax.device_put(p, where) for p in parameters])


@pytest.mark.parametrize("name", CHOSEN)
def test_pieces_and_replicas(mesh_data, name):
    trace = run_sharded(mesh_data, name)
    constructor, parameters = CATALOGUE[name]
    unsharded = ppl.simulate(lambda: ppl.sample("one", shared(name)))(3)
    np.testing.assert_allclose(trace.values["one"], unsharded.values["one"], rtol=1e-12)
    own, replicas = trace.retval
    np.testing.assert_array_equal(own, trace.values["pieces"])
    for replica in np.asarray(replicas):
        np.testing.assert_array_equal(replica, trace.values["one"])

    d = constructor(*parameters)
    assert trace.values["pieces"].shape == protocol.shape(d)
    np.testing.assert_allclose(trace.log_probs["pieces"], d.log_prob(trace.values["pieces"]), rtol=1e-9)
    assert bool(jnp.all(d.support(trace.values["pieces"])))
    if name in CONTINUOUS:
        rows = np.asarray(trace.values["pieces"]).reshape(4, -1)
        assert len({row.tobytes() for row in rows}) == 4


@pytest.mark.parametrize("name", ["Gamma", "Normal", "Categorical", "LKJCholesky"])
def test_explicit_meshes_draw_the_same(mesh_data, mesh_data_explicit, name):
    auto, explicit = run_sharded(mesh_data, name), run_sharded(mesh_data_explicit, name)
    for site, value in auto.values.items():
        np.testing.assert_array_equal(value, explicit.values[site])


def test_draws_of_many_shards_have_the_law(mesh_data):
    def model():
        def body():
            return ppl.sample("x", dist.Gamma(jnp.full(500, 3.0), 2.0), spec=P("data"))

        jax.shard_map(body, mesh=mesh_data, in_specs=(), out_specs=P("data"))()

    x = np.asarray(ppl.simulate(model)(0).values["x"])
    assert x.shape == (2000,)
    assert abs(x.mean() - 1.5) < 5 * np.sqrt(0.75 / 2000)
    assert abs(np.corrcoef(x[:500], x[500:1000])[0, 1]) < 0.2


def test_two_axes_vary_and_repeat_as_said(axis_type):
    mesh = _mesh(axis_type, a=2, b=2)

    def model():
        def body():
            both = ppl.sample("both", shared("Gamma"), spec=P(("a", "b")))
            along = ppl.sample("along", shared("Gamma"), spec=P("b"))
            return both, along

        return jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=(P(("a", "b")), P("b")))()

    trace = ppl.simulate(model)(0)
    assert len(set(np.asarray(trace.values["both"]).tolist())) == 4
    assert len(set(np.asarray(trace.values["along"]).tolist())) == 2
    np.testing.assert_array_equal(trace.retval[0], trace.values["both"])
    np.testing.assert_array_equal(trace.retval[1], trace.values["along"])
