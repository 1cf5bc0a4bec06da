"""Probes what an H200 offers: ``PYTHONPATH=.:tests python benchmarks/probe_gpu.py --out DIR``, about a minute.

cuBLASLt in both modes and with every kind of scales, its cuts of K, Triton's tl.dot on wgmma and on HMMA, mma.sync.
Every report goes to DIR as text and JSON.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fp8ref
from fp8ref.emulation.scales import Scaling
from fp8ref.probing import probe
from fp8ref.probing.targets import scaled_mm
from golden.mma_sync import compile_library
from golden.tl_dot import Form, instructions
from golden.tl_dot_kernel import products

Job = tuple[str, Callable[[], fp8ref.ProbeReport]]
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP32 = torch.bfloat16, torch.float32
CUTS = ((8, 64, 16384), (8, 256, 14336), (16, 64, 28672), (128, 128, 16384), (64, 64, 8192), (128, 128, 4096))


def cublaslt(
    fast: bool,
    scaling: tuple[Scaling, Scaling] = ("tensor", "tensor"),
    out: torch.dtype = FP32,
    *,
    bias: bool = False,
    **sizes: Any,
) -> Callable[[], fp8ref.ProbeReport]:
    """A probe of ``torch._scaled_mm``."""
    target = scaled_mm(fast=fast, scaling=scaling, out_dtype=out)
    return lambda: probe(target.call, device="cuda", scaling=scaling, bias=bias, name=target.name, **sizes)


def tl_dot(form: Form, pair: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)) -> Callable[[], fp8ref.ProbeReport]:
    """A probe of one compiled form of the kernel of tests/golden; its instructions go into the name."""
    compiled: dict[str, Any] = {}

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = torch.zeros(form.bm, form.bn, device="cuda", dtype=torch.float16 if form.half else FP32)
        d = torch.full_like(c, torch.nan)
        compiled["kernel"] = products[(1,)](
            a,
            b.t(),
            c,
            d,
            a.shape[1],
            BM=form.bm,
            BN=form.bn,
            BK=form.bk,
            IMPRECISE=form.imprecise,
            HALF=form.half,
            num_warps=form.warps,
        )
        return d

    def run() -> fp8ref.ProbeReport:
        a, b = (torch.zeros(size, 512, device="cuda") for size in (form.bm, form.bn))
        call(a.to(pair[0]), b.to(pair[1]).t())
        seen = " ".join(instructions(compiled["kernel"].asm["ptx"]))
        name = f"tl.dot, tile {form.bm}x{form.bn}x{form.bk}, max_num_imprecise_acc {form.imprecise}, {seen}"
        return probe(call, m=form.bm, n=form.bn, dtypes=pair, device="cuda", name=name, elements=300_000)

    return run


def mma_sync(folder: Path) -> Callable[[], fp8ref.ProbeReport]:
    """A probe of mma.sync m16n8k32 on e4m3."""
    library, seen = compile_library(folder)

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        m, n, k = a.shape[0], b.shape[1], a.shape[1]
        c = torch.zeros(m, n, device="cuda")
        out = torch.full((m, n), torch.nan, device="cuda")
        torch.cuda.synchronize()
        right = b.t().contiguous()
        error = library.run(0, *(ctypes.c_void_p(x.data_ptr()) for x in (a, right, c, out)), m, n, k)
        if error:
            raise RuntimeError(f"CUDA error {error}")
        return out

    return lambda: probe(call, device="cuda", name=f"mma.sync m16n8k32 e4m3, {' '.join(seen)}")


def jobs(folder: Path) -> list[Job]:
    """Everything to probe, the most important first."""
    found: list[Job] = [
        ("cublaslt-fast", cublaslt(True)),
        ("cublaslt-accurate", cublaslt(False)),
        ("cublaslt-accurate-bf16-bias", cublaslt(False, out=BF16, bias=True)),
        ("cublaslt-fast-row", cublaslt(True, ("row", "row"), BF16, elements=200_000)),
        ("cublaslt-accurate-row-bias", cublaslt(False, ("row", "row"), BF16, bias=True, elements=200_000)),
        ("cublaslt-1x128", cublaslt(False, ("1x128", "1x128"), BF16, elements=200_000)),
        ("cublaslt-1x128-128x128", cublaslt(False, ("1x128", "128x128"), BF16, elements=200_000)),
        ("cublaslt-e4m3-output", cublaslt(False, out=E4M3, elements=200_000)),
        ("cublaslt-e5m2-e4m3", cublaslt(True, dtypes=(E5M2, E4M3), elements=200_000)),
    ]
    found += [(f"cuts-{m}-{n}-{k}", cublaslt(True, m=m, n=n, k=k, elements=20_000)) for m, n, k in CUTS]
    found += [
        ("cuts-accurate-8-64-16384", cublaslt(False, m=8, n=64, k=16384, elements=20_000)),
        ("cuts-uneven-5-208-51216", cublaslt(True, out=BF16, m=5, n=208, k=51216, elements=10_000)),
        ("tl-dot-wgmma", tl_dot(Form("", 64, 16, 128))),
        ("tl-dot-wgmma-promoted", tl_dot(Form("", 64, 16, 128, 128))),
        ("tl-dot-wgmma-promoted-32", tl_dot(Form("", 64, 16, 128, 32))),
        ("tl-dot-hmma", tl_dot(Form("", 16, 16, 128))),
        ("tl-dot-hmma-64-rows", tl_dot(Form("", 64, 16, 128, 0))),
        ("tl-dot-fp16-accumulator", tl_dot(Form("", 64, 16, 128, half=True))),
        ("mma-sync", mma_sync(folder)),
        ("torch-fp16", lambda: probe(torch.mm, dtypes=(torch.float16,) * 2, device="cuda", name="torch.mm fp16")),
        ("torch-bf16", lambda: probe(torch.mm, dtypes=(BF16,) * 2, device="cuda", name="torch.mm bf16")),
        ("torch-fp32", lambda: probe(lambda a, b: a.float() @ b.float(), device="cuda", name="fp32 product, no TF32")),
    ]
    return found


def main() -> int:
    """Probe everything, each on its own; the exit status counts those that failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="only what has one of these in its name, a list with commas")
    parser.add_argument("--seconds", type=float, default=110.0, help="start nothing new after this long")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    reports: dict[str, Any] = {}
    texts, failed, began = [], 0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            todo = jobs(Path(folder))
        except Exception:  # noqa: BLE001 - without nvcc the rest still runs
            traceback.print_exc()
            todo = []
        for name, run in (job for job in todo if any(word in job[0] for word in options.only.split(","))):
            if time.monotonic() - began > options.seconds:
                texts.append(f"== {name}\nno time left\n")
                continue
            start = time.monotonic()
            try:
                report = run()
                reports[name] = report.to_json()
                texts.append(f"== {name}\n{report}\n({time.monotonic() - start:.1f} s)\n")
            except Exception:  # noqa: BLE001 - one failure must not cost the others
                failed += 1
                texts.append(f"== {name}\n{traceback.format_exc(limit=-4)}\n")
            print(texts[-1], flush=True)
            (options.out / "probe.txt").write_text("\n".join(texts))
            (options.out / "probe.json").write_text(json.dumps(reports))
    return failed


if __name__ == "__main__":
    raise SystemExit(main())
