"""Saved checkpoints: read back with the same bits, by us and by compressed-tensors; all of them or nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fp8ref
from checkpoint_formats import INDEX, SINGLE, SMALL_LAYERS, small_model
from tiny_models import save_llama

RECIPES = [
    "row", "row-fast", "row-static", "tensor", "tensor-static", "block",
    fp8ref.Recipe("tensor", "row"), fp8ref.Recipe("row", "tensor"),
]  # fmt: skip
X = torch.linspace(-2, 2, 3 * 48).reshape(3, 48)


def convert(model: Any, recipe: fp8ref.Recipe | str, names: list[str]) -> Any:
    """Put FP8 layers into a model, static scales included."""
    dynamic = (fp8ref.RECIPES[recipe] if isinstance(recipe, str) else recipe).dynamic
    for number, name in enumerate(names):
        parent, _, last = name.rpartition(".")
        scale = None if dynamic else 0.01 * (number + 1)
        made = fp8ref.Fp8Linear.from_linear(model.get_submodule(name), recipe, input_scale=scale, backend="emulate")
        setattr(model.get_submodule(parent), last, made)
    return model


def linears(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "lm_head"]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("source") / "llama")


def read(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_a_saved_model_is_the_same_model(recipe: fp8ref.Recipe | str, tmp_path: Path) -> None:
    model = convert(small_model(), recipe, SMALL_LAYERS)
    fp8ref.save_checkpoint(model, tmp_path / "saved")
    loaded = fp8ref.load_checkpoint(tmp_path / "saved", small_model(5), backend="emulate")
    before, after = model.state_dict(), loaded.state_dict()
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        assert torch.equal(after[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)), name
    if recipe != "row-fast":  # how it is accumulated is no part of the format
        assert torch.equal(loaded(X), model(X))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_compressed_tensors_itself_reads_the_same_weights(
    recipe: fp8ref.Recipe | str, llama: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    source = read(llama)
    model = convert(source, recipe, linears(source))
    fp8ref.save_checkpoint(model, tmp_path / "saved", max_shard_size=60_000)
    assert (tmp_path / "saved" / INDEX).is_file()
    peer: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "saved", dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    layers = {name: module for name, module in model.named_modules() if isinstance(module, fp8ref.Fp8Linear)}
    assert len(layers) == 14
    for name, layer in layers.items():
        assert torch.equal(peer.get_submodule(name).weight, layer.dequantized_weight()), name


@pytest.mark.parametrize("recipe", ["row", "tensor-static", "block"])
def test_compressed_tensors_reads_codes_scales_and_scheme(recipe: str, llama: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    source = read(llama)
    model = convert(source, recipe, linears(source))
    fp8ref.save_checkpoint(model, tmp_path / "saved")
    peer: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    for name, layer in model.named_modules():
        if not isinstance(layer, fp8ref.Fp8Linear):
            continue
        other = peer.get_submodule(name)
        assert torch.equal(other.weight.view(torch.uint8), layer.weight.contiguous().view(torch.uint8))
        assert torch.equal(other.weight_scale.flatten(), layer.weight_scale.flatten())
        inputs = other.quantization_scheme.input_activations
        assert inputs.dynamic == layer.recipe.dynamic
        assert inputs.strategy == {"row": "token", "tensor-static": "tensor", "block": "group"}[recipe]
        if layer.input_scale is not None:
            assert other.input_scale.item() == layer.input_scale.item()
    assert type(peer.lm_head.weight) is nn.Parameter
    assert torch.equal(peer.lm_head.weight, model.lm_head.weight)


def test_a_transformers_model_comes_back_whole(llama: Path, tmp_path: Path) -> None:
    source = read(llama)
    model = convert(source, "row", linears(source))
    fp8ref.save_checkpoint(model, tmp_path / "saved", max_shard_size=60_000)
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "saved", backend="emulate")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)
    generated = loaded.generate(ids, max_new_tokens=3, do_sample=False)
    assert torch.equal(generated, model.generate(ids, max_new_tokens=3, do_sample=False))


def test_tied_weights_are_written_once_and_tied_again(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=48, intermediate_size=136, num_hidden_layers=1, num_attention_heads=4,
        tie_word_embeddings=True,
    )  # fmt: skip
    tied = LlamaForCausalLM(config).eval()
    model = convert(tied, "row", linears(tied))
    fp8ref.save_checkpoint(model, tmp_path / "saved")
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "saved", backend="emulate")
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    names = fp8ref.inspect_checkpoint(tmp_path / "saved").contents.plain
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    # Both in the file, with different values: which one is right?
    shard = tmp_path / "saved" / SINGLE
    tensors = load_file(shard)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, shard)
    fp8ref.load_checkpoint(tmp_path / "saved", backend="emulate")
    head[3, 5] += 1
    save_file({**tensors, "lm_head.weight": head}, shard)
    with pytest.raises(fp8ref.CheckpointError, match=r"differs from \S*, but the model ties the two"):
        fp8ref.load_checkpoint(tmp_path / "saved", backend="emulate")
    # A head in FP8 is tied to nothing any more.
    convert(model, "row", ["lm_head"])
    with pytest.warns(fp8ref.CheckpointWarning, match=r"lm_head: .* serving engines"):
        fp8ref.save_checkpoint(model, tmp_path / "head")
    assert json.loads((tmp_path / "head" / "config.json").read_text())["tie_word_embeddings"] is False
    untied: Any = fp8ref.load_checkpoint(tmp_path / "head", backend="emulate")
    assert torch.equal(untied.lm_head.dequantized_weight(), model.lm_head.dequantized_weight())
    assert torch.equal(untied.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_layers_with_different_recipes_get_groups_of_their_own(tmp_path: Path) -> None:
    model = convert(convert(small_model(), "block", ["block.up"]), "tensor-static", ["block.down"])
    fp8ref.save_checkpoint(model, tmp_path / "saved")
    config = json.loads((tmp_path / "saved" / "config.json").read_text())["quantization_config"]
    assert [group["targets"] for group in config["config_groups"].values()] == [["block.up"], ["block.down"]]
    assert config["ignore"] == ["lm_head"]
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "saved", small_model(5), backend="emulate")
    assert torch.equal(loaded(X), model(X))


def test_conv1d_of_gpt2_comes_back(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=48, n_layer=1, n_head=4)).eval()
    fp8ref.convert_(model, "row", backend="emulate", show=False)
    fp8ref.save_checkpoint(model, tmp_path / "saved")
    loaded: Any = fp8ref.load_checkpoint(tmp_path / "saved", backend="emulate")
    ids = torch.arange(5)[None]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids).logits, model(input_ids=ids).logits)


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_failure_leaves_nothing_and_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors.torch

    model = convert(small_model(), "row", SMALL_LAYERS)
    fp8ref.save_checkpoint(model, tmp_path / "saved")
    before = {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()}
    write_file, calls = safetensors.torch.save_file, []

    def full_disk(*arguments: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise OSError("No space left on device")
        write_file(*arguments, **options)

    monkeypatch.setattr(safetensors.torch, "save_file", full_disk)
    for folder, overwrite in (("new", False), ("saved", True)):
        calls.clear()
        with pytest.raises(OSError, match="No space left"):
            fp8ref.save_checkpoint(model, tmp_path / folder, overwrite=overwrite, max_shard_size=1000)
    assert entries(tmp_path) == ["saved"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == before


def test_overwriting_is_asked_for_and_keeps_other_files(tmp_path: Path) -> None:
    model = convert(small_model(), "row", SMALL_LAYERS)
    fp8ref.save_checkpoint(model, tmp_path / "saved", max_shard_size=1000)
    (tmp_path / "saved" / "tokenizer.json").write_text("{}")
    with pytest.raises(fp8ref.CheckpointError, match="is there already and not empty; give overwrite=True"):
        fp8ref.save_checkpoint(model, tmp_path / "saved")
    fp8ref.save_checkpoint(model, tmp_path / "saved", overwrite=True)
    assert entries(tmp_path / "saved") == ["config.json", "model.safetensors", "tokenizer.json"]
    assert entries(tmp_path) == ["saved"]


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (fp8ref.Recipe("1x128", "1x128"), "weight_scaling: got 1x128"),
        ("block-ue8m0", "scale_format: got ue8m0"),
        ("row-bounded", "activation_bound: got 1200"),
        (fp8ref.Recipe(weight_dtype=torch.float8_e5m2), "dtypes: got torch.float8_e5m2"),
    ],
    ids=str,
)
def test_what_the_format_cannot_say_is_refused(recipe: fp8ref.Recipe | str, words: str, tmp_path: Path) -> None:
    model = convert(small_model(), recipe, SMALL_LAYERS)
    with pytest.raises(fp8ref.CheckpointError, match=f"model: block.up: {words}"):
        fp8ref.save_checkpoint(model, tmp_path / "saved")
    assert entries(tmp_path) == []


def test_wrong_arguments(tmp_path: Path) -> None:
    good = convert(small_model(), "row", SMALL_LAYERS)
    (tmp_path / "file").write_text("")
    odd = convert(small_model(), "row", SMALL_LAYERS)
    odd.register_buffer("phase", torch.ones(3, dtype=torch.complex128))
    empty = nn.Sequential()
    empty.add_module("up", fp8ref.Fp8Linear.from_packed(fp8ref.pack_weight(torch.empty(0, 8)), "row"))
    calls: list[tuple[Any, Path, dict[str, Any], str]] = [
        ("model", tmp_path / "a", {}, "model: got str"),
        (small_model(), tmp_path / "a", {}, "model: no fp8ref.Fp8Linear in it"),
        (good, tmp_path / "no" / "a", {}, "does not exist; make it first"),
        (good, tmp_path / "file", {}, "it is a file"),
        (good, tmp_path / "a", {"max_shard_size": 0}, "max_shard_size: got 0"),
        (good, tmp_path / "a", {"max_shard_size": "5GB"}, "max_shard_size: got '5GB'"),
        (convert(small_model(), "row", SMALL_LAYERS).to("meta"), tmp_path / "a", {}, "meta"),
        (odd, tmp_path / "a", {}, "model: phase is torch.complex128, which is not written"),
        (empty, tmp_path / "a", {}, r"model: up: its weight is \[0, 8\], without values; no loader takes it"),
    ]
    for model, folder, options, words in calls:
        with pytest.raises((TypeError, ValueError), match=words):
            fp8ref.save_checkpoint(model, folder, **options)
    assert entries(tmp_path) == ["file"]
