"""Bad input -> message: each says the site, the line, what was expected, what was found, and what to do."""

import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects import errors

STANDARD = dist.Normal(0.0, 1.0)


def draw(name="x", **options):
    return ppl.sample(name, options.pop("dist", STANDARD), **options)


def sharded(body, **options):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))

    def silent(*args):
        body(*args)

    settings = {"mesh": mesh, "in_specs": (), "out_specs": None, **options}
    return jax.shard_map(silent, **settings)


def duplicate():
    draw()
    draw()


class NoPytree:
    batch_shape = event_shape = ()
    sample = log_prob = lambda self, *_: 0.0


# bad input: (what the user runs, the error, the parts of its message in order)
TABLE = {
    "a duplicate name": (
        lambda: ppl.simulate(duplicate)(0),
        errors.DuplicateSiteError,
        ["site 'x' at test_errors.py:", "two sites have this name", "expected: each name once", "fix:"],
    ),
    "a missing value": (
        lambda: ppl.log_density(draw)({}),
        errors.ValuesError,
        ["site 'x' at test_errors.py:", "no value is given", "expected:", "found:", "fix:"],
    ),
    "an unknown value": (
        lambda: ppl.log_density(lambda: draw("mu"))({"mu": 0.0, "zeta": 0.0}),
        errors.ValuesError,
        ["site 'zeta'", "no latent of this name", "expected: one of ['mu']", "fix: leave it out"],
    ),
    "a misspelt value": (
        lambda: ppl.log_density(lambda: draw("sigma"))({"sigam": 0.0}),
        errors.ValuesError,
        ["site 'sigam'", "no latent of this name", "fix: did you mean 'sigma'?"],
    ),
    "a value for an observation": (
        lambda: ppl.log_density(lambda: ppl.observe("y", STANDARD, 0.0))({"y": 0.0}),
        errors.ValuesError,
        ["site 'y' at test_errors.py:", "'observe'", "expected:", "condition"],
    ),
    "a wrong shape": (
        lambda: ppl.log_density(draw)({"x": jnp.zeros(3)}),
        errors.ShapeError,
        ["site 'x' at test_errors.py:", "shape", "expected: ()", "found: (3,)", "fix:"],
    ),
    "a cast that loses": (
        lambda: ppl.log_density(lambda: draw(dist=dist.Poisson(2.0)))({"x": 1.5}),
        errors.DTypeError,
        ["site 'x' at test_errors.py:", "cast", "expected: int", "found: float", "fix:"],
    ),
    "data of another shape than the distribution": (
        lambda: ppl.log_density(lambda: ppl.observe("y", dist.Normal(jnp.zeros((3, 1)), 1.0), jnp.zeros(3)))({}),
        errors.ShapeError,
        ["site 'y' at test_errors.py:", "does not fit", "expected:", "(3, 1)", "found:", "(3,)", "fix:"],
    ),
    "a sample outside of an interpretation": (
        draw,
        errors.UnhandledEffectError,
        ["site 'x' at test_errors.py:", "outside of an interpretation", "fix:", "ppl.simulate(model)(key)"],
    ),
    "a sample outside of an interpretation, under jit, unused": (
        jax.jit(lambda: (draw(), 1.0)[1]),
        errors.UnhandledEffectError,
        ["site 'x' at test_errors.py:", "outside of an interpretation", "fix:", "ppl.simulate(model)(key)"],
    ),
    "a mesh axis that is not there": (
        lambda: ppl.simulate(lambda: sharded(lambda: draw(spec=P("rows")))())(0),
        errors.SpecError,
        ["site 'x' at test_errors.py:", "mesh axis 'rows'", "expected: one of the axes ['data']", "found:", "fix:"],
    ),
    "a spec outside of shard_map": (
        lambda: ppl.simulate(lambda: draw(spec=P("data")))(0),
        errors.SpecError,
        [
            "site 'x' at test_errors.py:",
            "mesh axis 'data'",
            "expected: a site inside of jax.shard_map",
            "found:",
            "fix:",
        ],
    ),
    "a spec that is none": (
        lambda: ppl.simulate(lambda: draw(spec="data"))(0),
        errors.SpecError,
        ["site 'x' at test_errors.py:", "no partition spec", "expected: spec=P()", "found: 'data'"],
    ),
    "check_vma=False without spec=": (
        lambda: ppl.simulate(lambda: sharded(draw, check_vma=False)())(0),
        errors.SpecError,
        ["site 'x' at test_errors.py:", "check_vma=False", "expected:", "found:", "fix:", "spec="],
    ),
    "a latent that does not vary and says no spec=": (
        lambda: ppl.simulate(lambda: sharded(draw)())(0),
        errors.SpecError,
        ["site 'x' at test_errors.py:", "do not vary", "expected: spec=", "found:", "fix: spec=P()", 'spec=P("data")'],
    ),
    "a shared latent whose parameters vary": (
        lambda: ppl.simulate(
            lambda x: sharded(lambda x: draw(dist=dist.Normal(x, 1.0), spec=P()), in_specs=P("data"))(x)
        )(0, jnp.zeros(4)),
        errors.SpecError,
        ["site 'x' at test_errors.py:", "expected:", "found:", "Normal", "fix:", "psum", "all_gather"],
    ),
    "a discrete latent under a gradient": (
        lambda: ppl.target(lambda: draw("k", dist=dist.Poisson(2.0)))(),
        errors.DiscreteLatentError,
        ["site 'k' at test_errors.py:", "discrete latent", "expected:", "found: Poisson", "fix:", "sum it out"],
    ),
    "a distribution that is not a pytree": (
        lambda: ppl.simulate(lambda: draw(dist=NoPytree()))(0),
        errors.DistributionError,
        ["site 'x' at test_errors.py:", "not a pytree", "expected:", "found:", "NoPytree", "fix: register its class"],
    ),
    "arguments in the wrong order": (
        lambda: ppl.simulate(lambda: ppl.sample(STANDARD, "x"))(0),
        errors.PPLError,
        ["test_errors.py:", "a site needs a name", "expected: a string", "found:"],
    ),
    "a model that is none": (
        lambda: ppl.log_density(jnp.zeros(()))({}),
        errors.PPLError,
        ["the model is not a function", "expected:", "found:", "fix:"],
    ),
    "a key that is none": (
        lambda: ppl.simulate(draw)("seed"),
        errors.PPLError,
        ["not a random key", "expected: jax.random.key(seed)", "found: 'seed'"],
    ),
    "a latent in a while loop": (
        lambda: ppl.sites(lambda: lax.while_loop(lambda c: c < 2, lambda c: (draw(), c + 1)[1], 0))(),
        errors.UnsupportedPrimitiveError,
        ["site 'x' at test_errors.py:", "while loop", "fix: use lax.scan"],
    ),
    "a site under a derivative": (
        lambda: ppl.sites(lambda: jax.grad(lambda y: (draw(), y)[1])(1.0))(),
        errors.UnsupportedPrimitiveError,
        ["site 'x' at test_errors.py:", "differentiated inside of the model", "fix: take the site out"],
    ),
    "more dims than axes": (
        lambda: ppl.sites(lambda: draw(dims=("row", "column")))(),
        errors.SpecError,
        ["site 'x' at test_errors.py:", "dims=", "expected: at most 0", "found:"],
    ),
    "a mask of another shape": (
        lambda: ppl.sites(lambda: ppl.observe("y", STANDARD, jnp.zeros(3), mask=jnp.ones(4, bool)))(),
        errors.ShapeError,
        ["site 'y' at test_errors.py:", "mask", "expected:", "found:"],
    ),
}


@pytest.mark.parametrize("case", TABLE)
def test_bad_input(case):
    run, error, parts = TABLE[case]
    with pytest.raises(error, match="(.|\n)*".join(map(re.escape, parts))):
        run()


def test_every_error_is_of_one_family():
    classes = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, Exception)]
    family = [c for c in classes if not issubclass(c, Warning)]
    assert all(issubclass(c, errors.PPLError) for c in family)
    assert {error for _, error, _ in TABLE.values()} <= set(family)


def test_the_message_shows_what_it_has():
    error = errors.ShapeError("a problem", site="x", source="a.py:3", expected="this", found="that", fix="do so")
    assert str(error) == "site 'x' at a.py:3: a problem\n  expected: this\n  found: that\n  fix: do so"
    assert str(errors.PPLError("alone")) == "alone"
    assert (error.site, error.source, error.problem) == ("x", "a.py:3", "a problem")


def test_import_is_light():
    heavy = ["arviz", "xarray", "tensorflow_probability", "blackjax", "zarr", "matplotlib", "pandas"]
    program = f"import sys, ppleffects; print([m for m in {heavy!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
