"""Running a sampler: interruption, warnings, traces, what its compiled step moves over the mesh."""

from __future__ import annotations

import _thread
import re
import threading
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _conformance_case import NO_SAMPLER, case, mesh
from _conformance_inference import MOMENTS, RUN, Y, _log_density, _numpyro_mcmc, _numpyro_model, _ppl_model
from _conformance_samplers import SAMPLERS
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ppleffects as ppl

NO_MODELS = {**NO_SAMPLER, "TFP": "has no cached sites to lose", "BlackJAX": "has no sites"}
NO_REPORT = {**NO_SAMPLER}

forgotten = case(
    "NUTS after a jit cache hit",
    "the number of latents in the posterior of a model whose latent stands in a jitted function that ran before",
    1,
    cannot=NO_MODELS,
    timeout=300.0,
)


@forgotten.on("ppleffects")
def _():
    inner = jax.jit(lambda: ppl.sample("x", dist.Normal(0.0, 1.0)))
    ppl.simulate(inner)(0)
    return len(ppl.mcmc(inner, num_warmup=50, num_samples=50, progress=False)(0)["posterior"].data_vars)


@forgotten.on("NumPyro")
def _():
    inner = jax.jit(lambda: numpyro.sample("x", dist.Normal(0.0, 1.0)))
    numpyro.handlers.seed(inner, 0)()
    return len(_numpyro_mcmc(inner, num_warmup=50, num_samples=50).get_samples())


interrupted = case(
    "Ctrl-C",
    "whether a run of many million draws that is interrupted after 25 s returns draws (1)",
    1,
    section="fails",
    cannot=NO_SAMPLER,
    timeout=300.0,
)
# So many that no run ends before it is interrupted.
LONG = {"ppleffects": 8_000_000, "NumPyro": 8_000_000, "TFP": 8_000_000, "BlackJAX": 32_000_000}


def _interrupted(run):
    """What ``run`` returns if it is interrupted after 25 s; a run that ends before gives no verdict."""
    sent = threading.Event()

    def interrupt():
        sent.set()
        _thread.interrupt_main()

    timer = threading.Timer(25.0, interrupt)
    timer.daemon = True
    timer.start()
    result = run()
    if not sent.is_set():
        raise RuntimeError("no verdict: the run ended before it was interrupted")
    return result


@interrupted.on("ppleffects")
def _():
    settings: dict[str, Any] = {"num_warmup": 200, "num_samples": LONG["ppleffects"], "num_chains": 1}
    tree = _interrupted(lambda: ppl.mcmc(_ppl_model, progress=False, **settings)(0, Y))
    return tree["posterior"].sizes["draw"] > 0 and not tree.attrs["complete"]


@interrupted.on("NumPyro")
def _():
    run = lambda: _numpyro_mcmc(_numpyro_model, Y, num_samples=LONG["NumPyro"]).get_samples()["mu"]  # noqa: E731
    return _interrupted(lambda: np.asarray(run())).size > 0


for _library in ("TFP", "BlackJAX"):

    @interrupted.on(_library)
    def _(library=_library):
        sampled = jax.jit(
            lambda y: SAMPLERS[library](
                lambda mu: _log_density(mu, y), jnp.zeros(()), jax.random.key(0), 200, LONG[library]
            )
        )
        return _interrupted(lambda: np.asarray(sampled(Y))).size > 0


divergent = case(
    "divergences",
    "whether a run that diverges says so without being asked (1)",
    1,
    section="fails",
    cannot=NO_REPORT,
    timeout=300.0,
)
stuck = case(
    "a chain elsewhere",
    "whether a run says that its two chains, one in each of two far modes, disagree (1)",
    1,
    section="fails",
    cannot=NO_REPORT,
    timeout=300.0,
)


def _warned(run, text):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return any(re.search(text, str(w.message), re.IGNORECASE) for w in caught)


def _funnel(v, x):
    return -0.5 * (v / 3) ** 2 + jnp.sum(-0.5 * x**2 * jnp.exp(-v) - 0.5 * v)


def _modes(x):
    return jnp.logaddexp(-0.5 * (x - 20) ** 2, -0.5 * (x + 20) ** 2)


STARTS = np.array([-20.0, 20.0])


@divergent.on("ppleffects")
def _():
    def model():
        v = ppl.sample("v", dist.Normal(0.0, 3.0))
        ppl.sample("x", dist.Normal(jnp.zeros(9), jnp.exp(v / 2)))

    return _warned(lambda: ppl.mcmc(model, **RUN)(0), "diverg")


@divergent.on("NumPyro")
def _():
    def model():
        v = numpyro.sample("v", dist.Normal(0.0, 3.0))
        numpyro.sample("x", dist.Normal(jnp.zeros(9), jnp.exp(v / 2)))

    return _warned(lambda: _numpyro_mcmc(model, num_chains=2), "diverg")


@stuck.on("ppleffects")
def _():
    def model():
        ppl.factor("f", _modes(ppl.sample("x", dist.ImproperUniform(dist.constraints.real, (), ()))))

    run = ppl.mcmc(model, num_chains=2, init={"x": STARTS}, **RUN)
    return _warned(lambda: run(0), "r.?hat")


@stuck.on("NumPyro")
def _():
    kernel = numpyro.infer.NUTS(potential_fn=lambda x: -_modes(x))
    settings = {"num_warmup": 200, "num_samples": 500, "num_chains": 2, "chain_method": "vectorized"}
    run = numpyro.infer.MCMC(kernel, progress_bar=False, **settings)
    return _warned(lambda: run.run(jax.random.key(0), init_params=jnp.asarray(STARTS)), "r.?hat")


for _library in ("TFP", "BlackJAX"):

    @divergent.on(_library)
    def _(library=_library):
        density = lambda z: _funnel(z[0], z[1:])  # noqa: E731
        return _warned(lambda: SAMPLERS[library](density, jnp.zeros(10), jax.random.key(0)), "diverg")

    @stuck.on(_library)
    def _(library=_library):
        keys = jax.random.split(jax.random.key(0))
        sampled = jax.vmap(lambda start, key: SAMPLERS[library](_modes, start, key))
        return _warned(lambda: jax.block_until_ready(sampled(STARTS, keys)), "r.?hat")


retraced = case(
    "new data",
    "how often a model or density is traced for a second data set of the same shape: once at most (0)",
    0,
    cost=True,
    section="fails",
    cannot=NO_SAMPLER,
    timeout=300.0,
)


@retraced.on("ppleffects")
def _():
    calls = []

    def model(y):
        calls.append(1)
        _ppl_model(y)

    run = ppl.mcmc(model, num_warmup=50, num_samples=50, progress=False)
    run(0, Y)
    first = len(calls)
    run(0, Y + 1)
    return max(len(calls) - first - 1, 0)


@retraced.on("NumPyro")
def _():
    calls = []

    def model(y):
        calls.append(1)
        _numpyro_model(y)

    settings = {"num_warmup": 50, "num_samples": 50, "progress_bar": False}
    run = numpyro.infer.MCMC(numpyro.infer.NUTS(model), **settings)
    run.run(jax.random.key(0), Y)
    first = len(calls)
    run.run(jax.random.key(0), Y + 1)
    return max(len(calls) - first - 1, 0)


for _library in ("TFP", "BlackJAX"):

    @retraced.on(_library)
    def _(library=_library):
        calls = []

        def density(mu, y):
            calls.append(1)
            return _log_density(mu, y)

        def run(y):
            return SAMPLERS[library](lambda mu: density(mu, y), jnp.zeros(()), jax.random.key(0), 50, 50)

        compiled = jax.jit(run)
        compiled(Y)
        first = len(calls)
        compiled(Y + 1)
        return max(len(calls) - first - 1, 0)


GROUPS = 4096
gathers = case(
    "latents on the shards",
    f"the number of all-gathers in one compiled NUTS transition of {GROUPS} latents that lie on four shards, and one "
    "that is the same on all",
    0,
    cost=True,
    section="fails",
    cannot=NO_SAMPLER,
    timeout=300.0,
)


def _all_gathers(step, *args):
    return len(re.findall(r" all-gather(?:-start)?\(", jax.jit(step).lower(*args).compile().as_text() or ""))


def _local_density(grid):
    def body(mu, z):
        return jax.lax.psum(jnp.sum(-0.5 * (z - mu) ** 2), "data")

    rows = jax.shard_map(body, mesh=grid, in_specs=(P(), P("data")), out_specs=P())
    return lambda mu, z: -0.5 * mu**2 + rows(mu, z)


def _local_start(grid):
    mu = jax.device_put(jnp.full((), 0.1), NamedSharding(grid, P()))
    return {"mu": mu, "z": jax.device_put(jnp.full(GROUPS, 0.1), NamedSharding(grid, P("data")))}


@gathers.on("ppleffects")
def _():
    grid = mesh(data=4)

    def model():
        def body(mu, rows):
            ppl.sample("z", dist.Normal(mu + jnp.zeros_like(rows), 1.0))

        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
        jax.shard_map(body, mesh=grid, in_specs=(P(), P("data")), out_specs=None)(mu, jnp.zeros(GROUPS))

    target, kernel = ppl.target(model)(), ppl.NUTS()
    state = kernel.init(target, _local_start(grid), jax.random.key(0), 100)
    return _all_gathers(kernel.step, target, state)


@gathers.on("NumPyro")
def _():
    from numpyro.infer.hmc import hmc

    grid = mesh(data=4)
    density = _local_density(grid)
    init, step = hmc(lambda z: -density(z["mu"], z["z"]), algo="NUTS")
    state = init(_local_start(grid), num_warmup=100, rng_key=jax.random.key(0))
    return _all_gathers(step, state)


@gathers.on("TFP")
def _():
    from tensorflow_probability.substrates import jax as tfp

    grid = mesh(data=4)
    kernel = tfp.mcmc.NoUTurnSampler(_local_density(grid), step_size=jnp.float64(0.1))
    start = list(_local_start(grid).values())
    results = kernel.bootstrap_results(start)
    return _all_gathers(lambda s, r: kernel.one_step(s, r, seed=jax.random.key(0)), start, results)


@gathers.on("BlackJAX")
def _():
    import blackjax

    grid = mesh(data=4)
    density = _local_density(grid)
    scales = jnp.ones(GROUPS + 1)
    nuts: Any = blackjax.nuts(lambda z: density(z["mu"], z["z"]), step_size=0.1, inverse_mass_matrix=scales)
    return _all_gathers(nuts.step, jax.random.key(0), nuts.init(_local_start(grid)))


resumed = case(
    "a transition from a saved state",
    "whether a sampler that was made anew, and not started, makes the transition that the first made (difference)",
    0.0,
    section="fails",
    cannot=NO_SAMPLER,
)


@resumed.on("ppleffects")
def _():
    target = ppl.target(_ppl_model)(Y)
    state = ppl.NUTS().init(target, {"mu": jnp.asarray(MOMENTS[0])}, jax.random.key(0), 100)
    draws = [target.constrain(ppl.NUTS().step(target, state)[0].position)["mu"] for _ in range(2)]
    return abs(draws[0] - draws[1])


@resumed.on("NumPyro")
def _():
    from numpyro.infer.hmc import hmc

    potential = lambda mu: -_log_density(mu, Y)  # noqa: E731
    init, step = hmc(potential, algo="NUTS")
    state = init(jnp.asarray(MOMENTS[0]), num_warmup=100, rng_key=jax.random.key(0))
    _, other = hmc(potential, algo="NUTS")
    return abs(step(state).z - other(state).z)


@resumed.on("TFP")
def _():
    from tensorflow_probability.substrates import jax as tfp

    make = lambda: tfp.mcmc.NoUTurnSampler(lambda mu: _log_density(mu, Y), step_size=jnp.float64(0.1))  # noqa: E731
    start, kernel = jnp.asarray(MOMENTS[0]), make()
    results = kernel.bootstrap_results(start)
    draws = [k.one_step(start, results, seed=jax.random.key(0))[0] for k in (kernel, make())]
    return abs(draws[0] - draws[1])


@resumed.on("BlackJAX")
def _():
    import blackjax

    def make() -> Any:
        return blackjax.nuts(lambda mu: _log_density(mu, Y), step_size=0.1, inverse_mass_matrix=jnp.ones(1))

    state = make().init(jnp.asarray(MOMENTS[0]))
    draws = [make().step(jax.random.key(0), state)[0].position for _ in range(2)]
    return abs(draws[0] - draws[1])
