"""Quantisation one element at a time, in Fractions: which group an element is in, its scale, its code."""

from __future__ import annotations

import math
from collections import defaultdict
from fractions import Fraction

from reference.fp8_tables import NAN_CODE, Table, place, rounded
from reference.rationals import FP32, number, round_to

Group = tuple[int, int]


def group_of(row: int, column: int, scaling: str) -> Group:
    """The place in the scales of the scale that an element has.

    >>> group_of(130, 300, "128x128"), group_of(130, 300, "row")
    ((1, 2), (130, 0))
    """
    return {
        "tensor": (0, 0),
        "row": (row, 0),
        "1x128": (row, column // 128),
        "128x128": (row // 128, column // 128),
    }[scaling]


def to_fp32(x: Fraction) -> Fraction | None:
    """Rounded to nearest even; None where fp32 overflows."""
    return round_to(number(x), FP32).magnitude


def scale_of(absmax: Fraction, table: Table, scale_format: str, bound: float | None = None) -> Fraction:
    """The scale of a group with that largest finite magnitude, clipped at the fp32 nearest to a bound."""
    rounded_absmax = to_fp32(absmax)
    if rounded_absmax is None:
        rounded_absmax = FP32.largest
    if bound is not None:
        limit = to_fp32(Fraction(bound))
        assert limit is not None
        rounded_absmax = min(rounded_absmax, limit)
    if rounded_absmax == 0:
        return Fraction(1)
    scale = to_fp32(rounded_absmax / table.values[-1])
    assert scale is not None
    if scale_format == "ue8m0":
        power = Fraction(1, 2**149)
        while power < scale:
            power *= 2
        scale = power
    return max(scale, Fraction(1, 2**126))


def scales_of(
    x: list[list[float]], table: Table, scaling: str, scale_format: str, bound: float | None = None
) -> dict[Group, Fraction]:
    """The scale of every group."""
    absmax: dict[Group, Fraction] = defaultdict(Fraction)
    for i, row in enumerate(x):
        for j, value in enumerate(row):
            group = group_of(i, j, scaling)
            absmax[group] = max(absmax[group], abs(Fraction(value)) if math.isfinite(value) else Fraction(0))
    return {group: scale_of(largest, table, scale_format, bound) for group, largest in absmax.items()}


def code_of(value: float, scale: Fraction, table: Table, *, wide: bool) -> int:
    """The code of an element: divided in fp32 (``wide``: in float64), then rounded to nearest even, saturating."""
    if math.isnan(value):
        return NAN_CODE
    negative = math.copysign(1.0, value) < 0
    if math.isinf(value):
        return table.max_code + 1 + 128 * negative if table.has_infinity else NAN_CODE
    exact = abs(Fraction(value)) / scale
    if wide:
        quotient = float(exact) if exact < 2**1023 else math.inf
    else:
        divided = to_fp32(exact)
        quotient = math.inf if divided is None else float(divided)
    return rounded(place(math.copysign(quotient, value), table), table, "nearest_even", saturate=True)
