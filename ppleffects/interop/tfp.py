"""TensorFlow Probability on JAX: its distributions go into ``ppl.sample`` and ``ppl.observe`` as they are.

The library is optional, and imported when it is first used.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from ppleffects.errors import MissingDependencyError

_MODULES = ("distributions", "bijectors")


def __getattr__(name: str) -> ModuleType:
    """Returns ``tfp.distributions`` or ``tfp.bijectors`` of the JAX substrate.

    Raises:
        MissingDependencyError: TensorFlow Probability is not installed.
    """
    if name not in _MODULES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'; it has {', '.join(_MODULES)}")
    try:
        return importlib.import_module(f"tensorflow_probability.substrates.jax.{name}")
    except ImportError as error:
        raise MissingDependencyError(
            "TensorFlow Probability is not installed, or does not import",
            expected="a release for the JAX installed here",
            found=f"{type(error).__name__}: {error}",
            fix="pip install 'ppleffects[tfp]'",
        ) from error
