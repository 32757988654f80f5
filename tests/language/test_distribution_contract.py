"""Every NumPyro distribution meets the protocol: types without sampling, descriptions, densities, one compilation."""

import inspect
import logging
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import ppleffects as ppl
from ppleffects.language import distribution as protocol
from tests.language.catalogue import CONTINUOUS, COVERED, DISCRETE, FLOATS_OF_A_DISCRETE_SUPPORT, NO_SAMPLER

CATALOGUE = {**CONTINUOUS, **DISCRETE}
DENSITIES = [
    "Normal",
    "StudentT",
    "Gamma",
    "Beta",
    "TruncatedNormal",
    "VonMises",
    "Dirichlet",
    "MultivariateNormal",
    "MultivariateNormalPrecision",
    "GaussianRandomWalk",
    "LKJCholesky",
    "Independent",
    "Expanded",
    "Transformed",
    "MixtureSameFamily",
    "MixtureGeneral",
    "Unit",
    "Delta",
    "Masked",
    "LeftCensored",
    "Bernoulli",
    "BinomialLogits",
    "Categorical",
    "Multinomial",
    "OrderedLogistic",
    "ZeroInflatedPoisson",
]


def make(name):
    constructor, parameters = CATALOGUE[name]
    return constructor(*parameters)


@contextmanager
def compilations():
    """A list that grows with each program that XLA compiles."""
    messages = []

    class Collect(logging.Handler):
        def emit(self, record):
            if record.getMessage().startswith("Compiling"):
                messages.append(record.getMessage())

    logger, handler = logging.getLogger("jax"), Collect()
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with jax.log_compiles():
            yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def test_no_distribution_is_missing():
    classes = {n for n in dist.__all__ if inspect.isclass(getattr(dist, n)) or inspect.isfunction(getattr(dist, n))}
    assert sorted(classes - set(CATALOGUE) - set(COVERED) - {"GaussianCopula"}) == []


@pytest.mark.parametrize("name", sorted(set(CATALOGUE) - NO_SAMPLER))
def test_shape_and_dtype_are_those_of_a_draw(name):
    d = make(name)
    drawn = jax.eval_shape(lambda key: d.sample(key), jax.random.key(0))
    assert protocol.shape(d) == drawn.shape
    assert protocol.is_discrete(d) == (name in DISCRETE)
    if name in FLOATS_OF_A_DISCRETE_SUPPORT:
        assert protocol.dtype(d) == jnp.result_type(int)
    else:
        assert protocol.dtype(d) == drawn.dtype


LEVY = pytest.param("Levy", marks=pytest.mark.xfail(strict=True, reason="its support fails on abstract parameters"))


@pytest.mark.parametrize("name", [*sorted(set(CATALOGUE) - {"Levy"}), LEVY])
def test_sites_describes_it_without_sampling(name):
    d = make(name)
    site = ppl.sites(lambda: ppl.sample("x", d))()["x"]
    assert site.shape == protocol.shape(d)
    assert site.event_dim == len(d.event_shape)
    assert type(site.support) is type(d.support)
    assert site.is_discrete == (name in DISCRETE)
    assert isinstance(repr(site.support), str)


def test_the_compile_counter_counts():
    with compilations() as messages:
        jax.jit(lambda x: x * 1.2345 + 3.21)(jnp.arange(7.0))
    assert messages


@pytest.mark.parametrize("name", DENSITIES)
def test_density_of_draws_is_numpyros_and_compiles_once(name):
    def model():
        ppl.sample("x", make(name))

    d = make(name)
    x = jnp.asarray(d.sample(jax.random.key(1)), protocol.dtype(d))
    values = {"x": x}
    density = ppl.log_density(model)(values)
    np.testing.assert_allclose(density, jnp.sum(d.log_prob(x)), rtol=1e-10)
    with compilations() as messages:
        again = ppl.log_density(model)(values)
    assert density == again
    assert [m for m in messages if "call" in m] == []


@pytest.mark.parametrize("name", ["Normal", "Gamma", "Categorical", "Poisson", "Dirichlet", "TruncatedNormal"])
def test_float32_parameters_give_float32(name):
    constructor, parameters = CATALOGUE[name]
    with jax.enable_x64(False):
        d = constructor(*(jnp.asarray(np.asarray(p), jnp.float32) for p in parameters))
        drawn = jax.eval_shape(lambda key: d.sample(key), jax.random.key(0))
        assert protocol.dtype(d) == drawn.dtype
        assert ppl.simulate(lambda: ppl.sample("x", d))(0).values["x"].dtype == drawn.dtype


def test_a_distribution_without_a_sampler_is_named():
    def model():
        return ppl.sample("flat", make("ImproperUniform"))

    with pytest.raises(ppl.errors.PPLError, match=r"site 'flat' at test_distribution_contract.py:\d+"):
        ppl.simulate(model)(0)


APART = {  # parameters that NumPyro keeps in the static half of the tree
    "Multinomial": (lambda n: dist.Multinomial(n, probs=jnp.array([0.3, 0.7])), jnp.array([[1, 2], [2, 2]])),
    "DirichletMultinomial": (lambda n: dist.DirichletMultinomial(jnp.ones(2), n), jnp.array([[1, 2], [2, 2]])),
    "Masked": (lambda n: dist.Poisson(2.0).expand((2,)).mask(n > 3), jnp.array([1, 2])),
    "within another": (
        lambda n: dist.Multinomial(n, probs=jnp.array([0.3, 0.7])).to_event(1),
        jnp.array([[1, 2], [2, 2]]),
    ),
    "CAR": (
        lambda n: dist.CAR(0.0, 0.5, 1.0, jnp.eye(2)[::-1] * (n[0] - 2)),
        jnp.array([0.5, 1.0]),
    ),
}


@pytest.mark.parametrize("name", APART)
def test_arrays_in_the_static_half_are_data(name):
    make, y = APART[name]
    counts = jnp.array([3, 4])
    expected = jnp.sum(make(counts).log_prob(y))
    models = {
        "argument": lambda n: ppl.observe("y", make(n), y),
        "closure": lambda _: ppl.observe("y", make(counts), y),
        "numpy": lambda _: ppl.observe("y", make(np.array([3, 4])), y),
    }
    for model in models.values():
        for _ in range(2):
            try:
                found = ppl.log_density(model)({}, counts)
            except ppl.errors.DistributionError as error:
                assert "site 'y' at test_distribution_contract.py" in str(error)  # noqa: PT017
            else:
                np.testing.assert_allclose(found, expected, rtol=1e-9)
