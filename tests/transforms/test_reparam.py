"""``reparam``: the same law in other coordinates, under every control flow, with gradients and draws."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from numpyro.infer import reparam as strategies
from numpyro.infer.reparam import LocScaleReparam, TransformReparam

import ppleffects as ppl
from tests.conftest import SHARDED_GRADIENT

NONCENTERED = LocScaleReparam(0.0)


def normal(x, loc=0.0, scale=1.0):
    return dist.Normal(loc, scale).log_prob(x)


def close(found, expected, rtol=1e-11):
    np.testing.assert_allclose(found, expected, rtol=rtol, atol=1e-12)


def hierarchy():
    m = ppl.sample("m", dist.Normal(0.0, 2.0))
    x = ppl.sample("x", dist.Normal(m, 3.0))
    ppl.observe("y", dist.Normal(x, 1.0), 0.5)
    return x


def test_noncentered():
    model = ppl.reparam(hierarchy, {"x": NONCENTERED})
    values = {"m": 0.4, "x_decentered": -0.7}
    x = 0.4 + 3.0 * -0.7
    close(ppl.log_density(model)(values), normal(0.4, 0.0, 2.0) + normal(-0.7) + normal(0.5, x))
    trace = ppl.evaluate(model)(values)
    close([trace.values["x"], trace.retval], x)
    assert set(trace.latents) == {"m", "x_decentered"}
    kinds = {name: site.kind for name, site in ppl.sites(model)().items()}
    assert kinds == {"m": "sample", "x_decentered": "sample", "x": "deterministic", "y": "observe"}
    gradient = jax.grad(ppl.log_density(model))(values)
    close(gradient["x_decentered"], 0.7 + 3.0 * (0.5 - x))
    close(gradient["m"], -0.1 + (0.5 - x))


def test_centredness_can_be_learned():
    def density(centered):
        return ppl.log_density(ppl.reparam(hierarchy, {"x": LocScaleReparam(centered)}))(
            {"m": 0.4, "x_decentered": -0.7}
        )

    def by_hand(c):
        x = 0.4 + 3.0 ** (1 - c) * (-0.7 - 0.4 * c)
        return normal(0.4, 0.0, 2.0) + normal(-0.7, 0.4 * c, 3.0**c) + normal(0.5, x)

    close(density(0.3), by_hand(0.3))
    slope = jax.grad(by_hand)(0.3)
    close(jax.jit(jax.grad(density))(0.3), slope)

    def with_latent():
        centered = ppl.sample("c", dist.Uniform(0.0, 1.0))
        return ppl.reparam(hierarchy, {"x": LocScaleReparam(centered)})()

    close(ppl.log_density(with_latent)({"c": 0.3, "m": 0.4, "x_decentered": -0.7}), density(0.3))


@pytest.mark.parametrize("centered", [0.0, 0.3, 1.0])
def test_partly_centered_has_the_same_joint_density(centered):
    """The density of the new coordinate is that of the value times the derivative."""
    model = ppl.reparam(hierarchy, {"x": LocScaleReparam(centered)})
    if centered == 1.0:
        close(ppl.log_density(model)({"m": 0.4, "x": 0.2}), ppl.log_density(hierarchy)({"m": 0.4, "x": 0.2}))
        return
    aux = 0.9
    x = ppl.evaluate(model)({"m": 0.4, "x_decentered": aux}).values["x"]
    close(x, 0.4 + 3.0 ** (1 - centered) * (aux - 0.4 * centered))
    expected = ppl.log_density(hierarchy)({"m": 0.4, "x": x}) + (1 - centered) * jnp.log(3.0)
    close(ppl.log_density(model)({"m": 0.4, "x_decentered": aux}), expected)


def test_a_centredness_for_each_entry():
    loc, scale, centered = jnp.array([1.0, 2.0]), jnp.array([0.5, 3.0]), jnp.array([0.2, 0.9])
    model = ppl.reparam(lambda: ppl.sample("x", dist.Normal(loc, scale)), {"x": LocScaleReparam(centered)})
    aux = jnp.array([0.1, 0.7])
    x = loc + scale ** (1 - centered) * (aux - centered * loc)
    expected = jnp.sum(normal(x, loc, scale) + (1 - centered) * jnp.log(scale))
    close(ppl.log_density(model)({"x_decentered": aux}), expected)


def test_learned_centredness_as_a_latent():
    def model():
        w = ppl.sample("w", dist.Uniform(0.0, 1.0))
        site = lambda: ppl.sample("x", dist.Normal(1.0, 3.0))  # noqa: E731
        return ppl.reparam(site, {"x": LocScaleReparam(w)})()

    values = {"w": 0.25, "x_decentered": 0.9}
    x = 1.0 + 3.0**0.75 * (0.9 - 0.25)
    close(ppl.log_density(model)(values), normal(x, 1.0, 3.0) + 0.75 * jnp.log(3.0))

    def by_hand(w):
        return normal(1.0 + 3.0 ** (1 - w) * (0.9 - w), 1.0, 3.0) + (1 - w) * jnp.log(3.0)

    gradient = jax.grad(lambda w: ppl.log_density(model)({"w": w, "x_decentered": 0.9}))(0.25)
    close(gradient, jax.grad(by_hand)(0.25))


def test_transform():
    d = dist.TransformedDistribution(dist.Normal(0.0, 1.0), dist.transforms.AffineTransform(2.0, 3.0))
    model = ppl.reparam(lambda: ppl.sample("x", d), {"x": TransformReparam()})
    close(ppl.log_density(model)({"x_base": 0.4}), normal(0.4))
    close(ppl.evaluate(model)({"x_base": 0.4}).values["x"], 3.2)
    lognormal = ppl.reparam(lambda: ppl.sample("x", dist.LogNormal(1.0, 2.0)), {"x": TransformReparam()})
    close(ppl.evaluate(lognormal)({"x_base": 0.4}).values["x"], jnp.exp(0.4))


def test_explicit_bijection():
    strategy = strategies.ExplicitReparam(dist.transforms.ExpTransform().inv)
    model = ppl.reparam(lambda: ppl.sample("x", dist.Gamma(2.0, 3.0)), {"x": strategy})
    (name,) = ppl.sites(model)().keys() - {"x"}
    u = 0.3
    close(ppl.log_density(model)({name: u}), dist.Gamma(2.0, 3.0).log_prob(jnp.exp(u)) + u)
    close(ppl.evaluate(model)({name: u}).values["x"], jnp.exp(u))


def test_circular():
    model = ppl.reparam(lambda: ppl.sample("x", dist.VonMises(0.5, 2.0)), {"x": strategies.CircularReparam()})
    d = dist.VonMises(0.5, 2.0)
    u = 4.0
    x = (u + np.pi) % (2 * np.pi) - np.pi
    close(ppl.evaluate(model)({"x_unwrapped": u}).values["x"], x)
    density = ppl.log_density(model)
    close(density({"x_unwrapped": u}) - density({"x_unwrapped": 1.0}), d.log_prob(x) - d.log_prob(1.0))


def test_projected_normal():
    c = jnp.array([1.0, 2.0, 0.5])
    strategy = strategies.ProjectedNormalReparam()
    model = ppl.reparam(lambda: ppl.sample("x", dist.ProjectedNormal(c)), {"x": strategy})
    u = jnp.array([0.3, -0.4, 1.2])
    close(ppl.evaluate(model)({"x_normal": u}).values["x"], (u + c) / jnp.linalg.norm(u + c))
    close(ppl.log_density(model)({"x_normal": u}), jnp.sum(normal(u)))


def test_a_users_own_strategy():
    def halved(name, d, obs):
        base = numpyro.sample(f"{name}_half", dist.Normal(0.0, 1.0))
        numpyro.deterministic(f"{name}_note", base + 1)
        return None, base / 2

    model = ppl.reparam(lambda: ppl.sample("x", dist.Normal(0.0, 0.5)), {"x": halved})
    trace = ppl.evaluate(model)({"x_half": 0.8})
    close([trace.values["x"], trace.values["x_note"], trace.log_prob], [0.4, 1.8, normal(0.8)])


# Control flow.


def group(loc=0.0):
    x = ppl.sample("x", dist.Normal(loc, 2.0))
    ppl.observe("y", dist.Normal(x, 1.0), loc)
    return x


def density(aux, loc):
    return jnp.sum(normal(aux) + normal(loc, loc + 2.0 * aux))


def scan(f, xs):
    return lax.scan(lambda c, x: (c, f(x)), 0.0, xs)[1]


GRID = jnp.arange(6.0).reshape(2, 3) / 4
PLACES = {
    "jit": (lambda f: jax.jit(f)(0.5), jnp.array(0.5)),
    "checkpoint": (lambda f: jax.checkpoint(f)(0.5), jnp.array(0.5)),
    "scan": (lambda f: scan(f, GRID[0]), GRID[0]),
    "vmap": (lambda f: jax.vmap(f)(GRID[0]), GRID[0]),
    "vmap without operands": (lambda f: jax.vmap(lambda _: f())(jnp.zeros(3)), jnp.zeros(3)),
    "scan in vmap": (lambda f: jax.vmap(lambda r: scan(f, r))(GRID), GRID.T),
    "vmap in scan": (lambda f: scan(jax.vmap(f), GRID), GRID),
    "vmap in vmap, columns": (lambda f: jax.vmap(jax.vmap(f), in_axes=1)(GRID), GRID.T),
    "batch": (lambda f: f(GRID), GRID),
    "batch in vmap": (lambda f: jax.vmap(f)(GRID), GRID),
}


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("place", PLACES)
def test_control_flow(place, inside):
    flow, loc = PLACES[place]
    change = functools.partial(ppl.reparam, strategies={"x": NONCENTERED})
    model = (lambda: flow(change(group))) if inside else change(lambda: flow(group))
    aux = 0.1 + 0.2 * jnp.arange(float(loc.size)).reshape(loc.shape)
    close(ppl.log_density(model)({"x_decentered": aux}), density(aux, loc))
    close(jax.grad(ppl.log_density(model))({"x_decentered": aux})["x_decentered"], jax.grad(density)(aux, loc))
    trace = ppl.evaluate(model)({"x_decentered": aux})
    close(trace.values["x"], loc + 2.0 * aux)
    draws = np.asarray(ppl.simulate(model)(0).latents["x_decentered"])
    assert len(set(draws.ravel().tolist())) == draws.size
    u = ppl.target(model)().unconstrain({"x_decentered": aux})
    close(ppl.target(model)().log_density(u), density(aux, loc))


def test_both_branches():
    def model(flag):
        return lax.cond(flag > 0, lambda: group(1.0), lambda: group(3.0))

    changed = ppl.reparam(model, {"x": NONCENTERED})
    for flag, loc in ((1.0, 1.0), (0.0, 3.0)):
        close(ppl.log_density(changed)({"x_decentered": 0.3}, flag), density(0.3, loc))


def test_lanes_with_their_own_branches():
    def model(flag):
        return lax.cond(flag > 0, lambda: group(1.0), lambda: ppl.sample("z", dist.Normal(5.0, 1.0)))

    flags = jnp.array([1.0, 0.0, 1.0])
    aux, z = jnp.array([0.1, jnp.nan, 0.3]), jnp.array([jnp.nan, 2.0, jnp.nan])
    for changed in (
        ppl.reparam(jax.vmap(model), {"x": NONCENTERED}),
        jax.vmap(ppl.reparam(model, {"x": NONCENTERED})),
    ):
        values = {"x_decentered": aux, "z": z}
        close(ppl.log_density(changed)(values, flags), density(aux[::2], 1.0) + normal(2.0, 5.0))
        gradient = jax.grad(ppl.log_density(changed))(values, flags)
        close(gradient["x_decentered"], jax.vmap(jax.grad(density), (0, None))(aux, 1.0).at[1].set(0.0))
        close(gradient["z"], [0.0, 3.0, 0.0])
        trace = ppl.simulate(changed)(0, flags)
        np.testing.assert_array_equal(trace.active["x"], [True, False, True])
        np.testing.assert_array_equal(trace.active["x_decentered"], [True, False, True])
        np.testing.assert_array_equal(jnp.isnan(trace.values["x"]), [False, True, False])


@SHARDED_GRADIENT
@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("mesh", ["mesh_data", "mesh_data_explicit"])
def test_shard_map(mesh, inside, request):
    """Sites that vary, a shared one, scalars on the shards: they lie on the mesh as before."""
    mesh = request.getfixturevalue(mesh)
    change = functools.partial(ppl.reparam, strategies={"x": NONCENTERED, "one": NONCENTERED, "own": NONCENTERED})

    def body(loc):
        one = ppl.sample("one", dist.Normal(1.0, 3.0), spec=P())
        own = ppl.sample("own", dist.Normal(0.0, 2.0), spec=P("data"))
        return one + own + group(loc)

    def on_shards(body):
        return jax.shard_map(body, mesh=mesh, in_specs=P("data"), out_specs=P("data"))

    model = on_shards(change(body)) if inside else change(on_shards(body))
    loc = jax.device_put(jnp.arange(8.0) / 4, jax.sharding.NamedSharding(mesh, P("data")))
    plain_loc = np.arange(8.0) / 4
    values = {"x_decentered": np.arange(8.0) / 5, "one_decentered": 0.3, "own_decentered": np.arange(4.0) / 3}
    expected = density(values["x_decentered"], plain_loc) + normal(0.3) + jnp.sum(normal(values["own_decentered"]))
    close(ppl.log_density(model)(values, loc), expected)
    gradient = jax.jit(jax.grad(ppl.log_density(model)))(values, loc)
    close(gradient["one_decentered"], -0.3)
    close(gradient["own_decentered"], -values["own_decentered"])
    close(gradient["x_decentered"], jax.grad(density)(values["x_decentered"], plain_loc))
    trace = ppl.evaluate(model)(values, loc)
    x, own = plain_loc + 2 * values["x_decentered"], 2 * values["own_decentered"]
    close(trace.values["x"], x)
    close(trace.values["own"], own)
    close(trace.values["one"], 1.9)
    close(trace.retval, x + 1.9 + np.repeat(own, 2))
    draws = ppl.simulate(model)(0, loc)
    shapes = {name: value.shape for name, value in draws.latents.items()}
    assert shapes == {"x_decentered": (8,), "one_decentered": (), "own_decentered": (4,)}


@SHARDED_GRADIENT
def test_lanes_outside_and_inside_of_shard_map(mesh_data):
    """A vmap outside of the shards is told from one inside when its lanes are traced again."""

    def on_shards(loc):
        inside = jax.vmap(group) if loc.ndim == 2 else group
        return jax.shard_map(inside, mesh=mesh_data, in_specs=P("data"), out_specs=P("data"))(loc)

    for shape in ((3, 4), (3, 4, 2)):
        changed = ppl.reparam(jax.vmap(on_shards), {"x": NONCENTERED})
        loc = jnp.arange(float(np.prod(shape))).reshape(shape) / 4
        aux = jnp.cos(loc)
        close(ppl.log_density(changed)({"x_decentered": aux}, loc), density(aux, loc))
        gradient = jax.vmap(jax.grad(density))(aux.ravel(), loc.ravel()).reshape(shape)
        close(jax.grad(ppl.log_density(changed))({"x_decentered": aux}, loc)["x_decentered"], gradient)
        close(ppl.evaluate(changed)({"x_decentered": aux}, loc).values["x_decentered"], aux)


def test_events():
    loc = jnp.array([1.0, 2.0])
    model = ppl.reparam(lambda: ppl.sample("x", dist.Normal(loc, 3.0).to_event(1)), {"x": NONCENTERED})
    aux = jnp.array([0.1, 0.2])
    close(ppl.log_density(model)({"x_decentered": aux}), jnp.sum(normal(aux)))
    assert ppl.evaluate(model)({"x_decentered": aux}).log_probs["x_decentered"].shape == ()


def test_the_law_of_the_value_stays():
    changed = jax.vmap(ppl.reparam(lambda loc: ppl.sample("x", dist.Normal(loc, 3.0)), {"x": NONCENTERED}))
    x = ppl.simulate(changed)(0, jnp.full(4000, 2.0)).values["x"]
    assert abs(x.mean() - 2.0) < 5 * 3.0 / np.sqrt(4000)
    assert abs(x.std() - 3.0) < 5 * 3.0 / np.sqrt(8000)


def test_with_the_other_transformations():
    base = {"m": 0.4, "x_decentered": -0.7}
    x = 0.4 + 3.0 * -0.7
    prior, aux, rows = normal(0.4, 0.0, 2.0), normal(-0.7), normal(0.5, x)
    changed = ppl.reparam(hierarchy, {"x": NONCENTERED})
    close(ppl.log_density(ppl.condition(changed, {"m": 0.4}))({"x_decentered": -0.7}), prior + aux + rows)
    close(ppl.log_density(ppl.do(changed, {"x_decentered": -0.7}))({"m": 0.4}), prior + rows)
    scoped = ppl.reparam(ppl.scope(hierarchy, "a"), {"a/x": NONCENTERED})
    close(ppl.log_density(scoped)({"a/m": 0.4, "a/x_decentered": -0.7}), prior + aux + rows)
    scoped = ppl.scope(changed, "a")
    close(ppl.log_density(scoped)({f"a/{n}": v for n, v in base.items()}), prior + aux + rows)
    close(ppl.log_density(ppl.scale(changed, 2.0))(base), 2 * (prior + aux + rows))
    close(ppl.log_density(ppl.mask(changed, False, sites=["x_decentered"]))(base), prior + rows)
    twice = ppl.reparam(ppl.reparam(hierarchy, {"x": NONCENTERED}), {"m": NONCENTERED})
    close(ppl.log_density(twice)({"m_decentered": 0.2, "x_decentered": -0.7}), normal(0.2) + aux + rows)


def test_what_was_given_is_not_reparametrised():
    for transform, message in ((ppl.condition, "x': reparam names a site"), (ppl.do, "x' at .*names a deterministic")):
        with pytest.raises(ppl.errors.ValuesError, match=message):
            ppl.log_density(ppl.reparam(transform(hierarchy, {"x": 1.0}), {"x": NONCENTERED}))({"m": 0.0})


def test_refused():
    with pytest.raises(ppl.errors.ValuesError, match="reparam names a site(.|\n)*did you mean"):
        ppl.log_density(ppl.reparam(hierarchy, {"xx": NONCENTERED}))({})
    with pytest.raises(ppl.errors.PPLError, match="needs numpyro.param, which a model does not have(.|\n)*LocScale"):
        ppl.log_density(ppl.reparam(hierarchy, {"x": LocScaleReparam()}))({})
    for transform in (functools.partial(ppl.scale, factor=2.0), functools.partial(ppl.mask, mask=True)):
        with pytest.raises(ppl.errors.PPLError, match="masked or scaled cannot be reparam(.|\n)*to the reparametrised"):
            ppl.log_density(ppl.reparam(transform(hierarchy), {"x": NONCENTERED}))({})
