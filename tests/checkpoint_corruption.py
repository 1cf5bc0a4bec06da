"""Ways to damage a copy of a checkpoint, and what must then happen."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fp8ref
from checkpoint_formats import INDEX, small_model, snapshot, write_shards

NAMES = ("DeepSeek blocks", "compressed-tensors channel", "AutoFP8 static")
SOURCES: dict[str, Path] = {}
"""A folder for each of NAMES, which the fixture of conftest.py fills."""


@contextmanager
def copy_of(name: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "checkpoint")
        shutil.copytree(SOURCES[name], target)
        yield target


def shard_of(folder: Path, tensor: str) -> str:
    where: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
    return where[tensor]


def change(folder: Path, tensor: str, edit: Callable[[Tensor], Tensor | None]) -> str:
    """Rewrite one tensor (None takes it out of its shard); return the shard."""
    shard = shard_of(folder, tensor)
    tensors = load_file(folder / shard)
    made = edit(tensors.pop(tensor))
    if made is not None:
        tensors[tensor] = made.contiguous()
    save_file(tensors, folder / shard)
    return shard


def names_of(name: str, *endings: str) -> list[str]:
    where = json.loads((SOURCES[name] / INDEX).read_text())["weight_map"]
    return [tensor for tensor in where if tensor.startswith("block.") and tensor.endswith(endings)]


def assert_refused(folder: Path, file: str, tensor: str = "", words: str = "") -> None:
    """Loading raises and changes nothing; the message names file and tensor; inspection agrees."""
    model = small_model()
    before = snapshot(model)
    with pytest.raises(fp8ref.CheckpointError) as caught:
        fp8ref.load_checkpoint(folder, model, backend="emulate")
    assert snapshot(model) == before
    found = [f for f in caught.value.findings if f.file == file and (not tensor or f.tensor == tensor)]
    assert found, caught.value
    assert words in found[0].message
    for finding in caught.value.findings:
        assert str(finding) in str(caught.value)


def assert_inspected(folder: Path, file: str, tensor: str) -> None:
    """Inspection, which knows no model, finds it too."""
    result = fp8ref.inspect_checkpoint(folder, progress=False)
    assert not result.ok
    assert [f for f in result.findings if f.level == "error" and f.file == file and f.tensor == tensor]


def refused(folder: Path, model: nn.Module, *words: str) -> None:
    """Loading raises with these words and leaves the model as it was."""
    before = snapshot(model)
    with pytest.raises(fp8ref.CheckpointError) as caught:
        fp8ref.load_checkpoint(folder, model, backend="emulate")
    for word in words:
        assert word in str(caught.value)
    assert snapshot(model) == before


def rewrite(folder: Path, **tensors: Tensor | None) -> None:
    """Replace, add or (None) remove tensors; double underscores are dots."""
    old = {name: tensor for shard in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(shard).items()}
    new = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    merged = {name: tensor for name, tensor in {**old, **new}.items() if tensor is not None}
    write_shards(folder, merged)


def reconfigure(folder: Path, **changes: Any) -> None:
    """Change keys of the quantisation config."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
