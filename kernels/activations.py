"""How activations become FP8, as data, and what the arguments of the linear layer must be."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8ref.emulation.checks import BIAS_DTYPES, check_bool, check_out_dtype, check_tensor
from fp8ref.emulation.formats import format_of
from fp8ref.emulation.quantize import ScaledTensor, ScaleFormat, check_absmax_bound, check_scale_format, quantize
from fp8ref.emulation.scales import Scaling
from fp8ref.kernels.pack import PackedWeight

Backend = Literal["auto", "emulate"]

INPUTS = (torch.bfloat16, torch.float16, torch.float32)
"""The dtypes of activations that are quantised."""

NO_GRADIENT = "input_scale: got a tensor that requires a gradient, but it has none: give it with .detach()"
"""What is said of it where gradients are wanted."""


class Activations(NamedTuple):
    """How x [M, K] becomes codes and scales; hashable.

    Attributes:
        scaling: "row", "tensor" or "1x128".
        dtype: the FP8 dtype.
        scale_format: "float32" or "ue8m0", as in :func:`fp8ref.quantize`.
        bound: clips each absmax, None for no bound.
    """

    scaling: Scaling = "row"
    dtype: torch.dtype = torch.float8_e4m3fn
    scale_format: ScaleFormat = "float32"
    bound: float | None = None

    @property
    def constants(self) -> dict[str, Any]:
        """What the kernels are compiled for; a bound of 0 is none."""
        bound = 0.0 if self.bound is None else torch.tensor(self.bound, dtype=torch.float32, device="cpu").item()
        return {"FORMAT_MAX": format_of(self.dtype).max, "UE8M0": self.scale_format == "ue8m0", "BOUND": bound}

    def reference(self, x: Tensor, input_scale: Tensor | None) -> ScaledTensor:
        """Quantise x [M, K] with the oracle; a static scale holds for all of x."""
        scale = input_scale
        if scale is not None and self.scaling == "row":
            scale = scale.reshape(1, 1).expand(x.shape[0], 1).contiguous()
        options: dict[str, Any] = {}
        if scale is None:
            options = {"scale_format": self.scale_format, "absmax_bound": self.bound}
        return quantize(x, self.dtype, scaling=self.scaling, scale=scale, **options)


def activations_of(
    w: PackedWeight, scaling: object, dtype: object, scale_format: object, bound: object, input_scale: object
) -> Activations:
    """Check how x is to be quantised; ``scaling`` None is what fits the weight."""
    wanted: tuple[Scaling, ...] = ("row", "tensor") if w.scaling == "row" else ("1x128",)
    found = [known for known in wanted if scaling in (None, known)]
    if not found:
        raise ValueError(
            f"activation_scaling: got {scaling!r} beside a weight with {w.scaling} scales; give one of {list(wanted)}"
        )
    check_scale_format(scale_format)
    check_absmax_bound(bound, "activation_bound")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"activation_dtype: got {dtype!r}; give torch.float8_e4m3fn or torch.float8_e5m2")
    format_of(dtype, "activation_dtype")
    if input_scale is not None:
        if scale_format != "float32":
            raise ValueError(f"scale_format: got {scale_format!r} beside input_scale; round the scale yourself")
        if bound is not None:
            raise ValueError(f"activation_bound: got {bound} beside input_scale, which bounds x already; leave it out")
    return Activations(found[0], dtype, "ue8m0" if scale_format == "ue8m0" else "float32", bound)  # type: ignore[arg-type]


def checked_backend(backend: object) -> Backend:
    """Return ``backend`` if it is a known one; raise ValueError where it is not."""
    if backend == "auto":
        return "auto"
    if backend == "emulate":
        return "emulate"
    raise ValueError(f'backend: got {backend!r}; give "auto" or "emulate"')


def _check_no_tangent(tensor: Tensor, argument: str) -> None:
    """Raise inside forward-mode differentiation if there is a derivative to lose."""
    if forward_ad.unpack_dual(tensor).tangent is not None:
        raise ValueError(f"{argument}: got a dual tensor; scaled_linear has no forward derivative: use backward()")


def check_arguments(
    x: object,
    w: object,
    bias: object,
    input_scale: object,
    use_fast_accum: object,
    out_dtype: object,
    batch_invariant: object,
    backend: object,
) -> None:
    """Raise unless the arguments of :func:`fp8ref.scaled_linear` fit together; devices are checked elsewhere."""
    checked_backend(backend)
    x = check_tensor(x, "x")
    for argument, tensor in (("x", x), ("bias", bias), ("input_scale", input_scale)):
        if forward_ad._current_level >= 0 and isinstance(tensor, Tensor):  # noqa: SLF001 - it has no public name
            _check_no_tangent(tensor, argument)
    if not isinstance(w, PackedWeight):
        raise TypeError(f"w: got {type(w).__name__}; give what fp8ref.pack_weight returned")
    if x.dtype not in INPUTS:
        raise TypeError(f"x: got {x.dtype}; give one of {list(INPUTS)} (fp8ref.scaled_matmul takes FP8 operands)")
    if x.dim() < 1 or x.shape[-1] != w.k:
        raise ValueError(f"x: got shape {list(x.shape)}; the weight is [{w.n}, {w.k}]: give [..., {w.k}]")
    if bias is not None:
        bias = check_tensor(bias, "bias")
        if bias.dtype not in BIAS_DTYPES:
            raise TypeError(f"bias: got {bias.dtype}; give one of {list(BIAS_DTYPES)}")
        if list(bias.shape) != [w.n] or not bias.is_contiguous():
            raise ValueError(f"bias: got shape {list(bias.shape)}, strides {bias.stride()}; give a contiguous [{w.n}]")
    if input_scale is not None:
        input_scale = check_tensor(input_scale, "input_scale")
        if input_scale.requires_grad and torch.is_grad_enabled():
            raise ValueError(NO_GRADIENT)
        if input_scale.dtype != torch.float32 or input_scale.numel() != 1:
            raise ValueError(
                f"input_scale: got {input_scale.dtype} {list(input_scale.shape)}; give one float32 element"
            )
        if w.scaling != "row":
            raise ValueError(f"input_scale: got one beside a weight with {w.scaling} scales; leave it out")
    if use_fast_accum is True and w.scaling != "row":
        raise ValueError("use_fast_accum: got True with block scales, which are always promoted; pass False")
    check_bool(use_fast_accum, "use_fast_accum")
    check_bool(batch_invariant, "batch_invariant")
    if out_dtype is not None:
        check_out_dtype(out_dtype)
