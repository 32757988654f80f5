"""Derivatives within a model, checkpoints and custom rules: refused where a site would be lost, kept elsewhere."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax

import ppleffects as ppl
from ppleffects.errors import UnsupportedPrimitiveError

STANDARD = dist.Normal(0.0, 1.0)


def factored(x):
    ppl.factor("site", 1.0)
    return x * x


def dependent(x):
    ppl.observe("site", dist.Normal(x, 1.0), 0.5)
    return x * x


def sampled(x):
    return x * ppl.sample("site", STANDARD)


def noted(x):
    ppl.deterministic("site", x)
    return x * x


@jax.custom_jvp
def twisted(x):
    ppl.factor("site", 1.0)
    return x * x


twisted.defjvp(lambda p, t: (p[0] ** 2, 2 * p[0] * t[0]))


@jax.custom_vjp
def bent(x):
    ppl.factor("site", 1.0)
    return x * x


bent.defvjp(lambda x: (x * x, x), lambda x, g: (2 * x * g,))

BODIES = {f.__name__: f for f in (factored, dependent, sampled, noted)}
WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "jit checkpoint": lambda f: jax.jit(jax.checkpoint(f)),
    "scan": lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, length=3)[0],
    "cond": lambda f: lambda x: lax.cond(x > 0, f, lambda y: y, x),
}
DERIVATIVES = {
    "grad": jax.grad,
    "jacfwd": jax.jacfwd,
    "hessian": jax.hessian,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[0],
    "vjp": lambda f: lambda x: jax.vjp(f, x)[0],
}


@pytest.mark.parametrize("derivative", DERIVATIVES)
@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("body", BODIES)
def test_sites_under_a_derivative_are_refused(body, wrap, derivative):
    def model():
        return DERIVATIVES[derivative](WRAPS[wrap](BODIES[body]))(1.0)

    line = BODIES[body].__code__.co_firstlineno + 1
    with pytest.raises(UnsupportedPrimitiveError, match=rf"site 'site' at test_derivatives.py:{line}: .*"):
        ppl.sites(model)()


@pytest.mark.parametrize("derivative", ["none", "grad", "vjp"])
@pytest.mark.parametrize("wrap", ["plain", "jit", "checkpoint", "scan"])
@pytest.mark.parametrize("fn", [twisted, bent], ids=["custom_jvp", "custom_vjp"])
def test_sites_under_their_own_derivative_rule_are_refused(fn, wrap, derivative):
    def model():
        return DERIVATIVES.get(derivative, lambda f: f)(WRAPS[wrap](fn))(1.0)

    with pytest.raises(UnsupportedPrimitiveError, match=r"site 'site' at test_derivatives.py:\d+: "):
        ppl.log_density(model)({})


def test_derivatives_around_no_site_are_fine():
    def model():
        x = ppl.sample("x", STANDARD)
        slope = jax.grad(lambda z: jnp.sin(z) * x)(x)
        curve = jax.hessian(jnp.cos)(x)
        ppl.observe("y", dist.Normal(slope, 1.0), curve)

    def plain(x):
        return dist.Normal(0.0, 1.0).log_prob(x) + dist.Normal(jnp.cos(x) * x, 1.0).log_prob(-jnp.cos(x))

    for fn in (lambda f: f, jax.grad, jax.hessian):
        ours = fn(lambda x: ppl.log_density(model)({"x": x}))(0.4)
        np.testing.assert_allclose(ours, fn(plain)(0.4), rtol=1e-10)


def test_a_density_inside_of_a_model_may_be_differentiated():
    def inner():
        ppl.sample("z", STANDARD)

    def model():
        x = ppl.sample("x", STANDARD)
        ppl.factor("f", jax.grad(lambda x: ppl.log_density(inner)({"z": x}))(x))

    np.testing.assert_allclose(ppl.log_density(model)({"x": 0.5}), STANDARD.log_prob(0.5) - 0.5)


def test_rules_outside_of_sites_stay():
    @jax.custom_jvp
    def odd(x):
        return x

    odd.defjvp(lambda p, t: (p[0], 100.0 * t[0]))

    def model():
        x = ppl.sample("x", STANDARD)
        jax.checkpoint(lambda x: ppl.factor("f", odd(x)))(x)
        lax.scan(lambda c, _: (odd(c), ppl.factor("g", odd(c))), x, length=1)

    assert float(jax.grad(ppl.log_density(model))({"x": 0.0})["x"]) == 200.0


def test_a_site_in_a_primitive_without_a_rule():
    def model():
        def matvec(v):
            return (ppl.factor("site", 1.0), 2 * v)[1]

        return lax.custom_linear_solve(matvec, jnp.ones(2), lambda _, b: b / 2, symmetric=True)

    with pytest.raises(UnsupportedPrimitiveError, match=r"site 'site' at .*'custom_linear_solve'"):
        ppl.log_density(model)({})


LAYERS, WIDTH = 64, 64


def layers(policy):
    def model(x):
        w = ppl.sample("w", dist.Normal(jnp.zeros((WIDTH, WIDTH)), 1.0).to_event(2))

        def layer(x, _):
            for _ in range(4):
                x = jnp.sin(x @ w)
            ppl.factor("size", -jnp.sum(x**2))
            return x, None

        body = layer if policy is None else jax.checkpoint(layer, **policy)
        lax.scan(body, x, length=LAYERS)

    return model


def by_hand(policy):
    def density(values, x):
        w = values["w"]

        def layer(carry, _):
            x, total = carry
            for _ in range(4):
                x = jnp.sin(x @ w)
            return (x, total - jnp.sum(x**2)), None

        body = layer if policy is None else jax.checkpoint(layer, **policy)
        total = lax.scan(body, (x, 0.0), length=LAYERS)[0][1]
        return total + jnp.sum(dist.Normal(0.0, 1.0, validate_args=False).log_prob(w))

    return density


def bytes_of(fn):
    values, x = {"w": jnp.full((WIDTH, WIDTH), 0.01)}, jnp.ones((1024, WIDTH))
    compiled = jax.jit(jax.value_and_grad(fn)).lower(values, x).compile()
    return compiled.memory_analysis().temp_size_in_bytes, compiled(values, x)


def test_checkpoint_saves_what_it_saves_by_hand():
    policies = {
        "none": None,
        "all": {},
        "dots": {"policy": jax.checkpoint_policies.dots_with_no_batch_dims_saveable},
    }
    found = {name: bytes_of(ppl.log_density(layers(policy))) for name, policy in policies.items()}
    hand = {name: bytes_of(by_hand(policy)) for name, policy in policies.items()}
    assert hand["all"][0] < 0.7 * hand["none"][0]
    for name in policies:
        assert found[name][0] <= 1.001 * hand[name][0]
        np.testing.assert_allclose(found[name][1][0], hand[name][1][0], rtol=1e-10)
        np.testing.assert_allclose(found[name][1][1]["w"], hand[name][1][1]["w"], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("mapped", [True, False])
def test_a_site_under_its_own_batching_rule_is_refused(mapped):
    @jax.custom_batching.custom_vmap
    def own(x):
        ppl.factor("site", x)
        return x

    own.def_vmap(lambda size, batched, x: (x, batched[0]))
    model = (lambda: jax.vmap(own)(jnp.ones(3))) if mapped else (lambda: own(1.0))
    with pytest.raises(UnsupportedPrimitiveError, match=r"site 'site' at test_derivatives.py:\d+: .*custom_vmap"):
        ppl.log_density(model)({})
