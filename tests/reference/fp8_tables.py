"""FP8 rounding by looking up a table of exact values: no formula in common with ``emulation/rounding.py``.

The tables are typed in from the OCP OFP8 specification (revision 1.0, table 1) and hold Fractions; a number is
rounded by finding it between two entries.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch

NAN_CODE = 0x7F


@dataclass(frozen=True)
class Table:
    """The finite values of a format by code, without sign, and the first value that larger exponents would add."""

    name: str
    dtype: torch.dtype
    values: tuple[Fraction, ...]
    beyond: Fraction
    has_infinity: bool

    @property
    def max_code(self) -> int:
        """The code of the largest finite value."""
        return len(self.values) - 1

    @cached_property
    def floats(self) -> list[float]:
        """``values`` as floats."""
        return [float(v) for v in self.values]

    def decode(self, code: int) -> Fraction | float:
        """The value of a code from 0 to 255: a Fraction, or nan, inf, -inf, -0.0.

        >>> TABLES["e4m3"].decode(0xB8), TABLES["e5m2"].decode(0xFC), TABLES["e4m3"].decode(0x80)
        (Fraction(-1, 1), -inf, -0.0)
        """
        sign, magnitude = (-1 if code >= 128 else 1), code % 128
        if magnitude <= self.max_code:
            return sign * self.values[magnitude] if magnitude or sign > 0 else -0.0
        return sign * math.inf if self.has_infinity and magnitude == self.max_code + 1 else math.nan


def _values(exponents: range, significands: int, last_of_top: int) -> tuple[Fraction, ...]:
    """Every finite value from 0 up: ``significands`` to a binade; the top one ends with ``last_of_top``."""
    values = [Fraction(i, significands) * Fraction(2) ** exponents[0] for i in range(significands)]
    for e in exponents:
        values += [(1 + Fraction(i, significands)) * Fraction(2) ** e for i in range(significands)]
    return tuple(values[: len(values) - significands + last_of_top + 1])


TABLES = {
    # S.1111.111 is NaN, so the top binade ends at 1.75.
    "e4m3": Table("e4m3", torch.float8_e4m3fn, _values(range(-6, 9), 8, 6), Fraction(480), has_infinity=False),
    # As IEEE: exponent 31 is Inf and NaN.
    "e5m2": Table("e5m2", torch.float8_e5m2, _values(range(-14, 16), 4, 3), Fraction(65536), has_infinity=True),
}


@dataclass(frozen=True)
class Place:
    """Where an input lies: its sign, the code below its magnitude, and how far towards the next (0 <= position < 1).

    A magnitude at or past ``Table.beyond`` has the code after the last finite one and position 0. ``kind`` is
    "finite", "infinite" or "nan".
    """

    negative: bool
    kind: str
    lower: int
    position: Fraction


def place(x: float, table: Table) -> Place:
    """Find ``x``, any Python float, in the table.

    >>> place(-1.03125, TABLES["e4m3"])
    Place(negative=True, kind='finite', lower=56, position=Fraction(1, 4))
    """
    negative = math.copysign(1.0, x) < 0
    if not math.isfinite(x):
        return Place(negative, "nan" if math.isnan(x) else "infinite", table.max_code + 1, Fraction(0))
    if abs(x) >= table.beyond:
        return Place(negative, "finite", table.max_code + 1, Fraction(0))
    # A float64 holds every entry, so comparing floats is exact too, and faster.
    lower = bisect_right(table.floats, abs(x)) - 1
    upper = table.beyond if lower == table.max_code else table.values[lower + 1]
    return Place(negative, "finite", lower, (abs(Fraction(x)) - table.values[lower]) / (upper - table.values[lower]))


def rounded(at: Place, table: Table, rounding: str, saturate: bool, *, random: int = 0, random_bits: int = 0) -> int:
    """The code of an input at that place.

    Args:
        at: from :func:`place`.
        table: the format.
        rounding: "nearest_even", "toward_zero" or "stochastic".
        saturate: as in ``round_to_fp8``.
        random: for "stochastic": a whole number from 0 to ``2**random_bits - 1``; below position * 2**random_bits
            (cut to a whole number) it rounds up.
        random_bits: how many bits ``random`` has.

    >>> hex(rounded(place(-464.5, TABLES["e4m3"]), TABLES["e4m3"], "nearest_even", saturate=False))
    '0x7f'
    """
    if at.kind == "nan":
        return NAN_CODE
    if rounding == "nearest_even":
        up = at.position > Fraction(1, 2) or (at.position == Fraction(1, 2) and at.lower % 2 == 1)
    elif rounding == "stochastic":
        up = random < math.floor(at.position * 2**random_bits)
    else:
        up = False
    magnitude = at.lower + up
    if magnitude > table.max_code:
        if saturate or (rounding == "toward_zero" and at.kind == "finite"):
            magnitude = table.max_code
        elif table.has_infinity:
            magnitude = table.max_code + 1
        else:
            return NAN_CODE
    return magnitude + 128 * at.negative
