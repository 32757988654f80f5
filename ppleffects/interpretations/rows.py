"""Which axis of a site's value holds the rows of a ``blocked`` likelihood."""

from __future__ import annotations

from typing import Any

from ppleffects.effects._jax import Jaxpr, JaxprEqn
from ppleffects.errors import ShapeError
from ppleffects.interpretations.layout import Occurrence, occurrences
from ppleffects.language.blocked import Blocks, length_of


def row_axes(eqn: JaxprEqn) -> dict[str, int]:
    """For each site in a blocked likelihood, the axis of its value along which the rows stand.

    Raises:
        ShapeError: a site does not have one entry for each row, or is not there for every number of rows.
    """
    blocks: Blocks = eqn.params["blocks"]
    length = length_of([v.aval for v in eqn.invars], blocks.axes)
    whole = occurrences(eqn.params["whole"])
    axes: dict[str, int] = {}
    left = [] if blocks.rest is None else [(length % blocks.rows, blocks.rest)]
    for size, body in [(blocks.rows, blocks.block), *left]:
        for all_rows, some_rows in _pairs(whole, body, size, eqn):
            axes[all_rows.site.name] = _row_axis(all_rows, some_rows, length, size, eqn)
    return axes


def _pairs(whole: tuple[Occurrence, ...], body: Jaxpr, size: int, eqn: Any) -> list[tuple[Occurrence, Occurrence]]:
    found = occurrences(body)
    names, expected = ([(o.kind, o.site.name) for o in os] for os in (found, whole))
    if names != expected:
        odd = next(iter({name for _, name in {*names} ^ {*expected}}), whole[0].site.name)
        raise ShapeError(
            "the sites of a likelihood given to ppl.blocked depend on the number of rows",
            site=odd,
            source=next(o.site.source for o in (*whole, *found) if o.site.name == odd),
            expected=f"{', '.join(name for _, name in expected)}, as for all rows",
            found=f"{', '.join(name for _, name in names) or 'none'} for a block of {size}",
            fix="bind the same sites whatever the shape of the block",
        )
    return list(zip(whole, found, strict=True))


def _row_axis(whole: Occurrence, part: Occurrence, length: int, size: int, eqn: Any) -> int:
    site = whole.site
    shapes = whole.layout()[0], part.layout()[0]
    differ = [i for i, (a, b) in enumerate(zip(*shapes, strict=False)) if a != b]
    fits = len(shapes[0]) == len(shapes[1]) and len(differ) == 1
    if fits and (shapes[0][differ[0]], shapes[1][differ[0]]) == (length, size):
        axis = differ[0]
        if axis < len(shapes[0]) - site.event_dim:
            return axis
    raise ShapeError(
        f"a {whole.kind} in a likelihood given to ppl.blocked does not have one entry for each row",
        site=site.name,
        source=site.source,
        expected=f"one non-event axis as long as there are rows: {length} in all, {size} in a block",
        found=f"shape {shapes[0]} for all rows, {shapes[1]} for a block"
        + (f", the last {site.event_dim} of them event axes" if site.event_dim else ""),
        fix="leave the sum over rows to the site (ppl.factor adds up an array), and take what is not of a row out of "
        "the likelihood",
    )
