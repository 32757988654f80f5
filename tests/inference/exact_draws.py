"""Models and densities whose parameters and data are drawn exactly, by plain `jax.random`; and statistics of draws."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax.sharding import PartitionSpec as P
from scipy.stats import gumbel_r, norm

import ppleffects as ppl
from ppleffects.inference.chain import Rows


class Case(NamedTuple):
    """A model, and by hand what it says.

    Attributes:
        model: the model of a mesh, or of None: a function of the data.
        prior: draws the parameters.
        data: draws the data given parameters.
        scalars: numbers with light tails that tell the parameters.
        summaries: numbers that tell what matters of the data.
        step_size: of a sampler that accepts often, though not always.
    """

    model: Callable[[Any], Callable]
    prior: Callable[[Any], dict]
    data: Callable[[Any, dict], dict]
    scalars: Callable[[dict], list]
    summaries: Callable[[dict], list]
    step_size: float


def over(mesh, body, num_shared):
    """A body of shared parameters and data, its data on the axis `data` of a mesh where there is one."""
    if mesh is None:
        return body
    return jax.shard_map(body, mesh=mesh, in_specs=(*[P()] * num_shared, P("data")), out_specs=None)


def local(mesh):
    return None if mesh is None else P("data")


# --- mean and scale of a normal


def normal(mesh):
    def rows(mean, scale, data):
        ppl.observe("y", dist.Normal(mean, scale), data["y"])

    def model(data):
        mean = ppl.sample("mean", dist.Normal(0.5, 1.0))
        scale = ppl.sample("scale", dist.Gamma(3.0, 2.0))
        over(mesh, rows, 2)(mean, scale, data)

    return model


def normal_prior(key):
    a, b = jax.random.split(key)
    return {"mean": 0.5 + jax.random.normal(a), "scale": jax.random.gamma(b, 3.0) / 2.0}


def normal_data(key, theta):
    return {"y": theta["mean"] + theta["scale"] * jax.random.normal(key, (8,))}


def normal_scalars(theta):
    return [theta["mean"], jnp.log(theta["scale"])]


def normal_summaries(data):
    return [data["y"].mean(), jnp.log(data["y"].std())]


# --- groups, not centred


def groups(mesh):
    def rows(mu, tau, data):
        z = ppl.sample("z", dist.Normal(0.0, 1.0).expand([data["y"].shape[0]]), spec=local(mesh))
        ppl.observe("y", dist.Normal((mu + tau * z)[:, None], 1.0), data["y"])

    def model(data):
        mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
        tau = ppl.sample("tau", dist.HalfNormal(1.5))
        over(mesh, rows, 2)(mu, tau, data)

    return model


def groups_prior(key):
    a, b, c = jax.random.split(key, 3)
    return {
        "mu": jax.random.normal(a),
        "tau": 1.5 * jnp.abs(jax.random.normal(b)),
        "z": jax.random.normal(c, (4,)),
    }


def groups_data(key, theta):
    return {"y": (theta["mu"] + theta["tau"] * theta["z"])[:, None] + jax.random.normal(key, (4, 2))}


def groups_scalars(theta):
    return [theta["mu"], jnp.log(theta["tau"]), *theta["z"]]


def groups_summaries(data):
    return [data["y"].mean(), data["y"][0, 0]]


# --- gamma-Poisson


def counts(mesh):
    def rows(inverse_scale, data):
        prior = dist.Gamma(2.0, inverse_scale).expand([data["y"].shape[0]])
        rate = ppl.sample("rate", prior, spec=local(mesh))
        ppl.observe("y", dist.Poisson(rate), data["y"])

    def model(data):
        over(mesh, rows, 1)(ppl.sample("inverse_scale", dist.Gamma(3.0, 4.0)), data)

    return model


def counts_prior(key):
    a, b = jax.random.split(key)
    inverse_scale = jax.random.gamma(a, 3.0) / 4.0
    return {"inverse_scale": inverse_scale, "rate": jax.random.gamma(b, 2.0, (4,)) / inverse_scale}


def counts_data(key, theta):
    return {"y": jax.random.poisson(key, theta["rate"])}


def counts_scalars(theta):
    return [jnp.log(theta["inverse_scale"]), *jnp.log(theta["rate"])]


def counts_summaries(data):
    return [jnp.log1p(data["y"].mean()), jnp.log1p(1.0 * data["y"][0])]


# --- a simplex and an interval


def shares(mesh):
    def rows(share, hit, data):
        ppl.observe("counts", dist.Multinomial(3, probs=share[None]), data["counts"])
        ppl.observe("hits", dist.Binomial(5, probs=hit * share[0]), data["hits"])

    def model(data):
        share = ppl.sample("share", dist.Dirichlet(jnp.array([1.5, 1.0, 2.5])))
        hit = ppl.sample("hit", dist.Uniform(0.2, 0.9))
        over(mesh, rows, 2)(share, hit, data)

    return model


def shares_prior(key):
    a, b = jax.random.split(key)
    return {
        "share": jax.random.dirichlet(a, jnp.array([1.5, 1.0, 2.5])),
        "hit": jax.random.uniform(b, minval=0.2, maxval=0.9),
    }


def shares_data(key, theta):
    a, b = jax.random.split(key)
    kinds = jax.random.categorical(a, jnp.log(theta["share"]), shape=(4, 3))
    hits = jax.random.uniform(b, (4, 5)) < theta["hit"] * theta["share"][0]
    return {"counts": jax.nn.one_hot(kinds, 3, dtype=int).sum(1), "hits": hits.sum(1)}


def shares_scalars(theta):
    return [*theta["share"], theta["hit"]]


def shares_summaries(data):
    return [data["counts"][:, 0].mean(), data["counts"][:, 1].mean(), data["hits"].mean()]


CASES = {
    "normal": Case(normal, normal_prior, normal_data, normal_scalars, normal_summaries, 0.27),
    "groups": Case(groups, groups_prior, groups_data, groups_scalars, groups_summaries, 0.25),
    "counts": Case(counts, counts_prior, counts_data, counts_scalars, counts_summaries, 0.32),
    "shares": Case(shares, shares_prior, shares_data, shares_scalars, shares_summaries, 0.6),
}


# --- densities of known quantiles, without data


class Density(NamedTuple):
    """An asymmetric density as a model without data.

    Attributes:
        model: the model.
        draw: draws from it.
        uniforms: maps arrays of draws to values that are independent and uniform in (0, 1).
        step_size: of a sampler that accepts often, though not always.
    """

    model: Callable[[], None]
    draw: Callable[[Any], dict]
    uniforms: Callable[[dict], list]
    step_size: float


def gumbel():
    ppl.sample("x", dist.Gumbel(0.0, 1.0))


def gumbel_draw(key):
    return {"x": jax.random.gumbel(key)}


def gumbel_uniforms(values):
    return [gumbel_r.cdf(values["x"])]


def banana():
    x = ppl.sample("x", dist.Normal(0.0, 1.0))
    ppl.sample("y", dist.Normal(0.6 * x**2, 0.7))


def banana_draw(key):
    x, e = jax.random.normal(key, (2,))
    return {"x": x, "y": 0.6 * x**2 + 0.7 * e}


def banana_uniforms(values):
    return [norm.cdf(values["x"]), norm.cdf((values["y"] - 0.6 * values["x"] ** 2) / 0.7)]


DENSITIES = {
    "gumbel": Density(gumbel, gumbel_draw, gumbel_uniforms, 1.3),
    "banana": Density(banana, banana_draw, banana_uniforms, 0.6),
}


# --- transitions and statistics


def moved(kernel, target, u, key, count):
    """The positions after each of so many transitions, and their mean acceptance rate."""
    machine = kernel.machine(target, 0, drawn=False)
    starts = jax.tree.map(lambda x: x[None], u)
    with jax.ensure_compile_time_eval():
        metric = kernel.first_metric(machine)
    chain = machine.init(target, starts, key, metric)
    chains = jax.tree.map(lambda x: x[None], chain)
    positions = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), chains.path.point.position)
    rows = Rows(positions, jnp.zeros((count, 1, len(machine.stats))))
    _, rows, _, _ = machine.run(target, chains, rows, jnp.int32(count), jnp.int32(2**30))
    positions, stats = jax.tree.map(lambda x: x[:, 0], (rows.positions, rows.stats))
    acceptance = stats[:, list(machine.stats).index("acceptance_rate")]
    return jax.vmap(machine.coordinates.unpack)(positions), acceptance.mean()


def replicates(one, seed, number, batch=1000):
    """What a function of a key returns for so many keys, on the host."""
    keys = jax.random.split(jax.random.key(seed), number)
    return jax.device_get(jax.jit(lambda keys: jax.lax.map(one, keys, batch_size=batch))(keys))


def statistics(x, edges):
    """Moments, products and shares below edges of scalars ``(replicate, scalar)``; ``(replicate, function)``."""
    pairs = [x[:, i] * x[:, j] for i, j in itertools.combinations_with_replacement(range(x.shape[1]), 2)]
    below = [(x < edge).astype(float) for edge in edges]
    return np.concatenate([x, np.stack(pairs, axis=1), np.sin(2 * x), *below], axis=1)


def z_scores(differences):
    """Means of independent replicates in standard errors; 0 where all differences are."""
    errors = differences.std(0) / np.sqrt(differences.shape[0])
    return differences.mean(0) / np.where(errors > 0, errors, 1.0)
