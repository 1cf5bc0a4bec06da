"""Other emulators return the same bits where their scope overlaps ours.

``mmaemu`` models whole products of ``torch._scaled_mm`` on Hopper and Ada; ``mmasim`` models single instructions.
They were written from other recordings than ours, so agreement is evidence for both.
"""

from __future__ import annotations

from typing import Any

import mmaemu
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmasim.nv_ptx.sim import MMA, WGMMA, TCGen05MMA

import fp8ref

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2))
PTX = {E4M3: "e4m3", E5M2: "e5m2"}


def codes(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Uniform bit patterns: every code, NaN and Inf included."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8).view(dtype)


def normal(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal values, whose sums lose bits at every step."""
    return fp8ref.round_to_fp8(torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8, dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Require equal fp32 bit patterns."""
    different = (actual.view(torch.int32) != expected.view(torch.int32)).nonzero()
    assert not len(different), f"{len(different)} of {actual.numel()} differ, first at {different[0].tolist()}"


def pairwise(op: Any, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, unit: str) -> torch.Tensor:
    """One instruction for every output of ``op``."""
    left = a.view(torch.uint8).unsqueeze(1).expand(op.m, op.n, op.k).contiguous().view(a.dtype)
    right = b.view(torch.uint8).t().unsqueeze(0).expand(op.m, op.n, op.k).contiguous().view(b.dtype)
    return fp8ref.fused_dot_add(left, right, c, unit)


@settings(max_examples=40)
@given(
    st.integers(1, 9),
    st.integers(1, 600),
    st.integers(1, 4),
    st.booleans(),
    st.sampled_from(PAIRS),
    st.booleans(),
    st.integers(0, 2**31),
)
@pytest.mark.filterwarnings("ignore::mmaemu.UnverifiedSplitWarning")
def test_mmaemu_on_hopper(
    m: int, k: int, split_k: int, fast: bool, pair: tuple[torch.dtype, torch.dtype], any_bits: bool, seed: int
) -> None:
    draw = codes if any_bits else normal
    a, b = draw((m, k), pair[0], seed), draw((33, k), pair[1], seed + 1)
    split = 1 if split_k == 1 else (split_k, "contiguous")
    theirs = mmaemu.accumulate(a, b, use_fast_accum=fast, profile="hopper", splitk=split)
    assert_same_bits(fp8ref.accumulate(a, b.t(), use_fast_accum=fast, split_k=split_k), theirs)


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 600), st.booleans(), st.sampled_from(PAIRS), st.integers(0, 2**31))
def test_mmaemu_on_ada(m: int, k: int, fast: bool, pair: tuple[torch.dtype, torch.dtype], seed: int) -> None:
    a, b = normal((m, k), pair[0], seed), normal((33, k), pair[1], seed + 1)
    theirs = mmaemu.accumulate(a, b, use_fast_accum=fast, profile="ada", splitk=1)
    assert_same_bits(fp8ref.accumulate(a, b.t(), use_fast_accum=fast, unit="sm89"), theirs)


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16, E4M3])
@pytest.mark.parametrize("scales", [(0.37, 1.913), (2.0**70, 2.0**60), (2.0**-75, 2.0**-70), (-0.7, 448.0)])
def test_mmaemu_scales_and_outputs(scales: tuple[float, float], out_dtype: torch.dtype) -> None:
    a, b = normal((16, 272), E4M3, 1), normal((32, 272), E4M3, 2)
    scale_a, scale_b = (torch.tensor(s) for s in scales)
    arguments = {"out_dtype": out_dtype, "use_fast_accum": True}
    theirs = mmaemu.scaled_mm(a, b.t(), scale_a, scale_b, profile="hopper", splitk=1, **arguments)
    ours = fp8ref.emulate_matmul(a, b.t(), scale_a, scale_b, **arguments)  # type: ignore[arg-type]
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[ours.element_size()]
    assert torch.equal(ours.view(bits), theirs.view(bits))


def _operation(unit: str, pair: tuple[torch.dtype, torch.dtype]) -> Any:
    formats = f"{PTX[pair[0]]}.{PTX[pair[1]]}"
    if unit == "sm90":
        return WGMMA("Hopper", f"m64n8k32.f32.{formats}")
    if unit == "sm89":
        return MMA("Ada Lovelace", f"m16n8k32.f32.{formats}.f32")
    return TCGen05MMA("Blackwell", f"m64n8k32.kind::f8f6f4.f32.{formats}")


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("unit", ["sm90", "sm89", "sm100"])
@pytest.mark.parametrize("draw", [codes, normal])
def test_mmasim_instructions_with_an_accumulator(unit: str, pair: tuple[torch.dtype, torch.dtype], draw: Any) -> None:
    op = _operation(unit, pair)
    for seed in range(3):
        a, b = draw((op.m, op.k), pair[0], seed), draw((op.k, op.n), pair[1], seed + 10)
        c = torch.randn(op.m, op.n, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed * 3 - 3)
        assert_same_bits(pairwise(op, a, b, c, unit), op(a, b, c))


@pytest.mark.parametrize("draw", [codes, normal])
@pytest.mark.parametrize("half", [0, 1])
def test_mmasim_hmma_on_upcast_operands(draw: Any, half: int) -> None:
    """One fp16 instruction is one of the two steps that the unit takes for 32 fp8; zeros make the other do nothing."""
    op = MMA("Hopper", "m16n8k16.f32.f16.f16.f32")
    own = list(fp8ref.UNITS["sm90_hmma"].k_order[16 * half : 16 * half + 16])
    for pair in PAIRS:
        a, b = draw((op.m, op.k), pair[0], 1), draw((op.k, op.n), pair[1], 2)
        c = torch.randn(op.m, op.n, generator=torch.Generator().manual_seed(3)) * 100
        left = torch.zeros(op.m, op.n, 32, dtype=torch.uint8)
        right = torch.zeros_like(left)
        left[..., own] = a.view(torch.uint8).unsqueeze(1)
        right[..., own] = b.view(torch.uint8).t().unsqueeze(0)
        ours = fp8ref.fused_dot_add(left.view(pair[0]), right.view(pair[1]), c, "sm90_hmma")
        assert_same_bits(ours, op(a.half(), b.half(), c))
