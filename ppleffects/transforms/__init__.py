"""Models from models: ``condition``, ``do``, ``reparam``, ``scope``, ``scale`` and ``mask``."""

from ppleffects.transforms.condition import condition as condition
from ppleffects.transforms.condition import do as do
from ppleffects.transforms.reparam import reparam as reparam
from ppleffects.transforms.scope import scope as scope
from ppleffects.transforms.weight import mask as mask
from ppleffects.transforms.weight import scale as scale
