"""The bit patterns of the floating-point types that a matrix product reads and writes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class FloatFormat:
    """Where sign, exponent and fraction lie in a type.

    >>> FLOATS[torch.bfloat16].code(1.0) == 0x3F80, FLOATS[torch.float8_e4m3fn].infinity
    (True, None)
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    fraction_bits: int
    has_infinity: bool = True

    @property
    def width(self) -> int:
        """Number of bits."""
        return 1 + self.exponent_bits + self.fraction_bits

    @property
    def sign(self) -> int:
        """The bit of the sign."""
        return 1 << (self.width - 1)

    @property
    def magnitude(self) -> int:
        """Every bit but the sign; also the NaN that NVIDIA hardware writes."""
        return self.sign - 1

    @property
    def one(self) -> int:
        """The code of 1."""
        return ((1 << (self.exponent_bits - 1)) - 1) << self.fraction_bits

    @property
    def e_min(self) -> int:
        """Exponent of the smallest normal number."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def infinity(self) -> int | None:
        """The code of +Inf, None where the type has none."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits if self.has_infinity else None

    @property
    def largest(self) -> int:
        """The code of the largest finite number."""
        return (self.magnitude if self.infinity is None else self.infinity) - 1

    def code(self, value: float) -> int:
        """The bits of a number that the type holds."""
        return int(bits_of(torch.tensor(value, dtype=torch.float64).to(self.dtype)))

    def is_finite(self, code: int) -> bool:
        """Whether a bit pattern is a finite number."""
        return code & ~self.sign <= self.largest


FLOATS: dict[torch.dtype, FloatFormat] = {
    one.dtype: one
    for one in (
        FloatFormat("e4m3", torch.float8_e4m3fn, 4, 3, has_infinity=False),
        FloatFormat("e5m2", torch.float8_e5m2, 5, 2),
        FloatFormat("fp16", torch.float16, 5, 10),
        FloatFormat("bf16", torch.bfloat16, 8, 7),
        FloatFormat("fp32", torch.float32, 8, 23),
        FloatFormat("fp64", torch.float64, 11, 52),
    )
}
"""The types that the kit compares and makes."""


def float_of(dtype: object, argument: str) -> FloatFormat:
    """Return the format of a dtype.

    Raises:
        TypeError: it is not one of :data:`FLOATS`; the message names ``argument``.
    """
    if not isinstance(dtype, torch.dtype) or dtype not in FLOATS:
        raise TypeError(f"{argument}: got {dtype}; give one of {[str(known) for known in FLOATS]}")
    return FLOATS[dtype]


def bits_of(x: Tensor) -> Tensor:
    """The bit patterns of a floating tensor as int64; those of fp64 as signed numbers.

    >>> hex(bits_of(torch.tensor(-1.0, dtype=torch.bfloat16)).item())
    '0xbf80'
    """
    width = x.element_size()
    bits = x.detach().view(_INTEGERS[width]).to(torch.int64)
    return bits if width == 8 else bits & ((1 << 8 * width) - 1)


def from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of a floating type from its bit patterns, an integer tensor of any shape.

    >>> from_bits(torch.tensor([0x3C00, 0xBC00]), torch.float16)
    tensor([ 1., -1.], dtype=torch.float16)
    """
    width = dtype.itemsize
    wide = bits.to(torch.int64)
    if width in (2, 4):
        half = 1 << (8 * width - 1)
        wide = (wide ^ half) - half
    return wide.to(_INTEGERS[width]).view(dtype)
