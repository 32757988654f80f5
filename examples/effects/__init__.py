"""Four effects that are not probability: log, check, count primitives, profile flops; a program may have all at once.

Everything here is a user's code: it uses ``ppleffects.effects`` and public JAX, and changes neither. The page
``docs/effects.md`` explains it.
"""

from examples.effects.interpretation import Effect as Effect
from examples.effects.interpretation import interpreted as interpreted
from examples.effects.observing import COUNT as COUNT
from examples.effects.observing import counts as counts
from examples.effects.observing import flops as flops
from examples.effects.observing import flops_effect as flops_effect
from examples.effects.parts import Axis as Axis
from examples.effects.parts import Entry as Entry
from examples.effects.recording import CHECK as CHECK
from examples.effects.recording import LOG as LOG
from examples.effects.recording import CheckFailed as CheckFailed
from examples.effects.recording import Failures as Failures
from examples.effects.recording import check as check
from examples.effects.recording import checks as checks
from examples.effects.recording import log as log
from examples.effects.recording import logs as logs
