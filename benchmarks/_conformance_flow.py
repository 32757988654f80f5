"""Sites under JAX's own control flow: jit, vmap, scan, while, cond, checkpoint, nested and cached."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _conformance_case import NO_SITES, case, mesh
from _conformance_slub import term, total
from jax import lax
from jax.sharding import PartitionSpec as P
from numpyro.contrib import control_flow
from numpyro.infer.util import initialize_model
from numpyro.infer.util import log_density as numpyro_log_density
from scipy.stats import norm

import ppleffects as ppl

Z = np.array([0.1, -0.4, 1.2, 0.7])
MEAN = 0.3
SCALES = np.array([1.0, 2.0, 0.5, 1.5])
RIGHT = norm.logpdf(Z, MEAN, SCALES).sum()
WITHOUT_SLUB = {key: NO_SITES[key] for key in ("TFP", "BlackJAX")}


def _while(site):
    """A while loop that observes Z[i]."""

    def body(i):
        site(jnp.asarray(SCALES)[i], jnp.asarray(Z)[i])
        return i + 1

    return lax.while_loop(lambda i: i < 4, body, 0)


# Each takes site(scale, value), and calls it where its name says, for four values in all.
FLOWS = {
    "jit": lambda site: jax.jit(site)(SCALES, Z),
    "vmap": lambda site: jax.vmap(site)(SCALES, Z),
    "scan": lambda site: lax.scan(lambda c, x: (c, site(*x)), 0.0, (SCALES, Z)),
    "while": _while,
    "cond": lambda site: lax.cond(jnp.asarray(MEAN) > 0, site, lambda s, z: 0 * z, SCALES, Z),
    "checkpoint": lambda site: jax.checkpoint(site)(SCALES, Z),
    "shard_map": lambda site: jax.shard_map(
        site, mesh=mesh(data=4), in_specs=(P("data"), P("data")), out_specs=P("data")
    )(SCALES, Z),
}


def _log_normal(scale, z):
    return jnp.sum(-0.5 * ((z - MEAN) / scale) ** 2 - jnp.log(scale) - 0.5 * jnp.log(2 * jnp.pi))


def _flow_cases(name, flow):
    observed = case(
        f"observe under {name}",
        f"four observations inside of `{name}` count, each once",
        RIGHT,
        section="fails",
        cannot=WITHOUT_SLUB,
    )

    @observed.on("ppleffects")
    def _():
        def model():
            flow(lambda s, z: ppl.observe("y", dist.Normal(MEAN, s), z))

        return ppl.log_density(model)({})

    @observed.on("NumPyro")
    def _():
        def model():
            flow(lambda s, z: numpyro.sample("y", dist.Normal(MEAN, s), obs=z))

        return numpyro_log_density(model, (), {}, {})[0]

    @observed.on("slub")
    def _():
        def program():
            def site(s, z):
                term(_log_normal(s, z))
                return z

            flow(site)

        return total(program)

    if name == "while":
        return
    latent = case(
        f"latent under {name}",
        f"the density of four latents inside of `{name}`",
        RIGHT,
        section="fails",
        cannot=NO_SITES,
    )

    @latent.on("ppleffects")
    def _():
        def model():
            flow(lambda s, _: ppl.sample("x", dist.Normal(MEAN, s)))

        return ppl.log_density(model)({"x": Z})

    @latent.on("NumPyro")
    def _():
        def model():
            flow(lambda s, _: numpyro.sample("x", dist.Normal(MEAN, s)))

        return numpyro_log_density(model, (), {}, {"x": jnp.asarray(Z)})[0]


for _name, _flow in FLOWS.items():
    _flow_cases(_name, _flow)


cached = case(
    "jit cache hit",
    "a latent in a jitted function is there when the function is found in JAX's cache",
    norm.logpdf(0.5),
    cannot=NO_SITES,
)


@cached.on("ppleffects")
def _():
    @jax.jit
    def effect():
        return ppl.sample("x", dist.Normal(0.0, 1.0))

    ppl.simulate(effect)(0)
    return ppl.log_density(lambda: 2 * effect())({"x": 0.5})


@cached.on("NumPyro")
def _():
    @jax.jit
    def effect():
        return numpyro.sample("x", dist.Normal(0.0, 1.0))

    numpyro.handlers.seed(effect, 0)()
    return numpyro_log_density(lambda: 2 * effect(), (), {}, {"x": 0.5})[0]


OUTER, INNER = np.array([0.5, -0.3, 1.0]), np.array([[0.2, 0.9], [1.1, -0.8], [0.3, -0.6]])
nested = case(
    "nested scans",
    "a scan of 2 latents inside of a scan of 3: the density that NUTS sees",
    norm.logpdf(OUTER).sum() + norm.logpdf(INNER, OUTER[:, None], 1.0).sum(),
    cannot=NO_SITES,
)


@nested.on("ppleffects")
def _():
    def outer(carry, _):
        a = ppl.sample("a", dist.Normal(0.0, 1.0))
        lax.scan(lambda c, _: (c, ppl.sample("b", dist.Normal(a, 1.0))), 0.0, None, length=2)
        return carry, None

    target = ppl.target(lambda: lax.scan(outer, 0.0, None, length=3))()
    return target.log_density({"a": jnp.asarray(OUTER), "b": jnp.asarray(INNER)})


@nested.on("NumPyro")
def _():  # with NumPyro's own scan
    def outer(carry, _):
        a = numpyro.sample("a", dist.Normal(0.0, 1.0))

        def inner(c, _):
            return c, numpyro.sample("b", dist.Normal(a, 1.0))

        control_flow.scan(inner, 0.0, None, length=2)
        return carry, None

    def model():
        control_flow.scan(outer, 0.0, None, length=3)

    potential: Any = initialize_model(jax.random.key(0), model).potential_fn
    return -potential({"a": jnp.asarray(OUTER), "b": jnp.asarray(INNER)})


own_scan = case(
    "do around a scan",
    "latents of a scan set by `do`: only what was observed has a density, given the values that were set",
    norm.logpdf([0.5, 0.5, 0.5], [1.0, 2.0, 3.0]).sum(),
    cannot={**NO_SITES, "TFP": "has no `do`"},
)


@own_scan.on("ppleffects")
def _():
    def step(carry, _):
        x = ppl.sample("x", dist.Normal(0.0, 1.0))
        ppl.observe("y", dist.Normal(x, 1.0), 0.5)
        return carry, None

    set_to = ppl.do(lambda: lax.scan(step, 0.0, None, length=3), {"x": jnp.array([1.0, 2.0, 3.0])})
    return ppl.log_density(set_to)({})


@own_scan.on("NumPyro")
def _():  # with NumPyro's own scan
    def step(carry, _):
        x = numpyro.sample("x", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Normal(x, 1.0), obs=0.5)
        return carry, None

    def model():
        control_flow.scan(step, 0.0, None, length=3)

    set_to = numpyro.handlers.do(model, {"x": jnp.array([1.0, 2.0, 3.0])})
    return numpyro_log_density(numpyro.handlers.seed(set_to, 0), (), {}, {})[0]


lanes = case(
    "vmapped cond",
    "factors 1 and 10 in the branches of a cond whose predicates are 0, 1, 1 in the lanes of a vmap: 10 + 1 + 1",
    12.0,
    section="fails",
    cannot=WITHOUT_SLUB,
)


def _branches(factor):
    def lane(flag):
        lax.cond(flag > 0, lambda: factor(1.0), lambda: factor(10.0))

    jax.vmap(lane)(jnp.array([0, 1, 1]))


@lanes.on("ppleffects")
def _():
    return ppl.log_density(lambda: _branches(lambda amount: ppl.factor("f", amount)))({})


@lanes.on("NumPyro")
def _():
    return numpyro_log_density(lambda: _branches(lambda amount: numpyro.factor("f", amount)), (), {}, {})[0]


@lanes.on("slub")
def _():
    return total(lambda: _branches(term))


shared = case(
    "one name in both branches",
    "a latent of one name in both branches of a vmapped cond is one site, with each lane's own density",
    norm.logpdf(Z, 0.0, [1.0, 3.0, 3.0, 1.0]).sum(),
    section="fails",
    cannot=NO_SITES,
)


def _shared(sample):
    def lane(flag):
        return lax.cond(flag, lambda: sample("x", dist.Normal(0.0, 3.0)), lambda: sample("x", dist.Normal(0.0, 1.0)))

    return jax.vmap(lane)(jnp.array([False, True, True, False]))


@shared.on("ppleffects")
def _():
    return ppl.log_density(lambda: _shared(ppl.sample))({"x": Z})


@shared.on("NumPyro")
def _():
    return numpyro_log_density(lambda: _shared(numpyro.sample), (), {}, {"x": jnp.asarray(Z)})[0]


MATRIX = np.arange(6.0).reshape(2, 3) / 10
layouts = case(
    "vmap layouts",
    "in_axes=1, operands of mixed ranks, nested: shapes of the values, then the density of them all at 0.5",
    (3, 2, 2, 3, 3, norm.logpdf(0.5, MATRIX).sum() * 3),
    cannot=NO_SITES,
)


def _layouts(sample):
    x = jnp.asarray(MATRIX)
    jax.vmap(lambda column: sample("axis1", dist.Normal(column, 1.0)), in_axes=1)(x)
    jax.vmap(lambda row, scale: sample("ranks", dist.Normal(row, scale)))(x, jnp.ones(2))
    jax.vmap(lambda row: jax.vmap(lambda m: sample("nested", dist.Normal(m, 1.0)))(row))(x)


@layouts.on("ppleffects")
def _():
    model = lambda: _layouts(ppl.sample)  # noqa: E731
    shapes = {name: site.shape for name, site in ppl.sites(model)().items()}
    density = ppl.log_density(model)({name: np.full(shape, 0.5) for name, shape in shapes.items()})
    return (*shapes["axis1"], *shapes["nested"], shapes["ranks"][1], density)


@layouts.on("NumPyro")
def _():
    sites = numpyro.handlers.trace(numpyro.handlers.seed(lambda: _layouts(numpyro.sample), 0)).get_trace()
    shapes = {name: jnp.shape(site["value"]) for name, site in sites.items()}
    values = {name: jnp.full(shape, 0.5) for name, shape in shapes.items()}
    density = numpyro_log_density(lambda: _layouts(numpyro.sample), (), {}, values)[0]
    return (*shapes["axis1"], *shapes["nested"], shapes["ranks"][1], density)


unbatched = case(
    "unbatched site in a vmap",
    "a vmap over 4 lanes of an observation of which nothing is batched: it counts in each lane",
    4 * norm.logpdf(0.5),
    section="fails",
    cannot={**NO_SITES, "slub": "leaves it to the effect's own batching rule"},
)


@unbatched.on("ppleffects")
def _():
    def lane(_):
        ppl.observe("y", dist.Normal(0.0, 1.0), 0.5)

    return ppl.log_density(lambda: jax.vmap(lane)(jnp.zeros(4)))({})


@unbatched.on("NumPyro")
def _():
    def lane(_):
        numpyro.sample("y", dist.Normal(0.0, 1.0), obs=0.5)

    return numpyro_log_density(lambda: jax.vmap(lane)(jnp.zeros(4)), (), {}, {})[0]
