"""Measuring tiles on the GPU at hand, and the file that keeps what was found. Never runs unless it is called."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fp8ref.kernels.calls import Request, library_call, triton_call
from fp8ref.kernels.device import unit_of_device
from fp8ref.kernels.pack import PackedWeight, pack_weight
from fp8ref.kernels.plan import BUCKETS, Plan, Tile, library_can, parts_of, rule_split

_BYTES = 240 * 10**6
"""Weights to rotate through, several times the 60 MB L2 of an H200, so that every pass reads memory."""


def weights_for(n: int, k: int, device: torch.device) -> list[PackedWeight]:
    """Return random packed weights [n, k] that together are several times larger than L2."""
    copies = max(2, -(-_BYTES // max(1, n * k)))
    return [pack_weight(torch.randn(n, k, device=device, dtype=torch.bfloat16)) for _ in range(copies)]


def microseconds(call: Callable[[int], Any], copies: int, *, least: int = 48, repeats: int = 5) -> float:
    """Return the median time in us of ``call(i)``, i walking through ``copies``, replayed in one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(0)
    torch.cuda.synchronize()
    launches = -(-least // copies) * copies
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            call(i % copies)
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times: list[float] = []
    for _ in range(repeats):
        # The replay before keeps the GPU busy while the measured one is launched.
        graph.replay()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / launches)
    return statistics.median(times)


def candidates(n: int, k: int, m: int) -> Iterator[Plan]:
    """Yield the plans worth measuring for a batch of ``m`` rows.

    >>> sorted({plan.split_k for plan in candidates(4096, 4096, 16)})
    [1, 2, 3, 4]
    """
    if m <= 16:
        loops = [(128, 5), (128, 6), (128, 8), (128, 10), (128, 14), (256, 3), (256, 4), (256, 5)]
        tiles = [Tile(block_k=block_k, stages=stages) for block_k, stages in loops]
    elif m <= 64:
        shapes = [(32, 64, 6), (32, 64, 8), (64, 64, 5), (64, 64, 8), (64, 128, 4)]
        tiles = [Tile(bm, bn, 128, st) for bm, bn, st in shapes] + [Tile(64, 128, 128, 4, 8)]
    elif m <= 256:
        shapes = [(64, 64, 5), (64, 128, 4), (128, 64, 4), (128, 128, 4), (128, 128, 3)]
        tiles = [Tile(bm, bn, 128, st, 8 if bm * bn > 2**13 else 4, group=8) for bm, bn, st in shapes]
    else:
        shapes = [(128, 128, 4), (256, 128, 3), (256, 128, 4), (128, 256, 3)]
        tiles = [Tile(bm, bn, 128, st, 8, 8) for bm, bn, st in shapes]
    first = rule_split(n, k, m)
    splits = {parts_of(k, s)[1] for s in (max(1, first // 2), first, first * 2, first + 1)} if m <= 256 else {1}
    for tile in tiles:
        for split in sorted(splits):
            if split == 1 or parts_of(k, split)[0] * 128 % tile.block_k == 0:
                yield Plan("triton", split, tile)


def compile_candidates(n: int, k: int, m: int, device: torch.device, start: int = 0, step: int = 1) -> int:
    """Compile every ``step``-th candidate from ``start`` on, so that several processes can fill Triton's cache."""
    weight = pack_weight(torch.zeros(n, k, device=device, dtype=torch.bfloat16))
    x = torch.zeros(m, k, device=device, dtype=torch.bfloat16)
    unit, count = unit_of_device(device), 0
    for plan in list(candidates(n, k, m))[start::step]:
        Request(x, False, (m, n), weight, None, None, plan, unit, False, torch.bfloat16).product()
        count += 1
    return count


def tune(n: int, k: int, m: int, device: torch.device) -> dict[str, Any]:
    """Measure the whole call (bf16 to bf16, per-token scales) under each candidate; return the best as a table row.

    Args:
        n: weight rows.
        k: weight columns.
        m: batch size; use one of ``BUCKETS`` or, for all larger batches, 4096.
        device: the GPU.
    """
    weights = weights_for(n, k, device)
    x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
    unit = unit_of_device(device)
    least = 48 if m <= 256 else 8

    def measure(plan: Plan) -> float:
        request = Request(x, False, (m, n), weights[0], None, None, plan, unit, False, torch.bfloat16)
        call = library_call(request) if plan.path == "library" else triton_call(request)
        return microseconds(lambda i: call(x, weights[i], None, None), len(weights), least=least)

    measured = [(measure(plan), plan) for plan in candidates(n, k, m)]
    if library_can(n, k, m) and m > BUCKETS[0]:
        plan = Plan("library", 1)
        measured.append((measure(plan), plan))
    time, plan = min(measured, key=lambda pair: pair[0])
    row = {"n": n, "k": k, "m": m, "us": round(time, 2), "path": plan.path, "split_k": plan.split_k}
    return row if plan.path == "library" else {**row, "tile": asdict(plan.tile)}


def write_table(path: Path, device: torch.device, rows: list[dict[str, Any]]) -> None:
    """Write a tuning file: ``kernels/tuning/*.json`` ship with the package, ``$FP8REF_TUNING`` names your own."""
    head = {"device": torch.cuda.get_device_name(device), "torch": torch.__version__, "entries": rows}
    # Whole or not at all: another process may be reading, or writing, this very file.
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(head, indent=1) + "\n")
    part.replace(path)
