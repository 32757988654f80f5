"""What `ppl.blocked` refuses, and what it says."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import DTypeError, DuplicateSiteError, PPLError, ShapeError, SpecError, UnhandledEffectError

X, Y = jnp.arange(20.0).reshape(10, 2), jnp.arange(10.0)
STANDARD = dist.Normal(0.0, 1.0)


def observe(y: Any, mean: Any = 0.0):
    ppl.observe("y", dist.Normal(mean, 1.0), y)


def run(likelihood: Any, data: Any = Y, rows: Any = 4):
    return ppl.log_density(lambda: ppl.blocked(likelihood, rows)(data))({})


def size_dependent(y):
    ppl.observe("y" if len(y) > 5 else "z", STANDARD, y)


REFUSED = {
    "no rows": (lambda: run(observe, rows=0), PPLError, "no positive integer"),
    "a fraction of rows": (lambda: run(observe, rows=2.5), PPLError, "no positive integer"),
    "a flag for rows": (lambda: run(observe, rows=True), PPLError, "no positive integer"),
    "no data": (lambda: run(lambda _: None, ()), ShapeError, "no common number of rows"),
    "a scalar": (lambda: run(lambda _: None, (Y, 1.0)), ShapeError, "no common number of rows"),
    "two lengths": (lambda: run(lambda _: None, (Y, Y[:5])), ShapeError, r"no common number of rows.*(\n.*)*\(10,\)"),
    "words": (lambda: run(lambda _: None, "y"), DTypeError, "data of ppl.blocked is no array"),
    "a mean of rows": (lambda: run(lambda y: observe(y.mean())), ShapeError, "one entry for each row"),
    "a sum of rows": (
        lambda: run(lambda y: ppl.factor("y", y.sum())),
        ShapeError,
        "leave the sum over rows to the site",
    ),
    "one for each block": (lambda: run(lambda y: ppl.sample("b", STANDARD)), ShapeError, "one entry for each row"),
    "two for each row": (lambda: run(lambda y: observe(jnp.repeat(y, 2))), ShapeError, "one entry for each row"),
    "pairs of rows": (lambda: run(lambda y: observe(y[:, None] - y[None])), ShapeError, "one entry for each row"),
    "one more than rows": (lambda: run(lambda y: observe(jnp.append(y, 0.0))), ShapeError, "one entry for each row"),
    "an event of rows": (
        lambda: run(lambda y: ppl.observe("y", dist.Normal(jnp.zeros(y.shape), 1.0).to_event(1), y)),
        ShapeError,
        "event axes",
    ),
    "other sites": (lambda: run(size_dependent), ShapeError, "depend on the number of rows"),
    "rows by closure": (
        lambda: run(lambda y: observe(y, mean=X[:, 0])),
        ShapeError,
        "on all rows, but not on 4 of them",
    ),
    "rows added by closure": (lambda: run(lambda y: observe(y + Y)), ShapeError, r"incompatible shapes"),
    "rows added to one row": (lambda: run(lambda y: observe(y + Y), rows=1), ShapeError, "one entry for each row"),
    "a name twice": (lambda: run(lambda y: [observe(y), observe(y)]), DuplicateSiteError, "two sites"),
    "outside of a model": (lambda: ppl.blocked(observe, 4)(Y), UnhandledEffectError, "outside of an interpretation"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        call()


def test_names_clash_with_those_outside():
    def model():
        observe(Y)
        ppl.blocked(observe, 4)(Y)

    with pytest.raises(DuplicateSiteError, match="site 'y'"):
        ppl.sites(model)()


def test_two_likelihoods_have_two_names():
    def model():
        ppl.scope(lambda: ppl.blocked(observe, 4)(Y), "a")()
        ppl.scope(lambda: ppl.blocked(observe, 3)(Y), "b")()

    assert list(ppl.sites(model)()) == ["a/y", "b/y"]
    np.testing.assert_allclose(ppl.log_density(model)({}), 2 * STANDARD.log_prob(Y).sum(), rtol=1e-6)


def test_rows_on_an_explicit_axis(mesh_data_explicit):
    y = jax.device_put(jnp.arange(16.0), jax.NamedSharding(mesh_data_explicit, P("data")))

    def model(y):
        ppl.blocked(observe, 2)(y)

    with pytest.raises(SpecError, match=r"inside of jax\.shard_map"):
        ppl.log_density(model)({}, y)


def test_a_likelihood_without_sites_adds_nothing():
    assert run(lambda y: jnp.sum(y)) == 0.0


def test_it_is_differentiated_around_the_model_alone():
    def model():
        jax.grad(lambda y: (ppl.blocked(observe, 4)(y), jnp.sum(y))[1])(Y)

    with pytest.raises(PPLError, match="differentiated inside of the model"):
        ppl.log_density(model)({})


def test_arguments_after_the_data_are_shared():
    def likelihood(block, power, *, mean):
        ppl.observe("y", dist.Normal(mean, 1.0), block["y"] ** power)

    def model(mean):
        ppl.blocked(likelihood, 3)({"y": Y}, 2, mean=mean)

    expected = dist.Normal(0.5, 1.0).log_prob(Y**2).sum()
    np.testing.assert_allclose(ppl.log_density(model)({}, jnp.array(0.5)), expected, rtol=1e-6)


@pytest.mark.parametrize(("columns", "rows"), [(55, 4096), (65, 2048), (2**18, 1)])
def test_blocks_by_default_hold_a_mebibyte(columns, rows):
    def model(x):
        ppl.blocked(lambda x: observe(x[:, 0]))(x)

    x = jax.ShapeDtypeStruct((2**13 + 1, columns), jnp.float32)
    found = {}
    jax.eval_shape(lambda x: found.update(ppl.sites(model)(x)), x)
    assert found["y"].path == (f"blocked[{rows}]",)


def test_few_rows_are_one_block():
    assert ppl.sites(lambda: ppl.blocked(observe)(Y))()["y"].path == ()
