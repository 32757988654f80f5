"""What a model says: names, shapes, masks, derivatives inside of it, donated data, long sums."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _conformance_case import NO_SITES, Refused, case
from _conformance_slub import term, total
from jax import lax
from numpyro.contrib import control_flow
from numpyro.infer.util import log_density as numpyro_log_density
from scipy.stats import norm

import ppleffects as ppl

OUTSIDE = {key: NO_SITES[key] for key in ("BlackJAX", "slub")}
WITHOUT_SLUB = {key: NO_SITES[key] for key in ("TFP", "BlackJAX")}
Y = np.array([0.2, 1.5, -0.7])


def _tfd():
    from tensorflow_probability.substrates import jax as tfp

    return tfp.distributions


broadcast = case(
    "(N,) against (N, 1)",
    "a distribution of N observed at data of shape (N, 1): an error, where a broadcast would sum N x N terms",
    cannot=OUTSIDE,
)


@broadcast.on("ppleffects")
def _():
    return ppl.log_density(lambda y: ppl.observe("y", dist.Normal(jnp.zeros(3), 1.0), y))({}, Y[:, None])


@broadcast.on("NumPyro")
def _():
    def model(y):
        numpyro.sample("y", dist.Normal(jnp.zeros(3), 1.0), obs=y)

    return numpyro_log_density(model, (Y[:, None],), {}, {})[0]


@broadcast.on("TFP")
def _():
    joint = _tfd().JointDistributionNamed({"y": _tfd().Normal(jnp.zeros(3), 1.0)})
    return jnp.sum(joint.log_prob(y=Y[:, None]))


def _named(site):
    def model():
        site("x", dist.Normal(0.0, 1.0))

    return model


misspelt = case("misspelt condition", "a model conditioned on a name that it does not have: an error", cannot=OUTSIDE)
extra = case("a value too many", "a density at values that name one more than the latents: an error", cannot=OUTSIDE)


@misspelt.on("ppleffects")
def _():
    return ppl.log_density(ppl.condition(_named(ppl.sample), {"z": 1.0}))({"x": 0.5})


@misspelt.on("NumPyro")
def _():
    conditioned = numpyro.handlers.condition(_named(numpyro.sample), {"z": 1.0})
    return numpyro_log_density(conditioned, (), {}, {"x": 0.5})[0]


@misspelt.on("TFP")
def _():
    joint = _tfd().JointDistributionNamed({"x": _tfd().Normal(0.0, 1.0)})
    return joint.experimental_pin(z=1.0).log_prob(x=0.5)


@extra.on("ppleffects")
def _():
    return ppl.log_density(_named(ppl.sample))({"x": 0.5, "z": 1.0})


@extra.on("NumPyro")
def _():
    return numpyro_log_density(_named(numpyro.sample), (), {}, {"x": 0.5, "z": 1.0})[0]


@extra.on("TFP")
def _():
    return _tfd().JointDistributionNamed({"x": _tfd().Normal(0.0, 1.0)}).log_prob(x=0.5, z=1.0)


duplicate = case("one name twice", "two latents of one name: an error", section="fails", cannot=OUTSIDE)


@duplicate.on("ppleffects")
def _():
    return ppl.log_density(lambda: [_named(ppl.sample)() for _ in range(2)])({"x": 0.5})


@duplicate.on("NumPyro")
def _():
    return numpyro_log_density(lambda: [_named(numpyro.sample)() for _ in range(2)], (), {}, {"x": 0.5})[0]


@duplicate.on("TFP")
def _():
    def model():
        for _ in range(2):
            yield _tfd().JointDistributionCoroutine.Root(_tfd().Normal(0.0, 1.0, name="x"))

    return jnp.size(_tfd().JointDistributionCoroutine(model).sample(seed=jax.random.key(0)))


alone = case(
    "sample outside of a model",
    "a latent in a jitted function that is called by itself, its value unused: an error",
    section="fails",
    cannot=NO_SITES,
)


@alone.on("ppleffects")
def _():
    jax.jit(_named(ppl.sample))()
    return Refused("it returned")


@alone.on("NumPyro")
def _():
    jax.jit(_named(numpyro.sample))()
    return Refused("it returned")


donated = case(
    "donated data",
    "a model with an inner jit that donates its argument: the density, then the sum of the caller's data, still there",
    (norm.logpdf(Y).sum(), Y.sum()),
    section="fails",
    cannot=WITHOUT_SLUB,
)


def _donating(site):
    y = jnp.asarray(Y)
    inner = jax.jit(lambda y: y * 1.0, donate_argnums=0)
    return y, lambda y: site(inner(y))


@donated.on("ppleffects")
def _():
    y, model = _donating(lambda y: ppl.observe("y", dist.Normal(0.0, 1.0), y))
    return ppl.log_density(model)({}, y), y.sum()


@donated.on("NumPyro")
def _():
    y, model = _donating(lambda y: numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y))
    return numpyro_log_density(model, (y,), {}, {})[0], y.sum()


@donated.on("slub")
def _():
    y, program = _donating(lambda y: term(jnp.sum(-0.5 * y**2 - 0.5 * jnp.log(2 * jnp.pi))))
    return total(lambda: program(y)), y.sum()


GAPS, SCALES, KEPT = np.array([0.2, np.nan, -0.7]), np.array([1.0, 2.0, np.nan]), np.array([True, False, False])
masked = case(
    "masked NaNs",
    "a NaN among the data and one among the scales, both masked: value and gradient by the mean",
    (norm.logpdf(0.2, 0.5), 0.2 - 0.5),
    section="fails",
    cannot=OUTSIDE,
)


@masked.on("ppleffects")
def _():
    def model(mean, scales):
        ppl.observe("y", dist.Normal(mean, scales), GAPS, mask=KEPT)

    return jax.value_and_grad(lambda mean: ppl.log_density(model)({}, mean, SCALES))(0.5)


@masked.on("NumPyro")
def _():  # the scales are traced, since its distributions refuse a NaN that they can see
    def model(mean, scales):
        numpyro.sample("y", dist.Normal(mean, scales).mask(KEPT), obs=GAPS)

    density = lambda mean, scales: numpyro_log_density(model, (mean, scales), {}, {})[0]  # noqa: E731
    return jax.jit(jax.value_and_grad(density))(0.5, SCALES)


@masked.on("TFP")
def _():
    def density(mean):
        return _tfd().Masked(_tfd().Normal(mean, jnp.asarray(SCALES)), validity_mask=KEPT).log_prob(GAPS).sum()

    return jax.value_and_grad(density)(0.5)


DERIVATIVES: dict[str, Any] = {
    "grad(checkpoint)": lambda f: jax.grad(jax.checkpoint(f)),
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
}


def _derivative(name, derivative):
    inside = case(
        f"{name} in the model",
        f"a factor of 3 in a function of which the model takes {name}, and that does not depend on the argument: "
        "counts once, or is refused",
        3.0,
        section="fails",
        refusal=True,
        cannot=WITHOUT_SLUB,
    )

    def function(add):
        def f(x):
            add(3.0)
            return x**3

        return lambda: derivative(f)(2.0)

    @inside.on("ppleffects")
    def _():
        return ppl.log_density(function(lambda amount: ppl.factor("f", amount)))({})

    @inside.on("NumPyro")
    def _():
        return numpyro_log_density(function(lambda amount: numpyro.factor("f", amount)), (), {}, {})[0]

    @inside.on("slub")
    def _():
        return total(function(term))


for _name, _how in DERIVATIVES.items():
    _derivative(_name, _how)


TERMS = 10**6
long = case(
    "a long scan in float32",
    "the sum of a million observations at 0.1 in a scan, in float32: to a relative error of 1e-4",
    TERMS * norm.logpdf(np.float32(0.1)),
    section="fails",
    rtol=1e-4,
    x64=False,
    timeout=300.0,
    cannot=WITHOUT_SLUB,
)


@long.on("ppleffects")
def _():
    def step(carry, _):
        ppl.observe("y", dist.Normal(0.0, 1.0), 0.1)
        return carry, None

    return ppl.log_density(lambda: lax.scan(step, 0.0, None, length=TERMS))({})


@long.on("NumPyro")
def _():  # with NumPyro's own scan
    def step(carry, y):
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=y)
        return carry, None

    def model():
        control_flow.scan(step, 0.0, jnp.full(TERMS, 0.1))

    return numpyro_log_density(model, (), {}, {})[0]


@long.on("slub")
def _():
    def step(carry, _):
        term(norm.logpdf(0.1).astype(np.float32))
        return carry, None

    return total(lambda: lax.scan(step, 0.0, None, length=TERMS), dtype=jnp.float32)
