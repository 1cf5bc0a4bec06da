"""Records what an H200 returns: ``python3 tests/golden/record.py --out DIR``.

Writes the operands, one file of cases per interface, and the places where cuBLASLt cuts K. The replay is
``tests/emulation/test_golden.py``. Every part runs in its own process: a fault in one does not lose the others.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from golden import cases_scaled_mm, mma_sync, operands, refusals, split_k, tl_dot
from golden.scaled_mm import TENSOR, Products, Scaling, ceil_div
from golden.store import Case, Recording, load

PARTS = ("scaled_mm", "scaled_mm_no_workspace", "split_k", "mma_sync", "tl_dot_wgmma", "tl_dot_hmma", "tl_dot_fp16")


def cublaslt_version() -> str:
    """The version of the cuBLASLt that torch has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "libcublasLt.so" in line:
            version = ctypes.CDLL(line.split()[-1]).cublasLtGetVersion
            version.restype = ctypes.c_size_t
            return str(version())
    return "not loaded"


def _packages() -> dict[str, str]:
    import numpy as np

    found = {"torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version()}
    try:
        import triton

        found["triton"] = triton.__version__
    except ImportError:
        found["triton"] = "absent"
    return found


def environment(device: str) -> dict[str, str]:
    """What the results depend on: GPU, driver, library versions and the workspace setting."""
    found = _packages() | {"cuda": str(torch.version.cuda), "platform": platform.platform()}
    if device == "cuda":
        torch._scaled_mm(
            torch.zeros(16, 32, device=device).to(torch.float8_e4m3fn),
            torch.zeros(16, 32, device=device).to(torch.float8_e4m3fn).t(),
            torch.ones(1, device=device),
            torch.ones(1, device=device),
            out_dtype=torch.bfloat16,
        )
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().split(", ")
        found |= {"gpu": name, "driver": driver, "cublaslt": cublaslt_version()}
        found["capability"] = ".".join(map(str, torch.cuda.get_device_capability()))
    for name in ("CUBLASLT_WORKSPACE_SIZE", "CUBLAS_WORKSPACE_CONFIG"):
        found[name] = os.environ.get(name, "not set")
    return found


class _PartTiles:
    """How many tiles cuBLASLt puts in a part of K, asked once per kind of call."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.known: dict[tuple[object, ...], int] = {}

    def __call__(self, m: int, n: int, k: int, out: str, fast: bool, scaling: Scaling, bias: bool, via: str) -> int:
        key = (m, n, k, out, fast, scaling, bias, via)
        if key not in self.known:
            self.known[key] = split_k.first_part(m, n, k, out, fast, scaling, bias, self.device, via)
        return self.known[key]


def _probe_without_workspace(recording: Recording, device: str) -> None:
    for (out, fast, _, bias), shapes in split_k.configurations()[:2]:
        tiles = [split_k.first_part(m, n, k, out, fast, TENSOR, bias, device) for m, n, k in shapes]
        cut = sum(t != ceil_div(k, split_k.TILE) for t, (_, _, k) in zip(tiles, shapes, strict=True))
        message = f"of {len(shapes)} shapes {cut} are cut, {out}, fast={fast}"
        recording.findings.append({"call": "probe without workspace", "error": "", "message": message})


def record_part(part: str, out: Path, device: str) -> None:
    """Record one part into ``out``; the operands must be there already."""
    torch.manual_seed(1)
    pools = load(out / "operands.safetensors").tensors
    pools = {name: x.view(torch.float32) if name.startswith("c/") else x for name, x in pools.items()}
    recording = Recording(environment=environment(device))
    if part.startswith("scaled_mm"):
        workspace = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "default")
        products = Products(recording, pools, device, workspace, _PartTiles(device))
        cases_scaled_mm.record(products)
        if workspace == "default":
            refusals.record(products)
        else:
            _probe_without_workspace(recording, device)
    elif part == "split_k":
        survey = {"environment": recording.environment, "first_part": split_k.survey(device)}
        text = json.dumps(survey, separators=(",", ":")).replace('":[', '":\n[').replace('],"', '],\n"')
        (out / "split_k.json").write_text(text + "\n")
        return
    elif part == "mma_sync":
        mma_sync.record(recording, pools, device)
    else:
        tl_dot.record(recording, pools, device, part.replace("tl_dot_", "tl.dot "))
    recording.save(out / f"{part}.safetensors")


def _merge_workspaces(out: Path) -> str:
    """Keep of the run without workspace only the cases whose bits differ, or that the default refused."""
    default, without = load(out / "scaled_mm.safetensors"), load(out / "scaled_mm_no_workspace.safetensors")

    def key(case: Case) -> str:
        skipped = ("out", "split_k", "part_tiles", "workspace")
        return repr([(name, value) for name, value in vars(case).items() if name not in skipped])

    known = {key(case): case for case in default.cases}
    both = [(known[key(case)], case) for case in without.cases if key(case) in known]
    only = [case for case in without.cases if key(case) not in known]
    differing = [(one, other) for one, other in both if one.out != other.out]
    for case in [other for _, other in differing] + only:
        default.cases.append(case)
        for name in (case.out, case.scale_a, case.scale_b, case.bias):
            if name is not None:
                default.tensors[name] = without.tensors[name]
    message = (
        f"of {len(both)} products {len(differing)} have other bits without workspace, "
        f"{sum(one.split_k != 1 for one, _ in differing)} of these were cut in K by the default; "
        f"cut at all: {sum(one.split_k != 1 for one, _ in both)} by the default, "
        f"{sum(other.split_k != 1 for _, other in both)} without; {len(only)} more run only without"
    )
    default.findings.append({"call": "CUBLASLT_WORKSPACE_SIZE=0", "error": "", "message": message})
    default.findings += [finding for finding in without.findings if finding["call"].startswith("probe")]
    default.save(out / "scaled_mm.safetensors")
    (out / "scaled_mm_no_workspace.safetensors").unlink()
    return message


def _run_parts(out: Path, device: str, parts: list[str]) -> bool:
    """Run the parts side by side, each in its own process; say how each went."""
    running = {}
    for part in parts:
        variables = dict(os.environ)
        if part == "scaled_mm_no_workspace":
            variables["CUBLASLT_WORKSPACE_SIZE"] = "0"
        command = [sys.executable, __file__, "--out", str(out), "--device", device, "--part", part]
        log = (out / f"{part}.log").open("w")
        running[part] = subprocess.Popen(command, env=variables, stdout=log, stderr=subprocess.STDOUT)
    started, good = time.monotonic(), True
    for part, process in running.items():
        code = process.wait()
        good &= code == 0
        print(f"{part}: exit {code} after {time.monotonic() - started:.1f} s")
        if code:
            print((out / f"{part}.log").read_text()[-1500:])
    return good


def main() -> int:
    """Record everything, or one part."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--part", choices=PARTS, help="record this part in this process, with the operands in --out")
    parser.add_argument("--only", nargs="*", default=PARTS, choices=PARTS, help="parts to record")
    parser.add_argument("--device", default="cuda", help="cpu runs what a CPU can, to test this script")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    if arguments.part:
        record_part(arguments.part, out, arguments.device)
        return 0
    pools = operands.make()
    bits = {name: x.view(torch.int32) if x.dtype == torch.float32 else x for name, x in pools.items()}
    Recording(tensors=bits, environment=_packages()).save(out / "operands.safetensors")
    good = _run_parts(out, arguments.device, list(arguments.only))
    if (out / "scaled_mm.safetensors").exists() and (out / "scaled_mm_no_workspace.safetensors").exists():
        print(_merge_workspaces(out))
    for path in sorted(out.glob("*.safetensors")):
        recording = load(path)
        size, cases, findings = path.stat().st_size, len(recording.cases), len(recording.findings)
        print(f"{path.name}: {size} bytes, {cases} cases, {findings} findings")
    return 0 if good else 1


if __name__ == "__main__":
    raise SystemExit(main())
