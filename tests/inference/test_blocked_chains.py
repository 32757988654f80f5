"""Chains of a likelihood in blocks are those of the likelihood without, on one device and on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

N = 48
RNG = np.random.default_rng(11)
X = jnp.asarray(RNG.normal(size=(N, 3)))
Y = jnp.asarray(RNG.random(N) < 0.6)
TOLERANCE = 1e-6 if jax.config.jax_enable_x64 else 1e-2  # of draws: rounding errors grow along a trajectory


def regression(rows, mesh=None):
    def model(x, y):
        alpha = ppl.sample("alpha", dist.Normal(0.0, 1.0))
        scale = ppl.sample("scale", dist.HalfNormal(1.0))
        beta = ppl.sample("beta", dist.Normal(0.0, 1.0).expand((3,)))

        def likelihood(block):
            x, y = block
            ppl.observe("y", dist.Bernoulli(logits=x @ beta * scale + alpha), y)

        def shard(x, y):
            (likelihood if rows is None else ppl.blocked(likelihood, rows))((x, y))

        if mesh is None:
            shard(x, y)
        else:
            jax.shard_map(shard, mesh=mesh, in_specs=P("data"), out_specs=None)(x, y)

    return model


def first_draws(rows, mesh, kernel, **settings):
    run = ppl.mcmc(
        regression(rows, mesh),
        kernel,
        mesh=mesh,
        num_warmup=0,
        num_samples=4,
        groups=("log_likelihood",),
        progress=False,
        **settings,
    )
    return run(2, X, Y)


@pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")
@pytest.mark.parametrize("on_mesh", [False, True])
def test_first_draws(on_mesh, request):
    mesh = request.getfixturevalue("mesh_2x2") if on_mesh else None
    kernel = ppl.NUTS(step_size=0.1, max_tree_depth=4)
    plain, blocked = (first_draws(rows, mesh, kernel, num_chains=3) for rows in (None, 5))
    for group in ("posterior", "log_likelihood"):
        for name, values in plain[group].data_vars.items():
            np.testing.assert_allclose(blocked[group][str(name)], values, TOLERANCE, TOLERANCE, err_msg=str(name))
    assert blocked.posterior["beta"].std("draw").min() > 0


@pytest.mark.filterwarnings("ignore::ppleffects.errors.DiagnosticsWarning")
def test_latents_of_rows_are_sampled_in_blocks():
    """A conjugate model: the mean of each row's latent is known, and so are all standard deviations."""

    def model(y):
        ppl.blocked(lambda y: ppl.observe("y", dist.Normal(ppl.sample("z", dist.Normal(0.0 * y, 1.0)), 1.0), y), 5)(y)

    y = jnp.linspace(-2.0, 2.0, 12)
    draws = ppl.mcmc(model, num_warmup=200, num_samples=500, progress=False)(1, y).posterior["z"]
    assert draws.shape == (4, 500, 12)
    np.testing.assert_allclose(draws.mean(("chain", "draw")), y / 2, atol=5 * np.sqrt(0.5 / 500))
    np.testing.assert_allclose(draws.std(("chain", "draw")), np.sqrt(0.5), atol=0.1)
