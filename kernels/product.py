"""Preparing the Triton product: one compiled kernel for one call signature, and the workspace that it needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from fp8ref.kernels import quantize
from fp8ref.kernels.launch import Pointer, Runner, compile_runner
from fp8ref.kernels.plan import PART, Plan, Tile, parts_of, run_multiple

LARGEST = 2**31 - 2**14
"""The largest M, N and K: the kernels count them in 32 bits, and round up to whole tiles in them."""


@dataclass(frozen=True)
class Operands:
    """Shapes and strides of a product out[M, N] = x[M, K] @ w[N, K]^T, in elements.

    ``scale_strides`` are those of the scales of x along M (or its blocks) and K, then of w along N (or blocks) and K.
    ``kind`` names the scales of w; "128x128 by 1x128" is the one pair where x has the larger blocks.
    """

    m: int
    n: int
    k: int
    x_strides: tuple[int, int]
    w_strides: tuple[int, int]
    scale_strides: tuple[int, int, int, int]
    x_dtype: torch.dtype
    w_dtype: torch.dtype
    kind: str
    x_aligned: bool = True
    w_aligned: bool = True

    def parts(self, split_k: int) -> tuple[int, int]:
        """Return the tiles of 128 of a part and the number of parts."""
        return parts_of(self.k, split_k, run_multiple(*self.kind.split(" by ")))


@dataclass(frozen=True)
class Product:
    """A compiled product and its workspace.

    Attributes:
        run: takes the addresses of x, w, their scales, bias, out, parts and counters, and ``stream``.
        counters: int32 counters, zero before each run.
        part_nbytes: bytes of the parts' fp32 results.
    """

    run: Runner
    counters: int
    part_nbytes: int


def tile_for(unit: str, plan: Plan, kind: str) -> Tile:
    """Return the tile that the unit and the kind of scales allow: blocks of 128, and no promotion inside mma.sync."""
    tile = plan.tile
    if kind not in ("tensor", "row") or unit == "sm89":
        stages = min(tile.stages, 3) if unit == "sm89" else tile.stages
        tile = replace(tile, block_k=PART, stages=stages)
    return tile


def workspace_of(tile: Tile, split: int, m: int, n: int) -> tuple[int, int]:
    """Return the counters and the bytes of partial results of a split product; none without a split.

    >>> workspace_of(Tile(), 2, 3, 100)
    (2, 16384)
    """
    if split == 1:
        return 0, 0
    cells = -(-m // tile.block_m) * -(-n // tile.block_n)
    return cells, 4 * split * cells * tile.block_m * tile.block_n


def prepare_product(
    operands: Operands,
    plan: Plan,
    unit: str,
    device: torch.device,
    *,
    use_fast_accum: bool,
    bias: torch.dtype | None,
    bias_aligned: bool,
    out_dtype: torch.dtype,
    after_ours: bool,
) -> Product:
    """Compile the product that ``plan`` describes for these operands on the current device.

    ``after_ours``: one of our own kernels runs right before it. Only then may it start early: that kernel has waited
    for all that ran before, so scales and bias are there to be read; behind a kernel of others they might not be.
    """
    from fp8ref.kernels import jit_matmul

    if max(operands.m, operands.n, operands.k) > LARGEST:
        raise ValueError(
            f"M, N, K: got {operands.m}, {operands.n}, {operands.k}; the kernels count each in 32 bits: cut the "
            f"operands into pieces of at most {LARGEST}"
        )
    o, tile = operands, tile_for(unit, plan, operands.kind)
    part_tiles, split = o.parts(plan.split_k)
    counters, part_nbytes = workspace_of(tile, split, o.m, o.n)
    cells = -(-o.m // tile.block_m) * -(-o.n // tile.block_n)
    pdl = after_ours and quantize.uses_pdl(device)
    wide = max(o.x_strides[1], o.w_strides[1]) * (o.k + tile.block_k) >= quantize.INT32
    pointers = (
        Pointer(o.x_dtype, o.x_aligned),
        Pointer(o.w_dtype, o.w_aligned),
        Pointer(torch.float32, aligned=False),
        Pointer(torch.float32, aligned=False),
        Pointer(bias or torch.bfloat16, bias_aligned),
        Pointer(out_dtype),
        Pointer(torch.float32),
        Pointer(torch.int32),
    )
    constants: dict[str, Any] = {
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "BLOCK_K": tile.block_k,
        "SPLIT": split,
        "GROUP": tile.group,
        "KIND": o.kind,
        "ACCURATE": not use_fast_accum,
        "HAS_BIAS": bias is not None,
        "EVEN_K": o.k % tile.block_k == 0,
        "WIDE": wide,
        "WGMMA": unit != "sm89",
        "PDL": pdl,
    }
    # Without fusion a scale, a bias and a promotion each round on their own, as the hardware library's do.
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "launch_pdl": pdl, "enable_fp_fusion": False}
    integers = (o.m, o.n, o.k, *o.x_strides, *o.w_strides, *o.scale_strides, part_tiles)
    run = compile_runner(jit_matmul.scaled_matmul_kernel, (cells * split,), pointers, integers, constants, options)
    return Product(run, counters, part_nbytes)


def gpu_name(device: torch.device) -> str:
    """Return the name that tuning files know the device by; without a GPU, the one that is then emulated."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "NVIDIA H200"
