"""Inputs that decide whether a rounding to FP8 is right, for each source dtype."""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from itertools import pairwise

import torch

from reference.fp8_tables import TABLES, Place, Table, place

SOURCES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def turning_points(table: Table) -> list[Fraction]:
    """Every magnitude at which some rounding changes its answer: the values, the midpoints, and the first beyond."""
    ladder = [*table.values, table.beyond]
    return sorted({*ladder, *((low + high) / 2 for low, high in pairwise(ladder))})


def boundary_inputs(table: Table, dtype: torch.dtype) -> torch.Tensor:
    """Every turning point that ``dtype`` holds, what lies beside it on both sides, and the ends of ``dtype``.

    "Beside" is each number whose bits differ by a power of two: the next representable one, and for float64 also
    those that float32 would confuse with the point. Both signs; infinities; NaNs, quiet and signalling.
    """
    integer = _INTEGERS[dtype.itemsize]
    inf = int(torch.tensor(torch.inf, dtype=dtype).view(integer))
    points = torch.tensor([float(p) for p in turning_points(table)], dtype=torch.float64).to(dtype).view(integer)
    offsets = [0, *(1 << k for k in range((inf & -inf).bit_length() - 1))]
    near = {bits + sign * offset for bits in points.tolist() for offset in offsets for sign in (-1, 1)}
    ends = {0, 1, 2, inf - 1, inf, inf + 1, inf | inf >> 1, torch.iinfo(integer).max}
    finite = {bits for bits in near if 0 <= bits <= inf}
    positive = torch.tensor(sorted(finite | ends), dtype=integer)
    sign_bit = torch.iinfo(integer).min
    return torch.cat([positive, positive | sign_bit]).view(dtype)


@cache
def boundary_places(name: str, dtype: torch.dtype) -> list[Place]:
    """Where each of the boundary inputs lies in the table of that name."""
    return [place(v, TABLES[name]) for v in boundary_inputs(TABLES[name], dtype).double().tolist()]


def all_16_bit_inputs(dtype: torch.dtype) -> torch.Tensor:
    """All 65,536 numbers of a 16-bit dtype."""
    return torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
