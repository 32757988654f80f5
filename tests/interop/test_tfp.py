"""TensorFlow Probability: imported when it is used, and an error that says what to install where it is not there."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest

import ppleffects as ppl
from ppleffects.interop import tfp


def test_its_distributions_are_taken_as_they_are():
    pytest.importorskip("tensorflow_probability.substrates.jax")

    def model(y):
        ppl.observe("y", tfp.distributions.Normal(0.0, 1.0), y)

    np.testing.assert_allclose(ppl.log_density(model)({}, jnp.zeros(2)), -np.log(2 * np.pi))


def test_not_installed(monkeypatch):
    for name in [n for n in sys.modules if n.split(".")[0] == "tensorflow_probability"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorflow_probability", None)
    with pytest.raises(
        ppl.errors.MissingDependencyError, match=r"not installed(.*\n)*.*pip install 'ppleffects\[tfp\]'"
    ):
        _ = tfp.distributions
    with pytest.raises(ImportError, match="not installed"):
        _ = tfp.bijectors


def test_unknown_name():
    with pytest.raises(AttributeError, match="it has distributions, bijectors"):
        _ = tfp.stats
