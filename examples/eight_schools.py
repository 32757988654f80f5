"""Eight schools, non-centred: a model, NUTS with four chains, an ArviZ summary."""

import arviz as az
import jax.numpy as jnp
import numpyro.distributions as dist

import ppleffects as ppl

effect = jnp.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
error = jnp.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def eight_schools(effect, error):
    """Each school's effect is drawn around a common mean and seen with a known standard error."""
    mu = ppl.sample("mu", dist.Normal(0.0, 5.0))
    tau = ppl.sample("tau", dist.HalfCauchy(5.0))
    z = ppl.sample("z", dist.Normal(0.0, 1.0).expand([8]), dims=("school",))
    theta = ppl.deterministic("theta", mu + tau * z, dims=("school",))
    ppl.observe("y", dist.Normal(theta, error), effect, dims=("school",))


trace = ppl.mcmc(eight_schools, ppl.NUTS(target_accept=0.95), coords={"school": list("ABCDEFGH")})(0, effect, error)
print(az.summary(trace, var_names=["mu", "tau", "theta"]))
