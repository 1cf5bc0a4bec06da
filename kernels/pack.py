"""A weight made ready once: FP8 codes in the layout that the kernels read, checked scales, known cost."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.checks import check_same_device, check_tensor
from fp8ref.emulation.formats import format_of
from fp8ref.emulation.quantize import ScaledTensor, quantize
from fp8ref.emulation.scales import Scaling, check_scaling, scale_shape

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight [N, K] in FP8, ready for every batch size.

    Attributes:
        codes: FP8 [N rounded up to 16, K rounded up to ``padded_k``], the padding zero.
        scale: fp32, contiguous. "row": [N rounded up to 16] (padding 1); "1x128": [N, ceil(K/128)]; "128x128":
            [ceil(N/128), ceil(K/128)].
        scaling: "row", "1x128" or "128x128".
        n: rows of the weight.
        k: columns of the weight.
        one_scale: whether it was packed with "tensor" scaling: all rows of ``scale`` are then equal.
    """

    codes: Tensor
    scale: Tensor
    scaling: Scaling
    n: int
    k: int
    one_scale: bool = False

    @cached_property
    def signature(self) -> tuple[object, ...]:
        """What a compiled kernel depends on: hashable, and the same for every weight of one kind and size."""
        index = self.codes.get_device()
        return (
            self.n,
            self.k,
            self.scaling,
            self.one_scale,
            self.codes.dtype,
            index,
            self.codes.data_ptr() % 16,
            self.scale.get_device(),
            self.scale.data_ptr() % 16,
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what holds for this copy alone; show codes as integers, since torch pickles no FP8 tensors."""
        state = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**state, "codes": self.codes.view(torch.uint8), "dtype": self.codes.dtype}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`__getstate__`."""
        dtype = state.pop("dtype")
        self.__dict__.update(state, codes=state["codes"].view(dtype))

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K) of the weight, without padding."""
        return self.n, self.k

    @property
    def nbytes(self) -> int:
        """Bytes of the codes and scales, padding included."""
        return self.codes.numel() + 4 * self.scale.numel()

    @property
    def padding_nbytes(self) -> int:
        """Bytes that the padding of N and K costs: ``nbytes`` less what [N, K] codes and their scales need."""
        unpadded = self.n if self.scaling == "row" else self.scale.numel()
        return self.nbytes - self.n * self.k - 4 * unpadded

    def as_scaled(self) -> ScaledTensor:
        """Return the weight as a :class:`fp8ref.ScaledTensor` [N, K], views without the padding.

        ``emulate_matmul(quantize(x, ...), w.as_scaled().t())`` is the reference of ``scaled_linear(x, w)``.

        >>> pack_weight(torch.ones(3, 5)).as_scaled().shape
        torch.Size([3, 5])
        """
        scale = self.scale[: self.n].view(self.n, 1) if self.scaling == "row" else self.scale
        return ScaledTensor(self.codes[: self.n, : self.k], scale, self.scaling)

    def to(self, device: torch.device | str) -> PackedWeight:
        """Return the weight on another device.

        Raises:
            TypeError: ``device`` is not one: codes and scales keep their dtypes.

        >>> pack_weight(torch.ones(3, 5)).to("cpu").shape
        (3, 5)
        """
        if not isinstance(device, torch.device | str):
            raise TypeError(f"device: got {device!r}; give a torch.device or its name (the dtypes are fixed)")
        return PackedWeight(self.codes.to(device), self.scale.to(device), self.scaling, self.n, self.k, self.one_scale)


def padded_k(k: int) -> int:
    """Return the row length in bytes that a packed weight has: a multiple of 16, of 64 where that costs at most 6 %.

    Loads of 16 bytes need the first; whole 64-byte memory bursts, measured 6 % faster at K = 4099, the second.

    >>> padded_k(1), padded_k(100), padded_k(4099)
    (16, 112, 4160)
    """
    step = 64 if k >= 1024 else 16
    return -(-k // step) * step


def pack_weight(
    weight: Tensor,
    scaling: Scaling = "row",
    scale: Tensor | None = None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
) -> PackedWeight:
    """Quantise (or take) a weight, pad it and check it: once, when a model is loaded.

    Args:
        weight: [N, K], any strides: float32, bfloat16 or float16 to be quantised as :func:`fp8ref.quantize` does; or
            FP8 codes, which need ``scale``.
        scaling: "row" (one scale for each of the N rows), "tensor" (one scale, kept once for each row, so the products
            are those of row-wise scales), "1x128" or "128x128" blocks.
        scale: fp32 scales of FP8 codes, finite and above zero: one element for "tensor", [N, 1] for "row",
            [N, ceil(K/128)] or [ceil(N/128), ceil(K/128)] for the blocks. With a float weight: static scales.
        dtype: the FP8 dtype to quantise a float weight to.

    Returns:
        A :class:`PackedWeight` on the weight's device; it shares no memory with ``weight``.

    Raises:
        TypeError, ValueError: the message names the argument, what it got and the fix.

    Nothing about the weight is touched again by :func:`fp8ref.scaled_linear`: no cast, copy or padding.

    >>> w = pack_weight(torch.randn(33, 100))
    >>> w.shape, w.codes.shape, w.padding_nbytes
    ((33, 100), torch.Size([48, 112]), 2136)
    """
    check_tensor(weight, "weight")
    scaling = check_scaling(scaling)
    if weight.dim() != 2:
        raise ValueError(f"weight: got shape {list(weight.shape)}; give [N, K]")
    if weight.dtype in _FLOATS:
        format_of(dtype)
        quantised = quantize(weight.detach(), dtype, scaling=scaling, scale=scale)
        codes, scales = quantised.data, quantised.scale.detach()
    else:
        codes = weight.detach()
        format_of(codes.dtype, "weight")
        if dtype not in (torch.float8_e4m3fn, codes.dtype):  # the default says nothing
            raise TypeError(f"dtype: got {dtype} for a weight of {codes.dtype}, which is FP8 already; leave it out")
        scales = _checked_scale(scale, codes, scaling).detach()
    n, k = codes.shape
    packed = torch.zeros(-(-n // 16) * 16, padded_k(k), dtype=torch.uint8, device=codes.device)
    packed[:n, :k] = codes.view(torch.uint8)
    kind: Scaling = "row" if scaling == "tensor" else scaling
    if kind == "row":
        padded = torch.ones(packed.shape[0], dtype=torch.float32, device=codes.device)
        padded[:n] = scales.reshape(-1)
        scales = padded
    scales = scales.clone(memory_format=torch.contiguous_format)
    return PackedWeight(packed.view(codes.dtype), scales, kind, n, k, scaling == "tensor")


def _checked_scale(scale: Tensor | None, codes: Tensor, scaling: Scaling) -> Tensor:
    """Check the scales that come with FP8 codes: fp32, the exact shape, finite, above zero."""
    if scale is None:
        raise TypeError("scale: missing; an FP8 weight needs the scales that its codes were made with")
    check_tensor(scale, "scale")
    if scale.dtype != torch.float32:
        raise TypeError(f"scale: got {scale.dtype}; scales are torch.float32, convert with .float()")
    check_same_device(scale, codes, "scale", "weight")
    wanted = scale_shape(scaling, codes.shape[0], codes.shape[1])
    if list(scale.shape) != wanted and not (scaling == "tensor" and scale.numel() == 1):
        raise ValueError(
            f"scale: got shape {list(scale.shape)}; {scaling!r} scales of {list(codes.shape)} are {wanted}"
        )
    good = scale.isfinite() & (scale > 0)
    if not bool(good.all()):
        raise ValueError(
            f"scale: got {scale[~good].flatten()[0].item()} among its values; give finite scales above zero"
        )
    return scale
