"""Where chains start: each strategy against an oracle of its own, layouts, what is refused, the table of a failure."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.optimize
import scipy.stats
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import DTypeError, NoValidStartError, SettingsError, ShapeError, ValuesError
from ppleffects.inference import HMC, NUTS, mcmc
from ppleffects.inference.coordinates import VECTOR, coordinates_of
from ppleffects.inference.layout import Layout
from ppleffects.inference.starts import MAX_TRIES, find_start, given_starts, zeros_of
from ppleffects.inference.stream import begin_chains

pytestmark = pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")

EPS = float(jnp.finfo(jnp.result_type(float)).eps)
Y = np.random.default_rng(0).normal(1.0, 1.0, size=8)
KEYS = 2000
MIN_P = 1e-4  # of a test of a distribution; the keys are fixed
NUMPYRO = NUTS(engine="numpyro")  # whose programs are compiled faster


def model(y):
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
    rate = ppl.sample("rate", dist.Gamma(3.0, 1.0))
    ppl.sample("between", dist.Uniform(mu, mu + rate))
    _, walk = lax.scan(lambda _, x: (None, ppl.sample("walk", dist.Normal(mu * x, 1.0))), None, jnp.arange(3.0))
    ppl.observe("y", dist.Normal(mu + walk.sum(), 1.0), y)


def sharded(y):
    """Latents on the shards: with a quantile function, without one, in lanes, in events."""
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
    rate = ppl.sample("rate", dist.Gamma(3.0, 1.0))

    def body(mu, rate, y):
        local = ppl.sample("local", dist.Normal(mu + 0 * y, rate))
        ppl.sample("wait", dist.Exponential(2.0).expand([y.size]), spec=P("data"))
        jax.vmap(lambda x: ppl.sample("lane", dist.Laplace(x, 1.0)))(local)
        ppl.sample("pair", dist.Uniform(0.0, 2.0).expand([y.size, 2]).to_event(1), spec=P("data"))
        ppl.observe("y", dist.Normal(local, 1.0), y)

    jax.shard_map(body, in_specs=(P(), P(), P("data")), out_specs=P())(mu, rate, y)


LATENTS = ("mu", "rate", "local", "wait", "lane", "pair")


def meshed(chains, data, axis_type=AxisType.Auto):
    if jax.device_count() < chains * data:
        pytest.skip("needs 4 devices")
    if jax.config.jax_check_tracer_leaks:
        pytest.skip("jit(grad(shard_map(f))) of plain JAX reports a leak that is none")
    mesh = jax.make_mesh((chains, data), ("chains", "data"), axis_types=(axis_type,) * 2)
    return mesh, jax.device_put(Y, NamedSharding(mesh, P("data")))


def starts(target, init, num=KEYS, max_tries=MAX_TRIES):
    """The starts of many keys, in constrained values too."""
    asked = given_starts(init, target, np.arange(num), num)
    given = {name: jnp.asarray(value) for name, value in asked.values.items()}

    @jax.jit
    def search(target, keys, given):
        def one(key, given):
            start = find_start(target, key, given, max_tries, asked.strategies)
            return start, target.constrain(start.position)

        return jax.vmap(one)(keys, given)

    return jax.device_get(search(target, keys_of(num), given))


def keys_of(num):
    return jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(3)))(jnp.arange(num))


# --- strategies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", [None, "uniform", {"mu": "uniform"}, {}])
def test_uniform_by_default(init):
    target = ppl.target(model)(Y)
    start, _ = starts(target, init)
    assert set(start.position) == {"mu", "rate", "between", "walk"}
    for u in start.position.values():
        assert -2 < u.min() < -1.98
        assert 1.98 < u.max() < 2
        assert scipy.stats.kstest(u.ravel(), scipy.stats.uniform(-2, 4).cdf).pvalue > MIN_P
    assert start.found.all()
    assert (start.num_tries == 1).all()
    first = jax.tree.map(lambda x: x[5], start)
    value, gradient = jax.value_and_grad(target.log_density)(first.position)
    np.testing.assert_allclose(first.log_density, value, rtol=100 * EPS)
    for name in gradient:
        np.testing.assert_allclose(first.gradient[name], gradient[name], rtol=1e3 * EPS, atol=1e3 * EPS)


def test_prior_draws_are_those_of_simulate():
    target = ppl.target(model)(Y)
    _, values = starts(target, "prior", 20)
    own = jax.vmap(lambda key: jax.random.fold_in(key, 0))(keys_of(20))  # the key of the first try
    drawn = jax.vmap(lambda key: ppl.simulate(model)(key, Y).latents)(own)
    assert set(drawn) == set(values)
    for name in drawn:
        np.testing.assert_allclose(values[name], drawn[name], rtol=1e4 * EPS, atol=1e3 * EPS)


def test_prior_draws_on_the_shards():
    mesh, y = meshed(1, 4)
    with jax.set_mesh(mesh):
        start, values = starts(ppl.target(sharded)(y), "prior")
    assert start.found.all()
    z = {
        "mu": (values["mu"], scipy.stats.norm),
        "rate": (values["rate"], scipy.stats.gamma(3)),
        "local": ((values["local"] - values["mu"][:, None]) / values["rate"][:, None], scipy.stats.norm),
        "wait": (values["wait"], scipy.stats.expon(scale=0.5)),
        "lane": (values["lane"] - values["local"], scipy.stats.laplace),
        "pair": (values["pair"], scipy.stats.uniform(0, 2)),
    }
    for name, (sample, law) in z.items():
        assert scipy.stats.kstest(sample.ravel(), law.cdf).pvalue > MIN_P, name
        flat = sample.reshape(KEYS, -1)
        correlation = np.corrcoef(flat, rowvar=False).reshape(flat.shape[1], -1)
        assert np.abs(correlation - np.eye(len(correlation))).max() < 5 / KEYS**0.5, name  # no two scalars share a draw


def test_prior_draws_on_the_shards_without_a_quantile_function():
    mesh, y = meshed(1, 4)

    def simplices(y):
        def body(y):
            ppl.sample("p", dist.Dirichlet(jnp.array([1.0, 2.0, 5.0])).expand([y.size]), spec=P("data"))

        jax.shard_map(body, in_specs=P("data"), out_specs=None)(y)

    with jax.set_mesh(mesh):
        _, values = starts(ppl.target(simplices)(y), "prior")
    means, law = values["p"].mean((0, 1)), scipy.stats.dirichlet([1.0, 2.0, 5.0])
    assert (np.abs(means - law.mean()) < 5 * (law.var() / values["p"][..., 0].size) ** 0.5).all()
    assert len(np.unique(values["p"][0, :, 0])) == 8


def test_each_latent_in_its_own_way():
    target = ppl.target(model)(Y)
    rate = np.linspace(0.5, 5.0, KEYS)
    start, values = starts(target, {"rate": rate, "mu": "prior", "between": "uniform"})
    np.testing.assert_allclose(values["rate"], rate, rtol=100 * EPS)
    assert scipy.stats.kstest(values["mu"], scipy.stats.norm.cdf).pvalue > MIN_P
    share = (values["between"] - values["mu"]) / values["rate"]
    assert scipy.stats.kstest(np.log(share / (1 - share)), scipy.stats.uniform(-2, 4).cdf).pvalue > MIN_P
    assert scipy.stats.kstest(start.position["walk"].ravel(), scipy.stats.uniform(-2, 4).cdf).pvalue > MIN_P


def test_values_where_supports_depend_on_drawn_latents():
    """What is given stays as it is, and what is drawn stays in a support that depends on what is given."""

    def chained():
        a = ppl.sample("a", dist.HalfNormal(1.0))
        b = ppl.sample("b", dist.Uniform(a, a + 1.0))
        ppl.sample("c", dist.Uniform(b, b + 2.0))

    for strategy in ("uniform", "prior", "mode"):
        _, values = starts(ppl.target(chained)(), {"a": 40.0, "b": strategy, "c": 41.5}, 50)
        np.testing.assert_allclose(values["a"], 40.0, rtol=100 * EPS)
        np.testing.assert_allclose(values["c"], 41.5, rtol=100 * EPS)
        assert ((values["b"] > 40) & (values["b"] < 41)).all()


def test_mode_agrees_with_scipy():
    rng = np.random.default_rng(1)
    scales = np.array([1.0, 5.0, 0.02])
    x = rng.normal(size=(100, 3)) * scales
    y = rng.poisson(np.exp(x @ (np.array([0.5, -0.3, 0.8]) / scales)))

    def regression(x, y):
        slope = ppl.sample("slope", dist.Normal(jnp.zeros(3), 1.0 / scales))
        noise = ppl.sample("noise", dist.Gamma(2.0, 1.0))
        ppl.observe("y", dist.Poisson(noise * jnp.exp(x @ slope)), y)

    target = ppl.target(regression)(x, y)
    start, _ = starts(target, "mode", 4)
    flat, unravel = jax.flatten_util.ravel_pytree(jax.tree.map(jnp.zeros_like, target.init(0)))
    density = jax.jit(jax.value_and_grad(lambda flat: -target.log_density(unravel(flat))))
    best = scipy.optimize.minimize(density, np.asarray(flat), jac=True, method="BFGS", options={"gtol": 1e-4})
    assert np.isfinite(best.fun)
    assert (start.log_density > -best.fun - 0.01).all()
    curvature = np.diag(np.linalg.inv(jax.hessian(lambda flat: density(flat)[0])(best.x))) ** 0.5
    for name, u in start.position.items():
        away = (u - unravel(best.x)[name]) / unravel(curvature)[name]
        assert np.abs(away).max() < 0.3, name  # standard deviations of the posterior


def test_mode_moves_what_it_is_asked_for():
    target = ppl.target(model)(Y)
    uniform, _ = starts(target, None, 3)
    start, values = starts(target, {"walk": "mode", "rate": 2.0}, 3)
    np.testing.assert_array_equal(start.position["mu"], uniform.position["mu"])
    np.testing.assert_array_equal(start.position["between"], uniform.position["between"])
    np.testing.assert_allclose(values["rate"], 2.0, rtol=100 * EPS)
    for chain in range(3):  # a Gaussian given mu: the precision times the mode is what the data and the prior pull
        mu, t = values["mu"][chain], np.arange(3.0)
        precision = np.eye(3) + len(Y) * np.ones((3, 3))
        pull = mu * t + (Y - mu).sum()
        np.testing.assert_allclose(values["walk"][chain], np.linalg.solve(precision, pull), atol=0.01)


def test_mode_keeps_the_best_finite_point():
    def cliff():
        x = ppl.sample("x", dist.Normal(0.0, 10.0))
        ppl.factor("slope", jnp.where(x < 3.0, 5.0 * x, jnp.nan))  # ever better, up to where it is NaN

    start, _ = starts(ppl.target(cliff)(), "mode", 20)
    assert start.found.all()
    assert np.isfinite(start.log_density).all()
    assert np.isfinite(start.gradient["x"]).all()
    assert ((start.position["x"] > 2.5) & (start.position["x"] < 3)).all()


def test_tries_until_finite():
    def picky():
        x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ppl.factor("right", jnp.where(x > 1.0, 0.0, -jnp.inf))

    for init in ("uniform", "prior"):
        start, _ = starts(ppl.target(picky)(), init, 200)
        assert (start.position["x"] > 1).all()
        share = {"uniform": 0.25, "prior": scipy.stats.norm.sf(1)}[init]
        tries = start.num_tries.mean()  # geometric
        assert abs(tries - 1 / share) < 5 * ((1 - share) / share**2 / 200) ** 0.5


def test_the_default_search_holds_one_gradient():
    def marked(y):
        x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ppl.observe("y", dist.Normal(lax.erf_inv(x / 9), 1.0), y)  # erf_inv is nowhere else

    target, key = ppl.target(marked)(Y), jax.random.key(0)

    def count(fn):
        return jax.jit(fn).lower(target, key).as_text().count("erf_inv")

    gradient = count(lambda target, key: jax.value_and_grad(target.log_density)(target.init(key)))
    assert gradient > 0
    assert count(lambda target, key: find_start(target, key, {}, MAX_TRIES)) == gradient


# --- layouts ----------------------------------------------------------------------------------------------------------


INITS = {
    "mixed": {
        "mu": 0.5,
        "rate": "prior",
        "local": "prior",
        "wait": np.linspace(0.1, 2.0, 56).reshape(7, 8),
        "pair": "prior",
    },
    "prior": "prior",
    "mode": {"local": "mode", "wait": "mode", "lane": "mode", "pair": "mode"},
}


@functools.cache
def search(strategies, layout, on_shards):
    """The compiled search of all chains, and, uncompiled, its lowering."""

    def shard(target, keys, given):
        coordinates = coordinates_of(target) if on_shards else None

        def one(key, given):
            return find_start(target, key, given, MAX_TRIES, strategies, coordinates)

        return jax.vmap(one)(keys, given)

    return jax.jit(layout.over_chains(shard, (P(), layout.spec(), layout.spec()), layout.spec()))


def found(name, mesh, y, num_chains, *, on_shards=False):
    """The starts of chains on a mesh, and the compiled search."""
    init = INITS[name]
    if name == "mixed":
        init = {**init, "wait": init["wait"][:num_chains]}
    layout = Layout(mesh, "chains", num_chains)
    with layout.context():
        target = layout.place_data(ppl.target(sharded)(y))
        asked = given_starts(init, target, layout.chains, num_chains)
        keys = jax.vmap(functools.partial(jax.random.fold_in, jax.random.key(7)))(layout.chains)
        args = (target, layout.place_chains(keys), layout.place_chains(asked.values))
        compiled = search(asked.strategies, layout, on_shards).lower(*args).compile()
        start = jax.device_get(compiled(*args))
    return jax.tree.map(lambda x: x[:num_chains], start), compiled.as_text()


@functools.cache
def reference(name):
    return found(name, *meshed(1, 1), 7)[0]


LAYOUTS = {
    "both": ((2, 2), AxisType.Auto, True),
    "data": ((1, 4), AxisType.Explicit, False),
    "chains": ((4, 1), AxisType.Auto, False),
}
CASES = [
    pytest.param(name, case, marks=[pytest.mark.validate] if (name, case) != ("mixed", "both") else [])
    for name in INITS
    for case in LAYOUTS
]


@pytest.mark.parametrize(("name", "case"), CASES)
def test_starts_on_all_layouts(name, case):
    """They are those of the first of more chains on one device, and latents stay where they are."""
    sizes, axis_type, on_shards = LAYOUTS[case]
    start, text = found(name, *meshed(*sizes, axis_type), 5, on_shards=on_shards)
    expected = jax.tree.map(lambda x: x[:5], reference(name))
    assert start.found.all()
    assert expected.found.all()
    assert set(start.position) == set(LATENTS)
    climbs = "mode" in str(INITS[name])  # the order of sums is felt more with every step
    for leaf in LATENTS:
        tolerance = 1e-10 / 2**-52 * EPS if climbs else 1e-12 / 2**-52 * EPS
        np.testing.assert_allclose(start.position[leaf], expected.position[leaf], rtol=0, atol=tolerance)
    np.testing.assert_allclose(start.log_density, expected.log_density, rtol=1e4 * EPS)
    if on_shards:
        assert " all-reduce(" in text
        assert " all-gather(" not in text
        assert " all-to-all(" not in text


def far(y):
    x = ppl.sample("x", dist.Normal(10.0, 1.0))
    z = ppl.sample("z", dist.Normal(x, 0.1))
    ppl.deterministic("double", 2 * z)
    ppl.observe("y", dist.Normal(x, 1.0), y)


STILL = {"step_size": 1e-9, "adapt_step_size": False}


def test_chains_begin_with_draws_from_the_prior():
    target, kernel = ppl.target(far)(8.0), HMC(**STILL)
    asked = given_starts("prior", target, np.arange(200), 200)
    layout = Layout(jax.make_mesh((1,), ("chains",), axis_types=(AxisType.Auto,)), "chains", 200)
    static = {"layout": layout, "max_tries": asked.max_tries, "strategies": asked.strategies}
    with layout.context():
        machine = kernel.machine(target, 0, drawn=True)
        chains, start = begin_chains(target, jax.random.key(0), jnp.arange(200), {}, machine=machine, **static)
    x, z = np.asarray(chains.path.point.position[VECTOR]).T
    assert start.found.all()
    assert scipy.stats.kstest(x - 10, scipy.stats.norm.cdf).pvalue > MIN_P
    assert scipy.stats.kstest((z - x) * 10, scipy.stats.norm.cdf).pvalue > MIN_P


def test_a_run_starts_where_each_latent_was_asked_to():
    settings = {"num_chains": 200, "num_warmup": 0, "num_samples": 1, "progress": False}
    still = HMC(engine="numpyro", **STILL, max_num_steps=1)
    mixed = mcmc(far, still, init={"z": "uniform", "x": "mode"}, **settings)(0, 8.0).posterior
    assert scipy.stats.kstest(mixed.z[:, 0], scipy.stats.uniform(-2, 4).cdf).pvalue > MIN_P
    best = (10 + 8 + 100 * mixed.z) / 102
    np.testing.assert_allclose(mixed.x, best, atol=1e-3)


def test_a_former_posterior_is_a_start():
    numpyro = {"engine": "numpyro", "adapt_step_size": False, "max_num_steps": 1}
    run = functools.partial(mcmc, far, num_chains=3, num_warmup=0, num_samples=5, progress=False)
    tree = run(HMC(step_size=0.1, **numpyro), init={"x": 9.0, "z": [8.0, 9.0, 9.5]})(0, 8.0)
    assert (np.ptp(tree.posterior.z.values, axis=1) > 0).all()
    for last in (tree.posterior.isel(draw=-1), tree.posterior.to_dataset().isel(draw=-1)):
        again = run(HMC(step_size=1e-9, **numpyro), init=last)(1, 8.0)
        for name in ("x", "z"):
            np.testing.assert_allclose(again.posterior[name][:, 0], tree.posterior[name][:, -1], rtol=1e-5)
    part = given_starts(
        tree.posterior.to_dataset()[["z", "double"]].isel(draw=-1), ppl.target(far)(8.0), np.arange(3), 3
    )
    assert (list(part.values), part.strategies) == (["z"], ())
    with pytest.raises(ShapeError, match=r"\(\) for all chains, or \(3,\) for each"):
        run(init=tree.posterior)(0, 8.0)


# --- what is refused --------------------------------------------------------------------------------------------------


def single():
    ppl.sample("x", dist.Normal(0.0, 1.0))


REFUSED = {
    "strategy": ("median", SettingsError, r"unknown way to start.*found: 'median'\n"),
    "strategy of one": ({"rate": "Prior"}, SettingsError, r"one of \('uniform', 'prior', 'mode'\).*'Prior' for 'rate'"),
    "list": ([1.0], ValuesError, r"init= must be a dict"),
    "name": ({"nu": 1.0}, ValuesError, r"init= names 'nu', which is no latent site"),
    "name of a strategy": ({"nu": "prior"}, ValuesError, r"init= names 'nu', which is no latent site"),
    "observed": ({"y": Y}, ValuesError, r"init= names 'y', which is no latent site"),
    "shape": (
        {"walk": np.zeros(2)},
        ShapeError,
        r"'walk' at \S*test_starts\.py:\d+: .*\(3,\) for all chains, or \(2, 3\)",
    ),
    "chains": ({"mu": np.zeros(3)}, ShapeError, r"'mu' at .*\(\) for all chains, or \(2,\) for each"),
    "objects": ({"mu": [None, None]}, DTypeError, r"'mu' at .*no array of numbers"),
    "complex": ({"mu": 1j}, DTypeError, r"'mu' at .*a cast to the dtype of the site would lose"),
    "integer": ({"mu": 2**60 + 1}, DTypeError, r"'mu' at .*an integer of init= is too large.*1152921504606846977"),
    "integers": ({"mu": np.array([1, 2**60 + 1])}, DTypeError, r"'mu' at .*too large for the dtype of the site"),
    "nan": ({"walk": [0.0, np.nan, 1.0]}, ValuesError, r"'walk' at .*not finite.*found: nan\n"),
    "infinite": (
        {"walk": [[0.0, 1.0, 1.0], [0.0, -np.inf, 1.0]]},
        ValuesError,
        r"not finite.*found: -inf in chain 1\n",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    init, error, message = REFUSED[name]
    with pytest.raises(error, match=f"(?s){message}"):
        mcmc(model, init=init, num_chains=2, progress=False)(0, Y)


@pytest.mark.parametrize("init", [{"mu": 1}, {"mu": [1, 2]}, {"rate": np.int32(2)}, {"mu": 2**40}, {"mu": True}])
def test_integers_that_a_float_holds(init):
    _, values = starts(ppl.target(model)(Y), init, 2)
    for name, value in init.items():
        np.testing.assert_allclose(values[name], np.broadcast_to(value, 2), rtol=100 * EPS)


def failure(model, *args, kernel=NUMPYRO, **settings):
    with pytest.raises(NoValidStartError) as caught:
        mcmc(model, kernel, progress=False, **settings)(0, *args)
    return str(caught.value)


def row(text, site):
    """The cells of a site's row in a table."""
    (line,) = [line for line in text.splitlines() if re.match(rf"  {site}  +\w", line)]
    return re.split(r"  +", line.strip())


@pytest.mark.parametrize("init", ["uniform", "prior", "mode", {"slope": 0.25, "noise": "prior"}])
def test_the_table_of_each_strategy(init):
    x = np.array([1.0, np.nan, 2.0])

    def broken(x):
        slope = ppl.sample("slope", dist.Normal(0.0, 1.0))
        noise = ppl.sample("noise", dist.Exponential(1.0))
        ppl.observe("x", dist.Normal(slope, noise), x)

    text = failure(broken, x, init=init, kernel=HMC(adapt_step_size=False) if init == "uniform" else NUMPYRO)
    assert f"in {MAX_TRIES} tries (chains without: [0, 1, 2, 3]); chain 0 ended at" in text
    assert "NaN in the model's argument x" in text
    for site, law in {"slope": scipy.stats.norm(), "noise": scipy.stats.expon()}.items():
        _, kind, value, log_prob, gradient, finite, line = row(text, site)
        assert (kind, gradient, finite) == ("sample", "nan", "NO")
        assert float(log_prob) == pytest.approx(law.logpdf(float(value)), abs=2e-3)
        assert re.fullmatch(r"\S*test_starts\.py:\d+", line)
    assert row(text, "x")[1:6] == ["observe", "1 to 2 (3,), 1 not finite", "nan", "-", "NO"]
    if isinstance(init, dict):
        assert row(text, "slope")[2] == "0.25"


def test_a_value_outside_of_its_support():
    text = failure(model, Y, init={"rate": [1.0, 2.0, -3.0, 4.0], "mu": 0.5})
    assert re.search(r"site 'rate' at \S*test_starts\.py:\d+: a value of init= lies outside of the support", text)
    assert "(chains without: [2]); chain 2 was to start at" in text
    assert re.search(r"expected: a value in the support of Gamma: Positive", text, re.I)
    assert "found: -3" in text
    assert row(text, "rate")[1:6] == ["sample", "-3", "-inf", "-", "NO"]
    name, kind, value, log_prob, gradient, finite, _ = row(text, "mu")
    assert (name, kind, value, gradient, finite) == ("mu", "sample", "0.5", "-", "yes")
    assert float(log_prob) == pytest.approx(scipy.stats.norm.logpdf(0.5), abs=1e-3)


def test_a_value_outside_of_a_support_that_is_finite_in_coordinates():
    """A vector of weights that do not sum to one has unconstrained coordinates, which are those of other weights."""

    def weights():
        ppl.sample("w", dist.Dirichlet(jnp.ones(3)))

    assert re.search(r"site 'w' .*simplex", failure(weights, init={"w": [0.2, 0.2, 0.2]}), re.S | re.I)
    _, values = starts(ppl.target(weights)(), {"w": [0.2, 0.3, 0.5]}, 2)
    np.testing.assert_allclose(values["w"], [[0.2, 0.3, 0.5]] * 2, rtol=100 * EPS)


def test_a_value_outside_of_a_support_that_depends_on_another():
    text = failure(model, Y, init={"mu": 0.0, "rate": [1.0, 3.0], "between": 2.0}, num_chains=2)
    assert "site 'between'" in text
    assert "(chains without: [0])" in text
    assert "Uniform" in text
    for init in ({"between": 0.5, "mu": 2.0, "rate": 1.0}, {"mu": 2.0, "between": 0.5}):
        assert "site 'between'" in failure(model, Y, init=init, num_chains=2)


def test_values_in_steps_and_lanes_and_branches():
    def some(flag, x):
        branches = (lambda x: ppl.sample("some", dist.HalfNormal(x)), lambda x: ppl.sample("some", dist.Exponential(x)))
        lax.cond(flag, *branches, x)

    def nested(flags):
        mask = jnp.array([True, False])
        ppl.mask(ppl.scale(lambda: ppl.sample("m", dist.HalfNormal(jnp.ones(2))), 0.5), mask)()
        jax.vmap(some)(jnp.array([True, False, True]), jnp.arange(1.0, 4.0))
        _, _ = lax.scan(lambda c, _: (c, ppl.sample("s", dist.HalfNormal(1.0))), 0.0, None, length=2)
        jax.vmap(lambda x: ppl.sample("v", dist.Exponential(1.0 + x)))(jnp.arange(3.0))
        lax.cond(
            flags[0],
            lambda: ppl.sample("b", dist.HalfNormal(1.0)),
            lambda: ppl.sample("b", dist.Exponential(1.0)),
        )

    flags = np.array([True])
    given = {"s": [0.5, 1.5], "v": [1.0, 2.0, 3.0], "b": 0.25, "m": [0.5, 2.0], "some": [0.1, 0.2, 0.3]}
    _, values = starts(ppl.target(nested)(flags), given, 2)
    for name, value in given.items():
        np.testing.assert_allclose(values[name], np.broadcast_to(value, (2, *np.shape(value))), rtol=100 * EPS)
    for name, bad in {"s": [0.5, -1.5], "v": [1.0, -2.0, 3.0], "b": -0.25, "some": [1.0, -0.2, 0.3]}.items():
        assert f"site '{name}'" in failure(nested, flags, init={**given, name: bad})
    own = jax.vmap(lambda key: jax.random.fold_in(key, 0))(keys_of(3))
    drawn = jax.vmap(lambda key: ppl.simulate(nested)(key, flags).latents)(own)
    _, values = starts(ppl.target(nested)(flags), "prior", 3)
    for name in given:
        np.testing.assert_allclose(values[name], drawn[name], rtol=1e4 * EPS)


def test_zeros_keep_the_types_of_an_explicit_mesh():
    mesh, y = meshed(1, 4, AxisType.Explicit)
    with jax.set_mesh(mesh):
        zeros = zeros_of(jax.typeof(y), 2)
    assert zeros.shape == (2, 8)
    assert jax.typeof(zeros).sharding.spec == P(None, "data")
