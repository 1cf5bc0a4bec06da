"""Models built from config.json alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8ref
from tiny_models import save_llama


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    fp8ref.convert_checkpoint(save_llama(folder / "llama"), folder / "fp8", show=False)
    return folder / "fp8"


@pytest.fixture
def copied(llama: Path, tmp_path: Path) -> Path:
    for path in llama.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("names", [None, [], ["MyLlama"], ["set_seed", "LlamaConfig"], ["LlamaForCausalLM"]])
def test_the_type_of_the_model_says_enough(names: list[str] | None, llama: Path, copied: Path) -> None:
    """``architectures`` may be absent, or name a class of somebody else; nothing but a model is made of it."""
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "architectures": names}))
    loaded: Any = fp8ref.load_checkpoint(copied, backend="emulate")
    assert type(loaded).__name__ == "LlamaForCausalLM"
    wanted: Any = fp8ref.load_checkpoint(llama, backend="emulate")
    with torch.no_grad():
        ids = torch.arange(5)[None]
        assert torch.equal(loaded(input_ids=ids).logits, wanted(input_ids=ids).logits)


@pytest.mark.parametrize("content", ["", "{", "[1]", '"text"'])
def test_a_generation_config_that_is_none(content: str, copied: Path) -> None:
    (copied / "generation_config.json").write_text(content)
    with pytest.raises(fp8ref.CheckpointError, match=r"generation_config.json: transformers cannot read it"):
        fp8ref.load_checkpoint(copied, backend="emulate")
