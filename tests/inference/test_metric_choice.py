"""What a user asks of a metric: its shape for a target, what it begins with, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from ppleffects.errors import DTypeError, SettingsError, ShapeError, ValuesError
from ppleffects.inference import HMC, NUTS, mcmc
from ppleffects.inference.adaptation import estimate
from ppleffects.inference.coordinates import VECTOR, coordinates_of
from ppleffects.inference.metric import Shape, force, identity, velocity
from ppleffects.inference.metric_choice import shape_of


def small():
    ppl.sample("a", dist.Normal(0.0, 1.0))
    ppl.sample("b", dist.HalfNormal(jnp.ones(2)))
    ppl.sample("w", dist.Dirichlet(jnp.ones(3)))  # two coordinates


NAMES = ["a", "b", "b", "w", "w"]  # of the coordinates


def sharded(y):
    ppl.sample("mean", dist.Normal(jnp.zeros(2), 1.0))

    def body(y):
        ppl.sample("local", dist.Normal(y, 1.0))

    jax.shard_map(body, in_specs=P("data"), out_specs=None)(y)


def vector(scale_tril):
    ppl.sample("x", dist.MultivariateNormal(jnp.zeros(len(scale_tril)), scale_tril=scale_tril))


@pytest.fixture(scope="module")
def target():
    return ppl.target(small)()


@pytest.fixture
def on_shards(axis_type):
    """A target with a latent on the shards, within its mesh."""
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,))
    y = jax.device_put(np.arange(8.0), NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        yield ppl.target(sharded)(y)


def inverse_mass(metric, g):
    """The inverse mass matrix of a metric times a packed vector."""
    return velocity(metric, force(metric, g))


def matrix_of(metric, size):
    """The inverse mass matrix of a metric of a vector alone."""
    return np.stack([inverse_mass(metric, {VECTOR: jnp.asarray(row)})[VECTOR] for row in np.eye(size)])


def covariance(size):
    root = np.random.default_rng(size).normal(size=(size, size)) * np.logspace(-2, 2, size)[:, None]
    return root @ root.T + np.diag(np.logspace(-4, 4, size))


# --- shapes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "shape"),
    [
        ("auto", Shape(5, 2.0)),
        ("diagonal", Shape(0)),
        ("dense", Shape(5, 1.0)),
        ("low_rank", Shape(5, 2.0, wide=True)),
    ],
)
def test_shapes(target, choice, shape):
    assert shape_of(NUTS(metric=choice).metric, coordinates_of(target)) == shape


@pytest.mark.parametrize(("size", "shape"), [(256, Shape(256, 2.0)), (257, Shape(16, 2.0, wide=True)), (4097, Shape())])
def test_auto_of_many_coordinates(size, shape):
    big = ppl.target(lambda: ppl.sample("x", dist.Normal(jnp.zeros(size), 1.0)))()
    assert shape_of("auto", coordinates_of(big)) == shape
    assert shape_of("low_rank", coordinates_of(big)) == Shape(16, 2.0, wide=True)
    assert shape_of("dense", coordinates_of(big)) == Shape(size, 1.0)


@pytest.mark.parametrize("blocks", [(("a", "w"),), [["w", "a"]], (("b",), ("w", "a")), (("a", "b", "w"),), (("w",),)])
def test_blocks(target, blocks):
    shape = shape_of(NUTS(metric=blocks).metric, coordinates_of(target))
    assert (shape.num_directions, shape.cutoff, shape.wide) == (5, 1.0, False)
    together = np.eye(5, dtype=bool)
    for block in blocks:
        member = np.isin(NAMES, block)
        together |= member[:, None] & member[None, :]
    number = np.array(shape.blocks)
    np.testing.assert_array_equal(number[:, None] == number[None, :], together)


def test_shapes_with_latents_on_the_shards(on_shards):
    coordinates = coordinates_of(on_shards)
    position = coordinates.pack({"mean": jnp.zeros(2), "local": jnp.zeros(8)})
    reached = {}
    for choice in ("auto", "diagonal", "low_rank", (("mean",),)):
        shape = shape_of(NUTS(metric=choice).metric, coordinates)
        reached[choice] = {name: x.shape for name, x in identity(position, shape).vectors.items()}
    assert reached == {
        "auto": {VECTOR: (2, 2)},
        "diagonal": {},
        "low_rank": {VECTOR: (10, 2), "local": (10, 8)},
        (("mean",),): {VECTOR: (2, 2)},
    }
    for choice in ("dense", (("mean", "local"),), (("local",),)):
        with pytest.raises(SettingsError, match=r"(?s)latents that live on the shards.*on the shards: local\n"):
            shape_of(NUTS(metric=choice).metric, coordinates)


def test_estimates_of_each_choice():
    """Of a Gaussian, draws and gradients tell the covariance; each choice keeps its part of it."""
    rng = np.random.default_rng(5)
    root = rng.normal(size=(5, 5)) + 2 * np.eye(5)
    full = root @ root.T
    x = rng.normal(size=(400, 5)) @ root.T
    g = -x @ np.linalg.inv(full)
    coordinates = coordinates_of(ppl.target(small)())
    draws, used = ({VECTOR: jnp.asarray(x)}, {VECTOR: jnp.asarray(g)}), jnp.ones(400, bool)

    def estimated(metric):
        return matrix_of(estimate(shape_of(NUTS(metric=metric).metric, coordinates), *draws, used, jnp.arange(400)), 5)

    np.testing.assert_allclose(estimated("dense"), full, rtol=1e-3, atol=1e-3)
    ratios = np.sqrt(x.var(0) / g.var(0))
    np.testing.assert_allclose(estimated("diagonal"), np.diag(ratios), rtol=1e-8, atol=1e-10)
    blocks = estimated((("a", "w"),))
    np.testing.assert_allclose(blocks[1:3], np.diag(ratios)[1:3], rtol=1e-3, atol=1e-5)
    member = np.ix_([0, 3, 4], [0, 3, 4])
    s, t = np.cov(x.T, bias=True)[member], np.cov(g.T, bias=True)[member]
    np.testing.assert_allclose(blocks[member] @ t @ blocks[member], s, rtol=1e-3, atol=1e-3)  # the geometric mean


# --- what a run begins with -------------------------------------------------------------------------------------------


def first(kernel, target):
    kernel.check(target)
    return kernel.first_metric(kernel.machine(target, 0, drawn=True))


@pytest.mark.parametrize("kernel", [NUTS, HMC])
@pytest.mark.parametrize("metric", ["auto", "diagonal", "dense", "low_rank", (("a", "b"),)])
def test_variances(target, kernel, metric):
    given = {"w": np.array([4.0, 0.25]), "b": 9}
    start = first(kernel(metric=metric, inverse_mass_matrix=given), target)
    np.testing.assert_allclose(matrix_of(start, 5), np.diag([1.0, 9.0, 9.0, 4.0, 0.25]), rtol=1e-12)


@pytest.mark.parametrize("metric", ["auto", "dense", "low_rank", (("a", "b"),)])
def test_covariance(target, metric):
    given = covariance(5)
    start = first(NUTS(metric=metric, inverse_mass_matrix=given), target)
    deviations = np.sqrt(np.diag(given))
    scaled = matrix_of(start, 5) / np.outer(deviations, deviations)
    np.testing.assert_allclose(scaled, given / np.outer(deviations, deviations), atol=1e-12)


def test_nothing_given_is_the_identity(target):
    assert first(NUTS(), target) is None
    start = identity({VECTOR: jnp.zeros(5)}, shape_of("dense", coordinates_of(target)))
    np.testing.assert_allclose(matrix_of(start, 5), np.eye(5), rtol=1e-12)


def test_variances_on_the_shards(on_shards):
    variances = np.linspace(1.0, 8.0, 8)
    kernel = NUTS(metric="low_rank", inverse_mass_matrix={"local": variances, "mean": [2.0, 3.0]})
    start = first(kernel, on_shards)
    scale = start.scale["local"]
    assert scale.sharding.is_equivalent_to(NamedSharding(jax.sharding.get_mesh(), P("data")), 1)
    g = {"mean": jnp.array([1.0, -2.0]), "local": jnp.arange(8.0) - 3}
    out = inverse_mass(start, coordinates_of(on_shards).pack(g))
    np.testing.assert_allclose(out["local"], variances * g["local"], rtol=1e-12)
    np.testing.assert_allclose(out[VECTOR], [2.0, -6.0], rtol=1e-12)


def test_kernels_that_begin_otherwise_share_programs():
    a, b = NUTS(inverse_mass_matrix={"x": 1.0}), NUTS(inverse_mass_matrix=np.eye(3))
    assert a == b
    assert hash(a) == hash(b)
    assert a.settings()["inverse_mass_matrix"]
    assert not NUTS().settings()["inverse_mass_matrix"]


@pytest.mark.skipif(not jax.config.jax_enable_x64, reason="rounding may turn a choice")
@pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")
def test_a_run_with_the_posteriors_metric_is_that_of_a_standard_normal():
    """With ``L L'`` for a metric, ``x = L z`` moves as ``z`` does with the identity, draw for draw."""
    fixed: dict = {"step_size": 0.4, "adapt_step_size": False, "adapt_mass_matrix": False}
    z0 = np.random.default_rng(1).normal(size=(2, 3))

    def draws(metric, given, covariance):
        deviations = np.sqrt(np.diag(covariance))
        values, vectors = np.linalg.eigh(covariance / np.outer(deviations, deviations))
        factor = deviations[:, None] * (vectors * np.sqrt(values)) @ vectors.T
        kernel = NUTS(metric=metric, inverse_mass_matrix=given, **fixed)
        run = mcmc(
            vector, kernel, num_warmup=0, num_samples=25, num_chains=2, init={"x": z0 @ factor.T}, progress=False
        )
        tree = run(0, np.linalg.cholesky(covariance))
        z = np.linalg.solve(factor, tree.posterior.x.values[..., None])[..., 0]
        return z, tree.sample_stats.n_steps.values

    expected, num_steps = draws("diagonal", None, np.eye(3))
    assert np.median(num_steps) >= 3  # trees, not single steps
    assert (np.ptp(expected, axis=1) > 1).all()
    variances = np.array([1e-4, 1.0, 1e4])
    full = covariance(3)
    for metric, given, posterior in (("diagonal", {"x": variances}, np.diag(variances)), ("dense", full, full)):
        z, steps = draws(metric, given, posterior)
        np.testing.assert_array_equal(steps, num_steps)
        np.testing.assert_allclose(z, expected, atol=1e-6)


# --- what is refused --------------------------------------------------------------------------------------------------


SETTINGS = {
    "name": ({"metric": "full"}, r"metric= is neither.*found: 'full'"),
    "flat": ({"metric": ("a", "b")}, r"metric= is neither.*found: \('a', 'b'\)"),
    "empty": ({"metric": ()}, r"metric= is neither.*found: \(\)"),
    "empty block": ({"metric": (("a",), ())}, r"metric= is neither"),
    "numbers": ({"metric": ((1, 2),)}, r"metric= is neither.*found: \(\(1, 2\),\)"),
    "array": ({"metric": np.eye(2)}, r"metric= is neither.*blocks such as"),
    "dense_mass": ({"dense_mass": {"a"}}, r"dense_mass= is neither.*expected: True, False, or blocks.*found: \{'a'\}"),
    "dense_mass name": ({"dense_mass": "dense"}, r"dense_mass= is neither"),
    "both": ({"dense_mass": True, "metric": "diagonal"}, r"contradict.*found: dense_mass=True, metric='diagonal'"),
    "engine": ({"engine": "stan"}, r"engine=.*'numpyro'.*found: 'stan'"),
    "numpyro's": ({"find_heuristic_step_size": True}, r"found: find_heuristic_step_size\n.*engine=\"numpyro\""),
    "low rank": ({"engine": "numpyro", "metric": "low_rank"}, r"NumPyro's engine.*found: metric=\"low_rank\"\n"),
    "variances": ({"engine": "numpyro", "inverse_mass_matrix": {}}, r"NumPyro's.*found: inverse_mass_matrix=\n"),
    "pool": ({"engine": "numpyro", "pool_chains": True}, r"NumPyro's engine.*found: pool_chains=True\n"),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_refused_settings(name):
    settings, message = SETTINGS[name]
    for kernel in (NUTS, HMC):
        with pytest.raises(SettingsError, match=f"(?s){message}"):
            kernel(**settings)


def test_dense_mass_is_another_word():
    said = [(True, "dense"), (False, "auto"), ([], "auto"), ([("a", "b")], (("a", "b"),))]
    for dense_mass, metric in said:
        assert NUTS(dense_mass=dense_mass).metric == metric
        assert NUTS(engine="numpyro", dense_mass=dense_mass).metric == metric
    assert NUTS(metric="dense", dense_mass=True).metric == "dense"


SITE = r"^site '{}' at \S*test_metric_choice\.py:\d+: "
FIRST = {
    "name": ({"c": 1.0}, "auto", ValuesError, r"names 'c', which is no latent.*\['a', 'b', 'w'\]"),
    "shape": ({"w": [1.0, 2.0, 3.0]}, "auto", ShapeError, SITE.format("w") + r".*expected: \(2,\).*found: \(3,\)"),
    "zero": ({"b": [1.0, 0.0]}, "auto", ValuesError, SITE.format("b") + r".*not positive.*found: 0\.0\n"),
    "infinite": ({"a": np.inf}, "auto", ValuesError, SITE.format("a") + r".*not positive.*found: inf\n"),
    "nan": ({"b": [np.nan, 1.0]}, "auto", ValuesError, SITE.format("b") + r".*found: nan\n"),
    "text": ({"a": "one"}, "auto", DTypeError, r"^site 'a' at .*no array of numbers"),
    "complex": ({"a": 1j}, "auto", DTypeError, r"^site 'a' at .*complex"),
    "size": (np.eye(4), "auto", ShapeError, r"no covariance of these latents.*\(5, 5\).*found: \(4, 4\)\n"),
    "vector": (np.ones(5), "auto", ShapeError, r"no covariance of these latents.*found: \(5,\)\n"),
    "room": (np.eye(5), "diagonal", SettingsError, r"no room.*\(5, 5\), for 0 directions\n.*metric=\"dense\""),
    "texts": ([["a"]], "auto", DTypeError, r"no array of numbers"),
    "asymmetric": (np.eye(5) + np.eye(5, k=1) / 2, "dense", ValuesError, r"no covariance\n.*not symmetric"),
    "indefinite": (2 * np.ones((5, 5)) - np.eye(5), "dense", ValuesError, r"no covariance\n.*the eigenvalue -1\n"),
    "singular": (np.ones((5, 5)), "dense", ValuesError, r"no covariance\n.*the eigenvalue"),
    "negative": (-np.eye(5), "dense", ValuesError, r"no covariance\n.*a variance that is not positive"),
    "not finite": (np.diag([1.0, 1.0, 1.0, 1.0, np.inf]), "dense", ValuesError, r"no covariance\n.*not finite"),
}


@pytest.mark.parametrize("name", FIRST)
def test_refused_to_begin_with(target, name):
    given, metric, error, message = FIRST[name]
    with pytest.raises(error, match=f"(?s){message}"):
        NUTS(metric=metric, inverse_mass_matrix=given).check(target)


def test_covariance_with_latents_on_the_shards(on_shards):
    with pytest.raises(ShapeError, match=r"(?s)expected: variances by latent.*found: \(10, 10\); on the shards: local"):
        HMC(inverse_mass_matrix=np.eye(10)).check(on_shards)


@pytest.mark.parametrize("blocks", [(("a", "c"),), (("a", "b"), ("b",)), (("a", "a"),)])
@pytest.mark.parametrize("engine", ["ppleffects", "numpyro"])
def test_blocks_that_name_no_latents(target, blocks, engine):
    with pytest.raises(SettingsError, match=r"(?s)must name latent sites, each in one block.*\['a', 'b', 'w'\]"):
        NUTS(engine=engine, metric=blocks).check(target)
