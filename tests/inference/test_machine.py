"""NUTS as a machine: its metric, its U-turns, its draws on every layout, and that no chain waits for another."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ppleffects as ppl
from benchmarks._cost import collectives, leapfrog_collectives
from ppleffects.inference.adaptation import MAX_SEARCH, adapt_step, estimate, start_search, window_ends
from ppleffects.inference.chain import STATS, Window
from ppleffects.inference.chunks import Plan
from ppleffects.inference.coordinates import VECTOR, coordinates_of
from ppleffects.inference.layout import trace
from ppleffects.inference.machine import Machine
from ppleffects.inference.metric import Metric, Pull, Shape, components, dot, force, identity, velocity
from ppleffects.inference.stream import _buffers, advance_chains, begin_chains
from ppleffects.inference.trajectory import _turning_inside, begin

pytestmark = pytest.mark.filterwarnings("ignore:mcmc.*:ppleffects.errors.DiagnosticsWarning")
RNG = np.random.default_rng(0)


def correlated(size):
    root = RNG.normal(size=(size, size)) * np.exp(RNG.normal(size=(size, 1)))
    return root @ root.T + 0.01 * np.eye(size)


def factor(metric):
    """``L``, column by column."""
    rows = [{VECTOR: row} for row in jnp.eye(metric.scale[VECTOR].size)]
    return np.stack([velocity(metric, Pull(row, components(metric, row)))[VECTOR] for row in rows], axis=1)


def estimated(shape, draws, gradients, count):
    """From the first draws."""
    rows = {VECTOR: jnp.asarray(draws)}, {VECTOR: jnp.asarray(gradients)}
    return estimate(shape, *rows, jnp.arange(len(draws)) < count, jnp.arange(len(draws)))


@pytest.mark.parametrize("wide", [False, True], ids=["vector", "wide"])
@pytest.mark.parametrize(("size", "count"), [(3, 10), (12, 30), (12, 60)])
def test_metric_of_a_normal_distribution_is_its_covariance_up_to_the_cutoff(size, count, wide):
    covariance = correlated(size)
    draws = RNG.multivariate_normal(np.zeros(size), covariance, size=160)
    gradients = -np.linalg.solve(covariance, draws.T).T
    inverse = np.linalg.inv(factor(estimated(Shape(size, 2.0, wide=wide), draws, gradients, count)))
    whitened = np.linalg.eigvalsh(inverse @ covariance @ inverse.T)
    assert whitened.min() > 0.49
    assert whitened.max() < 2.04


def test_fewer_draws_than_coordinates_leave_the_other_directions_as_they_are():
    draws = RNG.normal(size=(160, 30))
    metric = estimated(Shape(30, 2.0), draws, -draws, 10)
    np.testing.assert_allclose(metric.values, 1.0)
    np.testing.assert_allclose(metric.scale[VECTOR], 1.0)
    vectors = metric.vectors[VECTOR]
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(30), atol=1e-10)


def test_without_a_cutoff_the_metric_of_a_normal_distribution_is_its_covariance():
    covariance = correlated(6)
    draws = RNG.multivariate_normal(np.zeros(6), covariance, size=160)
    metric = estimated(Shape(6), draws, -np.linalg.solve(covariance, draws.T).T, 160)
    np.testing.assert_allclose(factor(metric) @ factor(metric).T, covariance, rtol=1e-3, atol=1e-3)


def test_blocks_know_nothing_of_each_other():
    covariance = correlated(5)
    draws = RNG.multivariate_normal(np.zeros(5), covariance, size=160)
    gradients = -np.linalg.solve(covariance, draws.T).T
    metric = estimated(Shape(5, blocks=(0, 0, 1, 1, 2)), draws, gradients, 160)
    found = factor(metric) @ factor(metric).T
    for block in (slice(0, 2), slice(2, 4), slice(4, 5)):
        alone = estimated(Shape(block.stop - block.start), draws[:, block], gradients[:, block], 160)
        np.testing.assert_allclose(found[block, block], factor(alone) @ factor(alone).T, rtol=1e-8)
        found[block, block] = 0.0
    np.testing.assert_allclose(found, 0.0, atol=1e-8)


def test_directions_reach_all_leaves():
    covariance = correlated(11)
    draws = RNG.multivariate_normal(np.zeros(11), covariance, size=160)
    gradients = -np.linalg.solve(covariance, draws.T).T

    def leaves(rows):
        return {VECTOR: jnp.asarray(rows[:, :5]), "z": jnp.asarray(rows[:, 5:]).reshape(-1, 2, 3)}

    used, order = jnp.arange(160) < 64, jnp.arange(160)
    metric = estimate(Shape(4, 2.0, wide=True), leaves(draws), leaves(gradients), used, order)
    flat = estimated(Shape(4, 2.0, wide=True), draws, gradients, 64)
    np.testing.assert_allclose(metric.values, flat.values, rtol=1e-8)
    joined = np.concatenate([metric.vectors[VECTOR], metric.vectors["z"].reshape(4, 6)], axis=1)
    np.testing.assert_allclose(np.abs(np.sum(joined * flat.vectors[VECTOR], axis=1)), 1.0, rtol=1e-8)


def test_force_is_the_transpose_of_velocity_and_knows_its_components():
    q, _ = np.linalg.qr(RNG.normal(size=(11, 11)))
    vectors = {VECTOR: jnp.asarray(q[:2, :5]), "z": jnp.asarray(q[:2, 5:]).reshape(2, 2, 3)}
    metric = Metric({VECTOR: jnp.arange(1.0, 6.0), "z": jnp.full((2, 3), 0.5)}, vectors, jnp.array([9.0, 0.1]))
    p, g = ({VECTOR: jnp.asarray(RNG.normal(size=5)), "z": jnp.asarray(RNG.normal(size=(2, 3)))} for _ in range(2))
    pull = force(metric, g)
    np.testing.assert_allclose(dot(velocity(metric, Pull(p, components(metric, p))), g), dot(p, pull.whole), rtol=1e-12)
    np.testing.assert_allclose(components(metric, pull.whole), pull.along, rtol=1e-12)


def turns(momenta):
    """Whether a stretch of a trajectory turns back at either end."""
    middle = momenta.sum(0) - 0.5 * (momenta[0] + momenta[-1])
    return momenta[0] @ middle <= 0 or momenta[-1] @ middle <= 0


def test_u_turns_inside_of_a_subtree_are_those_of_all_its_aligned_parts():
    momenta = RNG.normal(size=(64, 3)) + 0.4
    zeros, scalar = {VECTOR: jnp.zeros(3)}, jnp.zeros(())
    path = begin(identity(zeros, Shape()), zeros, scalar, zeros, zeros, jax.random.key(0), 7)
    check = jax.jit(_turning_inside)
    total, found, expected = np.zeros(3), [], []
    for number, momentum in enumerate(momenta):
        total = total + momentum
        now, checkpoints = check(
            path._replace(leaf=jnp.int32(number)), {VECTOR: jnp.asarray(momentum)}, {VECTOR: jnp.asarray(total)}
        )
        path = path._replace(checkpoints=checkpoints)
        found.append(bool(now))
        sizes = [2**k for k in range(1, 7) if (number + 1) % 2**k == 0]
        expected.append(any(turns(momenta[number + 1 - size : number + 1]) for size in sizes))
    assert found == expected
    assert 5 < sum(found) < 60


def test_windows_end_before_the_last_draws_of_warm_up():
    assert window_ends(1000)[:9] == [10, 20, 30, 40, 50, 60, 80, 100, 120]
    for number in (0, 5, 20, 100, 300, 1000):
        ends = window_ends(number)
        assert all(a < b for a, b in zip(ends, ends[1:], strict=False))
        assert not ends or ends[-1] <= number // 2 or ends[-1] <= number - 60


# --- runs

COVARIANCE = np.array([[1.0, 0.9, 0.0], [0.9, 1.0, 0.0], [0.0, 0.0, 4.0]])
NUM_DEVICES = len(jax.devices())


@pytest.mark.parametrize(("least", "expected"), [(-2.6, -3.0), (4.4, 5.0), (-100.0, -MAX_SEARCH)])
def test_the_first_step_size_is_the_first_power_of_two_on_the_other_side_of_the_target(least, expected):
    """With steps that are accepted below ``2 ** least``, and rejected above."""
    step = start_search(jnp.zeros(()))
    while bool(step.searching):
        step = adapt_step(step, jnp.where(step.log_step < least * np.log(2.0), 1.0, 0.0), jnp.asarray(0.8))
    np.testing.assert_allclose(step.log_step / np.log(2.0), expected, rtol=1e-12)
    np.testing.assert_allclose(step.log_average, step.log_step)
    assert step.number == 0


@pytest.mark.parametrize("kernel", [ppl.NUTS(), ppl.HMC()], ids=str)
def test_the_search_for_a_step_size_makes_no_draws(kernel):
    stats = ppl.mcmc(normal, kernel, num_warmup=0, num_samples=6, num_chains=2, progress=False)(0)["sample_stats"]
    assert stats["step_size"].shape == (2, 6)
    assert (stats["step_size"] == stats["step_size"][:, :1]).all()
    assert (np.log2(stats["step_size"][:, 0]) % 1 == 0).all() or isinstance(kernel, ppl.HMC)
    assert (stats["n_steps"] > 1).any()


def normal():
    ppl.sample("x", dist.MultivariateNormal(jnp.array([1.0, -1.0, 0.0]), COVARIANCE))
    ppl.sample("s", dist.HalfNormal(1.0))


@functools.cache
def run(**settings):
    kernel = ppl.NUTS(max_tree_depth=settings.pop("max_tree_depth", 10))
    return ppl.mcmc(normal, kernel, progress=False, **{"num_chains": 4, "num_samples": 2000, **settings})(1)


def test_draws_have_the_moments_of_the_posterior():
    posterior = run()["posterior"]
    x = posterior["x"].values.reshape(-1, 3)
    np.testing.assert_allclose(x.mean(0), [1.0, -1.0, 0.0], atol=0.12)
    np.testing.assert_allclose(np.cov(x.T), COVARIANCE, atol=0.25)
    s = posterior["s"].values
    np.testing.assert_allclose([s.mean(), s.std()], [np.sqrt(2 / np.pi), np.sqrt(1 - 2 / np.pi)], atol=0.04)
    assert run().attrs["num_diverging"] <= 2
    assert run().attrs["min_ess_bulk"] > 2000


def test_warm_up_ends_when_the_metric_has_settled():
    assert run().attrs["num_leapfrogs_warmup"] < 0.45 * run().attrs["num_leapfrogs"]
    tree = run(groups=("warmup",))
    assert 320 <= tree["warmup_posterior"].sizes["draw"] <= 480


@pytest.mark.parametrize("settings", [{"chunk_size": 7}, {"chunk_size": 2000}, {"num_chains": 2}], ids=str)
def test_draws_do_not_depend_on_chunks_nor_on_other_chains(settings):
    found, expected = run(num_samples=200, **settings), run(num_samples=200)
    for name in ("x", "s"):
        chains = slice(0, found["posterior"].sizes["chain"])
        a, b = found["posterior"][name].values, expected["posterior"][name].values[chains]
        if "chunk_size" in settings:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a[:, :10], b[:, :10], atol=1e-6)


def test_chains_that_pool_their_draws_estimate_one_metric_from_all():
    target = ppl.target(normal)()
    machine = Machine(coordinates_of(target), 200, 10, 1000.0, 0.8, Shape(4), pool_chains=True)
    starts = jax.vmap(target.init)(jax.random.split(jax.random.key(0), 3))
    keys = jax.random.split(jax.random.key(1), 3)
    chains = jax.vmap(machine.init, in_axes=(None, 0, 0))(target, jax.tree.map(lambda x: x[:, None], starts), keys)
    shape = chains.window.draws[VECTOR].shape
    rows = {VECTOR: jnp.asarray(RNG.normal(size=shape))}, {VECTOR: jnp.asarray(RNG.normal(size=shape))}
    number = machine._trials_end + 30  # of which the later 15 count, in slots from the number's remainder on
    chains = chains._replace(window=Window(*rows), number=jnp.full(3, number, jnp.int32))
    found = machine._estimated(jax.tree.map(lambda x: x[1], chains), chains).metric
    slots = np.arange(number - 15, number) % shape[1]
    draws, gradients = (np.asarray(tree[VECTOR])[:, slots].reshape(-1, shape[2]) for tree in rows)
    expected = estimated(Shape(4), draws, gradients, len(draws))
    np.testing.assert_allclose(factor(found) @ factor(found).T, factor(expected) @ factor(expected).T, rtol=1e-6)


def test_thinning_keeps_every_third():
    np.testing.assert_array_equal(
        run(num_samples=200, thinning=3)["posterior"]["x"], run(num_samples=200)["posterior"]["x"][:, 2::3][:, :66]
    )


def test_no_chain_waits_for_another():
    target = ppl.target(normal)()
    machine = Machine(coordinates_of(target), 0, 10, 1000.0, 0.8, Shape(), step_size=0.1)
    starts = jax.vmap(target.init)(jax.random.split(jax.random.key(0), 8))
    keys = jax.random.split(jax.random.key(1), 8)
    chains = jax.jit(jax.vmap(machine.init, in_axes=(None, 0, 0)))(
        target, jax.tree.map(lambda x: x[:, None], starts), keys
    )
    last, budget = jnp.int32(50), jnp.int32(10**6)
    go = jax.jit(
        lambda target, chains: machine.run(target, chains, _buffers(chains, len(machine.stats), 60), last, budget)
    )
    _, rows, counts, iterations = go(target, chains)
    steps = np.asarray(rows.stats)[:50, :, list(STATS).index("n_steps")]
    assert np.asarray(counts).tolist() == [50] * 8
    slowest, lock_step = steps.sum(0).max(), steps.max(1).sum()
    assert iterations <= 1.15 * slowest
    assert lock_step > 1.2 * slowest  # what chains would take that wait at the end of each trajectory


def local(mesh):
    def shard(mu, y):
        z = ppl.sample("z", dist.Normal(0.0, 1.0).expand(y.shape), spec=P("data"))
        ppl.observe("y", dist.Normal(mu + z, 0.5), y)

    def model(y):
        mu = ppl.sample("mu", dist.Normal(0.0, 2.0))
        jax.shard_map(shard, mesh=mesh, in_specs=(P(), P("data")), out_specs=None)(mu, y)

    return model


def whole(y):
    mu = ppl.sample("mu", dist.Normal(0.0, 2.0))
    z = ppl.sample("z", dist.Normal(0.0, 1.0).expand(y.shape))
    ppl.observe("y", dist.Normal(mu + z, 0.5), y)


@pytest.mark.skipif(NUM_DEVICES < 4, reason="the mesh has four devices: set PPLEFFECTS_TEST_DEVICES=4")
@pytest.mark.skipif(jax.config.jax_check_tracer_leaks, reason="jit(grad(shard_map(f))) of plain JAX fails under it")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_latents_on_the_shards_are_drawn_as_those_of_the_whole_model(axis_type):
    mesh = jax.make_mesh((2, 2), ("chains", "data"), axis_types=(axis_type,) * 2, devices=jax.devices()[:4])
    y = jax.device_put(jnp.asarray(RNG.normal(size=6) + 1.0), jax.NamedSharding(mesh, P("data")))
    settings = {"num_warmup": 10, "num_samples": 10, "num_chains": 4, "groups": ("warmup",), "progress": False}
    kernel = ppl.NUTS()
    with jax.set_mesh(mesh):
        found = ppl.mcmc(local(mesh), kernel, **settings)(0, y)
    expected = ppl.mcmc(whole, kernel, **settings)(0, np.asarray(y))
    for name in ("mu", "z"):
        np.testing.assert_allclose(found["warmup_posterior"][name], expected["warmup_posterior"][name], atol=1e-8)


def placed(kernel, model, y, mesh):
    """The machine of a kernel and a model's target on a mesh."""
    target, layout = trace(lambda: ppl.target(model)(y), mesh, "chains", 2)
    with layout.context():
        return kernel.machine(target, 100, drawn=True), layout.place_data(target), layout


@pytest.mark.skipif(NUM_DEVICES < 4, reason="the mesh has four devices: set PPLEFFECTS_TEST_DEVICES=4")
@pytest.mark.skipif(jax.config.jax_check_tracer_leaks, reason="jit(grad(shard_map(f))) of plain JAX fails under it")
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize(("metric", "most"), [("auto", 3), ("low_rank", 4)])
def test_latents_on_the_shards_are_never_gathered(axis_type, metric, most):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(axis_type,), devices=jax.devices()[:4])
    y = jax.device_put(jnp.ones(64), jax.NamedSharding(mesh, P("data")))
    machine, target, layout = placed(ppl.NUTS(metric=metric), local(mesh), y, mesh)
    plan, chains = Plan(100, 1, (), ()), layout.place_chains(layout.chains)
    key, number = layout.place_data(jax.random.key(0)), jnp.asarray(10, jnp.int32)
    with layout.context():
        settings = {"machine": machine, "layout": layout}
        begin = begin_chains.lower(target, key, chains, {}, **settings, max_tries=1).compile()
        begun, _ = begin_chains(target, key, chains, {}, **settings, max_tries=1)
        lowered = advance_chains.lower(target, begun, number, number, number > 0, **settings, plan=plan)
    # XLA makes a sum outside of the loop of starts when it likes, on each device: two would wait for each other.
    assert "all-reduce" not in begin.as_text().split("\nENTRY ")[1]
    compiled = lowered.compile()
    hlo = compiled.as_text() or ""
    assert set(collectives(hlo)) == {"all-reduce"}
    # One for the density, one for the energy, one for all U-turns, and one for projections on directions.
    assert 1 <= leapfrog_collectives(hlo)["all-reduce"] <= most
    assert begun.path.near.position["z"].sharding.spec[1] == "data"
    # What the first program leaves lies as the second takes and leaves it, which is then compiled once.
    for before, after in zip(jax.tree.leaves(begun), jax.tree.leaves(compiled.output_shardings[0]), strict=True):
        assert before.sharding.is_equivalent_to(after, before.ndim)
