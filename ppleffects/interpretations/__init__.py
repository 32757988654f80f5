"""What a model means: ``simulate``, ``evaluate``, ``log_density`` and ``sites``."""

from ppleffects.interpretations.render import render as render
from ppleffects.interpretations.sites import Site as Site
from ppleffects.interpretations.sites import sites as sites
from ppleffects.interpretations.trace import Trace as Trace
from ppleffects.interpretations.trace import evaluate as evaluate
from ppleffects.interpretations.trace import log_density as log_density
from ppleffects.interpretations.trace import simulate as simulate
