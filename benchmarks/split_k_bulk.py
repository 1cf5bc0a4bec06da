"""Records the number of parts alone for some four million shapes, on an H200, in about a minute and a half.

Needs ``PYTHONPATH=.:tests`` and writes to ``--out``. split_k_map.py proved that cuBLASLt's answers are what runs.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
import traceback
from pathlib import Path
from typing import Any

import cublaslt
import numpy as np
import torch
from split_k_map import WORKERS, describe, run_script, say, start_workers, wake
from split_k_shapes import Shapes, bulk, fresh, near

from golden.scaled_mm import TENSOR
from golden.split_k import survivors


@functools.cache
def draw(generator: str, count: int, seed: int) -> Shapes:
    """A sample by the name of its generator."""
    return {"near": near, "fresh": fresh}[generator](count, seed)


def work_bulk(out: Path, index: int, deadline: float) -> None:
    """Ask about a stretch of every large sample; keep the numbers of parts alone, 255 where there was no answer."""
    torch.set_num_threads(1)
    wake()
    place = cublaslt.FIELDS.index("SPLITK_NUM")
    for kind, options, generator, count, seed in bulk():
        shapes = draw(generator, count, seed)
        query = cublaslt.Query(**options)
        answers: list[int] = []
        for number, (m, n, k) in enumerate(shapes[count * index // WORKERS : count * (index + 1) // WORKERS].tolist()):
            if number % 256 == 0 and time.time() > deadline:
                break
            status, found = query.ask(m, n, k)
            answers.append(found[0][0][place] if found and status == 0 else 255)
        np.save(out / f"bulk.{kind}.{generator}.{count}.{seed}.{index:02d}.npy", np.array(answers, dtype=np.uint8))


def record_bulk(out: Path, deadline: float) -> None:
    """The large samples in one file, with a digest of their shapes; and where the cuts of uneven parts lie."""
    workers = start_workers(__file__, out, deadline)
    wake()
    describe(out)
    uneven = {}
    for m, n, k in ((5, 208, 51216), (2, 112, 56336), (2, 48, 56432), (1, 32, 76848), (8, 64, 71792), (8, 304, 74640)):
        try:
            uneven[f"{m} {n} {k}"] = survivors(m, n, k, "bf16", True, TENSOR, False, "cuda")
        except Exception:  # noqa: BLE001 - said, and the others go on
            say(out, traceback.format_exc(limit=-3))
    (out / "uneven.json").write_text(json.dumps(uneven))
    for worker in workers:
        worker.wait(timeout=max(1.0, deadline + 30 - time.time()))
    merged: dict[str, Any] = {}
    for kind, _, generator, count, seed in bulk():
        name = f"{kind}.{generator}.{count}.{seed}"
        shapes = draw(generator, count, seed)
        merged[f"{name}.sha"] = np.array(hashlib.sha256(shapes.tobytes()).hexdigest())
        for index in range(WORKERS):
            stretch = out / f"bulk.{name}.{index:02d}.npy"
            if stretch.exists():
                merged[f"{name}.{index:02d}"] = np.load(stretch)
                stretch.unlink()
    np.savez_compressed(out / "bulk.npz", **merged)
    answered = sum(value.size for value in merged.values())
    say(out, f"bulk: {answered} answers, {(out / 'bulk.npz').stat().st_size} bytes")


def main() -> int:
    """Work, or start the workers."""
    return run_script(__doc__, work_bulk, record_bulk, 110)


if __name__ == "__main__":
    raise SystemExit(main())
