"""From real numbers to FP8 codes with scales, and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8ref.emulation.bits import FP32
from fp8ref.emulation.checks import check_same_device, check_tensor
from fp8ref.emulation.formats import Fp8Format, format_of
from fp8ref.emulation.rounding import round_to_fp8
from fp8ref.emulation.scales import BLOCK, Scaling, blocks, check_scaling, scale_shape
from fp8ref.emulation.subnormals import subnormals_kept

ScaleFormat = Literal["float32", "ue8m0"]

SMALLEST_SCALE = 2.0**-126
"""The smallest scale that :func:`quantize` computes: fp32's smallest normal number, safe to divide by anywhere."""

_INPUTS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class ScaledTensor:
    """FP8 codes and the fp32 scales that multiply them.

    Attributes:
        data: FP8 [rows, K], or [K, rows] after :meth:`t`.
        scale: fp32; ``[]``, ``[rows, 1]``, ``[rows, ceil(K/128)]`` or ``[ceil(rows/128), ceil(K/128)]``; transposed
            with ``data``.
        scaling: the kind: "tensor", "row" (one scale for each row of K values), "1x128" or "128x128".
        transposed: whether K is the first dimension, as the right operand of a product has it.
    """

    data: Tensor
    scale: Tensor
    scaling: Scaling
    transposed: bool = False

    @property
    def shape(self) -> torch.Size:
        """Shape of ``data``."""
        return self.data.shape

    def t(self) -> ScaledTensor:
        """Return the transpose, a view: a weight quantised as [N, K] becomes the ``b`` [K, N] of a product.

        >>> quantize(torch.ones(2, 3), torch.float8_e4m3fn, scaling="row").t().scale.shape
        torch.Size([1, 2])
        """
        return ScaledTensor(self.data.t(), self.scale.t(), self.scaling, not self.transposed)


@torch.no_grad()
@subnormals_kept()
def quantize(
    x: Tensor,
    dtype: torch.dtype = torch.float8_e4m3fn,
    *,
    scaling: Scaling = "tensor",
    scale: Tensor | float | None = None,
    scale_format: ScaleFormat = "float32",
    absmax_bound: float | None = None,
) -> ScaledTensor:
    """Quantise ``x`` to FP8: ``scale = absmax / max`` of the format in fp32, ``code = round(x / scale)``, saturating.

    Args:
        x: [rows, K] float64, float32, bfloat16 or float16, any strides. "tensor", "row" and "1x128" take any number of
            dimensions with K the last.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scaling: which elements share a scale: all, each row along K, each run of 128 along K, each 128 by 128 square.
            Tails shorter than 128 have a scale of their own.
        scale: static fp32 scales of the shape that ``scaling`` has (a float for "tensor"), finite and above zero.
        scale_format: "ue8m0" rounds each computed scale up to a power of two (kept as fp32), as an exponent-only scale
            format needs; up, so that nothing saturates.
        absmax_bound: clips each absmax before a scale is made of it (FBGEMM's ``activation_scale_ub``); values above
            saturate. Above zero; taken as the nearest fp32.

    Returns:
        A :class:`ScaledTensor` with contiguous codes, detached.

        A group whose absmax is zero has scale 1; a scale below 2**-126 becomes 2**-126. NaN and Inf take no part in the
        absmax: they stay visible as NaN (Inf in e5m2) in their own place, and the rest of their group is quantised as
        if they were zero.

    Raises:
        TypeError: a wrong dtype of ``x``, ``dtype`` or ``scale``.
        ValueError: an unknown ``scaling`` or ``scale_format``; a scale of the wrong shape, or not finite and above 0; a
            bound that is not, or beside a given scale.

    >>> q = quantize(torch.tensor([[1.0, -2.0], [0.0, 0.0]]), torch.float8_e4m3fn, scaling="row")
    >>> q.data.float(), q.scale.flatten()
    (tensor([[ 224., -448.],
            [   0.,    0.]]), tensor([0.0045, 1.0000]))
    """
    fmt = format_of(dtype)
    check_tensor(x, "x")
    if x.dtype not in _INPUTS:
        raise TypeError(f"x: got {x.dtype}; give one of {list(_INPUTS)}")
    scaling = check_scaling(scaling)
    check_scale_format(scale_format)
    check_absmax_bound(absmax_bound, "absmax_bound")
    if x.dim() < 1 or (scaling == "128x128" and x.dim() != 2):
        raise ValueError(f"x: got shape {list(x.shape)}; {scaling!r} scales take [rows, K]")
    wide = x if x.dtype == torch.float64 else x.float()
    if scale is None:
        scales = _computed_scale(wide, fmt, scaling, scale_format, absmax_bound)
    else:
        if scale_format != "float32":
            raise ValueError(f"scale_format: got {scale_format!r} beside a given scale; round the scale yourself")
        if absmax_bound is not None:
            raise ValueError(f"absmax_bound: got {absmax_bound} beside a given scale; leave one of them out")
        scales = _given_scale(scale, x, scaling)
    quotient = wide / expand_scale(scales, scaling, wide.shape).to(wide.dtype)
    codes = round_to_fp8(quotient, dtype)
    infinite = x.isinf()
    if fmt.inf_code is None:
        bits = codes.view(torch.uint8).masked_fill(infinite, fmt.nan_code)
    else:
        inf = torch.where(x < 0, fmt.inf_code | 0x80, fmt.inf_code).to(torch.uint8)
        bits = torch.where(infinite, inf, codes.view(torch.uint8))
    return ScaledTensor(bits.contiguous().view(dtype), scales, scaling)


@subnormals_kept()
def dequantize(q: ScaledTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``data * scale``, multiplied in fp32 and then converted to ``dtype``.

    Args:
        q: what :func:`quantize` returned, or its transpose.
        dtype: a floating-point dtype of at least 16 bits.

    Raises:
        TypeError: ``q`` is not a ScaledTensor, or ``dtype`` is not one of float64, float32, bfloat16, float16.

    >>> dequantize(quantize(torch.tensor([[1.0, -2.0]]), torch.float8_e4m3fn))
    tensor([[ 1., -2.]])
    """
    if not isinstance(q, ScaledTensor):
        raise TypeError(f"q: got {type(q).__name__}; give what fp8ref.quantize returned")
    if dtype not in _INPUTS:
        raise TypeError(f"dtype: got {dtype}; give one of {list(_INPUTS)}")
    if q.transposed:
        return dequantize(q.t(), dtype).t()
    return (q.data.float() * expand_scale(q.scale, q.scaling, q.data.shape)).to(dtype)


def expand_scale(scale: Tensor, scaling: Scaling, shape: torch.Size) -> Tensor:
    """Spread the scales of an operand [..., K] over its elements: a tensor that broadcasts with ``shape``.

    >>> expand_scale(torch.tensor([[2.0, 3.0]]), "1x128", torch.Size([1, 130]))[0, 126:]
    tensor([2., 2., 3., 3.])
    """
    if scaling in ("1x128", "128x128"):
        scale = scale.repeat_interleave(BLOCK, dim=-1)[..., : shape[-1]]
    if scaling == "128x128":
        scale = scale.repeat_interleave(BLOCK, dim=0)[: shape[0]]
    return scale


def check_scale_format(scale_format: object) -> None:
    """Raise ValueError unless ``scale_format`` is a known one."""
    if scale_format not in ("float32", "ue8m0"):
        raise ValueError(f'scale_format: got {scale_format!r}; give "float32" or "ue8m0"')


def check_absmax_bound(bound: object, argument: str) -> None:
    """Raise unless ``bound`` is None or a number above zero that is finite in fp32, and not zero there."""
    if bound is None:
        return
    if isinstance(bound, bool) or not isinstance(bound, float | int):
        raise TypeError(f"{argument}: got {bound!r}; give a float, or None for no bound")
    if not (SMALLEST_SCALE <= bound <= torch.finfo(torch.float32).max):
        raise ValueError(f"{argument}: got {bound}; give a finite bound of at least 2**-126, or None")


def _computed_scale(
    x: Tensor, fmt: Fp8Format, scaling: Scaling, scale_format: ScaleFormat, absmax_bound: float | None
) -> Tensor:
    magnitude = torch.where(x.isfinite(), x.abs(), 0.0)
    absmax = _absmax(magnitude, scaling).clamp(max=torch.finfo(torch.float32).max).float()
    if absmax_bound is not None:
        absmax = torch.minimum(absmax, torch.full_like(absmax, absmax_bound))
    scale = absmax / torch.full_like(absmax, fmt.max)
    if scale_format == "ue8m0":
        bits = scale.view(FP32.int_dtype)
        scale = ((bits + (1 << FP32.mantissa_bits) - 1) & FP32.exponent_mask).view(torch.float32)
    return torch.where(absmax == 0, 1.0, scale.clamp(min=SMALLEST_SCALE))


def _absmax(magnitude: Tensor, scaling: Scaling) -> Tensor:
    """The largest magnitude of each scale group, in the shape of the scales."""
    if magnitude.numel() == 0:
        return magnitude.new_zeros(scale_shape(scaling, *magnitude.shape))
    if scaling == "tensor":
        return magnitude.amax()
    if scaling == "row":
        return magnitude.amax(-1, keepdim=True)
    k, rows = magnitude.shape[-1], magnitude.shape[0]
    along_k = pad(magnitude, (0, -k % BLOCK)).reshape(*magnitude.shape[:-1], blocks(k), BLOCK).amax(-1)
    if scaling == "1x128":
        return along_k
    return pad(along_k, (0, 0, 0, -rows % BLOCK)).reshape(blocks(rows), BLOCK, blocks(k)).amax(1)


def _given_scale(scale: Tensor | float, x: Tensor, scaling: Scaling) -> Tensor:
    """Check a static scale: fp32, of the exact shape, finite and above zero."""
    if isinstance(scale, float | int) and not isinstance(scale, bool):
        scale = torch.tensor(scale, dtype=torch.float32, device=x.device)
    scale = check_tensor(scale, "scale")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale: got {scale.dtype}; scales are torch.float32, convert with .float()")
    check_same_device(scale, x, "scale", "x")
    wanted = scale_shape(scaling, *x.shape)
    if scaling == "tensor" and scale.numel() == 1:
        scale = scale.reshape(())
    if list(scale.shape) != wanted:
        raise ValueError(f"scale: got shape {list(scale.shape)}; {scaling!r} scales of {list(x.shape)} are {wanted}")
    good = scale.isfinite() & (scale > 0)
    if not bool(good.all()):
        bad = scale[~good].flatten()[0].item()
        raise ValueError(f"scale: got {bad} among its values; give finite scales above zero")
    return scale
