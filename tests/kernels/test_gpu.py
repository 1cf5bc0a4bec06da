"""A short form of benchmarks/verify.py for ``make gpu``: the kernels equal the oracle on the GPU at hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import quantize
from fp8ref.emulation.scales import Scaling
from fp8ref.kernels.device import unit_of_device
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.matmul import scaled_matmul
from fp8ref.kernels.pack import pack_weight
from fp8ref.kernels.quantize import quantize_rows

pytestmark = pytest.mark.gpu

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SHAPES = [
    (1, 1, 1),
    (1, 1024, 4096),
    (15, 4097, 4099),
    (3, 129, 9001),
    (33, 70, 300),
    (130, 257, 1031),
    (300, 512, 512),
]


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


@pytest.mark.parametrize("scaling", ["row", "tensor", "1x128", "128x128"])
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_linear(scaling: Scaling, m: int, n: int, k: int) -> None:
    w = pack_weight(torch.randn(n, k, device="cuda"), scaling)
    x, bias = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(n, device="cuda")
    for out_dtype in (torch.bfloat16, torch.float32, E4M3):
        options: dict[str, Any] = {"out_dtype": out_dtype}
        y = scaled_linear(x, w, bias, **options)
        assert same_bits(y, scaled_linear(x, w, bias, backend="emulate", **options))
    mine = quantize_rows(x, scaling="row" if w.scaling == "row" else "1x128")
    theirs = quantize(x, scaling=mine.scaling)
    assert same_bits(mine.data, theirs.data)
    assert same_bits(mine.scale, theirs.scale)


@pytest.mark.parametrize("how", [{}, {"scale_format": "ue8m0"}, {"absmax_bound": 1.5}, {"static": True}])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("pair", [("row", "row"), ("row", "tensor"), ("tensor", "tensor"), ("128x128", "1x128")])
def test_linear_with_other_activations(pair: tuple[Scaling, Scaling], dtype: torch.dtype, how: dict[str, Any]) -> None:
    static = torch.tensor([0.01], device="cuda") if "static" in how else None
    if static is not None and pair[1] == "1x128":
        with pytest.raises(ValueError, match="scale"):
            quantize_rows(torch.ones(2, 2, device="cuda"), scaling="1x128", scale=static)
        return
    how = {name: value for name, value in how.items() if name != "static"}
    named = {"absmax_bound": "activation_bound"}
    options = {named.get(name, name): value for name, value in how.items()}
    for m, n, k in SHAPES:
        w = pack_weight(torch.randn(n, k, device="cuda"), pair[0])
        x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
        x[::5] *= 30.0
        x[m // 2, k // 2], x[0, 0] = float("-inf"), float("nan")
        mine = quantize_rows(x, dtype, scaling=pair[1], scale=static, **how)
        given = static if static is None or pair[1] == "tensor" else static.expand(m, 1).contiguous()
        theirs = quantize(x, dtype, scaling=pair[1], scale=given, **how)
        assert same_bits(mine.data, theirs.data)
        assert same_bits(mine.scale, theirs.scale)
        call = {"activation_scaling": pair[1], "activation_dtype": dtype, "input_scale": static, **options}
        y = scaled_linear(x, w, **call)
        assert same_bits(y, scaled_linear(x, w, backend="emulate", **call))


@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize(
    "kinds", [("tensor",) * 2, ("row",) * 2, ("1x128",) * 2, ("1x128", "128x128"), ("128x128", "1x128")]
)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_matmul_of_every_code(dtypes: tuple[torch.dtype, ...], kinds: Any, m: int, n: int, k: int) -> None:
    g = torch.Generator("cuda").manual_seed(m * n + k)
    bits = [torch.randint(0, 256, shape, device="cuda", generator=g, dtype=torch.uint8) for shape in ((m, k), (n, k))]
    a, b = bits[0].view(dtypes[0]), bits[1].view(dtypes[1]).t()
    blocks = -(-k // 128)
    left = {"tensor": (), "row": (m, 1), "1x128": (m, blocks), "128x128": (-(-m // 128), blocks)}[kinds[0]]
    right = {"tensor": (), "row": (1, n), "1x128": (blocks, n), "128x128": (blocks, -(-n // 128))}[kinds[1]]
    # Scales of both signs and zero: the sign of a zero result depends on how a scale is applied.
    scales = [torch.randint(-1, 3, shape, device="cuda", generator=g).float() for shape in (left, right)]
    unit = unit_of_device(a.device)
    for split_k in (1, 2, 5):
        options: dict[str, Any] = {"split_k": split_k, "scaling": kinds, "out_dtype": torch.float32}
        wanted = emulate_matmul(a, b, *scales, unit=unit, **options)
        assert same_bits(scaled_matmul(a, b, *scales, **options), wanted), f"split_k={split_k}"


@pytest.mark.parametrize("m", [3, 128, 300])
@pytest.mark.parametrize("where", ["bias", "scale", "codes", "none"])
def test_what_lies_anywhere_in_memory(where: str, m: int) -> None:
    """cuBLASLt refuses pointers that are no multiples of 16 bytes: then the kernel takes over, with the same bits."""
    n, k = 256, 1024
    w = pack_weight(torch.randn(n, k, device="cuda"))
    x, bias = torch.randn(m, k, device="cuda", dtype=torch.bfloat16), torch.randn(n, device="cuda").bfloat16()
    wanted = scaled_linear(x, w, bias, backend="emulate")
    moved = {"bias": bias, "scale": w.scale, "codes": w.codes.view(torch.uint8), "none": torch.empty(0)}[where]
    there = torch.empty(moved.numel() + 1, dtype=moved.dtype, device="cuda")[1:].view(moved.shape).copy_(moved)
    if where == "bias":
        bias = there
    elif where == "scale":
        w = replace(w, scale=there)
    elif where == "codes":
        w = replace(w, codes=there.view(w.codes.dtype))
    assert same_bits(scaled_linear(x, w, bias), wanted)
