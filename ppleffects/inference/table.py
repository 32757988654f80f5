"""Rows of text as a table that reads alike in a terminal, a log file and a notebook."""

from __future__ import annotations

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """The rows with their columns aligned.

    Args:
        rows: cells; all rows have as many.
        right: numbers of the columns to align on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def cell(text: str, column: int) -> str:
        return text.rjust(widths[column]) if column in right else text.ljust(widths[column])

    return "\n".join(("  " + "  ".join(cell(text, i) for i, text in enumerate(row))).rstrip() for row in rows)
