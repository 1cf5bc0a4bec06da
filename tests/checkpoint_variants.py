"""The ways in which test checkpoints are written: the six formats, each with its config and its scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

HEAD = "lm_head"


@dataclass(frozen=True)
class Variant:
    """One way to write a checkpoint.

    Attributes:
        config: the quantisation config.
        weight: kind of weight scales: "tensor", "channel" or "block".
        activation: "static", "token", "tensor" or "group".
        place: "quantization_config", "compression_config" or "hf_quant_config.json".
        scale: the name of the scales.
        scale_dtype: their dtype.
        scale_dims: how many dimensions they have.
        power_of_two: whether they are powers of two.
        bound: of the activations' absmax.
        warns: whether loading warns.
        input_scale: the name of static scales.
    """

    config: dict[str, Any]
    weight: str
    activation: str
    place: str = "quantization_config"
    scale: str = "weight_scale"
    scale_dtype: torch.dtype = torch.float32
    scale_dims: int = 2
    power_of_two: bool = False
    bound: float | None = None
    warns: bool = False
    input_scale: str = "input_scale"


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    common = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**common, "dynamic": False, **weights},
        "input_activations": None if inputs is None else {**common, **inputs},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": [HEAD],
        **more,
    }


def _quark(weight: dict[str, Any], inputs: dict[str, Any]) -> dict[str, Any]:
    common = {"dtype": "fp8_e4m3", "round_method": "half_even", "scale_type": "float", "symmetric": None}
    everywhere = {
        "weight": {**common, "is_dynamic": False, **weight},
        "input_tensors": {**common, **inputs},
        "output_tensors": None,
        "bias": None,
    }
    return {
        "quant_method": "quark",
        "quant_mode": "eager_mode",
        "global_quant_config": everywhere,
        "layer_quant_config": {},
        "layer_type_quant_config": {},
        "exclude": [HEAD],
        "export": {"kv_cache_group": [], "weight_format": "real_quantized", "pack_method": "reorder"},
    }


_TOKEN = {"strategy": "token", "dynamic": True}
_STATIC = {"strategy": "tensor", "dynamic": False}
_DEEPSEEK = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    "modules_to_not_convert": [HEAD],
}  # fmt: skip

VARIANTS: dict[str, Variant] = {
    "compressed-tensors static": Variant(
        _compressed({"strategy": "tensor"}, _STATIC), "tensor", "static", scale_dims=1, scale_dtype=torch.bfloat16
    ),
    "compressed-tensors channel": Variant(_compressed({"strategy": "channel"}, _TOKEN), "channel", "token"),
    "compressed-tensors channel bf16": Variant(
        _compressed({"strategy": "channel"}, _TOKEN), "channel", "token", scale_dtype=torch.bfloat16
    ),
    "compressed-tensors block": Variant(
        _compressed(
            {"strategy": "block", "block_structure": [128, 128]},
            {"strategy": "group", "group_size": 128, "dynamic": True},
        ),
        "block",
        "group",
    ),
    "compressed-tensors tensor": Variant(
        _compressed({"strategy": "tensor"}, {"strategy": "tensor", "dynamic": True}), "tensor", "tensor", scale_dims=1
    ),
    "compressed-tensors older key": Variant(
        _compressed({"strategy": "channel"}, _TOKEN, format="naive-quantized"),
        "channel",
        "token",
        place="compression_config",
    ),
    "compressed-tensors weight-only": Variant(
        _compressed({"strategy": "channel"}, None), "channel", "token", warns=True
    ),
    "AutoFP8 static": Variant(
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [HEAD]},
        "tensor", "static", scale_dims=0,
    ),
    "AutoFP8 dynamic": Variant(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": [HEAD]},
        "tensor", "token", scale_dims=1,
    ),
    "FBGEMM": Variant(
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 0.75, "modules_to_not_convert": [HEAD]},
        "channel", "token", bound=0.75,
    ),
    "DeepSeek blocks": Variant(_DEEPSEEK, "block", "group", scale="weight_scale_inv"),
    "DeepSeek blocks ue8m0": Variant(
        {**_DEEPSEEK, "scale_fmt": "ue8m0"}, "block", "group", scale="weight_scale_inv", power_of_two=True
    ),
    "DeepSeek blocks e8m0": Variant(
        {**_DEEPSEEK, "scale_fmt": "ue8m0"}, "block", "group", scale="weight_scale_inv", power_of_two=True,
        scale_dtype=torch.float8_e8m0fnu,
    ),
    "FineGrainedFP8 static": Variant(
        {"quant_method": "fp8", "activation_scheme": "static", "modules_to_not_convert": [HEAD]},
        "tensor", "static", scale="weight_scale_inv", scale_dims=0, input_scale="activation_scale",
    ),
    "FineGrainedFP8 dynamic": Variant(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": None, "ignored_layers": [HEAD]},
        "tensor", "token", scale="weight_scale_inv", scale_dims=0,
    ),
    "ModelOpt": Variant(
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": [HEAD]}},
        "tensor", "static", place="hf_quant_config.json", scale_dims=0,
    ),
    "ModelOpt per channel": Variant(
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "ignore": [HEAD]},
        "channel", "token", scale_dims=1,
    ),
    "ModelOpt blocks": Variant(
        {"quant_method": "modelopt", "quant_algo": "fp8_pb_wo", "ignore": [HEAD, "model.embed_tokens"]},
        "block", "group", scale_dims=4, warns=True,
    ),
    "Quark": Variant(
        _quark({"qscheme": "per_tensor"}, {"qscheme": "per_tensor", "is_dynamic": False}), "tensor", "static",
        scale_dims=0,
    ),
    "Quark per channel": Variant(
        _quark({"qscheme": "per_channel", "ch_axis": 0}, {"qscheme": "per_channel", "is_dynamic": True}),
        "channel", "token", scale_dims=1,
    ),
    "Quark per block": Variant(
        _quark({"qscheme": "per_block"}, {"qscheme": "per_group", "group_size": 128, "is_dynamic": True}),
        "block", "group",
    ),
}  # fmt: skip
