"""What went wrong in a run: divergences, saturated trees, R-hat, effective sample sizes, E-BFMI, NaNs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

# Vehtari et al. 2021, sections 4 and 5; Betancourt 2016.
MAX_RHAT = 1.01
MIN_ESS_PER_CHAIN = 100
MIN_BFMI = 0.3
# R-hat and ESS of more scalars than this are those of an even selection: they cost milliseconds each.
MAX_SCALARS = 500


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
        min_ess_tail: smallest tail effective sample size.
        min_ess_name: the scalar that has the smaller of both.
        min_bfmi: smallest energy Bayesian fraction of missing information over chains.
        num_scalars: scalars in the posterior.
        num_scalars_checked: scalars of which R-hat and ESS were computed.
        problems: a sentence for each thing that is wrong.
    """

    num_draws: int
    num_transitions: int
    num_diverging: int
    num_saturated: int
    num_nan: int
    max_rhat: float
    max_rhat_name: str
    min_ess_bulk: float
    min_ess_tail: float
    min_ess_name: str
    min_bfmi: float
    num_scalars: int
    num_scalars_checked: int
    problems: tuple[str, ...] = ()

    def attrs(self) -> dict[str, Any]:
        """The report as attributes of a DataTree."""
        fields = asdict(self)
        return {**fields, "problems": list(self.problems)}

    def text(self) -> str:
        """The report as a few lines."""
        checked = "" if self.num_scalars == self.num_scalars_checked else f" of {self.num_scalars}"
        head = (
            f"{self.num_draws} draws of {self.num_scalars_checked}{checked} scalars: "
            f"R-hat <= {self.max_rhat:.3f} ({self.max_rhat_name}), "
            f"ESS >= {self.min_ess_bulk:.0f} bulk and {self.min_ess_tail:.0f} tail ({self.min_ess_name}), "
            f"E-BFMI >= {self.min_bfmi:.2f}, "
            f"{self.num_diverging} divergences, {self.num_saturated} saturated trees, {self.num_nan} NaNs"
        )
        return "\n".join([head, *(f"- {problem}" for problem in self.problems)])


def diagnose(
    posterior: dict[str, np.ndarray],
    energy: np.ndarray,
    *,
    num_transitions: int,
    num_diverging: int,
    num_saturated: int,
    max_rhat: float = MAX_RHAT,
) -> Report:
    """The report of a run.

    Args:
        posterior: draws by name. ``(chain, draw, *site)``
        energy: Hamiltonian of each draw. ``(chain, draw)``
        num_transitions: transitions after warm-up, all chains together.
        num_diverging: how many of them diverged.
        num_saturated: how many of them were ended by the largest tree depth.
        max_rhat: a larger R-hat is a problem.
    """
    num_chains, num_draws = energy.shape
    names, scalars = _scalars(posterior)
    chosen = np.unique(np.linspace(0, len(names) - 1, min(len(names), MAX_SCALARS)).astype(int)) if names else []
    rhat, bulk, tail = _convergence([scalars(index) for index in chosen], num_draws)
    checked = [names[index] for index in chosen]
    worst, ess_name = _at(checked, rhat, np.nanargmax), _at(checked, np.minimum(bulk, tail), np.nanargmin)
    report = Report(
        num_draws=num_chains * num_draws,
        num_transitions=num_transitions,
        num_diverging=num_diverging,
        num_saturated=num_saturated,
        num_nan=sum(int(np.isnan(array).sum()) for array in posterior.values() if array.dtype.kind in "fc"),
        max_rhat=_extreme(rhat, np.nanmax),
        max_rhat_name=worst,
        min_ess_bulk=_extreme(bulk, np.nanmin),
        min_ess_tail=_extreme(tail, np.nanmin),
        min_ess_name=ess_name,
        min_bfmi=_bfmi(energy),
        num_scalars=len(names),
        num_scalars_checked=len(checked),
    )
    return Report(**{**asdict(report), "problems": _problems(report, num_chains, max_rhat)})


def _problems(report: Report, num_chains: int, max_rhat: float) -> tuple[str, ...]:
    problems = []
    if report.num_diverging:
        percent = 100 * report.num_diverging / max(report.num_transitions, 1)
        share = f"{percent:.1f}" if percent >= 0.1 else "under 0.1"
        problems.append(
            f"{report.num_diverging} divergences ({share} % of transitions): the draws are biased where the "
            "posterior is narrow; raise target_accept or write the model in other coordinates"
        )
    if report.num_saturated:
        problems.append(
            f"{report.num_saturated} trees ended by max_tree_depth: sampling is slow; "
            "rescale the latents, try dense_mass=True, or raise max_tree_depth"
        )
    if report.num_nan:
        problems.append(f"{report.num_nan} NaNs among the posterior's values")
    if report.max_rhat > max_rhat:
        problems.append(
            f"R-hat {report.max_rhat:.3f} > {max_rhat} for {report.max_rhat_name}: the chains disagree; "
            "run longer, or look for several modes"
        )
    floor = MIN_ESS_PER_CHAIN * num_chains
    if min(report.min_ess_bulk, report.min_ess_tail) < floor:
        problems.append(
            f"effective sample size {report.min_ess_bulk:.0f} (bulk), {report.min_ess_tail:.0f} (tail) < {floor} "
            f"for {report.min_ess_name}: run longer"
        )
    if report.min_bfmi < MIN_BFMI:
        problems.append(
            f"E-BFMI {report.min_bfmi:.2f} < {MIN_BFMI}: the energy mixes slowly, heavy tails are under-explored"
        )
    if not np.isfinite(report.max_rhat) and report.num_draws:
        problems.append("R-hat could not be computed: too few draws, or every scalar is constant")
    return tuple(problems)


def _scalars(posterior: dict[str, np.ndarray]) -> tuple[list[str], Any]:
    """Names of all scalars, and a function from a scalar's index to its draws ``(chain, draw)``."""
    names, where = [], []
    for name, array in posterior.items():
        for index in np.ndindex(array.shape[2:]):
            names.append(f"{name}[{', '.join(map(str, index))}]" if index else name)
            where.append((name, index))
    return names, lambda number: posterior[where[number][0]][(slice(None), slice(None), *where[number][1])]


def _convergence(scalars: list[np.ndarray], num_draws: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """R-hat, bulk and tail ESS of each scalar; NaN for constants and where there are too few draws."""
    from arviz_stats.base.array import array_stats  # imported when used: it costs a second

    if num_draws < 8:
        nan = np.full(len(scalars), np.nan)
        return nan, nan, nan
    results = np.full((3, len(scalars)), np.nan)
    for number, draws in enumerate(scalars):
        values = np.asarray(draws, float)
        if not np.isfinite(values).all() or np.ptp(values) == 0:
            continue
        results[0, number] = array_stats.rhat(
            _halves(values) if len(values) == 1 else values, chain_axis=0, draw_axis=1
        )
        results[1, number] = array_stats.ess(values, chain_axis=0, draw_axis=1, method="bulk")
        results[2, number] = array_stats.ess(values, chain_axis=0, draw_axis=1, method="tail", prob=(0.05, 0.95))
    return results[0], results[1], results[2]


def _halves(values: np.ndarray) -> np.ndarray:
    """One chain as two, since R-hat asks for more than one."""
    half = values.shape[1] // 2
    return values[:, : 2 * half].reshape(2, half)


def _bfmi(energy: np.ndarray) -> float:
    """Smallest E-BFMI over chains; NaN where there are too few draws."""
    from arviz_stats.base.array import array_stats  # imported when used: it costs a second

    if energy.shape[1] < 4 or not np.isfinite(energy).all():
        return float("nan")
    return float(np.min(array_stats.bfmi(np.asarray(energy, float))))


def _extreme(values: np.ndarray, pick: Any) -> float:
    return float(pick(values)) if values.size and not np.isnan(values).all() else float("nan")


def _at(names: list[str], values: np.ndarray, pick: Any) -> str:
    return names[int(pick(values))] if values.size and not np.isnan(values).all() else "none"
