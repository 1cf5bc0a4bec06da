"""Finds where cuBLASLt cuts K, from results alone: +B first, then -B and, one tile of 128 later, a small s.

With all three in one part, B - B is 0 and s survives. A cut between +B and -B leaves s beside -B, where it is lost, and
the result is 0; unless a second cut lies between -B and s. So over all places of -B, s survives within the first part
and just after every later cut. Every column of the product tries another place. It works in both accumulation modes,
with every output type and every kind of scales.
"""

from __future__ import annotations

import itertools
import random

import torch

from golden.scaled_mm import ROW, TENSOR, Scaling, ceil_div, multiply
from golden.store import DTYPES

TILE = 128
KINDS: dict[str, Scaling] = {"tensor": TENSOR, "row": ROW, "1x128": ("1x128", "1x128"), "128x128": ("1x128", "128x128")}
VIA = {"tensor": "_scaled_mm", "row": "_scaled_mm", "1x128": "scaled_mm", "128x128": "scaled_mm"}
_BIG, _MINUS_BIG, _SMALL = 0x78, 0xF8, 0x08  # 2**8, -2**8, 2**-6 in e4m3
Config = tuple[str, bool, str, bool]
"""Out dtype, fast accumulation, kind of scales, with bias."""


def _scales(scaling: Scaling, m: int, n: int, k: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales whose product is 4096, so that s becomes 1."""
    blocks = ceil_div(k, 128)
    a_shapes = {"tensor": (1,), "row": (m, 1), "1x128": (m, blocks), "128x128": (ceil_div(m, 128), blocks)}
    b_shapes = {"tensor": (1,), "row": (1, n), "1x128": (blocks, n), "128x128": (blocks, ceil_div(n, 128))}
    return torch.full(a_shapes[scaling[0]], 4096.0, device=device), torch.ones(b_shapes[scaling[1]], device=device)


def survivors(
    m: int, n: int, k: int, out: str, fast: bool, scaling: Scaling, bias: bool, device: str, via: str = "_scaled_mm"
) -> list[bool]:
    """Whether s survives one tile after -B, for every tile from the third on."""
    tiles = ceil_div(k, TILE)
    a = torch.zeros(m, tiles * TILE, dtype=torch.uint8, device=device)
    a[:, ::TILE], a[:, 1::TILE] = _BIG, _SMALL
    a = a[:, :k].contiguous().view(torch.float8_e4m3fn)
    sa, sb = _scales(scaling, m, n, k, device)
    zero_bias = None
    if bias:
        zero_bias = torch.zeros(n, dtype=torch.float16 if out == "fp16" else torch.bfloat16, device=device)
    alive: list[bool] = []
    for start in range(2, tiles, n):
        tried = torch.arange(start, min(start + n, tiles), device=device)
        column = torch.arange(len(tried), device=device)
        b = torch.zeros(n, k, dtype=torch.uint8, device=device)
        b[:, 0] = _BIG
        b[column, (tried - 1) * TILE] = _MINUS_BIG
        b[column, tried * TILE + 1] = _SMALL
        result = multiply(via, a, b.view(torch.float8_e4m3fn), scaling, sa, sb, DTYPES[out], fast, zero_bias)
        alive += (result.float()[-1, : len(tried)] != 0).tolist()
    return alive


def first_part(
    m: int, n: int, k: int, out: str, fast: bool, scaling: Scaling, bias: bool, device: str, via: str = "_scaled_mm"
) -> int:
    """Length in tiles of all parts of K but the last: ceil(k / 128) where K is not cut, -1 where they are not equal."""
    tiles = ceil_div(k, TILE)
    alive = survivors(m, n, k, out, fast, scaling, bias, device, via)
    if False not in alive:
        return tiles
    length = alive.index(False) + 1
    later_cuts = [2 + place for place, lives in enumerate(alive) if lives and 2 + place > length]
    return length if later_cuts == list(range(2 * length, tiles, length)) else -1


def _grid() -> list[tuple[int, int, int]]:
    rows = (1, 8, 16, 32, 64, 128, 256)
    columns = (16, 64, 128, 256, 512, 1024, 2048, 4096, 5120, 8192)
    depths = (4096, 5248, 6144, 7168, 8192, 11008, 14336, 16384, 28672)
    return [(m, n, k) for m, n, k in itertools.product(rows, columns, depths) if m * n <= 2**18]


def _models() -> list[tuple[int, int, int]]:
    """Down projections of common language models."""
    rows = (1, 2, 4, 8, 15, 16, 24, 32, 48, 64, 96, 128, 256)
    layers = ((4096, 14336), (8192, 28672), (4096, 11008), (5120, 13824), (3072, 8192), (2048, 8192), (7168, 18432))
    return [(m, n, k) for m, (n, k) in itertools.product(rows, layers)]


def _random(count: int) -> list[tuple[int, int, int]]:
    draw = random.Random(7)
    shapes: list[tuple[int, int, int]] = []
    while len(shapes) < count:
        m, n = int(2 ** draw.uniform(0, 9)), 16 * int(2 ** draw.uniform(0, 9))
        if m * n <= 2**18:
            shapes.append((m, n, 16 * draw.randint(256, 1792)))
    return shapes


def configurations() -> list[tuple[Config, list[tuple[int, int, int]]]]:
    """What is probed: the two modes in bf16 over all shapes, every other configuration over a part of them."""
    all_shapes, some = _grid() + _models() + _random(300), _random(100)
    jobs: list[tuple[Config, list[tuple[int, int, int]]]] = [
        (("bf16", True, "tensor", False), all_shapes),
        (("bf16", False, "tensor", False), all_shapes),
    ]
    for out, fast in itertools.product(("fp32", "fp16", "e4m3"), (True, False)):
        jobs.append(((out, fast, "tensor", False), some))
    for scaling, bias in (("tensor", True), ("row", False), ("row", True)):
        jobs += [(("bf16", fast, scaling, bias), some) for fast in (True, False)]
    blocks = [(m, n, k) for m, n, k in all_shapes if m % 4 == 0]
    return jobs + [(("bf16", False, scaling, False), blocks[::2]) for scaling in ("1x128", "128x128")]


def survey(device: str, limit: int | None = None) -> dict[str, list[list[int]]]:
    """Part lengths as ``{"out fast|accurate scaling bias|-": [[M, N, K, tiles], ...]}``; -2 where the call fails."""
    found: dict[str, list[list[int]]] = {}
    for (out, fast, scaling, bias), shapes in configurations():
        rows = []
        for m, n, k in shapes[:limit]:
            try:
                tiles = first_part(m, n, k, out, fast, KINDS[scaling], bias, device, VIA[scaling])
            except RuntimeError:
                tiles = -2
            rows.append([m, n, k, tiles])
        found[f"{out} {'fast' if fast else 'accurate'} {scaling} {'bias' if bias else '-'}"] = rows
    return found
