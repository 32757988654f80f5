"""A second process compiles nothing that a first has compiled: programs are the same whatever Python's hashes are."""

import os
import subprocess
import sys

from tests.conftest import ROOT

RUN = """
import jax, jax.numpy as jnp, numpyro.distributions as dist
import ppleffects as ppl

def model():
    loc = ppl.sample("loc", dist.Normal(0.0, 1.0))
    scale = ppl.sample("scale", dist.HalfNormal(1.0))  # its fields come in another order in each process
    ppl.observe("y", dist.StudentT(4.0, loc, scale), jnp.arange(3.0))

ppl.mcmc(model, num_warmup=5, num_samples=5, num_chains=2, progress=False)(0)
"""


def run(cache, seed):
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "PYTHONHASHSEED": seed}
    environment |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", "XLA_FLAGS": ""}
    subprocess.run([sys.executable, "-W", "ignore", "-c", RUN], cwd=ROOT, env=environment, check=True)
    return {path.name for path in cache.iterdir() if path.name.endswith("-cache")}


def test_a_second_process_compiles_nothing(tmp_path):
    first = run(tmp_path, "1")
    assert any("advance_chains" in name for name in first)
    assert run(tmp_path, "2") == first
