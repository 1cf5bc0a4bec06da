"""Launching the activation quantiser: how it is cut into programs, and a call of it alone."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.checks import check_tensor
from fp8ref.emulation.formats import format_of
from fp8ref.emulation.quantize import ScaledTensor, ScaleFormat, check_absmax_bound, check_scale_format
from fp8ref.emulation.scales import Scaling
from fp8ref.kernels import launch
from fp8ref.kernels.activations import INPUTS, Activations
from fp8ref.kernels.device import capability_of, check_placement, interpreting, unit_of_device
from fp8ref.kernels.launch import Address, Pointer, Runner, addresser, compile_runner, current_stream

INT32 = 2**31
"""Offsets along K from here on are computed in 64 bits; those along rows always are."""

_MOST_CHUNKS = 65535
"""CUDA's limit for the second dimension of a grid."""

_PROGRAMS = 132
_LONGEST_ROW = 16384
"""Elements of a row that one program keeps in registers; a longer row is read twice, the second time from L2."""

_PARTS = 256
"""Programs that find the absmax of a whole matrix: fixed, so that one compiled quantiser serves every size."""


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


def prepare_quantiser(
    x: Tensor, padded: int, counters: int, activations: Activations, *, static: bool, aligned: bool
) -> Runner:
    """Compile the quantiser for ``x`` [M, K]; counters are int32 to be zeroed for the product that follows.

    The runner takes addresses: x, codes [M, padded], scales ([M], or [M, ceil(K/128)] for 1x128), then except for 1x128
    the given scale (where not ``static`` :func:`absmax_parts` floats of working memory, which may be none), then
    counters.
    """
    from fp8ref.kernels import jit_quantize

    (m, k), (stride_m, stride_k) = x.shape, x.stride()
    pdl = uses_pdl(x.device)
    ada = unit_of_device(x.device) == "sm89"
    shared = {**activations.constants, "ADA": ada, "WIDE": stride_k * max(k, padded) >= INT32, "PDL": pdl}
    integers = (k, padded, stride_m, stride_k, counters)
    pointers = [Pointer(x.dtype, aligned), Pointer(activations.dtype), Pointer(torch.float32)]
    options: dict[str, Any] = {"launch_pdl": pdl, "enable_fp_fusion": False}
    if activations.scaling == "1x128":
        blocks = min(8, next_power_of_2(-(-k // 128)))
        grid = (m, _chunks(k, padded, 128 * blocks))
        pointers.append(Pointer(torch.int32))
        constants: dict[str, Any] = {"BLOCKS": blocks, **shared}
        options["num_warps"] = 4
        return compile_runner(jit_quantize.quantize_blocks_kernel, grid, tuple(pointers), integers, constants, options)
    parts = absmax_parts(activations, static=static)
    cut = row_cut(m, k)
    options["num_warps"] = cut.pop("num_warps")
    grid = (m, _chunks(k, padded, cut["CHUNK"]))
    pointers += [Pointer(torch.float32, aligned=parts > 0), Pointer(torch.int32)]
    constants = {**cut, "STATIC": static, "PARTS": parts, **shared}
    kernel = jit_quantize.quantize_rows_kernel
    quantise = compile_runner(kernel, grid, tuple(pointers), integers, constants, options)
    return _after_absmax(quantise, x, parts, aligned=aligned, pdl=pdl) if parts else quantise


def _chunks(k: int, padded: int, chunk: int) -> int:
    """Return how many programs share a row, or raise where a grid cannot have so many."""
    chunks = max(1, -(-padded // chunk))
    if chunks > _MOST_CHUNKS:
        raise ValueError(f"x: got rows of {k}; the kernels take at most {_MOST_CHUNKS * chunk} here: cut K into pieces")
    return chunks


def absmax_parts(activations: Activations, *, static: bool) -> int:
    """Return how many partial absmaxes the quantiser takes its scale from, 0 where each row has its own.

    >>> absmax_parts(Activations("tensor"), static=False), absmax_parts(Activations("row"), static=False)
    (256, 0)
    """
    return _PARTS if activations.scaling == "tensor" and not static else 0


def _after_absmax(quantise: Runner, x: Tensor, parts: int, *, aligned: bool, pdl: bool) -> Runner:
    """Return ``quantise`` behind a kernel that leaves ``parts`` partial absmaxes of x where it looks for them."""
    from fp8ref.kernels.jit_quantize import absmax_kernel

    (m, k), (stride_m, stride_k) = x.shape, x.stride()
    block = min(2048, max(128, next_power_of_2(k)))
    find = compile_runner(
        absmax_kernel,
        (parts,),
        (Pointer(x.dtype, aligned), Pointer(torch.float32)),
        (m, k, stride_m, stride_k),
        {"BLOCK": block, "WIDE": stride_k * k >= INT32, "PDL": pdl},
        {"launch_pdl": pdl, "num_warps": 4},
    )

    def run(x: Address, codes: Address, scales: Address, found: Address, counters: Address, *, stream: int) -> None:
        find(x, found, stream=stream)
        quantise(x, codes, scales, found, counters, stream=stream)

    return run


def quantize_rows(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: Scaling = "row",
    scale: Tensor | None = None,
    scale_format: ScaleFormat = "float32",
    absmax_bound: float | None = None,
) -> ScaledTensor:
    """Quantise activations on the GPU, with the codes and scales of :func:`fp8ref.quantize` bit for bit.

    Args:
        x: [M, K] float32, bfloat16 or float16 on a GPU, any strides.
        dtype: the FP8 dtype.
        scaling: "row" gives scales [M, 1]; "1x128" [M, ceil(K/128)]; "tensor" one, for which x is read twice.
        scale: fp32, one element: the same static scale for every row; not for "1x128".
        scale_format: as in :func:`fp8ref.quantize`.
        absmax_bound: as in :func:`fp8ref.quantize`.

    Returns:
        A ScaledTensor.

    Raises:
        TypeError, ValueError: an argument that does not fit, or a device without the kernels.

    This is the first half of :func:`fp8ref.scaled_linear`, exposed so that it can be compared alone.
    """
    check_placement(check_tensor(x, "x"), {"scale": scale})
    if x.dtype not in INPUTS or x.dim() != 2:
        raise ValueError(f"x: got {x.dtype} {list(x.shape)}; give [M, K] in one of {list(INPUTS)}")
    format_of(dtype, "dtype")
    if scaling not in ("row", "tensor", "1x128") or (scaling == "1x128" and scale is not None):
        raise ValueError(f'scaling: got {scaling!r}; give "row", "tensor", or "1x128" without a scale')
    if scale is not None and (scale.dtype != torch.float32 or scale.numel() != 1):
        raise ValueError(f"scale: got {scale.dtype} {list(scale.shape)}; give one float32 element")
    check_scale_format(scale_format)
    check_absmax_bound(absmax_bound, "absmax_bound")
    activations = Activations(scaling, dtype, scale_format, absmax_bound)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        return _quantize_rows(x, activations, scale)


def _quantize_rows(x: Tensor, activations: Activations, scale: Tensor | None) -> ScaledTensor:
    (m, k), blockwise = x.shape, activations.scaling == "1x128"
    groups = -(-k // 128) if blockwise else 1
    codes = launch.empty((m, k), (k, 1), activations.dtype)
    scales = launch.empty((m, groups), (groups, 1), torch.float32)
    if m and k:
        aligned = x.data_ptr() % 16 == 0
        run = prepare_quantiser(x, k, 0, activations, static=scale is not None, aligned=aligned)
        at = addresser()
        places = [at(x), at(codes), at(scales)]
        if not blockwise:
            parts = absmax_parts(activations, static=scale is not None)
            given = launch.empty((parts,), (1,), torch.float32) if scale is None else scale
            places.append(at(given))
        run(*places, at(scales.view(torch.int32)), stream=current_stream(x.device.index))
    elif m:
        scales.fill_(1.0)
    if activations.scaling == "tensor":
        scales = scales[0, 0] if m else scales.new_ones(())
    return ScaledTensor(codes, scales, activations.scaling)
