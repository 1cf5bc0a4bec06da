"""Every argument that does not fit is refused: the error names it and what it got, and the inputs stay as they were."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fp8ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
M, N, K = 4, 5, 260
BLOCKS = 3
"""ceil(K / 128)."""


def fp8(*shape: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Codes 1, 2, 3 ... of finite values."""
    codes = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) % 100 + 1
    return codes.to(torch.uint8).view(dtype).reshape(shape)


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype)


def good() -> dict[str, Any]:
    """Arguments of a product that is computed."""
    return {"a": fp8(M, K), "b": fp8(N, K).t(), "scale_a": ones(M, 1), "scale_b": ones(1, N)}


def blocks() -> dict[str, Any]:
    """The same with block scales."""
    return {**good(), "scale_a": ones(M, BLOCKS), "scale_b": ones(BLOCKS, N)}


SCALED = fp8ref.quantize(ones(M, K), scaling="row")

# (the argument that the message must name, the arguments changed, what the message must say it got)
PRODUCT: list[tuple[str, dict[str, Any], str]] = [
    ("a", {"a": None}, "NoneType"),
    ("a", {"a": [[1.0]]}, "list"),
    ("a", {"a": ones(M, K)}, "torch.float32"),
    ("a", {"a": ones(M, K, dtype=torch.bfloat16)}, "torch.bfloat16"),
    ("a", {"a": fp8(M, K).view(torch.uint8)}, "torch.uint8"),
    ("a", {"a": fp8(M, K).view(torch.float8_e4m3fnuz)}, "torch.float8_e4m3fnuz"),
    ("a", {"a": fp8(K)}, f"[{K}]"),
    ("a", {"a": fp8(1, M, K)}, f"[1, {M}, {K}]"),
    ("a", {"a": fp8(M, K).to("meta")}, "meta"),
    ("b", {"b": None}, "NoneType"),
    ("b", {"b": ones(K, N)}, "torch.float32"),
    ("b", {"b": fp8(K)}, f"[{K}]"),
    ("b", {"b": fp8(N, K)}, f"[{N}, {K}]"),
    ("b", {"b": fp8(K + 1, N)}, f"[{K + 1}, {N}]"),
    ("b", {"b": fp8(1, N)}, f"[1, {N}]"),
    ("b", {"b": fp8(K, N).to("meta")}, "meta"),
]

MATMUL: list[tuple[str, dict[str, Any], str]] = [
    *PRODUCT,
    ("scale_a", {"scale_a": None}, ""),
    ("scale_b", {"scale_b": None}, ""),
    ("scale_a", {"scale_a": 1.0}, "float"),
    ("scale_b", {"scale_b": 1}, "int"),
    ("scale_a", {"scale_a": ones(M, 1, dtype=torch.float64)}, "torch.float64"),
    ("scale_a", {"scale_a": ones(M, 1, dtype=torch.bfloat16)}, "torch.bfloat16"),
    ("scale_b", {"scale_b": ones(1, N, dtype=torch.float16)}, "torch.float16"),
    ("scale_b", {"scale_b": ones(1, N, dtype=torch.int32)}, "torch.int32"),
    ("scale_a", {"scale_a": ones(M, 1).to("meta")}, "meta"),
    ("scale_b", {"scale_b": ones(1, N).to("meta")}, "meta"),
    ("scale_a", {"scale_a": ones(M)}, f"[{M}]"),
    ("scale_a", {"scale_a": ones(1, M)}, f"[1, {M}]"),
    ("scale_a", {"scale_a": ones(M + 1, 1)}, f"[{M + 1}, 1]"),
    ("scale_a", {"scale_a": ones(M, 1, 1)}, f"[{M}, 1, 1]"),
    ("scale_a", {"scale_a": ones(0)}, "[0]"),
    ("scale_b", {"scale_b": ones(N)}, f"[{N}]"),
    ("scale_b", {"scale_b": ones(N, 1)}, f"[{N}, 1]"),
    ("scale_b", {"scale_b": ones(1, N - 1)}, f"[1, {N - 1}]"),
    # One element and row-wise are two kinds: nothing is broadcast.
    ("scale_b", {"scale_a": ones(1)}, "scale_a [1]"),
    ("scale_b", {"scale_b": ones(1, 1)}, "[1, 1]"),
    ("scale_b", {"scale_a": ones(M, BLOCKS)}, f"scale_a [{M}, {BLOCKS}]"),
    ("scale_b", {"scale_b": ones(BLOCKS, N)}, f"[{BLOCKS}, {N}]"),
    ("scaling", {"scaling": "row"}, "row"),
    ("scaling", {"scaling": ("row",)}, "row"),
    ("scaling", {"scaling": ("row", "tensor")}, "tensor"),
    ("scaling", {"scaling": ("128x128", "128x128")}, "128x128"),
    ("scale_a", {"scaling": ("128x128", "1x128")}, f"[{M}, 1]"),
    ("scaling", {"scaling": ("rows", "rows")}, "rows"),
    ("scaling", {"scaling": 3}, "3"),
    ("scale_a", {"scaling": ("tensor", "tensor")}, f"[{M}, 1]"),
    ("scale_a", {"scaling": ("1x128", "1x128")}, f"[{M}, 1]"),
    ("scale_a", {"scaling": ("1x128", "128x128")}, f"[{M}, 1]"),
    ("bias", {"bias": 1.0}, "float"),
    ("bias", {"bias": [0.0] * N}, "list"),
    ("bias", {"bias": ones(N, dtype=torch.float64)}, "torch.float64"),
    ("bias", {"bias": ones(N, dtype=torch.int64)}, "torch.int64"),
    ("bias", {"bias": fp8(N)}, "torch.float8_e4m3fn"),
    ("bias", {"bias": ones(N - 1)}, f"[{N - 1}]"),
    ("bias", {"bias": ones(1)}, "[1]"),
    ("bias", {"bias": ones()}, "[]"),
    ("bias", {"bias": ones(1, N)}, f"[1, {N}]"),
    ("bias", {"bias": ones(M, N)}, f"[{M}, {N}]"),
    ("bias", {"bias": ones(N).to("meta")}, "meta"),
    ("out_dtype", {"out_dtype": torch.float64}, "torch.float64"),
    ("out_dtype", {"out_dtype": torch.int32}, "torch.int32"),
    ("out_dtype", {"out_dtype": torch.float8_e4m3fnuz}, "torch.float8_e4m3fnuz"),
    ("out_dtype", {"out_dtype": "bfloat16"}, "bfloat16"),
    ("out_dtype", {"out_dtype": None}, "None"),
]

HOW: list[tuple[str, dict[str, Any], str]] = [
    ("unit", {"unit": "sm75"}, "sm75"),
    ("unit", {"unit": None}, "NoneType"),
    ("unit", {"unit": 90}, "int"),
    ("split_k", {"split_k": 0}, "0"),
    ("split_k", {"split_k": -1}, "-1"),
    ("split_k", {"split_k": True}, "True"),
    ("split_k", {"split_k": 2.0}, "2.0"),
    ("split_k", {"split_k": "2"}, "2"),
    ("split_k", {"split_k": None}, "None"),
    ("use_fast_accum", {"use_fast_accum": 1}, "1"),
    ("use_fast_accum", {"use_fast_accum": None}, "None"),
    ("use_fast_accum", {"use_fast_accum": "no"}, "no"),
    ("engine", {"engine": "numba"}, "numba"),
    ("engine", {"engine": None}, "None"),
    ("engine", {"engine": True}, "True"),
    ("engine", {"engine": "Compiled", "unit": "exact"}, "Compiled"),
]

BLOCK_SCALES: list[tuple[str, dict[str, Any], str]] = [
    ("use_fast_accum", {"use_fast_accum": True}, "True"),
    ("scale_a", {"scale_a": ones(M, BLOCKS - 1)}, f"[{M}, {BLOCKS - 1}]"),
    ("scale_a", {"scale_a": ones(BLOCKS, M)}, f"[{BLOCKS}, {M}]"),
    ("scale_b", {"scale_b": ones(BLOCKS + 1, N)}, f"[{BLOCKS + 1}, {N}]"),
    ("scale_b", {"scale_b": ones(BLOCKS, N + 1)}, f"[{BLOCKS}, {N + 1}]"),
    ("scale_b", {"scale_b": ones(N, BLOCKS)}, f"[{N}, {BLOCKS}]"),
    # What torch's scaled_mm takes for 128x128: rows padded to a multiple of 4. It is never guessed.
    ("scale_b", {"scale_b": ones(4, 1)}, "[4, 1]"),
    ("scale_b", {"scaling": ("1x128", "128x128")}, f"[{BLOCKS}, {N}]"),
    ("scale_b", {"scale_b": ones(BLOCKS, 1), "scaling": ("1x128", "1x128")}, f"[{BLOCKS}, 1]"),
    ("scale_a", {"scaling": ("row", "row")}, f"[{M}, {BLOCKS}]"),
]

QUANTISED: list[tuple[str, dict[str, Any], str]] = [
    ("a, b", {"a": SCALED, "scale_a": None, "scale_b": None}, "ScaledTensor and Tensor"),
    ("a, b", {"b": SCALED.t(), "scale_a": None, "scale_b": None}, "Tensor and ScaledTensor"),
    ("scale_a", {"a": SCALED, "b": SCALED.t(), "scale_b": None}, ""),
    ("scale_b", {"a": SCALED, "b": SCALED.t(), "scale_a": None}, ""),
    ("a, b", {"a": SCALED, "b": SCALED, "scale_a": None, "scale_b": None}, "transposed=False"),
]


def stored_bytes(arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A copy of the bytes of every tensor with values among the arguments."""
    tensors = {name: x for name, x in arguments.items() if isinstance(x, torch.Tensor) and x.device.type != "meta"}
    return {name: x.clone().contiguous().flatten().view(torch.uint8) for name, x in tensors.items()}


def refuses(function: Any, arguments: dict[str, Any], named: str, got: str) -> None:
    """The call raises an error that starts with the argument, says what it got and more; no input changes."""
    before = stored_bytes(arguments)
    others = {name: x for name, x in arguments.items() if name not in ("a", "b")}
    with pytest.raises((TypeError, ValueError)) as caught:
        function(arguments["a"], arguments["b"], **others)
    message = str(caught.value)
    assert message.startswith(f"{named}: "), message
    assert got in message, message
    assert len(message) > len(f"{named}: {got}") + 10, f"no fix: {message}"
    after = stored_bytes(arguments)
    assert all(torch.equal(after[name], before[name]) for name in before)


def case_names(cases: list[tuple[str, dict[str, Any], str]]) -> list[str]:
    """Readable test ids."""
    return [f"{named}-{got or 'missing'}".replace(" ", "") for named, _, got in cases]


@pytest.mark.parametrize(("named", "change", "got"), MATMUL + HOW, ids=case_names(MATMUL + HOW))
def test_emulate_matmul_refuses(named: str, change: dict[str, Any], got: str) -> None:
    refuses(fp8ref.emulate_matmul, {**good(), **change}, named, got)


@pytest.mark.parametrize(("named", "change", "got"), BLOCK_SCALES, ids=case_names(BLOCK_SCALES))
def test_emulate_matmul_with_block_scales_refuses(named: str, change: dict[str, Any], got: str) -> None:
    refuses(fp8ref.emulate_matmul, {**blocks(), **change}, named, got)


@pytest.mark.parametrize(("named", "change", "got"), QUANTISED, ids=case_names(QUANTISED))
def test_emulate_matmul_of_scaled_tensors_refuses(named: str, change: dict[str, Any], got: str) -> None:
    refuses(fp8ref.emulate_matmul, {**good(), **change}, named, got)


@pytest.mark.parametrize(("named", "change", "got"), PRODUCT + HOW, ids=case_names(PRODUCT + HOW))
def test_accumulate_refuses(named: str, change: dict[str, Any], got: str) -> None:
    refuses(fp8ref.accumulate, {"a": fp8(M, K), "b": fp8(N, K).t(), **change}, named, got)


@pytest.mark.parametrize(
    ("named", "change", "got"),
    [
        ("a", {"a": ones(32)}, "torch.float32"),
        ("a", {"a": None}, "NoneType"),
        ("a", {"a": fp8(32).to("meta")}, "meta"),
        ("b", {"b": ones(32)}, "torch.float32"),
        ("a, b", {"b": fp8(31)}, "32 and 31"),
        ("b", {"b": fp8(32).to("meta")}, "meta"),
        ("a, b", {"a": fp8(33), "b": fp8(33)}, "33"),
        ("a", {"a": fp8(1)[0]}, "[]"),
        ("c", {"c": 0.0}, "float"),
        ("c", {"c": ones(1, dtype=torch.float64)}, "torch.float64"),
        ("c", {"c": ones().to("meta")}, "meta"),
        ("unit", {"unit": "sm75"}, "sm75"),
        ("unit", {"unit": 90}, "int"),
    ],
)
def test_fused_dot_add_refuses(named: str, change: dict[str, Any], got: str) -> None:
    refuses(fp8ref.fused_dot_add, {"a": fp8(32), "b": fp8(32), "c": ones(), "unit": "sm90", **change}, named, got)


def test_fused_dot_add_refuses_leading_dimensions_that_do_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"\[2\].*\[3\]|\[3\].*\[2\]"):
        fp8ref.fused_dot_add(fp8(2, 32), fp8(3, 32), ones(), "sm90")


def test_what_the_tables_start_from_is_computed() -> None:
    """A table of refusals proves nothing if its starting point is refused too."""
    for arguments in (good(), blocks(), {**blocks(), "scale_b": ones(BLOCKS, 1)}):
        assert fp8ref.emulate_matmul(**arguments).shape == (M, N)
    both: Any = SCALED
    assert fp8ref.emulate_matmul(both, both.t()).shape == (M, M)
    assert fp8ref.emulate_matmul(replace(both), both.t(), bias=ones(M)).shape == (M, M)
    assert fp8ref.accumulate(fp8(M, K), fp8(N, K).t()).shape == (M, N)
    assert fp8ref.fused_dot_add(fp8(32), fp8(32), ones()).shape == ()


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3, E5M2])
def test_every_bias_dtype_goes_with_every_output(bias_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    result = fp8ref.emulate_matmul(**good(), bias=ones(N, dtype=bias_dtype), out_dtype=out_dtype)
    assert result.dtype == out_dtype
