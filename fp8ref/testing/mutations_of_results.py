"""The changes that :func:`fp8ref.testing.mutants` makes: faults of accumulation, epilogue and rounding."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fp8ref.emulation.bits import canonical_nan, fma_fp32
from fp8ref.emulation.quantize import expand_scale
from fp8ref.emulation.rounding import round_to_fp8
from fp8ref.testing.cases import Kernel
from fp8ref.testing.mutations import Call

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def convert(y: Tensor, dtype: torch.dtype) -> Tensor:
    """Round fp32 to the output as the hardware does."""
    return round_to_fp8(y, dtype) if dtype in _FP8 else canonical_nan(y.to(dtype))


def _unscaled(kernel: Kernel, call: Call) -> Tensor:
    """The accumulator of the whole of K."""
    one = torch.ones((), device=call.a.device)
    plain = replace(call, scale_a=one, scale_b=one)
    return plain.run(kernel, out_dtype=torch.float32, bias=None, scaling=("tensor", "tensor"))


def _finish(call: Call, y: Tensor) -> Tensor:
    """Bias and output rounding."""
    bias = call.options.get("bias")
    return convert(y if bias is None else y + bias.float(), call.out_dtype)


def _accumulated(kernel: Kernel, call: Call, start: int, stop: int) -> Tensor:
    """The accumulator of one chain."""
    one = torch.ones((), device=call.a.device)
    return kernel(
        call.a[:, start:stop],
        call.b[start:stop],
        one,
        one,
        out_dtype=torch.float32,
        use_fast_accum=True,
        scaling=("tensor", "tensor"),
    )


def _scaled(call: Call, acc: Tensor) -> Tensor:
    if call.kinds[0] == "row":
        return acc * call.scale_b * call.scale_a
    factor = call.scale_a.reshape(()) * call.scale_b.reshape(())
    return fma_fp32(acc, factor, torch.zeros_like(acc))


def _promoted(kernel: Kernel, call: Call, cuts: list[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """Chains from cut to cut, added one after the other; only where the right kernel does the like."""
    if call.in_blocks or call.options.get("use_fast_accum") or call.options.get("split_k", 1) != 1:
        return call.run(kernel)
    total = torch.zeros(call.a.shape[0], call.b.shape[1], device=call.a.device)
    for start, stop in zip(cuts, [*cuts[1:], call.a.shape[1]], strict=True):
        total = (total + _accumulated(kernel, call, start, stop)).to(dtype).float()
    return _finish(call, _scaled(call, total))


def skip_promotion(kernel: Kernel, call: Call) -> Tensor:
    """The first promotion does not happen: one chain over 256."""
    return _promoted(kernel, call, [0, *range(256, call.a.shape[1], 128)])


def promote_often(kernel: Kernel, call: Call) -> Tensor:
    """A promotion every 64 of K."""
    return _promoted(kernel, call, list(range(0, max(1, call.a.shape[1]), 64)))


def total_in_bf16(kernel: Kernel, call: Call) -> Tensor:
    """The promoted total is kept in bf16."""
    return _promoted(kernel, call, list(range(0, max(1, call.a.shape[1]), 128)), torch.bfloat16)


def always_fast(kernel: Kernel, call: Call) -> Tensor:
    """Accurate accumulation is ignored."""
    return call.run(kernel) if call.in_blocks else call.run(kernel, use_fast_accum=True)


def never_fast(kernel: Kernel, call: Call) -> Tensor:
    """Fast accumulation is ignored."""
    return call.run(kernel, use_fast_accum=False)


def backwards(kernel: Kernel, call: Call) -> Tensor:
    """K is walked from its end."""
    if call.in_blocks:
        return call.run(kernel)
    return replace(call, a=_flipped(call.a, 1), b=_flipped(call.b, 0)).run(kernel)


def _flipped(x: Tensor, dim: int) -> Tensor:
    return x.view(torch.uint8).flip(dim).view(x.dtype)


def split_by_batch(kernel: Kernel, call: Call) -> Tensor:
    """K is cut in two where M is below 8."""
    return call.run(kernel, split_k=2) if call.a.shape[0] < 8 else call.run(kernel)


def dequantised(kernel: Kernel, call: Call) -> Tensor:
    """An fp32 product of dequantised operands, which many tests take for the reference."""
    del kernel
    left = expand_scale(_matrix(call.scale_a), call.kinds[0], call.a.shape)
    weight_scale = call.scale_b.t() if call.scale_b.dim() == 2 else call.scale_b
    right = expand_scale(_matrix(weight_scale), call.kinds[1], call.b.t().shape)
    return _finish(call, (call.a.float() * left) @ (call.b.float() * right.t()))


def _matrix(scale: Tensor) -> Tensor:
    return scale.reshape(1, 1) if scale.numel() == 1 else scale


def zeroed(kernel: Kernel, call: Call) -> Tensor:
    """Nothing but zeros."""
    return torch.zeros_like(call.run(kernel))


def negated(kernel: Kernel, call: Call) -> Tensor:
    """Every sign is wrong."""
    y = call.run(kernel)
    return (-y.float()).to(y.dtype)


def minus_zero(kernel: Kernel, call: Call) -> Tensor:
    """Every zero is -0."""
    y = call.run(kernel)
    return torch.where(y.float() == 0, torch.full_like(y.float(), -0.0), y.float()).to(y.dtype)


def other_nan(kernel: Kernel, call: Call) -> Tensor:
    """NaN as torch writes it, not as the hardware does."""
    y = call.run(kernel)
    plain = torch.full_like(y.float(), torch.nan).to(y.dtype)
    if y.dtype in _FP8:
        plain = torch.full_like(y.view(torch.uint8), 0xFF).view(y.dtype)
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[y.element_size()]
    return torch.where(y.isnan(), plain.view(whole), y.view(whole)).view(y.dtype)


def bias_after_rounding(kernel: Kernel, call: Call) -> Tensor:
    """The bias is added to the rounded output."""
    bias = call.options.get("bias")
    if bias is None:
        return call.run(kernel)
    return convert(call.run(kernel, bias=None).float() + bias.float(), call.out_dtype)


def fused_bias(kernel: Kernel, call: Call) -> Tensor:
    """The last scale and the bias in one FMA."""
    bias = call.options.get("bias")
    if bias is None or call.in_blocks:
        return call.run(kernel)
    acc = _unscaled(kernel, call)
    if call.kinds[0] == "row":
        return convert(fma_fp32(acc * call.scale_b, call.scale_a, bias.float()), call.out_dtype)
    return convert(fma_fp32(acc, call.scale_a.reshape(()) * call.scale_b.reshape(()), bias.float()), call.out_dtype)


def shifted_bias(kernel: Kernel, call: Call) -> Tensor:
    """Each column has its neighbour's bias."""
    bias = call.options.get("bias")
    return call.run(kernel) if bias is None else call.run(kernel, bias=bias.roll(1))


def scales_in_other_order(kernel: Kernel, call: Call) -> Tensor:
    """The scale of a before that of b."""
    if call.in_blocks:
        return call.run(kernel)
    acc = _unscaled(kernel, call)
    return _finish(call, acc * call.scale_a * call.scale_b)


def rounded_twice(kernel: Kernel, call: Call) -> Tensor:
    """FP8 by way of bf16."""
    if call.out_dtype not in _FP8:
        return call.run(kernel)
    return round_to_fp8(call.run(kernel, out_dtype=torch.bfloat16), call.out_dtype)


def truncated(kernel: Kernel, call: Call) -> Tensor:
    """bf16 and fp16 toward zero."""
    if call.out_dtype not in (torch.bfloat16, torch.float16):
        return call.run(kernel)
    y = call.run(kernel, out_dtype=torch.float32)
    near = y.to(call.out_dtype)
    toward = torch.nextafter(near, torch.zeros_like(near))
    return canonical_nan(torch.where(near.float().abs() > y.abs(), toward, near))


def unsaturated(kernel: Kernel, call: Call) -> Tensor:
    """FP8 overflows to NaN or Inf."""
    if call.out_dtype not in _FP8:
        return call.run(kernel)
    return round_to_fp8(call.run(kernel, out_dtype=torch.float32), call.out_dtype, saturate=False)


def saturated(kernel: Kernel, call: Call) -> Tensor:
    """fp16 and bf16 do not overflow."""
    y = call.run(kernel)
    if call.out_dtype not in (torch.bfloat16, torch.float16):
        return y
    largest = torch.finfo(y.dtype).max
    return torch.where(y.isinf(), y.clamp(-largest, largest), y)
