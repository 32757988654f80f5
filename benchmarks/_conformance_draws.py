"""Draws: independent where they should be, the same where they should be."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _conformance_case import NO_SITES, case, mesh
from jax import lax
from jax.sharding import PartitionSpec as P
from scipy import stats

import ppleffects as ppl

NO_DRAWS = {"BlackJAX": "draws from posteriors only", "slub": NO_SITES["slub"], "TFP": NO_SITES["TFP"]}


def _seeded(model, key=0) -> Any:
    return numpyro.handlers.seed(model, jax.random.key(key))()


FOUR = {
    "vmap": lambda draw: jax.vmap(lambda _: draw())(jnp.zeros(4)),
    "scan": lambda draw: lax.scan(lambda c, _: (c, draw()), 0.0, None, length=4)[1],
    "shard_map": lambda draw: jax.shard_map(
        lambda x: draw() + x, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data")
    )(jnp.zeros(4)),
}


def _four(name, four):
    distinct = case(
        f"draws under {name}",
        f"the number of different values among the four draws of one site under `{name}`",
        4,
        cannot=dict(NO_DRAWS),
    )
    spec = P("data") if name == "shard_map" else None

    @distinct.on("ppleffects")
    def _():
        draw = lambda: ppl.sample("x", dist.Normal(0.0, 1.0), spec=spec)  # noqa: E731
        return np.unique(ppl.simulate(lambda: four(draw))(0).retval).size

    @distinct.on("NumPyro")
    def _():
        return np.unique(_seeded(lambda: four(lambda: numpyro.sample("x", dist.Normal(0.0, 1.0))))).size

    return distinct


_distinct = {_name: _four(_name, _flow) for _name, _flow in FOUR.items()}


@_distinct["shard_map"].on("TFP")
def _():
    from tensorflow_probability.substrates import jax as tfp

    normal = tfp.distributions.Normal(jnp.float64(0.0), 1.0)
    sharded = tfp.experimental.distribute.Sharded(normal, shard_axis_name="data")
    body = lambda x: sharded.sample(seed=jax.random.key(0)) + x  # noqa: E731
    draws = jax.shard_map(body, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data"))(jnp.zeros(4))
    return np.unique(draws).size


def _keys(name, wrap, **settings):
    same = case(
        f"keys under {name}",
        f"a draw inside of `{name}`, run eagerly: equal for the same key (1), and not for another (0)",
        (1, 0),
        cannot=NO_DRAWS,
        **settings,
    )

    @same.on("ppleffects")
    def _():
        model = wrap(lambda loc: ppl.sample("x", dist.Normal(loc, 1.0)))
        draws = [float(ppl.simulate(lambda: model(1.0))(key).retval) for key in (0, 0, 1)]
        return draws[0] == draws[1], draws[0] == draws[2]

    @same.on("NumPyro")
    def _():
        model = wrap(lambda loc: numpyro.sample("x", dist.Normal(loc, 1.0)))
        draws = [float(_seeded(lambda: model(1.0), key)) for key in (0, 0, 1)]
        return draws[0] == draws[1], draws[0] == draws[2]


def _custom_jvp(fn):
    wrapped = jax.custom_jvp(fn)
    wrapped.defjvp(lambda primals, tangents: (wrapped(*primals), tangents[0]))
    return wrapped


_keys("checkpoint", jax.checkpoint)
# A site in a function with its own derivative rule would be lost by a derivative, so that it may be refused.
_keys("custom_jvp", _custom_jvp, refusal=True)


varying = np.linspace(1.0, 2.0, 4)
ROWS = 500
CATALOGUE = {
    "Gamma": (lambda p: dist.Gamma(p, 1.0), stats.gamma(varying)),
    "Beta": (lambda p: dist.Beta(p, 2.0), stats.beta(varying, 2.0)),
    "StudentT": (lambda p: dist.StudentT(10.0, p, 1.0), stats.t(10.0, varying)),
    "Binomial": (lambda p: dist.Binomial(10, p / 4), stats.binom(10, varying / 4)),
    "VonMises": (lambda p: dist.VonMises(p / 4, 5.0), stats.vonmises(5.0, varying / 4)),
}


def _off(name, draws):
    """How many shards' means are off by more than five standard errors."""
    reference = CATALOGUE[name][1]
    draws = np.asarray(draws).reshape(4, ROWS)
    return int((np.abs(draws.mean(1) - reference.mean()) > 5 * reference.std() / np.sqrt(ROWS)).sum())


samplers = case(
    "samplers inside of shard_map",
    f"{', '.join(CATALOGUE)} with parameters that vary over the shards: the number of shards with a wrong mean",
    0,
    section="fails",
    timeout=300.0,
    cannot={"BlackJAX": NO_DRAWS["BlackJAX"], "slub": NO_SITES["slub"]},
)


def _on_shards(body):
    return jax.shard_map(body, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data"))(np.repeat(varying, ROWS))


@samplers.on("ppleffects")
def _():
    def model():
        def body(p):
            return {name: ppl.sample(name, make(p)) for name, (make, _) in CATALOGUE.items()}

        _on_shards(body)

    values = ppl.simulate(model)(3).values
    return sum(_off(name, values[name]) for name in CATALOGUE)


@samplers.on("NumPyro")
def _():  # its distributions, with a key for each shard
    def body(p):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(3), lax.axis_index("data")), len(CATALOGUE))
        return {name: make(p).sample(key) for key, (name, (make, _)) in zip(keys, CATALOGUE.items(), strict=True)}

    return sum(_off(name, draws) for name, draws in _on_shards(body).items())


@samplers.on("TFP")
def _():
    from tensorflow_probability.substrates import jax as tfp

    tfd = tfp.distributions
    makers = {
        "Gamma": lambda p: tfd.Gamma(p, jnp.float64(1.0)),
        "Beta": lambda p: tfd.Beta(p, jnp.float64(2.0)),
        "StudentT": lambda p: tfd.StudentT(jnp.float64(10.0), p, jnp.float64(1.0)),
        "Binomial": lambda p: tfd.Binomial(jnp.float64(10), probs=p / 4),
        "VonMises": lambda p: tfd.VonMises(p / 4, jnp.float64(5.0)),
    }

    def body(p):
        keys = jax.random.split(jax.random.fold_in(jax.random.key(3), lax.axis_index("data")), len(makers))
        return {name: make(p).sample(seed=key) for key, (name, make) in zip(keys, makers.items(), strict=True)}

    return sum(_off(name, draws) for name, draws in _on_shards(body).items())


added = case(
    "a site is added",
    "the change of a site's draw when another site is put before it",
    0.0,
    section="fails",
    cannot={key: NO_DRAWS[key] for key in ("BlackJAX", "slub")},
)


@added.on("ppleffects")
def _():
    def model(more):
        if more:
            ppl.sample("new", dist.Gamma(2.0))
        return ppl.sample("x", dist.Normal(0.0, 1.0))

    return abs(ppl.simulate(model)(0, True).retval - ppl.simulate(model)(0, False).retval)


@added.on("NumPyro")
def _():
    def model(more):
        if more:
            numpyro.sample("new", dist.Gamma(2.0))
        return numpyro.sample("x", dist.Normal(0.0, 1.0))

    return abs(_seeded(lambda: model(True)) - _seeded(lambda: model(False)))


@added.on("TFP")
def _():
    from tensorflow_probability.substrates import jax as tfp

    tfd = tfp.distributions

    def draw(more):
        def model():
            if more:
                yield tfd.JointDistributionCoroutine.Root(tfd.Gamma(2.0, 1.0, name="new"))
            yield tfd.JointDistributionCoroutine.Root(tfd.Normal(0.0, 1.0, name="x"))

        return tfd.JointDistributionCoroutine(model).sample(seed=jax.random.key(0)).x

    return abs(draw(True) - draw(False))


processes = case(
    "another process",
    "the difference of one draw between two processes (of other string hashes)",
    0.0,
    section="fails",
    cannot={key: NO_DRAWS[key] for key in ("BlackJAX", "slub")},
)


def one_draw(library):
    """Prints one draw of a site."""
    if library == "ppleffects":
        value = ppl.simulate(lambda: ppl.sample("x", dist.Normal(0.0, 1.0)))(0).retval
    elif library == "NumPyro":
        value = _seeded(lambda: numpyro.sample("x", dist.Normal(0.0, 1.0)))
    else:
        from tensorflow_probability.substrates import jax as tfp

        joint = tfp.distributions.JointDistributionNamed({"x": tfp.distributions.Normal(0.0, 1.0)})
        value = joint.sample(seed=jax.random.key(0))["x"]
    print(repr(float(value)))


def _between(library):
    code = f"import _conformance_draws; _conformance_draws.one_draw('{library}')"
    found = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-W", "ignore", "-c", code]
        run = subprocess.run(
            command, env=environment, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
        found.append(float(run.stdout.split()[-1]))
    return abs(found[0] - found[1])


for _library in ("ppleffects", "NumPyro", "TFP"):
    processes.on(_library)(lambda library=_library: _between(library))
