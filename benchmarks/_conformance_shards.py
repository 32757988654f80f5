"""Inside of shard_map: what counts once, what counts on each shard, and how values are joined."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _conformance_case import NO_SITES, case, mesh
from _conformance_slub import summing, term, total
from jax import lax
from jax.sharding import PartitionSpec as P
from numpyro.contrib import control_flow
from numpyro.infer.util import log_density as numpyro_log_density
from scipy.stats import norm

import ppleffects as ppl

MU = 0.5
Y = np.array([3.5, 2.0, 4.0, 5.5, 3.0, 2.5, 4.5, 3.0])
JOINT = norm.logpdf(MU) + norm.logpdf(Y, MU).sum()
SLOPE = -MU + (Y - MU).sum()
NO_FACTOR = {**{key: NO_SITES[key] for key in ("BlackJAX",)}, "TFP": "has no factors"}
NO_BLACKJAX = {"BlackJAX": NO_SITES["BlackJAX"]}
OWN_ONLY = {"NumPyro": "has one kind of model", **NO_SITES}


def tfp_joint(joint, part):
    """``(mu, y) -> (value, gradient)``, by a joint distribution of TFP inside of a shard_map.

    TFP's collectives have derivative rules that need ``check_vma=False``.
    """
    from tensorflow_probability.substrates import jax as tfp

    tfd = tfp.distributions

    def body(mu, y):
        def model():
            m = yield tfd.JointDistributionCoroutine.Root(tfd.Normal(jnp.float64(0.0), 1.0, name="mu"))
            yield part(tfd.Independent(tfd.Normal(m * jnp.ones(y.shape), 1.0), 1))

        return jax.value_and_grad(lambda mu: joint(model).log_prob(mu, y))(mu)

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.shard_map(body, mesh=mesh(data=4), **specs, check_vma=False)


def tfp_sharded(distribution):
    """A part of a joint distribution whose pieces lie on the shards."""
    from tensorflow_probability.substrates import jax as tfp

    return tfp.experimental.distribute.Sharded(distribution, shard_axis_name="data")


def sharded_model(y, **settings):
    """A mean, the same everywhere, and observations that lie on the shards."""
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))

    def body(mu, y):
        ppl.observe("y", dist.Normal(mu, 1.0), y, spec=settings.get("spec"))

    checked = settings.get("check_vma", True)
    specs = {"in_specs": (P(), P("data")), "out_specs": None}
    jax.shard_map(body, mesh=mesh(data=4), **specs, check_vma=checked)(mu, y)


def _ppl_gradient(**settings):
    density = lambda mu: ppl.log_density(lambda y: sharded_model(y, **settings))({"mu": mu}, Y)  # noqa: E731
    return jax.value_and_grad(density)(MU)


def _log_normal(y, mu):
    return jnp.sum(-0.5 * (y - mu) ** 2 - 0.5 * jnp.log(2 * jnp.pi))


mixed = case(
    "replicated and sharded sites",
    "value and gradient of a mean that is the same on all shards and observations that lie on them",
    (JOINT, SLOPE),
    cannot=NO_BLACKJAX,
)
mixed.on("ppleffects")(_ppl_gradient)


@mixed.on("NumPyro")
def _():  # the likelihood by hand, in a factor
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        body = lambda mu, y: lax.psum(_log_normal(y, mu), "data")  # noqa: E731
        likelihood = jax.shard_map(body, mesh=mesh(data=4), in_specs=(P(), P("data")), out_specs=P())
        numpyro.factor("y", likelihood(mu, y))

    return jax.value_and_grad(lambda mu: numpyro_log_density(model, (Y,), {}, {"mu": mu})[0])(MU)


@mixed.on("TFP")
def _():
    from tensorflow_probability.substrates import jax as tfp

    return tfp_joint(tfp.experimental.distribute.JointDistributionCoroutine, tfp_sharded)(MU, Y)


@mixed.on("slub")
def _():
    def program(mu):
        term(_log_normal(mu, 0.0))
        body = lambda mu, y: term(_log_normal(y, mu))  # noqa: E731
        jax.shard_map(body, mesh=mesh(data=4), in_specs=(P(), P("data")), out_specs=None)(mu, Y)

    return jax.value_and_grad(lambda mu: total(lambda: program(mu)))(MU)


plain = case(
    "a sharded part in a plain joint distribution",
    "the same, where the joint distribution was not told that it holds a sharded part",
    (JOINT, SLOPE),
    cannot=OWN_ONLY,
)
plain.on("ppleffects")(_ppl_gradient)


@plain.on("TFP")
def _():
    from tensorflow_probability.substrates import jax as tfp

    return tfp_joint(tfp.distributions.JointDistributionCoroutine, tfp_sharded)(MU, Y)


unchecked = case(
    "check_vma=False",
    "the same inside of shard_map(check_vma=False), where nothing tells what varies: right, or refused",
    (JOINT, SLOPE),
    refusal=True,
    cannot={"slub": "leaves the gradient to JAX"},
)


@unchecked.on("ppleffects")
def _():
    return _ppl_gradient(check_vma=False)


def _inside(gradient):
    """Value and gradient as taken inside of the shard_map, for libraries that run there."""
    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    return jax.shard_map(gradient, mesh=mesh(data=4), **specs, check_vma=False)(jnp.asarray(MU), Y)


@unchecked.on("NumPyro")
def _():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        numpyro.factor("y", lax.psum(_log_normal(y, mu), "data"))

    return _inside(lambda mu, y: jax.value_and_grad(lambda mu: numpyro_log_density(model, (y,), {}, {"mu": mu})[0])(mu))


@unchecked.on("BlackJAX")
def _():  # what its samplers take: value and gradient of the density
    import blackjax

    def gradient(mu, y):
        density = lambda mu: _log_normal(mu, 0.0) + lax.psum(_log_normal(y, mu), "data")  # noqa: E731
        state = blackjax.nuts.init(mu, density)
        return state.logdensity, state.logdensity_grad

    return _inside(gradient)


@unchecked.on("TFP")
def _():
    from tensorflow_probability.substrates import jax as tfp

    return tfp_joint(tfp.experimental.distribute.JointDistributionCoroutine, tfp_sharded)(MU, Y)


told = case(
    "check_vma=False, told",
    "the same, where the site says that its pieces lie on the shards",
    (JOINT, SLOPE),
    cannot={**OWN_ONLY, "NumPyro": "has nothing that says so"},
)
told.on("ppleffects")(lambda: _ppl_gradient(check_vma=False, spec=P("data")))
told.on("TFP")(unchecked.programs["TFP"])


outside = case(
    "10 + 4",
    "10 outside of a shard_map, 1 on each of four shards inside",
    14.0,
    cannot=NO_FACTOR,
)
apart = case(
    "10 + 4 + 100",
    "10 outside of a shard_map; inside, 1 on each of four shards, and 100, the same on all, which counts once",
    114.0,
    cannot=NO_FACTOR,
)


def _terms(add, same):
    def body(x):
        add("varies", x.sum())
        if same:
            add("same", same)

    add("outside", 10.0)
    jax.shard_map(body, mesh=mesh(data=4), in_specs=P("data"), out_specs=None)(jnp.ones(4))


for _case, _same in ((outside, 0.0), (apart, 100.0)):
    _case.on("ppleffects")(lambda same=_same: ppl.log_density(lambda: _terms(ppl.factor, same))({}))
    _case.on("NumPyro")(lambda same=_same: numpyro_log_density(lambda: _terms(numpyro.factor, same), (), {}, {})[0])


@outside.on("slub")
def _():  # reduce_ctx=psum, of the context that entered
    return total(lambda: _terms(lambda _, amount: term(amount), 0.0), interpreter=summing())


@apart.on("slub")
def _():  # the body's context apart from what was before
    return total(lambda: _terms(lambda _, amount: term(amount), 100.0), interpreter=summing(apart=True))


def _gathered(to, spec):
    return case(
        f"observe an all_gather, {spec}",
        f"an observation of all rows, gathered ({to}) inside of the shard_map, counts once: value and gradient",
        (norm.logpdf(Y, MU).sum(), (Y - MU).sum()),
        section="fails",
        cannot=NO_BLACKJAX,
    )


gathered = _gathered("typed as varying, though equal", "said equal")
invarying = _gathered("typed as equal", "typed equal")


def _gather_model(observe, **options):
    def model(mu):
        def body(mu, y):
            observe(mu, lax.all_gather(y, "data", tiled=True, **options))

        jax.shard_map(body, mesh=mesh(data=4), in_specs=(P(), P("data")), out_specs=None)(mu, Y)

    return model


@gathered.on("ppleffects")
def _():
    observe = lambda mu, y: ppl.observe("y", dist.Normal(mu, 1.0), y, spec=P())  # noqa: E731
    return jax.value_and_grad(lambda mu: ppl.log_density(_gather_model(observe))({}, mu))(MU)


@invarying.on("ppleffects")
def _():
    observe = lambda mu, y: ppl.observe("y", dist.Normal(mu, 1.0), y)  # noqa: E731
    return jax.value_and_grad(lambda mu: ppl.log_density(_gather_model(observe, to="invarying"))({}, mu))(MU)


for _case, _options in ((gathered, {}), (invarying, {"to": "invarying"})):

    @_case.on("NumPyro")
    def _(options=_options):
        observe = lambda mu, y: numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)  # noqa: E731
        model = _gather_model(observe, **options)
        return jax.value_and_grad(lambda mu: numpyro_log_density(model, (mu,), {}, {})[0])(MU)

    @_case.on("slub")
    def _(options=_options):
        model = _gather_model(lambda mu, y: term(_log_normal(y, mu)), **options)
        return jax.value_and_grad(lambda mu: total(lambda: model(mu)))(MU)

    @_case.on("TFP")
    def _():
        from tensorflow_probability.substrates import jax as tfp

        def body(mu, y):
            y = lax.all_gather(y, "data", tiled=True)

            def model():
                part = tfp.distributions.Independent(tfp.distributions.Normal(mu * jnp.ones(y.shape), 1.0), 1)
                yield tfp.distributions.JointDistributionCoroutine.Root(part)

            return tfp.experimental.distribute.JointDistributionCoroutine(model).log_prob(y)

        specs = {"in_specs": (P(), P("data")), "out_specs": P()}
        gradient = jax.value_and_grad(body)
        return jax.shard_map(gradient, mesh=mesh(data=4), **specs, check_vma=False)(jnp.asarray(MU), Y)


joined = case(
    "vmap(shard_map(sample))",
    "the largest difference of a site's recorded value from what the program returns, in lanes of shards",
    0.0,
    section="fails",
    cannot={**NO_SITES, "TFP": "joins no values"},
)


def _lanes_of_shards(sample):
    body = lambda x: sample("x", dist.Normal(x, 1.0))  # noqa: E731
    return jax.vmap(jax.shard_map(body, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data")))(jnp.ones((2, 8)))


@joined.on("ppleffects")
def _():
    trace = ppl.simulate(lambda: _lanes_of_shards(ppl.sample))(0)
    return jnp.abs(trace.values["x"] - trace.retval).max()


@joined.on("NumPyro")
def _():
    run = numpyro.handlers.trace(numpyro.handlers.seed(lambda: _lanes_of_shards(numpyro.sample), 0))
    returned = run()
    return jnp.abs(run.trace["x"]["value"] - returned).max()


events = case(
    "events on shards",
    "a simplex of 3 on each of four shards is recorded as four simplices: shape, and the sum of each",
    (4, 3, 1.0, 1.0, 1.0, 1.0),
    section="fails",
    cannot=joined.cannot,
)


def _simplices(sample):
    body = lambda a: sample("x", dist.Dirichlet(jnp.ones(3) * a[0]))  # noqa: E731
    return jax.shard_map(body, mesh=mesh(data=4), in_specs=P("data"), out_specs=P("data"))(jnp.arange(1.0, 5.0))


@events.on("ppleffects")
def _():
    value = ppl.simulate(lambda: _simplices(ppl.sample))(0).values["x"]
    return (*value.shape, *value.sum(-1))


@events.on("NumPyro")
def _():
    run = numpyro.handlers.trace(numpyro.handlers.seed(lambda: _simplices(numpyro.sample), 0))
    run()
    value = run.trace["x"]["value"]
    return (*value.shape, *value.sum(-1))


SQUARE = np.arange(8.0).reshape(4, 2) / 4
inner = case(
    "nested shard_maps, closed over",
    "a shard_map over columns in a shard_map over rows, whose body closes over a traced value of the outer one",
    norm.logpdf(SQUARE, MU * (1 + np.repeat([0, 1], 2))[:, None]).sum(),
    section="fails",
    cannot=NO_FACTOR | {"TFP": NO_SITES["TFP"]},
)


def _nested_shards(observe):
    def rows(x):
        shift = MU * (1 + lax.axis_index("rows"))

        def columns(x):
            observe(shift, x)

        jax.shard_map(columns, in_specs=P(None, "columns"), out_specs=None, axis_names={"columns"})(x)

    grid = mesh(rows=2, columns=2)
    jax.shard_map(rows, mesh=grid, in_specs=P("rows"), out_specs=None, axis_names={"rows"})(SQUARE)


@inner.on("ppleffects")
def _():
    observe = lambda shift, x: ppl.observe("x", dist.Normal(0.0, 1.0), x - shift)  # noqa: E731
    return jax.jit(lambda: ppl.log_density(lambda: _nested_shards(observe))({}))()


@inner.on("NumPyro")
def _():
    observe = lambda shift, x: numpyro.sample("x", dist.Normal(0.0, 1.0), obs=x - shift)  # noqa: E731
    return numpyro_log_density(lambda: _nested_shards(observe), (), {}, {})[0]


@inner.on("slub")
def _():
    return jax.jit(lambda: total(lambda: _nested_shards(lambda shift, x: term(_log_normal(x, shift)))))()


chains = case(
    "a caller's shard_map around a scan",
    "the density of a scan, called inside of the caller's own shard_map over chains (check_vma=True): one per chain",
    [norm.logpdf(Y, c).sum() for c in range(4)],
    section="fails",
    cannot=NO_BLACKJAX | {"TFP": NO_SITES["TFP"]},
)


def _per_chain(density):
    body = lambda c: density(c[0])[None]  # noqa: E731
    return jax.shard_map(body, mesh=mesh(chains=4), in_specs=P("chains"), out_specs=P("chains"))(jnp.arange(4.0))


@chains.on("ppleffects")
def _():
    def model(mu):
        lax.scan(lambda c, y: (c, ppl.observe("y", dist.Normal(mu, 1.0), y)), 0.0, Y)

    return _per_chain(lambda mu: ppl.log_density(model)({}, mu))


@chains.on("NumPyro")
def _():  # with NumPyro's own scan
    def model(mu):
        control_flow.scan(lambda c, y: (c, numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)), 0.0, jnp.asarray(Y))

    return _per_chain(lambda mu: numpyro_log_density(model, (mu,), {}, {})[0])


@chains.on("slub")
def _():
    def program(mu):
        def step(carry, y):
            term(_log_normal(y, mu))
            return carry, None

        lax.scan(step, 0.0, Y)

    return _per_chain(lambda mu: total(lambda: program(mu)))
