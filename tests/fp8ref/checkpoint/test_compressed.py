"""The config of a saved checkpoint: what serving engines find there, and what they would not load."""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8ref


class Router(nn.Module):
    """No linear layer, but engines have one for it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t()


class Subclass(nn.Linear):
    pass


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        from transformers.pytorch_utils import Conv1D

        self.table = nn.Embedding(4, 8)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.router, self.subclass, self.conv = Router(), Subclass(8, 4), Conv1D(4, 8)
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def saved(folder: Path, *calls: tuple[str, list[str]]) -> dict[str, Any]:
    """Convert with each recipe what its patterns choose, save, return the quantisation config."""
    model = Model()
    for recipe, only in calls:
        scales = None if fp8ref.RECIPES[recipe].dynamic else dict.fromkeys(map(str, only), 0.5)
        fp8ref.convert_(model, recipe, only=only, calibration=scales, backend="emulate", show=False)
    fp8ref.save_checkpoint(model, folder)
    section: dict[str, Any] = json.loads((folder / "config.json").read_text())["quantization_config"]
    return section


def test_every_layer_that_an_engine_may_take_for_linear_is_ignored(tmp_path: Path) -> None:
    """Also those whose class is not Linear itself: the target Linear would mean them."""
    is_match = importlib.import_module("compressed_tensors.utils.match").is_match

    section = saved(tmp_path / "saved", ("row", ["layers.*"]))
    assert section["ignore"] == ["router", "subclass", "conv", "head"]
    targets, model = section["config_groups"]["group_0"]["targets"], Model()
    meant = [name for name, module in model.named_modules() if is_match(name, module, targets, section["ignore"])]
    assert meant == [f"layers.{layer}.{part}_proj" for layer in range(2) for part in "qkv"]


@pytest.mark.parametrize(
    ("calls", "apart"),
    [
        ([("row", ["*.q_proj", "*.k_proj", "*.v_proj"])], []),
        ([("row", ["layers.0.*"])], []),
        ([("row", ["layers.0.*"]), ("tensor", ["layers.1.*"])], []),
        ([("row", ["*.k_proj", "*.v_proj"])], ["k_proj", "v_proj"]),
        ([("row", ["*.q_proj", "*.k_proj"])], ["v_proj"]),
        ([("row", ["*.q_proj"]), ("tensor", ["*.k_proj", "*.v_proj"])], ["k_proj", "v_proj"]),
        ([("row", ["*.q_proj"]), ("row-fast", ["*.k_proj", "*.v_proj"])], []),
    ],
)
def test_layers_that_engines_fuse_are_stored_alike(
    calls: list[tuple[str, list[str]]], apart: list[str], tmp_path: Path
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        saved(tmp_path / "saved", *calls)
    said = [str(warning.message) for warning in caught if warning.category is fp8ref.CheckpointWarning]
    wanted = "layers.0.{} and {} more: is not stored as q_proj is; engines fuse the two, and refuse that"
    assert [message.partition("config.json: ")[2] for message in said] == (
        [wanted.format(apart[0], 2 * len(apart) - 1)] if apart else []
    )


def test_a_head_in_fp8_is_written_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(fp8ref.CheckpointWarning, match="head: the output head is FP8, which serving engines do not"):
        saved(tmp_path / "saved", ("row", ["head"]))


def test_the_config_has_the_dtype_of_the_model(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=136, num_hidden_layers=1, num_attention_heads=4
    )
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        model: nn.Module = LlamaForCausalLM(config)
        model.to(dtype)
        fp8ref.convert_(model, "row", skip=["lm_head"], backend="emulate", show=False)
        fp8ref.save_checkpoint(model, tmp_path / "saved", overwrite=True)
        written = json.loads((tmp_path / "saved" / "config.json").read_text())
        assert written["dtype"] == str(dtype).removeprefix("torch.")
