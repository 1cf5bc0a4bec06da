"""What becomes of a model's own state in loading: every place is filled, and nothing is lost on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8ref
from checkpoint_corruption import refused, rewrite
from checkpoint_formats import small_model, snapshot, write_small

VARIANT = "AutoFP8 dynamic"


def loaded(folder: Path, model: nn.Module | None = None, **options: Any) -> Any:
    return fp8ref.load_checkpoint(folder, model or small_model(7), backend="emulate", **options)


def test_a_layer_that_is_fp8_already_does_not_keep_its_weight(tmp_path: Path) -> None:
    """Its codes are in no list of parameters, and would otherwise stay without a word."""

    class Larger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            small = small_model()
            self.block, self.norm, self.lm_head = small.block, small.norm, small.lm_head
            self.extra = nn.Linear(8, 8, bias=False)

    write_small(tmp_path, VARIANT)
    model = Larger()
    fp8ref.convert_(model, "row", only=["extra"], backend="emulate", show=False)
    refused(tmp_path, model, "extra.weight: is missing; the model has an Fp8Linear there")
    rewrite(tmp_path, extra__weight=torch.ones(8, 8))
    refused(tmp_path, model, "extra.weight: is F32 [8, 8]; extra in the model is an Fp8Linear: give a model that has a")


def test_a_model_that_is_a_layer_itself(tmp_path: Path) -> None:
    layer = fp8ref.Fp8Linear.from_linear(nn.Linear(8, 4), "row")
    with pytest.raises(TypeError, match="model: got an Fp8Linear, which has no name; give the model that it is in"):
        fp8ref.save_checkpoint(layer, tmp_path / "layer")
    assert not list(tmp_path.iterdir())
    write_small(tmp_path, VARIANT)
    names = {"weight": torch.ones(4, 8).to(torch.float8_e4m3fn), "weight_scale": torch.ones(1), "bias": torch.ones(4)}
    gone = {f"block__{name}__{part}": None for name in ("up", "down") for part in ("weight", "weight_scale")}
    rewrite(tmp_path, **gone, block__up__bias=None, **{f"__{name}": tensor for name, tensor in names.items()})
    refused(tmp_path, nn.Linear(8, 4), ".weight: is F8_E4M3 [4, 8]; F8_E4M3 is read for the weight [N, K]")


@pytest.mark.parametrize("name", ["norm.weight", "block.up.bias"])
@pytest.mark.parametrize("value", [65520.0, -1e6, 3.4e38])
def test_values_above_the_range_of_dtype_are_refused(name: str, value: float, tmp_path: Path) -> None:
    written = write_small(tmp_path, VARIANT)
    tensor = written.tensors[name].clone()
    tensor[3] = value
    rewrite(tmp_path, **{name.replace(".", "__"): tensor})
    model = small_model()
    before = snapshot(model)
    with pytest.raises(
        fp8ref.CheckpointError, match=rf"{name}: has .*, which torch.float16 does not reach; give a wider"
    ):
        loaded(tmp_path, model, dtype=torch.float16)
    assert snapshot(model) == before
    assert loaded(tmp_path, dtype=torch.float32).get_parameter(name)[3] == torch.tensor(value)
    tensor[3] = 65504.0  # the largest; and what is infinite already is nobody's loss
    tensor[4] = float("inf")
    rewrite(tmp_path, **{name.replace(".", "__"): tensor})
    assert loaded(tmp_path, dtype=torch.float16).get_parameter(name)[3:5].tolist() == [65504.0, float("inf")]


@pytest.mark.parametrize("trained", [True, False])
def test_a_bias_is_trained_or_not_as_before(trained: bool, tmp_path: Path) -> None:
    write_small(tmp_path, VARIANT)
    model = small_model().requires_grad_(trained)
    loaded(tmp_path, model)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == dict.fromkeys(
        ["block.up.bias", "norm.weight", "norm.bias", "lm_head.weight"], trained
    )


class Counting(nn.Module):
    def __init__(self, ids: Tensor) -> None:
        super().__init__()
        small = small_model()
        self.block, self.norm, self.lm_head = small.block, small.norm, small.lm_head
        self.register_buffer("ids", ids)


@pytest.mark.parametrize(
    ("given", "mine", "fits"),
    [
        (torch.int32, torch.int64, True),
        (torch.uint8, torch.int16, True),
        (torch.int64, torch.int32, False),
        (torch.uint8, torch.int8, False),
    ],
)
def test_whole_numbers_of_another_width(given: torch.dtype, mine: torch.dtype, fits: bool, tmp_path: Path) -> None:
    write_small(tmp_path, VARIANT)
    rewrite(tmp_path, ids=torch.arange(5).to(given))
    model = Counting(torch.zeros(5).to(mine))
    if fits:
        ids = loaded(tmp_path, model).ids
        assert ids.dtype == mine
        assert ids.tolist() == [0, 1, 2, 3, 4]
    else:
        refused(tmp_path, model, "ids in the model is", "values would change; give the model that dtype")
