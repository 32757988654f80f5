"""Ratios of the figures of ``samplers.py``, their table and their plot."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

FIGURES = {"ess_per_second": "ESS / s", "ess_per_gradient": "ESS / gradient"}
type Row = dict[str, Any]
type Values = dict[tuple[str, str], float]  # (posterior, peer) -> figure


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def figures(rows: list[Row], figure: str) -> Values:
    """The geometric mean over seeds, where each seed has the figure."""
    found: dict[tuple[str, str], list[float | None]] = {}
    for row in rows:
        found.setdefault((row["posterior"], row["peer"]), []).append(row.get(figure))
    return {key: _mean([v for v in values if v]) for key, values in found.items() if all(values)}


def _numpyro(values: Values, posterior: str) -> float | None:
    return values.get((posterior, "numpyro-diagonal"))


def _better_numpyro(values: Values, posterior: str) -> float | None:
    both = [values.get((posterior, f"numpyro-{metric}")) for metric in ("diagonal", "dense")]
    return max(filter(None, both)) if all(both) else None


def _nutpie(values: Values, posterior: str) -> float | None:
    return values.get((posterior, "nutpie-low-rank"))


BASES: dict[str, Callable[[Values, str], float | None]] = {
    "numpyro-diagonal": _numpyro,
    "better of numpyro-diagonal and numpyro-dense": _better_numpyro,
    "nutpie-low-rank": _nutpie,
}


def summarise(rows: list[Row]) -> list[Row]:
    """Geometric means of ratios over the posteriors that both have figures for; the number of these is told."""
    summary = []
    for figure in FIGURES:
        values = figures(rows, figure)
        posteriors = dict.fromkeys(posterior for posterior, _ in values)
        for peer in dict.fromkeys(peer for _, peer in values):
            for base, choose in BASES.items():
                pairs = {p: (values.get((p, peer)), choose(values, p)) for p in posteriors}
                ratios = {p: own / other for p, (own, other) in pairs.items() if own and other}
                if ratios:
                    means = {"ratio": _mean(list(ratios.values())), "worst": min(ratios.values())}
                    counts = {"posteriors": len(ratios), "worst_posterior": min(ratios, key=lambda p: ratios[p])}
                    summary.append({"figure": figure, "peer": peer, "base": base, **means, **counts})
    return summary


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


HEAD = ("posterior", "peer", "seed", "ESS", "ESS/s", "ESS/grad", "grads warm", "grads", "div", "R-hat", "errors", "s")
FORMAT = "{:<30.30} {:<17} {:>4} {:>6} {:>8} {:>8} {:>10} {:>9} {:>5} {:>5} {:>6} {:>7}"


def line(row: Row) -> str:
    """One row of the table."""
    start = row["posterior"], row["peer"], str(row["seed"])
    if "error" in row:
        return f"{start[0]:<30.30} {start[1]:<17} {start[2]:>4} {row['error']}"
    return FORMAT.format(
        *start,
        _number(row["min_ess"], ".0f"),
        _number(row["ess_per_second"], ".1f"),
        _number(row["ess_per_gradient"], ".4f"),
        row["gradients_warmup"],
        row["gradients"],
        row["divergences"],
        _number(row["max_rhat"], ".2f"),
        _number(row["max_errors"], ".1f"),
        f"{row['seconds']:.1f}",
    )


def print_summary(summary: list[Row]) -> None:
    """For each figure a table of peers and bases: the mean ratio, over how many posteriors, and the worst."""
    for figure, label in FIGURES.items():
        print(f"\n{label}, geometric mean of ratios (posteriors; worst) to: {'; '.join(BASES)}")
        rows = [row for row in summary if row["figure"] == figure]
        for peer in dict.fromkeys(row["peer"] for row in rows):
            cells = {
                row["base"]: f"{row['ratio']:.2f} ({row['posteriors']}; {row['worst']:.2f})"
                for row in rows
                if row["peer"] == peer
            }
            print(f"{peer:<18}" + "".join(f"{cells.get(base, '-'):<22}" for base in BASES))


def plot(rows: list[Row], path: Path) -> None:
    """Both figures of each posterior and peer, on log axes."""
    fig, axes = plt.subplots(1, len(FIGURES), figsize=(11, 6), sharey=True, layout="constrained")
    posteriors = list(dict.fromkeys(row["posterior"] for row in rows))[::-1]
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    for ax, (figure, label) in zip(axes, FIGURES.items(), strict=True):
        values = figures(rows, figure)
        for index, peer in enumerate(peers):
            shift = 0.5 * (index / max(len(peers) - 1, 1) - 0.5)
            points = [(values[p, peer], y - shift) for y, p in enumerate(posteriors) if (p, peer) in values]
            if points:
                marker, size = ("D", 36) if peer == "ppleffects" else ("o", 18)
                ax.scatter(*zip(*points, strict=True), s=size, marker=marker, color=f"C{index}", label=peer)
        ax.set(xscale="log", xlabel=f"{label}, least of all quantities (bulk)")
        ax.grid(axis="x", alpha=0.3)
        for y in range(len(posteriors) - 1):
            ax.axhline(y + 0.5, color="0.9", linewidth=0.8)
    axes[0].set_yticks(range(len(posteriors)), [name.partition("-")[2] for name in posteriors])
    handles, labels = axes[0].get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False)
    fig.savefig(path, dpi=120)
    plt.close(fig)
