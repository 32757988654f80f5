"""Bijectors onto the supports: inverse of each other, log-determinants against ``jax.jacobian``."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import ppleffects as ppl
from ppleffects.language import distribution as protocol
from tests.language.catalogue import CONTINUOUS

# Coordinates that determine a value whose support is a surface.
FREE = {
    "Dirichlet": lambda x: x[:-1],
    "LogisticNormal": lambda x: x[:-1],
    "LKJ": lambda x: x[jnp.tril_indices(3, -1)],
    "LKJCholesky": lambda x: x[jnp.tril_indices(3, -1)],
    "Wishart": lambda x: x[jnp.tril_indices(2)],
    "WishartCholesky": lambda x: x[jnp.tril_indices(2)],
    "InverseWishart": lambda x: x[jnp.tril_indices(2)],
    "InverseWishartCholesky": lambda x: x[jnp.tril_indices(2)],
    "ZeroSumNormal": lambda x: x[:-1],
}
WITHOUT = {"Delta", "ImproperUniform", "ProjectedNormal", "TruncatedPolyaGamma"}


def draw_of(name):
    constructor, parameters = CONTINUOUS[name]
    d = constructor(*parameters)
    single = constructor(*(p[1] for p in parameters)) if d.batch_shape else d
    return d, single, d.sample(jax.random.key(3))


@pytest.mark.parametrize("name", sorted(set(CONTINUOUS) - WITHOUT - {"Unit"}))
def test_forward_inverse_and_log_det(name):
    d, single, x = draw_of(name)
    bijector = protocol.bijector(d)
    u = bijector.inverse(x)
    back, log_det = bijector.forward(u)
    np.testing.assert_allclose(back, x, rtol=1e-7, atol=1e-9)
    assert log_det.shape == d.batch_shape

    one = protocol.bijector(single)
    u = u[1] if d.batch_shape else u
    free = FREE.get(name, jnp.ravel)
    jacobian = jax.jacobian(lambda u: free(one.forward(u)[0]))(u).reshape(-1, u.size)
    assert jacobian.shape == (u.size, u.size)
    expected = np.linalg.slogdet(jacobian)[1]
    if name == "ZeroSumNormal":  # an isometry onto the plane, whose projection shrinks by a constant
        expected = expected + 0.5 * np.log(3.0)
    np.testing.assert_allclose(one.forward(u)[1], expected, rtol=1e-7, atol=1e-9)
    np.testing.assert_allclose(log_det[1] if d.batch_shape else log_det, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("name", ["Gamma", "Beta", "Dirichlet", "LKJCholesky", "TruncatedNormal", "Uniform"])
def test_a_target_adds_the_log_det(name):
    d, _, x = draw_of(name)
    target = ppl.target(lambda: ppl.sample("x", d))()
    u = target.unconstrain({"x": x})
    bijector = protocol.bijector(d)
    expected = jnp.sum(d.log_prob(x)) + jnp.sum(bijector.forward(bijector.inverse(x))[1])
    np.testing.assert_allclose(target.log_density(u), expected, rtol=1e-8)
    np.testing.assert_allclose(target.constrain(u)["x"], x, rtol=1e-7)


def test_a_support_that_depends_on_another_value():
    def model():
        low = ppl.sample("low", dist.Normal(0.0, 1.0))
        ppl.sample("x", dist.Uniform(low, low + 2.0))

    target = ppl.target(model)()
    u = {"low": jnp.array(0.5), "x": jnp.array(0.3)}
    values = target.constrain(u)
    s = 1 / (1 + np.exp(-0.3))
    np.testing.assert_allclose(values["x"], 0.5 + 2 * s)
    expected = dist.Normal(0.0, 1.0).log_prob(0.5) + np.log(0.5) + np.log(2 * s * (1 - s))
    np.testing.assert_allclose(target.log_density(u), expected, rtol=1e-10)


def test_no_bijector_is_known():
    constructor, parameters = CONTINUOUS["ProjectedNormal"]
    target = ppl.target(lambda: ppl.sample("direction", constructor(*parameters)))()
    with pytest.raises(ppl.errors.PPLError, match=r"site 'direction' at test_bijector.py:\d+"):
        target.log_density({"direction": jnp.zeros((4, 2))})
