"""Between torch tensors and the exact reference: codes out of tensors, and the expected bits of one output."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from fractions import Fraction

import torch

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


@dataclass(frozen=True, eq=False)
class Product:
    """Everything that ``emulate_matmul`` takes; ``kind`` says what the scales mean (None: there are none)."""

    a: torch.Tensor
    b: torch.Tensor
    unit: TensorCoreUnit
    use_fast_accum: bool = False
    split_k: int = 1
    kind: str | None = None
    scale_a: torch.Tensor | None = None
    scale_b: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    out_dtype: torch.dtype = torch.float32

    @property
    def mode(self) -> exact.Mode:
        """How the reference adds."""
        return exact.Mode(self.unit, self.use_fast_accum, self.split_k)

    def scales_of(self, i: int, j: int) -> exact.Scales | None:
        """The scales of output (i, j)."""
        if self.scale_a is None or self.scale_b is None:
            return None
        a, b = bits_of(self.scale_a), bits_of(self.scale_b)
        if self.kind == "tensor":
            return exact.Scales("tensor", tuple(a.reshape(1).tolist()), tuple(b.reshape(1).tolist()))
        row = tuple(a[i].tolist())
        if self.kind == "row":
            return exact.Scales("row", row, tuple(b[:, j].tolist()))
        if self.kind == "1x128 by 1x128":
            return exact.Scales("1x128 by 1x128", row, tuple(b[:, j].tolist()))
        return exact.Scales("1x128 by 128x128", row, tuple(b[:, j // exact.TILE].tolist()))

    def expected(self, i: int, j: int) -> int:
        """The bits of output (i, j) by the reference."""
        bias = None
        if self.bias is not None:
            bias = decode(int(bits_of(self.bias)[j]), BINARIES[self.bias.dtype])
        return exact.matmul(
            vector(self.a[i]),
            vector(self.b[:, j]),
            self.mode,
            BINARIES[self.out_dtype],
            scales=self.scales_of(i, j),
            bias=bias,
        )
