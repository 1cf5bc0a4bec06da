"""The proof on a GPU, in one command: ``python benchmarks/verify.py``. Prints a one-page verdict and keeps it.

Random calls are compared with the oracle, bit for bit, on poisoned buffers between guard bands, by several processes;
then come the checks of checks.py; compute-sanitizer runs a part of the cases beside them. The exit status is 0 only
if nothing differed and enough was compared.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


LEAST_CASES = 2000
LEAST_OUTPUTS = 10**8


COUNTS = ("cases", "outputs", "differing", "codes", "codes_differing", "guards_broken")


def shard(start: int, step: int, cases: int, seconds: float, path: Path) -> None:
    """Run cases start, start+step, ... and write what they compared, after each of them."""
    import cases as suite

    began = time.monotonic()
    total = dict.fromkeys(COUNTS, 0)
    failures: list[str] = []
    for index in range(start, cases, step):
        if time.monotonic() - began > seconds:
            break
        total["cases"] += 1
        try:
            outcome = suite.run(index)
        except Exception:  # noqa: BLE001 - a case that raises is a failure to report, and the others go on
            failures.append(f"case {index} raised: {traceback.format_exc(limit=-3)}")
        else:
            for key in COUNTS[1:]:
                total[key] += getattr(outcome, key)
            if outcome.differing or outcome.codes_differing or outcome.guards_broken:
                failures.append(f"case {index}: {outcome}")
        path.write_text(json.dumps({**total, "failures": failures}))


def spawn(arguments: list[str], log: Path, prefix: list[str] | None = None) -> subprocess.Popen[bytes]:
    """Start this script again as a part of the run."""
    command = [*(prefix or []), sys.executable, str(HERE / "verify.py"), *arguments]
    return subprocess.Popen(command, stdout=log.open("wb"), stderr=subprocess.STDOUT)  # noqa: S603 - our own script


def run_checks() -> list[dict[str, Any]]:
    """Run the checks one after the other; a failed one is a line of the verdict."""
    import checks

    lines = []
    for check in checks.ALL:
        began = time.monotonic()
        try:
            passed, text = True, check()
        except Exception as error:  # noqa: BLE001 - reported, and the verdict fails
            passed, text = False, f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
        seconds = round(time.monotonic() - began, 1)
        lines.append({"check": check.__name__, "passed": passed, "text": text, "seconds": seconds})
    return lines


def environment() -> dict[str, str]:
    """Return what the figures depend on."""
    import torch
    import triton

    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d"),
    }


def verdict(found: dict[str, Any]) -> str:
    """Return the page."""
    e, t = found["environment"], found["random cases"]
    lines = [
        "fp8ref: kernels against the oracle " + ("PASSED" if found["passed"] else "FAILED"),
        f"{e['gpu']}, torch {e['torch']}, triton {e['triton']}, CUDA {e['cuda']}, python {e['python']}, {e['date']}",
        "",
        f"random cases           {t['cases']:>14,} (at least {LEAST_CASES:,})",
        f"output elements        {t['outputs']:>14,} (at least {LEAST_OUTPUTS:,})",
        f"  differing in any bit {t['differing']:>14,}",
        f"codes and scales       {t['codes']:>14,}",
        f"  differing in any bit {t['codes_differing']:>14,}",
        f"guard bytes changed    {t['guards_broken']:>14,}",
        f"cases that raised or differed {len(t['failures']):>7,}",
        "",
        *(f"{'ok  ' if c['passed'] else 'FAIL'} {c['check']}: {c['text']}" for c in found["checks"]),
        *(
            f"{'ok  ' if s['passed'] else 'FAIL'} compute-sanitizer {s['tool']}: {s['text']}"
            for s in found["sanitizer"]
        ),
        *t["failures"][:10],
    ]
    return "\n".join(lines) + "\n"


def total_of(paths: list[Path], statuses: list[int]) -> dict[str, Any]:
    """Add up what the shards wrote; one that died is a failure, whatever it had written before."""
    total: dict[str, Any] = {**dict.fromkeys(COUNTS, 0), "failures": []}
    for path, status in zip(paths, statuses, strict=True):
        part = json.loads(path.read_text()) if path.exists() else {"failures": [f"{path.name}: nothing was written"]}
        if status:
            part["failures"].append(f"{path.name}: its process ended with status {status}")
        for key, value in part.items():
            total[key] += value
    return total


def sanitizer_result(tool: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> dict[str, Any]:
    """Wait for compute-sanitizer and read its summary."""
    try:
        status = process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        return {"tool": tool, "passed": False, "text": f"not finished after {seconds:.0f} s"}
    text = log.read_text(errors="replace")
    summary = [line.strip("= ") for line in text.splitlines() if "SUMMARY" in line or "sanitized cases" in line]
    return {"tool": tool, "passed": status == 0 and bool(summary), "text": "; ".join(summary) or text[-500:]}


def main() -> int:
    """Run everything; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results", help="folder for verify.json and verify.txt")
    parser.add_argument("--cases", type=int, default=2400)
    parser.add_argument("--jobs", type=int, default=10, help="processes that share the GPU")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit for the random cases")
    parser.add_argument("--shard", nargs=2, type=int, metavar=("START", "STEP"), help=argparse.SUPPRESS)
    parser.add_argument("--sanitize", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.shard:
        shard(*args.shard, args.cases, args.seconds, args.out / f"shard{args.shard[0]}.json")
        return 0
    if args.sanitize:
        return sanitized()
    work = args.out / "work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    common = ["--cases", str(args.cases), "--seconds", str(args.seconds), "--out", str(work)]
    tools = ["memcheck", "racecheck"] if shutil.which("compute-sanitizer") else []
    watched = {
        tool: spawn(
            ["--sanitize"], work / f"{tool}.log", ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9"]
        )
        for tool in tools
    }
    shards = [spawn(["--shard", str(i), str(args.jobs), *common], work / f"shard{i}.log") for i in range(args.jobs)]
    statuses = [process.wait() for process in shards]
    found: dict[str, Any] = {"environment": environment()}
    found["random cases"] = total_of([work / f"shard{i}.json" for i in range(args.jobs)], statuses)
    found["sanitizer"] = [sanitizer_result(t, p, work / f"{t}.log", args.seconds) for t, p in watched.items()]
    if not tools:
        found["sanitizer"] = [{"tool": "memcheck", "passed": False, "text": "compute-sanitizer is not installed"}]
    found["checks"] = run_checks()
    t = found["random cases"]
    enough = t["cases"] >= LEAST_CASES and t["outputs"] >= LEAST_OUTPUTS
    clean = not (t["failures"] or t["differing"] or t["codes_differing"] or t["guards_broken"])
    found["passed"] = enough and clean and all(c["passed"] for c in found["checks"] + found["sanitizer"])
    shutil.rmtree(work)
    (args.out / "verify.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "verify.txt").write_text(verdict(found))
    print(verdict(found))
    return 0 if found["passed"] else 1


def sanitized() -> int:
    """Run a representative set of small cases under compute-sanitizer."""
    import torch

    from fp8ref.kernels.linear import scaled_linear
    from fp8ref.kernels.pack import pack_weight

    shapes = [
        (1, 64, 128),
        (3, 70, 300),
        (15, 129, 1031),
        (16, 256, 2048),
        (33, 65, 513),
        (65, 130, 257),
        (130, 64, 64),
    ]
    count = 0
    for m, n, k in shapes:
        for scaling in ("row", "1x128", "128x128"):
            w = pack_weight(torch.randn(n, k, device="cuda"), scaling)
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            y = scaled_linear(x, w, torch.zeros(n, device="cuda"))
            wanted = scaled_linear(x, w, torch.zeros(n, device="cuda"), backend="emulate")
            if not torch.equal(y, wanted):
                return 1
            count += 1
    torch.cuda.synchronize()
    print(f"{count} sanitized cases equal the oracle", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
