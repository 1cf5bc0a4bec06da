"""Recipes as a compressed-tensors ``quantization_config``: the format that checkpoints are written in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fp8ref.checkpoint.findings import Finding
from fp8ref.checkpoint.fused import FUSED
from fp8ref.linear import Fp8Linear
from fp8ref.recipes import Recipe
from fp8ref.selection import Found
from fp8ref.sources import is_linear

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
        ignore: names of the layers that stay as they are, as :func:`left_out` finds them.

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


def left_out(layers: Sequence[Found], done: Mapping[str, object]) -> list[str]:
    """Names of the modules outside FP8 that engines may run as linear layers, and must know of.

    So not only ``Linear``: the target of that name also means its subclasses, and engines have linear layers of their
    own for GPT-2's ``Conv1D`` and the routers of experts.

    >>> from fp8ref.selection import survey
    >>> left_out(survey(nn.Sequential(nn.Embedding(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))), {"1": Recipe()})
    ['2']
    """
    names: list[str] = []
    for found in layers:
        weight = found.module._parameters.get("weight")  # noqa: SLF001 - where a Parameter is
        matrix = is_linear(found.module) or (weight is not None and weight.dim() == 2)
        if matrix and found.name not in done and not isinstance(found.module, Fp8Linear | nn.Embedding):
            names += found.names
    return names


def engine_findings(layers: Mapping[str, Recipe], ignore: Sequence[str], head: str | None) -> list[Finding]:
    """Warnings about what serving engines do not load: an output head in FP8, unlike layers where they fuse them.

    >>> print(*engine_findings({"mlp.gate_proj": Recipe()}, ["mlp.up_proj"], None))
    config.json: mlp.up_proj: is not stored as gate_proj is; engines fuse the two, and refuse that
    """
    findings = []
    if head is not None and head in layers:
        message = "the output head is FP8, which serving engines do not load; keep it in 16 bits with skip="
        findings.append(Finding("warning", "config.json", head, message))
    ways = {**dict.fromkeys(ignore), **{name: _group(recipe) for name, recipe in layers.items()}}
    for parent in dict.fromkeys(name.rpartition(".")[0] for name in layers):
        for parts in FUSED.values():
            there = [part for part in parts if f"{parent}.{part}".lstrip(".") in ways]
            for part in there[1:]:
                name, first = (f"{parent}.{end}".lstrip(".") for end in (part, there[0]))
                if ways[name] != ways[first]:
                    message = f"is not stored as {there[0]} is; engines fuse the two, and refuse that"
                    findings.append(Finding("warning", "config.json", name, message))
    return findings


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
