"""Fused layers: several scalars become scales for each row, and no value changes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8ref
from checkpoint_formats import Written, snapshot, write, write_shards
from checkpoint_variants import VARIANTS

HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 48}
ROWS = (48, 24, 24)


class Separate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(48, rows) for rows in ROWS)
        self.gate_proj, self.up_proj = nn.Linear(48, 136), nn.Linear(48, 136)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj = nn.Linear(48, sum(ROWS))
        self.gate_up_proj = nn.Linear(48, 272)


PARTS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


def separate(folder: Path, variant: str) -> tuple[Written, Separate]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Separate()
    layers = [name for parts in PARTS.values() for name in parts]
    written = write(folder, VARIANTS[variant], model.state_dict(), layers, HEADS)
    if written.inputs:  # one x, one scale
        for layer in layers:
            written.tensors[f"{layer}.input_scale"] = torch.tensor(0.002)
        write_shards(folder, written.tensors)
    return written, model


@pytest.mark.parametrize("variant", ["AutoFP8 dynamic", "AutoFP8 static", "compressed-tensors channel", "FBGEMM"])
def test_separate_layers_fill_a_fused_module(variant: str, tmp_path: Path) -> None:
    written, model = separate(tmp_path, variant)
    fused: Any = fp8ref.load_checkpoint(tmp_path, Fused(), backend="emulate")
    apart: Any = fp8ref.load_checkpoint(tmp_path, model, backend="emulate")
    x = torch.linspace(-1, 1, 2 * 48).reshape(2, 48)
    for name, parts in PARTS.items():
        layer = fused.get_submodule(name)
        assert torch.equal(layer.dequantized_weight(), torch.cat([written.weights[part] for part in parts]))
        assert torch.equal(layer.bias, torch.cat([written.tensors[f"{part}.bias"] for part in parts]))
        if variant != "AutoFP8 static":  # there, one scale of x times one of the weight round once less than rows do
            assert torch.equal(layer(x), torch.cat([apart.get_submodule(part)(x) for part in parts], -1))


def test_blocks_that_end_inside_a_layer_cannot_be_fused(tmp_path: Path) -> None:
    separate(tmp_path, "DeepSeek blocks")
    model = Fused()
    before = snapshot(model)
    with pytest.raises(fp8ref.CheckpointError, match=r"q_proj.weight: cannot be fused: its 48 rows end inside a block"):
        fp8ref.load_checkpoint(tmp_path, model)
    assert snapshot(model) == before


def test_blocks_that_end_with_a_layer_are_fused(tmp_path: Path) -> None:
    class Source(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = nn.Linear(130, 128, bias=False), nn.Linear(130, 140, bias=False)

    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate_up_proj = nn.Linear(130, 268, bias=False)

    written = write(tmp_path, VARIANTS["DeepSeek blocks"], Source().state_dict(), ["gate_proj", "up_proj"], {})
    layer: Any = fp8ref.load_checkpoint(tmp_path, Target(), backend="emulate").gate_up_proj
    assert torch.equal(layer.dequantized_weight(), torch.cat([*written.weights.values()]))
    assert layer.recipe.weight_scaling == "128x128"


def test_static_scales_that_differ_cannot_be_fused(tmp_path: Path) -> None:
    written, _ = separate(tmp_path, "AutoFP8 static")
    write_shards(tmp_path, {**written.tensors, "k_proj.input_scale": torch.tensor(0.003)})
    with pytest.raises(fp8ref.CheckpointError, match=r"q_proj.weight: has another input_scale than the layers"):
        fp8ref.load_checkpoint(tmp_path, Fused())


def test_a_layer_fills_one_module_only(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(48, 272), nn.Linear(48, 272)

    separate(tmp_path, "AutoFP8 dynamic")
    model, parts = Twice(), PARTS["gate_up_proj"]
    before = snapshot(model)
    with pytest.raises(fp8ref.CheckpointError, match=r"gate_proj.weight: fills both first and second of the model"):
        fp8ref.load_checkpoint(tmp_path, model, fused={"first": parts, "second": parts})
    assert snapshot(model) == before


def fused_checkpoint(folder: Path, scales: dict[str, Tensor], inputs: Tensor | None = None) -> dict[str, Tensor]:
    """A checkpoint of a fused model with a scalar for each of the layers that were fused."""
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, rows in (("qkv_proj", sum(ROWS)), ("gate_up_proj", 272)):
        tensors[f"{name}.weight"] = torch.randn(rows, 48, generator=generator).to(torch.float8_e4m3fn)
        tensors[f"{name}.bias"] = torch.randn(rows, generator=generator)
        tensors[f"{name}.weight_scale"] = scales[name]
        if inputs is not None:
            tensors[f"{name}.input_scale"] = inputs.clone()
    folder.mkdir(exist_ok=True)
    scheme = "dynamic" if inputs is None else "static"
    quantization = {"quant_method": "fp8", "activation_scheme": scheme}
    (folder / "config.json").write_text(json.dumps({**HEADS, "quantization_config": quantization}))
    write_shards(folder, tensors)
    return tensors


SCALARS = {"qkv_proj": torch.tensor([0.5, 0.3, 0.7]), "gate_up_proj": torch.tensor([[0.1], [0.9]])}


@pytest.mark.parametrize("inputs", [None, torch.tensor(0.01)])
def test_several_scalars_of_a_fused_layer_expand_to_rows(inputs: Tensor | None, tmp_path: Path) -> None:
    tensors = fused_checkpoint(tmp_path, SCALARS, inputs)
    model: Any = fp8ref.load_checkpoint(tmp_path, Fused(), backend="emulate")
    for name, sizes in (("qkv_proj", ROWS), ("gate_up_proj", (136, 136))):
        rows = torch.cat([scale.expand(size) for scale, size in zip(SCALARS[name].flatten(), sizes, strict=True)])
        expected = tensors[f"{name}.weight"].float() * rows[:, None]
        assert torch.equal(model.get_submodule(name).dequantized_weight(), expected)
        assert model.get_submodule(name).recipe.weight_scaling == "row"


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("qkv_proj", torch.ones(2)),
        ("qkv_proj", torch.ones(4)),
        ("gate_up_proj", torch.ones(3)),
        ("gate_up_proj", torch.ones(1, 2)),
    ],
)
def test_an_unexpected_number_of_scalars_is_refused_vllm_20076(name: str, scale: Tensor, tmp_path: Path) -> None:
    fused_checkpoint(tmp_path, {**SCALARS, name: scale})
    with pytest.raises(fp8ref.CheckpointError, match=rf"{name}.weight_scale: is F32 .* belongs"):
        fp8ref.load_checkpoint(tmp_path, Fused())


def test_scalars_of_unknown_rows_are_refused(tmp_path: Path) -> None:
    fused_checkpoint(tmp_path, SCALARS)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "num_key_value_heads": 4}))
    with pytest.raises(fp8ref.CheckpointError, match=r"qkv_proj.weight_scale: is F32 \[3\]"):
        fp8ref.load_checkpoint(tmp_path, Fused())
