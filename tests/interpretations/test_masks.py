"""Masks: a masked entry counts nothing, and neither its value nor its parameters spoil the others."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import PPLError, ShapeError
from tests.conftest import SHARDED_GRADIENT
from tests.language.catalogue import CONTINUOUS, DISCRETE

CATALOGUE = {**CONTINUOUS, **DISCRETE}
KEEP = jnp.array([True, False, True, True])
# Without BetaProportion, NegativeBinomial2 and OrderedLogistic: their constructors compute with the parameters, so that
# a NaN is upstream of the site.
ROWS = [
    "Normal",
    "LogNormal",
    "HalfNormal",
    "StudentT",
    "Laplace",
    "Exponential",
    "Gamma",
    "InverseGamma",
    "Weibull",
    "Pareto",
    "Uniform",
    "Beta",
    "Kumaraswamy",
    "TruncatedNormal",
    "LowerTruncatedNormal",
    "VonMises",
    "Dirichlet",
    "MultivariateNormal",
    "MultivariateNormalTril",
    "Independent",
    "Transformed",
    "MixtureSameFamily",
    "HalfCauchy",
    "Logistic",
    "Gumbel",
    "Bernoulli",
    "BernoulliLogits",
    "Binomial",
    "BinomialLogits",
    "BetaBinomial",
    "Categorical",
    "CategoricalLogits",
    "GammaPoisson",
    "Poisson",
    "Multinomial",
    "ZeroInflatedPoisson",
    "DirichletMultinomial",
    "Geometric",
]


def spoiled(x):
    """The array with NaN (or an impossible integer) in row 1."""
    x = jnp.asarray(x)
    return x.at[1].set(jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else -7)


@pytest.mark.parametrize("name", ROWS)
def test_masked_values_and_parameters_may_be_nan(name):
    constructor, parameters = CATALOGUE[name]
    y = constructor(*parameters).sample(jax.random.key(0))

    def model(parameters, y, keep):
        ppl.observe("y", constructor(*parameters), y, mask=keep)

    def density(p, y, keep):
        return ppl.log_density(model)({}, p, y, keep)

    clean = jnp.sum(jnp.where(KEEP, constructor(*parameters).log_prob(y), 0.0))
    slope = jax.grad(lambda p: jnp.sum(jnp.where(KEEP, constructor(*p).log_prob(y), 0.0)))(parameters)
    value, gradient = jax.jit(jax.value_and_grad(density))(tuple(map(spoiled, parameters)), spoiled(y), KEEP)
    np.testing.assert_allclose(value, clean, rtol=1e-10)
    for got, expected in zip(gradient, slope, strict=True):
        np.testing.assert_allclose(got[KEEP], expected[KEEP], rtol=1e-8, atol=1e-10)
        np.testing.assert_array_equal(got[1], 0.0 * got[0])
    if name in CONTINUOUS:
        over_values = jax.jit(jax.grad(density, 1))(parameters, spoiled(y), KEEP)
        assert bool(jnp.all(jnp.isfinite(over_values)))


def test_nan_in_a_shared_gradient():
    def model(x, y, keep):
        b = ppl.sample("b", dist.Normal(0.0, 1.0))
        ppl.observe("y", dist.Normal(b * x, 1.0), y, mask=keep)

    x, y = jnp.arange(4.0), jnp.ones(4)
    gradient = jax.grad(ppl.log_density(model))({"b": 0.3}, x, spoiled(y), KEEP)["b"]
    expected = jax.grad(lambda b: -0.5 * b**2 - 0.5 * jnp.sum((y - b * x)[KEEP] ** 2))(0.3)
    np.testing.assert_allclose(gradient, expected)


def test_a_column_that_is_masked_throughout():
    """Parameters smaller than the mask: those that serve masked entries alone may be NaN too."""

    def density(loc, y):
        keep = jnp.isfinite(y)
        return ppl.log_density(lambda: ppl.observe("y", dist.Normal(loc, 1.0), y, mask=keep))({})

    y = jnp.ones((2, 3)).at[:, 1].set(jnp.nan)
    value, slope = jax.value_and_grad(density)(jnp.array([0.5, jnp.nan, 0.5]), y)
    np.testing.assert_allclose(value, 4 * dist.Normal(0.5, 1.0).log_prob(1.0))
    np.testing.assert_allclose(slope, [1.0, 0.0, 1.0])


def test_pointwise_entries_and_masked_latents():
    def model():
        ppl.observe("y", dist.Normal(0.0, 1.0), jnp.zeros(4), mask=KEEP)
        ppl.sample("x", dist.Normal(jnp.zeros(4), 1.0), mask=KEEP)
        ppl.sample("v", dist.Dirichlet(jnp.ones((4, 3))), mask=KEEP)

    trace = ppl.simulate(model)(0)
    for name in ("y", "x", "v"):
        assert trace.log_probs[name].shape == (4,)
        assert float(trace.log_probs[name][1]) == 0.0
        assert bool(jnp.all(trace.log_probs[name][KEEP] != 0.0))
    assert bool(jnp.all(jnp.isfinite(trace.values["x"])))


def test_a_mask_is_broadcast_to_the_entries():
    def density(mask, y):
        return float(ppl.log_density(lambda: ppl.observe("y", dist.Normal(0.0, 1.0), y, mask=mask))({}))

    one = float(dist.Normal(0.0, 1.0).log_prob(0.0))
    np.testing.assert_allclose(density(False, jnp.full(3, jnp.nan)), 0.0)
    np.testing.assert_allclose(density(True, jnp.zeros(3)), 3 * one)
    np.testing.assert_allclose(density(jnp.array([True, False, True]), jnp.zeros((2, 3))), 4 * one)
    np.testing.assert_allclose(density(jnp.array([[True], [False]]), jnp.zeros((2, 3))), 3 * one)


@pytest.mark.parametrize(
    ("y", "mask"),
    [(jnp.zeros(3), jnp.ones(4, bool)), (jnp.zeros(3), jnp.ones((3, 1), bool)), (0.0, jnp.ones(3, bool))],
    ids=["longer", "a column", "a vector on a scalar"],
)
@pytest.mark.parametrize("kind", ["observe", "sample"])
def test_a_mask_may_not_enlarge_the_density(kind, y, mask):
    def model():
        if kind == "observe":
            ppl.observe("y", dist.Normal(0.0, 1.0), y, mask=mask)
        else:
            ppl.sample("y", dist.Normal(y, 1.0), mask=mask)

    with pytest.raises(ShapeError, match=r"site 'y' at test_masks.py:\d+: .*mask(.|\n)*expected(.|\n)*found"):
        ppl.sites(model)()


def test_masks_in_lanes_and_steps():
    y = jnp.array([[1.0, jnp.nan], [jnp.nan, 2.0], [3.0, 4.0]])
    keep = jnp.isfinite(y)

    def lanes(mu):
        jax.vmap(lambda y, k: ppl.observe("y", dist.Normal(mu, 1.0), y, mask=k))(y, keep)

    def shared_mask(mu):
        jax.vmap(lambda y: ppl.observe("y", dist.Normal(mu, 1.0), y, mask=jnp.array([True, False])))(
            y.at[1, 0].set(0.0)
        )

    def own_mask(mu):
        jax.vmap(lambda k: ppl.observe("y", dist.Normal(mu, 1.0), jnp.array([1.0, 2.0]), mask=k))(keep)

    def steps(mu):
        jax.lax.scan(lambda c, yk: (c, ppl.observe("y", dist.Normal(mu, 1.0), yk[0], mask=yk[1])), 0.0, (y, keep))

    cases = {
        lanes: [1.0, 2.0, 3.0, 4.0],
        steps: [1.0, 2.0, 3.0, 4.0],
        shared_mask: [1.0, 0.0, 3.0],
        own_mask: [1.0, 2.0, 1.0, 2.0],
    }
    for model, counted in cases.items():
        value, slope = jax.value_and_grad(lambda mu, m=model: ppl.log_density(m)({}, mu))(0.5)
        np.testing.assert_allclose(value, dist.Normal(0.5, 1.0).log_prob(jnp.array(counted)).sum())
        np.testing.assert_allclose(slope, np.sum(np.array(counted) - 0.5))
        trace = ppl.evaluate(model)({}, 0.5)
        assert trace.log_probs["y"].shape == (3, 2)


@SHARDED_GRADIENT
def test_masks_in_shards(mesh_data):
    y = jnp.array([1.0, jnp.nan, 3.0, jnp.nan, jnp.nan, jnp.nan, 7.0, 8.0])

    def model(y):
        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))

        def body(mu, y):
            ppl.observe("y", dist.Normal(mu, 1.0), y, mask=jnp.isfinite(y))

        jax.shard_map(lambda mu, y: (body(mu, y), None)[1], mesh=mesh_data, in_specs=(P(), P("data")), out_specs=None)(
            mu, y
        )

    value, slope = jax.value_and_grad(ppl.log_density(model))({"mu": 0.5}, y)
    kept = np.array([1.0, 3.0, 7.0, 8.0])
    expected = dist.Normal(0.5, 1.0).log_prob(kept).sum() + dist.Normal(0.0, 1.0).log_prob(0.5)
    np.testing.assert_allclose(value, expected)
    np.testing.assert_allclose(slope["mu"], np.sum(kept - 0.5) - 0.5)


def test_tfp_parameters_may_be_nan_where_masked():
    tfd = pytest.importorskip("tensorflow_probability.substrates.jax").distributions

    def density(loc, scale, y):
        return ppl.log_density(lambda: ppl.observe("y", tfd.Normal(loc, scale), y, mask=KEEP))({})

    loc, scale, y = jnp.arange(4.0), jnp.ones(4), jnp.zeros(4)
    try:
        value, slope = jax.value_and_grad(density)(spoiled(loc), spoiled(scale), spoiled(y))
    except PPLError:
        return  # refused is right too
    np.testing.assert_allclose(value, dist.Normal(loc, scale).log_prob(y)[KEEP].sum())
    np.testing.assert_allclose(slope, jnp.where(KEEP, -loc, 0.0))


W, R = jnp.array([0.3, 0.7]), jnp.array([-0.5, 0.9])
TWO = jnp.array([True, False])
# Parameters without batch axes whose size happens to be the batch's: they serve every row.
SHARED = {
    "mixture": (
        lambda w, r: dist.MixtureSameFamily(dist.Categorical(probs=w), dist.Normal(jnp.stack([r, r + 1], -1), 1.0)),
        (W, R),
        jnp.array([0.1, 0.2]),
    ),
    "general mixture": (
        lambda w, r: dist.MixtureGeneral(dist.Categorical(probs=w), [dist.Normal(r, 1.0), dist.Cauchy(r, 1.0)]),
        (W, R),
        jnp.array([0.1, 0.2]),
    ),
    "cutpoints": (dist.OrderedLogistic, (R, jnp.array([-1.0, 0.5])), jnp.array([1, 2])),
    "expanded simplex": (lambda p: dist.Dirichlet(p).expand((2,)), (W,), jnp.array([[0.2, 0.8], [0.3, 0.7]])),
    "location": (
        lambda r, s: dist.MultivariateNormal(r, jnp.multiply.outer(s, jnp.eye(2))),
        (R, jnp.array([1.0, 2.0])),
        jnp.ones((2, 2)),
    ),
    "event": (lambda r: dist.Normal(r, 1.0).to_event(1).expand((2,)), (R,), jnp.ones((2, 2))),
    "one component for all": (
        lambda w, r: dist.MixtureSameFamily(
            dist.Categorical(probs=jnp.stack([w, w[::-1]])), dist.Normal(r.reshape(1, 2), 1.0)
        ),
        (W, R),
        jnp.array([0.1, 0.2]),
    ),
    "categories": (lambda p: dist.Categorical(probs=p).expand((2,)), (W,), jnp.array([0, 1])),
}


@pytest.mark.parametrize("case", SHARED)
def test_shared_parameters_are_no_rows(case):
    make, parameters, y = SHARED[case]

    def ours(p):
        return ppl.log_density(lambda: ppl.observe("y", make(*p), y, mask=TWO))({})

    def plain(p):
        return jnp.sum(jnp.where(TWO, make(*p).log_prob(y), 0.0))

    found, expected = jax.value_and_grad(ours)(parameters), jax.value_and_grad(plain)(parameters)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12), found, expected)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Shifted:
    """A user's own distribution, of whose parameters nothing is known."""

    loc: jax.Array
    event_shape = ()
    support = dist.constraints.real

    @property
    def batch_shape(self):
        return jnp.shape(self.loc)

    def sample(self, key, sample_shape=()):
        return self.loc + jax.random.normal(key, (*sample_shape, *self.batch_shape))

    def log_prob(self, value):
        return -0.5 * (value - self.loc) ** 2


def test_masked_values_of_a_users_own_distribution_may_be_nan():
    def density(loc, y):
        return ppl.log_density(lambda: ppl.observe("y", Shifted(loc), y, mask=KEEP))({})

    loc, y = jnp.arange(4.0), jnp.ones(4)
    value, slope = jax.value_and_grad(density)(loc, spoiled(y))
    np.testing.assert_allclose(value, -0.5 * jnp.sum((y - loc)[KEEP] ** 2))
    np.testing.assert_allclose(slope, jnp.where(KEEP, y - loc, 0.0))


def test_masked_values_of_independent_tfp_distributions_may_be_nan():
    tfd = pytest.importorskip("tensorflow_probability.substrates.jax").distributions

    def density(loc, y):
        d = tfd.Independent(tfd.Normal(loc, 1.0), reinterpreted_batch_ndims=1)
        return ppl.log_density(lambda: ppl.observe("y", d, y, mask=KEEP))({})

    loc, y = jnp.arange(8.0).reshape(4, 2), jnp.ones((4, 2))
    value, slope = jax.value_and_grad(density)(loc, jnp.where(KEEP[:, None], y, jnp.nan))
    np.testing.assert_allclose(value, dist.Normal(loc, 1.0).log_prob(y)[KEEP].sum())
    np.testing.assert_allclose(slope, jnp.where(KEEP[:, None], y - loc, 0.0))


class Polynomial(dist.Distribution):
    """A user's own NumPyro distribution; each of its coefficients is real, and all serve each entry."""

    arg_constraints = dict.fromkeys(["coefficients"], dist.constraints.real)
    support = dist.constraints.real

    def __init__(self, coefficients, shape=()):
        self.coefficients, self.shape = coefficients, shape
        super().__init__(batch_shape=shape, validate_args=False)

    def log_prob(self, value):
        return -(jnp.polyval(self.coefficients, value) ** 2)

    def tree_flatten(self):
        return (self.coefficients,), self.shape

    @classmethod
    def tree_unflatten(cls, shape, leaves):
        return cls(*leaves, shape)


@pytest.mark.parametrize("shape", [(), (4,)], ids=["more axes than the value", "other rows than the value"])
def test_parameters_that_are_no_rows_stay(shape):
    keep = KEEP if shape else jnp.array(True)

    def density(c, y):
        return ppl.log_density(lambda: ppl.observe("y", Polynomial(c, shape), y, mask=keep))({})

    def plain(c, y):
        return jnp.sum(jnp.where(keep, -(jnp.polyval(c, y) ** 2), 0.0))

    c, y = jnp.array([0.3, -1.0, 2.0]), jnp.full(shape, 0.7) if not shape else jnp.arange(4.0)
    found, expected = (jax.value_and_grad(f)(c, y) for f in (density, plain))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9), found, expected)
