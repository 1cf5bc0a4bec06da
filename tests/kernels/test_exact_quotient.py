"""The quantiser's division: its own code, run on torch tensors, gives the correctly rounded quotient."""

from __future__ import annotations

import builtins
import types
from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.bits import fma_fp32
from fp8ref.kernels import jit_quantize


class TorchInPlaceOfTriton:
    """The operations of triton.language that the division uses, in IEEE fp32."""

    where = staticmethod(torch.where)
    abs = staticmethod(torch.abs)
    fma = staticmethod(fma_fp32)

    @staticmethod
    def div_rn(a: float, b: Tensor) -> Tensor:
        return torch.full_like(b, a) / b


def quotient(x: Tensor, scale: Tensor) -> Tensor:
    function: Any = jit_quantize.exact_quotient.fn
    # torch may import something of its own inside a call, for which Python wants to find the builtins.
    names = {"tl": TorchInPlaceOfTriton, "__builtins__": builtins}
    result: Tensor = types.FunctionType(function.__code__, names)(x, scale)
    return result


def bits_to_fp32(low: int, high: int, count: int, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, (count,), generator=g, dtype=torch.int64).to(torch.int32).view(torch.float32)


def codes(x: Tensor) -> Tensor:
    """Round as the conversion does; everything above the largest code is one."""
    return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)


def compare(x: Tensor, scale: Tensor) -> None:
    mine, right = quotient(x, scale), x / scale
    assert torch.equal(codes(mine), codes(right))
    # Codes change between 2**-10, half of the smallest, and 448.
    reachable = (right.abs() > 2.0**-12) & (right.abs() < 2.0**12)
    assert bool(reachable.any())
    assert torch.equal(mine[reachable].view(torch.int32), right[reachable].view(torch.int32))


def test_every_bf16_value_by_scales_of_every_size() -> None:
    x = (torch.arange(65536, dtype=torch.int64) << 16).to(torch.int32).view(torch.float32)
    x = x[x.isfinite()]
    for scale in bits_to_fp32(1, 0x7F800000, 16, seed=0):
        compare(x, scale.expand_as(x).contiguous())


def test_random_pairs_near_the_range_of_the_codes() -> None:
    x = torch.randn(1 << 19, generator=torch.Generator().manual_seed(1))
    scale = (torch.rand(1 << 19, generator=torch.Generator().manual_seed(2)) + 0.5) / 448
    compare(x, scale)


def test_the_extremes() -> None:
    x = torch.tensor([2.0**-149, -(2.0**-149), 2.0**-126, 3.4e38, -3.4e38, 0.0, -0.0, 1.0])
    for scale in (2.0**-149, 2.0**-126, 2.0**-60, 1.0, 2.0**60, 3.4e38):
        mine, right = quotient(x, torch.full_like(x, scale)), x / torch.full_like(x, scale)
        assert torch.equal(codes(mine), codes(right)), scale


def test_a_division_without_corrections_is_seen() -> None:
    x = torch.randn(1 << 16, generator=torch.Generator().manual_seed(1))
    scale = (torch.rand(1 << 16, generator=torch.Generator().manual_seed(2)) + 0.5) / 448
    assert not torch.equal(x * (1.0 / scale), x / scale)
