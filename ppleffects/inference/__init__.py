"""Samplers, their driver, and what they see of a model."""

from ppleffects.inference.hmc import HMC as HMC
from ppleffects.inference.hmc import HMCInfo as HMCInfo
from ppleffects.inference.kernel import Kernel as Kernel
from ppleffects.inference.kernel import State as State
from ppleffects.inference.mcmc import mcmc as mcmc
from ppleffects.inference.nuts import NUTS as NUTS
from ppleffects.inference.nuts import NUTSInfo as NUTSInfo
