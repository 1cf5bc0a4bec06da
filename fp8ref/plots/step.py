"""One step of a tensor-core unit, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from fp8ref.emulation.dot import fused_dot_add
from fp8ref.emulation.formats import format_of
from fp8ref.emulation.units import TensorCoreUnit, unit_of
from fp8ref.plots.style import axes_or_current

_FP32_E_MIN = -126


@dataclass(frozen=True)
class Term:
    """A product or the accumulator on its way into the sum.

    Attributes:
        label: what the picture calls it.
        value: exactly.
        exponent: by which it is aligned, or None for zero, which takes no part.
        kept: the value cut toward zero to the grid of the step.

    >>> Term("c", Fraction(3, 2), 0, Fraction(1)).lost
    Fraction(1, 2)
    """

    label: str
    value: Fraction
    exponent: int | None
    kept: Fraction

    @property
    def lost(self) -> Fraction:
        """What the cut took, with the sign of the value."""
        return self.value - self.kept


@dataclass(frozen=True)
class Step:
    """One step: its terms, the sum of what was kept of them, and the result.

    Attributes:
        unit: that computes it.
        terms: the products in order, then c.
        largest: the largest exponent among the terms.
        total: the exact sum of the kept terms.
        result: the total cut toward zero to the unit's significant bits.

    >>> one = torch.ones(2).to(torch.float8_e4m3fn)
    >>> explain_step(one, one, torch.tensor(0.25)).exact
    Fraction(9, 4)
    """

    unit: TensorCoreUnit
    terms: tuple[Term, ...]
    largest: int
    total: Fraction
    result: Fraction

    @property
    def exact(self) -> Fraction:
        """The sum without any cut."""
        return sum((term.value for term in self.terms), Fraction())

    @property
    def grid(self) -> int:
        """The exponent of the last bit that the alignment keeps."""
        return self.largest - self.unit.fraction_bits


def explain_step(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, unit: str | TensorCoreUnit = "sm90") -> Step:
    """Follow ``c + sum(a * b)`` through one step of a unit in exact arithmetic.

    Args:
        a: FP8 [L], finite; L at most the unit's ``products_per_step``.
        b: FP8 [L], finite.
        c: fp32 [], finite.
        unit: with c in the alignment, and the first L of its k in one step: ``"sm90"``, ``"sm89"``, ``"sm100"`` or one
            of your own.

    Returns:
        The step. Its result has been compared with :func:`fp8ref.fused_dot_add`.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.

    >>> x = torch.tensor([16.0, 2.0**-9]).to(torch.float8_e4m3fn)
    >>> step = explain_step(x, x, torch.tensor(0.0))
    >>> step.result, step.terms[1].lost == Fraction(2) ** -18
    (Fraction(256, 1), True)
    """
    model = unit_of(unit)
    expected = fused_dot_add(a, b, c, model)
    _check(a, b, expected, model)
    minima = (format_of(a.dtype).e_min, format_of(b.dtype).e_min)
    raw: list[tuple[str, Fraction, int | None]] = []
    for x, y in zip(a.double().tolist(), b.double().tolist(), strict=True):
        exponent = _exponent(x, minima[0]) + _exponent(y, minima[1]) if x * y else None
        raw.append((f"{_short(x)} × {_short(y)}", Fraction(x) * Fraction(y), exponent))
    addend = float(c)
    raw.append((f"c = {_short(addend)}", Fraction(addend), _exponent(addend, _FP32_E_MIN) if addend else None))
    largest = max((exponent for _, _, exponent in raw if exponent is not None), default=0)
    grid = Fraction(2) ** (largest - model.fraction_bits)
    terms = tuple(Term(label, value, exponent, _cut(value, grid)) for label, value, exponent in raw)
    total = sum((term.kept for term in terms), Fraction())
    result = _cut(total, Fraction(2) ** max(_floor_log2(total) - model.significant_bits + 1, -149)) if total else total
    assert result == Fraction(float(expected)), "the picture and fused_dot_add must agree"
    return Step(model, terms, largest, total, result)


def _check(a: torch.Tensor, b: torch.Tensor, result: torch.Tensor, unit: TensorCoreUnit) -> None:
    if a.dim() != 1 or b.dim() != 1 or result.dim() != 0:
        raise ValueError(
            f"a, b, c: got {list(a.shape)} and {list(b.shape)}, result {list(result.shape)}; give [L], [L] and []"
        )
    if unit.products_per_step is None or unit.c_enters != "alignment":
        raise ValueError(f"unit: {unit.name} does not align c with the products; give sm90, sm89, sm100 or your own")
    if a.shape[0] > unit.products_per_step or unit.k_order[: a.shape[0]] != tuple(range(a.shape[0])):
        raise ValueError(
            f"a, b: got {a.shape[0]} products, which {unit.name} does not add in one step of "
            f"{unit.products_per_step}; give fewer"
        )
    if not bool(result.isfinite()):
        raise ValueError(f"a, b, c: the step gives {float(result)}; give finite values")


def _floor_log2(value: Fraction) -> int:
    """The exponent of the leading bit."""
    size = abs(value)
    guess = size.numerator.bit_length() - size.denominator.bit_length()
    return guess if size >= Fraction(2) ** guess else guess - 1


def _exponent(value: float, e_min: int) -> int:
    """The exponent that a format gives a value; its subnormals keep the smallest."""
    return max(math.frexp(value)[1] - 1, e_min)


def _cut(value: Fraction, grid: Fraction) -> Fraction:
    """Toward zero to a multiple of the grid."""
    return math.trunc(value / grid) * grid


def draw_step(step: Step, axes: Axes | None = None) -> Axes:
    """Draw a step as a table of bits: one row a term, one column a power of two.

    Black cells are ones. Bits right of the thick line are below the grid and were cut off: hatched where a one was
    lost. Below the rule the sum of what was kept, and the result with its significant bits framed.

    Args:
        step: what :func:`explain_step` returned.
        axes: where; None for pyplot's current axes. A row wants about 0.2 inches.

    >>> from matplotlib.figure import Figure
    >>> x = torch.tensor([16.0, 2.0**-9]).to(torch.float8_e4m3fn)
    >>> axes = draw_step(explain_step(x, x, torch.tensor(0.0)), Figure().subplots())
    >>> [label.get_text() for label in axes.get_yticklabels()]
    ['16 × 16', '2^-9 × 2^-9', 'c = 0', 'sum', 'result']
    """
    axes = axes_or_current(axes)
    rows = [(term.label, term.value) for term in step.terms]
    rows += [("sum", step.total), ("result", step.result)]
    top = max([step.largest, *(_floor_log2(value) for _, value in rows if value)])
    bottom = min([step.grid, *(_lowest_bit(value) for _, value in rows if value)])
    for row, (_, value) in enumerate(rows):
        _draw_bits(axes, row, value, top, bottom, step.grid)
    count = len(step.terms)
    edge = top - step.grid + 0.5
    axes.plot([edge, edge], [-0.5, count + 1.5], color="black", linewidth=2.0)
    axes.axhline(count - 0.5, color="black", linewidth=1.0)
    if step.result:
        lead = top - _floor_log2(step.result)
        axes.add_patch(
            Rectangle(
                (lead - 0.5, count + 0.5), step.unit.significant_bits, 1, fill=False, linewidth=2.0, clip_on=False
            )
        )
    axes.set_yticks(range(len(rows)), [label for label, _ in rows])
    columns = range(0, top - bottom + 1, 2)
    axes.set_xticks(columns, [str(top - column) for column in columns])
    axes.set_xlim(-2.0, max(top - bottom, top - step.grid) + 0.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"power of two; right of the thick line is cut off (2^{step.grid} is the last bit kept)")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    return axes


def _short(value: float) -> str:
    """A value in few letters: a power of two below 1/100 as one."""
    power = value != 0 and abs(value) < 0.01 and math.frexp(abs(value))[0] == 0.5
    return f"{'-' * (value < 0)}2^{math.frexp(value)[1] - 1}" if power else f"{value:.6g}"


def _lowest_bit(value: Fraction) -> int:
    """The exponent of the last one."""
    numerator = abs(value.numerator)
    return (numerator & -numerator).bit_length() - 1 - (value.denominator.bit_length() - 1)


def _bits(value: Fraction, top: int, bottom: int) -> Sequence[int]:
    """The bits of the magnitude from 2 ** top down to 2 ** bottom."""
    whole = abs(value) / Fraction(2) ** bottom
    return [int(whole) >> (exponent - bottom) & 1 for exponent in range(top, bottom - 1, -1)]


def _draw_bits(axes: Axes, row: int, value: Fraction, top: int, bottom: int, grid: int) -> None:
    if not value:
        return
    axes.text(-1.3, row, "−" if value < 0 else "+", ha="center", va="center")
    first, last = top - _floor_log2(value), top - min(_lowest_bit(value), grid)
    for column, bit in enumerate(_bits(value, top, bottom)):
        if not first <= column <= last:
            continue
        lost = top - column < grid
        face = "black" if bit and not lost else "white"
        hatch = "//////" if bit and lost else None
        axes.add_patch(
            Rectangle(
                (column - 0.45, row - 0.4),
                0.9,
                0.8,
                facecolor=face,
                edgecolor="black" if hatch else "0.45",
                hatch=hatch,
                linewidth=0.4,
            )
        )
