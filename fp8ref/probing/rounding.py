"""Ways of rounding an fp32 result to an output type."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8ref.emulation.rounding import round_to_fp8

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers as wide as a value of so many bytes."""
NEAREST = "to nearest, ties to even"


def _nearest(x: Tensor, dtype: torch.dtype) -> Tensor:
    """To nearest even; overflow saturates in fp8 and gives Inf elsewhere."""
    return round_to_fp8(x, dtype) if dtype.itemsize == 1 else x.to(dtype)


def _toward_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The nearest value, or its neighbour toward zero where the nearest is larger in size."""
    nearest = _nearest(x, dtype).contiguous()
    bits = nearest.view(BITS[dtype.itemsize])
    smaller = torch.where(nearest.double() == 0, bits, bits - 1).view(dtype)
    return torch.where(nearest.double().abs() > x.double().abs(), smaller.double(), nearest.double()).to(dtype)


OUTPUTS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    NEAREST: _nearest,
    "toward zero": _toward_zero,
}
"""Ways of rounding an fp32 result to the output."""
