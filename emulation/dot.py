"""One tensor-core instruction, written to be read: the definition that every faster engine is held equal to."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8ref.emulation.bits import FP64, canonical_nan, floor_pow2, truncate_significand
from fp8ref.emulation.checks import check_same_device, check_tensor
from fp8ref.emulation.exact import exact_dot
from fp8ref.emulation.formats import FORMATS, Fp8Format, format_of
from fp8ref.emulation.subnormals import subnormals_kept
from fp8ref.emulation.units import TensorCoreUnit, unit_of

_FP32_E_MIN = -126
_FP32_SMALLEST_SUBNORMAL = 2.0**-149


@subnormals_kept()
def fused_dot_add(a: Tensor, b: Tensor, c: Tensor, unit: str | TensorCoreUnit = "sm90") -> Tensor:
    """Add one instruction's products ``sum_k a[..., k] * b[..., k]`` to ``c`` as a tensor-core unit does.

    Args:
        a: FP8 values, [..., k] with k at most the unit's ``instruction_k`` (fewer are padded with zeros).
        b: FP8 values, [..., k]; its leading dimensions broadcast with those of ``a`` and ``c``.
        c: fp32 accumulators, [...].
        unit: a name of :data:`fp8ref.UNITS` or a :class:`fp8ref.TensorCoreUnit`.

    Returns:
        fp32 accumulators, [...]. NaN is 0x7FFFFFFF; a zero sum is +0.

    Raises:
        TypeError: not a tensor with values; ``a`` or ``b`` is not FP8, or ``c`` is not fp32.
        ValueError: the last dimensions differ or exceed the instruction; leading ones do not broadcast.

    Source: the steps of :mod:`fp8ref.emulation.units`; ``tests/test_shared_golden.py`` replays public hardware
    vectors through this function.

    >>> one = torch.ones(32).to(torch.float8_e4m3fn)
    >>> fused_dot_add(one, one, torch.tensor(0.5))
    tensor(32.5000)
    """
    model = unit_of(unit)
    _check_arguments(a, b, c, model)
    format_a, format_b = FORMATS[a.dtype], FORMATS[b.dtype]
    if model.products_per_step is None:
        return exact_dot(a, b, c)
    order = torch.tensor([k for k in model.k_order if k < a.shape[-1]], dtype=torch.int64, device=a.device)
    slots = torch.tensor(
        [i for i, k in enumerate(model.k_order) if k < a.shape[-1]], dtype=torch.int64, device=a.device
    )
    accumulator = c if model.c_enters == "alignment" else torch.zeros_like(c)
    for first in range(0, model.instruction_k, model.products_per_step):
        chosen = order[(slots >= first) & (slots < first + model.products_per_step)]
        accumulator = _step(a[..., chosen], b[..., chosen], accumulator, model, format_a, format_b)
    return accumulator if model.c_enters == "alignment" else canonical_nan(accumulator + c)


def _check_arguments(a: object, b: object, c: object, unit: TensorCoreUnit) -> None:
    x, y, z = (check_tensor(tensor, name) for tensor, name in ((a, "a"), (b, "b"), (c, "c")))
    for name, operand in (("a", x), ("b", y)):
        format_of(operand.dtype, name)
        if operand.dim() < 1:
            raise ValueError(f"{name}: got shape []; give [..., k]")
    if z.dtype != torch.float32:
        raise TypeError(f"c: got {z.dtype}; an accumulator is torch.float32")
    check_same_device(y, x, "b")
    check_same_device(z, x, "c")
    products = x.shape[-1]
    limit = products if unit.products_per_step is None else unit.instruction_k
    if products != y.shape[-1] or products > limit:
        raise ValueError(
            f"a, b: got {products} and {y.shape[-1]} products; give both the same number, at most {limit} for "
            f"unit {unit.name}"
        )
    try:
        torch.broadcast_shapes(x.shape[:-1], y.shape[:-1], z.shape)
    except RuntimeError:
        raise ValueError(
            f"a, b, c: got leading dimensions {list(x.shape[:-1])}, {list(y.shape[:-1])} and {list(z.shape)}; "
            "give shapes that broadcast"
        ) from None


def _step(a: Tensor, b: Tensor, c: Tensor, unit: TensorCoreUnit, format_a: Fp8Format, format_b: Fp8Format) -> Tensor:
    """One step: at most L products and c, aligned, truncated, summed exactly, truncated to the output."""
    x, y, addend = a.double(), b.double(), c.double()
    products = x * y
    specials = _specials(products, addend)
    products = torch.where(products.isfinite(), products, 0.0)
    addend = torch.where(addend.isfinite(), addend, 0.0)

    scale_of_product = _pow2_of_operand(x, format_a) * _pow2_of_operand(y, format_b)
    scale_of_c = torch.where(addend == 0, 0.0, floor_pow2(addend, FP64).clamp(min=2.0**_FP32_E_MIN))
    largest = torch.maximum(_largest(torch.where(products == 0, 0.0, scale_of_product)), scale_of_c)
    unit_in_last_place = torch.where(largest == 0, 1.0, largest) * 2.0**-unit.fraction_bits

    aligned = (products / unit_in_last_place.unsqueeze(-1)).trunc().sum(-1) + (addend / unit_in_last_place).trunc()
    result = truncate_significand(aligned, unit.significant_bits, FP64) * unit_in_last_place
    result = torch.where(
        result.abs() < 2.0**_FP32_E_MIN,
        (result / _FP32_SMALLEST_SUBNORMAL).trunc() * _FP32_SMALLEST_SUBNORMAL,
        result,
    )
    return canonical_nan(torch.where(specials == 0, result + 0.0, specials).float())


def _pow2_of_operand(x: Tensor, fmt: Fp8Format) -> Tensor:
    """``2 ** e`` of each operand; subnormals keep the smallest normal exponent."""
    return floor_pow2(x, FP64).clamp(min=2.0**fmt.e_min)


def _specials(products: Tensor, addend: Tensor) -> Tensor:
    """0 where everything is finite, otherwise the Inf or NaN that IEEE arithmetic gives."""
    return torch.where(products.isfinite(), 0.0, products).sum(-1) + torch.where(addend.isfinite(), 0.0, addend)


def _largest(x: Tensor) -> Tensor:
    """The maximum over the last dimension, 0 where that is empty."""
    return x.amax(-1) if x.shape[-1] else x.sum(-1)
