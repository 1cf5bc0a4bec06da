"""Where elements of a matrix differ, as text: runs of rows and columns, and a small map."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_ROWS = 16
_COLUMNS = 64
_RUNS = 5


def runs_of(chosen: Tensor, of: int) -> str:
    """Say which indices below ``of`` are chosen: all, a run at either end, runs, or every so many.

    >>> runs_of(torch.tensor([64, 65, 66]), 67), runs_of(torch.tensor([7, 15, 23, 31]), 32)
    ('64-66 (the last 3 of 67)', '7, 15 ... 31: every 8th of 32')
    """
    index = chosen.flatten().tolist()
    if len(index) == of:
        return "all of 1" if of == 1 else f"all {of}"
    gaps = {after - before for before, after in pairwise(index)}
    if len(index) > 3 and len(gaps) == 1 and gaps != {1}:
        return f"{index[0]}, {index[1]} ... {index[-1]}: every {_ordinal(gaps.pop())} of {of}"
    runs: list[tuple[int, int]] = []
    for i in index:
        runs = [*runs[:-1], (runs[-1][0], i)] if runs and runs[-1][1] == i - 1 else [*runs, (i, i)]
    shown = ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs[:_RUNS])
    if len(runs) > _RUNS:
        return f"{shown} ... ({len(index)} of {of})"
    if len(runs) == 1 and runs[0][1] == of - 1:
        return f"{shown} (the last of {of})" if len(index) == 1 else f"{shown} (the last {len(index)} of {of})"
    return f"{shown} of {of}"


def _ordinal(number: int) -> str:
    ending = "th" if number % 100 in (11, 12, 13) else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def text_map(wrong: Tensor) -> list[str]:
    """Lines that show where a bool matrix is True, in cells of equal size whose sides are powers of two.

    >>> for line in text_map(torch.eye(3, 5) > 0):
    ...     print(line)
    map of 3 x 5, '.' equal, '#' different
         0 |#....
         1 |.#...
         2 |..#..
    """
    rows, columns = wrong.shape
    high, wide = _cell(rows, _ROWS), _cell(columns, _COLUMNS)
    counts, sizes = (_summed(_summed(x.long(), high).t(), wide).t() for x in (wrong, torch.ones_like(wrong)))
    cell = "" if high == wide == 1 else f" in cells of {high} x {wide}"
    some = "" if high == wide == 1 else "'+' some, "
    lines = [f"map of {rows} x {columns}{cell}, '.' equal, {some}'#' {'different' if not cell else 'all different'}"]
    for i, (row, full) in enumerate(zip(counts.tolist(), sizes.tolist(), strict=True)):
        marks = ("." if not count else "#" if count == size else "+" for count, size in zip(row, full, strict=True))
        lines.append(f"{i * high:6d} |{''.join(marks)}")
    return lines


def _cell(size: int, most: int) -> int:
    """The smallest power of two that cuts ``size`` into at most ``most`` cells."""
    return 1 << max(0, (-(-size // most) - 1).bit_length())


def _summed(x: Tensor, cell: int) -> Tensor:
    """Sums over runs of ``cell`` rows, the last run shorter."""
    missing = -x.shape[0] % cell
    return torch.nn.functional.pad(x, (0, 0, 0, missing)).view(-1, cell, x.shape[1]).sum(1)


def where_text(wrong: Tensor) -> list[str]:
    """Runs of rows and columns, and the map, of a bool tensor of any shape; leading dimensions count as rows."""
    if wrong.dim() == 0:
        return []
    flat = wrong.reshape(-1, wrong.shape[-1]).cpu()
    rows, columns = flat.any(1).nonzero(), flat.any(0).nonzero()
    leading = "rows" if wrong.dim() <= 2 else "rows (leading dimensions flattened)"
    lines = [f"{leading}: {runs_of(rows, flat.shape[0])}", f"columns: {runs_of(columns, flat.shape[1])}"]
    return lines + text_map(flat)
