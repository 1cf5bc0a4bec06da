"""What the tensors of a linear layer in FP8 must be: an error names the argument, what it got and the fix."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fp8ref.emulation.checks import BIAS_DTYPES, check_same_device, check_tensor
from fp8ref.emulation.formats import format_of
from fp8ref.kernels.pack import PackedWeight
from fp8ref.recipes import Recipe


def check_fits(packed: object, recipe: Recipe) -> None:
    """Raise unless a packed weight has the scaling and the dtype of the recipe, and no NaN (or Inf) among its codes."""
    if not isinstance(packed, PackedWeight):
        raise TypeError(f"packed: got {type(packed).__name__}; give what fp8ref.pack_weight returned")
    kind = "tensor" if packed.one_scale else packed.scaling
    if kind != recipe.weight_scaling:
        raise ValueError(
            f"packed: got a weight with {kind!r} scales for a recipe with {recipe.weight_scaling!r}; pack it with "
            f"scaling={recipe.weight_scaling!r}, or give the recipe weight_scaling={kind!r}"
        )
    if packed.codes.dtype != recipe.weight_dtype:
        raise ValueError(
            f"packed: got {packed.codes.dtype} codes for a recipe with {recipe.weight_dtype}; give the same"
        )
    if has_special_codes(packed.codes):
        raise ValueError("packed: its codes hold NaN or Inf; a layer of it would be wrong from the start")
    check_powers(packed.scale, recipe, "packed: its scale")


def check_powers(scale: Tensor, recipe: Recipe, argument: str) -> None:
    """Raise ValueError where a recipe's scales are powers of two and these are not."""
    if recipe.scale_format == "ue8m0" and bool((scale.frexp()[0] != 0.5).any()):
        raise ValueError(
            f'{argument}: it holds a value that is no power of two, for a recipe with scale_format="ue8m0"'
        )


def has_special_codes(codes: Tensor) -> bool:
    """Whether any FP8 code is NaN or Inf.

    >>> has_special_codes(torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn))
    True
    """
    magnitude = codes.view(torch.uint8) & 0x7F
    return bool((magnitude > format_of(codes.dtype).max_code).any())


def checked_input_scale(scale: object, recipe: Recipe, device: torch.device) -> Tensor | None:
    """Return a static scale as fp32 []: there for a static recipe, and only there; finite and above zero."""
    if recipe.dynamic:
        if scale is not None:
            raise ValueError("input_scale: got one for a dynamic recipe; leave it out, or give one with dynamic=False")
        return None
    if scale is None:
        raise ValueError("input_scale: missing; a static recipe needs one, from fp8ref.calibrate or a checkpoint")
    if isinstance(scale, float):
        scale = torch.tensor(scale, dtype=torch.float32, device=device)
    scale = check_tensor(scale, "input_scale").detach()
    if scale.dtype != torch.float32 or scale.numel() != 1:
        raise ValueError(f"input_scale: got {scale.dtype} {list(scale.shape)}; give one float32 element")
    if scale.device != device:
        raise ValueError(
            f"input_scale: got a tensor on {scale.device} while the weight is on {device}; move one of them"
        )
    if not (bool(scale.isfinite()) and bool(scale > 0)):
        raise ValueError(f"input_scale: got {scale.item()}; give a finite scale above zero")
    check_powers(scale, recipe, "input_scale")
    return scale.reshape(())


def checked_bias(bias: object, packed: PackedWeight) -> nn.Parameter | None:
    """Return a bias as a contiguous Parameter [N]; a Parameter stays the same object where it is that already."""
    if bias is None:
        return None
    bias = check_tensor(bias, "bias")
    if bias.dtype not in BIAS_DTYPES:
        raise TypeError(f"bias: got {bias.dtype}; give one of {list(BIAS_DTYPES)}")
    if list(bias.shape) != [packed.n]:
        raise ValueError(f"bias: got shape {list(bias.shape)}; give [{packed.n}], one value for each row of the weight")
    check_same_device(bias, packed.codes, "bias", "the weight")
    if isinstance(bias, nn.Parameter) and bias.is_contiguous():
        return bias
    return nn.Parameter(bias.detach().contiguous(), requires_grad=bias.requires_grad)


def check_like(given: object, mine: Tensor | None, name: str) -> None:
    """Raise unless ``given`` is a float tensor of the shape of ``mine``."""
    given = check_tensor(given, name)
    assert mine is not None
    if given.shape != mine.shape or given.dtype not in (torch.float64, *BIAS_DTYPES):
        raise ValueError(f"{name}: got {given.dtype} {list(given.shape)}; this layer takes floats {list(mine.shape)}")
