"""The interval that a correct matmul's every output lies in: accumulator, scales, bias and output rounding.

``docs/testing.md`` derives each step; nothing here is a chosen constant.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ref.emulation.accumulate import PROMOTION_K, split_parts
from fp8ref.emulation.decode import Span
from fp8ref.emulation.quantize import expand_scale
from fp8ref.emulation.rounding import round_to_fp8
from fp8ref.emulation.scales import BLOCK, Scaling
from fp8ref.emulation.specials import finite_part, specials_of_product
from fp8ref.emulation.units import TensorCoreUnit
from fp8ref.testing.leaves import UNIT_ROUNDOFF, Sums, Terms, fp32_sum, growth, known_sum, terms_of, unit_chain

_SMALLEST_NORMAL = 2.0**-126
_HALF_SUBNORMAL = 2.0**-150
_OVERFLOW = 2.0**128 * (1 - 2.0**-25)
_DOUBLE = 2.0**-52
_TILE = 1 << 21  # products held at once

FP32_ANY_ORDER = "fp32"
"""Stands for an accumulator of fp32 additions (or FMAs), each rounded to nearest, in any order and grouping."""


@dataclass(frozen=True, eq=False)
class Bound:
    """Where the outputs of a correct matmul lie, [M, N].

    Attributes:
        exact: float64: the exactly accumulated, scaled and biased result; NaN and Inf where operands make it so.
        radius: float64: how far from it a result may be before the output is rounded; inf where nothing is known.
        low: the smallest output allowed, of the output's dtype.
        high: the largest; both are NaN where a NaN is due.
    """

    exact: Tensor
    radius: Tensor
    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class Request:
    """A product with checked arguments; ``left`` and ``right`` are scales, those of b laid out for its transpose."""

    a: Tensor
    weight: Tensor
    left: Tensor
    right: Tensor
    kinds: tuple[Scaling, Scaling]
    bias: Tensor | None
    out_dtype: torch.dtype
    unit: TensorCoreUnit | None
    use_fast_accum: bool
    split_k: int

    @property
    def in_blocks(self) -> bool:
        """Whether each 128 of K has scales of its own."""
        return "1x128" in self.kinds

    def groups(self) -> list[list[Span]]:
        """The runs of k that start from +0, in groups that share their scales."""
        k = self.a.shape[1]
        parts = split_parts(k, self.split_k, 4 if "128x128" in self.kinds else 1)
        promoted = self.in_blocks or not self.use_fast_accum
        if self.unit is not None and self.unit.products_per_step is None:
            promoted = self.in_blocks
        chains = [chain for part in parts for chain in (_cut(part, PROMOTION_K) if promoted else [part])]
        if self.unit is not None and self.unit.c_enters == "after" and self.unit.products_per_step is not None:
            runs = [_cut(chain, self.unit.instruction_k) for chain in chains]
        else:
            runs = [[chain] for chain in chains]
        return runs if self.in_blocks else [[span for run in runs for span in run]]


def _cut(span: Span, length: int) -> list[Span]:
    return [(k, min(k + length, span[1])) for k in range(*span, length)] or [span]


def bound_of(request: Request) -> Bound:
    """The bound of every output, a tile at a time."""
    m, k = request.a.shape
    n = request.weight.shape[0]
    exact, radius = (torch.empty(m, n, dtype=torch.float64, device=request.a.device) for _ in range(2))
    spread = [
        expand_scale(scale.double(), kind, x.shape).expand(x.shape)
        for scale, kind, x in (
            (request.left, request.kinds[0], request.a),
            (request.right, request.kinds[1], request.weight),
        )
    ]
    groups = request.groups()
    width = max(1, min(n, _TILE // max(k, 1)))
    height = max(1, _TILE // max(k * width, 1))
    for column in range(0, n, width):
        columns = slice(column, min(column + width, n))
        for row in range(0, m, height):
            rows = slice(row, min(row + height, m))
            exact[rows, columns], radius[rows, columns] = _tile(request, spread, groups, rows, columns)
    if request.bias is not None:
        radius = torch.where(exact.isfinite() & (exact.abs() + radius >= _OVERFLOW), torch.inf, radius)
        exact = exact + request.bias.double()
    # What float64 itself may have rounded away, here and in the tiles.
    slack = torch.where(exact.isfinite(), exact.abs() * 2 * _DOUBLE, 0.0) + radius * (k + 32) * _DOUBLE
    low, high = (_convert(exact + side * (radius + slack), request.out_dtype) for side in (-1, 1))
    return Bound(exact, radius, low, high)


def _convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to fp32, then to the output; both are monotone, so that the ends of an interval stay its ends."""
    if dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return round_to_fp8(x.float(), dtype)
    return x.float().to(dtype)


def _tile(
    request: Request, scales: Sequence[Tensor], groups: list[list[Span]], rows: slice, columns: slice
) -> tuple[Tensor, Tensor]:
    """The scaled sum and its radius for a rectangle of the output, before the bias."""
    a, b = request.a[rows], request.weight[columns]
    terms = terms_of(finite_part(a), finite_part(b))
    last = not request.in_blocks and request.bias is None
    scaled: list[_Scaled] = []
    for spans in groups:
        start, stop = spans[0][0], spans[-1][1]
        sums = _accumulated([terms.part(*span) for span in spans], request.unit)
        at = slice(start, start + 1)
        left, right = scales[0][rows, at], scales[1][columns, at].t()
        if stop == start:
            left, right = (
                torch.ones(side, dtype=torch.float64, device=a.device) for side in ((len(a), 1), (1, len(b)))
            )
        specials = specials_of_product(a[:, start:stop], b[:, start:stop].t()).double() * left * right
        scaled.append(_scale(sums, left, right, specials, last=last))
    return _added(scaled)


@dataclass(frozen=True, eq=False)
class _Scaled:
    """A group's sum times its scales: where it lies, and what its additions need to know; float64 [rows, columns]."""

    exact: Tensor
    radius: Tensor
    magnitude: Tensor
    grain: Tensor
    special: Tensor
    open: Tensor
    """Where the order of the scales decides between numbers, Inf and NaN."""


def _added(groups: list[_Scaled]) -> tuple[Tensor, Tensor]:
    """The groups added in fp32, in any order, or with FMAs."""
    exact, radius, magnitude, special = (
        torch.stack([getattr(group, name) for group in groups]).sum(0)
        for name in ("exact", "radius", "magnitude", "special")
    )
    undefined = torch.stack([group.open & (special != 0) for group in groups]).any(0)
    if len(groups) > 1:
        grain = torch.stack([group.grain for group in groups]).amin(0)
        exactly = (radius == 0) & (magnitude <= grain * 2.0**24)
        more = growth(torch.tensor(len(groups) - 1)).to(exact.device) + len(groups) * _DOUBLE
        radius = radius + torch.where(exactly, 0.0, more * magnitude)
        radius = torch.where(magnitude >= _OVERFLOW, torch.inf, radius)
    radius = torch.where((special != 0) & radius.isfinite() & ~undefined, 0.0, radius)
    radius = torch.where(undefined, torch.inf, radius)
    return torch.where(special == 0, exact, special), radius


def _accumulated(parts: list[Terms], unit: TensorCoreUnit | None) -> Sums:
    """What the accumulator holds before any scale."""
    if unit is not None:
        return fp32_sum([unit_chain(part, unit) for part in parts])
    known = [known_sum(part) for part in parts]
    return fp32_sum(known)


def _scale(sums: Sums, left: Tensor, right: Tensor, special: Tensor, *, last: bool) -> _Scaled:
    """The sum times both scales, in any order of the two multiplications.

    The rounding of a ``last`` multiplication is left to the end: rounding both ends of an interval bounds the rounding
    of whatever lies within.
    """
    scale = left * right
    held = torch.where(sums.grain.isinf(), 0.0, sums.exact.abs() + sums.error)
    roundings = 2 - _is_power(left).long() - _is_power(right).long()
    counted = (roundings - 1).clamp(min=0) if last else roundings
    radius = sums.error * scale.abs() + held * scale.abs() * growth(counted)
    # A product below the smallest normal number is off by up to half a subnormal, times what multiplies it later.
    later = torch.maximum(torch.maximum(left.abs(), right.abs()).expand_as(held), held)
    least = _each(torch.minimum, scale, sums.grain * left, sums.grain * right, sums.grain * scale)
    underflows = (held > 0) & (scale != 0) & (least < _SMALLEST_NORMAL)
    radius = radius + torch.where(underflows, _HALF_SUBNORMAL * (later * (1 + UNIT_ROUNDOFF) + 1), 0.0)
    overflows = _each(torch.maximum, scale, held * left, held * right) * (1 + UNIT_ROUNDOFF) >= _OVERFLOW
    radius = torch.where(overflows, torch.inf, radius)
    exactly = (radius == 0) & (roundings == 0)
    return _Scaled(
        sums.exact * scale,
        radius,
        sums.magnitude * scale.abs() + radius,
        torch.where(exactly, sums.grain * scale.abs(), 0.0),
        special,
        overflows | ((scale != 0) & (scale.abs() < _SMALLEST_NORMAL)),
    )


def _each(join: Callable[[Tensor, Tensor], Tensor], first: Tensor, *others: Tensor) -> Tensor:
    """Magnitudes of tensors that broadcast, joined element by element."""
    found = first.abs()
    for other in others:
        found = join(*torch.broadcast_tensors(found, other.abs()))
    return found


def _is_power(x: Tensor) -> Tensor:
    """Whether a float64 is a power of two, or zero: multiplying by it rounds nothing above the subnormals."""
    fraction = x.view(torch.int64) & ((1 << 52) - 1)
    return fraction == 0


assert BLOCK == PROMOTION_K, "a scale block is one promoted chain"
