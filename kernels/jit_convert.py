"""Raw Triton code of the conversion from fp32 to FP8, with one rounding on every GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""Triton's decorator, typed: what it returns is called from other kernels."""


@jit
def to_fp8(x, dtype: tl.constexpr, ADA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return fp32 ``x`` in an FP8 dtype: to nearest even, saturating.

    On Ada, Triton 3.6 to 3.8 itself goes through fp16 toward zero, which loses what decides a near tie. The instruction
    that Hopper gets exists there too. Four values are packed into a register.
    """
    if not ADA:
        result = x.to(dtype)
    elif dtype == tl.float8e4nv:
        bits = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
        result = bits.to(dtype, bitcast=True)
    else:
        bits = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high;
            cvt.rn.satfinite.e5m2x2.f32 low, $2, $1;
            cvt.rn.satfinite.e5m2x2.f32 high, $4, $3;
            mov.b32 $0, {low, high}; }""",
            "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4,
        )  # fmt: skip
        result = bits.to(dtype, bitcast=True)
    return result
