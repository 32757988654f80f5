"""Which axis of a site's value holds the rows of a ``blocked`` likelihood."""

from __future__ import annotations

from collections.abc import Sequence

from ppleffects.effects._jax import JaxprEqn
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
        part = occurrences(body)
        _check_same(whole, part, size)
        axes |= {w.site.name: _row_axis(w, p, length, size) for w, p in zip(whole, part, strict=True)}
    return axes


def _check_same(whole: Sequence[Occurrence], part: Sequence[Occurrence], size: int) -> None:
    expected, found = ([(o.kind, o.site.name) for o in sites] for sites in (whole, part))
    if found == expected:
        return
    only = {*found} ^ {*expected}
    site = next((o for o in (*whole, *part) if (o.kind, o.site.name) in only), whole[0]).site
    raise ShapeError(
        "the sites of a likelihood given to ppl.blocked depend on the number of rows",
        site=site.name,
        source=site.source,
        expected=f"{', '.join(name for _, name in expected)}, as for all rows",
        found=f"{', '.join(name for _, name in found) or 'none'} for a block of {size}",
        fix="bind the same sites whatever the shape of the block",
    )


def _row_axis(whole: Occurrence, part: Occurrence, length: int, size: int) -> int:
    """The one axis that is as long as there are rows, in all and in a block."""
    site = whole.site
    shapes = whole.layout()[0], part.layout()[0]
    differ = [(i, sizes) for i, sizes in enumerate(zip(*shapes, strict=False)) if sizes[0] != sizes[1]]
    if len(shapes[0]) == len(shapes[1]) and [sizes for _, sizes in differ] == [(length, size)]:
        axis = differ[0][0]
        if axis < len(shapes[0]) - site.event_dim:
            return axis
    events = f", the last {site.event_dim} of them event axes" if site.event_dim else ""
    raise ShapeError(
        f"a {whole.kind} in a likelihood given to ppl.blocked does not have one entry for each row",
        site=site.name,
        source=site.source,
        expected=f"one non-event axis as long as there are rows: {length} in all, {size} in a block",
        found=f"shape {shapes[0]} for all rows, {shapes[1]} for a block{events}",
        fix="leave the sum over rows to the site (ppl.factor adds up an array), and take what is not of a row out of "
        "the likelihood",
    )
