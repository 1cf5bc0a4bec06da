"""Time round_to_fp8 against torch's own clamp and conversion: ``python benchmarks/rounding.py [--json FILE]``.

Every line is timed in turn, round after round, and the fastest of its rounds counts: on a shared machine the load
of a moment then falls on all of them, and the minimum is what the code itself needs.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import gfloat  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import torch
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2  # type: ignore[import-untyped]

import fp8ref
from fp8ref.emulation.formats import FORMATS

PEER_TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
PEER_FORMATS = {"e4m3": format_info_ocp_e4m3, "e5m2": format_info_ocp_e5m2}
TARGET = 1.5


def candidates(x: torch.Tensor, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """What is timed, the yardstick first."""
    fmt = FORMATS[dtype]
    array, wide, half = x.numpy(), x.double(), x.bfloat16()

    def by_gfloat() -> object:
        return gfloat.round_ndarray(PEER_FORMATS[fmt.name], array, sat=True)

    return {
        "torch clamp + to": lambda: x.clamp(-fmt.max, fmt.max).to(dtype),
        "fp8ref": lambda: fp8ref.round_to_fp8(x, dtype),
        "fp8ref, not saturating": lambda: fp8ref.round_to_fp8(x, dtype, saturate=False),
        "fp8ref, from bfloat16": lambda: fp8ref.round_to_fp8(half, dtype),
        "fp8ref, from float64": lambda: fp8ref.round_to_fp8(wide, dtype),
        "fp8ref, toward zero": lambda: fp8ref.round_to_fp8(x, dtype, rounding="toward_zero"),
        "fp8ref, stochastic": lambda: fp8ref.round_to_fp8(x, dtype, rounding="stochastic"),
        "ml_dtypes clip + astype": lambda: np.clip(array, -fmt.max, fmt.max).astype(PEER_TYPES[fmt.name]),
        "gfloat (values, no codes)": by_gfloat,
    }


def fastest(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Seconds of the fastest round of each."""
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(rounds):
        for name, run in runs.items():
            start = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def main() -> None:
    """Print a table for each format, and whether the target is met."""
    parser = argparse.ArgumentParser(description="Time round_to_fp8 beside torch, ml_dtypes and gfloat on the CPU.")
    parser.add_argument("--elements", type=int, default=10_000_000, help="float32 inputs (default 10 million)")
    parser.add_argument("--rounds", type=int, default=7, help="rounds, of which the fastest counts (default 7)")
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    x = torch.randn(options.elements, generator=torch.Generator().manual_seed(0)) * 100
    print(
        f"{options.elements:,} float32, nearest even, saturating, unless it says otherwise; "
        f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    )
    found: dict[str, dict[str, float]] = {}
    for dtype, fmt in FORMATS.items():
        seconds = fastest(candidates(x, dtype), options.rounds)
        yardstick = seconds["torch clamp + to"]
        found[fmt.name] = seconds
        print(f"\n{fmt.name:26}       ms  x torch")
        for name, s in seconds.items():
            print(f"{name:26} {s * 1e3:8.1f} {s / yardstick:8.2f}")
        ratio = seconds["fp8ref"] / yardstick
        print(f"target: at most {TARGET}x torch: {'met' if ratio <= TARGET else 'MISSED'} ({ratio:.2f}x)")
    if options.json is not None:
        environment = {
            "processor": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
            "load before": load,
            "python": platform.python_version(),
            "torch": torch.__version__,
        }
        content = {"environment": environment, "elements": options.elements, "seconds": found}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
