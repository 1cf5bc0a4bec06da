"""Compiles ``mma_sync.cu`` with nvcc and records mma.sync m16n8k32 on a GPU."""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

from golden.operands import KINDS
from golden.store import DTYPES, Case, Recording

PAIRS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2"))
SOURCE = Path(__file__).with_name("mma_sync.cu")


def compile_library(folder: Path) -> tuple[ctypes.CDLL, tuple[str, ...]]:
    """Build the shared library; also return the tensor-core instructions of its machine code."""
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    target = folder / "mma_sync.so"
    flags = ["-gencode=arch=compute_90a,code=sm_90a", "-O1", "-shared", "-Xcompiler", "-fPIC"]
    done = subprocess.run([nvcc, *flags, str(SOURCE), "-o", str(target)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"nvcc failed: {done.stderr[-2000:]}")
    seen: set[str] = set()
    dump = shutil.which("cuobjdump") or "/usr/local/cuda/bin/cuobjdump"
    if Path(dump).exists():
        sass = subprocess.run([dump, "--dump-sass", str(target)], capture_output=True, text=True, check=False).stdout
        seen = {word for word in sass.split() if "MMA" in word}
    return ctypes.CDLL(str(target)), tuple(sorted(seen))


def record(recording: Recording, pools: dict[str, torch.Tensor], device: str) -> None:
    """One instruction, and a chain of eight, with every kind of operand and c."""
    with tempfile.TemporaryDirectory() as folder:
        library, instructions = compile_library(Path(folder))
        for index, pair in enumerate(PAIRS):
            for kind, k, c in itertools.product(KINDS, (32, 256), ("zero", "wide", "bits")):
                if kind == "bits" and k > 32:
                    continue
                a = pools[f"{kind}/{pair[0]}/a"][:16, :k].to(device).contiguous()
                b = pools[f"{kind}/{pair[1]}/b"][:16, :k].to(device).contiguous()
                start = pools[f"c/{c}"].to(device).contiguous()
                out = torch.full((16, 16), torch.nan, dtype=DTYPES["fp32"], device=device)
                pointers = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, start, out)]
                error = library.run(index, *pointers, 16, 16, k)
                if error:
                    raise RuntimeError(f"mma.sync kernel: CUDA error {error}")
                recording.cases.append(
                    Case(
                        "mma.sync",
                        "mma.sync",
                        f"{kind}/{pair[0]}",
                        f"{kind}/{pair[1]}",
                        16,
                        16,
                        k,
                        "fp32",
                        recording.put(out),
                        fast=True,
                        c=f"c/{c}",
                        unit="sm90_mma_sync",
                        instructions=instructions,
                    )
                )
