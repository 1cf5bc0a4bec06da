"""Which kernel, tile and split of K a product gets, and why: data, decided before anything is launched."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from fp8ref.emulation.accumulate import split_parts

PART = 128
"""Split-K counts K in tiles of 128, as cuBLASLt does."""

BUCKETS = (16, 32, 64, 128, 256)
"""Batch sizes that have a plan of their own; a batch takes the next larger one."""

_PROGRAMS = 128
"""Programs that a split may make: a wave of an H200. Fixed, not asked of the GPU, so that the bits do not depend on it.

A split that reaches over a wave, or just fills it (N = 4097), was measured slower than none.
"""


@dataclass(frozen=True)
class Tile:
    """Compile-time shape of the Triton kernel.

    Attributes:
        block_m: rows of x of one program, at least 16.
        block_n: weight rows of one program, a multiple of 64 (wgmma's side).
        block_k: K of one step, 128 or more.
        stages: depth of the load pipeline.
        warps: warps of one program.
        group: cells along N that neighbouring programs share.
    """

    block_m: int = 16
    block_n: int = 64
    block_k: int = 128
    stages: int = 8
    warps: int = 4
    group: int = 1


@dataclass(frozen=True)
class Plan:
    """What a call with one batch size runs.

    Attributes:
        path: "triton", or "library" for ``torch._scaled_mm`` after the Triton quantiser.
        split_k: parts of K, as :func:`fp8ref.emulate_matmul` takes it.
        tile: the tile of the Triton kernel.
        why: one sentence.
    """

    path: Literal["triton", "library"]
    split_k: int
    tile: Tile = field(default_factory=Tile)
    why: str = ""


def parts_of(k: int, split_k: int, multiple: int = 1) -> tuple[int, int]:
    """Return the tiles of 128 that a part has, and the number of parts that are not empty.

    The reference is :func:`fp8ref.emulation.accumulate.split_parts`; ``multiple`` is :func:`run_multiple`.

    >>> parts_of(4096, 3), parts_of(128, 4), parts_of(4096, 3, 4)
    ((11, 3), (1, 1), (12, 3))
    """
    spans = split_parts(k, split_k, multiple)
    start, stop = spans[0]
    return max(1, -(-(stop - start) // PART)), len(spans)


def run_multiple(*scalings: str) -> int:
    """Return what the tiles of a part are a multiple of: 4 where one operand has 128x128 scales.

    >>> run_multiple("row"), run_multiple("1x128", "128x128")
    (1, 4)
    """
    return 4 if "128x128" in scalings else 1


def bucket_of(m: int) -> int:
    """Return the batch size whose plan a batch of ``m`` rows takes.

    >>> bucket_of(3), bucket_of(17), bucket_of(5000)
    (16, 32, 4096)
    """
    return next((bucket for bucket in BUCKETS if m <= bucket), 4096)


def rule_split(n: int, k: int, m: int) -> int:
    """Return the split of K that fills the GPU: a power of two, parts of at least 4 tiles of 128.

    >>> rule_split(1024, 4096, 1), rule_split(4096, 4096, 1), rule_split(14336, 4096, 1)
    (8, 2, 1)
    """
    cells = max(1, -(-n // 64)) * -(-max(m, 1) // 64)
    split = 1
    while 2 * split * cells <= _PROGRAMS and -(-k // PART) >= 4 * 2 * split:
        split *= 2
    return parts_of(k, split)[1]


def rule_tile(m: int) -> Tile:
    """Return the tile for a batch that no tuning file knows."""
    bucket = bucket_of(m)
    if bucket == 16:
        return Tile()
    if bucket == 32:
        return Tile(block_m=32, stages=6)
    if bucket == 64:
        return Tile(block_m=64, stages=5)
    if bucket == 128:
        return Tile(block_m=128, stages=4, group=8)
    return Tile(block_m=128, block_n=128, stages=4, warps=8, group=8)


def library_can(n: int, k: int, m: int) -> bool:
    """Whether ``torch._scaled_mm`` takes the shape and is known not to split K there.

    Measured: of 4,000 random shapes none split with K < 5,232 or M*N > 131,000. Both bounds are kept at a distance.

    >>> library_can(4096, 4096, 256), library_can(4097, 4096, 256), library_can(256, 16384, 256)
    (True, False, False)
    """
    return n % 16 == 0 and (k <= 4096 or m * n >= 2**18)


@lru_cache(maxsize=1)
def _shipped() -> dict[str, dict[tuple[int, int, int], dict[str, Any]]]:
    """Read the tuning files that ship with the package, then the user's own: by GPU, then by (N, K, bucket)."""
    found: dict[str, dict[tuple[int, int, int], dict[str, Any]]] = {}
    files = sorted((Path(__file__).parent / "tuning").glob("*.json"))
    if "FP8REF_TUNING" in os.environ:
        files.append(Path(os.environ["FP8REF_TUNING"]))
    for file in files:
        try:
            table = json.loads(file.read_text())
            rows = {(row["n"], row["k"], row["m"]): _checked(row) for row in table["entries"]}
            found.setdefault(table["device"], {}).update(rows)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"FP8REF_TUNING: got {file}, no tuning file ({type(error).__name__}: {error}); benchmarks/tune.py "
                "writes them, and without the variable the rules decide"
            ) from error
    return found


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a tuning file, or raise: a wrong one would give other bits, or never be found."""
    tile = Tile(**row.get("tile", {}))
    sizes = [row["n"], row["k"], row["m"], row["split_k"], *asdict(tile).values()]
    if not all(type(size) is int and size > 0 for size in sizes) or row["m"] not in (*BUCKETS, 4096):
        raise ValueError(f"{row}: sizes are ints above zero, and m is one of {[*BUCKETS, 4096]}")
    if row["path"] not in ("triton", "library") or (row["path"] == "library" and row["split_k"] != 1):
        raise ValueError(f'{row}: path is "triton", or "library" with a split_k of 1')
    powers = all(size & (size - 1) == 0 for size in (tile.block_m, tile.block_n, tile.block_k, tile.warps))
    if not powers or tile.block_m < 16 or tile.block_n < 64 or tile.block_k < PART:
        raise ValueError(f"{row}: a tile has powers of two, at least 16 x 64 x {PART} (block_m, block_n, block_k)")
    return {"us": row["us"], **row}


def tuned(device_name: str, n: int, k: int, m: int) -> Plan | None:
    """Return the plan that a tuning file has for this GPU and shape, or None."""
    row = _shipped().get(device_name, {}).get((n, k, bucket_of(m)))
    if row is None:
        return None
    tile = Tile(**row["tile"]) if "tile" in row else rule_tile(m)
    return Plan(row["path"], row["split_k"], tile, f"tuned on {device_name}: {row['us']} us at M={row['m']}")


@lru_cache(maxsize=4096)
def choose(
    device_name: str,
    n: int,
    k: int,
    m: int,
    *,
    batch_invariant: bool = False,
    library_allowed: bool = True,
    multiple: int = 1,
) -> Plan:
    """Return the plan for ``x [m, k] @ weight [n, k].t()``.

    With ``batch_invariant`` K is never split, so that every batch size has the arithmetic of ``split_k=1``.
    ``multiple`` is the :func:`run_multiple` of the scales.

    >>> choose("a GPU without a tuning file", 4096, 4096, 3).split_k
    2
    """
    plan = tuned(device_name, n, k, m)
    if plan is None:
        small = m <= 64
        path: Literal["triton", "library"] = "triton" if small else "library"
        why = "M <= 64: one pass over the weights is the cost" if small else "M > 64: the product is the cost"
        plan = Plan(path, rule_split(n, k, m) if small else 1, rule_tile(m), why)
    if plan.path == "library" and not (library_allowed and library_can(n, k, m)):
        why = "torch._scaled_mm does not take this call, or might split K in a way not known"
        plan = Plan("triton", 1, rule_tile(m), why)
    if batch_invariant and plan.split_k > 1:
        plan = Plan(plan.path, 1, plan.tile, plan.why + "; K whole for batch invariance")
    return _fit(plan, k, multiple)


def _fit(plan: Plan, k: int, multiple: int = 1) -> Plan:
    """Make every part but the last a whole number of steps."""
    part_tiles, parts = parts_of(k, plan.split_k, multiple)
    tile = plan.tile
    if parts > 1 and (part_tiles * PART) % tile.block_k:
        tile = Tile(**{**asdict(tile), "block_k": PART})
    return Plan(plan.path, parts, tile, plan.why)
