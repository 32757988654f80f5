"""The No-U-Turn sampler; with the engines of others, as two pure functions of a target and a state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array
from numpyro.infer.hmc_util import HMCAdaptState, IntegratorState, build_tree, euclidean_kinetic_energy

from ppleffects.inference import blackjax_engine
from ppleffects.inference.kernel import Hamiltonian, Proposal


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

    Settings only, so that equal ones share a compiled program. With NumPyro's and BlackJAX's engines, ``init`` and
    ``step`` are the pure functions of one chain that ``mcmc`` runs; the engine of this library is ``machine``.

    Attributes:
        max_tree_depth: the trajectory doubles at most so many times.

    Raises:
        SettingsError: a setting is out of its range, or the engine does not have it.

    Examples:
        >>> from ppleffects.inference.nuts import NUTS
        >>> NUTS(target_accept=0.9).target_accept
        0.9
    """

    max_tree_depth: int = 10

    def _trajectories(self) -> dict[str, Any]:
        return {"max_tree_depth": self.max_tree_depth}

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

    def _transition_of_blackjax(
        self, log_density: Callable, start: blackjax_engine.Point, adaptation: Any, key: Array
    ) -> tuple[blackjax_engine.Point, Array, NUTSInfo]:
        point, told = blackjax_engine.nuts(
            log_density, start, adaptation, key, self.max_tree_depth, self.max_delta_energy
        )
        depth = told.num_trajectory_expansions
        info = NUTSInfo(
            lp=point.log_density,
            energy=told.energy,
            acceptance_rate=told.acceptance_rate,
            diverging=told.is_divergent,
            n_steps=told.num_integration_steps,
            tree_depth=depth,
            reached_max_treedepth=(depth >= self.max_tree_depth) & ~told.is_turning & ~told.is_divergent,
            step_size=adaptation.step_size,
        )
        return point, told.acceptance_rate, info
