"""Why no starting point was found: a table of sites at the last point that was tried."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ppleffects.errors import NoValidStartError
from ppleffects.inference.layout import Layout
from ppleffects.inference.processes import fetch
from ppleffects.inference.start_rules import values_at
from ppleffects.inference.starts import Start
from ppleffects.inference.table import aligned


def check_starts(
    target: Any, start: Start, layout: Layout, arguments: dict[str, Any], given: Mapping[str, np.ndarray] | None = None
) -> None:
    """Raise where a chain has no start with a finite density and gradient.

    Args:
        target: the density.
        start: the search of all chains.
        layout: where they run.
        arguments: the model's arguments by name, among which a NaN is looked for.
        given: values that chains were to start at. ``(chain, *site)``

    Raises:
        NoValidStartError: with a row for each site: value, log-probability, finite or not, and the line.
    """
    found = fetch(start.found)[: layout.num_chains]
    if found.all():
        return
    chain = int(np.argmin(found))
    failed = jax.tree.map(lambda leaf: leaf[chain], fetch(start))
    own = {name: np.asarray(value)[chain] for name, value in (given or {}).items()}
    table = site_table(target, failed, own)
    chains = f"chains without: {[int(chain) for chain in np.flatnonzero(~found)]}"
    outside = [name for name, flag in failed.outside.items() if flag]
    if outside:
        site = target.sites[outside[0]]
        raise NoValidStartError(
            f"a value of init= lies outside of the support of its site ({chains}); "
            f"chain {chain} was to start at\n{table}",
            site=site.name,
            source=site.source,
            expected=f"a value in the support of {type(site.dist).__name__}: {_support(site)}",
            found=_summary(own[site.name]) + (f", and {', '.join(outside[1:])} are outside too" if outside[1:] else ""),
            fix="give a value with a positive density, or leave the site out",
        )
    holding_nan = [name for name, value in arguments.items() if _has_nan(value)]
    raise NoValidStartError(
        f"no starting point with a finite log-density and gradient in {int(failed.num_tries)} tries "
        f"({chains}); chain {chain} ended at\n{table}",
        expected="a finite log-density and gradient",
        found=f"log-density {float(failed.log_density):.6g}"
        + (f"; NaN in the model's argument {', '.join(holding_nan)}" if holding_nan else ""),
        fix="look at the sites that are not finite; give init= values, or parameters that keep the density finite",
    )


def site_table(target: Any, start: Start, given: Mapping[str, np.ndarray]) -> str:
    """A row for each site: name, value, log-probability, gradient, finite or not, source line.

    Where a value lies outside of its support, there is no position, and so no gradient.
    """
    free = {name: u for name, u in start.position.items() if name not in given}
    values, log_probs = fetch(jax.jit(values_at)(target, free, given))
    values = {**fetch(target.observed()), **values}
    outside = any(start.outside.values())
    rows = [("site", "kind", "value", "log-prob", "gradient", "finite", "line")]
    for name, site in target.sites.items():
        value, log_prob = values.get(name), log_probs.get(name)
        gradient = None if outside else start.gradient.get(name)
        total = None if log_prob is None else np.sum(np.asarray(log_prob))
        finite = all(np.isfinite(np.asarray(part)).all() for part in (value, total, gradient) if part is not None)
        cells = (_summary(value), _summary(total), _summary(gradient))
        rows.append((name, site.kind, *cells, "yes" if finite else "NO", str(site.source)))
    return aligned(rows)


def _support(site: Any) -> str:
    """The support of a site, with its bounds where they are numbers."""
    constraint = site.support
    while hasattr(constraint, "base_constraint"):
        constraint = constraint.base_constraint
    name = type(constraint).__name__.strip("_")
    bounds = {part: getattr(constraint, part, None) for part in ("lower_bound", "upper_bound")}
    known = [f"{part}={bound}" for part, bound in bounds.items() if isinstance(bound, int | float)]
    return f"{name}({', '.join(known)})" if known else name


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
    numbers = [leaf for leaf in jax.tree.leaves(value) if hasattr(leaf, "dtype") or isinstance(leaf, float)]
    leaves = [np.asarray(leaf) for leaf in fetch(numbers)]
    return any(np.issubdtype(leaf.dtype, np.inexact) and np.isnan(leaf).any() for leaf in leaves)
