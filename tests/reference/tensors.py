"""Between torch tensors and the exact reference: codes out of tensors, and the expected bits of one output."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction

import torch

from fp8ref.emulation.scales import Scaling
from fp8ref.emulation.units import TensorCoreUnit
from reference import exact
from reference.rationals import BF16, E4M3, E5M2, FP16, FP32, Binary, Number, decode

BINARIES: dict[torch.dtype, Binary] = {
    torch.float8_e4m3fn: E4M3,
    torch.float8_e5m2: E5M2,
    torch.float16: FP16,
    torch.bfloat16: BF16,
    torch.float32: FP32,
}
"""The reference's own format of each dtype."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def bits_of(x: torch.Tensor) -> torch.Tensor:
    """The bit patterns of a tensor as non-negative int64.

    >>> bits_of(torch.tensor(-1.0, dtype=torch.bfloat16)).item() == 0xBF80
    True
    """
    width = x.element_size()
    return x.view(_INTEGERS[width]).to(torch.int64) & ((1 << 8 * width) - 1)


def from_bits(bits: list[int], dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """A tensor of a floating dtype from bit patterns.

    >>> from_bits([0x3C00], torch.float16, 1)
    tensor([1.], dtype=torch.float16)
    """
    width = dtype.itemsize
    signed = bits if width == 1 else [(b ^ (1 << 8 * width - 1)) - (1 << 8 * width - 1) for b in bits]
    return torch.tensor(signed, dtype=_INTEGERS[width]).view(dtype).reshape(shape)


def value_of(x: float) -> Number:
    """A Python float, exactly, with its sign of zero."""
    if math.isnan(x) or math.isinf(x):
        return decode(fp32(x), FP32)
    return Number(math.copysign(1, x) < 0, abs(Fraction(x)))


def fp32(x: float) -> int:
    """The fp32 bits of a Python float that fp32 holds."""
    bits: int = struct.unpack("<I", struct.pack("<f", x))[0]
    return bits


def vector(x: torch.Tensor) -> exact.Vector:
    """The codes of a one-dimensional fp8 tensor."""
    return exact.Vector(BINARIES[x.dtype], tuple(bits_of(x).tolist()))


SCALING: dict[exact.Kind, tuple[Scaling, Scaling]] = {
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "1x128 by 1x128": ("1x128", "1x128"),
    "1x128 by 128x128": ("1x128", "128x128"),
    "128x128 by 1x128": ("128x128", "1x128"),
}
"""The ``scaling`` argument of each kind of scales."""


@dataclass(frozen=True, eq=False)
class Product:
    """Everything that ``emulate_matmul`` takes; ``kind`` says what the scales mean."""

    a: torch.Tensor
    b: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    kind: exact.Kind
    unit: TensorCoreUnit
    use_fast_accum: bool
    split_k: int
    bias: torch.Tensor | None
    out_dtype: torch.dtype
    say_scaling: bool

    @property
    def scaling(self) -> tuple[Scaling, Scaling] | None:
        """The ``scaling`` argument: the pair of kinds, or None where it is left out and the shapes say the same."""
        return SCALING[self.kind] if self.say_scaling or self.meaning_of_shapes() != self.kind else None

    def meaning_of_shapes(self) -> str:
        """The kind that the shapes of the scales mean by themselves; "open" where that is not defined."""
        m, n = self.a.shape[0], self.b.shape[1]
        if self.scale_a.numel() == self.scale_b.numel() == 1:
            return "tensor"
        if tuple(self.scale_a.shape) == (m, 1) and tuple(self.scale_b.shape) == (1, n):
            return "row"
        if n == 1 or m == 1:
            return "open"
        if self.scale_a.shape[0] != m:
            return "128x128 by 1x128"
        return "1x128 by 1x128" if self.scale_b.shape[1] == n else "1x128 by 128x128"

    @property
    def mode(self) -> exact.Mode:
        """How the reference adds."""
        return exact.Mode(self.unit, self.use_fast_accum, self.split_k)

    def scales_of(self, i: int, j: int) -> exact.Scales:
        """The scales of output (i, j)."""
        a, b = bits_of(self.scale_a), bits_of(self.scale_b)
        if self.kind == "tensor":
            return exact.Scales(self.kind, tuple(a.reshape(1).tolist()), tuple(b.reshape(1).tolist()))
        row = i // exact.TILE if self.kind == "128x128 by 1x128" else i
        column = j // exact.TILE if self.kind == "1x128 by 128x128" else j
        return exact.Scales(self.kind, tuple(a[row].tolist()), tuple(b[:, column].tolist()))

    def expected(self, i: int, j: int) -> int:
        """The bits of output (i, j) by the reference."""
        bias = None
        if self.bias is not None:
            bias = decode(int(bits_of(self.bias)[j]), BINARIES[self.bias.dtype])
        out = BINARIES[self.out_dtype]
        a, b = vector(self.a[i]), vector(self.b[:, j])
        return exact.matmul(a, b, self.mode, out, scales=self.scales_of(i, j), bias=bias)
