"""Inf and NaN in FP8 operands: found once, kept out of the finite arithmetic, and put back a chain at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8ref.emulation.formats import FORMATS

_PIECE = 1 << 24
"""Values that are looked at together: a look makes a copy."""


def _smallest_special(x: Tensor) -> int:
    fmt = FORMATS[x.dtype]
    return fmt.nan_code if fmt.inf_code is None else fmt.inf_code


def _magnitude(x: Tensor) -> Tensor:
    return x.view(torch.uint8) & 0x7F


def has_specials(x: Tensor) -> bool:
    """Whether any FP8 value is Inf or NaN.

    >>> has_specials(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))
    True
    """
    by_memory = x if x.is_contiguous() else x.transpose(0, -1)  # torch's max is six times slower across the strides
    rows = max(1, _PIECE * by_memory.shape[0] // max(1, x.numel()))
    pieces = by_memory.split(rows) if x.numel() else ()
    return any(int(_magnitude(piece).max()) >= _smallest_special(x) for piece in pieces)


def finite_part(x: Tensor) -> Tensor:
    """``x`` with +0 in place of every Inf and NaN; same shape, FP8."""
    return x.view(torch.uint8).masked_fill(_magnitude(x) >= _smallest_special(x), 0).view(x.dtype)


def specials_of_product(a: Tensor, b: Tensor) -> Tensor:
    """What Inf and NaN do to ``a`` [M, K] by ``b`` [K, N]: fp32 [M, N], 0 where every product is finite.

    NaN operands, Inf * 0 and Inf - Inf give NaN; otherwise Inf with the sign of the product.
    """
    x, y = a.float(), b.float()
    sign_x, sign_y = x.nan_to_num(0.0).sign(), y.nan_to_num(0.0).sign()
    inf_x, inf_y = x.isinf() * sign_x, y.isinf() * sign_y
    # Counts of products, exact in fp32; a product of two infinities is counted twice, which changes no test below.
    signed = inf_x @ sign_y + sign_x @ inf_y
    both = inf_x.abs() @ sign_y.abs() + sign_x.abs() @ inf_y.abs()
    invalid = inf_x.abs() @ (y == 0).float() + (x == 0).float() @ inf_y.abs() + (both.abs() != signed.abs())
    nan = (invalid > 0) | x.isnan().any(1, keepdim=True) | y.isnan().any(0, keepdim=True)
    return torch.where(nan, torch.nan, torch.where(both > 0, signed * torch.inf, 0.0))
