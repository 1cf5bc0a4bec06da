"""Products per second of the oracle beside its peers and a plain fp32 product, in one run on the CPU.

``python benchmarks/emulation.py [--json FILE]``. A product is one multiplication of ``a`` [M, K] by ``b`` [K, N]:
M * N * K of them. mmasim has single instructions only, so it runs a chain of them on one tile. The limit for the plain
engine is four passes of vector instructions over every product; the compiled engine's loops hold a step in the cache.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

import torch

import fp8ref

ENGINES: tuple[Literal["torch", "compiled"], ...] = ("torch", "compiled")
SHAPES = ((64, 1920, 5760), (16, 4096, 4096))
MEMORY_SHAPE = (16, 4096, 14336)
E4M3 = torch.float8_e4m3fn


def operands(m: int, n: int, k: int) -> tuple[fp8ref.ScaledTensor, fp8ref.ScaledTensor]:
    """Normal values, quantised by row."""
    generator = torch.Generator().manual_seed(m + n + k)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    return fp8ref.quantize(x, E4M3, scaling="row"), fp8ref.quantize(w, E4M3, scaling="row").t()


def rate(call: Callable[[], object], products: int, repeats: int) -> float:
    """The best rate of ``repeats`` runs after one warm-up, in millions of products per second."""
    call()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - start)
    return products / best / 1e6


def mmaemu_rate(a: torch.Tensor, b: torch.Tensor, fast: bool) -> float:
    """mmaemu on the same operands."""
    import mmaemu

    weight = b.t().contiguous()
    call = lambda: mmaemu.accumulate(a, weight, use_fast_accum=fast, profile="hopper", splitk=1)  # noqa: E731
    return rate(call, a.shape[0] * weight.shape[0] * a.shape[1], repeats=1)


def mmasim_rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """mmasim's wgmma m64n64k32, chained over K; rows beyond M are zeros and are counted, as it computes them."""
    from mmasim.nv_ptx.sim import WGMMA

    op = WGMMA("Hopper", "m64n64k32.f32.e4m3.e4m3")
    left = torch.zeros(64, a.shape[1], dtype=torch.uint8)
    left[: min(64, a.shape[0])] = a[:64].view(torch.uint8)
    steps = min(16, a.shape[1] // 32)

    def chain() -> torch.Tensor:
        c = torch.zeros(64, 64)
        for k in range(0, steps * 32, 32):
            c = op(left[:, k : k + 32].view(E4M3), b[k : k + 32, :64], c)
        return c

    return rate(chain, 64 * 64 * 32 * steps, repeats=2)


def measure(m: int, n: int, k: int) -> dict[str, float]:
    """All rows of the table for one shape."""
    a, b = operands(m, n, k)
    products = m * n * k
    rows: dict[str, float] = {}
    for engine in ENGINES:
        for unit in fp8ref.UNITS:
            if unit == "exact" and engine == "compiled":
                continue  # it has one engine
            for fast in (False, True) if unit == "sm90" else (False,):
                call = partial(fp8ref.emulate_matmul, a, b, unit=unit, use_fast_accum=fast, engine=engine)
                rows[f"fp8ref {unit} {'fast' if fast else 'accurate'} ({engine})"] = rate(call, products, 2)
    blocks = ("1x128", "128x128")
    qa = fp8ref.quantize(fp8ref.dequantize(a), E4M3, scaling=blocks[0])
    qb = fp8ref.quantize(fp8ref.dequantize(b).t(), E4M3, scaling=blocks[1]).t()
    for engine in ENGINES:
        call = partial(fp8ref.emulate_matmul, qa, qb, engine=engine)
        rows[f"fp8ref sm90 128-blocks ({engine})"] = rate(call, products, 2)
    for fast in (False, True):
        rows[f"mmaemu hopper {'fast' if fast else 'accurate'}"] = mmaemu_rate(a.data, b.data, fast)
    rows["mmasim wgmma"] = mmasim_rate(a.data, b.data)
    x, w = a.data.float(), b.data.float()
    rows["torch fp32 matmul"] = rate(lambda: x @ w, products, 3)
    return rows


def peak_memory() -> float:
    """Peak resident megabytes of a fresh process that runs the memory shape, less those of one that only imports."""
    peaks = []
    for run in ("nothing", "product"):
        command = [sys.executable, __file__, "--only", run]
        done = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603 - this very file
        peaks.append(int(done.stdout))
    return (peaks[1] - peaks[0]) / 1024


def child(run: str) -> None:
    """What :func:`peak_memory` starts: print this process's peak in kilobytes, operands and output included."""
    if run == "product":
        m, n, k = MEMORY_SHAPE
        a = torch.randint(0, 0x7F, (m, k), dtype=torch.uint8).view(E4M3)
        b = torch.randint(0, 0x7F, (n, k), dtype=torch.uint8).view(E4M3).t()
        fp8ref.emulate_matmul(a, b, torch.ones(m, 1), torch.ones(1, n))
    # Not getrusage: a child's peak starts there at what its parent held.
    print(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0])


def main() -> None:
    """Print the table; write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", choices=("nothing", "product"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        child(arguments.only)
        return
    figures = {f"{m}x{n}x{k}": measure(m, n, k) for m, n, k in SHAPES}
    memory = peak_memory()
    names = list(next(iter(figures.values())))
    print(f"{'millions of products a second':36}" + "".join(f"{shape:>16}" for shape in figures))
    for name in names:
        print(f"{name:36}" + "".join(f"{rows[name]:16.0f}" for rows in figures.values()))
    for shape, rows in figures.items():
        for engine in ENGINES:
            ratio = rows[f"fp8ref sm90 accurate ({engine})"] / rows["mmaemu hopper accurate"]
            print(f"{shape}: fp8ref ({engine}) is {ratio:.1f}x mmaemu (accurate)")
    print(f"peak memory of {'x'.join(map(str, MEMORY_SHAPE))} above the import: {memory:.0f} MB")
    if arguments.json:
        environment = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "threads": torch.get_num_threads(),
            "date": time.strftime("%Y-%m-%d"),
        }
        result = {"environment": environment, "millions_of_products_per_second": figures, "peak_memory_mb": memory}
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
