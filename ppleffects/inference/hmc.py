"""Hamiltonian Monte Carlo with trajectories of one length, as two pure functions of a target and a state."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from numpyro.infer.hmc_util import HMCAdaptState, IntegratorState, euclidean_kinetic_energy

from ppleffects.inference import blackjax_engine
from ppleffects.inference.kernel import Hamiltonian, Proposal


class HMCInfo(NamedTuple):
    """What happened in one transition; each a scalar.

    Attributes:
        lp: log-density at the new position, in unconstrained space.
        energy: Hamiltonian at the new position: kinetic energy minus ``lp``.
        acceptance_rate: Metropolis acceptance probability of the trajectory's end; between 0 and 1.
        diverging: whether the energy error at the trajectory's end exceeded ``max_delta_energy``.
        n_steps: number of leapfrog steps, each one gradient.
        step_size: length of each leapfrog step in this trajectory.
    """

    lp: Array
    energy: Array
    acceptance_rate: Array
    diverging: Array
    n_steps: Array
    step_size: Array


@dataclass(frozen=True, kw_only=True)
class HMC(Hamiltonian[HMCInfo]):
    """Hamiltonian Monte Carlo with a fixed trajectory length (Neal 2011).

    Settings only, so that equal ones share a compiled program. With NumPyro's and BlackJAX's engines, ``init`` and
    ``step`` are the pure functions of one chain that ``mcmc`` runs; the engine of this library is ``machine``.

    Attributes:
        trajectory_length: step size times number of steps. The default is a quarter of the period of a whitened
            Gaussian, whose draws are then independent; a whole one, NumPyro's default, leads back to the start.
        max_num_steps: a trajectory takes at most so many leapfrog steps, and is shorter where they do not suffice.

    Raises:
        SettingsError: a setting is out of its range.

    Examples:
        >>> from ppleffects.inference.hmc import HMC
        >>> HMC(trajectory_length=2.0).max_num_steps
        1024
    """

    trajectory_length: float = math.pi / 2
    max_num_steps: int = 1024

    def _trajectories(self) -> dict[str, Any]:
        return {"max_tree_depth": 0, "length": (self.trajectory_length, self.max_num_steps)}

    def _transition(self, target: Any, start: IntegratorState, adaptation: HMCAdaptState, key: Array) -> Proposal:
        leapfrog, metric = self._leapfrog(target), adaptation.inverse_mass_matrix
        num_steps, step_size = self._steps(adaptation.step_size)
        end = jax.lax.fori_loop(0, num_steps, lambda _, point: leapfrog(step_size, metric, point), start)
        energy_start = start.potential_energy + euclidean_kinetic_energy(metric, start.r)
        energy_end = end.potential_energy + euclidean_kinetic_energy(metric, end.r)
        error = energy_end - energy_start
        error = jnp.where(jnp.isnan(error), jnp.inf, error)
        acceptance_rate = jnp.exp(-jnp.maximum(error, 0.0))
        accepted = jax.random.bernoulli(key, acceptance_rate)
        point, energy = jax.tree.map(
            lambda new, old: jnp.where(accepted, new, old), (end, energy_end), (start, energy_start)
        )
        info = HMCInfo(
            lp=-point.potential_energy,
            energy=energy,
            acceptance_rate=acceptance_rate,
            diverging=error > self.max_delta_energy,
            n_steps=num_steps,
            step_size=step_size,
        )
        return Proposal(point._replace(r=None), acceptance_rate, info)

    def _transition_of_blackjax(
        self, log_density: Callable, start: blackjax_engine.Point, adaptation: Any, key: Array
    ) -> tuple[blackjax_engine.Point, Array, HMCInfo]:
        num_steps, step_size = self._steps(adaptation.step_size)
        point, told = blackjax_engine.hmc(
            log_density, start, adaptation.inverse_mass_matrix, key, step_size, num_steps, self.max_delta_energy
        )
        info = HMCInfo(
            lp=point.log_density,
            energy=told.energy,
            acceptance_rate=told.acceptance_rate,
            diverging=told.is_divergent,
            n_steps=num_steps,
            step_size=step_size,
        )
        return point, told.acceptance_rate, info

    def _steps(self, step_size: Array) -> tuple[Array, Array]:
        """The number of steps of a trajectory, and their size: as adapted, but for making the length exact."""
        wanted = jnp.ceil(self.trajectory_length / step_size)
        num_steps = jnp.clip(wanted, 1, self.max_num_steps).astype(jnp.result_type(int))
        # The length is exact, whatever the step size, except where the number of steps is cut.
        return num_steps, jnp.where(wanted > self.max_num_steps, step_size, self.trajectory_length / num_steps)
