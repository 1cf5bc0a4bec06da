"""The second reference: one output of an FP8 matrix product, in exact rational arithmetic.

Written from the description of the hardware (docs/numerics.md), not from the code in ``emulation/``, so that a
mistake in one of the two shows. The only thing they share is :class:`~fp8ref.emulation.units.TensorCoreUnit`,
which is data. Numbers go in and out as bit patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil
from typing import Literal

from fp8ref.emulation.units import TensorCoreUnit
from reference.rationals import (
    FP32,
    NAN,
    ZERO,
    Binary,
    Number,
    add,
    decode,
    encode,
    exponent_of,
    fp32_add,
    fp32_fma,
    fp32_multiply,
    infinity,
    multiply,
    number,
    power_of_two,
    round_to,
)

TILE = 128
"""K of one promoted chain, of one scale block, and of one tile of split-K."""

Kind = Literal["tensor", "row", "1x128 by 1x128", "1x128 by 128x128", "128x128 by 1x128"]
"""What scales mean: those of a, then those of b where the two differ."""


@dataclass(frozen=True)
class Vector:
    """One row of a or one column of b: K codes of an FP8 format."""

    binary: Binary
    codes: tuple[int, ...]

    def __len__(self) -> int:
        """K."""
        return len(self.codes)

    def part(self, start: int, stop: int) -> Vector:
        """The codes from start up to stop, or up to the end."""
        return Vector(self.binary, self.codes[start:stop])


@dataclass(frozen=True)
class Scales:
    """The scales of one output, as fp32 bits: one of a and one of b, or one per 128 of K where the kind has blocks."""

    kind: Kind
    a: tuple[int, ...]
    b: tuple[int, ...]

    @property
    def in_blocks(self) -> bool:
        """Whether each 128 of K has scales of its own."""
        return "1x128" in self.kind


@dataclass(frozen=True)
class Mode:
    """How the products of one output are added."""

    unit: TensorCoreUnit
    use_fast_accum: bool = False
    split_k: int = 1


@lru_cache(maxsize=1 << 16)
def product_of(code_a: int, binary_a: Binary, code_b: int, binary_b: Binary) -> tuple[Number, int]:
    """The exact product of two codes, and its exponent: the sum of theirs, not renormalised."""
    x, y = decode(code_a, binary_a), decode(code_b, binary_b)
    product = multiply(x, y)
    return product, exponent_of(x, binary_a.e_min) + exponent_of(y, binary_b.e_min) if product.magnitude else 0


def quanta(x: Number, quantum: Fraction) -> int:
    """How many whole quanta a finite number has, cut toward zero, with its sign.

    >>> quanta(number(Fraction(-7, 4)), Fraction(1, 2))
    -3
    """
    if x.magnitude is None:
        raise ValueError(f"{x} is not finite")
    whole = x.magnitude // quantum
    return -whole if x.negative else whole


def step(a: Vector, b: Vector, c: Number, unit: TensorCoreUnit) -> Number:
    """One step of a unit: the products of a and b and the accumulator c, aligned, cut, added and cut again."""
    pairs = zip(a.codes, b.codes, strict=True)
    terms = [product_of(code_a, a.binary, code_b, b.binary) for code_a, code_b in pairs]
    terms.append((c, exponent_of(c, FP32.e_min) if c.magnitude else 0))
    if special := special_sum([term for term, _ in terms]):
        return special
    terms = [(term, exponent) for term, exponent in terms if not term.is_zero]
    if not terms:
        return ZERO
    quantum = power_of_two(max(exponent for _, exponent in terms) - unit.fraction_bits)
    total = number(sum(quanta(term, quantum) for term, _ in terms) * quantum)
    # Counted from the leading bit, below 2^-126 too; every term is a multiple of 2^-149, the last bit of fp32.
    leading = exponent_of(total, FP32.e_min - FP32.fraction_bits)
    kept = power_of_two(leading - (unit.significant_bits - 1))
    return number(quanta(total, kept) * kept)


def special_sum(terms: Sequence[Number]) -> Number | None:
    """NaN or an infinity where a term makes the sum one, else None."""
    infinities = {term.negative for term in terms if term.is_infinite}
    if any(term.is_nan for term in terms) or len(infinities) == 2:
        return NAN
    return infinity(infinities.pop()) if infinities else None


def instruction(a: Vector, b: Vector, c: Number, unit: TensorCoreUnit) -> Number:
    """One instruction: the unit's steps in its order of k, K being exactly that of the instruction."""
    assert unit.products_per_step is not None, "the exact unit has no instructions"
    total = ZERO if c_is_last(unit) else c
    for first in range(0, len(unit.k_order), unit.products_per_step):
        ks = unit.k_order[first : first + unit.products_per_step]
        step_a = Vector(a.binary, tuple(a.codes[k] for k in ks))
        step_b = Vector(b.binary, tuple(b.codes[k] for k in ks))
        total = step(step_a, step_b, total, unit)
    return fp32_add(total, c) if c_is_last(unit) else total


def c_is_last(unit: TensorCoreUnit) -> bool:
    """Whether an instruction adds c after its steps instead of in their alignment."""
    return unit.c_enters == "after"


def padded_instruction(a: Vector, b: Vector, c: Number, unit: TensorCoreUnit) -> Number:
    """One instruction of at most its K, the rest of which is zeros; of the exact unit, one sum of any K."""
    if unit.products_per_step is None:
        return exact_sum(a, b, c)
    padding = (0,) * (unit.instruction_k - len(a))
    return instruction(Vector(a.binary, a.codes + padding), Vector(b.binary, b.codes + padding), c, unit)


def chain(a: Vector, b: Vector, c: Number, unit: TensorCoreUnit) -> Number:
    """Instructions one after the other over all of K, each taking the result of the one before; zeros pad K."""
    length = unit.instruction_k or max(len(a), 1)
    total = c
    for first in range(0, len(a), length):
        total = padded_instruction(a.part(first, first + length), b.part(first, first + length), total, unit)
    return total


def exact_sum(a: Vector, b: Vector, c: Number) -> Number:
    """All products and c added exactly, rounded once to fp32; a zero sum is +0."""
    total = c
    for code_a, code_b in zip(a.codes, b.codes, strict=True):
        total = add(total, product_of(code_a, a.binary, code_b, b.binary)[0])
    total = round_to(total, FP32)
    return ZERO if total.is_zero else total


def tiles_of(start: int, stop: int) -> list[tuple[int, int]]:
    """The runs of 128 of K from start to stop, the last one shorter.

    >>> tiles_of(0, 300)
    [(0, 128), (128, 256), (256, 300)]
    """
    return [(first, min(first + TILE, stop)) for first in range(start, stop, TILE)]


def parts_of(length: int, split_k: int, multiple: int = 1) -> list[tuple[int, int]]:
    """The runs of K that split-K gives its parts: ceil(T / S) tiles of 128 each, the last one fewer.

    An uncut K is one run; otherwise the runs are rounded up to a multiple of so many tiles.

    >>> parts_of(1000, 3), parts_of(0, 3), parts_of(1000, 3, 4)
    ([(0, 384), (384, 768), (768, 1000)], [(0, 0)], [(0, 512), (512, 1000)])
    """
    if split_k == 1 or length == 0:
        return [(0, length)]
    tiles = ceil(ceil(length / TILE) / split_k)
    run = ceil(tiles / multiple) * multiple * TILE
    return [(first, min(first + run, length)) for first in range(0, length, run)]


def accumulate_part(a: Vector, b: Vector, c: Number, mode: Mode) -> Number:
    """The accumulator of one part of K: one chain from c, or chains of 128 from +0 added to c in fp32."""
    if mode.use_fast_accum or mode.unit.products_per_step is None:
        return chain(a, b, c, mode.unit)
    total = c
    for start, stop in tiles_of(0, len(a)):
        total = fp32_add(total, chain(a.part(start, stop), b.part(start, stop), ZERO, mode.unit))
    return total


def block_scaled_part(a: Vector, b: Vector, scales: Scales, mode: Mode) -> Number:
    """The scaled total of one part of K, every 128 having scales of its own."""
    total = ZERO
    for (start, stop), scale_a, scale_b in zip(tiles_of(0, len(a)), scales.a, scales.b, strict=True):
        x = chain(a.part(start, stop), b.part(start, stop), ZERO, mode.unit)
        s, t = decode(scale_a, FP32), decode(scale_b, FP32)
        if scales.kind == "1x128 by 1x128":
            total = fp32_fma(fp32_multiply(x, s), t, total)
        else:
            total = fp32_fma(x, fp32_multiply(s, t), total)
    return total


def accumulate(a: Vector, b: Vector, mode: Mode, *, c: int = 0) -> int:
    """The fp32 bits of one accumulator, before scaling; c (fp32 bits) is where the first part starts."""
    return encode(accumulator(a, b, mode, decode(c, FP32)), FP32)


def accumulator(a: Vector, b: Vector, mode: Mode, c: Number) -> Number:
    """The accumulator as a number: the parts of K, added in fp32 from the first one on."""
    total = c
    for index, (start, stop) in enumerate(parts_of(len(a), mode.split_k)):
        part_a, part_b = a.part(start, stop), b.part(start, stop)
        if index == 0:
            total = accumulate_part(part_a, part_b, c, mode)
        else:
            total = fp32_add(total, accumulate_part(part_a, part_b, ZERO, mode))
    return total


def scaled(a: Vector, b: Vector, scales: Scales, mode: Mode) -> Number:
    """The scaled accumulator, before the bias."""
    if scales.in_blocks:
        return block_scaled(a, b, scales, mode)
    x, s, t = accumulator(a, b, mode, ZERO), decode(scales.a[0], FP32), decode(scales.b[0], FP32)
    if scales.kind == "row":
        return fp32_multiply(fp32_multiply(x, t), s)
    factor = fp32_multiply(s, t)
    if len(parts_of(len(a), mode.split_k)) == 1:
        return fp32_fma(x, factor, ZERO)
    product = fp32_multiply(x, factor)
    return ZERO if factor.is_zero and product.is_zero else product


def block_scaled(a: Vector, b: Vector, scales: Scales, mode: Mode) -> Number:
    """The parts of K with block scales; those of a cut K are added in fp32, from +0 and the first one on."""
    parts = []
    for start, stop in parts_of(len(a), mode.split_k, 4 if "128x128" in scales.kind else 1):
        first, last = start // TILE, ceil(stop / TILE)
        own = Scales(scales.kind, scales.a[first:last], scales.b[first:last])
        parts.append(block_scaled_part(a.part(start, stop), b.part(start, stop), own, mode))
    if len(parts) == 1:
        return parts[0]
    total = ZERO
    for part in parts:
        total = fp32_add(total, part)
    return total


def matmul(
    a: Vector,
    b: Vector,
    mode: Mode,
    out: Binary,
    *,
    scales: Scales,
    bias: Number | None = None,
) -> int:
    """The bits of one output of the scaled product: scaling, bias, one rounding to the output format."""
    result = scaled(a, b, scales, mode)
    if bias is not None:
        result = fp32_add(result, bias)
    return encode(round_to(result, out, saturate=out.exponent_bits + out.fraction_bits == 7), out)
