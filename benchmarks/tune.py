"""Measure the tiles of common shapes and write the tuning file that ships: ``python benchmarks/tune.py``."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch

from fp8ref.kernels.tune import compile_candidates, tune, write_table

SHAPES = [(1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192)]
SIZES = [16, 64, 128, 256, 4096]


def main() -> None:
    """Tune every shape and size, as long as there is time; the largest gains first."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("tuning.json"))
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--compile", nargs=2, type=int, metavar=("START", "STEP"), help="only fill Triton's cache")
    parser.add_argument("--sizes", nargs="+", type=int, default=SIZES, help="batch sizes, each the largest of a bucket")
    args = parser.parse_args()
    if args.compile:
        count = sum(
            compile_candidates(n, k, m, torch.device("cuda", 0), *args.compile) for m in args.sizes for n, k in SHAPES
        )
        print(f"compiled {count} candidates")
        return
    began, rows, device = time.monotonic(), [], torch.device("cuda", 0)
    for m in args.sizes:
        for n, k in SHAPES:
            if time.monotonic() - began > args.seconds:
                print(f"out of time before {n}x{k} M={m}", flush=True)
                continue
            row = tune(n, k, m, device)
            rows.append(row)
            print(row, flush=True)
            write_table(args.out, device, rows)


if __name__ == "__main__":
    main()
