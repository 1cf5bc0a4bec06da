"""Tables that notebooks and repository pages render."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A table of text; its first column is left-aligned, the others right.

    Attributes:
        header: the names of the columns.
        rows: one text for each column.

    Raises:
        ValueError: a row with another number of columns.

    >>> Table(["input", "e4m3"], [["500", "448"]])
    input  e4m3
    500     448
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __post_init__(self) -> None:
        """Refuse a ragged table."""
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"rows: got one with {len(row)} columns under {len(self.header)} names; give as many")

    def _repr_markdown_(self) -> str:
        """What Jupyter shows."""
        rule = ["---", *["--:"] * (len(self.header) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in (self.header, rule, *self.rows))

    def __repr__(self) -> str:
        """What a terminal shows."""
        rows = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                f"{cell:<{width}}" if not index else f"{cell:>{width}}" for index, (cell, width) in enumerate(pairs)
            )
            for pairs in (list(zip(row, widths, strict=True)) for row in rows)
        ]
        return "\n".join(line.rstrip() for line in lines)
