"""Raw Triton code of the activation quantiser: absmax, scale, codes and the zero padding in one kernel.

The reference is :func:`fp8ref.emulation.quantize.quantize`; every code and every scale must equal it. Importing this
module imports Triton; the rest of ``fp8ref`` does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

jit: Callable[[Callable[..., Any]], Any] = triton.jit
"""Triton's decorator, typed: what it returns is launched as ``kernel[grid](...)``."""

# The number of counters: no load's width depends on it.
kernel: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["n_count"])


@jit
def exact_quotient(x, scale):  # type: ignore[no-untyped-def]
    """Return x / scale rounded once to fp32 wherever the quotient can reach an FP8 code.

    Two residual corrections make the product with the reciprocal the correctly rounded quotient (Markstein), at a third
    of the cost of ``div.rn``. Powers of two keep the residuals out of the subnormal range; a quotient too small for any
    code, or too large, is taken as it comes (with its sign).
    """
    factor = tl.where(scale < 2.0**-60, 2.0**64, 1.0)
    factor = tl.where(scale > 2.0**60, 2.0**-64, factor)
    x = x * factor
    scale = scale * factor
    inverse = tl.div_rn(1.0, scale)
    first = x * inverse
    q = tl.fma(tl.fma(-first, scale, x), inverse, first)
    q = tl.fma(tl.fma(-q, scale, x), inverse, q)
    return tl.where((tl.abs(first) < 2.0**-100) | (tl.abs(first) > 2.0**100), first, q)


@jit
def scale_of(absmax, FORMAT_MAX: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return absmax / max in fp32, at least 2**-126; 1 where there is nothing to scale."""
    scale = tl.maximum(tl.div_rn(absmax, FORMAT_MAX), 2.0**-126)
    return tl.where(absmax == 0.0, 1.0, scale)


@jit
def finite_magnitude(x):  # type: ignore[no-untyped-def]
    """Return abs(x) in fp32 with NaN and Inf taken as zero: they take no part in a scale."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@jit
def e4m3_codes(x, scale):  # type: ignore[no-untyped-def]
    """Return round(x / scale) in e4m3, saturating; NaN and Inf become NaN."""
    x = x.to(tl.float32)
    x = tl.where(tl.abs(x) == float("inf"), float("nan"), x)
    return exact_quotient(x, scale).to(tl.float8e4nv)


@jit
def clear_counters(count_ptr, n_count):  # type: ignore[no-untyped-def]
    """Zero the arrival counters of the split-K product that follows."""
    for start in tl.range(0, n_count, 1024):
        offsets = start + tl.arange(0, 1024)
        tl.store(count_ptr + offsets, tl.zeros([1024], dtype=tl.int32), mask=offsets < n_count)


@kernel
def clear_kernel(count_ptr, n_count, PDL: tl.constexpr):  # type: ignore[no-untyped-def]
    """Zero counters where no quantiser runs before the product."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    clear_counters(count_ptr, n_count)


@kernel
def quantize_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scale_ptr,
    given_ptr,
    count_ptr,
    K,
    padded_k,
    stride_xm,
    stride_xk,
    n_count,
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
    LOOP: tl.constexpr,
    STATIC: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, chunk): the row's absmax, read by each chunk's program for itself; then the chunk's codes."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        # In this order whatever ran before, a kernel that made the weights say, has ended when the product begins.
        gdc_wait()
        gdc_launch_dependents()
    x_row = x_ptr + row.to(tl.int64) * stride_xm
    wide = tl.arange(0, BLOCK)
    part = chunk * CHUNK + tl.arange(0, CHUNK)
    if WIDE:
        wide = wide.to(tl.int64)
        part = part.to(tl.int64)
    x = tl.load(x_row + part * stride_xk, mask=part < K, other=0.0)
    if STATIC:
        scale = tl.load(given_ptr)
    else:
        magnitude = finite_magnitude(x) if CHUNK == BLOCK and not LOOP else tl.zeros([BLOCK], dtype=tl.float32)
        if LOOP:
            for k in tl.range(0, K, BLOCK):
                more = tl.load(x_row + (k + wide) * stride_xk, mask=k + wide < K, other=0.0)
                magnitude = tl.maximum(magnitude, finite_magnitude(more))
        elif CHUNK != BLOCK:
            magnitude = finite_magnitude(tl.load(x_row + wide * stride_xk, mask=wide < K, other=0.0))
        scale = scale_of(tl.max(magnitude, axis=0), 448.0)
    codes = e4m3_codes(x, scale)
    tl.store(codes_ptr + row.to(tl.int64) * padded_k + part, codes, mask=part < padded_k)
    if chunk == 0:
        tl.store(scale_ptr + row, scale)
        if row == 0:
            clear_counters(count_ptr, n_count)


@kernel
def quantize_blocks_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    codes_ptr,
    scale_ptr,
    count_ptr,
    K,
    padded_k,
    stride_xm,
    stride_xk,
    n_count,
    BLOCKS: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, chunk): BLOCKS runs of 128 of a row, each with its own scale."""
    row = tl.program_id(0)
    chunk = tl.program_id(1)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    block = chunk * BLOCKS + tl.arange(0, BLOCKS)
    k = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    if WIDE:
        k = k.to(tl.int64)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_xm + k * stride_xk, mask=k < K, other=0.0)
    scale = scale_of(tl.max(finite_magnitude(x), axis=1), 448.0)
    codes = e4m3_codes(x, tl.broadcast_to(scale[:, None], [BLOCKS, 128]))
    tl.store(codes_ptr + row.to(tl.int64) * padded_k + k, codes, mask=k < padded_k)
    blocks = tl.cdiv(K, 128)
    tl.store(scale_ptr + row.to(tl.int64) * blocks + block, scale, mask=block < blocks)
    if (chunk == 0) & (row == 0):
        clear_counters(count_ptr, n_count)
