"""Checkpoints that the peers' own tools made, and their own decompression beside ours."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import fp8ref
from checkpoint_formats import SINGLE, write
from checkpoint_variants import VARIANTS
from tiny_models import save_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("source") / "llama")


def read(folder: Path, **options: Any) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options).eval()


COMPRESSED = [name for name in VARIANTS if name.startswith("compressed-tensors") and "older" not in name]


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.filterwarnings("ignore::fp8ref.CheckpointWarning")
def test_our_weights_are_those_that_compressed_tensors_decompresses(name: str, llama: Path, tmp_path: Path) -> None:
    from transformers import CompressedTensorsConfig

    source = read(llama)
    linears = [path for path, module in source.named_modules() if type(module) is nn.Linear and path != "lm_head"]
    config = json.loads((llama / "config.json").read_text())
    write(tmp_path, VARIANTS[name], source.state_dict(), linears, config)
    ours = fp8ref.load_checkpoint(tmp_path, backend="emulate")
    theirs = read(tmp_path, quantization_config=CompressedTensorsConfig(dequantize=True))
    for path in linears:
        mine: Any = ours.get_submodule(path)
        # With bf16 scales it multiplies in bf16; the product in fp32, rounded once, must then be the same.
        weight = theirs.get_submodule(path).weight
        scale_dtype = VARIANTS[name].scale_dtype
        assert torch.equal(weight, mine.dequantized_weight().to(scale_dtype).float()), path


FINE_GRAINED = [name for name in VARIANTS if name.startswith(("DeepSeek", "FineGrained"))]


@pytest.mark.parametrize("name", FINE_GRAINED)
def test_our_weights_are_those_that_transformers_dequantises(name: str, tmp_path: Path) -> None:
    """Its reader of DeepSeek-style blocks takes no tails, hence the sizes."""
    from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2
    )  # fmt: skip
    source = LlamaForCausalLM(config)
    source.save_pretrained(tmp_path)
    (tmp_path / SINGLE).unlink()
    linears = [path for path, module in source.named_modules() if type(module) is nn.Linear and path != "lm_head"]
    write(tmp_path, VARIANTS[name], source.state_dict(), linears, json.loads((tmp_path / "config.json").read_text()))
    ours = fp8ref.load_checkpoint(tmp_path, backend="emulate")
    theirs = read(tmp_path, quantization_config=FineGrainedFP8Config(dequantize=True))
    for path in linears:
        mine: Any = ours.get_submodule(path)
        assert torch.equal(theirs.get_submodule(path).weight, mine.dequantized_weight()), path


ALGORITHMS = {
    "FP8_DEFAULT_CFG": (fp8ref.Recipe("tensor", "tensor", dynamic=False), "FP8"),
    "FP8_PER_CHANNEL_PER_TOKEN_CFG": (fp8ref.Recipe("row", "row"), "FP8_PER_CHANNEL_PER_TOKEN"),
    "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG": (fp8ref.Recipe("128x128", "1x128"), "fp8_pb_wo"),
}


@pytest.fixture(scope="module")
def made_by_modelopt(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """ModelOpt quantises and exports the small Llama, once for each of its FP8 algorithms."""
    folder = tmp_path_factory.mktemp("modelopt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it does not know this version of transformers
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        for name in ALGORITHMS:
            model = read(llama)
            mtq.quantize(model, getattr(mtq, name), lambda module: module(input_ids=torch.arange(32)[None]))
            export_hf_checkpoint(model, export_dir=str(folder / name))
    return {name: folder / name for name in ALGORITHMS}


def spread(scale: Tensor, shape: torch.Size) -> Tensor:
    """ModelOpt's scales over the elements of a weight: none, one a row, or [rows, 1, columns, 1] of 128x128 blocks."""
    if scale.dim() == 4:
        scale = scale[:, 0, :, 0].repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    elif scale.dim() == 1:
        scale = scale[:, None]
    return scale.expand(shape)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.filterwarnings("ignore::fp8ref.CheckpointWarning")
def test_checkpoints_that_modelopt_exports(name: str, made_by_modelopt: dict[str, Path]) -> None:
    recipe, algorithm = ALGORITHMS[name]
    folder = made_by_modelopt[name]
    tensors = load_file(folder / SINGLE)
    exported = json.loads((folder / "hf_quant_config.json").read_text())
    assert exported["quantization"]["quant_algo"] == algorithm
    found = fp8ref.inspect_checkpoint(folder)
    assert found.ok
    assert found.format == "ModelOpt"
    model = fp8ref.load_checkpoint(folder, backend="emulate")
    layers: Any = {path: module for path, module in model.named_modules() if isinstance(module, fp8ref.Fp8Linear)}
    assert len(layers) == 14
    for path, layer in layers.items():
        codes, scale = tensors[f"{path}.weight"], tensors[f"{path}.weight_scale"]
        assert torch.equal(layer.dequantized_weight(), codes.float() * spread(scale, codes.shape)), path
        assert layer.recipe == recipe
        if not recipe.dynamic:
            assert layer.input_scale == tensors[f"{path}.input_scale"]
    # The file beside config.json says enough on its own.
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    assert fp8ref.inspect_checkpoint(folder).ok
