"""Probabilistic programs in ordinary JAX code, sharded over devices, sampled by NUTS, analysed with ArviZ."""

from ppleffects.inference.hmc import HMC as HMC
from ppleffects.inference.mcmc import mcmc as mcmc
from ppleffects.inference.nuts import NUTS as NUTS
from ppleffects.inference.shard_rows import GroupedRows as GroupedRows
from ppleffects.inference.shard_rows import shard_groups as shard_groups
from ppleffects.inference.shard_rows import shard_rows as shard_rows
from ppleffects.inference.target import Target as Target
from ppleffects.inference.target import target as target
from ppleffects.interpretations import Site as Site
from ppleffects.interpretations import Trace as Trace
from ppleffects.interpretations import evaluate as evaluate
from ppleffects.interpretations import log_density as log_density
from ppleffects.interpretations import render as render
from ppleffects.interpretations import simulate as simulate
from ppleffects.interpretations import sites as sites
from ppleffects.language import blocked as blocked
from ppleffects.language import deterministic as deterministic
from ppleffects.language import factor as factor
from ppleffects.language import observe as observe
from ppleffects.language import sample as sample
from ppleffects.transforms import condition as condition
from ppleffects.transforms import do as do
from ppleffects.transforms import mask as mask
from ppleffects.transforms import reparam as reparam
from ppleffects.transforms import scale as scale
from ppleffects.transforms import scope as scope
