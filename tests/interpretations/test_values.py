"""Values given to a model name every latent and nothing else; shapes are exact, and no cast loses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

import ppleffects as ppl
from ppleffects.errors import DTypeError, ShapeError, ValuesError
from ppleffects.interpretations.program import bind_arguments


def model(y):
    mu = ppl.sample("mu", dist.Normal(0.0, 1.0))
    ppl.sample("sigma", dist.HalfNormal(jnp.ones(3)))
    ppl.sample("k", dist.Poisson(3.0))
    ppl.deterministic("double", 2 * mu)
    ppl.factor("penalty", mu)
    ppl.observe("y", dist.Normal(mu, 1.0), y)


GOOD = {"mu": 0.5, "sigma": np.ones(3), "k": 2}
Y = jnp.zeros(2)


def without(name):
    return {k: v for k, v in GOOD.items() if k != name}


CASES = {
    "missing": (without("sigma"), ValuesError, r"site 'sigma' at .*: no value is given(.|\n)*expected(.|\n)*found"),
    "unknown": ({**GOOD, "nu": 1.0}, ValuesError, r"site 'nu'.*no latent of this name(.|\n)*expected"),
    "misspelt": ({**without("sigma"), "sigam": np.ones(3)}, ValuesError, r"site 'sigam'(.|\n)*did you mean 'sigma'"),
    "observed": ({**GOOD, "y": Y}, ValuesError, r"site 'y' at (.|\n)*condition"),
    "deterministic": ({**GOOD, "double": 1.0}, ValuesError, r"site 'double' at .*deterministic"),
    "factor": ({**GOOD, "penalty": 1.0}, ValuesError, r"site 'penalty' at .*factor"),
    "scalar for a vector": ({**GOOD, "sigma": 1.0}, ShapeError, r"site 'sigma' at (.|\n)*\(3,\)(.|\n)*found: \(\)"),
    "one for three": ({**GOOD, "sigma": np.ones(1)}, ShapeError, r"site 'sigma' at (.|\n)*found: \(1,\)"),
    "vector for a scalar": ({**GOOD, "mu": np.ones(1)}, ShapeError, r"site 'mu' at (.|\n)*found: \(1,\)"),
    "float for an integer": ({**GOOD, "k": 2.5}, DTypeError, r"site 'k' at (.|\n)*int(32|64)(.|\n)*float(32|64)"),
    "complex for a float": ({**GOOD, "mu": 1j}, DTypeError, r"site 'mu' at (.|\n)*float(32|64)(.|\n)*complex"),
}


@pytest.mark.parametrize("interpret", [ppl.log_density, ppl.evaluate])
@pytest.mark.parametrize("case", CASES)
def test_wrong_values(case, interpret):
    values, error, message = CASES[case]
    with pytest.raises(error, match=message):
        interpret(model)(values, Y)
    with pytest.raises(error, match=message):
        jax.jit(lambda v: interpret(model)(v, Y))(values)


def test_good_values_of_many_kinds():
    expected = ppl.log_density(model)(GOOD, Y)
    kinds = [
        {"mu": np.float64(0.5), "sigma": [1.0, 1.0, 1.0], "k": np.int32(2)},
        {"mu": jnp.array(0.5), "sigma": jnp.ones(3), "k": jnp.array(2)},
        {"mu": np.array(0.5, np.float32), "sigma": np.ones(3, int), "k": True + 1},
    ]
    for values in kinds:
        np.testing.assert_allclose(ppl.log_density(model)(values, Y), expected)


def test_a_value_in_a_loop_says_where():
    def looped():
        jax.lax.scan(lambda c, _: (c, ppl.sample("x", dist.Normal(0.0, 1.0))), 0.0, length=4)

    with pytest.raises(ShapeError, match=r"site 'x' at (.|\n)*expected: \(4,\), inside scan\[4\](.|\n)*found: \(3,\)"):
        ppl.log_density(looped)({"x": jnp.zeros(3)})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Narrow:
    """Integers of eight bits."""

    rate: jax.Array
    batch_shape = ()
    event_shape = ()
    dtype = jnp.int8
    support = dist.constraints.nonnegative_integer

    def sample(self, key, sample_shape=()):
        return jnp.ones(sample_shape, jnp.int8)

    def log_prob(self, value):
        return dist.Poisson(self.rate).log_prob(value)


def test_integers_do_not_wrap_around():
    def narrow():
        return ppl.sample("k", Narrow(3.0))

    with pytest.raises(DTypeError, match=r"site 'k' at (.|\n)*int8(.|\n)*int(32|64)"):
        ppl.evaluate(narrow)({"k": jnp.array(257)})
    assert int(ppl.evaluate(narrow)({"k": jnp.array(3, jnp.int8)}).values["k"]) == 3


def test_the_latents_of_a_trace_are_what_log_density_takes():
    trace = ppl.simulate(model)(0, Y)
    assert sorted(trace.latents) == ["k", "mu", "sigma"]
    assert trace.observed == ("y",)
    assert sorted(trace.values) == ["double", "k", "mu", "sigma", "y"]
    assert sorted(trace.log_probs) == ["k", "mu", "sigma", "y"]
    np.testing.assert_allclose(ppl.log_density(model)(trace.latents, Y), trace.log_prob)
    total = sum(jnp.sum(v) for v in trace.log_probs.values()) + trace.values["mu"]
    np.testing.assert_allclose(trace.log_prob, total)


def test_a_value_outside_of_the_support_has_no_density():
    assert float(ppl.log_density(model)({**GOOD, "sigma": np.array([1.0, -1.0, 1.0])}, Y)) == -np.inf
    assert float(ppl.log_density(lambda: ppl.observe("e", dist.Exponential(1.0), -1.0))({})) == -np.inf


def test_traces_pass_through_jit_and_vmap():
    traces = jax.jit(jax.vmap(lambda key: ppl.simulate(model)(key, Y)))(jax.random.split(jax.random.key(0), 3))
    assert traces.values["sigma"].shape == (3, 3)
    densities = jax.vmap(lambda v: ppl.log_density(model)(v, Y))(traces.latents)
    np.testing.assert_allclose(densities, traces.log_prob)


def test_what_is_not_a_model():
    with pytest.raises(ppl.errors.PPLError, match=r"the model is not a function(.|\n)*fix: .*log_density\(model\)"):
        ppl.log_density(3.0)({})


def test_observed_data_that_do_not_fit():
    def regression(mu, y):
        ppl.observe("y", dist.Normal(mu, 1.0), y)

    for mu, y in ((jnp.zeros(3), jnp.zeros((3, 1))), (jnp.zeros((3, 1)), jnp.zeros(3)), (jnp.zeros(3), 1.0)):
        with pytest.raises(ShapeError, match=r"site 'y' at .*: the distribution does not fit(.|\n)*found(.|\n)*fix"):
            ppl.log_density(regression)({}, mu, y)
    n = dist.Normal(0.0, 1.0)
    np.testing.assert_allclose(ppl.log_density(regression)({}, 0.0, jnp.zeros(3)), 3 * n.log_prob(0.0))
    np.testing.assert_allclose(ppl.log_density(regression)({}, jnp.zeros(3), jnp.zeros((2, 3))), 6 * n.log_prob(0.0))
    with pytest.raises(ShapeError, match="site 'p' at "):
        ppl.log_density(lambda: ppl.observe("p", dist.Dirichlet(jnp.ones(3)), jnp.ones(2) / 2))({})


def test_values_that_are_no_dict_or_no_numbers():
    with pytest.raises(ValuesError, match=r"dict(.|\n)*found: list(.|\n)*fix: "):
        ppl.log_density(model)([0.5], Y)
    with pytest.raises(DTypeError, match=r"site 'mu' at .*no array of numbers(.|\n)*expected: (.|\n)*fix: "):
        ppl.log_density(model)({**GOOD, "mu": "a half"}, Y)


def test_a_position_that_lacks_a_latent():
    def pair():
        ppl.sample("a", dist.Normal(0.0, 1.0))
        ppl.sample("b", dist.HalfNormal(1.0))

    with pytest.raises(ppl.errors.PPLError, match=r"site 'b' at test_values.py(.|\n)*Target.init"):
        ppl.target(pair)().log_density({"a": 0.0})


def test_arguments_by_name_as_far_as_the_signature_is_known():
    assert bind_arguments(lambda x, *rest, y=1: None, (1, 2), {"y": 3}) == {"x": 1, "rest": (2,), "y": 3}
    assert bind_arguments(lambda x: None, (1, 2), {"y": 3}) == {"y": 3}
    assert bind_arguments(max, (1, 2), {"key": None}) == {"key": None}  # which has no signature
