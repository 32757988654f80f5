"""``scale`` and ``mask``: closed forms, minibatches, arrays in the layout of sites, control flow, NaN, errors."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from tests.conftest import SHARDED_GRADIENT

NORMAL = dist.Normal(0.0, 1.0)
Y = jnp.array([0.5, -1.0, 2.0, 0.1, 0.9, -0.4])


def close(found, expected, rtol=1e-12):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-13)


def model(y=Y):
    x = ppl.sample("x", NORMAL)
    ppl.observe("y", dist.Normal(x, 1.0), y)
    ppl.factor("f", -jnp.abs(x))
    return ppl.deterministic("d", x)


def parts(x, y=Y):
    return NORMAL.log_prob(x), dist.Normal(x, 1.0).log_prob(y), -jnp.abs(x)


def test_scale_multiplies_all():
    close(ppl.log_density(ppl.scale(model, 3.0))({"x": 0.3}), 3.0 * ppl.log_density(model)({"x": 0.3}))
    trace = ppl.simulate(ppl.scale(model, 3.0))(0)
    prior, rows, _ = parts(trace.values["x"])
    close(trace.log_probs["x"], 3.0 * prior)
    close(trace.log_probs["y"], 3.0 * rows)
    assert trace.values["d"] == trace.values["x"] == ppl.simulate(model)(0).values["x"]


@pytest.mark.parametrize(("sites", "weights"), [(["y"], (1, 3, 1)), (["x", "f"], (3, 1, 3)), ([], (1, 1, 1))])
def test_scale_of_some(sites, weights):
    expected = sum(w * jnp.sum(part) for w, part in zip(weights, parts(0.3), strict=True))
    close(ppl.log_density(ppl.scale(model, 3.0, sites=sites))({"x": 0.3}), expected)


@pytest.mark.parametrize("factor", [0.0, -1.0, 2, np.float32(0.5), jnp.array(0.25)], ids=str)
def test_any_number(factor):
    close(ppl.log_density(ppl.scale(model, factor))({"x": 0.3}), factor * ppl.log_density(model)({"x": 0.3}))


def test_scales_multiply():
    twice = ppl.scale(ppl.scale(model, 3.0, sites=["y"]), jnp.arange(6.0), sites=["y"])
    prior, rows, factor = parts(0.3)
    close(ppl.log_density(twice)({"x": 0.3}), prior + jnp.sum(3.0 * jnp.arange(6.0) * rows) + factor)


def test_gradient_in_the_scale():
    gradient = jax.grad(lambda s: ppl.log_density(ppl.scale(model, s))({"x": 0.3}))(2.0)
    close(gradient, ppl.log_density(model)({"x": 0.3}))


def minibatch(rows):
    """The model of a few rows; the others are not in the program."""

    def batch(y):
        x = ppl.sample("x", NORMAL)
        ppl.scale(lambda: ppl.observe("y", dist.Normal(x, 1.0), y[rows]), y.size / rows.size)()

    return batch


@pytest.mark.parametrize("size", [1, 2, 3])
def test_minibatches_are_unbiased(size):
    """The mean over all minibatches of one size is the whole density, and its gradient."""
    whole = jax.value_and_grad(lambda x: parts(x)[0] + jnp.sum(parts(x)[1]))
    choices = jnp.array(list(itertools.combinations(range(6), size)))
    density = lambda rows, x: ppl.log_density(minibatch(rows))({"x": x}, Y)  # noqa: E731
    values, gradients = jax.vmap(jax.value_and_grad(density, argnums=1), (0, None))(choices, 0.3)
    expected, gradient = whole(0.3)
    close(jnp.mean(values), expected)
    close(jnp.mean(gradients), gradient)
    assert size == 1 or jnp.std(values) > 0.1


def test_minibatches_as_a_scale_of_a_whole_model():
    def batch(y, rows):
        x = ppl.sample("x", NORMAL)
        ppl.observe("y", dist.Normal(x, 1.0), y[rows])

    found = []
    for rows in itertools.combinations(range(6), 2):
        scaled = ppl.scale(batch, 6 / 2, sites=["y"])
        found.append(jax.value_and_grad(ppl.log_density(scaled))({"x": 0.3}, Y, jnp.array(rows)))
    close(np.mean([v for v, _ in found]), parts(0.3)[0] + jnp.sum(parts(0.3)[1]))
    close(np.mean([g["x"] for _, g in found]), -0.3 + jnp.sum(Y - 0.3))


def test_target_scales_the_density_and_not_the_coordinates():
    def positive():
        ppl.sample("s", dist.HalfNormal(1.0))

    found = ppl.target(ppl.scale(positive, 3.0))().log_density({"s": 0.7})
    close(found, 3.0 * dist.HalfNormal(1.0).log_prob(jnp.exp(0.7)) + 0.7)


# Control flow: the weight of each entry, by an array in the layout of the site.


def at(loc):
    x = ppl.sample("x", dist.Normal(loc, 1.0))
    ppl.observe("y", dist.Normal(x, 1.0), loc)
    ppl.factor("f", -(x**2))


def terms(x, loc):
    return dist.Normal(loc, 1.0).log_prob(x) + dist.Normal(x, 1.0).log_prob(loc) - x**2


def scan(f, xs, **options):
    return lax.scan(lambda c, x: (c, f(x)), 0.0, xs, **options)[1]


GRID = jnp.arange(6.0).reshape(2, 3) / 4
PLACES = {
    "scan": (lambda: scan(at, GRID[0]), GRID[0]),
    "reversed scan": (lambda: scan(at, GRID[0], reverse=True), GRID[0]),
    "vmap": (lambda: jax.vmap(at)(GRID[0]), GRID[0]),
    "scan in vmap": (lambda: jax.vmap(lambda r: scan(at, r))(GRID), GRID.T),
    "vmap in scan": (lambda: scan(jax.vmap(at), GRID), GRID),
    "vmap in vmap, columns": (lambda: jax.vmap(jax.vmap(at), in_axes=1)(GRID), GRID.T),
    "checkpoint in jit in scan": (lambda: scan(jax.jit(jax.checkpoint(at)), GRID[0]), GRID[0]),
}


def weight_of(transform, size):
    raw = jnp.arange(size) % 3
    return raw > 0 if transform is ppl.mask else 0.5 + raw


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("transform", [ppl.scale, ppl.mask], ids=["scale", "mask"])
def test_arrays_in_the_layout(place, transform):
    inner, loc = PLACES[place]
    weight = weight_of(transform, loc.size).reshape(loc.shape)
    x = 0.2 + 0.1 * loc
    weighted = transform(lambda: inner(), weight)
    close(ppl.log_density(weighted)({"x": x}), jnp.sum(weight * terms(x, loc)))
    expected = jax.grad(lambda x: jnp.sum(weight * terms(x, loc)))(x)
    close(jax.grad(ppl.log_density(weighted))({"x": x})["x"], expected)
    trace = ppl.evaluate(weighted)({"x": x})
    close(trace.log_probs["x"], weight * dist.Normal(loc, 1.0).log_prob(x))


@pytest.mark.parametrize("transform", [ppl.scale, ppl.mask], ids=["scale", "mask"])
def test_arrays_that_broadcast(transform):
    """One weight for each of two steps, the same in three lanes."""
    weight = weight_of(transform, 3)[1:, None]
    steps_in_lanes = transform(lambda: jax.vmap(lambda r: scan(at, r))(GRID.T), weight)
    x = 0.2 + GRID
    close(ppl.log_density(steps_in_lanes)({"x": x}), jnp.sum(weight * terms(x, GRID)))


@pytest.mark.parametrize("transform", [ppl.scale, ppl.mask], ids=["scale", "mask"])
def test_inside_of_loops(transform):
    """A weight of each step and lane, given where the site stands."""
    weight = weight_of(transform, 6).reshape(2, 3)

    def inner(weight):
        return scan(lambda wr: jax.vmap(lambda w, loc: transform(at, w)(loc))(*wr), (weight, GRID))

    x = 0.2 + GRID
    close(ppl.log_density(inner)({"x": x}, weight), jnp.sum(weight * terms(x, GRID)))


@pytest.mark.parametrize("transform", [ppl.scale, ppl.mask], ids=["scale", "mask"])
def test_lanes_with_their_own_branches(transform):
    def lane(flag):
        lax.cond(flag > 0, lambda: at(1.0), lambda: ppl.factor("g", 10.0))

    flags, x = jnp.array([1.0, 0.0, 1.0, 1.0]), jnp.array([0.1, jnp.nan, 0.3, 0.4])
    weight = weight_of(transform, 4)
    reached = jnp.array([True, False, True, True])

    def by_hand(x):
        return jnp.sum(weight * jnp.where(reached, terms(jnp.where(reached, x, 0.0), 1.0), 10.0))

    for weighted in (
        transform(jax.vmap(lane), weight),
        lambda flags: jax.vmap(lambda f, w: transform(lane, w)(f))(flags, weight),
    ):
        close(ppl.log_density(weighted)({"x": x}, flags), by_hand(x))
        close(jax.grad(ppl.log_density(weighted))({"x": x}, flags)["x"], jax.grad(by_hand)(x))


@SHARDED_GRADIENT
@pytest.mark.parametrize("mesh", ["mesh_data", "mesh_data_explicit"])
@pytest.mark.parametrize("transform", [ppl.scale, ppl.mask], ids=["scale", "mask"])
def test_around_and_inside_of_shard_map(mesh, transform, request):
    mesh = request.getfixturevalue(mesh)
    put = functools.partial(jax.device_put, device=jax.sharding.NamedSharding(mesh, P("data")))

    def on_shards(body, *args):
        return jax.shard_map(body, mesh=mesh, in_specs=tuple(P("data") for _ in args), out_specs=None)(*args)

    def rows(loc):
        x = ppl.sample("x", dist.Normal(loc, 1.0))
        ppl.observe("y", dist.Normal(x, 1.0), loc)

    def each(x, loc):
        return dist.Normal(loc, 1.0).log_prob(x) + dist.Normal(x, 1.0).log_prob(loc)

    loc, weight = jnp.arange(8.0) / 4, weight_of(transform, 8)
    x = 0.2 + 0.5 * loc
    around = transform(lambda loc: on_shards(rows, loc), weight)
    inside = lambda loc: on_shards(lambda loc, w: transform(rows, w)(loc), loc, put(weight))  # noqa: E731
    for weighted in (around, inside):
        close(ppl.log_density(weighted)({"x": x}, put(loc)), jnp.sum(weight * each(x, loc)))
        gradient = jax.jit(jax.grad(ppl.log_density(weighted)))({"x": x}, put(loc))["x"]
        close(gradient, weight * jax.vmap(jax.grad(each))(x, loc))


def test_a_number_for_replicated_and_sharded_sites(mesh_data):
    def inner(loc):
        def body(loc):
            one = ppl.sample("one", NORMAL, spec=P())
            ppl.sample("x", dist.Normal(one + loc, 1.0))
            ppl.factor("f", one)

        jax.shard_map(body, mesh=mesh_data, in_specs=P("data"), out_specs=None)(loc)

    loc, x = jnp.arange(8.0), jnp.arange(8.0) / 2
    expected = NORMAL.log_prob(0.3) + jnp.sum(dist.Normal(0.3 + loc, 1.0).log_prob(x)) + 0.3
    close(ppl.log_density(ppl.scale(inner, 2.5))({"one": 0.3, "x": x}, loc), 2.5 * expected)

    def local(loc):  # the scale of a minibatch, inside
        jax.shard_map(
            lambda loc: ppl.scale(lambda: ppl.sample("x", dist.Normal(loc, 1.0)), 2.5)() * 0,
            mesh=mesh_data,
            in_specs=P("data"),
            out_specs=P("data"),
        )(loc)

    close(ppl.log_density(local)({"x": x}, loc), 2.5 * jnp.sum(dist.Normal(loc, 1.0).log_prob(x)))


# Masks.


def test_mask_drops_entries():
    keep = jnp.array([True, False, True, True, False, True])
    prior, rows, factor = parts(0.3)
    close(ppl.log_density(ppl.mask(model, keep, sites=["y"]))({"x": 0.3}), prior + jnp.sum(rows[keep]) + factor)
    close(ppl.log_density(ppl.mask(model, False))({"x": 0.3}), 0.0)
    close(ppl.log_density(ppl.mask(model, True))({"x": 0.3}), ppl.log_density(model)({"x": 0.3}))
    trace = ppl.simulate(ppl.mask(model, False))(0)
    assert trace.values["x"] == ppl.simulate(model)(0).values["x"]


def test_masks_meet():
    a, b = jnp.arange(6) % 2 == 0, jnp.arange(6) > 2

    def inner():
        ppl.observe("y", NORMAL, Y, mask=a)

    close(ppl.log_density(ppl.mask(inner, b))({}), jnp.sum(NORMAL.log_prob(Y[a & b])))
    close(ppl.log_density(ppl.mask(ppl.mask(inner, b), a))({}), jnp.sum(NORMAL.log_prob(Y[a & b])))
    scaled = ppl.mask(ppl.scale(inner, jnp.arange(6.0)), b)
    close(ppl.log_density(scaled)({}), jnp.sum((jnp.arange(6.0) * NORMAL.log_prob(Y))[a & b]))


def test_masked_nan_leaves_value_and_gradient_alone():
    y = Y.at[1].set(jnp.nan)
    keep = ~jnp.isnan(y)
    value, gradient = jax.value_and_grad(ppl.log_density(ppl.mask(model, keep, sites=["y"])))({"x": 0.3}, y)
    close(value, ppl.log_density(model)({"x": 0.3}, Y[keep]))
    close(gradient["x"], -0.3 + jnp.sum(Y[keep] - 0.3) - 1.0)


def test_masked_nan_parameters():
    scales = jnp.array([1.0, jnp.nan, 2.0])

    def inner(scales):
        ppl.observe("y", dist.Normal(0.0, scales), jnp.ones(3))
        ppl.sample("x", dist.Normal(scales, 1.0))

    masked = ppl.mask(inner, jnp.array([True, False, True]))
    x = jnp.array([0.1, 0.2, 0.3])
    density = lambda x, s: ppl.log_density(masked)({"x": x}, s)  # noqa: E731
    value, gradients = jax.value_and_grad(density, argnums=(0, 1))(x, scales)
    kept = jnp.array([0, 2])
    plain = lambda x, s: jnp.sum(dist.Normal(0.0, s).log_prob(1.0) + dist.Normal(s, 1.0).log_prob(x))  # noqa: E731
    expected, by_hand = jax.value_and_grad(plain, argnums=(0, 1))(x[kept], scales[kept])
    close(value, expected)
    for found, hand in zip(gradients, by_hand, strict=True):
        close(found, jnp.zeros(3).at[kept].set(hand))


def test_masked_factor_of_nan():
    masked = ppl.mask(lambda v: ppl.factor("f", v), jnp.array([True, False]))
    close(ppl.log_density(masked)({}, jnp.array([2.0, jnp.nan])), 2.0)


def test_events_have_one_weight():
    d = dist.Dirichlet(jnp.ones((2, 3)))
    x = jnp.array([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8]])
    inner = lambda: ppl.sample("x", d)  # noqa: E731
    close(ppl.log_density(ppl.scale(inner, jnp.array([1.0, 3.0])))({"x": x}), d.log_prob(x) @ jnp.array([1.0, 3.0]))
    close(ppl.log_density(ppl.mask(inner, jnp.array([False, True])))({"x": x}), d.log_prob(x)[1])


def test_with_condition_and_do():
    for outer in (True, False):
        scale = lambda m: ppl.scale(m, 3.0)  # noqa: E731
        given = lambda m: ppl.condition(m, {"x": 0.3})  # noqa: E731
        both = scale(given(model)) if outer else given(scale(model))
        close(ppl.log_density(both)({}), 3.0 * sum(map(jnp.sum, parts(0.3))))
        done = lambda m: ppl.do(m, {"x": 0.3})  # noqa: E731
        both = scale(done(model)) if outer else done(scale(model))
        close(ppl.log_density(both)({}), 3.0 * sum(map(jnp.sum, parts(0.3)[1:])))


@pytest.mark.parametrize("transform", [ppl.scale, ppl.mask], ids=["scale", "mask"])
def test_refused(transform):
    what = transform.__name__
    one = jnp.array(True) if transform is ppl.mask else jnp.array(1.0)
    with pytest.raises(ppl.errors.ValuesError, match=f"{what} names a site(.|\n)*did you mean 'y'"):
        ppl.log_density(transform(model, one, sites=["yy"]))({"x": 0.0})
    fits = f"the {what} does not fit the site"
    with pytest.raises(ppl.errors.ShapeError, match=f"{fits}(.|\n)*found: \\(6,\\)(.|\n)*sites="):
        ppl.log_density(transform(model, jnp.full(6, one)))({"x": 0.0})
    with pytest.raises(ppl.errors.ShapeError, match=f"{fits}(.|\n)*broadcasts to \\(6,\\)"):
        ppl.log_density(transform(model, jnp.full((6, 6), one), sites=["y"]))({"x": 0.0})
    with pytest.raises(ppl.errors.ShapeError, match=f"{fits}(.|\n)*broadcasts to \\(6,\\)(.|\n)*found: \\(4,\\)"):
        ppl.log_density(transform(model, jnp.full(4, one), sites=["y"]))({"x": 0.0})
    with pytest.raises(ppl.errors.ValuesError, match=f"site 'd' at .*{what} names a deterministic"):
        ppl.log_density(transform(model, one, sites=["d"]))({"x": 0.0})
