"""What counts once and what counts on every shard: types say it, ``spec=`` where they cannot."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import SpecError
from tests.conftest import SHARDED_GRADIENT, _mesh

DATA = P("data")
LOG_2PI = np.log(2 * np.pi)
STANDARD = dist.Normal(0.0, 1.0)


def normal(x, loc=0.0):
    return np.sum(-0.5 * (np.asarray(x) - loc) ** 2 - 0.5 * LOG_2PI)


def put(mesh, x, spec=DATA):
    return jax.device_put(x, NamedSharding(mesh, spec))


def run(mesh, body, *args, specs=None):
    specs = tuple(P("data") for _ in args) if specs is None else specs

    def silent(*args):
        body(*args)

    return jax.shard_map(silent, mesh=mesh, in_specs=specs, out_specs=None)(*args)


def density_and_gradient(model, values, *args):
    return jax.jit(jax.value_and_grad(ppl.log_density(model)))(values, *args)


def test_ten_outside_and_four_inside_are_fourteen(axis_type):
    mesh = _mesh(axis_type, data=4)

    def model(x):
        ppl.factor("outside", 10.0)
        run(mesh, lambda x: ppl.factor("inside", x * 0 + 1.0), x)

    assert float(ppl.log_density(model)({}, put(mesh, jnp.zeros(4)))) == 14.0
    assert float(ppl.evaluate(model)({}, put(mesh, jnp.zeros(4))).log_prob) == 14.0


@pytest.mark.parametrize(("spec", "expected"), [(None, 11.0), (P(), 11.0), (P("data"), 14.0)])
def test_an_unvarying_factor_counts_once_unless_it_says_otherwise(mesh_data, spec, expected):
    def model():
        ppl.factor("outside", 10.0)
        run(mesh_data, lambda: ppl.factor("inside", 1.0, spec=spec))

    assert float(ppl.log_density(model)({})) == expected


@SHARDED_GRADIENT
def test_replicated_and_sharded_sites_in_one_body(axis_type):
    mesh = _mesh(axis_type, data=4)
    y = jnp.arange(8.0) / 4

    def model(y):
        mu = ppl.sample("mu", STANDARD)

        def body(mu, y):
            one = ppl.sample("one", dist.Normal(mu, 1.0), spec=P())
            own = ppl.sample("own", dist.Normal(jnp.zeros(2), 1.0), spec=P("data"))
            ppl.observe("once", dist.Normal(mu, 1.0), 0.3)
            ppl.observe("y", dist.Normal(one + own, 1.0), y)
            ppl.factor("f", mu * one)

        run(mesh, body, mu, y, specs=(P(), P("data")))

    def plain(values, y):
        mu, one, own = values["mu"], values["one"], values["own"]
        quad = mu**2 + (one - mu) ** 2 + jnp.sum(own**2) + (0.3 - mu) ** 2 + jnp.sum((y - one - own) ** 2)
        return -0.5 * quad - 0.5 * LOG_2PI * (1 + 1 + 8 + 1 + 8) + mu * one

    values = {"mu": 0.4, "one": -0.3, "own": jnp.sin(jnp.arange(8.0))}
    given = {**values, "own": put(mesh, values["own"])}
    value, gradient = density_and_gradient(model, given, put(mesh, y))
    expected, slope = jax.value_and_grad(plain)(values, y)
    np.testing.assert_allclose(value, expected, rtol=1e-12)
    for name in values:
        np.testing.assert_allclose(gradient[name], slope[name], rtol=1e-10)
    assert gradient["own"].sharding.spec == P("data")


@SHARDED_GRADIENT
def test_an_all_gathered_observation(axis_type):
    mesh = _mesh(axis_type, data=4)
    y = jnp.arange(4.0)

    def model(spec):
        def run_model(y):
            mu = ppl.sample("mu", STANDARD)

            def body(mu, y):
                rows = lax.all_gather(y, "data", tiled=True)
                ppl.observe("y", dist.Normal(mu, 1.0), rows, spec=spec)
                ppl.factor("f", jnp.sum(mu * rows), spec=spec)
                ppl.deterministic("d", mu * rows, spec=spec)

            run(mesh, body, mu, y, specs=(P(), P("data")))

        return run_model

    def plain(mu):
        return -0.5 * mu**2 - 0.5 * jnp.sum((y - mu) ** 2) - 0.5 * LOG_2PI * 5 + mu * jnp.sum(y)

    value, gradient = density_and_gradient(model(P()), {"mu": 0.4}, put(mesh, y))
    np.testing.assert_allclose(value, plain(0.4), rtol=1e-12)
    np.testing.assert_allclose(gradient["mu"], jax.grad(plain)(0.4), rtol=1e-12)
    trace = ppl.evaluate(model(P()))({"mu": 0.4}, put(mesh, y))
    np.testing.assert_allclose(trace.log_prob, value, rtol=1e-12)
    assert trace.values["y"].shape == trace.values["d"].shape == (4,)
    slope = jax.jit(jax.grad(lambda mu: ppl.evaluate(model(P()))({"mu": mu}, put(mesh, y)).log_prob))(0.4)
    np.testing.assert_allclose(slope, gradient["mu"], rtol=1e-12)

    # without spec=, types say that each shard holds its own
    each = ppl.log_density(model(None))({"mu": 0.4}, put(mesh, y))
    np.testing.assert_allclose(each, normal(0.4) + 4 * (plain(0.4) - normal(0.4)), rtol=1e-12)


def test_a_psum_counts_once_by_its_type(mesh_data):
    def model(y):
        def body(y):
            ppl.observe("y", STANDARD, lax.psum(y, "data"))
            ppl.observe("varies", STANDARD, y)

        run(mesh_data, body, y)

    y = jnp.arange(4.0)
    np.testing.assert_allclose(ppl.log_density(model)({}, y), normal(6.0) + normal(y), rtol=1e-12)


@SHARDED_GRADIENT
def test_several_axes(axis_type):
    mesh = _mesh(axis_type, a=2, b=2)
    x = jnp.arange(4.0).reshape(2, 2)

    def model(x, row):
        mu = ppl.sample("mu", STANDARD)

        def body(mu, x, row):
            ppl.observe("both", dist.Normal(mu, 1.0), x)
            ppl.observe("row", dist.Normal(mu, 1.0), row)
            ppl.observe("none", dist.Normal(mu, 1.0), 0.5)
            ppl.sample("latent", dist.Normal(row, 1.0))
            ppl.factor("column", mu, spec=P("b"))

        run(mesh, body, mu, x, row, specs=(P(), P("a", "b"), P("a")))

    latent = jnp.array([0.1, -0.2])

    def plain(mu, latent):
        quad = mu**2 + jnp.sum((x - mu) ** 2) + jnp.sum((x[:, 0] - mu) ** 2) + (0.5 - mu) ** 2
        return -0.5 * (quad + jnp.sum((latent - x[:, 0]) ** 2)) - 0.5 * LOG_2PI * 10 + 2 * mu

    data = put(mesh, x, P("a", "b")), put(mesh, x[:, 0], P("a"))
    value, gradient = density_and_gradient(model, {"mu": 0.3, "latent": latent}, *data)
    np.testing.assert_allclose(value, plain(0.3, latent), rtol=1e-12)
    np.testing.assert_allclose(gradient["mu"], jax.grad(plain)(0.3, latent), rtol=1e-12)
    np.testing.assert_allclose(gradient["latent"], jax.grad(plain, 1)(0.3, latent), rtol=1e-12)


def test_in_loops_and_branches_in_a_shard(mesh_data):
    def model(x):
        def body(x):
            def step(c, _):
                ppl.factor("varies", jnp.sum(x))
                ppl.factor("once", 1.0)
                lax.cond(c > 0, lambda: ppl.factor("first", 10.0), lambda: ppl.factor("second", jnp.sum(x) * 100))
                return c + 1, None

            lax.scan(step, 0, length=2)

        run(mesh_data, body, x)

    x = jnp.arange(4.0)
    assert float(ppl.log_density(model)({}, x)) == 2 * 6 + 2 + 10 + 600


def test_a_predicate_that_varies_counts_on_every_shard(mesh_data):
    def model(x):
        def body(x):
            lax.cond(x[0] > 0, lambda: ppl.factor("f", 1.0), lambda: ppl.factor("f", 10.0))
            lax.cond(x[0] > 0, lambda: ppl.observe("y", STANDARD, x) * 0, lambda: x * 0)

        run(mesh_data, body, x)

    for x in (jnp.array([1.0, -1.0, 1.0, 1.0]), jnp.array([-1.0, 1.0, -1.0, -1.0])):
        n = int(jnp.sum(x > 0))
        np.testing.assert_allclose(ppl.log_density(model)({}, x), n + 10 * (4 - n) + n * normal(1.0), rtol=1e-12)
        trace = ppl.evaluate(model)({}, x)
        np.testing.assert_array_equal(trace.active["y"], x > 0)
        np.testing.assert_array_equal(jnp.isnan(trace.values["y"]), x < 0)


def test_a_latent_must_say_its_spec(mesh_data):
    def model():
        run(mesh_data, lambda: ppl.sample("x", STANDARD))

    with pytest.raises(SpecError, match=r"site 'x' at test_replication.py:\d+: a latent inside of shard_map") as error:
        ppl.simulate(model)(0)
    for text in ("spec=P()", 'spec=P("data")', "expected", "found"):
        assert text in str(error.value)


def test_a_shared_latent_with_varying_parameters_names_operand_and_mend(mesh_data):
    def model(x):
        run(mesh_data, lambda x: ppl.sample("x", dist.Normal(0.0, jnp.exp(x)), spec=P()), x)

    with pytest.raises(SpecError, match=r"site 'x' at (.|\n)*'scale' of Normal varies(.|\n)*psum(.|\n)*all_gather"):
        ppl.simulate(model)(0, jnp.zeros(4))


@pytest.mark.parametrize("kind", ["observe", "factor"])
def test_unvarying_under_a_vmap_inside_a_shard_map_must_say(mesh_data, kind):
    def model(spec):
        def lane(_):
            if kind == "observe":
                ppl.observe("s", STANDARD, 0.5, spec=spec)
            else:
                ppl.factor("s", 1.0, spec=spec)

        return lambda: run(mesh_data, lambda: jax.vmap(lane)(jnp.zeros(3)))

    one = normal(0.5) if kind == "observe" else 1.0
    with pytest.raises(SpecError, match=f"site 's' at .*: an unvarying {kind} under a vmap"):
        ppl.log_density(model(None))({})
    np.testing.assert_allclose(ppl.log_density(model(P()))({}), 3 * one)
    np.testing.assert_allclose(ppl.log_density(model(P("data")))({}), 12 * one)


def test_a_vmap_around_a_shard_map_counts_its_lanes(mesh_data):
    def model(spec):
        return lambda: jax.vmap(lambda _: run(mesh_data, lambda: ppl.factor("s", 1.0, spec=spec)))(jnp.zeros(3))

    assert [float(ppl.log_density(model(s))({})) for s in (None, P(), P("data"))] == [3.0, 3.0, 12.0]


@pytest.mark.parametrize(
    ("spec", "message"),
    [(P("rows"), "site 'x' at .*: spec= names the mesh axis 'rows'"), ("data", "spec= is no partition spec")],
)
def test_a_spec_that_fits_nothing(mesh_data, spec, message):
    with pytest.raises(SpecError, match=message):
        ppl.simulate(lambda: run(mesh_data, lambda: ppl.sample("x", STANDARD, spec=spec)))(0)
    with pytest.raises(SpecError, match="site 'x' at .*(no shard_map around the site|no partition spec)"):
        ppl.simulate(lambda: ppl.sample("x", STANDARD, spec=spec))(0)


def test_lanes_on_a_mesh_axis_are_right_or_refused():
    mesh = _mesh(jax.sharding.AxisType.Auto, a=2, b=2)

    def density(site):
        def lane(v):
            return jax.shard_map(lambda v: (site(v), None)[1], mesh=mesh, in_specs=P("b"), out_specs=None)(v)

        lanes = jax.vmap(lane, spmd_axis_name="a")
        return ppl.log_density(lambda: lanes(jnp.arange(8.0).reshape(2, 4)))({})

    for site, expected in (
        (lambda v: ppl.factor("f", 1.0, spec=P()), 2.0),
        (lambda v: ppl.factor("f", 1.0, spec=P("b")), 4.0),
        (lambda v: ppl.observe("y", STANDARD, v), normal(np.arange(8.0))),
    ):
        try:
            found = density(site)
        except ppl.errors.PPLError:
            continue
        np.testing.assert_allclose(found, expected)


def test_one_value_for_all_cannot_stand_where_some_shards_do_not_come(mesh_data):
    """A predicate that varies reaches some shards; a site that is the same on all would be there and not there."""

    def branch(site):
        def model(x):
            run(mesh_data, lambda x: lax.cond(x[0] > 0, lambda: (site(), None)[1], lambda: None), x)

        return model

    x = jnp.array([1.0, -1.0, 2.0, -2.0])
    for site in (
        lambda: ppl.sample("z", STANDARD, spec=P()),
        lambda: ppl.sample("z", STANDARD),
        lambda: ppl.observe("z", STANDARD, 0.5, spec=P()),
        lambda: ppl.factor("z", 1.0, spec=P()),
    ):
        match = r"site 'z' at .*: the site stands in a branch .*'data'(.|\n)*fix: spec=P\(.data"
        with pytest.raises(SpecError, match=match):
            ppl.sites(branch(site))(x)
    pieces = branch(lambda: ppl.factor("z", 1.0))
    assert float(ppl.log_density(pieces)({}, x)) == 2.0


def test_a_spec_names_axes_that_the_piece_has(mesh_data):
    def model(x):
        run(mesh_data, lambda x: ppl.sample("z", dist.Normal(x.sum(), 1.0), spec=P(None, "data")), x)

    match = r"site 'z' at .*: spec= shards axis 1 of a site whose piece has 0 non-event axes(.|\n)*fix: spec=P"
    with pytest.raises(SpecError, match=match):
        ppl.sites(model)(jnp.zeros(4))
