"""The shapes that split_k_map.py asks about, by family; all from fixed seeds."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

Shapes = np.ndarray[Any, np.dtype[np.int64]]
"""[count, 3]: M, N, K."""
Family = tuple[str, dict[str, Any], Shapes, int]
"""Name, options of the query, shapes, and how many algorithms to ask for."""


def _dimension(draw: np.random.Generator, low: int, high: int, step: int, count: int) -> Shapes:
    """Log-uniform multiples of ``step``: a third powers of two, a third odd multiples, a third any."""
    exponent = draw.uniform(np.log2(low), np.log2(high), count)
    powers = 2 ** np.round(exponent).astype(np.int64)
    anything = np.maximum(np.round(2**exponent / step).astype(np.int64), 1)
    odd = (anything | 1) * step
    kind = draw.integers(0, 3, count)
    return np.clip(np.select([kind == 0, kind == 1], [powers, odd], anything * step), low, high)


def fresh(count: int, seed: int) -> Shapes:
    """M 1...8,192, N 16...16,384, K 128...80,000, log-uniform, powers of two among odd multiples of 16."""
    draw = np.random.default_rng([20261201, seed])
    limits = ((1, 8192, 1), (16, 16384, 16), (128, 80000, 16))
    return np.stack([_dimension(draw, low, high, step, count) for low, high, step in limits], axis=1)


def near(count: int, seed: int) -> Shapes:
    """As :func:`fresh`, but only where a cut is likely: M * N <= 2**18 and K >= 5,120."""
    draw = np.random.default_rng([20261202, seed])
    limits = ((1, 4096, 1), (16, 16384, 16), (5120, 80000, 16))
    shapes = np.stack([_dimension(draw, low, high, step, 8 * count) for low, high, step in limits], axis=1)
    return shapes[shapes[:, 0] * shapes[:, 1] <= 2**18][:count]


def fours(shapes: Shapes) -> Shapes:
    """The same with M rounded up to a multiple of 4, as block scales want it."""
    rounded = shapes.copy()
    rounded[:, 0] = -(-rounded[:, 0] // 4) * 4
    return rounded


def _product(*axes: Any) -> Shapes:
    return np.array(list(itertools.product(*axes)), dtype=np.int64).reshape(-1, 3)


def _lines() -> list[tuple[str, Shapes]]:
    """Shapes along each axis, the others held, and a grid."""
    rows = (1, 8, 16, 17, 32, 48, 64, 96, 128, 200, 256, 512)
    columns = (16, 64, 80, 128, 192, 256, 512, 768, 1024, 1536, 2048, 4096, 5120, 8192)
    pairs = np.array([(m, n) for m in rows for n in columns if m * n <= 2**17])
    depths = np.array([*range(5120, 30000, 128), *range(30000 // 128 * 128, 80001, 1024), *range(5248, 80000, 2576)])
    k_lines = np.array([(m, n, k) for m, n in pairs.tolist() for k in depths.tolist()])
    some = (5248, 6656, 8192, 11008, 14336, 16384, 20480, 28672, 40960, 65536, 80000)
    m_lines = _product((*range(1, 258), *range(258, 2100, 6)), (16, 64, 128, 256, 512, 1024, 2048, 4096), some)
    n_lines = _product((1, 8, 16, 32, 64, 128, 256), range(16, 8500, 16), some)
    tiles = (41, 42, 45, 50, 60, 61, 62, 64, 80, 81, 100, 101, 112, 120, 128, 141, 160, 200, 224, 256, 320, 400, 512)
    grid = _product(
        (1, 4, 8, 9, 16, 24, 32, 40, 48, 64, 65, 72, 80, 96, 112, 128, 129, 160, 192, 256, 320, 384, 512),
        (*range(64, 2049, 64), *range(2176, 8321, 128)),
        [128 * count for count in tiles],
    )
    keep = [(name, s[s[:, 0] * s[:, 1] <= 2**18]) for name, s in (("m", m_lines), ("n", n_lines), ("grid", grid))]
    return [("k", k_lines), *keep]


def families() -> Iterator[Family]:
    """Everything to ask, the most important first; made one by one, for making all takes a while."""
    plain: dict[str, Any] = {"out": "bf16", "fast": True}
    yield "fresh", plain, fresh(4000, 1), 1
    yield "near", plain, near(150_000, 20), 1
    yield "wide", plain, fresh(60_000, 21), 1
    yield "many", plain, near(1500, 22), 16
    seed = 30
    for out, fast, bias in itertools.product(("bf16", "fp16", "fp32", "e4m3"), (True, False), (False, True)):
        seed += 1
        if (out == "fp32" and bias) or (out, fast, bias) == ("bf16", True, False):
            continue
        name = f"{out}-{'fast' if fast else 'accurate'}-{'bias' if bias else 'plain'}"
        options = {"out": out, "fast": fast, "bias": bias}
        yield f"fresh-{name}", options, fresh(1500, seed), 1
        yield f"near-{name}", options, near(60_000, 23), 1
    for scaling in (("row", "row"), ("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128")):
        shapes = fours(np.concatenate([near(15_000, 24), fresh(3000, 25)]))
        options = {"out": "bf16", "fast": False, "scaling": scaling}
        yield f"scaling-{scaling[0]}-{scaling[1]}", options, shapes, 1
    yield "scaling-row-row-fast", {**plain, "scaling": ("row", "row")}, near(10_000, 24), 1
    for pair in (("e5m2", "e4m3"), ("e4m3", "e5m2")):
        options = {**plain, "operands": pair}
        yield f"operands-{pair[0]}-{pair[1]}", options, near(20_000, 23), 1
    for size in (0, 2**18, 2**20, 2**22, 2**25):
        options = {**plain, "workspace": size}
        yield f"workspace-{size}", options, near(15_000, 23), 1
    for name, shapes in _lines():
        yield f"line-{name}", plain, shapes, 1
    accurate = {"out": "bf16", "fast": False}
    for name, shapes in _lines():
        yield f"line-{name}-accurate", accurate, shapes[::4], 1
    yield "more", plain, near(1_000_000, 26), 1


KINDS: tuple[tuple[str, dict[str, Any]], ...] = tuple(
    (f"{name}-{mode}", {"out": out, "fast": mode == "fast", "bias": bias})
    for name, out, bias in (
        ("bf16", "bf16", False),
        ("fp16", "fp16", False),
        ("fp32", "fp32", False),
        ("e4m3", "e4m3", False),
        ("e4m3+bf16", "e4m3", True),
    )
    for mode in ("fast", "accurate")
)
"""Calls that cuBLASLt answers differently; a bias matters with fp8 outputs alone, where it gives C its type."""


def bulk() -> Iterator[tuple[str, dict[str, Any], str, int, int]]:
    """Large samples of which only the number of parts is kept: kind, options, generator's name, count and seed."""
    for kind, options in KINDS:
        yield kind, options, "fresh", 5000, 100
    for kind, options in KINDS:
        yield kind, options, "near", 200_000, 101
    for kind, options in KINDS:
        if kind.endswith("fast"):
            yield kind, options, "near", 400_000, 102
    for kind, options in KINDS:
        if kind.endswith("fast"):
            yield kind, options, "near", 300_000, 103
