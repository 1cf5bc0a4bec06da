"""Raw Triton code of the chains on CUDA tensors; :mod:`fp8ref.emulation.compiled_cuda` launches it.

A program walks one chain for one cell of the output. Integers and powers of two throughout: nothing rounds but the
truncations that the unit makes, so no order of evaluation and no fused multiply-add could change a bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton
import triton.language as tl

jit: Callable[[Callable[..., Any]], Any] = triton.jit
kernel: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["M", "N", "size", "count"])


@jit
def power_of_two(exponent):  # type: ignore[no-untyped-def]
    """Return 2 ** exponent in fp32, for the exponents of normal numbers."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@jit
def keep_bits(total, WIDE: tl.constexpr, B: tl.constexpr):  # type: ignore[no-untyped-def]
    """Truncate exact sums, int64 where WIDE and else fp32, to B significant bits; fp64 or fp32."""
    if WIDE:
        bits = total.to(tl.float64).to(tl.int64, bitcast=True) & (-1 << (53 - B))
        kept = bits.to(tl.float64, bitcast=True)
    else:
        kept = (total.to(tl.int32, bitcast=True) & (-1 << (24 - B))).to(tl.float32, bitcast=True)
    return kept


@jit
def sign_of(x):  # type: ignore[no-untyped-def]
    """Return the sign bit of fp32 values, in its place."""
    return x.to(tl.int32, bitcast=True) & -0x80000000


@jit
def truncate_product(x, y, magic):  # type: ignore[no-untyped-def]
    """Return ``x * y`` truncated to the last place of ``magic``, 2 ** 23 of them with the sign of the product.

    The conversion to an integer, which truncates too, has a fraction of the rate of this addition toward zero.
    """
    x, y = tl.broadcast(x, y)
    magic = magic.to(tl.float32, bitcast=True)
    sums = tl.inline_asm_elementwise(
        "fma.rz.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, y, magic], dtype=tl.float32, is_pure=True, pack=1
    )
    return sums - magic


@kernel
def chains_kernel(  # type: ignore[no-untyped-def]
    a, of_a, b, of_b, first_steps, out, M, N,
    LENGTH: tl.constexpr, CHUNK: tl.constexpr, F: tl.constexpr, B: tl.constexpr, RESTART_EVERY: tl.constexpr,
    REAL: tl.constexpr, INTEGER: tl.constexpr, WIDE: tl.constexpr, IN_PLACE: tl.constexpr, ZERO: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Run chain ``program_id(1)`` of ``a`` [steps * LENGTH, M] and ``b`` [steps * LENGTH, N] into ``out``.

    Values are fp32, their exponents ``of_a`` and ``of_b`` int8, ZERO for zero. ``first_steps`` [all chains + 1] cuts
    the steps into chains; ``out`` is fp32 [all chains, M, N]. RESTART_EVERY steps begin at +0 and join the total in
    fp32; 0 carries the accumulator through the chain. IN_PLACE truncates products where they are instead of as
    integers; for sums that are not WIDE, and not for Triton's interpreter, which knows no machine instructions.
    """
    chain = tl.program_id(1)
    cells = tl.cdiv(N, BLOCK_N)
    rows = (tl.program_id(0) // cells) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (tl.program_id(0) % cells) * BLOCK_N + tl.arange(0, BLOCK_N)
    first = tl.load(first_steps + chain)
    last = tl.load(first_steps + chain + 1)
    carried = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    # Rows past the end are read as the last row, which needs no mask, and never stored.
    slots = first.to(tl.int64) * LENGTH + tl.arange(0, CHUNK)
    at_a = slots[:, None] * M + tl.minimum(rows, M - 1)[None, :]
    at_b = slots[:, None] * N + tl.minimum(columns, N - 1)[None, :]
    for step in range(first, last):
        peak = tl.full([BLOCK_M, BLOCK_N], ZERO, tl.int32)
        for start in tl.static_range(0, LENGTH, CHUNK):
            x = tl.load(of_a + at_a + start * M).to(tl.int32)
            y = tl.load(of_b + at_b + start * N).to(tl.int32)
            peak = tl.maximum(peak, tl.max(x[:, :, None] + y[:, None, :], axis=0))
        of_carried = ((carried.to(tl.int32, bitcast=True) >> 23) & 255) - 127
        peak = tl.maximum(peak, of_carried)
        magic = power_of_two(23 - F + peak).to(tl.int32, bitcast=True)
        scale = power_of_two(F - peak)
        if IN_PLACE:
            aligned = truncate_product(carried, tl.full([BLOCK_M, BLOCK_N], 1.0, tl.float32), magic ^ sign_of(carried))
        else:
            aligned = (carried.to(REAL) * scale.to(REAL)).to(INTEGER).to(tl.int64 if WIDE else tl.int32)
        for start in tl.static_range(0, LENGTH, CHUNK):
            x = tl.load(a + at_a + start * M)[:, :, None]
            y = tl.load(b + at_b + start * N)[:, None, :]
            if IN_PLACE:
                aligned += tl.sum(truncate_product(x, y, sign_of(x) ^ (sign_of(y) ^ magic[None, :, :])), axis=0)
            else:
                products = (x * y).to(REAL) * scale[None, :, :].to(REAL)
                aligned += tl.sum(products.to(INTEGER), axis=0)
        if IN_PLACE:
            carried = keep_bits(aligned, WIDE, B)
        elif WIDE:
            carried = (keep_bits(aligned, WIDE, B) * power_of_two(peak - F).to(tl.float64)).to(tl.float32)
        else:
            carried = keep_bits(aligned.to(tl.float32), WIDE, B) * power_of_two(peak - F)
        if RESTART_EVERY:
            whole = (step + 1 - first) % RESTART_EVERY == 0
            total = tl.where(whole, total + carried, total)
            carried = tl.where(whole, 0.0, carried)
        at_a += LENGTH * M
        at_b += LENGTH * N
    if RESTART_EVERY == 0:
        total = carried
    place = out + chain.to(tl.int64) * M * N + rows.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(place, total, mask=(rows < M)[:, None] & (columns < N)[None, :])


@kernel
def promote_kernel(  # type: ignore[no-untyped-def]
    total, chain, left, right, M, N, stride_tm, stride_tn, stride_cm, stride_cn,
    JOINED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add a scaled chain to ``total`` [M, N]: ``promote_scaled`` of :mod:`fp8ref.emulation.compiled`."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    row, column = at // N, at % N
    inside = row < M
    x = tl.load(chain + row * stride_cm + column * stride_cn, mask=inside, other=0.0)
    place = total + row * stride_tm + column * stride_tn
    z = tl.load(place, mask=inside, other=0.0)
    of_row, of_column = tl.load(left + row, mask=inside, other=0.0), tl.load(right + column, mask=inside, other=0.0)
    if JOINED:
        of_column = of_row * of_column
    else:
        x = x * of_row
    tl.store(place, tl.fma(x, of_column, z), mask=inside)


@kernel
def add_kernel(total, chains, size, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Add ``chains`` [count, size] to ``total`` [size], one by one."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    result = tl.load(total + at, mask=inside, other=0.0)
    for _ in range(count):
        result += tl.load(chains + at, mask=inside, other=0.0)
        chains += size
    tl.store(total + at, result, mask=inside)
