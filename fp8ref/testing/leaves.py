"""How far a tensor-core unit can be from the exact sum of one run of products; ``docs/testing.md`` has the proof."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fp8ref.emulation.bits import FP64, floor_pow2
from fp8ref.emulation.formats import FORMATS
from fp8ref.emulation.units import TensorCoreUnit

UNIT_ROUNDOFF = 2.0**-24
"""u: an fp32 operation rounded to nearest is off by at most this share of its result."""
_EXACT = 2.0**53


@dataclass(frozen=True, eq=False)
class Terms:
    """Products of a tile: [rows, columns, k], float64.

    Attributes:
        value: the exact products.
        power: two to the sum of their operands' exponents, 0 where the product is zero.
        grain: the largest power of two that divides the product, inf where it is zero.
    """

    value: Tensor
    power: Tensor
    grain: Tensor

    def part(self, start: int, stop: int) -> Terms:
        """The products of some k."""
        return Terms(*(x[..., start:stop] for x in (self.value, self.power, self.grain)))


@dataclass(frozen=True, eq=False)
class Sums:
    """What is known of the sum of a run of products, float64 [rows, columns].

    Attributes:
        exact: the sum, off by at most a part of ``error`` where float64 does not hold it.
        magnitude: what bounds the magnitude of every partial result; rounded up.
        grain: a power of two that every product and every partial result is a multiple of; inf where all are zero.
        error: how far what the accumulator returns can be from the exact sum.
        count: how many numbers other than zero were added in fp32.
    """

    exact: Tensor
    magnitude: Tensor
    grain: Tensor
    error: Tensor
    count: Tensor


def terms_of(a: Tensor, b: Tensor) -> Terms:
    """The products of finite FP8 rows [rows, k] and [columns, k].

    >>> x = torch.tensor([[1.5]]).to(torch.float8_e4m3fn)
    >>> terms = terms_of(x, x)
    >>> terms.value.item(), terms.power.item(), terms.grain.item()
    (2.25, 1.0, 0.25)
    """
    values, powers, grains = [], [], []
    for x in (a, b):
        fmt = FORMATS[x.dtype]
        value = x.double()
        power = floor_pow2(value, FP64).clamp(min=2.0**fmt.e_min)
        last = power * 2.0**-fmt.mantissa_bits
        significand = (value / last).long()
        values.append(value)
        powers.append(torch.where(value == 0, 0.0, power))
        grains.append(torch.where(value == 0, torch.inf, last * (significand & -significand)))
    return Terms(*(pair[0][:, None] * pair[1][None] for pair in (values, powers, grains)))


def known_sum(terms: Terms) -> Sums:
    """The exact sum, bounded by the products' magnitudes; the error is float64's own, 0 where it has none."""
    k = terms.value.shape[-1]
    exact, magnitude = terms.value.sum(-1), terms.value.abs().sum(-1)
    least = terms.grain.amin(-1) if k else torch.full_like(exact, torch.inf)
    inexact = magnitude > least * (_EXACT / 2)
    slack = torch.where(inexact, magnitude * (k / _EXACT), 0.0)
    return Sums(exact, magnitude + 2 * slack, least, slack, (terms.power > 0).sum(-1))


def unit_chain(terms: Terms, unit: TensorCoreUnit) -> Sums:
    """One chain from +0 through a unit that takes the k in any order, L at a time.

    >>> from fp8ref.emulation.units import UNITS
    >>> x, one = (torch.tensor([row]).to(torch.float8_e4m3fn) for row in ([256.0, 1.0], [256.0, 1.0]))
    >>> unit_chain(terms_of(x, one), UNITS["sm90"]).error.item()  # 1 beside 2^16, cut to multiples of 8; then the sum
    8.0
    """
    found = known_sum(terms)
    found = replace(found, magnitude=_one_sided(terms) + 2 * found.error)
    one = (found.count > 0).long()
    if unit.products_per_step is None:
        # An exact sum, rounded once; fp32 holds it where it has at most 24 bits.
        rounding = torch.where(fits_fp32(found), 0.0, UNIT_ROUNDOFF * found.magnitude)
        magnitude = found.magnitude * (1 + UNIT_ROUNDOFF)
        return replace(found, magnitude=magnitude, error=found.error + rounding, count=one)
    steps = -(-terms.value.shape[-1] // unit.instruction_k) * (unit.instruction_k // unit.products_per_step)
    largest = floor_pow2(found.magnitude, FP64)
    top = torch.maximum(largest, terms.power.amax(-1)) if steps else largest
    quantum = top * 2.0**-unit.fraction_bits
    lost = torch.minimum(terms.value.abs(), (quantum.unsqueeze(-1) - terms.grain).clamp(min=0)).sum(-1)
    used = found.count.clamp(max=steps)
    carried = used if unit.significant_bits <= unit.fraction_bits + 1 else torch.full_like(used, steps)
    lost = lost + (carried - 1).clamp(min=0) * (quantum - found.grain).clamp(min=0)
    last_place = largest * 2.0 ** (1 - unit.significant_bits)
    lost = lost + used * (last_place - found.grain).clamp(min=0)
    return replace(found, error=found.error + lost, count=one)


def _one_sided(terms: Terms) -> Tensor:
    """The sum of the positive products or that of the negative ones, whichever is larger.

    Truncation goes toward zero, so that a partial result lies between the two, whatever the order.
    """
    positive = terms.value.clamp(min=0).sum(-1)
    return torch.maximum(positive, positive - terms.value.sum(-1))


def fits_fp32(sums: Sums) -> Tensor:
    """Whether every partial sum is a multiple of the grain with at most 24 bits."""
    return sums.magnitude <= sums.grain * 2.0**24


def fp32_sum(parts: list[Sums]) -> Sums:
    """fp32 additions of parts, in any order and grouping, each rounded to nearest.

    >>> part = Sums(*(torch.tensor([x]) for x in (1.0, 1.0, 1.0, 0.0, 1)))
    >>> total = fp32_sum([part, part])
    >>> total.exact.item(), total.error.item()
    (2.0, 0.0)
    """
    exact, magnitude, error, count = (
        torch.stack([getattr(part, name) for part in parts]).sum(0) for name in ("exact", "magnitude", "error", "count")
    )
    joined = Sums(exact, magnitude, torch.stack([part.grain for part in parts]).amin(0), error, count)
    rounding = torch.where(fits_fp32(joined), 0.0, growth(count - 1) * magnitude)
    return Sums(exact, magnitude * (1 + growth(count - 1)), joined.grain, error + rounding, torch.ones_like(count))


def growth(roundings: Tensor) -> Tensor:
    """(1 + u)^n - 1: the largest relative error of n roundings.

    >>> growth(torch.tensor([0, 1])).tolist() == [0.0, 2.0**-24]
    True
    """
    return torch.expm1(roundings.clamp(min=0).double() * torch.log1p(torch.tensor(UNIT_ROUNDOFF, dtype=torch.float64)))
