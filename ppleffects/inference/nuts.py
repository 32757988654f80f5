"""The No-U-Turn sampler: NumPyro's trajectories, as two pure functions of a target and a state."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from numpyro.infer.hmc_util import HMCAdaptState, IntegratorState, build_tree, euclidean_kinetic_energy

from ppleffects.errors import SettingsError
from ppleffects.inference.coordinates import coordinates_of
from ppleffects.inference.kernel import Hamiltonian, Proposal
from ppleffects.inference.machine import Machine

ENGINES = ("numpyro", "ppleffects")
NUMPYRO_ONLY = ("dense_mass", "regularize_mass_matrix", "find_heuristic_step_size")
# Positions with at most so many replicated coordinates get a metric with as many directions.
MAX_DENSE = 256


class NUTSInfo(NamedTuple):
    """What happened in one transition; each a scalar.

    Attributes:
        lp: log-density at the new position, in unconstrained space.
        energy: Hamiltonian at the new position: kinetic energy minus ``lp``.
        acceptance_rate: Metropolis acceptance probability averaged over the trajectory; between 0 and 1.
        diverging: whether the energy error exceeded ``max_delta_energy`` and ended the trajectory.
        n_steps: number of leapfrog steps, each one gradient.
        tree_depth: number of doublings; the trajectory has at most ``2 ** tree_depth - 1`` steps.
        reached_max_treedepth: whether ``max_tree_depth`` ended the trajectory, rather than a U-turn or a divergence.
        step_size: length of each leapfrog step in this trajectory.
    """

    lp: Array
    energy: Array
    acceptance_rate: Array
    diverging: Array
    n_steps: Array
    tree_depth: Array
    reached_max_treedepth: Array
    step_size: Array


@dataclass(frozen=True, kw_only=True)
class NUTS(Hamiltonian[NUTSInfo]):
    """The No-U-Turn sampler with multinomial trajectories (Hoffman and Gelman 2014; Betancourt 2017, A.3).

    Settings only, so that equal ones share a compiled program. ``init(target, position, key, num_warmup) -> State`` and
    ``step(target, state) -> (State, NUTSInfo)`` are pure and act on one chain.

    Attributes:
        max_tree_depth: the trajectory doubles at most so many times.
        engine: "numpyro", or "ppleffects" for a sampler of this library's own, on trial. Its chains do not wait for
            each other's trees, latents on the shards stay there, the metric comes from draws and gradients, and warm-up
            ends early where the metric has settled. It has been seen to stay at a remote mode that NumPyro's leaves.
            ``dense_mass``, ``regularize_mass_matrix`` and ``find_heuristic_step_size`` are settings of NumPyro's.

    Raises:
        SettingsError: a setting is out of its range, or the engine does not have it.

    Examples:
        >>> from ppleffects.inference.nuts import NUTS
        >>> NUTS(target_accept=0.9).target_accept
        0.9
    """

    max_tree_depth: int = 10
    engine: str = "numpyro"

    def __post_init__(self):
        super().__post_init__()
        if self.engine not in ENGINES:
            raise SettingsError(
                "engine= names an unknown engine",
                expected=f"one of {ENGINES}",
                found=f"{self.engine!r}",
                fix="leave it out",
            )
        others = [f.name for f in fields(self) if f.name in NUMPYRO_ONLY and getattr(self, f.name) != f.default]
        if self.engine == "ppleffects" and others:
            raise SettingsError(
                "the engine does not have this setting",
                expected=f"no {', '.join(NUMPYRO_ONLY)}, which are NumPyro's",
                found=", ".join(others),
                fix='leave it out, or choose engine="numpyro"',
            )

    def machine(self, target: Any, num_warmup: int) -> Machine | None:
        """The sampler whose chains do not wait for each other; None for NumPyro's, whose do."""
        if self.engine == "numpyro":
            return None
        coordinates = coordinates_of(target)
        size = coordinates.vector_size
        return Machine(
            coordinates,
            num_warmup=num_warmup,
            max_tree_depth=self.max_tree_depth,
            max_delta_energy=self.max_delta_energy,
            target_accept=self.target_accept,
            rank=size if size <= MAX_DENSE else 0,
            step_size=None if self.adapt_step_size else self.step_size,
            adapt_metric=self.adapt_mass_matrix,
        )

    def _transition(self, target: Any, start: IntegratorState, adaptation: HMCAdaptState, key: Array) -> Proposal:
        tree = build_tree(
            self._leapfrog(target),
            euclidean_kinetic_energy,
            start,
            adaptation.inverse_mass_matrix,
            adaptation.step_size,
            key,
            max_delta_energy=self.max_delta_energy,
            max_tree_depth=self.max_tree_depth,
        )
        acceptance_rate = tree.sum_accept_probs / tree.num_proposals
        info = NUTSInfo(
            lp=-tree.z_proposal_pe,
            energy=tree.z_proposal_energy,
            acceptance_rate=acceptance_rate,
            diverging=tree.diverging,
            n_steps=tree.num_proposals,
            tree_depth=jnp.asarray(tree.depth),
            reached_max_treedepth=(tree.depth >= self.max_tree_depth) & ~tree.turning & ~tree.diverging,
            step_size=adaptation.step_size,
        )
        point = IntegratorState(tree.z_proposal, None, tree.z_proposal_pe, tree.z_proposal_grad)
        return Proposal(point, acceptance_rate, info)
