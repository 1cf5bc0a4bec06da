"""Random calls of the library, each made from its index alone, and their comparison with the oracle."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from guarded import Guards, differing_bits
from torch import Tensor

from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import quantize
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.matmul import scaled_matmul
from fp8ref.kernels.pack import pack_weight
from fp8ref.kernels.quantize import quantize_rows

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
OUTS = [BF16, BF16, FP32, FP16, E4M3, E5M2]
BIASES = [None, None, BF16, FP16, FP32]
PAIRS = [
    ("tensor", "tensor"),
    ("row", "row"),
    ("row", "row"),
    ("1x128", "1x128"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
]


@dataclass(frozen=True)
class Outcome:
    """What one case compared: elements of results and of codes and scales, and how many differed."""

    outputs: int
    differing: int
    codes: int
    codes_differing: int
    guards_broken: int
    text: str


def _combinations(count: int) -> list[dict[str, Any]]:
    """A fixed list of option combinations: each is a kernel to compile, so there are not too many."""
    rng = random.Random(2026)  # noqa: S311 - test data
    found = []
    for _ in range(count):
        pair = rng.choice(PAIRS)
        found.append(
            {
                "pair": pair,
                "fast": rng.random() < 0.4 and pair[0] in ("tensor", "row"),
                "out": rng.choice(OUTS),
                "bias": rng.choice(BIASES),
                "dtypes": rng.choice([(E4M3, E4M3), (E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]),
                "x": rng.choice([BF16, BF16, FP16, FP32]),
                "static": rng.random() < 0.25,
                "invariant": rng.random() < 0.3,
                "split": rng.choice([1, 1, 2, 3, 8]),
                "activations": activations_of(rng, pair[0]),
            }
        )
    return found


def activations_of(rng: random.Random, left: str) -> dict[str, Any]:
    """Draw how x is quantised, half of the time as by default."""
    if rng.random() < 0.5:
        return {}
    found: dict[str, Any] = {"activation_dtype": rng.choice([E4M3, E5M2])}
    if left in ("tensor", "row"):
        found["activation_scaling"] = rng.choice(["row", "tensor"])
    return found | rng.choice([{}, {"scale_format": "ue8m0"}, {"activation_bound": 1.5}])


COMBINATIONS = _combinations(50)


def shape_of(rng: random.Random) -> tuple[int, int, int]:
    """Draw M, N, K: mostly few rows and odd sizes; the product stays below 6e9 multiplications."""
    kind = rng.random()
    if kind < 0.7:
        m = rng.choice([1, 2, 3, 4, 8, 15, 16, 17, 31, 33, 63, 64, rng.randint(1, 64)])
    elif kind < 0.88:
        m = rng.randint(65, 400)
    else:
        m = rng.randint(1000, 4096)
    sizes = []
    for _ in range(2):
        size = int(math.exp(rng.uniform(0.0, math.log(20000))))
        size = size | 1 if rng.random() < 0.75 else max(16, size // 16 * 16)
        sizes.append(size)
    n, k = sizes
    if m >= 1000 and rng.random() < 0.7:
        n = rng.randint(1500, 4096) | (rng.random() < 0.7)
    while m * n * k > 6 * 10**9:
        k = k // 2 | 1
    return m, n, k


def values(shape: tuple[int, ...], pattern: str, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return random activations: a bell, many binades, or with rows of zeros and NaN and Inf here and there."""
    x = torch.randn(shape, device="cuda", generator=g)
    if pattern == "wide":
        x = x * torch.exp2(torch.randint(-20, 12, shape, device="cuda", generator=g).float())
    if pattern == "special":
        chance = torch.rand(shape, device="cuda", generator=g)
        x = torch.where(chance < 0.001, float("nan"), torch.where(chance > 0.999, float("-inf"), x))
        x[::3] = 0.0
    return x.to(dtype)


def codes(shape: tuple[int, ...], pattern: str, g: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Return random FP8 codes: of a bell, of many binades, or every code (NaN and Inf included) alike."""
    if pattern == "bits":
        return torch.randint(0, 256, shape, device="cuda", generator=g, dtype=torch.uint8).view(dtype)
    x = torch.randn(shape, device="cuda", generator=g)
    if pattern == "wide":
        x = x * torch.exp2(torch.randint(-12, 7, shape, device="cuda", generator=g).float())
    return x.clamp(-448, 448).to(dtype)


def run(index: int) -> Outcome:
    """Make case ``index``, run it on poisoned, guarded buffers and compare it with the oracle."""
    rng = random.Random(index)  # noqa: S311 - test data
    g = torch.Generator("cuda").manual_seed(index)
    o = rng.choice(COMBINATIONS)
    m, n, k = shape_of(rng)
    bias = None if o["bias"] is None else torch.randn(n, device="cuda", generator=g).to(o["bias"])
    run_one = _linear if rng.random() < 0.6 else _matmul
    return run_one(rng, g, o, m, n, k, bias)


def _linear(
    rng: random.Random, g: torch.Generator, o: dict[str, Any], m: int, n: int, k: int, bias: Tensor | None
) -> Outcome:
    guards = Guards()
    scaling = o["pair"][1]
    pattern = rng.choice(["bell", "bell", "wide", "special"])
    w = pack_weight(torch.randn(n, k, device="cuda", generator=g), scaling, dtype=o["dtypes"][1])
    w = replace(w, codes=guards.copy(w.codes), scale=guards.copy(w.scale))
    x = guards.copy(values((m, k), pattern, g, o["x"]))
    layout = rng.choice(["plain", "plain", "columns", "strided", "batched"])
    if layout == "columns":
        x = guards.copy(x.t().contiguous()).t()
    elif layout == "strided":
        x = guards.copy(torch.cat([x, x], 1))[:, :k]
    elif layout == "batched":
        x = x.view(1, m, k)
    static = None
    if o["static"] and w.scaling == "row":
        static = guards.copy(torch.rand(1, device="cuda", generator=g) + 0.01)
    chosen = dict(o["activations"])
    if static is not None:
        chosen = {name: value for name, value in chosen.items() if name not in ("scale_format", "activation_bound")}
    options: dict[str, Any] = {
        **chosen, "input_scale": static, "use_fast_accum": o["fast"], "out_dtype": o["out"],
        "batch_invariant": o["invariant"],
    }  # fmt: skip
    with guards.allocations():
        y = scaled_linear(x, w, bias, **options)
        flat = x.view(m, k) if layout == "batched" else x
        kind = chosen.get("activation_scaling", "row") if w.scaling == "row" else "1x128"
        how = {"scale_format": chosen.get("scale_format", "float32"), "absmax_bound": chosen.get("activation_bound")}
        dtype = chosen.get("activation_dtype", E4M3)
        mine = quantize_rows(flat, dtype, scaling=kind, scale=static, **how)
    wanted = scaled_linear(x, w, bias, backend="emulate", **options)
    given = static
    if static is not None and kind == "row":
        given = static.reshape(1, 1).expand(m, 1).contiguous()
    theirs = quantize(flat, dtype, scaling=kind, scale=given, **how)
    wrong = differing_bits(mine.data, theirs.data) + differing_bits(mine.scale, theirs.scale)
    text = f"linear {m}x{n}x{k} {layout} {pattern} {o}"
    compared = mine.data.numel() + mine.scale.numel()
    return Outcome(y.numel(), differing_bits(y, wanted), compared, wrong, guards.broken(), text)


def _scales(shape: tuple[int, ...], rng: random.Random, g: torch.Generator) -> Tensor:
    """Return positive scales, or some of both signs and zero: the sign of a zero result depends on them."""
    scale = torch.rand(shape, device="cuda", generator=g) + 0.01
    if rng.random() < 0.5:
        return scale
    return scale * torch.randint(-1, 2, shape, device="cuda", generator=g)


def _matmul(
    rng: random.Random, g: torch.Generator, o: dict[str, Any], m: int, n: int, k: int, bias: Tensor | None
) -> Outcome:
    guards = Guards()
    pattern = rng.choice(["bell", "wide", "bits"])
    a = guards.copy(codes((m, k), pattern, g, o["dtypes"][0]))
    b = guards.copy(codes((n, k), pattern, g, o["dtypes"][1])).t()
    layout = rng.choice(["weight", "weight", "weight", "rows"])
    if layout == "rows":
        b = guards.copy(b.contiguous())
    blocks = -(-k // 128)
    left = {"tensor": (), "row": (m, 1), "1x128": (m, blocks), "128x128": (-(-m // 128), blocks)}[o["pair"][0]]
    right = {"tensor": (), "row": (1, n), "1x128": (blocks, n), "128x128": (blocks, -(-n // 128))}[o["pair"][1]]
    sa, sb = (guards.copy(_scales(s, rng, g)) for s in (left, right))
    options: dict[str, Any] = {
        "bias": bias, "out_dtype": o["out"], "use_fast_accum": o["fast"], "split_k": o["split"], "scaling": o["pair"],
    }  # fmt: skip
    with guards.allocations():
        y = scaled_matmul(a, b, sa, sb, **options)
    wanted = emulate_matmul(a, b, sa, sb, **options)
    text = f"matmul {m}x{n}x{k} {layout} {pattern} {o}"
    return Outcome(y.numel(), differing_bits(y, wanted), 0, 0, guards.broken(), text)
