"""What a sampler is to the driver, and what HMC and NUTS share: the state, the settings and the adaptation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, PartitionSpec
from numpyro.infer.hmc import momentum_generator
from numpyro.infer.hmc_util import (
    HMCAdaptState,
    IntegratorState,
    euclidean_kinetic_energy,
    find_reasonable_step_size,
    velocity_verlet,
    warmup_adapter,
)

from ppleffects.errors import DiscreteLatentError, SettingsError
from ppleffects.inference import blackjax_engine
from ppleffects.inference.coordinates import coordinates_of
from ppleffects.inference.machine import TARGET_ACCEPT, Machine
from ppleffects.inference.metric import Metric
from ppleffects.inference.metric_choice import (
    AUTO,
    DENSE,
    LOW_RANK,
    check_blocks,
    checked_choice,
    choice_of_dense_mass,
    first_metric,
    shape_of,
)
from ppleffects.inference.settings import check_numbers

ENGINES = OWN, NUMPYRO, BLACKJAX = ("ppleffects", "numpyro", "blackjax")
NUMPYRO_ONLY = ("regularize_mass_matrix", "find_heuristic_step_size")
# Starts that a chain tries: one for so many transitions of warm-up, but no more than some.
WARMUP_PER_TRIAL, MAX_TRIALS = 160, 6

type Position = dict[str, Array]


@jax.tree_util.register_static
@dataclass(frozen=True)
class Warmup:
    """The length of the warm-up, known when the program is compiled.

    Attributes:
        num_warmup: number of transitions that adapt the step size and the mass matrix.
    """

    num_warmup: int


class State(NamedTuple):
    """One chain between two transitions.

    Attributes:
        iteration: transitions done, warm-up included. The same for all chains, so under a ``vmap`` over chains it stays
            unbatched (``Kernel.state_axes``) and what happens at the end of an adaptation window is run only there.
        position: unconstrained values by latent site, in the default float dtype.
        log_density: log-density at ``position``, the log-determinant of the constraining map included; a scalar.
        gradient: gradient of the log-density at ``position``; shapes of ``position``.
        adaptation: step size, inverse mass matrix and the running estimates of both, as NumPyro or BlackJAX keeps them.
        key: key of the transitions to come.
        warmup: length of the warm-up; no array.
    """

    iteration: Array
    position: Position
    log_density: Array
    gradient: Position
    adaptation: Any
    key: Array
    warmup: Warmup


class Kernel[S, I](Protocol):
    """A sampler: frozen, hashable settings with two pure functions of one chain.

    ``step``'s ``Info`` is a NamedTuple of scalars named as ArviZ names them in ``sample_stats``; ``lp``, ``energy`` and
    ``diverging`` are among them. ``state_axes`` is a prefix of the state with 0 for what each chain has of its own and
    None for what all chains have in common.
    """

    @property
    def state_axes(self) -> Any:
        """Which leaves of the state each chain has of its own."""
        ...

    def settings(self) -> dict[str, Any]:
        """The settings by name, as JSON has them."""
        ...

    def check(self, target: Any) -> None:
        """Raise where the kernel cannot sample the target."""
        ...

    def init(
        self,
        target: Any,
        position: Position,
        key: Array,
        num_warmup: int,
        *,
        point: tuple[Array, Position] | None = None,
    ) -> S:
        """The state of a chain that starts at ``position``, where ``point`` gives log-density and gradient."""
        ...

    def step(self, target: Any, state: S) -> tuple[S, I]:
        """The state after one transition, and what happened in it."""
        ...

    def machine(self, target: Any, num_warmup: int, *, drawn: bool) -> Machine | None:
        """The sampler whose chains do not wait for each other; None if all chains make transitions in step."""
        ...


class Proposal(NamedTuple):
    """What a transition hands back before adaptation.

    Attributes:
        point: the new position, its potential energy and gradient; the momentum is no longer needed.
        acceptance_rate: Metropolis acceptance probability, averaged over the trajectory; between 0 and 1.
        info: what ``step`` returns.
    """

    point: IntegratorState
    acceptance_rate: Array
    info: Any


def density_arguments(target: Any, position: Position) -> Position:
    """A position as the methods of a target take it: of each site's dtype, and whole on every device of a chain.

    The sampler works in one float dtype, and NumPyro's trees lay a position out as one vector. On Auto axes the
    compiler would shard that vector like the pieces of a latent that live on shards, and move its parts around in every
    step; the constraint keeps positions, and by its transpose gradients, from being sharded outside of the density.
    """
    if AxisType.Auto in jax.sharding.get_abstract_mesh().axis_types:
        position = {name: jax.lax.with_sharding_constraint(value, PartitionSpec()) for name, value in position.items()}
    return {name: value.astype(target.sites[name].dtype) for name, value in position.items()}


@jax.jit
def _potential(target: Any, position: Position) -> Array:
    return -jnp.asarray(target.log_density(density_arguments(target, position)), jnp.result_type(float))


def potential(target: Any) -> Callable[[Position], Array]:
    """The potential energy of a target: minus its log-density, in the default float dtype.

    A kernel names it in several places, and its ``jit`` makes them share one trace.
    """
    return partial(_potential, target)


@dataclass(frozen=True, kw_only=True)
class Hamiltonian[I]:
    """Settings and adaptation that HMC and NUTS share.

    Attributes:
        step_size: length of leapfrog steps where they are not adapted. With NumPyro's engine, that of the first step.
        target_accept: mean acceptance probability that the step size is adapted to; between 0 and 1. NumPyro calls it
            ``target_accept_prob``, Stan ``adapt_delta``, PyMC and nutpie as here. None is 0.8, which a chain of the
            engine "ppleffects" raises to 0.9 and 0.95 where its warm-up diverges.
        engine: "ppleffects", whose chains do not wait for each other's trajectories, whose latents on shards stay
            there, and whose metric comes from draws and gradients; "numpyro" for NumPyro's transitions and warm-up; or
            "blackjax" for BlackJAX's, which is an extra: ``pip install 'ppleffects[blackjax]'``.
        metric: the inverse mass matrix that warm-up adapts: "auto" for one as dense as it pays, "diagonal", "dense",
            "low_rank" for a diagonal and some directions, latents on shards included, or names of the sites of each
            dense block, for example ``(("alpha", "beta"),)``; the sites in no block get a diagonal. With NumPyro
            and BlackJAX "auto" is "diagonal", and there is no "low_rank"; with BlackJAX there are no blocks.
        inverse_mass_matrix: what to begin with, in unconstrained space: variances by latent, or the covariance of all
            latents in the order of the model. It stays where ``adapt_mass_matrix=False``.
        pool_chains: whether a chain's metric is estimated from the draws of all chains of its device. A chain then
            depends on the others and on where they run.
        dense_mass: NumPyro's word for ``metric``: True for "dense", or blocks.
        adapt_step_size: whether warm-up adapts the step size by dual averaging.
        adapt_mass_matrix: whether warm-up adapts the mass matrix by the (co)variance of its draws.
        regularize_mass_matrix: whether the estimated mass matrix is shrunk towards a small multiple of the identity.
        find_heuristic_step_size: whether each adaptation window starts with a search for a reasonable step size.
        max_delta_energy: a leapfrog step whose energy error exceeds this is a divergence.
    """

    step_size: float = 1.0
    target_accept: float | None = None
    engine: str = "ppleffects"
    metric: str | tuple[tuple[str, ...], ...] = AUTO
    inverse_mass_matrix: Any = field(default=None, hash=False, compare=False)
    pool_chains: bool = False
    dense_mass: bool | tuple[tuple[str, ...], ...] = False
    adapt_step_size: bool = True
    adapt_mass_matrix: bool = True
    regularize_mass_matrix: bool = True
    find_heuristic_step_size: bool = False
    max_delta_energy: float = 1000.0

    @property
    def state_axes(self) -> Any:
        """0 for what each chain has of its own, None for what all have in common."""
        numpyro = HMCAdaptState(*([0] * len(HMCAdaptState._fields)))._replace(window_idx=None)
        own: Any = 0
        adaptation: Any = numpyro if self.engine != BLACKJAX else 0
        return State(None, own, own, own, adaptation, own, None)  # pyright: ignore[reportArgumentType]

    def __post_init__(self):
        check_numbers(self)
        dense, metric = choice_of_dense_mass(self.dense_mass), checked_choice(self.metric)
        if AUTO not in (dense, metric) and dense != metric:
            raise SettingsError(
                "dense_mass= and metric= contradict each other",
                expected="one of them: dense_mass= is NumPyro's word for metric=",
                found=f"dense_mass={self.dense_mass!r}, metric={self.metric!r}",
                fix="leave dense_mass= out",
            )
        object.__setattr__(self, "metric", metric if dense == AUTO else dense)
        if not isinstance(self.dense_mass, bool):
            object.__setattr__(self, "dense_mass", dense if dense != AUTO else False)
        self._check_engine()

    def _check_engine(self) -> None:
        if self.engine not in ENGINES:
            raise SettingsError(
                "engine= names an unknown engine",
                expected=f"one of {ENGINES}",
                found=f"{self.engine!r}",
                fix='leave it out, or write engine="numpyro" for NumPyro\'s transitions and warm-up',
            )
        others = [f.name for f in fields(self) if f.name in NUMPYRO_ONLY and getattr(self, f.name) != f.default]
        if self.engine != NUMPYRO and others:
            raise SettingsError(
                "the engine does not have this setting",
                expected=f"no {', '.join(NUMPYRO_ONLY)}, which are NumPyro's",
                found=", ".join(others),
                fix='leave it out, or choose engine="numpyro"',
            )
        lacking = {
            'metric="low_rank"': self.metric == LOW_RANK,
            "inverse_mass_matrix=": self.inverse_mass_matrix is not None,
            "pool_chains=True": self.pool_chains,
        }
        if self.engine == BLACKJAX:
            lacking["blocks of names for metric="] = not isinstance(self.metric, str)
        if self.engine != OWN and any(lacking.values()):
            maker = "NumPyro" if self.engine == NUMPYRO else "BlackJAX"
            raise SettingsError(
                f"{maker}'s engine does not have this setting",
                expected=f"no {', '.join(lacking)}",
                found=", ".join(name for name, is_set in lacking.items() if is_set),
                fix='leave it out, or choose engine="ppleffects"',
            )

    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"inverse_mass_matrix": self.inverse_mass_matrix is not None}

    def check(self, target: Any) -> None:
        """Raise where the kernel cannot sample the target.

        Raises:
            DiscreteLatentError: a latent site is discrete.
            SettingsError: there is no latent site, or ``metric`` does not fit those that are there.
            ValuesError, ShapeError, DTypeError: ``inverse_mass_matrix`` does not fit them.
            MissingDependencyError: the engine is BlackJAX's, which is not installed.
        """
        if self.engine == BLACKJAX:
            blackjax_engine.require()
        latents = {name: site for name, site in target.sites.items() if site.kind == "sample"}
        if not latents:
            raise SettingsError(
                "the model has no latent site, so there is nothing to sample",
                expected="at least one ppl.sample",
                found=f"sites {sorted(target.sites)}",
                fix="write ppl.sample for what is unknown",
            )
        for name, site in latents.items():
            if site.is_discrete or not jnp.issubdtype(site.dtype, jnp.floating):
                raise DiscreteLatentError(
                    f"{type(self).__name__} needs the gradient of the log-density, and a discrete latent has none",
                    site=name,
                    source=site.source,
                    expected="a continuous latent",
                    found=f"a discrete one of dtype {jnp.dtype(site.dtype).name}",
                    fix=f"sum it out of the density (a mixture distribution, or ppl.factor with a logsumexp), "
                    f"or fix it with ppl.condition(model, {{'{name}': ...}})",
                )
        check_blocks(self.metric, list(latents))
        if self.inverse_mass_matrix is not None:
            coordinates, sources = coordinates_of(target), {name: site.source for name, site in latents.items()}
            first_metric(self.inverse_mass_matrix, shape_of(self.metric, coordinates), coordinates, sources)

    def init(
        self, target: Any, position: Position, key: Array, num_warmup: int, *, point: tuple | None = None
    ) -> State:
        """The state of a chain that starts at ``position``.

        Args:
            target: the density.
            position: unconstrained values by latent site.
            key: key of this chain's transitions.
            num_warmup: transitions that adapt.
            point: log-density and gradient at ``position`` where they are known; computed otherwise.
        """
        float_dtype = jnp.result_type(float)
        position = {name: jnp.asarray(value, float_dtype) for name, value in position.items()}
        if point is None:
            energy, slope = jax.value_and_grad(potential(target))(position)
        else:
            energy, slope = -point[0], jax.tree.map(jnp.negative, point[1])
        # As NumPyro splits it, with its third key for a momentum that no transition uses.
        key, adaptation_key, _ = jax.random.split(key, 3)
        gradient = jax.tree.map(jnp.negative, slope)
        if self.engine == BLACKJAX:
            start = blackjax_engine.Point(position, -energy, gradient)
            adaptation = blackjax_engine.begin(start, self.step_size, self._target_accept, dense=self.metric == DENSE)
        else:
            adapt_init, _ = self._adapter(target, num_warmup)
            start = IntegratorState(position, None, energy, slope)
            adaptation = adapt_init(start, adaptation_key, jnp.asarray(self.step_size, float_dtype))
        iteration = jnp.zeros((), jnp.int32)
        return State(iteration, position, -energy, gradient, adaptation, key, Warmup(num_warmup))

    def step(self, target: Any, state: State) -> tuple[State, I]:
        """The state after one transition, which adapts while ``state.iteration < num_warmup``, and what happened."""
        num_warmup = state.warmup.num_warmup
        if self.engine == BLACKJAX:
            return self._step_of_blackjax(target, state)
        key, momentum_key, transition_key = jax.random.split(state.key, 3)
        momentum = momentum_generator(state.position, state.adaptation.mass_matrix_sqrt, momentum_key)
        slope = jax.tree.map(jnp.negative, state.gradient)
        start = IntegratorState(state.position, momentum, -state.log_density, slope)
        proposal = self._transition(target, start, state.adaptation, transition_key)
        point = proposal.point
        _, adapt = self._adapter(target, num_warmup)
        adaptation = jax.lax.cond(
            state.iteration < num_warmup,
            lambda: adapt(state.iteration, proposal.acceptance_rate, point, state.adaptation),
            lambda: state.adaptation,
        )
        new = State(
            iteration=state.iteration + 1,
            position=point.z,
            log_density=-point.potential_energy,
            gradient=jax.tree.map(jnp.negative, point.z_grad),
            adaptation=adaptation,
            key=key,
            warmup=state.warmup,
        )
        return new, proposal.info

    def _step_of_blackjax(self, target: Any, state: State) -> tuple[State, I]:
        num_warmup, energy = state.warmup.num_warmup, potential(target)
        key, transition_key = jax.random.split(state.key)
        start = blackjax_engine.Point(state.position, state.log_density, state.gradient)
        point, acceptance_rate, info = self._transition_of_blackjax(
            lambda position: -energy(position), start, state.adaptation, transition_key
        )
        adaptation = state.adaptation
        if num_warmup:
            adaptation = jax.lax.cond(
                state.iteration < num_warmup,
                lambda: blackjax_engine.adapt(
                    adaptation, state.iteration, num_warmup, point.position, acceptance_rate, self._target_accept,
                    dense=self.metric == DENSE, step_size=self.adapt_step_size, metric=self.adapt_mass_matrix,
                ),
                lambda: adaptation,
            )  # fmt: skip
        return State(state.iteration + 1, *point, adaptation, key, state.warmup), info

    def machine(self, target: Any, num_warmup: int, *, drawn: bool) -> Machine | None:
        """The sampler whose chains do not wait for each other; None for those of others, whose do.

        Args:
            target: the density.
            num_warmup: trajectories that adapt.
            drawn: whether starts are drawn, so that a chain can try several.
        """
        if self.engine != OWN:
            return None
        coordinates = coordinates_of(target)
        several = drawn and self.adapt_step_size
        return Machine(
            coordinates,
            num_warmup=num_warmup,
            max_delta_energy=self.max_delta_energy,
            target_accept=self.target_accept,
            shape=shape_of(self.metric, coordinates),
            step_size=None if self.adapt_step_size else self.step_size,
            adapt_metric=self.adapt_mass_matrix,
            pool_chains=self.pool_chains,
            num_trials=int(np.clip(num_warmup // WARMUP_PER_TRIAL, 1, MAX_TRIALS)) if several else 1,
            **self._trajectories(),
        )

    def first_metric(self, machine: Machine) -> Metric | None:
        """The metric that the user gave to begin with."""
        if self.inverse_mass_matrix is None:
            return None
        return first_metric(self.inverse_mass_matrix, machine.shape, machine.coordinates)

    def _trajectories(self) -> dict[str, Any]:
        """How long the machine's trajectories are."""
        raise NotImplementedError

    def _transition(self, target: Any, start: IntegratorState, adaptation: HMCAdaptState, key: Array) -> Proposal:
        raise NotImplementedError

    def _transition_of_blackjax(
        self, log_density: Callable, start: blackjax_engine.Point, adaptation: Any, key: Array
    ) -> tuple[blackjax_engine.Point, Array, I]:
        """The new point, the mean acceptance probability, and what ``step`` returns."""
        raise NotImplementedError

    @property
    def _target_accept(self) -> float:
        return TARGET_ACCEPT if self.target_accept is None else self.target_accept

    def _leapfrog(self, target: Any) -> Callable:
        _, update = velocity_verlet(potential(target), euclidean_kinetic_energy)
        return update

    def _adapter(self, target: Any, num_warmup: int) -> tuple[Callable, Callable]:
        search = None
        if self.find_heuristic_step_size:
            search = partial(find_reasonable_step_size, potential(target), euclidean_kinetic_energy, momentum_generator)
        dense_mass: Any = self.metric == DENSE if isinstance(self.metric, str) else list(self.metric)
        return warmup_adapter(
            num_warmup,
            find_reasonable_step_size=search,
            adapt_step_size=self.adapt_step_size,
            adapt_mass_matrix=self.adapt_mass_matrix,
            dense_mass=dense_mass,
            target_accept_prob=self._target_accept,
            regularize_mass_matrix=self.regularize_mass_matrix,
        )
