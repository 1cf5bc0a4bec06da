"""The cases of ``torch._scaled_mm`` and ``torch.nn.functional.scaled_mm``: what is multiplied, and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch

from golden.operands import KINDS, SPLIT_K
from golden.scaled_mm import ROW, TENSOR, Products, Scaling, ceil_div
from golden.store import DTYPES, Case

PAIRS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))
SHORT_KS = (16, 32, 48, 80, 128, 144, 272, 1040)
NAN, INF = float("nan"), float("inf")
SCALE_PAIRS = (
    (1.0, 1.0),
    (0.37, 1.913),
    (2.0**70, 2.0**60),
    (2.0**-75, 2.0**-70),
    (2.0**-126, 0.37),
    (1e-40, 2.0**20),
    (1e-45, 1.0),
    (3.4e38, 1e-38),
    (-0.7, 1.3),
    (-0.7, -1.3),
    (0.0, 1.0),
    (-0.0, 1.0),
    (NAN, 1.0),
    (1.0, NAN),
    (INF, 1.0),
    (-INF, 2.0),
    (INF, 0.0),
    (1.0, INF),
    (448.0, 1.0),
    (2.0**-9, 1.0),
    (2.0**-14, 0.77),
    (2.0**-24, 1.0),
    (-1e-45, 1.0),
    (2.0**-75, -(2.0**-70)),
    (-(2.0**-126), 2.0**-10),
)


def one(value: float) -> torch.Tensor:
    """A one-element scale."""
    return torch.tensor([value], dtype=torch.float32)


def outputs(a: str, b: str) -> tuple[str, ...]:
    """The output types that PyTorch accepts for two formats (e5m2 only where an operand is e5m2)."""
    return ("fp32", "bf16", "fp16", "e4m3") if (a, b) == ("e4m3", "e4m3") else ("fp32", "bf16", "fp16", "e4m3", "e5m2")


def vectors(kind: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Scales or biases: ``plain`` within 2**+-3, ``wide`` within 2**+-40, ``special`` with NaN, Inf, 0."""
    generator = torch.Generator().manual_seed(seed)
    reach = {"plain": 3, "wide": 40, "special": 12}[kind]
    exponent = torch.randint(-reach, reach + 1, shape, generator=generator).float()
    values = (torch.rand(shape, generator=generator) + 1) * torch.exp2(exponent)
    if kind == "special":
        odd = torch.tensor([1.0, NAN, -0.7, INF, 0.0, 1e-40, -0.0, 3e38, -INF, 2.0**-126])
        flat = values.view(-1)
        flat[: len(odd)] = odd[: flat.numel()]
    return values


def _level(products: Products, case: Case, target: float) -> float:
    """A scale that brings the median accumulator of a case to ``target``."""
    a, b = products.operands(case)
    value = (a.float() @ b.float().t()).abs()
    value = value[value.isfinite() & (value > 0)]
    return target / float(value.median()) if value.numel() else 1.0


def _case(group: str, kind: str, pair: tuple[str, str], m: int, n: int, k: int, out: str, fast: bool) -> Case:
    return Case(group, "_scaled_mm", f"{kind}/{pair[0]}", f"{kind}/{pair[1]}", m, n, k, out, "", fast)


def _accumulation(products: Products) -> None:
    """Accumulators in fp32 over K, operands and modes; then every output type at a scale that suits it."""
    rows = itertools.cycle((17, 1, 16, 3, 9))
    for pair, kind, k, fast in itertools.product(PAIRS, KINDS, SHORT_KS, (False, True)):
        if kind == "bits" and k > 48:
            continue
        products.run(_case("accumulation", kind, pair, next(rows), 32, k, "fp32", fast), one(1.0), one(1.0))
    for pair, kind, k in itertools.product(PAIRS, KINDS, (48, 272, 1040)):
        if kind == "bits" and k > 48:
            continue
        for out in outputs(*pair)[1:]:
            base = _case("output types", kind, pair, next(rows), 16, k, out, k == 272)
            case = replace(base, via="scaled_mm" if out in ("bf16", "e5m2") else "_scaled_mm")
            target = 6000.0 if out == "e5m2" else 60.0
            products.run(case, one(0.73), one(_level(products, case, target) / 0.73))


def _scale_values(products: Products) -> None:
    for out, (sa, sb), kind in itertools.product(
        ("fp32", "bf16", "fp16", "e4m3"), SCALE_PAIRS, ("boundary", "subnormal")
    ):
        products.run(_case("scale values", kind, PAIRS[0], 5, 16, 80, out, False), one(sa), one(sb))


def _row_wise(products: Products) -> None:
    rows = itertools.cycle((17, 2, 16, 5))
    for pair, kind, scale in itertools.product(PAIRS, KINDS, ("plain", "wide", "special")):
        for i, out in enumerate(outputs(*pair)):
            k = 48 if kind == "bits" else (48, 272, 1040)[i % 3]
            base = _case("row-wise", kind, pair, next(rows), 32, k, out, i % 2 == 1)
            case = replace(base, scaling=ROW, via=("_scaled_mm", "scaled_mm")[i % 2])
            level = _level(products, case, 60.0) if scale == "plain" else 1.0
            sa = vectors(scale, (case.m, 1), 10 + i)
            products.run(case, sa, vectors(scale, (1, 32), 20 + i) * level)
    for via, out in itertools.product(("_scaled_mm", "scaled_mm"), ("bf16", "fp32")):
        case = Case("row-wise", via, "normal/e4m3", "normal/e4m3", 1, 16, 80, out, "", note="one row", scaling=ROW)
        products.run(case, one(0.37).view(1, 1), vectors("plain", (1, 16), 3))


def _bias(products: Products) -> None:
    for out, scaling, kind, fast in itertools.product(
        ("bf16", "fp16", "e4m3", "e5m2"), (TENSOR, ROW), ("normal", "boundary", "specials"), (False, True)
    ):
        pair = PAIRS[1] if out == "e5m2" else PAIRS[0]
        base = _case("bias", kind, pair, 5, 32, 272, out, fast)
        case = replace(base, scaling=scaling, via="scaled_mm" if fast else "_scaled_mm")
        level = _level(products, case, 60.0)
        sa, sb = one(1.37), one(level / 1.37)
        if scaling == ROW:
            sa, sb = vectors("plain", (5, 1), 5), vectors("plain", (1, 32), 6) * level
        a, b = products.operands(case)
        cancel = -(a.float() @ b.float().t() * sa.to(a.device) * sb.to(a.device))[0].cpu()
        wide = vectors("special", (32,), 8) * 60
        zero = torch.zeros(32)
        zero[::2] = -0.0
        for dtype in (torch.bfloat16, torch.float16) if out in ("e4m3", "e5m2") else (DTYPES[out],):
            for values in (cancel, wide, zero):
                products.run(case, sa, sb, values.to(dtype))
                products.run(case, -sa, sb, values.to(dtype))


def _blocks() -> Iterator[tuple[Scaling, int, int, int]]:
    """(scaling, M, N, K) of the block-scaled cases: tails in K and N, odd numbers of blocks, several blocks."""
    for k in (128, 256, 384, 512, 640, 144, 272, 1040, 16, 112, 1024):
        yield ("1x128", "1x128"), 16, 32, k
        yield ("1x128", "128x128"), 16, 32, k
    for n, k in ((144, 512), (272, 512), (272, 640), (256, 1024), (272, 1040), (128, 640)):
        yield ("1x128", "128x128"), 4, n, k
    for m, k in ((144, 512), (144, 640), (16, 512), (144, 1040)):
        yield ("128x128", "1x128"), m, 16, k
    yield ("128x128", "1x128"), 1, 32, 512
    for m in (1, 2, 3, 5, 8, 17):
        yield ("1x128", "1x128"), m, 32, 512
        yield ("1x128", "128x128"), m, 32, 512
    yield ("128x128", "128x128"), 16, 32, 512


def _misread(scaling: Scaling, m: int, n: int, k: int) -> bool:
    """Whether ``_scaled_mm`` takes the scales for another kind (K <= 128, M = 1) or reads them at a wrong stride."""
    columns = {"128x128": ceil_div(m, 128)}.get(scaling[0], 1) * {"128x128": ceil_div(n, 128)}.get(scaling[1], 1)
    return k <= 128 or (m == 1 and scaling[0] != "128x128") or (columns > 1 and ceil_div(k, 128) % 4 != 0)


def block_scales(scaling: Scaling, m: int, n: int, k: int, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of a block-scaled product in the oracle's form."""
    blocks = ceil_div(k, 128)
    rows = m if scaling[0] == "1x128" else ceil_div(m, 128)
    columns = n if scaling[1] == "1x128" else ceil_div(n, 128)
    return vectors(kind, (rows, blocks), 31), vectors(kind, (blocks, columns), 32)


def _block_wise(products: Products) -> None:
    for (scaling, m, n, k), via in itertools.product(_blocks(), ("scaled_mm", "_scaled_mm")):
        if via == "_scaled_mm" and _misread(scaling, m, n, k):
            continue
        sa, sb = block_scales(scaling, m, n, k, "plain")
        for out in ("fp32", "bf16"):
            case = Case("block-wise", via, "block/e4m3", "block/e4m3", m, n, k, out, "", scaling=scaling)
            products.run(case, sa, sb)
    for second, kind, scale in itertools.product(("1x128", "128x128"), KINDS, ("wide", "special")):
        k = 48 if kind == "bits" else 512
        for pair, out in itertools.product(PAIRS, ("fp32", "bf16", "fp16", "e4m3")):
            sa, sb = block_scales(("1x128", second), 16, 32, k, scale)
            base = _case("block-wise", kind, pair, 16, 32, k, out, False)
            via = "scaled_mm" if pair == PAIRS[0] else "_scaled_mm"
            if via == "scaled_mm" or k > 128:
                products.run(replace(base, via=via, scaling=("1x128", second)), sa, sb)
    for second, dtype in itertools.product(("1x128", "128x128"), (torch.bfloat16, torch.float16)):
        sa, sb = block_scales(("1x128", second), 16, 32, 512, "plain")
        for out in ("bf16", "fp16", "e4m3", "fp32"):
            case = Case("block-wise", "scaled_mm", "block/e4m3", "block/e4m3", 16, 32, 512, out, "")
            case = replace(case, scaling=("1x128", second))
            products.run(case, sa, sb, vectors("plain", (32,), 9).to(dtype))


def _large(products: Products) -> None:
    """Products whose rows and columns are only partly kept: large tiles, long K, split K."""
    shapes = [(1, 4096, 4096), (128, 128, 4096), (4096, 4096, 4096), (8, 64, 16384), (1, 4096, 14336)]
    shapes += [(8, 256, 14336), (16, 64, 28672), (128, 128, 16384), (64, 64, 8192), (16, 16, 16384), (1, 16, 28672)]
    shapes += [(256, 8192, 1040), (2048, 6144, 2064), (1000, 1040, 4112), (4096, 14336, 4096), (64, 1024, 7168)]
    shapes += [(300, 256, 11008), (16, 512, 5248), (17, 4096, 14336), (8, 64, 10000), (32, 128, 6160)]
    shapes += [(4, 16, 28672), (64, 64, 5264), (128, 128, 9104), (12, 48, 20016)]
    for (m, n, k), fast in itertools.product(shapes, (False, True)):
        any_case = Case("large", "_scaled_mm", "", "", min(4, m), 8, k, "", "", fast, shape=(m, n))
        for kind, out in (("long-normal/e4m3", "fp32"), ("long-wide/e4m3", "bf16"), ("long-normal/e5m2", "fp32")):
            if kind != "long-normal/e4m3" and k > 16384:
                continue
            first = kind if kind.endswith("e4m3") else "long-normal/e4m3"
            products.run(replace(any_case, a=first, b=kind, out_dtype=out), one(0.73), one(0.0137))
        case = replace(any_case, a="long-normal/e4m3", b="long-normal/e4m3", out_dtype="bf16")
        bias = vectors("plain", (8,), 3).bfloat16()
        products.run(case, one(0.73), one(0.0137), bias)
        row = replace(case, scaling=ROW)
        sa, sb = vectors("plain", (case.m, 1), 1), vectors("plain", (1, 8), 2)
        products.run(row, sa, sb)
        products.run(row, sa, sb, bias)
        for second in ("1x128", "128x128"):
            if (second == "128x128" and n > 128) or fast:
                continue
            sa, sb = block_scales(("1x128", second), case.m, 8, k, "plain")
            products.run(replace(case, scaling=("1x128", second), via="scaled_mm", out_dtype="fp32"), sa, sb)


def _signs_of_zero(products: Products) -> None:
    """Zero, and values that underflow in the scales, with K cut and not: where does the sign of a zero survive?"""
    scales = ((-0.7, 1.3), (0.7, 1.3), (-1e-45, 1.0), (2.0**-75, -(2.0**-70)), (-0.0, 1.0))
    for kind, k, out, (sa, sb) in itertools.product(
        ("zero", "tiny"), (80, SPLIT_K), ("fp32", "bf16", "fp16", "e4m3"), scales
    ):
        pool = f"{kind}/e4m3"
        case = Case("zeros", "_scaled_mm", pool, pool, 2, 8, k, out, "", shape=(4, 16))
        zero = torch.zeros(8, dtype=torch.float16 if out == "fp16" else torch.bfloat16)
        zero[::2] = -0.0
        row = replace(case, scaling=ROW)
        for bias in (None,) if out == "fp32" else (None, zero):
            products.run(case, one(sa), one(sb), bias)
            if out != "e4m3":
                products.run(row, torch.full((2, 1), sa), torch.full((1, 8), sb), bias)
        if out == "fp32":
            for second in ("1x128", "128x128"):
                block = replace(case, scaling=("1x128", second), via="scaled_mm")
                left, right = block_scales(("1x128", second), 2, 8, k, "plain")
                products.run(block, left.fill_(sa), right.fill_(sb))


def record(products: Products) -> None:
    """Run every case."""
    for part in (_accumulation, _scale_values, _row_wise, _bias, _block_wise, _signs_of_zero, _large):
        part(products)
