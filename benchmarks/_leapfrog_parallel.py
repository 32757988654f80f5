"""NumPyro with a chain on each device, best of some rounds: prints the seconds per leapfrog as a line of JSON."""

from __future__ import annotations

import functools
import json
import sys
import time

import jax
from _leapfrog_models import NUMPYRO, logistic, logistic_data
from _leapfrog_peers import numpyro_fixed, per_chain


def main() -> None:
    """The best of some rounds."""
    w, data = logistic_data(262_144, 55)
    transitions = numpyro_fixed(
        functools.partial(logistic, NUMPYRO), data, per_chain({"w": w}, jax.device_count()), 0.0025, 4, "parallel"
    )
    seconds = []
    for _ in range(int(sys.argv[1]) + 1):
        began = time.perf_counter()
        steps = transitions().sum()
        seconds.append((time.perf_counter() - began) / int(steps))
    print(json.dumps({"seconds": min(seconds)}))


if __name__ == "__main__":
    main()
