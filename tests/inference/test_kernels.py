"""Every kernel through one contract, then against NumPyro step by step and against closed forms."""

import dataclasses
import importlib.util
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from numpyro.infer.hmc import hmc

import ppleffects as ppl
from ppleffects import inference
from ppleffects.errors import DiscreteLatentError, SettingsError
from ppleffects.inference.kernel import BLACKJAX, ENGINES, NUMPYRO, Hamiltonian
from ppleffects.inference.target import target as make_target

KERNELS = {
    ("NUTS", "ppleffects"): inference.NUTS(max_tree_depth=6),
    ("HMC", "ppleffects"): inference.HMC(max_num_steps=64),
    ("NUTS", "numpyro"): inference.NUTS(max_tree_depth=6, engine=NUMPYRO),
    ("HMC", "numpyro"): inference.HMC(max_num_steps=64, engine=NUMPYRO),
    ("NUTS", "blackjax"): inference.NUTS(max_tree_depth=6, engine=BLACKJAX),
    ("HMC", "blackjax"): inference.HMC(max_num_steps=64, engine=BLACKJAX),
}
NO_BLACKJAX = importlib.util.find_spec("blackjax") is None


def model(y):
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
    scale = ppl.sample("scale", dist.Gamma(3.0, 2.0))
    ppl.observe("y", dist.Normal(mu, scale), y)


@pytest.fixture(scope="module")
def target():
    return make_target(model)(jnp.array([0.3, 1.2, 2.0, -0.4]))


@pytest.fixture(params=KERNELS, ids="-".join)
def kernel(request):
    found = KERNELS[request.param]
    if found.engine == BLACKJAX and NO_BLACKJAX:
        pytest.skip("BlackJAX is not installed")
    return found


def start(target):
    return {"mu": jnp.array(0.3), "scale": jnp.array(-0.2)}


def run(kernel, target, num_warmup, num_steps):
    """The positions and infos of one chain."""

    @jax.jit
    def steps(target, key):
        state = kernel.init(target, start(target), key, num_warmup)

        def body(state, _):
            state, info = kernel.step(target, state)
            return state, (state.position, info)

        return jax.lax.scan(body, state, None, length=num_steps)[1]

    return steps(target, jax.random.key(7))


def test_table_of_kernels_is_complete():
    exported = {
        name for name, value in vars(inference).items() if isinstance(value, type) and issubclass(value, Hamiltonian)
    }
    assert set(itertools.product(exported, ENGINES)) == set(KERNELS)


def test_kernel_is_hashable_settings(kernel):
    assert dataclasses.replace(kernel) == kernel
    assert hash(dataclasses.replace(kernel)) == hash(kernel)
    assert dataclasses.replace(kernel, target_accept=0.7).settings()["target_accept"] == 0.7


def test_step_keeps_structure_types_and_shared_leaves(kernel, target):
    def two(target, keys):
        def one(key):
            return kernel.init(target, start(target), key, 10)

        states = jax.vmap(one, out_axes=kernel.state_axes)(keys)
        new, info = jax.vmap(kernel.step, in_axes=(None, kernel.state_axes), out_axes=(kernel.state_axes, 0))(
            target, states
        )
        return states, new, info

    old, new, info = jax.eval_shape(two, target, jax.random.split(jax.random.key(0), 3))
    assert jax.tree.structure(old) == jax.tree.structure(new)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(old)] == [
        (leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(new)
    ]
    assert new.iteration.shape == ()
    if kernel.engine != BLACKJAX:
        assert new.adaptation.window_idx.shape == ()
    assert {"lp", "energy", "acceptance_rate", "diverging", "n_steps", "step_size"} <= set(info._fields)
    assert all(leaf.shape == (3,) for leaf in info)


def test_step_size_is_that_of_warmup_afterwards(kernel, target):
    _, info = run(kernel, target, 30, 60)
    assert len(np.unique(info.step_size[:30])) > 10
    assert len(np.unique(info.step_size[30:])) == 1


def test_lp_is_the_log_density_of_the_position(kernel, target):
    position, info = run(kernel, target, 5, 10)
    expected = jax.vmap(target.log_density)(position)
    np.testing.assert_allclose(info.lp, expected, rtol=1e-12)
    assert bool((info.energy > -info.lp).all())


@pytest.mark.parametrize("dense_mass", [False, True, (("mu", "scale"),), (("scale",),)])
def test_nuts_takes_the_steps_of_numpyro(target, dense_mass):
    settings = {"find_heuristic_step_size": True, "target_accept": 0.9, "max_tree_depth": 5, "engine": "numpyro"}
    position, info = run(inference.NUTS(dense_mass=dense_mass, **settings), target, 20, 30)
    init_kernel, sample_kernel = hmc(lambda u: -target.log_density(u), algo="NUTS")
    state = init_kernel(
        start(target),
        20,
        dense_mass=list(dense_mass) if isinstance(dense_mass, tuple) else dense_mass,
        find_heuristic_step_size=True,
        target_accept_prob=0.9,
        max_tree_depth=5,
        rng_key=jax.random.key(7),
    )

    def body(state, _):
        state = sample_kernel(state)
        return state, state

    _, states = jax.lax.scan(body, state, None, length=30)
    np.testing.assert_allclose(position["mu"], states.z["mu"], atol=1e-8)
    np.testing.assert_allclose(position["scale"], states.z["scale"], atol=1e-8)
    np.testing.assert_allclose(info.energy, states.energy, atol=1e-8)
    np.testing.assert_array_equal(info.n_steps, states.num_steps)
    np.testing.assert_array_equal(info.diverging, states.diverging)


def test_hmc_takes_the_steps_of_numpyro(target):
    position, info = run(inference.HMC(trajectory_length=1.3), target, 20, 30)
    init_kernel, sample_kernel = hmc(lambda u: -target.log_density(u), algo="HMC")
    state = init_kernel(start(target), 20, trajectory_length=1.3, rng_key=jax.random.key(7))

    def body(state, _):
        state = sample_kernel(state)
        return state, state

    _, states = jax.lax.scan(body, state, None, length=30)
    np.testing.assert_allclose(position["mu"], states.z["mu"], atol=1e-8)
    np.testing.assert_array_equal(info.n_steps, states.num_steps)
    np.testing.assert_allclose(info.acceptance_rate, states.accept_prob, atol=1e-8)


def test_tree_depth_and_saturation():
    def narrow():
        ppl.sample("x", dist.Normal(jnp.zeros(2), jnp.array([1e-3, 1.0])))

    kernel = inference.NUTS(max_tree_depth=3, step_size=1e-3, adapt_step_size=False, adapt_mass_matrix=False)

    @jax.jit
    def step(target):
        return kernel.step(target, kernel.init(target, {"x": jnp.zeros(2)}, jax.random.key(0), 0))[1]

    info = step(make_target(narrow)())
    assert int(info.tree_depth) == 3
    assert int(info.n_steps) == 7
    assert bool(info.reached_max_treedepth)
    assert not bool(info.diverging)


def test_latents_of_another_dtype_than_the_sampler():
    def single():
        ppl.sample("a", dist.Normal(jnp.float32(0.0), jnp.float32(1.0)))
        ppl.sample("b", dist.Normal(jnp.float64(0.0), 1.0))

    target = make_target(single)()
    kernel = inference.NUTS()
    state = kernel.init(target, target.init(jax.random.key(0)), jax.random.key(1), 5)
    new, _ = jax.jit(kernel.step)(target, state)
    assert new.position["a"].dtype == jnp.float64


BAD_SETTINGS = {
    "target_accept": (lambda: inference.NUTS(target_accept=1.0), "target_accept is out of its range"),
    "step_size": (lambda: inference.HMC(step_size=0.0), "step_size is out of its range"),
    "max_tree_depth": (lambda: inference.NUTS(max_tree_depth=0), "max_tree_depth is out of its range"),
    "trajectory_length": (lambda: inference.HMC(trajectory_length=-1.0), "trajectory_length is out of its range"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_bad_settings(name):
    make, message = BAD_SETTINGS[name]
    with pytest.raises(SettingsError, match=message):
        make()


def test_dense_mass_must_name_latents(kernel, target):
    if kernel.engine == BLACKJAX:
        with pytest.raises(SettingsError, match="BlackJAX's engine does not have this setting"):
            dataclasses.replace(kernel, dense_mass=(("mu", "tau"),))
        return
    with pytest.raises(SettingsError, match=r"a metric must name latent sites.*\n.*'mu', 'scale'.*\n.*tau"):
        dataclasses.replace(kernel, dense_mass=(("mu", "tau"),)).check(target)
    with pytest.raises(SettingsError, match="each in one block"):
        dataclasses.replace(kernel, metric=(("mu",), ("mu",))).check(target)


def test_a_model_without_latents(kernel):
    def nothing():
        ppl.observe("y", dist.Normal(0.0, 1.0), jnp.zeros(3))

    with pytest.raises(SettingsError, match="no latent site"):
        kernel.check(make_target(nothing)())


def test_a_discrete_latent():
    def discrete():
        ppl.sample("k", dist.Poisson(3.0))

    with pytest.raises(DiscreteLatentError, match=r"(?s)'k'.*test_kernels\.py:\d+.*ppl\.condition"):
        inference.mcmc(discrete, progress=False)(0)
