"""What went wrong in a run: divergences, saturated trees, R-hat, effective sample sizes, E-BFMI, stuck chains, NaNs."""

from __future__ import annotations

import math
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ppleffects.inference import diagnostics
from ppleffects.inference.diagnostics import MIN_DRAWS, MIN_MOVES, Draws
from ppleffects.inference.table import aligned

# Vehtari et al. 2021, sections 4 and 5; Betancourt 2016.
MAX_RHAT = 1.01
MIN_ESS_PER_CHAIN = 100
MIN_BFMI = 0.3
# The terminal that is supposed where there is none.
WIDTH = 79


@dataclass(frozen=True)
class Check:
    """One diagnostic, a row of the table.

    Attributes:
        diagnostic: its name.
        value: what was found; "-" if nothing could be.
        bound: what it is judged by.
        ok: whether it is within the bound; None if that is unknown.
        where: the scalar or the chains that have this value.
        problem: what is wrong and what to do about it; empty if nothing is, or if another check says it.
    """

    diagnostic: str
    value: str
    bound: str
    ok: bool | None
    where: str = ""
    problem: str = ""

    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        verdict = "-" if self.ok is None else "yes" if self.ok else "NO"
        return (self.diagnostic, self.value, self.bound, verdict, self.where)


@dataclass(frozen=True)
class Report:
    """Diagnostics of a finished run.

    Attributes:
        num_draws: draws kept, all chains together.
        num_transitions: transitions after warm-up, all chains together, those thinned away included.
        num_diverging: transitions that diverged.
        num_saturated: transitions ended by ``max_tree_depth``.
        num_nan: values in the posterior that are NaN.
        max_rhat: largest rank-normalised split R-hat.
        max_rhat_name: the scalar that has it.
        min_ess_bulk: smallest bulk effective sample size.
        min_ess_bulk_name: the scalar that has it.
        min_ess_tail: smallest tail effective sample size.
        min_ess_tail_name: the scalar that has it.
        min_bfmi: smallest energy Bayesian fraction of missing information over chains.
        stuck_chains: numbers of the chains that stand still, or sit apart at far lower log-densities than another.
        num_scalars: scalars in the posterior.
        num_scalars_checked: scalars of which R-hat and ESS were computed.
        checks: the rows of the table.
    """

    num_draws: int
    num_transitions: int
    num_diverging: int
    num_saturated: int
    num_nan: int
    max_rhat: float
    max_rhat_name: str
    min_ess_bulk: float
    min_ess_bulk_name: str
    min_ess_tail: float
    min_ess_tail_name: str
    min_bfmi: float
    stuck_chains: tuple[int, ...]
    num_scalars: int
    num_scalars_checked: int
    checks: tuple[Check, ...] = ()

    @property
    def problems(self) -> tuple[str, ...]:
        """What is wrong, and what to do about it."""
        return tuple(check.problem for check in self.checks if check.problem)

    def attrs(self) -> dict[str, Any]:
        """The report as attributes of a DataTree: numbers, strings, and lists of them."""
        fields = {name: value for name, value in asdict(self).items() if name != "checks"}
        return {**fields, "stuck_chains": list(self.stuck_chains), "problems": list(self.problems)}

    def text(self) -> str:
        """The report as a table, and below it what to do."""
        head = f"{self.num_draws} draws of {_count(self.num_scalars, 'scalar')}"
        if self.num_scalars_checked < self.num_scalars:
            head += f"; R-hat and ESS of the {self.num_scalars_checked} whose chains differ most"
        rows = [("diagnostic", "value", "bound", "ok", "where"), *(check.row() for check in self.checks)]
        problems = [textwrap.fill(problem, WIDTH, initial_indent="- ", subsequent_indent="  ", break_long_words=False,
                                  break_on_hyphens=False) for problem in self.problems]  # fmt: skip
        return "\n".join([head, aligned(rows, right=(1,)), *problems])


def diagnose(
    posterior: Draws,
    energy: np.ndarray,
    *,
    num_transitions: int,
    num_diverging: int,
    num_saturated: int,
    lp: np.ndarray | None = None,
    max_rhat: float = MAX_RHAT,
) -> Report:
    """The report of a run.

    Args:
        posterior: draws by name. ``(chain, draw, *site)``
        energy: Hamiltonian of each draw. ``(chain, draw)``
        num_transitions: transitions after warm-up, all chains together.
        num_diverging: how many of them diverged.
        num_saturated: how many of them were ended by the largest tree depth.
        lp: log-density of each draw, by which stuck chains are found. ``(chain, draw)``
        max_rhat: a larger R-hat is a problem.
    """
    num_chains, num_draws = energy.shape
    chosen, num_scalars = diagnostics.selection(posterior)
    scalars = (posterior[name][:, :, *index] for name, index in chosen)
    rhat, bulk, tail = diagnostics.convergence(scalars, len(chosen), num_draws)
    names = [f"{name}[{', '.join(map(str, index))}]" if index else name for name, index in chosen]
    worst_rhat, worst_bulk, worst_tail = (diagnostics.worst(names, values) for values in (-rhat, bulk, tail))
    bfmi = diagnostics.bfmi(energy)
    nans = {name: diagnostics.num_nans(x) for name, x in posterior.items() if x.dtype.kind in "fc"}
    stuck, stuck_check = _check_stuck(lp, posterior)
    checks = (
        _check_divergences(num_diverging, num_transitions),
        _check_trees(num_saturated),
        _check_rhat(-worst_rhat[0], worst_rhat[1], max_rhat, num_draws if num_scalars else None),
        *_check_ess(worst_bulk, worst_tail, MIN_ESS_PER_CHAIN * num_chains, num_transitions // max(num_chains, 1)),
        _check_bfmi(bfmi),
        stuck_check,
        _check_nans(nans),
    )
    return Report(
        num_draws=num_chains * num_draws,
        num_transitions=num_transitions,
        num_diverging=num_diverging,
        num_saturated=num_saturated,
        num_nan=sum(nans.values()),
        max_rhat=-worst_rhat[0],
        max_rhat_name=worst_rhat[1],
        min_ess_bulk=worst_bulk[0],
        min_ess_bulk_name=worst_bulk[1],
        min_ess_tail=worst_tail[0],
        min_ess_tail_name=worst_tail[1],
        min_bfmi=float(np.min(bfmi)) if bfmi.size else math.nan,
        stuck_chains=stuck,
        num_scalars=num_scalars,
        num_scalars_checked=len(chosen),
        checks=checks,
    )


# --- one check after the other ----------------------------------------------------------------------------------------


def _check_divergences(number: int, num_transitions: int) -> Check:
    percent = 100 * number / max(num_transitions, 1)
    share = f"{percent:.1f}" if percent >= 0.1 else "under 0.1"
    problem = (
        f"{_count(number, 'divergence')} ({share} % of transitions): draws are missing where the posterior is "
        "narrow. Take smaller steps, ppl.NUTS(target_accept=0.95), or other coordinates, "
        "ppl.reparam(model, {name: LocScaleReparam(0.0)})."
    )
    return _counted("divergences", number, "", problem)


def _check_trees(number: int) -> Check:
    problem = (
        f"{_count(number, 'tree')} ended by max_tree_depth: trajectories end before they turn, and draws depend on "
        "each other. Give the latents like scales, warm up longer (num_warmup=), or allow longer trajectories, "
        "ppl.NUTS(max_tree_depth=12)."
    )
    return _counted("saturated trees", number, "", problem)


def _check_rhat(value: float, name: str, bound: float, num_draws: int | None) -> Check:
    """Judges the largest R-hat; ``num_draws`` is None where there is no scalar to judge."""
    known = not math.isnan(value)
    ok = value <= bound if known else None if num_draws is None else False
    problem = ""
    if known and not ok:
        problem = (
            f"R-hat {_number(value, '.3f')} > {bound} for {name}: the chains disagree. Run longer (num_warmup=, "
            "num_samples=); if they stay apart, the posterior has several modes: compare starts (init=), or write a "
            "model with one."
        )
    elif num_draws is not None and num_draws < MIN_DRAWS:
        problem = (
            f"R-hat and ESS could not be computed: {num_draws} draws of each chain are too few. Ask for more "
            "(num_samples=)."
        )
    elif not known and num_draws is not None:
        problem = (
            "R-hat and ESS could not be computed: no scalar is finite and varies. Look for chains that are stuck, and "
            "for NaNs."
        )
    return Check("R-hat", _number(value, ".3f"), f"<= {bound}", ok, name, problem)


def _check_ess(bulk: tuple[float, str], tail: tuple[float, str], bound: int, num_steps: int) -> tuple[Check, Check]:
    """Judges both effective sample sizes; the smaller says what to do."""
    kind, (value, name) = ("bulk", bulk) if bulk[0] <= tail[0] else ("tail", tail)
    needed = num_steps * bound / max(value, 1.0)
    if needed <= 10 * num_steps:
        digits = 10 ** max(math.floor(math.log10(needed)) - 1, 0) if needed else 1
        fix = f"Run longer: num_samples={math.ceil(needed / digits) * digits} or so."
    else:
        fix = "More draws help little: see to the other problems first, or try other coordinates (ppl.reparam)."
    problem = f"{kind} ESS {value:.0f} < {bound} for {name}: means and quantiles are uncertain. {fix}"

    def check(own: str, value: float, name: str) -> Check:
        ok = None if math.isnan(value) else value >= bound
        told = problem if ok is False and own == kind else ""
        return Check(f"{own} ESS", _number(value, ".0f"), f">= {bound}", ok, name, told)

    return check("bulk", *bulk), check("tail", *tail)


def _check_bfmi(bfmi: np.ndarray) -> Check:
    if not bfmi.size:
        return Check("E-BFMI", "-", f">= {MIN_BFMI}", None)
    value, ok = float(bfmi.min()), bool(bfmi.min() >= MIN_BFMI)
    problem = (
        f"E-BFMI {value:.2f} < {MIN_BFMI} in {_chains(np.flatnonzero(bfmi < MIN_BFMI))}: the energy mixes slowly, and "
        "heavy tails are under-explored. Write heavy-tailed latents in other coordinates (ppl.reparam), or run longer."
    )
    return Check("E-BFMI", f"{value:.2f}", f">= {MIN_BFMI}", ok, _chains([np.argmin(bfmi)]), "" if ok else problem)


def _check_stuck(lp: np.ndarray | None, posterior: Draws) -> tuple[tuple[int, ...], Check]:
    """Chains that stand still or sit apart, and what to say of them."""
    if lp is None or lp.shape[1] < 2 * MIN_DRAWS:
        return (), Check("stuck chains", "-", "0", None)
    later = np.asarray(lp[:, lp.shape[1] // 2 :], float)
    still = [chain for chain in range(len(later)) if diagnostics.moves(chain, later[chain], posterior) < MIN_MOVES]
    apart, best = diagnostics.apart(later, [chain for chain in range(len(later)) if chain not in still])
    problems = []
    if still:
        problems.append(
            f"{_chains(still)} hardly moved in the last {later.shape[1]} draws: steps are too long there. Take smaller "
            "ones, ppl.NUTS(target_accept=0.95), warm up longer (num_warmup=), or start elsewhere (init=)."
        )
    if apart:
        about = ", ".join(f"{np.median(later[chain]):.4g} in chain {chain}" for chain in [*apart, best])
        problems.append(
            f"{_chains(apart)} stayed at far lower log-densities than chain {best} ({about}): at a lesser mode, or "
            'where it is hard to leave. Start near a mode, init="mode", or at values of your own, init={name: value}; '
            "and warm up longer (num_warmup=)."
        )
    stuck = tuple(sorted([*still, *apart]))
    return stuck, _counted("stuck chains", len(stuck), _chains(stuck), " ".join(problems))


def _check_nans(nans: dict[str, int]) -> Check:
    number, names = sum(nans.values()), ", ".join(name for name, count in nans.items() if count)
    problem = (
        f"{_count(number, 'NaN')} in {names}, whose scalars R-hat and ESS leave out. In a branch of cond that is not "
        "taken NaN is right; elsewhere guard the arguments of log, sqrt and division."
    )
    return _counted("NaNs", number, names, problem)


def _counted(diagnostic: str, number: int, where: str, problem: str) -> Check:
    """A check of what should not be there at all."""
    return Check(diagnostic, str(number), "0", not number, where, problem if number else "")


# --- words ------------------------------------------------------------------------------------------------------------


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else f"{value:{form}}" if value < 1e6 else f"{value:.0e}"


def _chains(numbers: Any) -> str:
    listed = ", ".join(str(int(number)) for number in numbers)
    return "" if not listed else f"chain {listed}" if len(numbers) == 1 else f"chains {listed}"
