"""Products per second of the oracle on CUDA tensors, beside mmaemu's CUDA backend, in one run; bits equal to the CPU's.

``python benchmarks/emulation_cuda.py [--json FILE]``. The first 64 rows of every unit's product are compared, all bits,
with what the CPU returns for the same operands. The limit of a unit that adds L products a step:
about 8 vector operations a product (an addition and a maximum of exponents; two multiplications, a conversion, which
counts double, an addition; the loads) on 132 x 128 lanes at 1.98 GHz, 33 T operations a second: about 4 T products.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton

import fp8ref

SHAPES = ((64, 1920, 5760), (16, 4096, 4096), (512, 576, 1536), (512, 4096, 14336), (4096, 4096, 4096))
E4M3 = torch.float8_e4m3fn
LEAST_SECONDS = 0.05
CHECKED_ROWS = 64


def operands(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal values, quantised by row: codes [M, K] and [K, N]."""
    generator = torch.Generator().manual_seed(m + n + k)
    x, w = torch.randn(m, k, generator=generator).cuda(), torch.randn(n, k, generator=generator).cuda()
    return fp8ref.quantize(x, E4M3, scaling="row").data, fp8ref.quantize(w, E4M3, scaling="row").data.t()


def rate(call: Callable[[], object], products: int) -> float:
    """The mean rate of runs that fill LEAST_SECONDS after two warm-ups, in billions of products per second."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    start, runs = time.perf_counter(), 0
    while time.perf_counter() - start < LEAST_SECONDS:
        call()
        torch.cuda.synchronize()
        runs += 1
    return products * runs / (time.perf_counter() - start) / 1e9


def measure(m: int, n: int, k: int) -> dict[str, float | None]:
    """All rows of the table for one shape."""
    import mmaemu

    a, b = operands(m, n, k)
    products = m * n * k
    rows: dict[str, float | None] = {}
    for unit in fp8ref.UNITS:
        for fast in (False, True) if unit == "sm90" else (False,):
            call = partial(fp8ref.accumulate, a, b, unit=unit, use_fast_accum=fast)
            here = call()[:CHECKED_ROWS].cpu()
            there = fp8ref.accumulate(a[:CHECKED_ROWS].cpu(), b.cpu(), unit=unit, use_fast_accum=fast)
            if not torch.equal(here.view(torch.int32), there.view(torch.int32)):
                raise SystemExit(f"{m}x{n}x{k} {unit}: CUDA and CPU differ")
            rows[f"fp8ref {unit} {'fast' if fast else 'accurate'} (compiled)"] = rate(call, products)
    if products < 1 << 31:
        rows["fp8ref sm90 accurate (torch)"] = rate(partial(fp8ref.accumulate, a, b, engine="torch"), products)
    one, many = torch.ones(1, device="cuda"), -(-k // 128)
    scale_a, scale_b = torch.ones(m, many, device="cuda"), torch.ones(many, -(-n // 128), device="cuda")
    blocks = partial(fp8ref.emulate_matmul, a, b, scale_a, scale_b, scaling=("1x128", "128x128"))
    rows["fp8ref sm90 128-blocks (compiled)"] = rate(blocks, products)
    rows["fp8ref sm90 emulate_matmul, tensor scales (compiled)"] = rate(
        partial(fp8ref.emulate_matmul, a, b, one, one), products
    )
    weight = b.t().contiguous()
    for fast in (False, True):
        call = partial(mmaemu.accumulate, a, weight, use_fast_accum=fast, profile="hopper", splitk=1)
        try:
            rows[f"mmaemu hopper {'fast' if fast else 'accurate'}"] = rate(call, products)
        except Exception as error:  # noqa: BLE001 - a peer that fails is a row that says so
            print("mmaemu:", repr(error)[:300])
            rows[f"mmaemu hopper {'fast' if fast else 'accurate'}"] = None
    return rows


def main() -> None:
    """Print the table; write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    arguments = parser.parse_args()
    figures = {f"{m}x{n}x{k}": measure(m, n, k) for m, n, k in SHAPES}
    names = list(dict.fromkeys(name for rows in figures.values() for name in rows))
    print(f"{'billions of products a second':54}" + "".join(f"{shape:>16}" for shape in figures))
    for name in names:
        cells = (rows.get(name) for rows in figures.values())
        print(f"{name:54}" + "".join(f"{'':16}" if cell is None else f"{cell:16.1f}" for cell in cells))
    print("CUDA and CPU: equal in every bit compared")
    if arguments.json:
        environment = {
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d"),
        }
        result = {"environment": environment, "billions_of_products_per_second": figures}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
