"""Tensors described by a few numbers: a palette of bit patterns, a seed that arranges them, a place in memory."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from fp8ref.testing.floats import FLOATS, FloatFormat, float_of, from_bits
from fp8ref.testing.guards import guarded_empty
from fp8ref.testing.supports import LAYOUTS, Layout

_MATRIX = 2


def integer_codes(fmt: FloatFormat, limit: int) -> list[int]:
    """Codes of the integers from 1 to ``limit`` in magnitude, of either sign.

    Without 0: its products may be -0, and a sum that starts with one of them differs from a sum that starts from +0.

    >>> from fp8ref.testing.floats import FLOATS
    >>> [hex(code) for code in integer_codes(FLOATS[torch.float8_e4m3fn], 1)]
    ['0x38', '0xb8']
    """
    return [fmt.code(float(sign * value)) for value in range(1, limit + 1) for sign in (1, -1)]


def boundary_codes(fmt: FloatFormat) -> list[int]:
    """Codes of both signs: significands 0, 1, all ones and all ones but one, at the edges and around exponent 0.

    >>> from fp8ref.testing.floats import FLOATS
    >>> len(boundary_codes(FLOATS[torch.float8_e4m3fn])) < 64
    True
    """
    ones = (1 << fmt.fraction_bits) - 1
    last, at_one = fmt.largest >> fmt.fraction_bits, fmt.one >> fmt.fraction_bits
    exponents = (0, 1, 2, at_one - 1, at_one, at_one + 1, last - 1, last)
    codes = {field << fmt.fraction_bits | fraction for field in exponents for fraction in (0, 1, ones - 1, ones)}
    finite = [code for code in sorted(codes) if fmt.is_finite(code)]
    return finite + [code | fmt.sign for code in finite]


@lru_cache
def named_palette(name: str, fmt: FloatFormat) -> tuple[int, ...]:
    """The codes that a name stands for.

    ``finite``, ``every`` (NaN and Inf too), ``edges`` (:func:`boundary_codes`), ``powers`` (of two), ``subnormal`` (and
    the first binade above), ``near E`` (exponent fields E - 1 to E + 1: sums that cancel), ``integers L`` (1 to L, of
    either sign).

    Raises:
        ValueError: another name, or one that needs an FP8 format beside a wider one.

    >>> from fp8ref.testing.floats import FLOATS
    >>> named_palette("integers 1", FLOATS[torch.float8_e5m2])
    (60, 188)
    """
    kind, _, number = name.partition(" ")
    if kind == "integers" and number.isdigit():
        return tuple(integer_codes(fmt, int(number)))
    if kind == "edges":
        return tuple(boundary_codes(fmt))
    if fmt.width == 8:
        finite = [code for code in range(256) if fmt.is_finite(code)]
        exponents = {code: (code & ~fmt.sign) >> fmt.fraction_bits for code in finite}
        if kind == "near" and number.isdigit():
            return tuple(code for code in finite if abs(exponents[code] - int(number)) <= 1)
        found = {
            "finite": finite,
            "every": list(range(256)),
            "powers": [code for code in finite if code % (1 << fmt.fraction_bits) == 0],
            "subnormal": [code for code in finite if exponents[code] <= 1],
        }
        if name in found:
            return tuple(found[name])
    raise ValueError(
        f"palette: got {name!r} for {fmt.name}; give codes, 'edges', 'integers L', or for FP8 'finite', 'every', "
        "'powers', 'subnormal' or 'near E'"
    )


def arranged(palette: Sequence[int], zeros: float, seed: int, rows: int, columns: int, sign: int = 0x80) -> Tensor:
    """An int64 [rows, columns] of codes from the palette, a share of them replaced by zeros of either sign.

    >>> arranged([0x38], 0.0, 0, 1, 2)
    tensor([[56, 56]])
    """
    if len(palette) == 1 and not zeros:
        return torch.full((rows, columns), palette[0])
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(len(palette), (rows, columns), generator=generator)
    codes = torch.tensor(palette, dtype=torch.int64)[choice]
    if not zeros:
        return codes
    blank = torch.rand(rows, columns, generator=generator) < zeros
    return torch.where(blank, torch.randint(2, (rows, columns), generator=generator) * sign, codes)


@dataclass(frozen=True)
class Fill:
    """A tensor of any shape, as few numbers as its ``repr`` shows; the same numbers always make the same bits.

    Attributes:
        dtype: FP8 (e4m3fn, e5m2), fp16, bf16 or fp32.
        palette: bit patterns to choose from, or a name of :func:`fp8ref.testing.fills.named_palette`.
        seed: what arranges them.
        zeros: the share of elements that become zeros of either sign.
        at: bit patterns at places of the flattened tensor, ``((place, code), ...)``; a place beyond it has no effect.
        layout: see :class:`fp8ref.testing.Supports`; vectors take "rows" only.
        offset: elements between the guard band and the first element.

    >>> Fill(torch.float8_e4m3fn, (0x38, 0xB8), seed=3).tensor(2, 3).float()
    tensor([[ 1.,  1., -1.],
            [-1.,  1.,  1.]])
    >>> Fill(torch.float32, (0x3F800000,), layout="sliced")
    Fill(torch.float32, (0x3f800000,), layout='sliced')
    """

    dtype: torch.dtype
    palette: str | tuple[int, ...] = "finite"
    seed: int = 0
    zeros: float = 0.0
    at: tuple[tuple[int, int], ...] = ()
    layout: Layout = "rows"
    offset: int = 0

    def __post_init__(self) -> None:
        """Refuse what makes no tensor."""
        top = 2 * self.format.sign
        given = () if isinstance(self.palette, str) else self.palette
        if not self.codes() or any(not 0 <= code < top for code in [*given, *(code for _, code in self.at)]):
            raise ValueError(f"palette, at: got {self.palette!r}, {self.at!r}; give codes of {self.format.width} bits")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout: got {self.layout!r}; give one of {list(LAYOUTS)}")

    @property
    def format(self) -> FloatFormat:
        """Where the bits lie."""
        return FLOATS[self.dtype] if self.dtype in FLOATS else float_of(self.dtype, "dtype")

    def codes(self) -> tuple[int, ...]:
        """The palette as bit patterns."""
        return named_palette(self.palette, self.format) if isinstance(self.palette, str) else self.palette

    def tensor(self, *shape: int, device: torch.device | str = "cpu") -> Tensor:
        """Make the tensor; it lies between guard bands of NaN, which also fill the gaps of its layout."""
        return self.buffer(*shape, device=device)[0]

    def buffer(self, *shape: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """The tensor, and the uint8 memory around it, guard bands included."""
        rows, columns = (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)
        codes = arranged(self.codes(), self.zeros, self.seed, rows, columns, self.format.sign)
        for place, code in self.at:
            if place < codes.numel():
                codes.view(-1)[place] = code
        values = from_bits(codes, self.dtype)
        if len(shape) != _MATRIX:
            flat, memory = self._memory(values.numel(), device)
            view = flat.view(shape)
        else:
            view, memory = self._matrix(rows, columns, device)
        if self.layout == "expanded" and len(shape) == _MATRIX and rows:
            view[:1].copy_(values[:1])
        elif view.numel():
            view.copy_(values.view(shape))
        return view, memory

    def _matrix(self, rows: int, columns: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """A view in the layout, and the memory around it."""
        if self.layout == "columns":
            flat, memory = self._memory(rows * columns, device)
            return flat.view(columns, rows).t(), memory
        if self.layout == "padded":
            flat, memory = self._memory(rows * (columns + 16), device)
            return flat.view(rows, columns + 16)[:, :columns], memory
        if self.layout == "sliced":
            flat, memory = self._memory((2 * rows + 1) * (3 * columns + 2), device)
            return flat.view(2 * rows + 1, 3 * columns + 2)[1 : 2 * rows + 1 : 2, 2 : 3 * columns + 2 : 3], memory
        if self.layout == "expanded" and rows:
            flat, memory = self._memory(columns, device)
            return flat.view(1, columns).expand(rows, columns), memory
        flat, memory = self._memory(rows * columns, device)
        return flat.view(rows, columns), memory

    def _memory(self, elements: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
        """A vector of ``elements`` NaN, and the memory around it."""
        return guarded_empty((elements,), self.dtype, device, offset=self.offset)

    def __repr__(self) -> str:
        """Python that makes it again, defaults left out."""
        palette = repr(self.palette) if isinstance(self.palette, str) else _codes(self.palette)
        given = [str(self.dtype), palette]
        for field in fields(self)[2:]:
            value = getattr(self, field.name)
            if value != field.default:
                given.append(f"{field.name}={_places(value) if field.name == 'at' else repr(value)}")
        return f"Fill({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """What Hypothesis prints of a failing example: the same Python."""
        printer.text(repr(self))


def _codes(codes: tuple[int, ...]) -> str:
    return "(" + ", ".join(map(hex, codes)) + ("," if len(codes) == 1 else "") + ")"


def _places(at: tuple[tuple[int, int], ...]) -> str:
    return "(" + ", ".join(f"({place}, {code:#x})" for place, code in at) + ("," if len(at) == 1 else "") + ")"
