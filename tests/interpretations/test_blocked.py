"""A likelihood in blocks of rows means what it means without: density, derivatives, records, draws and sites."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.test_util import check_grads

import ppleffects as ppl
from ppleffects.effects.structure import described

N = 24
TOLERANCE = 1e-10 if jax.config.jax_enable_x64 else 2e-4


def data(*shape):
    return jnp.asarray(np.random.default_rng(7).normal(size=(N, *shape)), float)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model for each number of rows of a block (None: without blocks), and its arguments."""

    build: Callable[[int | None], Callable[..., Any]]
    args: tuple[Any, ...]


CASES: dict[str, Case] = {}


def case(*args):
    def register(build):
        CASES[build.__name__] = Case(build, args)
        return build

    return register


def in_blocks(likelihood, rows):
    return likelihood if rows is None else ppl.blocked(likelihood, rows)


@case(data(3), data() > 0)
def closure_over_latents(rows):
    def model(x, y):
        alpha = ppl.sample("alpha", dist.Normal(0.0, 1.0))
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((3,)))

        def likelihood(block):
            x, y = block
            ppl.observe("y", dist.Bernoulli(logits=x @ beta + alpha), y)

        in_blocks(likelihood, rows)((x, y))

    return model


@case(data(3), data())
def latents_as_arguments(rows):
    def likelihood(block, beta, *, scale, shift):
        ppl.observe("y", dist.Normal(block["x"] @ beta["slope"] + shift, scale), block["y"])

    def model(x, y):
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((3,)))
        scale = ppl.sample("scale", dist.HalfNormal(1.0))
        in_blocks(likelihood, rows)({"x": x, "y": y}, {"slope": beta}, scale=scale, shift=2)

    return model


@case(data(), data())
def rows_that_hold_latents(rows):
    def model(x, y):
        tau = ppl.sample("tau", dist.HalfNormal(1.0))
        z = ppl.sample("z", dist.Normal(0.0, tau).expand((N,)))

        def likelihood(block):
            x, y, z = block
            ppl.observe("y", dist.Normal(jnp.sin(z) * x, tau), y)

        in_blocks(likelihood, rows)((x, y, jnp.exp(z)))

    return model


@case(data(2), data())
def latents_inside(rows):
    def model(x, y):
        tau = ppl.sample("tau", dist.HalfNormal(1.0))

        def likelihood(block):
            x, y = block
            z = ppl.sample("z", dist.Normal(x, tau).to_event(1))
            w = ppl.sample("w", dist.Dirichlet(jnp.ones((len(y), 3))))
            ppl.deterministic("mean", z.sum(-1) + w[:, 0])
            ppl.observe("y", dist.Normal(z.sum(-1) * w[:, 0], 1.0), y)

        in_blocks(likelihood, rows)((x, y))

    return model


@case(data(), data())
def every_kind_of_site(rows):
    def model(x, y):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))

        def likelihood(block):
            x, y = block
            mean = ppl.deterministic("mean", a * x, dims=("row",))
            ppl.observe("y", dist.StudentT(3.0, mean, 1.0), y, mask=x > -0.5, dims=("row",))
            ppl.factor("penalty", -(jnp.stack([mean, y], axis=-1) ** 2))
            ppl.observe("later", dist.Normal(mean, 1.0), None)

        in_blocks(likelihood, rows)((x, y))

    return model


@case(data(2), data())
def vmap_inside(rows):
    def model(x, y):
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((2,)))

        def one(x, y):
            ppl.observe("y", dist.Normal(x @ beta, 1.0), y)

        in_blocks(lambda block: jax.vmap(one, axis_name="row")(*block), rows)((x, y))

    return model


@case(data(4), data(4) > 0)
def scan_cond_and_checkpoint_inside(rows):
    def model(x, y):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))

        def likelihood(block):
            def step(state, xy):
                x, y = xy
                state = jnp.tanh(a * state + x)
                jax.checkpoint(lambda s: ppl.observe("y", dist.Bernoulli(logits=s), y))(state)
                lax.cond(a > 0, lambda s: ppl.factor("f", -(s**2)), lambda s: ppl.factor("f", s), state)
                return state, None

            x, y = block
            lax.scan(step, jnp.zeros(len(x)), (x.T, y.T))

        in_blocks(jax.jit(likelihood), rows)((x, y))

    return model


@case(data(3), data(3))
def vmap_around(rows):
    """Each lane has rows of its own along another axis, and a slope; the offsets are the same for all lanes."""

    def model(x, y):
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((3,)))

        def lane(x, y, beta):
            def likelihood(block):
                x, offset, y = block
                ppl.observe("y", dist.Normal(jnp.sin(x * beta) + offset, 1.0), y)

            in_blocks(likelihood, rows)((x, jnp.arange(float(N)), y))

        jax.vmap(lane, in_axes=(1, 1, 0), axis_name="lane")(x, y, beta)

    return model


@case(data(), data())
def vmap_around_of_shared_rows(rows):
    def model(x, y):
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((3,)))

        def lane(beta):
            def likelihood(block):
                x, y = block
                ppl.observe("y", dist.Normal(x * beta, 1.0), y)
                ppl.factor("same", -(y**2))

            in_blocks(likelihood, rows)((x, y))

        jax.vmap(lane)(beta)

    return model


@case(data(), data(), jnp.array([True, False, True]))
def lanes_that_take_their_own_branch(rows):
    def model(x, y, flags):
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((3,)))

        def lane(flag, beta):
            def likelihood(block):
                x, y = block
                ppl.observe("y", dist.Normal(x * beta, 1.0), y)
                ppl.factor("f", -(beta**2) * x**2)

            lax.cond(flag, in_blocks(likelihood, rows), lambda xy: None, (x, y))

        jax.vmap(lane)(flags, beta)

    return model


@case(data(3), data(3))
def scan_and_cond_around(rows):
    def model(x, y):
        def step(a, xy):
            x, y = xy
            b = ppl.sample("b", dist.Normal(a, 1.0))

            def likelihood(block):
                x, y = block
                ppl.observe("y", dist.Normal(b * x, 1.0), y)

            lax.cond(x[0] > 0, in_blocks(likelihood, rows), lambda xy: likelihood((2 * xy[0], xy[1])), (x, y))
            return b, None

        lax.scan(jax.checkpoint(step), 0.0, (x.T, y.T))

    return model


@case(data(), data())
def while_inside(rows):
    def model(x, y):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))

        def likelihood(block):
            x, y = block
            powers = lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * x), (0, x))[1]
            ppl.observe("y", dist.Normal(a * powers, 1.0), y)

        in_blocks(likelihood, rows)((x, y))

    return model


@case(data(), data(), data(2) > 0)
def transformed(rows):
    def model(x, y, keep):
        tau = ppl.sample("tau", dist.HalfNormal(1.0))

        def likelihood(block):
            x, y = block
            z = ppl.sample("z", dist.Normal(x, tau))
            ppl.sample("w", dist.Normal(z, 1.0))
            ppl.sample("v", dist.Normal(z, 1.0))
            ppl.observe("y", dist.Normal(z, tau), y)
            ppl.factor("f", -(z**2))

        in_blocks(likelihood, rows)((x, y))

    def changed(x, y, keep):
        inner = lambda: model(x, y, keep)  # noqa: E731
        inner = ppl.condition(inner, {"w": jnp.cos(x)})
        inner = ppl.do(inner, {"v": jnp.sin(x)})
        inner = ppl.mask(inner, keep[:, 0], sites=["y", "f"])
        inner = ppl.scale(inner, 3.0, sites=["y"])
        inner = ppl.scale(inner, jnp.where(keep[:, 1], 0.5, 2.0), sites=["y", "w", "f"])
        inner = ppl.reparam(inner, {"z": dist_reparam()})
        ppl.scope(inner, "inner")()

    return changed


def dist_reparam():
    from numpyro.infer.reparam import LocScaleReparam

    return LocScaleReparam(0.3)


@case(data(), data())
def blocks_in_blocks(rows):
    def model(x, y):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))

        def likelihood(block):
            x, y = block
            ppl.observe("y", dist.Normal(jnp.tanh(a * x), 1.0), y)

        inner = in_blocks(likelihood, None if rows is None else max(1, rows // 2))
        in_blocks(lambda block: inner(block), rows)((x, y))

    return model


ROWS = [5, 6, 23]  # with some rows left, with none, and one block alone


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, TOLERANCE, TOLERANCE), found, expected)


def position(build, args):
    target = ppl.target(build(None))(*args)
    return target.constrain({k: 0.3 * v for k, v in target.init(1).items()}), target


def latents(build, args):
    values, target = position(build, args)
    return {name: values[name] for name in target.position_type}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("name", CASES)
def test_density_and_gradient(name, rows):
    build, args = CASES[name].build, CASES[name].args
    values = latents(build, args)
    plain, blocked = (jax.value_and_grad(ppl.log_density(build(r))) for r in (None, rows))
    if name == "while_inside":  # forward mode works beside reverse mode, since the loop's length does not depend on a
        blocked = jax.jit(blocked)
    close(blocked(values, *args), plain(values, *args))
    assert any(np.abs(g).max() > 1e-3 for g in jax.tree.leaves(plain(values, *args)[1]))


@pytest.mark.parametrize("rows", [5])
@pytest.mark.parametrize("name", CASES)
def test_forward_mode_and_second_derivatives(name, rows):
    build, args = CASES[name].build, CASES[name].args
    flat, unravel = ravel_pytree(latents(build, args))
    direction = jnp.cos(jnp.arange(flat.size, dtype=flat.dtype))

    def derivatives(rows):
        def density(u):
            return ppl.log_density(build(rows))(unravel(u), *args)

        slope = jax.grad(density)
        return (
            jax.jvp(density, (flat,), (direction,)),
            jax.jvp(slope, (flat,), (direction,)),
            jax.grad(lambda u: jnp.sin(slope(u)) @ direction)(flat),
            jax.grad(lambda u: jax.jvp(density, (u,), (direction,))[1])(flat),
            jax.jvp(lambda u: jax.jvp(density, (u,), (direction,))[1], (flat,), (direction,)),
        )

    close(jax.jit(lambda: derivatives(rows))(), jax.jit(lambda: derivatives(None))())


@pytest.mark.parametrize("name", CASES)
def test_records_are_those_of_the_likelihood_without_blocks(name):
    build, args = CASES[name].build, CASES[name].args
    values = latents(build, args)
    plain, blocked = (ppl.evaluate(build(r))(values, *args) for r in (None, 5))
    close(dataclasses.replace(blocked, retval=None), dataclasses.replace(plain, retval=None))
    close(blocked.log_prob, ppl.log_density(build(5))(values, *args))


@pytest.mark.parametrize("name", CASES)
def test_draws_do_not_depend_on_blocks(name):
    build, args = CASES[name].build, CASES[name].args
    plain, blocked = (ppl.simulate(build(r))(3, *args) for r in (None, 5))
    close(blocked.values, plain.values)


@pytest.mark.parametrize("name", CASES)
def test_sites_are_those_of_the_likelihood_without_blocks(name):
    build, args = CASES[name].build, CASES[name].args
    plain, blocked = (ppl.sites(build(r))(*args) for r in (None, 5))
    assert list(plain) == list(blocked)
    for name in plain:
        same = dict.fromkeys(("dist", "support", "path"))
        assert dataclasses.replace(plain[name], **same) == dataclasses.replace(blocked[name], **same)


@pytest.mark.parametrize("name", CASES)
def test_target_and_its_gradient(name):
    build, args = CASES[name].build, CASES[name].args
    plain, blocked = (ppl.target(build(r))(*args) for r in (None, 5))
    u = plain.init(2)
    close(jax.value_and_grad(blocked.log_density)(u), jax.value_and_grad(plain.log_density)(u))
    close(blocked.constrain(u), plain.constrain(u))
    close(blocked.unconstrain({k: plain.constrain(u)[k] for k in u}), u)


@pytest.mark.parametrize("name", ["closure_over_latents", "rows_that_hold_latents", "vmap_around", "latents_inside"])
def test_vectorised_chains(name):
    build, args = CASES[name].build, CASES[name].args
    one = latents(build, args)
    many = jax.tree.map(lambda x: jnp.stack([x, 0.9 * x, 0.8 * x]), one)
    plain, blocked = (
        jax.vmap(jax.value_and_grad(ppl.log_density(build(r))), in_axes=(0, *[None] * len(args))) for r in (None, 5)
    )
    close(blocked(many, *args), plain(many, *args))


def test_gradient_by_the_data():
    build, (x, y) = CASES["latents_as_arguments"].build, CASES["latents_as_arguments"].args
    values = latents(build, (x, y))

    def hand(values, x, y):
        mean = x @ values["beta"] + 2
        return jnp.sum(-0.5 * ((y - mean) / values["scale"]) ** 2 - jnp.log(values["scale"]))

    found = jax.grad(lambda x, y: ppl.log_density(build(5))(values, x, y), argnums=(0, 1))(x, y)
    close(found, jax.grad(lambda x, y: hand(values, x, y), argnums=(0, 1))(x, y))


@pytest.mark.parametrize("name", ["closure_over_latents", "rows_that_hold_latents"])
@pytest.mark.skipif(not jax.config.jax_enable_x64, reason="finite differences in single precision tell little")
def test_against_finite_differences(name):
    build, args = CASES[name].build, CASES[name].args
    check_grads(lambda v: ppl.log_density(build(5))(v, *args), (latents(build, args),), order=2, rtol=1e-4)


def equations(jaxpr):
    """All equations of a program, those of bodies included."""
    for eqn in jaxpr.eqns:
        yield eqn
        for value in eqn.params.values():
            for body in value if isinstance(value, tuple) else (value,):
                if hasattr(body, "eqns") or hasattr(body, "jaxpr"):
                    yield from equations(getattr(body, "jaxpr", body))


def products(fn, *args):
    """How often rows are multiplied with something, blocks counted once."""
    return sum(str(e.primitive) == "dot_general" for e in equations(jax.make_jaxpr(fn)(*args).jaxpr))


def test_one_pass_and_no_more():
    """The value is one product with the rows, the gradient one more, and no gradient of the data is computed."""
    build, args = CASES["closure_over_latents"].build, CASES["closure_over_latents"].args
    args = (args[0][:20], args[1][:20])
    values = latents(lambda rows: CASES["closure_over_latents"].build(rows), args)
    density = ppl.log_density(build(5))
    assert products(density, values, *args) == 1
    assert products(jax.grad(density), values, *args) == 2
    loops = [e for e in equations(jax.make_jaxpr(jax.grad(density))(values, *args).jaxpr) if str(e.primitive) == "scan"]
    assert len(loops) == 1
    types: list[Any] = [v.aval for v in loops[0].outvars]
    assert max(math.prod(t.shape) for t in types) <= 4  # blocks, or entries of beta: nothing as long as the rows


def test_memory_is_that_of_a_block():
    def model(x, y, rows):
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((8,)))

        def likelihood(block):
            x, y = block
            ppl.observe("y", dist.Bernoulli(logits=jnp.tanh(x @ beta)), y)

        in_blocks(likelihood, rows)((x, y))

    def temporary(n, rows):
        x, y = jax.ShapeDtypeStruct((n, 8), jnp.float32), jax.ShapeDtypeStruct((n,), bool)
        values = {"beta": jax.ShapeDtypeStruct((8,), jnp.float32)}
        fn = jax.jit(jax.value_and_grad(lambda v, x, y: ppl.log_density(lambda x, y: model(x, y, rows))(v, x, y)))
        analysis: Any = fn.lower(values, x, y).compile().memory_analysis()
        return analysis.temp_size_in_bytes

    assert temporary(100_000, 1000) < 0.1 * temporary(100_000, None)
    assert temporary(200_000, 1000) < 1.1 * temporary(100_000, 1000)


def test_float32_sums_of_many_blocks():
    n = 300_000
    y = np.random.default_rng(0).normal(3.0, 1.0, n).astype(np.float32)

    def model(y):
        mu = ppl.sample("mu", dist.Normal(jnp.float32(0.0), jnp.float32(1.0)))
        ppl.blocked(lambda y: ppl.observe("y", dist.Normal(mu, jnp.float32(1.0)), y), 3)(y)

    value, slope = jax.value_and_grad(lambda v: ppl.log_density(model)(v, y))({"mu": jnp.float32(0.5)})
    assert value.dtype == slope["mu"].dtype == jnp.float32
    wide = y.astype(np.float64)
    expected = -0.5 * np.sum((wide - 0.5) ** 2) - 0.5 * np.log(2 * np.pi) * (n + 1) - 0.125
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    np.testing.assert_allclose(slope["mu"], np.sum(wide - 0.5) - 0.5, rtol=1e-5)


def test_what_is_not_finite_stays_as_it_is():
    """A density of zero in one block is minus infinity for all, and no NaN."""

    def model(y, rows):
        rate = ppl.sample("rate", dist.Normal(0.0, 1.0))
        likelihood = lambda y: ppl.factor("f", jnp.log(jnp.maximum(rate * y, 0.0)))  # noqa: E731
        in_blocks(likelihood, rows)(y)

    y = jnp.array([1.0, 2.0, -1.0, 1.0, 3.0, 2.0])
    density = ppl.log_density(lambda y: model(y, 2))
    assert density({"rate": 1.0}, y) == -jnp.inf

    def steep(y, rows):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))
        in_blocks(lambda y: ppl.factor("f", jnp.sqrt(a * y)), rows)(y)

    plain, blocked = (jax.grad(ppl.log_density(lambda y, r=r: steep(y, r)))({"a": 0.0}, jnp.ones(6)) for r in (None, 2))
    assert plain["a"] == blocked["a"] == jnp.inf


def test_blocks_are_told_apart_from_what_is_compiled():
    """Programs that differ in their blocks alone are not taken for each other."""

    def model(y, weight):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))

        def likelihood(y):  # what a block adds depends on its size, which the likelihood of all rows does not show
            ppl.factor("f", a * y * (weight if len(y) == 3 else 1.0))

        ppl.blocked(likelihood, 3)(y)

    y = jnp.ones(6)
    densities = [ppl.log_density(lambda y, w=w: model(y, w))({"a": 1.0}, y) for w in (1.0, 2.0)]
    close(densities[1] - densities[0], 6.0)


def test_a_program_is_described_without_the_lines_of_its_sites():
    """By this a checkpoint knows its program: a comment above it does not change it, the size of a block does."""

    def words(source, rows=5):
        scope: dict[str, Any] = {"ppl": ppl, "dist": dist}
        exec(source, scope)
        model = lambda y: ppl.blocked(scope["likelihood"], rows)(y)  # noqa: E731
        return described(ppl.target(model)(jnp.zeros(N)).program.jaxpr)

    source = 'def likelihood(y):\n    ppl.observe("y", dist.Normal(0.0, 1.0), y)\n'
    assert words(source) == words(f"\n\n{source}")
    assert words(source) != words(source, rows=6)
    assert words(source) != words(source.replace("1.0", "2.0"))


def test_one_compilation_for_all_data_of_one_shape():
    build = CASES["closure_over_latents"].build
    x, y = CASES["closure_over_latents"].args
    values = latents(build, (x, y))
    found = []
    listen = lambda event, *_, **__: found.append(event) if event.endswith("backend_compile_duration") else None  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    first = ppl.log_density(build(6))(values, x, y)
    before = len(found)
    second = ppl.log_density(build(6))(values, x + 1.0, y)
    assert len(found) - before <= 1  # that of x + 1.0
    assert first != second
