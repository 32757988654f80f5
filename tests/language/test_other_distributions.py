"""Distributions of TFP and of the user's own, and objects that are none."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P
from scipy import stats

import ppleffects as ppl
from ppleffects.errors import DistributionError


@pytest.fixture(scope="module")
def tfd():
    return pytest.importorskip("tensorflow_probability.substrates.jax").distributions


R, V = jnp.array([-0.5, 0.2, 0.9, 1.4]), jnp.array([0.3, 0.7, 1.1, 1.6])
TRIL = jnp.array([[1.0, 0.0], [0.5, 0.8]])
TFP = {
    "Normal": lambda t, r, v: t.Normal(r, v),
    "Gamma": lambda t, r, v: t.Gamma(v, 2 * v),
    "Independent": lambda t, r, v: t.Independent(t.Normal(jnp.stack([r, v], -1), 1.0), 1),
    "MultivariateNormalTriL": lambda t, r, v: t.MultivariateNormalTriL(jnp.stack([r, v], -1), TRIL),
    "Dirichlet": lambda t, r, v: t.Dirichlet(jnp.stack([v, v + 1], -1)),
    "Poisson": lambda t, r, v: t.Poisson(v),
}


@pytest.mark.filterwarnings("ignore:Explicitly requested dtype float64")  # by TFP's Poisson, if there are none
@pytest.mark.parametrize("name", sorted(TFP))
def test_tfp_draws_and_densities(tfd, name):
    def model(r, v):
        return ppl.sample("x", TFP[name](tfd, r, v))

    d = TFP[name](tfd, R, V)
    trace = ppl.simulate(model)(1, R, V)
    x = trace.values["x"]
    assert x.shape == (*d.batch_shape, *d.event_shape)
    assert x.dtype == d.dtype
    np.testing.assert_allclose(trace.log_probs["x"], d.log_prob(x), rtol=1e-9)
    np.testing.assert_allclose(ppl.log_density(model)({"x": x}, R, V), d.log_prob(x).sum(), rtol=1e-9)
    again = ppl.simulate(lambda: jax.vmap(lambda r, v: ppl.sample("x", TFP[name](tfd, r, v)))(R, V))(1)
    assert again.values["x"].shape == x.shape
    assert len({row.tobytes() for row in np.asarray(x)}) == (4 if name != "Poisson" else len(set(x.tolist())))


@pytest.mark.parametrize("name", ["Normal", "Gamma"])
def test_tfp_in_shard_map(tfd, mesh_data, name):
    def model(r, v):
        def body(r, v):
            ppl.sample("pieces", TFP[name](tfd, r, v))
            ppl.sample("one", TFP[name](tfd, jnp.array([0.5]), jnp.array([1.0])), spec=P())

        jax.shard_map(body, mesh=mesh_data, in_specs=P("data"), out_specs=None)(r, v)

    trace = ppl.simulate(model)(0, R, V)
    plain = ppl.simulate(lambda: ppl.sample("one", TFP[name](tfd, jnp.array([0.5]), jnp.array([1.0]))))(0)
    np.testing.assert_allclose(trace.values["one"], plain.values["one"], rtol=1e-12)
    d = TFP[name](tfd, R, V)
    np.testing.assert_allclose(trace.log_probs["pieces"], d.log_prob(trace.values["pieces"]), rtol=1e-9)


@pytest.mark.parametrize("name", ["Normal", "Gamma", "Dirichlet", "MultivariateNormalTriL"])
def test_tfp_targets(tfd, name):
    if jax.config.jax_check_tracer_leaks and name in ("Gamma", "Dirichlet"):
        pytest.skip("the bijectors of TFP keep the tracers of their last call in a cache of the class")

    target = ppl.target(lambda r, v: ppl.sample("x", TFP[name](tfd, r, v)))(R, V)
    u = target.init(0)
    x = target.constrain(u)["x"]
    bijector = TFP[name](tfd, R[1], V[1]).experimental_default_event_space_bijector()
    one = jax.tree.map(lambda a: a[1], u)["x"]
    free = (lambda y: y[:-1]) if name == "Dirichlet" else jnp.ravel
    jacobian = jax.jacobian(lambda u: free(bijector.forward(u)))(one).reshape(one.size, one.size)
    single = ppl.target(lambda r, v: ppl.sample("x", TFP[name](tfd, r, v)))(R[1], V[1])
    expected = TFP[name](tfd, R[1], V[1]).log_prob(x[1]) + np.linalg.slogdet(jacobian)[1]
    if name == "Dirichlet":  # TFP measures volumes on the surface of the simplex: another constant
        expected = expected + 0.5 * np.log(2)
    np.testing.assert_allclose(single.log_density({"x": one}), expected, rtol=1e-8)
    np.testing.assert_allclose(target.unconstrain({"x": x})["x"], u["x"], rtol=1e-6, atol=1e-9)


def test_tfp_and_numpyro_agree(tfd):
    def model(make):
        def run(y):
            zero = jnp.zeros(())  # of Python numbers TFP makes float32
            mu = ppl.sample("mu", make(zero, 2.0))
            ppl.observe("y", make(mu, 0.5), y)

        return run

    y = jnp.array([0.3, -0.2])
    values = {"mu": 0.4}
    np.testing.assert_allclose(
        ppl.log_density(model(tfd.Normal))(values, y), ppl.log_density(model(dist.Normal))(values, y), rtol=1e-12
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Triangular:
    """On (0, width), density 2 x / width ** 2."""

    width: jax.Array
    label: str = dataclasses.field(default="triangle", metadata={"static": True})

    @property
    def batch_shape(self):
        return jnp.shape(self.width)

    @property
    def event_shape(self):
        return ()

    @property
    def dtype(self):
        return jnp.result_type(float)

    @property
    def support(self):
        return dist.constraints.interval(0.0, self.width)

    def sample(self, key, sample_shape=()):
        return self.width * jnp.sqrt(jax.random.uniform(key, (*sample_shape, *self.batch_shape)))

    def log_prob(self, value):
        return jnp.log(2 * value) - 2 * jnp.log(self.width)


def test_the_users_own_distribution(mesh_data):
    def model(width):
        ppl.sample("x", Triangular(width))
        jax.vmap(lambda w: ppl.sample("lanes", Triangular(w)))(width)
        jax.shard_map(
            lambda w: ppl.sample("pieces", Triangular(w)), mesh=mesh_data, in_specs=P("data"), out_specs=P("data")
        )(width)
        ppl.observe("y", Triangular(2.0), jnp.array([0.5, 1.0]))

    width = jnp.arange(1.0, 5.0)
    trace = ppl.simulate(model)(0, width)
    expected = sum(
        stats.triang(1.0, scale=np.asarray(width)).logpdf(np.asarray(trace.values[n])).sum()
        for n in ("x", "lanes", "pieces")
    ) + np.sum(np.log([0.25, 0.5]))
    np.testing.assert_allclose(trace.log_prob, expected, rtol=1e-9)
    np.testing.assert_allclose(ppl.log_density(model)(trace.latents, width), expected, rtol=1e-9)
    target = ppl.target(model)(width)
    np.testing.assert_allclose(target.constrain(target.unconstrain(trace.latents))["x"], trace.values["x"], rtol=1e-9)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Parameterless:
    batch_shape = ()
    event_shape = ()
    support = dist.constraints.real
    dtype = jnp.result_type(float)

    def sample(self, key, sample_shape=()):
        return jax.random.normal(key, sample_shape)

    def log_prob(self, value):
        return -0.5 * value**2


def test_a_distribution_without_parameters():
    assert float(ppl.log_density(lambda: ppl.sample("x", Parameterless()))({"x": 2.0})) == -2.0


class NoPytree:
    batch_shape = event_shape = ()
    sample = log_prob = lambda self, *_: 0.0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (NoPytree(), r"site 'x' at test_other_distributions.py:\d+: the distribution is not a pytree.*NoPytree"),
        ((0.0, 1.0), r"site 'x' at .*: the object given as a distribution lacks members of the protocol"),
        (jnp.zeros(3), "site 'x' at .*: the distribution is not a pytree"),
        (None, "site 'x' at .*distribution"),
        (dist.Normal, "site 'x' at .*distribution"),
    ],
    ids=["no pytree", "a tuple", "an array", "None", "a class"],
)
@pytest.mark.parametrize("call", ["sample", "observe"])
def test_what_is_no_distribution(wrong, message, call):
    def model():
        if call == "sample":
            ppl.sample("x", wrong)
        else:
            ppl.observe("x", wrong, 1.0)

    with pytest.raises(DistributionError, match=message):
        ppl.simulate(model)(0)


def test_hashable_leaves_that_are_no_numbers_stay_as_they_are():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Tagged:
        low: float
        tags: frozenset
        batch_shape = event_shape = ()

        def sample(self, key, sample_shape=()):
            return self.low + jax.random.uniform(key, sample_shape)

        def log_prob(self, value):
            return jnp.where((value >= self.low) & (value <= self.low + 1), 0.0, -jnp.inf) - len(self.tags)

    trace = ppl.simulate(lambda: ppl.sample("x", Tagged(2.0, frozenset("ab"))))(0)
    assert 2.0 <= trace.values["x"] <= 3.0
    assert trace.log_prob == -2.0


def test_leaves_that_are_neither_arrays_nor_hashable():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Tagged:
        tags: set
        batch_shape = event_shape = ()
        sample = log_prob = lambda self, *_: 0.0

    match = r"site 'x' at test_other_distributions.py:\d+: .*neither an array nor hashable"
    with pytest.raises(DistributionError, match=match):
        ppl.simulate(lambda: ppl.sample("x", Tagged({"a"})))(0)


@pytest.mark.parametrize("kind", [int, float])
def test_without_a_support_the_dtype_says_whether_it_is_discrete(kind):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Unbounded:
        rate: float
        batch_shape = event_shape = ()
        dtype = jnp.result_type(kind)

        def sample(self, key, sample_shape=()):
            return jnp.zeros(sample_shape, self.dtype)

        def log_prob(self, value):
            return -self.rate * value

    assert ppl.sites(lambda: ppl.sample("x", Unbounded(2.0)))()["x"].is_discrete is (kind is int)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Misshapen:
    """It says that it has two entries, and draws three."""

    rate: jax.Array
    batch_shape = (2,)
    event_shape = ()
    support = dist.constraints.real
    dtype = jnp.result_type(float)

    def sample(self, key, sample_shape=()):
        return jnp.zeros((*sample_shape, 3)) + self.rate

    def log_prob(self, value):
        return -self.rate * value**2


@pytest.mark.parametrize("lanes", [False, True])
def test_draws_of_a_shape_that_was_not_said(lanes):
    def model(rate):
        return ppl.sample("x", Misshapen(rate))

    match = r"site 'x' at test_other_distributions.py:\d+: .*sample(.|\n)*\(2,\)(.|\n)*\(3,\)(.|\n)*Misshapen"
    with pytest.raises(DistributionError, match=match):
        ppl.simulate(jax.vmap(model) if lanes else lambda rates: model(rates[0]))(0, jnp.ones(5))
