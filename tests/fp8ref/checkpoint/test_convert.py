"""Checkpoints converted file by file: the same codes as from a model in memory, and everything else as it was."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fp8ref
from checkpoint_formats import INDEX, SINGLE, write_shards
from tiny_models import save_llama

IDS = torch.arange(5)[None]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two blocks in two shards."""
    folder = save_llama(tmp_path_factory.mktemp("source") / "llama")
    tensors = load_file(folder / SINGLE)
    (folder / SINGLE).unlink()
    write_shards(folder, tensors)
    return folder


def in_memory(source: Path, recipe: str) -> Any:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and name != "lm_head":
            parent, _, last = name.rpartition(".")
            layer = fp8ref.Fp8Linear.from_linear(module, recipe, backend="emulate")
            setattr(model.get_submodule(parent), last, layer)
    return model


@pytest.mark.parametrize("recipe", ["row", "tensor", "block"])
def test_converted_file_by_file_or_in_memory(recipe: str, source: Path, tmp_path: Path) -> None:
    done = fp8ref.convert_checkpoint(source, tmp_path / "fp8", recipe, max_shard_size=50_000, show=False)
    model = in_memory(source, recipe)
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "fp8", backend="emulate")
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, model(input_ids=IDS).logits)
    shards = json.loads((tmp_path / "fp8" / INDEX).read_text())
    assert len(set(shards["weight_map"].values())) > 2
    # One tensor alone is above the limit of a shard, and then has it for itself.
    assert all(
        size <= 50_000 or len(tensors) == 1
        for tensors in (load_file(path) for path in (tmp_path / "fp8").glob("*.safetensors"))
        for size in [sum(t.numel() * t.element_size() for t in tensors.values())]
    )
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "fp8" / name).read_bytes() == (source / name).read_bytes()
    assert [(layer.name, layer.reason) for layer in done.kept] == [
        ("model.embed_tokens", "a look-up, no product"),
        ("lm_head", "output head: engines keep it in 16 bits (skip=[] converts it)"),
    ]
    assert len(done.converted) == 14
    files = fp8ref.inspect_checkpoint(tmp_path / "fp8")
    assert files.ok
    assert done.nbytes_after == files.contents.files.nbytes()
    assert done.nbytes_saved == sum(layer.nbytes_saved for layer in done.layers)
    assert "14 of 15 linear layers converted" in str(done)


@pytest.mark.parametrize("recipe", ["row", "tensor", "block"])
def test_the_bits_do_not_depend_on_how_many_rows_are_quantised_together(
    recipe: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fp8ref.convert_checkpoint(source, tmp_path / "whole", recipe)
    monkeypatch.setattr("fp8ref.checkpoint.convert._CHUNK", 1)  # 128 rows: of 136, 8 are left
    fp8ref.convert_checkpoint(source, tmp_path / "parts", recipe)
    assert (tmp_path / "whole" / SINGLE).read_bytes() == (tmp_path / "parts" / SINGLE).read_bytes()


def test_patterns_of_skip(source: Path, tmp_path: Path) -> None:
    done = fp8ref.convert_checkpoint(
        source, tmp_path / "fp8", skip=["model.layers.1.*", "*self_attn*"], only=["*_proj"], show=False
    )
    converted = [layer.name for layer in done.converted]
    assert converted == [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up", "down")]
    config = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert sorted(config["ignore"]) == sorted(layer.name for layer in done.kept if layer.kind == "Linear")
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "fp8", backend="emulate")
    assert [name for name, m in loaded.named_modules() if isinstance(m, fp8ref.Fp8Linear)] == converted


def test_a_static_recipe_takes_the_scales_of_a_calibration(source: Path, tmp_path: Path) -> None:
    names = [name for name, module in in_memory(source, "row").named_modules() if isinstance(module, fp8ref.Fp8Linear)]
    scales = {name: 0.001 * (number + 1) for number, name in enumerate(names)}
    fp8ref.convert_checkpoint(source, tmp_path / "fp8", "tensor-static", calibration=scales, show=False)
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "fp8", backend="emulate")
    for name in names:
        assert loaded.get_submodule(name).input_scale == torch.tensor(scales[name])
        assert not loaded.get_submodule(name).recipe.dynamic


def test_the_report_is_printed(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = fp8ref.convert_checkpoint(source, tmp_path / "fp8")
    assert capsys.readouterr().out == f"{done}\n"


def test_a_head_that_is_tied_stays(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=136, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "tied")
    done = fp8ref.convert_checkpoint(tmp_path / "tied", tmp_path / "fp8", skip=[])
    reason = "its weight is that of model.embed_tokens too"
    assert [(layer.name, layer.reason) for layer in done.kept][1:] == [("lm_head", reason)]
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "fp8", backend="emulate")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_a_row_of_zeros_has_a_defined_scale_unsloth_8008_ao_1912(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "zeros")
    name = "model.layers.0.self_attn.q_proj.weight"
    path = next(path for path in (tmp_path / "zeros").glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name][3] = 0
    save_file(tensors, path)
    fp8ref.convert_checkpoint(tmp_path / "zeros", tmp_path / "fp8")
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "fp8", backend="emulate")
    layer = loaded.model.layers[0].self_attn.q_proj
    assert layer.weight_scale[3] == 1
    assert torch.equal(layer.dequantized_weight()[3], torch.zeros(48))
    with torch.no_grad():
        assert bool(loaded(input_ids=IDS).logits.isfinite().all())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_weights_that_are_not_finite_are_refused(
    value: float, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fp8ref.checkpoint.convert._CHUNK", 1)
    shutil.copytree(source, tmp_path / "bad")
    name = "model.layers.1.mlp.up_proj.weight"
    path = next(path for path in (tmp_path / "bad").glob("*.safetensors") if name in load_file(path))
    tensors = load_file(path)
    tensors[name][130, 5] = value
    save_file(tensors, path)
    with pytest.raises(fp8ref.CheckpointError) as caught:
        fp8ref.convert_checkpoint(tmp_path / "bad", tmp_path / "fp8")
    assert f"{path.name}: {name}: has {value} at [130, 5]" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad"]


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-50, 1e39, float("inf"), float("nan"), 1, None])
def test_static_scales_that_fp32_does_not_hold_are_refused(scale: Any, source: Path, tmp_path: Path) -> None:
    names = [name for name, module in in_memory(source, "row").named_modules() if isinstance(module, fp8ref.Fp8Linear)]
    scales = {**dict.fromkeys(names, 0.5), names[-1]: scale}
    with pytest.raises(ValueError, match=f"calibration: got .* for {names[-1]}; give a float"):
        fp8ref.convert_checkpoint(source, tmp_path / "fp8", "tensor-static", calibration=scales)
    assert not list(tmp_path.iterdir())


def test_a_calibration_for_another_dtype_is_refused(source: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(source)
    other = fp8ref.Recipe("tensor", "tensor", activation_dtype=torch.float8_e5m2, dynamic=False)
    calibration = fp8ref.calibrate(model, [IDS], other)
    with pytest.raises(ValueError, match=r"calibration: got scales for torch.float8_e5m2, but the recipe's"):
        fp8ref.convert_checkpoint(source, tmp_path / "fp8", "tensor-static", calibration=calibration)


def test_what_engines_do_not_load_or_nobody_reads_is_warned_of(source: Path, tmp_path: Path) -> None:
    with pytest.warns(fp8ref.CheckpointWarning, match="lm_head: the output head is FP8, which serving engines"):
        fp8ref.convert_checkpoint(source, tmp_path / "head", skip=["*.down_proj"], show=False)
    with pytest.warns(fp8ref.CheckpointWarning, match="up_proj and 1 more: is not stored as gate_proj is"):
        fp8ref.convert_checkpoint(source, tmp_path / "apart", skip=["*.up_proj", "lm_head"], show=False)
    shutil.copytree(source, tmp_path / "more")
    save_file({"a": torch.ones(1)}, tmp_path / "more" / "consolidated.safetensors")
    with pytest.warns(fp8ref.CheckpointWarning, match="consolidated.safetensors: is not named by"):
        fp8ref.convert_checkpoint(tmp_path / "more", tmp_path / "fp8", show=False)
    assert not (tmp_path / "fp8" / "consolidated.safetensors").exists()


def test_a_source_in_float64_is_refused(source: Path, tmp_path: Path) -> None:
    """No layer takes x in float64, which the rest of the model would compute."""
    shutil.copytree(source, tmp_path / "wide")
    for path in (tmp_path / "wide").glob("*.safetensors"):
        save_file({name: tensor.double() for name, tensor in load_file(path).items()}, path)
    with pytest.raises(fp8ref.CheckpointError, match=r"is F64 \[48, 48\]; \[48, 48\] in F32, BF16 or F16 belongs"):
        fp8ref.convert_checkpoint(tmp_path / "wide", tmp_path / "fp8")


def test_what_is_refused_before_anything_is_written(source: Path, tmp_path: Path) -> None:
    converted = tmp_path / "fp8"
    fp8ref.convert_checkpoint(source, converted)
    calls: list[tuple[dict[str, Any], str]] = [
        ({"recipe": "tensor-static"}, "calibration: got NoneType; a static recipe needs"),
        ({"recipe": "tensor-static", "calibration": {}}, "calibration: it has no scale for model.layers.0"),
        ({"recipe": "row", "calibration": {}}, "calibration: got one for a dynamic recipe"),
        ({"skip": ["*"]}, "has no layer to convert"),
        ({"recipe": "block-ue8m0"}, "recipe: scale_format: got ue8m0"),
        ({"skip": ["lm_head", "no_such"]}, "skip: got 'no_such', which matches none"),
        ({"skip": "lm_head"}, "skip: got 'lm_head'; give a list"),
        ({"source": tmp_path / "absent"}, "source: no such folder"),
        ({"target": tmp_path / "absent" / "new"}, "target: cannot write .* does not exist; make it first"),
        ({"source": converted}, "config.json: has a quantization_config: it is quantised already"),
        ({"target": converted}, "target: .* is there already and not empty"),
        ({"target": source, "overwrite": True}, "target: got the source"),
        ({"max_shard_size": -1}, "max_shard_size: got -1"),
    ]
    for changes, words in calls:
        arguments: dict[str, Any] = {"source": source, "target": tmp_path / "new", **changes}
        with pytest.raises((TypeError, ValueError), match=words):
            fp8ref.convert_checkpoint(**arguments)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fp8"]
