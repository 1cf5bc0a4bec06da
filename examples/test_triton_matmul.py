"""A row-wise scaled FP8 product in Triton, right and, with the tail of K left out, wrong; and its test.

The example of docs/testing.md: ``TRITON_INTERPRET=1 pytest examples``, or on a GPU ``pytest examples``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from fp8ref.testing import Supports, check_matmul
from fp8ref.testing.cases import Kernel


@triton.jit
def _kernel(
    a_ptr, b_ptr, scale_a_ptr, scale_b_ptr, y_ptr, M, N, K,
    stride_am, stride_ak, stride_bk, stride_bn,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_m, in_n = (m < M)[:, None], (n < N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    # The mistake of TAIL=False: a loop over whole blocks only.
    for start in range(0, K if TAIL else K // BLOCK_K * BLOCK_K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        in_k = k < K
        a = tl.load(a_ptr + m[:, None] * stride_am + k[None, :] * stride_ak, mask=in_m & in_k[None, :], other=0.0)
        b = tl.load(b_ptr + k[:, None] * stride_bk + n[None, :] * stride_bn, mask=in_k[:, None] & in_n, other=0.0)
        acc = tl.dot(a, b, acc)
    scale_a = tl.load(scale_a_ptr + m, mask=m < M, other=0.0)
    scale_b = tl.load(scale_b_ptr + n, mask=n < N, other=0.0)
    tl.store(y_ptr + m[:, None] * N + n[None, :], acc * scale_b[None, :] * scale_a[:, None], mask=in_m & in_n)


def _matmul(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, tail: bool) -> Tensor:
    (m, k), n = a.shape, b.shape[1]
    y = torch.empty(m, n, device=a.device)
    block_m, block_n, block_k = 64, 32, 64
    _kernel[triton.cdiv(m, block_m), triton.cdiv(n, block_n)](
        a, b, scale_a, scale_b, y, m, n, k, a.stride(0), a.stride(1), b.stride(0), b.stride(1),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, TAIL=tail,
    )  # fmt: skip
    return y


def right(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **_options: Any) -> Tensor:
    """The product: FP8 [M, K] by [K, N], scales [M, 1] and [1, N]; fp32, fast accumulation."""
    return _matmul(a, b, scale_a, scale_b, tail=True)


def without_tail(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **_options: Any) -> Tensor:
    """The same, wrong where K is no multiple of 64."""
    return _matmul(a, b, scale_a, scale_b, tail=False)


E4M3 = torch.float8_e4m3fn
GPU = torch.cuda.is_available()
SUPPORTS = Supports(
    scalings=(("row", "row"),),
    dtypes=((E4M3, E4M3),),
    out_dtypes=(torch.float32,),
    bias_dtypes=(None,),
    use_fast_accum=(True,),
    says_scaling=False,
    specials=GPU,  # the interpreter reads NaN as a number
    largest=(66, 40, 150),
)


@pytest.mark.parametrize("kernel", [right, without_tail])
def test_kernel(kernel: Kernel) -> None:
    """Every property that holds for a right kernel; the second one must fail."""
    if GPU:
        # 64 rows a tile: Hopper's wgmma, one accumulator over all of K. Every bit must agree.
        check_matmul(kernel, SUPPORTS, unit="sm90", device="cuda")
    else:
        # Triton's interpreter adds otherwise than a GPU: data on which every order agrees.
        check_matmul(kernel, SUPPORTS, expect="exact", examples=15, fail_fast=True)
