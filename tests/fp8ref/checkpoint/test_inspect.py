"""``fp8ref inspect`` as a user meets it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from checkpoint_corruption import reconfigure, rewrite
from checkpoint_formats import SHARDS, write_small
from checkpoint_variants import VARIANTS
from fp8ref.commands import app


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["inspect", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_good_checkpoint(variant: str, tmp_path: Path) -> None:
    written = write_small(tmp_path, variant)
    result = call(tmp_path)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    for name in written.tensors:
        layer = name.rpartition(".")[0]
        assert any(line.split()[:1] == [layer if layer in written.codes else name] for line in lines), name
    assert lines[-1].startswith("ok: 0 errors, ")
    assert lines[-1].endswith("values scanned")


def break_it(folder: Path) -> tuple[str, str]:
    """Put a NaN code into a weight; return its file and name."""
    write_small(folder, "DeepSeek blocks")
    name = "block.down.weight"
    shard = next(shard for shard in SHARDS if name in load_file(folder / shard))
    tensors = load_file(folder / shard)
    tensors[name].view(torch.uint8)[47, 135] = 0xFF
    save_file(tensors, folder / shard)
    return shard, name


def test_a_broken_checkpoint(tmp_path: Path) -> None:
    shard, name = break_it(tmp_path)
    result = call(tmp_path)
    assert result.exit_code == 1
    assert f"error: {shard}: {name}: has the NaN code 0xff at [47, 135]" in result.stdout
    assert "WRONG, not loaded: 1 error, 0 warnings" in result.stdout


def test_a_tensor_that_is_wrong_is_listed_all_the_same(tmp_path: Path) -> None:
    write_small(tmp_path, "compressed-tensors channel")
    reconfigure(tmp_path, ignore=["block.up", "lm_head"])
    result = call(tmp_path)
    assert result.exit_code == 1
    for name in ("block.up.weight", "block.up.weight_scale", "block.up.bias"):
        assert any(line.split()[:1] == [name] and "wrong, see below" in line for line in result.stdout.splitlines())


@pytest.mark.parametrize(("ignored", "level"), [(["lm_head"], "error"), (None, "warning"), (["other.up"], "")])
def test_a_layer_in_16_bits_beside_its_like_in_fp8(ignored: list[str] | None, level: str, tmp_path: Path) -> None:
    """Without a model, a name tells: another ``up`` is FP8. Without a list that is no contradiction."""
    write_small(tmp_path, "AutoFP8 dynamic")
    rewrite(tmp_path, other__up__weight=torch.ones(4, 4, dtype=torch.bfloat16))
    reconfigure(tmp_path, ignored_layers=ignored)
    result = call(tmp_path)
    assert result.exit_code == (level == "error")
    words = "other.up.weight: is BF16 [4, 4], but ignored_layers in config.json does not leave it out of FP8"
    assert (words in result.stdout) == bool(level)
    assert any(line.startswith(f"{level}: ") and words in line for line in result.stdout.splitlines()) == bool(level)


def test_fast_says_that_it_did_not_look(tmp_path: Path) -> None:
    break_it(tmp_path)
    result = call(tmp_path, "--fast")
    assert result.exit_code == 0
    assert "values not scanned (--fast): NaN codes and bad scales go unseen" in result.stdout


def test_json_holds_everything(tmp_path: Path) -> None:
    shard, name = break_it(tmp_path)
    result = call(tmp_path, "--json")
    assert result.exit_code == 1
    content = json.loads(result.stdout)
    assert content["format"] == "DeepSeek blocks"
    assert content["ok"] is False
    assert content["scanned"] is True
    assert content["shards"] == list(SHARDS)
    message = "has the NaN code 0xff at [47, 135]"
    assert content["findings"] == [{"level": "error", "file": shard, "tensor": name, "message": message}]
    names = {tensor["name"] for layer in content["layers"] for tensor in layer["tensors"]}
    names |= {tensor["name"] for tensor in content["plain"]}
    assert names == {tensor for shard in SHARDS for tensor in load_file(tmp_path / shard)}


def test_a_bf16_checkpoint_is_no_fp8_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    result = call(tmp_path)
    assert result.exit_code == 1
    assert "config.json: has no quantization_config: this is no FP8 checkpoint" in result.stdout


def test_no_folder(tmp_path: Path) -> None:
    result = call(tmp_path / "absent")
    assert result.exit_code == 2
    assert "fp8ref: error: folder: no such folder" in result.stderr


def test_headers_and_configs_need_no_extra(tmp_path: Path) -> None:
    """What an empty environment has is enough for a fast inspection; what is missing is named."""
    write_small(tmp_path, "AutoFP8 static")
    code = (
        "import sys\n"
        "for name in ('safetensors', 'transformers', 'rich', 'typer', 'accelerate'): sys.modules[name] = None\n"
        "import fp8ref\n"
        f"print(fp8ref.inspect_checkpoint({str(tmp_path)!r}, scan=False).ok)\n"
        "try:\n"
        f"    fp8ref.inspect_checkpoint({str(tmp_path)!r})\n"
        "except ImportError as error:\n"
        "    print(error)\n"
        "try:\n"
        f"    fp8ref.load_checkpoint({str(tmp_path)!r})\n"
        "except ImportError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "True"
    assert second == "reading a checkpoint needs safetensors; run: pip install 'fp8ref[checkpoints]'"
    assert third.startswith("loading a checkpoint without model= needs ")
    assert "pip install 'fp8ref[checkpoints]'" in third
