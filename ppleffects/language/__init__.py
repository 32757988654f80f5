"""The language of models: ``sample``, ``observe``, ``factor`` and ``deterministic``, and what a distribution is."""

from ppleffects.language.blocked import blocked as blocked
from ppleffects.language.blocked import blocked_p as blocked_p
from ppleffects.language.deterministic import deterministic as deterministic
from ppleffects.language.deterministic import deterministic_p as deterministic_p
from ppleffects.language.distribution import Bijector as Bijector
from ppleffects.language.distribution import Distribution as Distribution
from ppleffects.language.factor import factor as factor
from ppleffects.language.factor import factor_p as factor_p
from ppleffects.language.observe import observe as observe
from ppleffects.language.observe import observe_p as observe_p
from ppleffects.language.sample import sample as sample
from ppleffects.language.sample import sample_p as sample_p
from ppleffects.language.site import SiteParams as SiteParams
from ppleffects.language.site import over_lanes as over_lanes
