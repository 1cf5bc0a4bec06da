"""Raw Triton code of the scaled matrix product.

Weight rows are the 64-row side of ``tl.dot``. That makes Hopper use wgmma m64nNk32 at every batch size, whose
arithmetic is the oracle's ``unit="sm90"``; on Ada the same code becomes mma.sync m16n8k32, ``unit="sm89"``. The
reference is :func:`fp8ref.emulation.matmul.emulate_matmul`. Compile with ``enable_fp_fusion=False``: a scale, a bias
and a promotion each round on their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from fp8ref.kernels.jit_convert import jit, to_fp8

# Sizes that no load's width depends on: one compiled kernel serves them all.
kernel: Callable[[Callable[..., Any]], Any] = triton.jit(
    do_not_specialize=["M", "N", "part_tiles", "stride_sxm", "stride_sxk", "stride_swn", "stride_swk"]
)


@jit
def find_cell(M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return this program's part of K, output cell, row of cells along N and along M."""
    n_cells = tl.cdiv(N, BLOCK_N)
    m_cells = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    part = pid // (n_cells * m_cells)
    cell = pid % (n_cells * m_cells)
    # Neighbouring programs share weights and activations in L2.
    group = cell // (GROUP * m_cells)
    width = tl.minimum(n_cells - group * GROUP, GROUP)
    within = cell - group * GROUP * m_cells
    return part, cell, group * GROUP + within % width, within // width


@jit
def add_step(  # type: ignore[no-untyped-def]
    acc, w, x, sx_ptr, sw_ptr, block, stride_sxk, stride_swk, in_m, in_n,
    ACCURATE: tl.constexpr, KIND: tl.constexpr, WGMMA: tl.constexpr,
):  # fmt: skip
    """Add one BLOCK_K of products to the accumulator in the way the mode and the kind of scales ask for."""
    if KIND != "tensor" and KIND != "row":  # noqa: PLR1714 - Triton compiles no `in`
        chain = tl.dot(w, x, max_num_imprecise_acc=128)
        sx = tl.load(sx_ptr + block * stride_sxk, mask=in_m, other=0.0)
        sw = tl.load(sw_ptr + block * stride_swk, mask=in_n, other=0.0)
        if KIND == "1x128":
            acc = tl.fma(chain * sx[None, :], tl.broadcast_to(sw[:, None], acc.shape), acc)
        else:
            acc = tl.fma(chain, sx[None, :] * sw[:, None], acc)
    elif not ACCURATE:
        acc = tl.dot(w, x, acc)
    elif WGMMA:
        acc = tl.dot(w, x, acc, max_num_imprecise_acc=128)
    else:
        # mma.sync has no promotion of its own; the argument keeps the compiler from folding the addition into it.
        acc = acc + tl.dot(w, x, max_num_imprecise_acc=128)
    return acc


@jit
def join_parts(  # type: ignore[no-untyped-def]
    acc, part_ptr, count_ptr, cell, part, in_m, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Store this part's result; the last program to arrive at a cell adds all parts in order, from part 0 on."""
    size: tl.constexpr = BLOCK_M * BLOCK_N
    place = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
    base = part_ptr + cell.to(tl.int64) * (SPLIT * size) + place
    mask = tl.broadcast_to(in_m[None, :], [BLOCK_N, BLOCK_M])
    tl.store(base + part * size, acc, mask=mask)
    # Every thread's store must be visible before the arrival is counted.
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr + cell, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
    if last:
        acc = tl.load(base, mask=mask, other=0.0, cache_modifier=".cg")
        for s in tl.static_range(1, SPLIT):
            acc += tl.load(base + s * size, mask=mask, other=0.0, cache_modifier=".cg")
    return acc, last


@jit
def store_cell(  # type: ignore[no-untyped-def]
    acc, sx, sw, bias, out_ptr, offs_m, offs_n, in_m, in_n, N,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, SPLIT: tl.constexpr, ADA: tl.constexpr,
):  # fmt: skip
    """Scales, bias and output rounding, each with a rounding of its own, in the oracle's order."""
    if KIND == "tensor":
        factor = sx[None, :] * sw[:, None]
        if SPLIT == 1:
            # One rounding, as a product has it, but a zero comes out as +0.
            acc = tl.fma(acc, factor, tl.zeros_like(acc))
        else:
            acc = acc * factor
            acc = tl.where((factor == 0.0) & (acc == 0.0), 0.0, acc)
    elif KIND == "row":
        acc = (acc * sw[:, None]) * sx[None, :]
    if HAS_BIAS:
        acc = acc + bias[:, None]
    out = out_ptr + offs_m.to(tl.int64)[None, :] * N + offs_n[:, None]
    if out_ptr.dtype.element_ty.primitive_bitwidth == 8:
        result = to_fp8(acc, out_ptr.dtype.element_ty, ADA)
    else:
        result = acc.to(out_ptr.dtype.element_ty)
    tl.store(out, result, mask=in_n[:, None] & in_m[None, :])


@kernel
def scaled_matmul_kernel(  # type: ignore[no-untyped-def]
    x_ptr, w_ptr, sx_ptr, sw_ptr, bias_ptr, out_ptr, part_ptr, count_ptr,
    M, N, K, stride_xm, stride_xk, stride_wn, stride_wk, stride_sxm, stride_sxk, stride_swn, stride_swk, part_tiles,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
    KIND: tl.constexpr, ACCURATE: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN_K: tl.constexpr, WIDE: tl.constexpr,
    WGMMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute out[M, N] = epilogue(x[M, K] @ w[N, K]^T); one program a cell of the output and part of K."""
    part, cell, n_cell, m_cell = find_cell(M, N, BLOCK_M, BLOCK_N, GROUP)
    k_begin = part * part_tiles * 128
    if PDL:
        gdc_launch_dependents()
    offs_n = n_cell * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = m_cell * BLOCK_M + tl.arange(0, BLOCK_M)
    in_n = offs_n < N
    in_m = offs_m < M
    AT_END: tl.constexpr = KIND == "tensor" or KIND == "row"  # noqa: PLR1714 - Triton compiles no `in`
    # Rows past the end are read as the last row, which needs no mask, and never stored.
    row_n = tl.minimum(offs_n, N - 1).to(tl.int64)
    left = tl.minimum(part_tiles * 128, K - k_begin)
    # Of no use before the last step, but on its way from memory since before the first.
    sw_ptr += (row_n // 128 if KIND == "128x128" else row_n) * stride_swn
    sw = tl.load(sw_ptr) if AT_END else in_n
    bias = tl.load(bias_ptr + row_n).to(tl.float32) if HAS_BIAS else sw
    acc = tl.zeros([BLOCK_N, BLOCK_M], dtype=tl.float32)
    if PDL:
        gdc_wait()
    row_m = offs_m.to(tl.int64)
    sx_ptr += (row_m // 128 if KIND == "128x128 by 1x128" else row_m) * stride_sxm
    sx = tl.load(sx_ptr, mask=in_m, other=0.0) if AT_END else in_m
    offs_k = tl.arange(0, BLOCK_K)
    step_k = k_begin + offs_k
    step = BLOCK_K
    if WIDE:
        step_k = step_k.to(tl.int64)
        step = tl.full([], BLOCK_K, tl.int64)
    w_ptrs = w_ptr + row_n[:, None] * stride_wn + step_k[None, :] * stride_wk
    x_ptrs = x_ptr + row_m[None, :] * stride_xm + step_k[:, None] * stride_xk
    for i in tl.range(0, tl.cdiv(left, BLOCK_K)):
        if EVEN_K:
            w = tl.load(w_ptrs)
            x = tl.load(x_ptrs, mask=in_m[None, :], other=0.0)
        else:
            in_k = offs_k < K - k_begin - i * BLOCK_K
            w = tl.load(w_ptrs, mask=in_k[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=in_k[:, None] & in_m[None, :], other=0.0)
        block = k_begin // 128 + i
        acc = add_step(acc, w, x, sx_ptr, sw_ptr, block, stride_sxk, stride_swk, in_m, in_n, ACCURATE, KIND, WGMMA)
        w_ptrs += step * stride_wk
        x_ptrs += step * stride_xk
    last = True
    if SPLIT > 1:
        acc, last = join_parts(acc, part_ptr, count_ptr, cell, part, in_m, SPLIT, BLOCK_M, BLOCK_N)
    if last:
        store_cell(acc, sx, sw, bias, out_ptr, offs_m, offs_n, in_m, in_n, N, KIND, HAS_BIAS, SPLIT, not WGMMA)
