"""Time of one FP8 linear layer on the GPU at hand, beside what else there is: ``python benchmarks/linear.py``.

Every figure is the median of replays of one CUDA graph that walks through weights several times larger than L2, in one
run. "isolated" puts a foreign kernel before each call and takes its time off again: what programmatic dependent launch
saves between two of our own calls is not there. Writes linear.json, linear.md and linear.png.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from linear_peers import peers
from linear_report import LARGE, ODD, SHAPES, SMALL, plot, table, targets
from torch import Tensor
from verify import environment

from fp8ref.kernels.explain import explain
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.matmul import scaled_matmul
from fp8ref.kernels.pack import PackedWeight
from fp8ref.kernels.quantize import quantize_rows
from fp8ref.kernels.tune import microseconds, weights_for

HERE = Path(__file__).resolve().parent
BF16 = torch.bfloat16


@triton.jit
def read_kernel(w_ptr, out_ptr, n, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Read n int32 and keep nothing: the floor of any product with these weights."""
    first = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS
    seen = tl.zeros([BLOCK], dtype=tl.int32)
    for i in tl.static_range(ROUNDS):
        at = first + i * BLOCK + tl.arange(0, BLOCK)
        seen += tl.load(w_ptr + at, mask=at < n, other=0)
    total = tl.sum(seen, axis=0)
    if total == 0x12345677:
        tl.store(out_ptr, total)


@triton.jit
def touch_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Copy n elements: the foreign kernel before an isolated call."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def read_time(weights: list[PackedWeight]) -> float:
    """Return the best time of a pure read of a weight."""
    words = [w.codes.view(torch.int32) for w in weights]
    n, sink = words[0].numel(), torch.zeros(1, dtype=torch.int32, device="cuda")

    def read(i: int, block: int, rounds: int, warps: int) -> None:
        grid = (-(-n // (block * rounds)),)
        read_kernel[grid](words[i], sink, n, BLOCK=block, ROUNDS=rounds, num_warps=warps)

    options = [(2048, 4, 4), (4096, 4, 8), (2048, 8, 4), (1024, 4, 4)]
    return min(microseconds(lambda i, o=o: read(i, *o), len(words)) for o in options)  # type: ignore[misc]


def copy_bandwidth() -> float:
    """Return bytes read and written per us by a large copy."""
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / microseconds(lambda _: b.copy_(a), 1, least=4)


def per_call_layer(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """The layer of the first FP8 serving code: absmax, scale, clamp, cast and product, call after call."""
    absmax = x.abs().amax(dim=-1, keepdim=True).float().clamp(min=1e-12)
    sx = absmax / 448.0
    q = (x.float() / sx).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    out: Tensor = torch._scaled_mm(q, codes.t(), sx, scale.view(1, -1), out_dtype=BF16)  # noqa: SLF001 - torch's name for it
    return out


def eager_time(call: Callable[[int], Any], copies: int) -> float:
    """Return the median time of a call outside a graph, host included."""
    times = []
    for i in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        call(i % copies)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e6)
    return statistics.median(times)


def measure(
    n: int, k: int, m: int, weights: list[PackedWeight], extras: bool, missing: dict[str, str] | None = None
) -> dict[str, Any]:
    """Return the row of one shape and batch size; ``missing`` collects why a peer has none."""
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    copies, least = len(weights), 96 if m <= 64 else 16
    q = quantize_rows(x)
    row: dict[str, Any] = {"n": n, "k": k, "m": m}

    def timed(call: Callable[[int], Any]) -> float:
        return round(microseconds(call, copies, least=least), 2)

    def ours(i: int) -> Tensor:
        return scaled_linear(x, weights[i])

    row["ours"] = timed(ours)
    row["ours fast accumulation"] = timed(lambda i: scaled_linear(x, weights[i], use_fast_accum=True))
    row["ours batch invariant"] = timed(lambda i: scaled_linear(x, weights[i], batch_invariant=True))
    plan = explain(weights[0], m)
    row["plan"] = f"{plan.path} split_k={plan.split_k} {plan.tile}"
    operands = [w.as_scaled().t() for w in weights]
    row["ours ready fp8"] = timed(lambda i: scaled_matmul(q, operands[i], split_k=plan.split_k))
    if n % 16 == 0 and k % 16 == 0:
        one = torch.ones((), device="cuda")
        codes = [w.codes.t() for w in weights]
        scales = [w.scale.view(1, -1) for w in weights]

        def bare(i: int) -> Tensor:
            out: Tensor = torch._scaled_mm(q.data, codes[i], one, one, out_dtype=BF16)  # noqa: SLF001
            return out

        row["_scaled_mm tensor-wise"] = timed(bare)
        row["_scaled_mm row-wise"] = timed(
            lambda i: torch._scaled_mm(q.data, codes[i], q.scale, scales[i], out_dtype=BF16)  # noqa: SLF001
        )
        row["quantise per call, graph"] = timed(lambda i: per_call_layer(x, weights[i].codes, weights[i].scale))
        row["quantise per call, eager"] = round(
            eager_time(lambda i: per_call_layer(x, weights[i].codes, weights[i].scale), copies), 1
        )
        if m <= 64:
            found, reasons = peers(weights, m)
            row |= {name: timed(lambda i, layer=layer: layer(x, i)) for name, layer in found.items()}  # type: ignore[misc]
            for name, why in reasons.items() if missing is not None else ():
                missing.setdefault(name, f"{why} (first at {n}x{k}, M={m})")
        row["isolated"] = _isolated(x, {"ours": ours, "_scaled_mm tensor-wise": bare}, copies, least)
    if extras:
        compiled = torch.compile(per_call_layer, dynamic=False)
        row["quantise per call, compiled in a graph"] = timed(lambda i: compiled(x, weights[i].codes, weights[i].scale))
    return row


def _isolated(x: Tensor, calls: dict[str, Callable[[int], Any]], copies: int, least: int) -> dict[str, float]:
    n, y = x.numel(), torch.empty_like(x)

    def touch() -> None:
        touch_kernel[(-(-n // 1024),)](x, y, n, BLOCK=1024)

    alone = microseconds(lambda _: touch(), copies, least=least)
    result = {}
    for name, call in calls.items():

        def behind(i: int, call: Callable[[int], Any] = call) -> None:
            touch()
            call(i)

        both = microseconds(behind, copies, least=least)
        result[name] = round(both - alone, 2)
    return result


def bf16_times(n: int, k: int, sizes: list[int]) -> dict[int, float]:
    """Return the times of torch's bf16 layer."""
    weights = [torch.randn(n, k, device="cuda", dtype=BF16) for _ in range(max(2, -(-240 * 10**6 // (2 * n * k))))]
    found = {}
    for m in sizes:
        x = torch.randn(m, k, device="cuda", dtype=BF16)

        def layer(i: int, x: Tensor = x) -> Tensor:
            return torch.nn.functional.linear(x, weights[i])

        found[m] = round(microseconds(layer, len(weights), least=96 if m <= 64 else 16), 2)
    return found


def fill_caches(start: int, step: int, *, compiled: bool) -> None:
    """Run every ``step``-th row once, so that several processes share the compiling."""
    global microseconds  # noqa: PLW0603 - every figure goes through it
    microseconds = lambda call, _copies, **_: call(0) is None or 0.0  # noqa: E731
    rows = [(n, k, m) for n, k in [*SHAPES, *ODD] for m in sizes_of(n, k)]
    for n, k, m in rows[start::step]:
        weights = weights_for(n, k, torch.device("cuda"))[:1]
        measure(n, k, m, weights, compiled and is_extra(n, k, m))
    print(f"ran {len(rows[start::step])} rows")


def sizes_of(n: int, k: int) -> list[int]:
    """Return the batch sizes that a shape is measured at."""
    return SMALL + (LARGE if (n, k) in SHAPES[:4] else [])


def is_extra(n: int, k: int, m: int) -> bool:
    """Whether the compiled per-call layer is measured there."""
    return m in (1, 15) and (n, k) in SHAPES[1:4]


def main() -> None:
    """Measure everything and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument(
        "--compile", nargs=2, type=int, metavar=("START", "STEP"), help="only fill the compilers' caches"
    )
    parser.add_argument("--small", action="store_true", help="leave out batches above 64 rows")
    parser.add_argument("--compiled", action="store_true", help="also measure torch.compile of the per-call layer")
    args = parser.parse_args()
    if args.compile:
        fill_caches(*args.compile, compiled=args.compiled)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    found: dict[str, Any] = {"environment": environment(), "rows": [], "not measured": {}}
    found["copy bytes per us"] = bandwidth = copy_bandwidth()
    for n, k in [*SHAPES, *ODD]:
        sizes = [m for m in sizes_of(n, k) if m <= 64 or not args.small]
        bf16 = bf16_times(n, k, sizes)
        weights = weights_for(n, k, torch.device("cuda"))
        floor = round(read_time(weights), 2)
        for m in sizes:
            row = measure(n, k, m, weights, args.compiled and is_extra(n, k, m), found["not measured"])
            row |= {"pure read": floor, "bf16": bf16[m]}
            found["rows"].append(row)
            print(json.dumps(row), flush=True)
        del weights
        print(f"{time.monotonic() - began:.0f} s", flush=True)
    found["targets"] = targets(found["rows"], bandwidth)
    (args.out / "linear.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "linear.md").write_text(table(found))
    plot(found, args.out / "linear.png")
    print(table(found))


if __name__ == "__main__":
    main()
