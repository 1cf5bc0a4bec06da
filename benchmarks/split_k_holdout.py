"""How often ``fp8ref.split_k`` is right about shapes that it was not made from.

The shapes are the samples named fresh (split_k_shapes.py), kept in tests/emulation/split_k_fresh.npz with what cuBLASLt
answered on an H200; 4,000 of them were measured from results as well. ``--make FOLDER`` builds that file from
recordings. Prints a line for each kind of call and writes them to benchmarks/results/split_k_holdout.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from split_k_shapes import KINDS, fresh

from fp8ref.emulation.split_k import DroppedProductsWarning, NoEvidenceError, split_k

ROOT = Path(__file__).resolve().parents[1]
SAMPLE = ROOT / "tests" / "emulation" / "split_k_fresh.npz"
RESULT = ROOT / "benchmarks" / "results" / "split_k_holdout.json"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}


def make(folder: Path) -> None:
    """Collect the fresh samples: [count, 4] of M, N, K and the number of parts for each kind of call."""
    kept: dict[str, Any] = {}
    for kind, _ in KINDS:
        out, mode = kind.split("-")
        name = (
            "fresh" if kind == "bf16-fast" else f"fresh-{out.split('+')[0]}-{mode}-{'bias' if '+' in out else 'plain'}"
        )
        found = np.load(folder / f"{name}.npz")
        # The smaller samples of the other kinds helped to choose between two ways of growing trees.
        rows = [np.c_[found["shape"], found["table"][found["algo"]][:, 2]]] if kind == "bf16-fast" else []
        bulk = folder / "bulk" / "bulk.npz"
        if bulk.exists():
            file = np.load(bulk)
            prefix = f"{kind}.fresh."
            names = sorted(name for name in file.files if name.startswith(prefix) and not name.endswith("sha"))
            count, seed = (int(word) for word in names[0].split(".")[2:4])
            shapes, parts = fresh(count, seed), np.concatenate([file[name] for name in names])
            digest = str(file[f"{kind}.fresh.{count}.{seed}.sha"])
            assert hashlib.sha256(shapes.tobytes()).hexdigest() == digest, "this numpy draws other shapes"
            rows.append(np.c_[shapes[: len(parts)], parts])
        kept[kind] = np.concatenate(rows).astype(np.int32)
    measured = np.load(folder / "measured.fresh.npz")["rows"]
    kept["measured"] = measured.astype(np.int32)
    np.savez_compressed(SAMPLE, **kept)


def judge(kind: str, rows: Any) -> dict[str, Any]:
    """Counts of right, wrong and unknown answers for rows of M, N, K and the true number of parts."""
    out, mode = kind.split("-")
    name, _, bias = out.partition("+")
    counts: dict[str, Any] = {
        "shapes": len(rows),
        "cut": int((rows[:, 3] > 1).sum()),
        "right": 0,
        "wrong": 0,
        "unknown": 0,
    }
    for m, n, k, parts in rows.tolist():
        try:
            guess = split_k(
                m,
                n,
                k,
                out_dtype=DTYPES[name],
                use_fast_accum=mode == "fast",
                bias_dtype=torch.bfloat16 if bias else None,
            )
        except NoEvidenceError:
            counts["unknown"] += 1
            continue
        counts["right" if guess == parts else "wrong"] += 1
    counts["right in a thousand"] = round(1000 * counts["right"] / len(rows), 1)
    return counts


def main() -> None:
    """Judge every kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--make", type=Path)
    options = parser.parse_args()
    if options.make:
        make(options.make)
    sample = np.load(SAMPLE)
    warnings.simplefilter("ignore", DroppedProductsWarning)
    result = {kind: judge(kind, sample[kind]) for kind, _ in KINDS}
    for kind, counts in result.items():
        print(f"{kind:<20}", counts)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
