"""The distributions of generated programs, as functions of parameters in the shape of the batch."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import tensorflow_probability.substrates.jax as tfp

tfd = tfp.distributions
TILT = jnp.array([1.0, 0.0, -1.0])
COVARIANCE = jnp.array([[1.0, 0.3], [0.3, 0.5]])


def spread(m, shape):
    """Parameters of batch shape ``shape``, no two alike, from a scalar."""
    return m + 0.25 * jnp.arange(float(math.prod(shape))).reshape(shape)


def mix(c, value):
    """A scalar that depends on ``c`` and on every entry of ``value``."""
    return 0.5 * c + 0.4 * jnp.tanh(jnp.mean(jnp.asarray(value, float)))


@dataclasses.dataclass(frozen=True)
class Family:
    """One kind of distribution.

    Attributes:
        make: from parameters to the distribution.
        support: of which the values are; families of one support can share a name in the branches of a cond.
        inside: from reals of the value's shape to values in the support; from integers, if it is discrete.
        event: the event shape.
        discrete: whether values are integers.
    """

    make: Callable[[Any], Any]
    support: str
    inside: Callable[[Any], Any]
    event: tuple[int, ...] = ()
    discrete: bool = False


def _one(m):
    """Ones, traced as ``m`` is: NumPyro validates constants at once, which JAX refuses inside of some shard_maps."""
    return jnp.exp(0.0 * m)


def _real(make, event=()):
    return Family(make, f"real{event}", lambda z: z, event)


def _positive(make):
    return Family(make, "positive", lambda z: jnp.exp(0.4 * z))


def _count(make, high):
    return Family(make, f"below {high}", lambda k: k % high, discrete=True)


FAMILIES = {
    "normal": _real(lambda m: dist.Normal(m, 0.8)),
    "gamma": _positive(lambda m: dist.Gamma(1.5 + jax.nn.sigmoid(m), 1.3)),
    "dirichlet": Family(
        lambda m: dist.Dirichlet(1.5 + jax.nn.sigmoid(m[..., None] * TILT)), "simplex", jax.nn.softmax, (3,)
    ),
    # Its validation compares by jnp.isclose, of which JAX keeps a trace made inside of a shard_map for use outside.
    "mvn": _real(
        lambda m: dist.MultivariateNormal(
            m[..., None] * TILT[:2], COVARIANCE * _one(m)[..., None, None], validate_args=False
        ),
        (2,),
    ),
    "laplace": _real(lambda m: dist.Laplace(m, 0.7)),
    "student": _real(lambda m: dist.StudentT(4.0, m, 0.9)),
    "lognormal": _positive(lambda m: dist.LogNormal(m, 0.5)),
    "halfnormal": _positive(lambda m: dist.HalfNormal(jnp.exp(0.3 * m))),
    "beta": Family(lambda m: dist.Beta(1.5 + jax.nn.sigmoid(m), 2.0), "unit", jax.nn.sigmoid),
    "uniform": Family(lambda m: dist.Uniform(m, m + 2.0), "moving", lambda z: z),
    "vector": _real(lambda m: dist.Normal(m[..., None] + TILT, 0.8).to_event(1), (3,)),
    "transformed": _positive(
        lambda m: dist.TransformedDistribution(dist.Normal(m, 0.6), dist.transforms.ExpTransform())
    ),
    "mixture": _real(
        lambda m: dist.MixtureSameFamily(
            dist.Categorical(logits=jnp.array([0.3, -0.2]) * _one(m)[..., None]),
            dist.Normal(m[..., None] + jnp.array([-1.0, 1.0]), 0.5),
        )
    ),
    "tfp_normal": _real(lambda m: tfd.Normal(m, 0.8)),
    "tfp_gamma": _positive(lambda m: tfd.Gamma(1.5 + jax.nn.sigmoid(m), 1.3)),
    "tfp_diagonal": _real(lambda m: tfd.MultivariateNormalDiag(m[..., None] * TILT[:2], jnp.ones(2)), (2,)),
    "bernoulli": _count(lambda m: dist.Bernoulli(logits=m), 2),
    "poisson": _count(lambda m: dist.Poisson(jnp.exp(0.3 * m)), 4),
    "categorical": _count(lambda m: dist.Categorical(logits=m[..., None] * TILT), 3),
    "binomial": _count(lambda m: dist.Binomial(4, logits=m), 5),
}
CONTINUOUS = [name for name, family in FAMILIES.items() if not family.discrete]
DISCRETE = [name for name, family in FAMILIES.items() if family.discrete]
OBSERVABLE = [name for name in FAMILIES if name not in ("uniform", "mixture")]


def log_det(d, value):
    """The unconstrained coordinates of a value, and the log-determinant of the map from them."""
    if isinstance(d, tfd.Distribution):
        bijector = d.experimental_default_event_space_bijector()
        u = bijector.inverse(value)
        return u, jnp.sum(bijector.forward_log_det_jacobian(u, len(d.event_shape)))
    bijector = dist.biject_to(d.support)
    u = bijector.inv(value)
    return u, jnp.sum(bijector.log_abs_det_jacobian(u, value))
