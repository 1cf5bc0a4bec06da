"""Formats that are not read are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8ref
from checkpoint_corruption import reconfigure, refused
from checkpoint_formats import small_model, write_small
from checkpoint_variants import VARIANTS


def hooked() -> nn.Module:
    model = small_model()
    model.block.up.register_forward_hook(lambda *_: None)
    return model


def subclassed() -> nn.Module:
    class Lora(nn.Linear):
        pass

    model = small_model()
    model.block.up = Lora(48, 136)
    return model


def another() -> nn.Module:
    model = small_model()
    setattr(model.block, "up", nn.Bilinear(48, 1, 136))  # noqa: B010 - no nn.Linear, as the annotation has it
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (hooked, "it has hooks"),
        (subclassed, "Lora is a subclass of Linear"),
        (another, "a Bilinear, no linear layer"),
    ],
)
def test_modules_that_cannot_be_replaced(make: Callable[[], nn.Module], words: str, tmp_path: Path) -> None:
    write_small(tmp_path, "AutoFP8 dynamic")
    refused(tmp_path, make(), "block.up.weight", "block.up in the model cannot be replaced", words)


UNKNOWN = ["gptq", "awq", "bitsandbytes", "mxfp4", "nvfp4", "torchao", "hqq", "eetq", "quanto", "something-new", None]


@pytest.mark.parametrize("method", UNKNOWN)
def test_unknown_formats_are_refused_by_name_mlx_lm_1865(method: str | None, tmp_path: Path) -> None:
    write_small(tmp_path, "AutoFP8 dynamic")
    reconfigure(tmp_path, quant_method=method)
    refused(tmp_path, small_model(), "config.json", f"quant_method: got {method!r}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_bits": 4, "type": "int"}, "got int4"),
        ({"num_bits": 4}, "got float4"),
        ({"type": "int"}, "got int8"),
        ({"strategy": "group", "group_size": 128}, "strategy: got 'group'"),
        ({"strategy": "tensor_group", "group_size": 16}, "strategy: got 'tensor_group'"),
        ({"symmetric": False}, "symmetric: got False"),
        ({"dynamic": True}, "dynamic: got True"),
        ({"strategy": "block", "block_structure": [64, 64]}, "block_structure: got [64, 64]"),
        ({"strategy": "block"}, "block_structure: got None"),
    ],
)
def test_floats_read_as_int4_mlx_lm_1865(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    groups = json.loads(json.dumps(VARIANTS["compressed-tensors channel"].config["config_groups"]))
    groups["group_0"]["weights"].update(change)
    reconfigure(tmp_path, config_groups=groups)
    refused(tmp_path, small_model(), "config.json", words)


@pytest.mark.parametrize("name", ["pack-quantized", "int-quantized", "nvfp4-pack-quantized", "marlin-24", "dense"])
def test_other_formats_of_compressed_tensors_are_refused_by_name(name: str, tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    reconfigure(tmp_path, format=name)
    refused(tmp_path, small_model(), "config.json", f"format: got {name!r}")


@pytest.mark.parametrize("size", [[64, 64], [1, 128], [128], "128x128"])
def test_other_block_sizes_are_refused(size: Any, tmp_path: Path) -> None:
    write_small(tmp_path, "DeepSeek blocks")
    reconfigure(tmp_path, weight_block_size=size)
    refused(tmp_path, small_model(), f"weight_block_size: got {size!r}")


def test_static_activations_of_blocks_are_refused(tmp_path: Path) -> None:
    write_small(tmp_path, "DeepSeek blocks")
    reconfigure(tmp_path, activation_scheme="static")
    refused(tmp_path, small_model(), "activation_scheme: got 'static'; 'dynamic' is read beside block scales")


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_AWQ", "INT8_SQ", "MXFP8", None])
def test_other_algorithms_of_modelopt_are_refused(algorithm: str | None, tmp_path: Path) -> None:
    write_small(tmp_path, "ModelOpt per channel")
    reconfigure(tmp_path, quant_algo=algorithm)
    refused(tmp_path, small_model(), f"quant_algo: got {algorithm!r}")


@pytest.mark.parametrize(("dtype", "qscheme"), [("int8", "per_tensor"), ("mx", "per_group"), ("fp8_e4m3", "per_group")])
def test_other_schemes_of_quark_are_refused(dtype: str, qscheme: str, tmp_path: Path) -> None:
    write_small(tmp_path, "Quark")
    config = json.loads(json.dumps(VARIANTS["Quark"].config["global_quant_config"]))
    config["weight"].update(dtype=dtype, qscheme=qscheme)
    reconfigure(tmp_path, global_quant_config=config)
    refused(tmp_path, small_model(), "global_quant_config.weight", f"got {dtype if dtype != 'fp8_e4m3' else qscheme!r}")


GROUP = "config_groups.group_0"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights are not read"),
        ({"transform_config": {"config_groups": {"R1": {"type": "hadamard"}}}}, "transforms such as rotations"),
        ({"config_groups": {}}, "config_groups: got {}"),
        ({"config_groups": {"group_0": {"weights": {}}}}, f"{GROUP}.weights: got int8"),
    ],
)
def test_what_compressed_tensors_can_say_beside_fp8(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    reconfigure(tmp_path, **change)
    refused(tmp_path, small_model(), "config.json", words)


@pytest.mark.parametrize("key", ["output_activations", "input_activations"])
def test_activations_that_are_not_read(key: str, tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    groups = json.loads(json.dumps(VARIANTS["compressed-tensors channel"].config["config_groups"]))
    groups["group_0"][key] = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
    reconfigure(tmp_path, config_groups=groups)
    refused(tmp_path, small_model(), "config.json", f"{GROUP}.{key}")


def test_sections_that_say_nothing_are_no_obstacle(tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    reconfigure(tmp_path, sparsity_config={}, transform_config={"config_groups": {}})
    fp8ref.load_checkpoint(tmp_path, small_model(), backend="emulate")


def test_two_places_that_disagree(tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = {"quant_method": "gptq"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, small_model(), "config.json: quantization_config and compression_config disagree")


def test_mixed_precision_of_modelopt(tmp_path: Path) -> None:
    written = write_small(tmp_path, "ModelOpt per channel")
    layers = {name: {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"} for name in written.codes}
    reconfigure(tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    fp8ref.load_checkpoint(tmp_path, small_model(), backend="emulate")
    layers["block.down"] = {"quant_algo": "NVFP4"}
    reconfigure(tmp_path, quantized_layers=layers)
    refused(tmp_path, small_model(), "quantized_layers.block.down.quant_algo: got 'NVFP4'")


def test_layers_of_quark_with_schemes_of_their_own(tmp_path: Path) -> None:
    """As Quark writes them for the KV cache: the projection's own scheme, with outputs that the cache keeps."""
    written = write_small(tmp_path, "Quark per channel")
    config = VARIANTS["Quark per channel"].config
    everywhere = config["global_quant_config"]
    cached = {**everywhere, "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}}
    export = {**config["export"], "kv_cache_group": ["*up"]}
    reconfigure(tmp_path, layer_quant_config={"*up": cached}, export=export)
    with pytest.warns(fp8ref.CheckpointWarning, match="kv_cache_group .* stays unquantised"):
        loaded: Any = fp8ref.load_checkpoint(tmp_path, small_model(), backend="emulate")
    assert torch.equal(loaded.block.up.dequantized_weight(), written.weights["block.up"])
    reconfigure(tmp_path, layer_quant_config={"*down": cached})
    refused(tmp_path, small_model(), "layer_quant_config['*down'].output_tensors", "only those of the KV cache")
