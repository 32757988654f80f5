"""Why no starting point was found: a table of sites at the last point that was tried."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ppleffects.errors import NoValidStartError
from ppleffects.inference.chunks import Start
from ppleffects.inference.layout import Layout


def check_starts(target: Any, start: Start, layout: Layout, arguments: dict[str, Any]) -> None:
    """Raise where a chain has no start with a finite density and gradient.

    Args:
        target: the density.
        start: the search of all chains.
        layout: where they run.
        arguments: the model's arguments by name, among which a NaN is looked for.

    Raises:
        NoValidStartError: with a row for each site: value, log-probability, finite or not, and the line.
    """
    found = np.asarray(start.found)[: layout.num_chains]
    if found.all():
        return
    chain = int(np.argmin(found))
    failed = jax.tree.map(lambda leaf: np.asarray(leaf)[chain], start)
    table = site_table(target, failed)
    holding_nan = [name for name, value in arguments.items() if _has_nan(value)]
    raise NoValidStartError(
        f"no starting point with a finite log-density and gradient in {int(failed.num_tries)} tries "
        f"(chains without: {[int(chain) for chain in np.flatnonzero(~found)]}); chain {chain} ended at\n{table}",
        expected="a finite log-density and gradient",
        found=f"log-density {float(failed.log_density):.6g}"
        + (f"; NaN in the model's argument {', '.join(holding_nan)}" if holding_nan else ""),
        fix="look at the sites that are not finite; give init= values, or parameters that keep the density finite",
    )


def site_table(target: Any, start: Start) -> str:
    """A row for each site: name, value, log-probability, gradient, finite or not, source line."""
    position = {name: np.asarray(value, target.sites[name].dtype) for name, value in start.position.items()}
    values, log_probs = jax.jit(lambda target, position: (target.constrain(position), target.log_probs(position)))(
        target, position
    )
    values = {**target.observed(), **values}
    rows = [("site", "kind", "value", "log-prob", "gradient", "finite", "line")]
    for name, site in target.sites.items():
        value, log_prob, gradient = values.get(name), log_probs.get(name), start.gradient.get(name)
        total = None if log_prob is None else np.sum(np.asarray(log_prob))
        finite = all(np.isfinite(np.asarray(part)).all() for part in (value, total, gradient) if part is not None)
        cells = (_summary(value), _summary(total), _summary(gradient))
        rows.append((name, site.kind, *cells, "yes" if finite else "NO", str(site.source)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _summary(value: Any) -> str:
    if value is None:
        return "-"
    array = np.asarray(value)
    if array.size == 0:
        return "(empty)"
    if array.size == 1:
        return f"{array.item():.4g}"
    bad = int((~np.isfinite(array)).sum()) if np.issubdtype(array.dtype, np.inexact) else 0
    finite = array[np.isfinite(array)] if bad else array
    span = f"{finite.min():.4g} to {finite.max():.4g}" if finite.size else "none finite"
    return f"{span} {array.shape}" + (f", {bad} not finite" if bad else "")


def _has_nan(value: Any) -> bool:
    leaves = (np.asarray(leaf) for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype") or isinstance(leaf, float))
    return any(np.issubdtype(leaf.dtype, np.inexact) and np.isnan(leaf).any() for leaf in leaves)
