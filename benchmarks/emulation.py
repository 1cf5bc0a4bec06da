"""Products per second of the oracle beside its peers and a plain fp32 product, in one run on the CPU.

``python benchmarks/emulation.py [--json FILE]``. A product is one multiplication of ``a`` [M, K] by ``b`` [K, N]:
M * N * K of them. mmasim has single instructions only, so it runs a chain of them on one tile. What the compiled engine
could do at most is in ``benchmarks/limit.py``: vector operations a second over those that a product takes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal

import torch
from limit import describe, operations_per_product
from rich.console import Console

import fp8ref
from fp8ref.report.progress import products_progress

ENGINES: tuple[Literal["torch", "compiled"], ...] = ("torch", "compiled")
SHAPES = ((64, 1920, 5760), (16, 4096, 4096), (512, 576, 1536))
SCALINGS: tuple[tuple[fp8ref.Scaling, fp8ref.Scaling], ...] = (
    ("tensor", "tensor"),
    ("1x128", "128x128"),
    ("1x128", "1x128"),
)
SMALL = (1, 576, 576)
MEMORY_SHAPE = (16, 4096, 14336)
E4M3 = torch.float8_e4m3fn
_MOST_REPEATS = 5
_ENOUGH = 1 << 30  # products, after which nothing is repeated: the slow ones


@dataclass(frozen=True)
class Job:
    """One row of the table for one shape."""

    name: str
    call: Callable[[], object]
    products: int
    repeats: int
    operations: float | None = None
    """Vector operations a product, where they are known."""


def operands(
    m: int, n: int, k: int, scaling: tuple[fp8ref.Scaling, fp8ref.Scaling] = ("row", "row")
) -> tuple[fp8ref.ScaledTensor, fp8ref.ScaledTensor]:
    """Normal values, quantised."""
    generator = torch.Generator().manual_seed(m + n + k)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)
    return fp8ref.quantize(x, E4M3, scaling=scaling[0]), fp8ref.quantize(w, E4M3, scaling=scaling[1]).t()


def rate(job: Job, advance: Callable[[int], None]) -> float:
    """The best rate of some runs after one warm-up, in millions of products per second."""
    job.call()
    advance(job.products)
    best = float("inf")
    for _ in range(job.repeats):
        start = time.perf_counter()
        job.call()
        best = min(best, time.perf_counter() - start)
        advance(job.products)
    return job.products / best / 1e6


def our_jobs(m: int, n: int, k: int) -> Iterator[Job]:
    """Every unit with row-wise scales, and the Hopper unit with every kind of scales, on both engines."""
    products = m * n * k
    row = operands(m, n, k)
    others = {scaling: operands(m, n, k, scaling) for scaling in SCALINGS}
    for engine in ENGINES:
        repeats = _MOST_REPEATS if engine == "compiled" else 2

        def job(
            name: str,
            pair: tuple[fp8ref.ScaledTensor, fp8ref.ScaledTensor],
            unit: str,
            fast: bool,
            promotion: Literal["none", "plain", "scaled"],
            engine: Literal["torch", "compiled"] = engine,
            repeats: int = repeats,
        ) -> Job:
            call = partial(fp8ref.emulate_matmul, *pair, unit=unit, use_fast_accum=fast, engine=engine)
            known = engine == "compiled" and unit != "exact"
            operations = operations_per_product(fp8ref.UNITS[unit], m, promotion) if known else None
            return Job(f"fp8ref {name} ({engine})", call, products, repeats, operations)

        for scaling in (("row", "row"), ("tensor", "tensor")):
            pair = row if scaling[0] == "row" else others["tensor", "tensor"]
            for fast in (False, True):
                mode = "fast" if fast else "accurate"
                yield job(f"sm90 {mode}, {scaling[0]} scales", pair, "sm90", fast, "none" if fast else "plain")
        for scaling in SCALINGS[1:]:
            yield job(f"sm90 {scaling[0]} by {scaling[1]}", others[scaling], "sm90", False, "scaled")
        for unit in fp8ref.UNITS:
            if unit != "sm90" and not (unit == "exact" and engine == "compiled"):  # exact has one engine
                yield job(unit, row, unit, False, "plain")


def peer_jobs(m: int, n: int, k: int) -> Iterator[Job]:
    """The peers on the same operands, and torch's product of the same values in fp32."""
    import mmaemu

    a, b = (operand.data for operand in operands(m, n, k))
    weight, products = b.t().contiguous(), m * n * k
    for fast in (False, True):
        call = partial(mmaemu.accumulate, a, weight, use_fast_accum=fast, profile="hopper", splitk=1)
        yield Job(f"mmaemu hopper {'fast' if fast else 'accurate'}", call, products, 1 if products > _ENOUGH else 2)
    yield mmasim_job(a, b)
    x, w = a.float(), b.float()
    yield Job("torch fp32 matmul", lambda: x @ w, products, 3)


def mmasim_job(a: torch.Tensor, b: torch.Tensor) -> Job:
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

    return Job("mmasim wgmma", chain, 64 * 64 * 32 * steps, 2)


def measure(jobs: dict[str, list[Job]]) -> dict[str, dict[str, float]]:
    """Run everything; rates by shape and name."""
    total = sum(job.products * (job.repeats + 1) for rows in jobs.values() for job in rows)
    with products_progress(Console(stderr=True)) as progress:
        task = progress.add_task("", total=total)
        figures: dict[str, dict[str, float]] = {}
        for shape, rows in jobs.items():
            figures[shape] = {}
            for job in rows:
                progress.update(task, description=f"{shape} {job.name}")
                figures[shape][job.name] = rate(job, lambda products: progress.advance(task, products))
    return figures


def small_call() -> float:
    """Milliseconds of the best of many calls on a small product."""
    a, b = operands(*SMALL)
    call = partial(fp8ref.emulate_matmul, a, b, engine="compiled")
    products = SMALL[0] * SMALL[1] * SMALL[2]
    return products / rate(Job("small", call, products, 200), lambda _: None) / 1e3


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


def show(result: dict[str, dict[str, dict[str, float]]], jobs: dict[str, list[Job]], limit: float) -> None:
    """Print the table: millions of products a second, and for the compiled engine the share of the limit."""
    figures = result["millions_of_products_per_second"]
    print(f"{'millions of products a second':44}" + "".join(f"{shape:>20}" for shape in figures))
    for index, job in enumerate(next(iter(jobs.values()))):
        line = f"{job.name:44}"
        for shape, rows in figures.items():
            operations = jobs[shape][index].operations
            share = "" if operations is None else f" ({rows[job.name] * operations / limit / 10:.0f} %)"
            line += f"{rows[job.name]:13,.0f}{share:7}"
        print(line)
    for shape, rows in figures.items():
        for engine in ENGINES:
            ratio = rows[f"fp8ref sm90 accurate, row scales ({engine})"] / rows["mmaemu hopper accurate"]
            print(f"{shape}: fp8ref ({engine}) is {ratio:.1f}x mmaemu (accurate)")


def environment() -> dict[str, object]:
    """What the figures depend on."""
    names = re.findall(r"model name\s*:\s*(.*)", Path("/proc/cpuinfo").read_text())
    return {
        **{name: metadata.version(name) for name in ("torch", "numba", "mmaemu", "mmasim")},
        "python": platform.python_version(),
        "processor": names[0] if names else platform.machine(),
        "threads": torch.get_num_threads(),
        "load_before": os.getloadavg()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Print the table; write it as JSON where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument("--only", choices=("nothing", "product"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only:
        child(arguments.only)
        return
    about = environment()
    limits = {"before": describe()}
    jobs = {f"{m}x{n}x{k}": [*our_jobs(m, n, k), *peer_jobs(m, n, k)] for m, n, k in SHAPES}
    result = {"millions_of_products_per_second": measure(jobs)}
    limits["after"] = describe()
    about["load_after"] = os.getloadavg()[0]
    limit = max(rate for found in limits.values() for rate in found.values())
    show(result, jobs, limit)
    for when, found in limits.items():
        for threads, value in found.items():
            print(f"limit, {when}, {threads}: {value:.1f} billion 32-bit vector operations a second")
    small, memory = small_call(), peak_memory()
    print(f"{'x'.join(map(str, SMALL))}: {small:.2f} ms a call")
    print(f"peak memory of {'x'.join(map(str, MEMORY_SHAPE))} above the import: {memory:.0f} MB")
    if arguments.json:
        operations = {
            shape: {job.name: job.operations for job in rows if job.operations} for shape, rows in jobs.items()
        }
        content = {
            "environment": about,
            **result,
            "vector_operations_per_product": operations,
            "billions_of_vector_operations_per_second": limits,
            "small_call_ms": small,
            "peak_memory_mb": memory,
        }
        arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
