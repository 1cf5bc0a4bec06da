"""Recipes: how a linear layer is computed in FP8, as frozen data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8ref.emulation.checks import check_bool
from fp8ref.emulation.formats import format_of
from fp8ref.emulation.quantize import ScaleFormat, check_absmax_bound, check_scale_format
from fp8ref.emulation.scales import Scaling, check_scaling

_PLAIN = ("tensor", "row")
_BLOCKS = ("1x128", "128x128")


@dataclass(frozen=True)
class Recipe:
    """How ``x @ weight.t()`` is computed in FP8: formats, scales, accumulation.

    Attributes:
        weight_scaling: which elements of the weight [N, K] share a scale, as in :func:`fp8ref.quantize`: "tensor",
            "row" (one for each output channel), "1x128" or "128x128" blocks.
        activation_scaling: the same for x [..., K]: "tensor" or "row" (one for each token) beside "tensor" and "row"
            weights; "1x128" beside blocks.
        weight_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        activation_dtype: the same.
        dynamic: True takes the scales of x from its own values, anew in every call; False from a calibration, one scale
            for all of x, so ``activation_scaling`` is then "tensor".
        scale_format: "float32", or "ue8m0" for scales that are powers of two, rounded up; of both operands.
        use_fast_accum: False promotes the accumulator to fp32 every 128 of K; True never does. Blocks always promote.
        activation_bound: the absmax of x is clipped here before a scale is made of it (FBGEMM's
            ``activation_scale_ub``), and larger values saturate; dynamic scales only.

    Raises:
        TypeError, ValueError: the message names the field, what it got and the fix.

    >>> Recipe(weight_scaling="128x128", activation_scaling="1x128") == RECIPES["block"]
    True
    """

    weight_scaling: Scaling = "row"
    activation_scaling: Scaling = "row"
    weight_dtype: torch.dtype = torch.float8_e4m3fn
    activation_dtype: torch.dtype = torch.float8_e4m3fn
    dynamic: bool = True
    scale_format: ScaleFormat = "float32"
    use_fast_accum: bool = False
    activation_bound: float | None = None

    def __post_init__(self) -> None:
        """Check each field, then that they fit together."""
        check_scaling(self.weight_scaling, "weight_scaling")
        check_scaling(self.activation_scaling, "activation_scaling")
        format_of(self.weight_dtype, "weight_dtype")
        format_of(self.activation_dtype, "activation_dtype")
        check_scale_format(self.scale_format)
        check_bool(self.dynamic, "dynamic")
        check_bool(self.use_fast_accum, "use_fast_accum")
        check_absmax_bound(self.activation_bound, "activation_bound")
        wanted = _PLAIN if self.weight_scaling in _PLAIN else ("1x128",)
        if self.activation_scaling not in wanted:
            raise ValueError(
                f"activation_scaling: got {self.activation_scaling!r} beside {self.weight_scaling!r} weights; "
                f"give one of {list(wanted)}"
            )
        if self.use_fast_accum and self.weight_scaling in _BLOCKS:
            raise ValueError("use_fast_accum: got True with block scales, which are always promoted; give False")
        if not self.dynamic and self.activation_scaling != "tensor":
            raise ValueError(
                f"activation_scaling: got {self.activation_scaling!r} with dynamic=False; a static scale is one for "
                'all of x: give "tensor"'
            )
        if not self.dynamic and self.activation_bound is not None:
            raise ValueError(
                f"activation_bound: got {self.activation_bound} with dynamic=False; a static scale bounds x already: "
                "leave it out"
            )

    def in_words(self) -> str:
        """Return both operands' formats and scales in words.

        >>> RECIPES["block-ue8m0"].in_words()
        'weight e4m3 128x128 ue8m0, x e4m3 1x128 dynamic ue8m0'
        """
        power = " ue8m0" if self.scale_format == "ue8m0" else ""
        weight = f"weight {format_of(self.weight_dtype).name} {self.weight_scaling}{power}"
        return f"{weight}, x {self.activation_in_words()}{', fast accumulation' if self.use_fast_accum else ''}"

    def activation_in_words(self) -> str:
        """Return the format and the scales of x in words.

        >>> RECIPES["row-bounded"].activation_in_words()
        'e4m3 row dynamic, absmax up to 1200'
        """
        words = f"{format_of(self.activation_dtype).name} {self.activation_scaling}"
        words += " dynamic" if self.dynamic else " static"
        if self.scale_format == "ue8m0":
            words += " ue8m0"
        return words if self.activation_bound is None else f"{words}, absmax up to {self.activation_bound:g}"


RECIPES: dict[str, Recipe] = {
    "row": Recipe(),
    "row-fast": Recipe(use_fast_accum=True),
    "row-bounded": Recipe(activation_bound=1200.0),
    "row-static": Recipe("row", "tensor", dynamic=False),
    "tensor": Recipe("tensor", "tensor"),
    "tensor-fast": Recipe("tensor", "tensor", use_fast_accum=True),
    "tensor-static": Recipe("tensor", "tensor", dynamic=False),
    "block": Recipe("128x128", "1x128"),
    "block-ue8m0": Recipe("128x128", "1x128", scale_format="ue8m0"),
}
"""Recipes by name. ``row``: a scale for each token and each output channel; ``tensor``: one for each operand;
``block``: activations 1x128, weights 128x128. ``static``: the activations' scale comes from a calibration; ``bounded``:
their absmax is clipped at FBGEMM's usual bound. Where nothing is said: e4m3, fp32 scales, dynamic, accurate
accumulation."""


def recipe_of(recipe: Recipe | str) -> Recipe:
    """Return a recipe, given itself or its name in :data:`RECIPES`.

    Raises:
        ValueError: no such name.
        TypeError: something else, a recipe of ``fp8ref report`` too: it also fixes the unit, and a layer runs on
            whatever its device has.

    >>> recipe_of("row").dynamic
    True
    """
    if isinstance(recipe, str):
        if recipe not in RECIPES:
            raise ValueError(f"recipe: got {recipe!r}; give one of {list(RECIPES)}, or a fp8ref.Recipe")
        return RECIPES[recipe]
    if type(recipe) is not Recipe:
        raise TypeError(f"recipe: got {type(recipe).__name__}; give a fp8ref.Recipe or one of {list(RECIPES)}")
    return recipe
