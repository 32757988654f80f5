"""Reference posteriors, the likelihood on shards, on each layout: ESS first, then means within five standard errors."""

import arviz_stats
import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

pytestmark = pytest.mark.validate

LAYOUTS = {"2x2": (2, 2), "1x4": (1, 4), "4x1": (4, 1), "one device": None}


def eight_schools(y, sigma, mask):
    mu = ppl.sample("mu", dist.Normal(0.0, 5.0))
    tau = ppl.sample("tau", dist.HalfCauchy(5.0))
    z = ppl.sample("z", dist.Normal(jnp.zeros(8), 1.0))
    theta = ppl.deterministic("theta", mu + tau * z)
    likelihood(theta, y, sigma, mask)


def regression(y, design, mask):
    flat, positive = dist.constraints.real, dist.constraints.positive
    beta = jnp.stack([ppl.sample(f"beta_{i}", dist.ImproperUniform(flat, (), ())) for i in range(4)])
    ppl.deterministic("beta", beta)
    sigma = ppl.sample("sigma", dist.ImproperUniform(positive, (), ()))
    likelihood(design @ beta, y, jnp.broadcast_to(sigma, y.shape), mask)


def likelihood(mean, y, scale, mask):
    """Normal, on the shards of `data` where the context has that axis."""
    if "data" not in jax.sharding.get_abstract_mesh().axis_names:
        ppl.observe("y", dist.Normal(mean, scale), y, mask=mask)
        return

    def body(mean, scale, y, mask):
        first = jax.lax.axis_index("data") * len(y)
        mean, scale = (jax.lax.dynamic_slice_in_dim(x, first, len(y)) for x in (mean, scale))
        ppl.observe("y", dist.Normal(mean, scale), y, mask=mask)

    jax.shard_map(body, in_specs=(P(), P(), P("data"), P("data")), out_specs=P())(mean, scale, y, mask)


def schools_data(posteriordb):
    data, reference = posteriordb("eight_schools-eight_schools_noncentered")
    return eight_schools, (np.array(data["y"], float), np.array(data["sigma"], float)), reference


def regression_data(posteriordb):
    data, reference = posteriordb("kidiq_with_mom_work-kidscore_interaction_z")
    standard = [(x - np.mean(x)) / (2 * np.std(x, ddof=1)) for x in (data["mom_hs"], data["mom_iq"])]
    design = np.stack([np.ones(data["N"]), *standard, standard[0] * standard[1]], axis=1)
    return regression, (np.array(data["kid_score"], float), design), reference


def place(arrays, mesh):
    """The rows, padded to a multiple of four, and a mask of those that are no padding."""
    rows = len(arrays[0])
    padding = -rows % 4
    arrays = [np.pad(a, [(0, padding)] + [(0, 0)] * (a.ndim - 1), mode="edge") for a in arrays]
    arrays = [*arrays, np.arange(rows + padding) < rows]
    if mesh is None:
        return arrays
    rows = NamedSharding(mesh, P("data"))
    return [jax.device_put(arrays[0], rows), arrays[1], jax.device_put(arrays[2], rows)]


@pytest.mark.parametrize("sizes", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("load", [schools_data, regression_data])
def test_reference_posterior(load, sizes, axis_type, posteriordb):
    mesh = None if sizes is None else jax.make_mesh(sizes, ("chains", "data"), axis_types=(axis_type,) * 2)
    model, arrays, reference = load(posteriordb)
    kernel = ppl.NUTS(target_accept=0.95)  # without divergences, which would warn and so fail
    tree = ppl.mcmc(model, kernel, mesh=mesh, progress=False)(1, *place(arrays, mesh))
    for name, expected in reference["parameters"].items():
        site, _, index = name.rstrip("]").partition("[")
        draws = tree.posterior[site].values
        draws = draws[..., int(index) - 1] if index else draws
        ess = float(arviz_stats.ess(draws, chain_axis=0, draw_axis=1))
        assert ess >= 400
        error = np.hypot(draws.std() / ess**0.5, expected["mcse_mean"])
        assert abs(draws.mean() - expected["mean"]) < 5 * error, name
