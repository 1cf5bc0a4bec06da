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

from fp8ref.kernels.jit_convert import jit, to_fp8

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
def scale_of(absmax, FORMAT_MAX: tl.constexpr, UE8M0: tl.constexpr, BOUND: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return absmax / max in fp32, at least 2**-126; 1 where there is nothing to scale.

    With a BOUND above zero the absmax is clipped there first; with UE8M0 the scale is rounded up to a power of two.
    """
    if BOUND > 0.0:
        absmax = tl.minimum(absmax, BOUND)
    scale = tl.div_rn(absmax, FORMAT_MAX)
    if UE8M0:
        # The carry of the mantissa bits rounds up whatever is no power of two.
        bits = (scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
        scale = bits.to(tl.float32, bitcast=True)
    scale = tl.maximum(scale, 2.0**-126)
    return tl.where(absmax == 0.0, 1.0, scale)


@jit
def finite_magnitude(x):  # type: ignore[no-untyped-def]
    """Return abs(x) in fp32 with NaN and Inf taken as zero: they take no part in a scale."""
    magnitude = tl.abs(x.to(tl.float32))
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@jit
def codes_of(x, scale, FORMAT_MAX: tl.constexpr, ADA: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return round(x / scale), saturating: in e4m3, where NaN and Inf become NaN, or in e5m2, which has both."""
    x = x.to(tl.float32)
    infinite = tl.abs(x) == float("inf")
    if FORMAT_MAX == 448.0:
        x = tl.where(infinite, float("nan"), x)
        codes = to_fp8(exact_quotient(x, scale), tl.float8e4nv, ADA)
    else:
        # The conversion saturates, Inf too.
        bits = to_fp8(exact_quotient(x, scale), tl.float8e5, ADA).to(tl.uint8, bitcast=True)
        bits = tl.where(infinite, tl.where(x < 0.0, 0xFC, 0x7C).to(tl.uint8), bits)
        codes = bits.to(tl.float8e5, bitcast=True)
    return codes


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
def absmax_kernel(  # type: ignore[no-untyped-def]
    x_ptr, part_ptr, M, K, stride_xm, stride_xk, BLOCK: tl.constexpr, WIDE: tl.constexpr, PDL: tl.constexpr
):
    """Program p: the absmax of every P-th run of BLOCK of the matrix; the quantiser takes the largest of all P."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    runs = tl.cdiv(K, BLOCK)
    within = tl.arange(0, BLOCK)
    if WIDE:
        within = within.to(tl.int64)
    magnitude = tl.zeros([BLOCK], dtype=tl.float32)
    for item in tl.range(tl.program_id(0), M * runs, tl.num_programs(0)):
        row = item // runs
        k = (item - row * runs) * BLOCK + within
        x = tl.load(x_ptr + row.to(tl.int64) * stride_xm + k * stride_xk, mask=k < K, other=0.0)
        magnitude = tl.maximum(magnitude, finite_magnitude(x))
    tl.store(part_ptr + tl.program_id(0), tl.max(magnitude, axis=0))


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
    PARTS: tl.constexpr,
    FORMAT_MAX: tl.constexpr,
    UE8M0: tl.constexpr,
    BOUND: tl.constexpr,
    ADA: tl.constexpr,
    WIDE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (row, chunk): the row's absmax, read by each chunk's program for itself; then the chunk's codes.

    STATIC: the scale lies at ``given_ptr``. PARTS above zero: so many absmaxes, of which the largest makes the scale.
    """
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
    elif PARTS > 0:
        scale = scale_of(tl.max(tl.load(given_ptr + tl.arange(0, PARTS)), axis=0), FORMAT_MAX, UE8M0, BOUND)
    else:
        magnitude = finite_magnitude(x) if CHUNK == BLOCK and not LOOP else tl.zeros([BLOCK], dtype=tl.float32)
        if LOOP:
            for k in tl.range(0, K, BLOCK):
                more = tl.load(x_row + (k + wide) * stride_xk, mask=k + wide < K, other=0.0)
                magnitude = tl.maximum(magnitude, finite_magnitude(more))
        elif CHUNK != BLOCK:
            magnitude = finite_magnitude(tl.load(x_row + wide * stride_xk, mask=wide < K, other=0.0))
        scale = scale_of(tl.max(magnitude, axis=0), FORMAT_MAX, UE8M0, BOUND)
    codes = codes_of(x, scale, FORMAT_MAX, ADA)
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
    FORMAT_MAX: tl.constexpr,
    UE8M0: tl.constexpr,
    BOUND: tl.constexpr,
    ADA: tl.constexpr,
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
    scale = scale_of(tl.max(finite_magnitude(x), axis=1), FORMAT_MAX, UE8M0, BOUND)
    codes = codes_of(x, tl.broadcast_to(scale[:, None], [BLOCKS, 128]), FORMAT_MAX, ADA)
    tl.store(codes_ptr + row.to(tl.int64) * padded_k + k, codes, mask=k < padded_k)
    blocks = tl.cdiv(K, 128)
    tl.store(scale_ptr + row.to(tl.int64) * blocks + block, scale, mask=block < blocks)
    if (chunk == 0) & (row == 0):
        clear_counters(count_ptr, n_count)
