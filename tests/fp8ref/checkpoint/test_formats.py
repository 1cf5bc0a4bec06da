"""Every format: what is loaded equals what the dequantisation rule says, and runs as the checkpoint declares."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8ref
from checkpoint_formats import Written, put_oracle, write
from checkpoint_variants import VARIANTS
from tiny_models import save_llama

IDS = torch.arange(7)[None]
NOTHING: dict[str, Any] = {}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("source") / "llama")


def source_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def checkpoints(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    model = source_model(llama)
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]
    config = json.loads((llama / "config.json").read_text())
    folder = tmp_path_factory.mktemp("checkpoints")
    state = model.state_dict()
    return {
        name: write(folder / str(number), variant, state, linears, config)
        for number, (name, variant) in enumerate(VARIANTS.items())
    }


def load(written: Written, model: nn.Module | None = None, **options: Any) -> Any:
    """Load, and require a warning exactly where one belongs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loaded = fp8ref.load_checkpoint(written.folder, model, backend="emulate", **options)
    ours = [warning for warning in caught if issubclass(warning.category, fp8ref.CheckpointWarning)]
    assert bool(ours) == written.variant.warns, [str(warning.message) for warning in ours]
    return loaded


@pytest.mark.parametrize("name", VARIANTS)
def test_loaded_weights_are_code_times_scale(name: str, checkpoints: dict[str, Written]) -> None:
    written = checkpoints[name]
    model = load(written)
    layers = {path: module for path, module in model.named_modules() if isinstance(module, fp8ref.Fp8Linear)}
    assert layers.keys() == written.weights.keys()
    for layer, module in layers.items():
        assert torch.equal(module.dequantized_weight(), written.weights[layer]), layer
    state = model.state_dict()
    for path, tensor in written.tensors.items():
        if path.rpartition(".")[0] not in layers:
            assert torch.equal(state[path], tensor)
            assert state[path].dtype == tensor.dtype
    assert not model.training
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("name", VARIANTS)
def test_the_model_computes_what_the_oracle_computes(name: str, checkpoints: dict[str, Written], llama: Path) -> None:
    written = checkpoints[name]
    reference = put_oracle(source_model(llama), written)
    with torch.no_grad():
        assert torch.equal(load(written)(input_ids=IDS).logits, reference(input_ids=IDS).logits)


@pytest.mark.parametrize("name", VARIANTS)
def test_static_runs_static_and_dynamic_runs_dynamic(name: str, checkpoints: dict[str, Written]) -> None:
    written = checkpoints[name]
    for layer, module in load(written).named_modules():
        if isinstance(module, fp8ref.Fp8Linear):
            assert module.recipe.dynamic == (written.variant.activation != "static")
            if layer in written.inputs:
                assert module.input_scale is not None
                assert module.input_scale.item() == written.inputs[layer]


@pytest.mark.parametrize("name", VARIANTS)
def test_inspection_names_the_format_and_finds_nothing_wrong(name: str, checkpoints: dict[str, Written]) -> None:
    found = fp8ref.inspect_checkpoint(checkpoints[name].folder, progress=False)
    assert found.ok
    assert found.format is not None
    assert name.startswith(found.format)
    assert found.contents.layers.keys() == checkpoints[name].weights.keys()


def test_into_a_model_with_values(checkpoints: dict[str, Written], llama: Path) -> None:
    written = checkpoints["compressed-tensors channel"]
    expected = load(written)(input_ids=IDS).logits
    real = source_model(llama)
    assert load(written, real) is real
    assert torch.equal(real(input_ids=IDS).logits, expected)
    again = load(written, real)  # a second time, over FP8 layers
    assert torch.equal(again(input_ids=IDS).logits, expected)


def test_into_a_model_on_meta(checkpoints: dict[str, Written], llama: Path) -> None:
    from accelerate import init_empty_weights
    from transformers import AutoConfig, AutoModelForCausalLM

    written = checkpoints["compressed-tensors channel"]
    config = AutoConfig.from_pretrained(llama)
    with init_empty_weights(include_buffers=False):
        empty: Any = AutoModelForCausalLM.from_config(config).eval()
    assert torch.equal(load(written, empty)(input_ids=IDS).logits, load(written)(input_ids=IDS).logits)
    with torch.device("meta"):
        hollow: Any = AutoModelForCausalLM.from_config(config)
    with pytest.raises(fp8ref.CheckpointError, match=r"inv_freq: is a buffer on meta that checkpoints do not hold"):
        load(written, hollow)


def test_dtype_converts_what_is_not_fp8(checkpoints: dict[str, Written]) -> None:
    written = checkpoints["AutoFP8 dynamic"]
    model = load(written, dtype=torch.bfloat16)
    weight = written.tensors["model.norm.weight"]
    assert torch.equal(model.model.norm.weight, weight.bfloat16())
    assert model(input_ids=IDS).logits.dtype == torch.bfloat16


def test_a_narrower_model_is_refused_unless_told(checkpoints: dict[str, Written], llama: Path) -> None:
    written = checkpoints["AutoFP8 dynamic"]
    model = source_model(llama).bfloat16()
    with pytest.raises(fp8ref.CheckpointError, match=r"lm_head.weight: is F32, .* values would change; give dtype="):
        load(written, model)
    load(written, model, dtype=torch.bfloat16)


def test_bf16_into_fp32_changes_no_value(checkpoints: dict[str, Written], llama: Path, tmp_path: Path) -> None:
    written = checkpoints["FBGEMM"]
    state = {
        name: tensor.bfloat16() if name.rpartition(".")[0] not in written.codes else tensor
        for name, tensor in source_model(llama).state_dict().items()
    }
    config = json.loads((llama / "config.json").read_text())
    narrow = write(tmp_path / "bf16", written.variant, state, list(written.codes), config)
    model = load(narrow, source_model(llama))
    assert model.model.norm.weight.dtype == torch.float32
    assert torch.equal(model.lm_head.weight, state["lm_head.weight"].float())
    assert load(narrow).lm_head.weight.dtype == torch.bfloat16


def test_a_bar_is_shown_where_somebody_looks(
    checkpoints: dict[str, Written], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load(checkpoints["FBGEMM"])
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    load(checkpoints["FBGEMM"])
    assert "loading" in capsys.readouterr().err
    load(checkpoints["FBGEMM"], progress=False)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("argument", "value", "message"),
    [
        ("model", "gpt2", "model: got str"),
        ("backend", "triton", "backend: got 'triton'"),
        ("dtype", torch.float8_e4m3fn, "dtype: got torch.float8_e4m3fn"),
        ("fused", {"qkv_proj": "q_proj"}, "fused: got {'qkv_proj': 'q_proj'}"),
        ("device", "meta", "device: got meta"),
        ("fused", ["qkv_proj"], "fused: got "),
    ],
)
def test_wrong_arguments(argument: str, value: object, message: str, checkpoints: dict[str, Written]) -> None:
    arguments: dict[str, Any] = {argument: value}
    with pytest.raises((TypeError, ValueError), match=message):
        fp8ref.load_checkpoint(checkpoints["FBGEMM"].folder, **arguments)
