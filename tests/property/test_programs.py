"""Random programs against their plain meaning: density, gradient, layout, records, draws, unconstrained positions."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings

import ppleffects as ppl
from tests.property.examples import EXAMPLES
from tests.property.plain import Plain, joined
from tests.property.programs import Block, Compiled, Cond, Shard
from tests.property.strategies import programs

SETTINGS = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "print_blob": False,
}


@pytest.fixture(autouse=True, scope="module")
def _fast_compilation():
    """Most of the time goes to XLA, which has little to gain from programs that run once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def close(found, expected, tolerance, what):
    """Relative to the size of the whole: sums are reordered, and entries cancel."""
    found, expected = np.asarray(found), np.asarray(expected)
    assert found.shape == expected.shape, f"{what}: shape {found.shape}, expected {expected.shape}"
    size = np.max(np.abs(expected[np.isfinite(expected)]), initial=1.0) if expected.dtype.kind == "f" else 1
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance * size, err_msg=what)


def compare_records(trace, plain, infos):
    """Values, pointwise log densities and ``active``, entry by entry."""
    assert set(trace.values) == {n for n, i in infos.items() if i.kind != "factor"}
    assert set(trace.latents) == {n for n, i in infos.items() if i.kind == "sample"}
    assert set(trace.observed) == {n for n, i in infos.items() if i.kind == "observe"}
    assert set(trace.log_probs) == {n for n, i in infos.items() if i.kind in ("sample", "observe")}
    for name, value in trace.values.items():
        info = infos[name]
        missing = 0 if jnp.issubdtype(value.dtype, jnp.integer) else np.nan
        expected, covered = joined(plain.values[name], info.shape, missing)
        close(value, expected, 1e-10, f"value of {name}")
        over_event = tuple(range(len(info.shape) - info.event_dim, len(info.shape)))
        reached = covered.all(axis=over_event)
        if name in trace.active:
            np.testing.assert_array_equal(trace.active[name], reached, err_msg=f"active of {name}")
        else:
            assert reached.all(), f"{name} is not active everywhere"
        if name in trace.log_probs:
            batch = info.shape[: len(info.shape) - info.event_dim]
            expected, _ = joined(plain.log_probs[name], batch, 0.0)
            close(trace.log_probs[name], expected, 1e-10, f"log_prob of {name}")


def check_draws(trace, infos):
    """No two entries of a continuous latent are equal: not over steps, lanes or shards."""
    for name, info in infos.items():
        if info.kind == "sample" and not info.discrete:
            x = np.asarray(trace.values[name]).ravel()
            x = x[np.isfinite(x)]
            assert len(set(x.tolist())) == x.size, f"draws of {name} repeat: {x}"


def shards_around(body, depth=0):
    """How deep shard_maps are nested."""
    found = depth
    for s in body:
        for inner in s.branches if isinstance(s, Cond) else [s.body] if isinstance(s, Block) else []:
            found = max(found, shards_around(inner, depth + isinstance(s, Shard)))
    return found


def interpreted(compiled, latents, *, with_target, nested):
    """All that the library says of a program at given values, in one compiled function, as compiling takes the time.

    ``nested``: JAX cannot lower the reverse mode of a shard_map in a shard_map, by hand or by us.
    """
    floats = {n: v for n, v in latents.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    whole = {n: v for n, v in latents.items() if n not in floats}

    def everything(floats, whole, data, ints):
        def density(floats, data):
            return ppl.log_density(compiled.model)({**floats, **whole}, data, ints)

        value = density(floats, data)
        gradient = (jax.jacfwd if nested else jax.grad)(density, argnums=(0, 1))(floats, data)
        trace = ppl.evaluate(compiled.model)({**floats, **whole}, data, ints)
        if not with_target:
            return trace, value, gradient, None
        target = ppl.target(compiled.model)(data, ints)
        u = target.unconstrain(floats)
        return trace, value, gradient, (u, target.constrain(u), target.log_density(u))

    return jax.jit(everything)(floats, whole, compiled.data, compiled.ints)


def plainly(compiled, program, latents):
    """The same of the plain meaning: the run, and the gradient."""
    latents = {n: jnp.asarray(np.asarray(v)) for n, v in latents.items()}  # off the mesh
    floats = {n: v for n, v in latents.items() if jnp.issubdtype(v.dtype, jnp.floating)}
    whole = {n: v for n, v in latents.items() if n not in floats}
    runs = []

    def density(floats, data):
        runs.append(Plain(program, data, compiled.ints, {**floats, **whole}))
        return runs[0].total, runs[0].numbers()

    gradient, numbers = jax.grad(density, argnums=(0, 1), has_aux=True)(floats, compiled.data)
    return runs[0].with_numbers(numbers), gradient


def check_target(found, plain, infos, latents):
    """Unconstrained positions, and their density."""
    u, constrained, log_density = found
    for name in latents:
        shape = (*infos[name].shape[: len(infos[name].shape) - infos[name].event_dim], *u[name].shape[-1:])
        shape = shape if infos[name].event_dim else infos[name].shape
        expected, _ = joined(plain.unconstrained[name], shape, np.nan)
        close(u[name], expected, 1e-8, f"unconstrained {name}")
    for name, value in latents.items():
        close(constrained[name], value, 1e-8, f"constrained {name}")
    close(log_density, plain.total + plain.log_det, 1e-8, "log density of the target")


def check(program):
    """Compares one program with its plain meaning."""
    compiled = Compiled(program)
    args = compiled.data, compiled.ints
    infos = Plain(program, *args).infos
    latents = [i for i in infos.values() if i.kind == "sample"]
    with_target = all(i.everywhere and not i.discrete for i in latents)
    with jax.set_mesh(compiled.mesh) if program.ambient else contextlib.nullcontext():
        sites = ppl.sites(compiled.model)(*args)
        for name, info in infos.items():
            if info.kind != "factor":
                assert (sites[name].kind, sites[name].shape) == (info.kind, info.shape), name
        trace = ppl.simulate(compiled.model)(0, *args)
        plain, expected = plainly(compiled, program, trace.latents)
        compare_records(trace, plain, infos)
        check_draws(trace, infos)
        close(trace.retval, plain.result, 1e-10, "what the model returns")
        close(trace.log_prob, plain.total, 1e-10, "log density of a simulated trace")
        again, value, gradient, target = interpreted(
            compiled, trace.latents, with_target=with_target, nested=shards_around(program.body) > 1
        )
        compare_records(again, plain, infos)
        close(value, plain.total, 1e-10, "log density")
        assert value.shape == ()
        for kind, a, b in zip(("latent", "data"), gradient, expected, strict=True):
            for name in b:
                close(a[name], b[name], 1e-8, f"gradient in {kind} {name}")
        if target is not None:
            check_target(target, plain, infos, trace.latents)


def checked(program):
    """Compares one program; if it fails, the program is printed as code."""
    try:
        check(program)
    except Exception as error:
        error.add_note(f"\n{program}")
        raise


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name):
    checked(EXAMPLES[name])


@settings(max_examples=40, **SETTINGS)
@given(programs())
def test_programs(program):
    checked(program)


@pytest.mark.validate
@pytest.mark.parametrize("number", range(10))  # apart, since one test may take a quarter of an hour at most
def test_many_programs(number):
    @seed(number)
    @settings(max_examples=50, **{**SETTINGS, "derandomize": False})
    @given(programs())
    def run(program):
        checked(program)

    run()
