"""The model against the subject on random operands, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ref.probing.rounding import BITS
from fp8ref.probing.subject import Subject, range_of


@dataclass(frozen=True)
class Difference:
    """The first element that differs, with what is needed to make it again."""

    kind: str
    seed: int
    row: int
    column: int
    expected: float
    expected_bits: str
    seen: float
    seen_bits: str


@dataclass(frozen=True)
class Verdict:
    """What the comparison on random operands gave."""

    elements: int
    differing: int
    first: Difference | None

    def __str__(self) -> str:
        """One line."""
        if self.first is None:
            return f"equal on {self.elements:,} elements"
        d = self.first
        return (
            f"{self.differing:,} of {self.elements:,} elements differ; the first: {d.kind} operands, seed {d.seed}, "
            f"row {d.row}, column {d.column}: expected {d.expected!r} "
            f"({d.expected_bits}), got {d.seen!r} ({d.seen_bits})"
        )


def _normal(shape: tuple[int, int], _: torch.dtype, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 4


def _wide(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Exponents uniform over the format, down to the smallest normal value."""
    bounds = range_of(dtype)
    exponents = torch.rand(shape, generator=generator) * (bounds.high - bounds.low) + bounds.low
    signs = torch.where(torch.rand(shape, generator=generator) < 0.5, -1.0, 1.0)
    return signs * (1 + torch.rand(shape, generator=generator) * 0.7) * 2.0 ** exponents.floor()


def _bits(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Every bit pattern that is finite, alike; of bf16 and fp32 those whose products stay finite."""
    width = dtype.itemsize
    if dtype in (torch.bfloat16, torch.float32):
        return _wide(shape, dtype, generator)
    codes = torch.randint(0, 2 ** (8 * width), shape, generator=generator)
    values = codes.to(BITS[width]).view(dtype).float()
    return torch.where(values.isfinite(), values, 0.0)


KINDS: dict[str, Callable[[tuple[int, int], torch.dtype, torch.Generator], Tensor]] = {
    "random normal": _normal,
    "wide range": _wide,
    "uniform bits": _bits,
}


def operands(subject: Subject, kind: str, seed: int) -> tuple[Tensor, Tensor]:
    """The operands of one comparison, from its seed."""
    generator = torch.Generator().manual_seed(seed)
    x = KINDS[kind]((subject.m, subject.k), subject.dtype_a, generator)
    y = KINDS[kind]((subject.n, subject.k), subject.dtype_b, generator)
    limits = [torch.finfo(dtype).max for dtype in (subject.dtype_a, subject.dtype_b)]
    return subject.operands(x.clamp(-limits[0], limits[0]), y.clamp(-limits[1], limits[1]))


def _seeds(elements: int, each: int) -> Iterator[tuple[str, int]]:
    """Kinds in turn, as often as it takes."""
    for seed in range(-(-elements // each)):
        yield list(KINDS)[seed % len(KINDS)], seed


def _hex(value: Tensor) -> str:
    width = value.element_size()
    number = int(value.reshape(1).view(BITS[width]).item())
    return f"0x{number & (1 << 8 * width) - 1:0{2 * width}X}"


def compare(subject: Subject, expected_of: Callable[[Tensor, Tensor], Tensor], elements: int) -> Verdict:
    """Compare ``elements`` outputs or a few more; NaN counts as equal to NaN, zeros must have the same sign."""
    differing, compared, first = 0, 0, None
    for kind, seed in _seeds(elements, subject.m * subject.n):
        a, b = operands(subject, kind, seed)
        seen = subject.multiply(a, b).contiguous()
        expected = expected_of(a[:, : subject.k], b[: subject.k]).contiguous()
        if seen.dtype != expected.dtype:
            expected = expected.to(seen.dtype)
        same = (seen.view(BITS[seen.element_size()]) == expected.view(BITS[seen.element_size()])) | (
            seen.double().isnan() & expected.double().isnan()
        )
        compared += same.numel()
        wrong = int((~same).sum())
        differing += wrong
        if wrong and first is None:
            row, column = (int(i) for i in (~same).nonzero()[0])
            one, two = expected[row, column], seen[row, column]
            first = Difference(kind, seed, row, column, float(one), _hex(one), float(two), _hex(two))
        if wrong and differing > 1000:
            break
    return Verdict(compared, differing, first)
