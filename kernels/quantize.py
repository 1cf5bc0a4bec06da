"""Launching the activation quantiser: how it is cut into programs, and a call of it alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.quantize import ScaledTensor
from fp8ref.kernels import launch
from fp8ref.kernels.device import capability_of, interpreting, unit_of_device
from fp8ref.kernels.launch import Pointer, Runner, addresser, compile_runner, current_stream

INT32 = 2**31
"""Offsets along K from here on are computed in 64 bits; those along rows always are."""

_PROGRAMS = 132
_LONGEST_ROW = 16384
"""Elements of a row that one program keeps in registers; a longer row is read twice, the second time from L2."""


def next_power_of_2(x: int) -> int:
    """Return the smallest power of two that is at least ``x``.

    >>> next_power_of_2(1), next_power_of_2(4099)
    (1, 8192)
    """
    return 1 << max(0, x - 1).bit_length()


def uses_pdl(device: torch.device) -> bool:
    """Whether programmatic dependent launch exists there: from Hopper on."""
    return not interpreting() and capability_of(device) >= (9, 0)


def row_cut(m: int, k: int) -> dict[str, Any]:
    """Return how a row is cut: few rows are shared by many programs, many rows are read once each.

    >>> row_cut(1, 4096)["CHUNK"], row_cut(4096, 4096)["CHUNK"]
    (1024, 4096)
    """
    block = min(max(128, next_power_of_2(k)), _LONGEST_ROW)
    loop = k > block
    chunk = block if loop else min(block, 1024)
    while chunk < block and m * -(-k // chunk) > _PROGRAMS:
        chunk *= 2
    warps = min(32, max(4, block // 512))
    if chunk == block and warps > 16:
        warps = 16
    return {"BLOCK": block, "CHUNK": chunk, "LOOP": loop, "num_warps": warps}


def prepare_quantiser(x: Tensor, padded: int, counters: int, *, blockwise: bool, static: bool, aligned: bool) -> Runner:
    """Compile the quantiser for ``x`` [M, K]; counters are int32 to be zeroed for the product that follows.

    The runner takes addresses: x, codes [M, padded], scales ([M], or [M, ceil(K/128)] blockwise), then not blockwise
    the given scale (any address where it is not ``static``), then counters.
    """
    from fp8ref.kernels import jit_quantize

    (m, k), (stride_m, stride_k) = x.shape, x.stride()
    pdl = uses_pdl(x.device)
    shared = {"WIDE": stride_k * max(k, padded) >= INT32, "PDL": pdl}
    integers = (k, padded, stride_m, stride_k, counters)
    pointers = [Pointer(x.dtype, aligned), Pointer(torch.float8_e4m3fn), Pointer(torch.float32)]
    options: dict[str, Any] = {"launch_pdl": pdl, "enable_fp_fusion": False}
    if blockwise:
        blocks = min(8, next_power_of_2(-(-k // 128)))
        grid = (m, max(1, -(-padded // (128 * blocks))))
        pointers.append(Pointer(torch.int32))
        constants: dict[str, Any] = {"BLOCKS": blocks, **shared}
        options["num_warps"] = 4
        kernel = jit_quantize.quantize_blocks_kernel
    else:
        cut = row_cut(m, k)
        options["num_warps"] = cut.pop("num_warps")
        grid = (m, max(1, -(-padded // cut["CHUNK"])))
        pointers += [Pointer(torch.float32, aligned=False), Pointer(torch.int32)]
        constants = {**cut, "STATIC": static, **shared}
        kernel = jit_quantize.quantize_rows_kernel
    return compile_runner(kernel, grid, tuple(pointers), integers, constants, options)


def quantize_rows(x: Tensor, *, blockwise: bool = False, scale: Tensor | None = None) -> ScaledTensor:
    """Quantise activations on the GPU, with the codes and scales of :func:`fp8ref.quantize` bit for bit.

    Args:
        x: [M, K] float32, bfloat16 or float16 on a GPU, any strides.
        blockwise: False gives "row" scales [M, 1]; True gives "1x128" scales [M, ceil(K/128)].
        scale: fp32, one element: the same static scale for every row.

    Returns:
        A ScaledTensor of e4m3 codes.

    This is the first half of :func:`fp8ref.scaled_linear`, exposed so that it can be compared alone.
    """
    unit_of_device(x.device)
    m, k = x.shape
    groups = -(-k // 128) if blockwise else 1
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        return _quantize_rows(x, m, k, groups, blockwise, scale)


def _quantize_rows(x: Tensor, m: int, k: int, groups: int, blockwise: bool, scale: Tensor | None) -> ScaledTensor:
    codes = launch.empty((m, k), (k, 1), torch.float8_e4m3fn)
    scales = launch.empty((m, groups), (groups, 1), torch.float32)
    if m and k:
        aligned = x.data_ptr() % 16 == 0
        run = prepare_quantiser(x, k, 0, blockwise=blockwise, static=scale is not None, aligned=aligned)
        at = addresser()
        places = [at(x), at(codes), at(scales)]
        if not blockwise:
            places.append(at(scales if scale is None else scale))
        run(*places, at(scales.view(torch.int32)), stream=current_stream(x.device.index))
    elif m:
        scales.fill_(1.0)
    return ScaledTensor(codes, scales, "1x128" if blockwise else "row")
