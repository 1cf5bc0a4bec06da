"""Calls at the edge of what PyTorch accepts: each is recorded as a case, or as a finding in words."""

from __future__ import annotations

import itertools
from functools import partial

import torch
from torch import Tensor

from golden.scaled_mm import ROW, TENSOR, Products, attempt, ceil_div
from golden.store import DTYPES, Case

_A = "normal/e4m3"
_FP8 = torch.float8_e4m3fn


def _codes(products: Products, pool: str, rows: int, k: int) -> Tensor:
    return products.pools[pool][:rows, :k].to(products.device).contiguous().view(_FP8)


def _note(products: Products, call: str, message: str) -> None:
    products.recording.findings.append({"call": call, "error": "", "message": message})


def _product(a: Tensor, b: Tensor, sa: Tensor, sb: Tensor, out: torch.dtype = torch.float32, **more: object) -> Tensor:
    """``_scaled_mm`` of a [M, K] and b [N, K] with the arguments as they are."""
    result: Tensor = torch._scaled_mm(a, b.t(), sa, sb, out_dtype=out, **more)  # type: ignore[arg-type]
    return result


def _ways(acc: Tensor, sa: Tensor, sb: Tensor) -> dict[str, Tensor]:
    """What the scales could mean, K being at most 128."""
    return {
        "(acc * scale_b) * scale_a": (acc * sb) * sa,
        "(acc * scale_a) * scale_b": (acc * sa) * sb,
        "acc * (scale_a * scale_b)": acc * (sa * sb),
        "first elements only": acc * (sa.view(-1)[0] * sb.view(-1)[0]),
    }


def _mixed(products: Products, what: str, m: int, sa: Tensor, sb: Tensor) -> None:
    """Scales of different or doubtful kinds at K = 32: accepted, and as what?"""
    a, b = _codes(products, f"{_A}/a", m, 32), _codes(products, f"{_A}/b", 16, 32)
    sa, sb = sa.to(products.device), sb.to(products.device)
    out = attempt(products.recording, what, partial(_product, a, b, sa, sb))
    if out is None:
        return
    if sa.dim() == 1 and sa.numel() > 1:
        _note(products, what, "accepted")
        return
    one = torch.ones(1, device=a.device)
    ways = _ways(_product(a, b, one, one), sa, sb)
    _note(products, what, f"accepted; equal to {[name for name, value in ways.items() if torch.equal(value, out)]}")


def _scale_shapes(products: Products) -> None:
    generator = torch.Generator().manual_seed(5)
    rows, columns = torch.rand(17, 1, generator=generator) + 0.3, torch.rand(1, 16, generator=generator) + 0.3
    single = torch.full((1, 1), 0.37)
    _mixed(products, "scales of 0 dimensions", 4, single[0, 0], single[0, 0])
    _mixed(products, "scale_a [1, 1] and scale_b [1]", 4, single, single[0])
    _mixed(products, "row-wise [4, 1] and [1, 16]", 4, rows[:4], columns)
    _mixed(products, "one-element scale_a and scale_b [1, 16]", 4, single, columns)
    _mixed(products, "one-element scale_a and scale_b [1, 16], M = 17", 17, single, columns)
    _mixed(products, "scale_a [4, 1] and one-element scale_b", 4, rows[:4], single)
    _mixed(products, "1-D scales [4] and [16]", 4, rows[:4, 0], columns[0])
    _mixed(products, "M = 1 with [1, 1] and [1, 16]", 1, rows[:1], columns)


def _sizes(products: Products) -> None:
    x = torch.ones(1, device=products.device)
    for m, n, k in ((4, 16, 8), (4, 16, 24), (4, 8, 32), (4, 24, 32), (0, 16, 32), (4, 16, 0), (1, 16, 16)):
        what = f"M, N, K = {m}, {n}, {k}"
        a, b = _codes(products, f"{_A}/a", m, k), _codes(products, f"{_A}/b", n, k)
        out = attempt(products.recording, what, partial(_product, a, b, x, x))
        if out is not None:
            _note(products, what, f"accepted; shape {list(out.shape)}")
    a, b = _codes(products, f"{_A}/a", 16, 32), _codes(products, f"{_A}/b", 32, 32)
    column_major = a.view(torch.uint8).t().contiguous().t().view(_FP8)
    row_major = b.view(torch.uint8).t().contiguous().t().view(_FP8)
    attempt(products.recording, "column-major a", partial(_product, column_major, b, x, x))
    attempt(products.recording, "row-major b", partial(_product, a, row_major, x, x))
    _note(products, "no out_dtype", f"returns {torch._scaled_mm(a, b.t(), x, x).dtype}")


def _types(products: Products) -> None:
    """Every pair of formats with every output type and bias type, at one small shape."""
    formats, biases = ("e4m3", "e5m2"), (None, torch.bfloat16, torch.float16, torch.float32)
    for a, b, out, scaling, bias in itertools.product(formats, formats, DTYPES, (TENSOR, ROW), biases):
        case = Case("types", "_scaled_mm", f"normal/{a}", f"normal/{b}", 3, 16, 48, out, "", scaling=scaling)
        sa, sb = torch.full((1,), 0.37), torch.full((1,), 1.913)
        if scaling == ROW:
            sa, sb = torch.tensor([[0.3], [0.77], [1.1]]), torch.full((1, 16), 0.7)
        products.run(case, sa, sb, None if bias is None else torch.linspace(-300, 400, 16).to(bias))


def _scale_result(products: Products) -> None:
    a, b = _codes(products, f"{_A}/a", 16, 32), _codes(products, f"{_A}/b", 32, 32)
    x = torch.full((1,), 0.1, device=a.device)
    for out, value in itertools.product((_FP8, torch.bfloat16), (0.25, 4.0)):
        what = f"scale_result={value}, {out}"
        given = torch.full((1,), value, device=a.device)
        scaled = attempt(products.recording, what, partial(_product, a, b, x, x, out, scale_result=given))
        if scaled is not None:
            same = torch.equal(scaled.view(torch.uint8), _product(a, b, x, x, out).view(torch.uint8))
            _note(products, what, f"accepted; equal to the result without it: {same}")


def _zero_signs(products: Products) -> None:
    """Zero times a negative scale, with and without a cut in K: the sign bit of the result."""
    for k, out, scales in itertools.product((32, 16384), ("fp32", "bf16", "fp16", "e4m3"), ("tensor", "row")):
        a = torch.zeros(8, k, dtype=torch.uint8, device=products.device).view(_FP8)
        b = torch.full((64, k), 0x38, dtype=torch.uint8, device=products.device).view(_FP8)
        shapes = ((1,), (1,)) if scales == "tensor" else ((8, 1), (1, 64))
        sa, sb = (torch.full(shape, value, device=a.device) for shape, value in zip(shapes, (-0.7, 1.3), strict=True))
        what = f"0 times a negative {scales} scale, K = {k}, {out}"
        result = attempt(products.recording, what, partial(_product, a, b, sa, sb, DTYPES[out]))
        if result is not None:
            signs = sorted({bool(x) for x in result.float().signbit().flatten().tolist()})
            _note(products, what, f"sign bits {signs}")


def _bias_with_long_k(products: Products) -> None:
    """Row-wise scales with fast accumulation and a bias, where tensor-wise scales would be cut in K."""
    shapes = ((16, 64, 4096), (16, 64, 5248), (8, 128, 20368), (62, 2576, 21024), (128, 128, 16384))
    for (m, n, k), fast, dtype in itertools.product(shapes, (True, False), (torch.bfloat16, torch.float16)):
        a = torch.zeros(m, k, dtype=torch.uint8, device=products.device).view(_FP8)
        b = torch.zeros(n, k, dtype=torch.uint8, device=products.device).view(_FP8)
        sa, sb = torch.ones(m, 1, device=a.device), torch.ones(1, n, device=a.device)
        bias = torch.zeros(n, device=a.device, dtype=dtype)
        what = f"row-wise scales, bias, {dtype}, fast={fast}, M, N, K = {m}, {n}, {k}"
        call = partial(_product, a, b, sa, sb, dtype, bias=bias, use_fast_accum=fast)
        if attempt(products.recording, what, call) is not None:
            _note(products, what, "accepted")


def _block_layouts(products: Products) -> None:
    """``_scaled_mm`` wants 128x128 scales at stride ceil(K / 128); is that read where 4 does not divide it?"""
    for k, n in ((640, 272), (384, 272), (1040, 272), (512, 272), (640, 128)):
        blocks, columns = ceil_div(k, 128), ceil_div(n, 128)
        storage = torch.arange(4 * (blocks + 4) * columns, dtype=torch.float32, device=products.device)
        a = torch.full((4, k), 0x38, dtype=torch.uint8, device=products.device).view(_FP8)
        sa = torch.ones(blocks, 4, device=products.device).t()
        sb = torch.as_strided(storage, (blocks, columns), (1, blocks))
        what = f"_scaled_mm, 1x128 by 128x128, K = {k}, N = {n}"
        read = []
        for block in range(blocks):
            b = torch.zeros(n, k, dtype=torch.uint8, device=products.device)
            b[:, block * 128] = 0x38
            out = attempt(products.recording, what, partial(_product, a, b.view(_FP8), sa, sb))
            if out is None:
                break
            read.append([int(out[0, c * 128]) for c in range(columns)])
        if read:
            right = read == [[block + blocks * c for c in range(columns)] for block in range(blocks)]
            _note(products, what, f"scales read as the strides say: {right}; storage index read, by K block: {read}")


def record(products: Products) -> None:
    """Run every call."""
    for part in (_scale_shapes, _sizes, _types, _scale_result, _zero_signs, _bias_with_long_k, _block_layouts):
        part(products)
