"""Recipes as a compressed-tensors ``quantization_config``: the format that checkpoints are written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fp8ref.recipes import Recipe

_STRATEGIES = {"tensor": "tensor", "row": "channel", "128x128": "block"}


def unwritable(recipe: Recipe) -> str | None:
    """Why compressed-tensors cannot say what a recipe does, or None where it can.

    >>> unwritable(Recipe("1x128", "1x128"))
    'weight_scaling: got 1x128; compressed-tensors checkpoints have tensor, row or 128x128 scales here'
    """
    if recipe.weight_scaling not in _STRATEGIES:
        return (
            f"weight_scaling: got {recipe.weight_scaling}; compressed-tensors checkpoints have tensor, row or 128x128 "
            "scales here"
        )
    if {recipe.weight_dtype, recipe.activation_dtype} != {torch.float8_e4m3fn}:
        return f"dtypes: got {recipe.weight_dtype} and {recipe.activation_dtype}; compressed-tensors means e4m3 by FP8"
    if recipe.scale_format != "float32":
        return f"scale_format: got {recipe.scale_format}; compressed-tensors cannot ask for it: give float32"
    if recipe.activation_bound is not None:
        return f"activation_bound: got {recipe.activation_bound}; compressed-tensors has no such bound: give None"
    return None


def quantization_config(layers: Mapping[str, Recipe], ignore: Sequence[str]) -> dict[str, Any]:
    """The config of a model whose layers have these recipes.

    Args:
        layers: the recipe of each layer by name; one group for each way to store a layer.
        ignore: names of the linear layers that stay as they are.

    >>> config = quantization_config({"a": Recipe(), "b": Recipe()}, ["lm_head"])
    >>> config["config_groups"]["group_0"]["targets"], config["ignore"]
    (['Linear'], ['lm_head'])
    """
    groups: list[tuple[dict[str, Any], list[str]]] = []
    for name, recipe in layers.items():
        scheme = _group(recipe)
        names = next((names for known, names in groups if known == scheme), None)
        if names is None:
            groups.append((scheme, [name]))
        else:
            names.append(name)
    single = len(groups) == 1
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            f"group_{number}": {"targets": ["Linear"] if single else names, **scheme}
            for number, (scheme, names) in enumerate(groups)
        },
        "ignore": list(ignore),
        "kv_cache_scheme": None,
    }


def _group(recipe: Recipe) -> dict[str, Any]:
    """The weights and activations of a recipe as quantisation arguments."""
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    strategy = _STRATEGIES[recipe.weight_scaling]
    weights = {**common, "strategy": strategy, "dynamic": False}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
        inputs = {**common, "strategy": "group", "group_size": 128, "dynamic": True}
    else:
        kind = "tensor" if recipe.activation_scaling == "tensor" else "token"
        inputs = {**common, "strategy": kind, "dynamic": recipe.dynamic}
    return {"weights": weights, "input_activations": inputs, "output_activations": None}


def layer_tensors(
    name: str, codes: Tensor, scale: Tensor, *, bias: Tensor | None = None, input_scale: Tensor | None = None
) -> dict[str, Tensor]:
    """The tensors of a layer under the names that they have in a checkpoint.

    Args:
        name: of the layer.
        codes: of its weight, FP8 [N, K].
        scale: of its weight, fp32 in the shape that :func:`fp8ref.quantize` gives it.
        bias: [N] or None.
        input_scale: one element, of a static recipe.
    """
    tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scale.reshape(1) if scale.dim() == 0 else scale}
    if input_scale is not None:
        tensors[f"{name}.input_scale"] = input_scale.reshape(1)
    if bias is not None:
        tensors[f"{name}.bias"] = bias
    return tensors
