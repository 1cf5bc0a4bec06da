"""Records when cuBLASLt cuts K, on an H200, in about three minutes: needs ``PYTHONPATH=.:tests``, writes to ``--out``.

Worker processes ask cuBLASLt's heuristic about some hundred thousand shapes (cublaslt.py); the main process measures
the cuts of a fresh sample from results alone (tests/golden/split_k.py) and compares. If the two disagree, what remains
of the time goes into more measurements. The sample ``fresh`` is for judging a rule and must never be used to find one.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cublaslt
import numpy as np
import torch
from split_k_shapes import Shapes, families, fours, fresh, near

from golden import record
from golden.scaled_mm import TENSOR, multiply
from golden.split_k import KINDS, VIA, first_part

WORKERS = 14
_BEGAN = time.monotonic()


def say(out: Path, *words: object) -> None:
    """Print a line with the time and keep it."""
    line = f"[{time.monotonic() - _BEGAN:6.1f}] " + " ".join(str(word) for word in words)
    print(line, flush=True)
    with (out / "log.txt").open("a") as file:
        file.write(line + "\n")


def wake() -> None:
    """Load cuBLASLt by a small product."""
    zero = torch.zeros(16, 32, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones(1, device="cuda")
    multiply("_scaled_mm", zero, zero, TENSOR, one, one, torch.bfloat16, False)


def survey(query: cublaslt.Query, shapes: Shapes, deadline: float, wanted: int) -> dict[str, Any]:
    """Answers for the shapes asked before the deadline: attributes as an index into ``table``, workspace and waves."""
    table: dict[tuple[int, ...], int] = {}
    rows: list[tuple[int, ...]] = []
    waves: list[float] = []
    for number, (m, n, k) in enumerate(shapes.tolist()):
        if number % 256 == 0 and time.time() > deadline:
            break
        status, found = query.ask(m, n, k, wanted)
        if not found:
            rows.append((m, n, k, -1 - status, 0, 0))
            waves.append(0.0)
        for rank, (attributes, workspace, wave) in enumerate(found):
            rows.append((m, n, k, table.setdefault(attributes, len(table)), rank, workspace))
            waves.append(wave)
    columns = np.array(rows, dtype=np.int64).reshape(-1, 6)
    return {
        "shape": columns[:, :3].astype(np.int32),
        "algo": columns[:, 3].astype(np.int16),
        "rank": columns[:, 4].astype(np.uint8),
        "workspace": columns[:, 5].astype(np.int32),
        "waves": np.array(waves, dtype=np.float32),
        "table": np.array(list(table), dtype=np.int64).reshape(-1, len(cublaslt.FIELDS)),
    }


def work(out: Path, index: int, deadline: float) -> None:
    """Ask about this worker's share of every family, the most important first; keep each family as it is done."""
    torch.set_num_threads(1)
    wake()
    for name, options, shapes, wanted in families():
        if time.time() > deadline:
            print(f"{name}: no time left")
            continue
        try:
            began = time.time()
            found = survey(cublaslt.Query(**options), shapes[index::WORKERS], deadline, wanted)
            np.savez_compressed(out / f"{name}.w{index}.npz", **found)
            print(f"{name}: {len(found['algo'])} answers in {time.time() - began:.2f} s", flush=True)
        except Exception:  # noqa: BLE001 - the other families are still worth asking
            print(f"{name}: {traceback.format_exc(limit=-3)}", flush=True)


def merge(out: Path) -> None:
    """One file a family in place of one for each worker."""
    for name in sorted({path.name.split(".")[0] for path in out.glob("*.w[0-9]*.npz")}):
        paths = sorted(out.glob(f"{name}.w[0-9]*.npz"))
        parts = [dict(np.load(path)) for path in paths]
        table: dict[tuple[int, ...], int] = {}
        for part in parts:
            numbers = [table.setdefault(tuple(row), len(table)) for row in part["table"].tolist()]
            known = part["algo"] >= 0
            part["algo"][known] = np.array(numbers, dtype=np.int16)[part["algo"][known]]
        columns = ("shape", "algo", "rank", "workspace", "waves")
        merged: dict[str, Any] = {column: np.concatenate([part[column] for part in parts]) for column in columns}
        merged["table"] = np.array(list(table), dtype=np.int64).reshape(-1, len(cublaslt.FIELDS))
        np.savez_compressed(out / f"{name}.npz", **merged)
        for path in paths:
            path.unlink()


def measure(out: Path, name: str, shapes: Shapes, seconds: float, kind: tuple[str, bool, str, bool]) -> list[Any]:
    """Part lengths from results alone, and what the heuristic says, for as many shapes as there is time for."""
    rows: list[list[int]] = []
    query, deadline = None, time.monotonic() + seconds
    dtype, fast, scaling, bias = kind
    try:
        query = cublaslt.Query(dtype, fast, KINDS[scaling], bias)
    except Exception:  # noqa: BLE001 - the measurement does not need it
        say(out, "no query:", traceback.format_exc(limit=-2))
    for m, n, k in shapes.tolist():
        if time.monotonic() > deadline:
            break
        asked = -9
        try:
            length = first_part(m, n, k, dtype, fast, KINDS[scaling], bias, "cuda", VIA[scaling])
        except Exception as error:  # noqa: BLE001 - a refused shape is a result
            length = -2
            if len(rows) < 20:
                say(out, name, (m, n, k), "failed:", str(error)[:200])
        if query is not None:
            status, found = query.ask(m, n, k)
            asked = found[0][0][cublaslt.FIELDS.index("SPLITK_NUM")] if found else -1 - status
        rows.append([m, n, k, length, asked])
        if len(rows) <= 20:
            say(out, name, kind, f"M N K {(m, n, k)}: first part {length} of {-(-k // 128)} tiles, SPLITK_NUM {asked}")
    np.savez_compressed(out / f"measured.{name}.npz", rows=np.array(rows, dtype=np.int32).reshape(-1, 5))
    wrong = [row for row in rows if not agrees(row)]
    cut = sum(row[3] not in (-(-row[2] // 128), -2) for row in rows)
    say(out, f"{name}: {len(rows)} measured, {cut} cut, {len(wrong)} differ from the heuristic; first: {wrong[:10]}")
    return rows


def agrees(row: list[int]) -> bool:
    """Whether the measured first part is the one that SPLITK_NUM equal parts would have."""
    tiles = -(-row[2] // 128)
    return row[3] == -(-tiles // max(row[4], 1)) and row[4] >= 0


def kernel_names(out: Path, shapes: Shapes) -> None:
    """The kernels that ran, by the profiler: their names tell tile, cluster and split."""
    from torch.profiler import ProfilerActivity, profile

    one, names = torch.ones(1, device="cuda"), []
    for m, n, k in shapes.tolist():
        a = torch.zeros(m, k, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
        b = torch.zeros(n, k, device="cuda", dtype=torch.uint8).view(torch.float8_e4m3fn)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as record_:
            multiply("_scaled_mm", a, b, TENSOR, one, one, torch.bfloat16, True)
            torch.cuda.synchronize()
        names.append([m, n, k, [e.name for e in record_.events() if "CUDA" in str(e.device_type)]])
    (out / "kernels.json").write_text(json.dumps(names))
    say(out, "kernels:", names[:6])


def check(out: Path) -> list[Any]:
    """Everything the main process measures; returns the comparisons."""
    rows: list[Any] = []
    fallback = near(20_000, 11)
    plan = [
        ("fresh", fresh(4000, 1), 45.0, ("bf16", True, "tensor", False)),
        ("near", near(2000, 2), 25.0, ("bf16", True, "tensor", False)),
        ("accurate", near(400, 3), 6.0, ("bf16", False, "tensor", False)),
        ("fp32", near(300, 4), 5.0, ("fp32", True, "tensor", False)),
        ("e4m3", near(300, 5), 5.0, ("e4m3", True, "tensor", False)),
        ("bias", near(300, 6), 5.0, ("bf16", True, "tensor", True)),
        ("fp16", near(300, 7), 5.0, ("fp16", True, "tensor", False)),
        ("1x128", fours(near(200, 8)), 5.0, ("bf16", False, "1x128", False)),
    ]
    for name, shapes, seconds, kind in plan:
        try:
            rows += measure(out, name, shapes, seconds, kind)
        except Exception:  # noqa: BLE001 - one part must not cost the others
            say(out, name, traceback.format_exc(limit=-3))
    good = sum(agrees(row) for row in rows)
    say(out, f"ALL: {good} of {len(rows)} measurements agree with the heuristic")
    if good < 0.99 * len(rows):
        say(out, "the heuristic is not what runs: measuring more instead")
        rows += measure(out, "fallback", fallback, 75.0, ("bf16", True, "tensor", False))
    return rows


def main() -> int:
    """Start the workers, measure beside them, say what came of it."""
    return run_script(__doc__, work, record_all, 105)


def run_script(
    about: str | None,
    as_worker: Callable[[Path, int, float], None],
    as_first: Callable[[Path, float], None],
    seconds: float,
) -> int:
    """A recording script from its command line: it is a worker if start_workers() started it, and the first if not."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--worker", type=int)
    parser.add_argument("--deadline", type=float)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.worker is not None:
        as_worker(options.out, options.worker, options.deadline)
    else:
        as_first(options.out, time.time() + seconds)
    return 0


def start_workers(script: str, out: Path, deadline: float) -> list[subprocess.Popen[bytes]]:
    """Start a script again, once for each worker."""
    return [
        subprocess.Popen(  # noqa: S603 - our own script
            [sys.executable, script, "--out", str(out), "--worker", str(i), "--deadline", str(deadline)],
            stdout=(out / f"worker{i}.txt").open("wb"),
            stderr=subprocess.STDOUT,
        )
        for i in range(WORKERS)
    ]


def describe(out: Path) -> None:
    """Versions, the workspace, the enumerators, and one answer in full."""
    try:
        environment = record.environment("cuda")
        environment["torch_cublaslt_workspace"] = str(cublaslt.torch_workspace())
        environment["header"] = json.dumps(cublaslt.check_header(cublaslt.library_path()))
        environment["library"] = cublaslt.library_path()
        environment["fields"] = " ".join(cublaslt.FIELDS)
        (out / "environment.json").write_text(json.dumps(environment, indent=1))
        say(out, environment)
    except Exception:  # noqa: BLE001 - said, and the measurements go on
        say(out, traceback.format_exc(limit=-3))
    try:
        status, found = cublaslt.Query().ask(8, 64, 16384)
        say(out, "8x64x16384:", status, dict(zip(cublaslt.FIELDS, found[0][0], strict=True)), found[0][1:])
    except Exception:  # noqa: BLE001 - said, and the measurements go on
        say(out, traceback.format_exc(limit=-3))


def record_all(out: Path, deadline: float) -> None:
    """Everything, each part guarded so that the others are kept."""
    workers = start_workers(__file__, out, deadline)
    wake()
    describe(out)
    check(out)
    try:
        kernel_names(out, near(40, 9))
    except Exception:  # noqa: BLE001 - the names are only a hint
        say(out, traceback.format_exc(limit=-3))
    for worker in workers:
        try:
            worker.wait(timeout=max(1.0, deadline + 20 - time.time()))
        except subprocess.TimeoutExpired:
            worker.kill()
            say(out, f"worker {worker.pid} had to be stopped")
    say(out, "worker 0:", (out / "worker0.txt").read_text()[-3000:])
    try:
        merge(out)
    except Exception:  # noqa: BLE001 - the pieces are still there
        say(out, traceback.format_exc(limit=-3))
    sizes = [path.stat().st_size for path in out.iterdir()]
    say(out, f"{len(sizes)} files, {sum(sizes)} bytes, the largest {max(sizes)}")


if __name__ == "__main__":
    raise SystemExit(main())
