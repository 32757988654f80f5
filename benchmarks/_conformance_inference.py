"""NUTS on meshes of chains and data, bad starts, and what a run says of itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _conformance_case import NO_SAMPLER, Refused, case, mesh
from _conformance_samplers import SAMPLERS
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

Y = np.random.default_rng(0).normal(1.5, 1.0, 40)
PRECISION = 1 / 4 + Y.size
MOMENTS = (Y.sum() / PRECISION, PRECISION**-0.5)  # of the mean, with a prior of scale 2 and data of scale 1
# Five standard errors of 4 x 500 draws are below this, if a third of them count.
WITHIN = {"atol": 0.04, "rtol": 0.0, "timeout": 300.0, "section": "fails", "cannot": NO_SAMPLER}
RUN = {"num_warmup": 200, "num_samples": 500, "progress": False}


def _moments(draws):
    draws = np.asarray(draws)
    return draws.mean(), draws.std()


def _log_density(mu, y):
    return -0.5 * (mu / 2) ** 2 + _log_likelihood(mu, y)


def _log_likelihood(mu, y):
    return jnp.sum(-0.5 * (y - mu) ** 2)


def _numpyro_mcmc(model, *args, chain_method="sequential", num_chains=1, **settings):
    kernel = numpyro.infer.NUTS(model)
    options = {"num_warmup": 200, "num_samples": 500, "progress_bar": False, **settings}
    run = numpyro.infer.MCMC(kernel, chain_method=chain_method, num_chains=num_chains, **options)
    run.run(jax.random.key(0), *args)
    return run


def _numpyro_model(y):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)


def _ppl_model(y):
    mu = ppl.sample("mu", dist.Normal(0.0, 2.0))
    ppl.observe("y", dist.Normal(mu, 1.0), y)


def _ppl_sharded(grid):
    def model(y):
        mu = ppl.sample("mu", dist.Normal(0.0, 2.0))
        body = lambda mu, y: ppl.observe("y", dist.Normal(mu, 1.0), y)  # noqa: E731
        jax.shard_map(body, mesh=grid, in_specs=(P(), P("data")), out_specs=P("data"))(mu, y)

    return model


explicit = case(
    "data on an Explicit mesh",
    "posterior mean and standard deviation by NUTS, the data lying on a mesh as `jax.make_mesh` makes it by default",
    MOMENTS,
    **WITHIN,
)


def _placed(axis_type=AxisType.Explicit):
    return jax.device_put(Y, NamedSharding(mesh(axis_type, data=4), P("data")))


@explicit.on("ppleffects")
def _():
    return _moments(ppl.mcmc(_ppl_model, **RUN)(0, _placed())["posterior"]["mu"].values)


@explicit.on("NumPyro")
def _():
    return _moments(_numpyro_mcmc(_numpyro_model, _placed(), num_chains=2).get_samples()["mu"])


for _library in ("TFP", "BlackJAX"):

    @explicit.on(_library)
    def _(library=_library):
        y, key = _placed(), jax.random.key(0)
        return _moments(jax.jit(lambda y: SAMPLERS[library](lambda mu: _log_density(mu, y), jnp.zeros(()), key))(y))


parallel = case(
    "chains in parallel, data in a shard_map",
    "posterior mean and standard deviation: chains on groups of devices, the likelihood in a shard_map over `data`, "
    "by the library's own driver of chains",
    MOMENTS,
    **{**WITHIN, "cannot": {**NO_SAMPLER, "TFP": "has no driver of chains", "BlackJAX": "has no driver of chains"}},
)


@parallel.on("ppleffects")
def _():
    grid = mesh(chains=2, data=2)
    return _moments(ppl.mcmc(_ppl_sharded(grid), mesh=grid, **RUN)(0, Y)["posterior"]["mu"].values)


@parallel.on("NumPyro")
def _():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
        body = lambda mu, y: lax.psum(_log_likelihood(mu, y), "data")  # noqa: E731
        likelihood = jax.shard_map(body, mesh=mesh(data=2), in_specs=(P(), P("data")), out_specs=P())
        numpyro.factor("y", likelihood(mu, y))

    return _moments(_numpyro_mcmc(model, Y, chain_method="parallel", num_chains=2).get_samples()["mu"])


def _chains_over(grid, library, density, **options):
    """Draws of 2 chains, each on its own group of devices, by a shard_map around the sampler."""

    def body(number, y):
        key = jax.random.fold_in(jax.random.key(0), number[0])
        start = 0.1 * number[0].astype(float)
        return SAMPLERS[library](lambda mu: density(mu, y), start, key)[None]

    specs = {"in_specs": (P("chains"), P()), "out_specs": P("chains")}
    sampled = jax.jit(jax.shard_map(body, mesh=grid, **specs, **options))
    rows = P("data") if "data" in grid.axis_names else P()
    numbers = jax.device_put(jnp.arange(2), NamedSharding(grid, P("chains")))
    return jax.block_until_ready(sampled(numbers, jax.device_put(Y, NamedSharding(grid, rows))))


inside = case(
    "NUTS in a checked shard_map over chains",
    "posterior mean and standard deviation, chains on devices by `shard_map(check_vma=True)` (ppleffects: by `mcmc`)",
    MOMENTS,
    **WITHIN,
)


@inside.on("ppleffects")
def _():
    return _moments(ppl.mcmc(_ppl_model, mesh=mesh(chains=2), num_chains=2, **RUN)(0, Y)["posterior"]["mu"].values)


for _library in SAMPLERS:
    inside.on(_library)(
        lambda library=_library: _moments(_chains_over(mesh(chains=2), library, _log_density, check_vma=True))
    )


grids = {"Auto": AxisType.Auto, "Explicit": AxisType.Explicit}
for _label, _type in grids.items():
    nested = case(
        f"chains x data, {_label} axes",
        f"posterior mean and standard deviation on a 2 x 2 mesh of {_label} axes, the density's own shard_map over "
        "`data` within one over `chains` with check_vma=False (ppleffects: by `mcmc`)",
        MOMENTS,
        **WITHIN,
    )

    @nested.on("ppleffects")
    def _(axis_type=_type):
        grid = mesh(axis_type, chains=2, data=2)
        y = jax.device_put(Y, NamedSharding(grid, P("data")))
        tree = ppl.mcmc(_ppl_sharded(grid), mesh=grid, num_chains=2, **RUN)(0, y)
        return _moments(tree["posterior"]["mu"].values)

    for _library in SAMPLERS:

        @nested.on(_library)
        def _(library=_library, axis_type=_type):
            def density(mu, y):
                body = lambda mu, y: lax.psum(_log_likelihood(mu, y), "data")  # noqa: E731
                specs = {"in_specs": (P(), P("data")), "out_specs": P(), "axis_names": {"data"}}
                return -0.5 * (mu / 2) ** 2 + jax.shard_map(body, **specs)(mu, y)

            grid = mesh(axis_type, chains=2, data=2)
            with jax.set_mesh(grid):
                return _moments(_chains_over(grid, library, density, axis_names={"chains"}, check_vma=False))


flat = case(
    "NUTS within shard_map(check_vma=False) over data",
    "posterior mean and standard deviation, the sampler inside of the shard_map over `data`, its density a psum: "
    "right, or refused",
    MOMENTS,
    refusal=True,
    **{**WITHIN, "timeout": 120.0},
)


@flat.on("ppleffects")
def _():
    def model(y):
        mu = ppl.sample("mu", dist.Normal(0.0, 2.0))
        body = lambda mu, y: ppl.observe("y", dist.Normal(mu, 1.0), y)  # noqa: E731
        specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
        jax.shard_map(body, mesh=mesh(data=4), **specs, check_vma=False)(mu, y)

    return _moments(ppl.mcmc(model, **RUN)(0, Y)["posterior"]["mu"].values)


for _library in SAMPLERS:

    @flat.on(_library)
    def _(library=_library):
        def body(y):
            density = lambda mu: -0.5 * (mu / 2) ** 2 + lax.psum(_log_likelihood(mu, y), "data")  # noqa: E731
            return SAMPLERS[library](density, jnp.zeros(()), jax.random.key(0))

        sampled = jax.shard_map(body, mesh=mesh(data=4), in_specs=P("data"), out_specs=P(), check_vma=False)
        return _moments(jax.jit(sampled)(Y))


nowhere = case(
    "no valid start",
    "a model whose density is finite nowhere, chains in parallel: an error",
    cannot=NO_SAMPLER,
    timeout=300.0,
)
missing = case(
    "NaN among the data",
    "NUTS with one NaN among the data: an error that says so",
    section="fails",
    cannot=NO_SAMPLER,
    timeout=300.0,
)


def _draws(tree):
    return Refused(f"{tree['posterior']['mu'].size} draws")


@nowhere.on("ppleffects")
def _():
    def model():
        ppl.factor("f", jnp.log(-1.0 - ppl.sample("mu", dist.Normal(0.0, 1.0)) ** 2))

    return _draws(ppl.mcmc(model, mesh=mesh(chains=2), num_chains=2, num_warmup=50, num_samples=50, progress=False)(0))


@nowhere.on("NumPyro")
def _():
    def model():
        numpyro.factor("f", jnp.log(-1.0 - numpyro.sample("mu", dist.Normal(0.0, 1.0)) ** 2))

    run = _numpyro_mcmc(model, chain_method="parallel", num_chains=2, num_warmup=50, num_samples=50)
    return Refused(f"{run.get_samples()['mu'].size} draws")


@missing.on("ppleffects")
def _():
    return _draws(ppl.mcmc(_ppl_model, **RUN)(0, np.append(Y, np.nan)))


@missing.on("NumPyro")
def _():
    return Refused(f"{_numpyro_mcmc(_numpyro_model, np.append(Y, np.nan)).get_samples()['mu'].size} draws")


for _library in ("TFP", "BlackJAX"):

    @nowhere.on(_library)
    def _(library=_library):
        density = lambda mu: jnp.log(-1.0 - mu**2)  # noqa: E731
        return Refused(f"{SAMPLERS[library](density, jnp.zeros(()), jax.random.key(0), 50, 50).size} draws")

    @missing.on(_library)
    def _(library=_library):
        density = lambda mu: _log_density(mu, np.append(Y, np.nan))  # noqa: E731
        return Refused(f"{SAMPLERS[library](density, jnp.zeros(()), jax.random.key(0), 50, 50).size} draws")
