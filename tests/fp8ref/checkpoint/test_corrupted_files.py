"""Corrupted files, indexes and configs: always an error that names the file, and the model is as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import fp8ref
from checkpoint_corruption import NAMES, SOURCES, assert_inspected, assert_refused, copy_of
from checkpoint_formats import INDEX, SHARDS, SINGLE, small_model, snapshot

formats = st.sampled_from(NAMES)


@given(formats, st.data())
def test_a_truncated_or_extended_file(name: str, data: st.DataObject) -> None:
    shard = data.draw(st.sampled_from(SHARDS))
    with copy_of(name) as folder:
        content = (folder / shard).read_bytes()
        end = data.draw(st.integers(0, len(content) - 1) | st.just(len(content) + 3))
        (folder / shard).write_bytes((content + b"abc")[:end])
        assert_refused(folder, shard)
        assert not fp8ref.inspect_checkpoint(folder, scan=False).ok


@given(formats, st.data())
def test_a_damaged_header(name: str, data: st.DataObject) -> None:
    """Any byte of a header changed: refused, or nothing of what is loaded changes."""
    shard = data.draw(st.sampled_from(SHARDS))
    with copy_of(name) as folder:
        content = bytearray((folder / shard).read_bytes())
        length = int.from_bytes(content[:8], "little")
        place = data.draw(st.integers(0, 8 + length - 1))
        content[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != content[place]))
        (folder / shard).write_bytes(content)
        model, fresh = small_model(), small_model()
        before = snapshot(model)
        try:
            fp8ref.load_checkpoint(folder, model, backend="emulate")
        except fp8ref.CheckpointError as error:
            assert shard in str(error) or INDEX in str(error)  # noqa: PT017 - success is allowed too
            assert snapshot(model) == before
        else:
            fp8ref.load_checkpoint(SOURCES[name], fresh, backend="emulate")
            assert snapshot(model)[1] == snapshot(fresh)[1]


@given(formats, st.sampled_from(SHARDS))
def test_a_missing_shard(name: str, shard: str) -> None:
    with copy_of(name) as folder:
        (folder / shard).unlink()
        assert_refused(folder, shard, "", "is missing")
        assert not fp8ref.inspect_checkpoint(folder).ok


@given(formats, st.data())
def test_an_index_that_names_the_wrong_shard(name: str, data: st.DataObject) -> None:
    with copy_of(name) as folder:
        index = json.loads((folder / INDEX).read_text())
        tensor = data.draw(st.sampled_from(sorted(index["weight_map"])))
        other = SHARDS[1 - SHARDS.index(index["weight_map"][tensor])]
        index["weight_map"][tensor] = other
        (folder / INDEX).write_text(json.dumps(index))
        assert_refused(folder, other, tensor, "is not in the file")
        assert_inspected(folder, other, tensor)


@given(formats, st.data())
def test_an_index_that_leaves_a_tensor_out(name: str, data: st.DataObject) -> None:
    with copy_of(name) as folder:
        index = json.loads((folder / INDEX).read_text())
        tensor = data.draw(st.sampled_from(sorted(index["weight_map"])))
        shard = index["weight_map"].pop(tensor)
        (folder / INDEX).write_text(json.dumps(index))
        assert_refused(folder, shard, tensor, f"is not listed in {INDEX}")
        assert_inspected(folder, shard, tensor)


@given(formats, st.data())
def test_a_tensor_in_two_shards(name: str, data: st.DataObject) -> None:
    with copy_of(name) as folder:
        tensors = [load_file(folder / shard) for shard in SHARDS]
        tensor = data.draw(st.sampled_from(sorted(tensors[0])))
        tensors[1][tensor] = tensors[0][tensor]
        save_file(tensors[1], folder / SHARDS[1])
        assert_refused(folder, SHARDS[1], tensor, f"is there a second time; {SHARDS[0]} has it too")
        assert_inspected(folder, SHARDS[1], tensor)


@given(formats, st.sampled_from(["block.up.zero_point", "block.other.weight", "extra", "block.up.output_scale"]))
def test_an_unused_tensor(name: str, extra: str) -> None:
    with copy_of(name) as folder:
        tensors = load_file(folder / SHARDS[0])
        save_file({**tensors, extra: torch.ones(2)}, folder / SHARDS[0])
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"][extra] = SHARDS[0]
        (folder / INDEX).write_text(json.dumps(index))
        assert_refused(folder, SHARDS[0], extra)


@given(st.sampled_from(["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "..\\x.safetensors", "x.bin", ""]))
@example(".safetensors")
def test_a_shard_outside_the_folder(shard: str) -> None:
    with copy_of(NAMES[0]) as folder:
        index = json.loads((folder / INDEX).read_text())
        index["weight_map"]["norm.bias"] = shard
        (folder / INDEX).write_text(json.dumps(index))
        assert_refused(folder, INDEX, "norm.bias", "a plain file name")


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[1]", b"\xff\xfe", b'{"weight_map": 3}', b'{"weight_map": {"a": 1}}', b'{"weight_map": {}}', b"{}"],
)
def test_an_index_that_is_none(content: bytes) -> None:
    with copy_of(NAMES[0]) as folder:
        (folder / INDEX).write_bytes(content)
        assert_refused(folder, INDEX)


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"[" * 100_000, b'{"quantization_config": 5}', b"{}"])
def test_a_config_that_is_none(content: bytes) -> None:
    with copy_of(NAMES[0]) as folder:
        (folder / "config.json").write_bytes(content)
        assert_refused(folder, "config.json")


def test_a_wrong_total_size_is_a_warning() -> None:
    with copy_of(NAMES[0]) as folder:
        index = json.loads((folder / INDEX).read_text())
        index["metadata"]["total_size"] += 1
        (folder / INDEX).write_text(json.dumps(index))
        with pytest.warns(fp8ref.CheckpointWarning, match="total_size says"):
            fp8ref.load_checkpoint(folder, small_model(), backend="emulate")


def test_a_file_that_the_index_does_not_name_is_a_warning() -> None:
    with copy_of(NAMES[0]) as folder:
        save_file({"a": torch.ones(1)}, folder / "consolidated.safetensors")
        with pytest.warns(fp8ref.CheckpointWarning, match="consolidated.safetensors: is not named by"):
            fp8ref.load_checkpoint(folder, small_model(), backend="emulate")


@pytest.mark.parametrize("file", [INDEX, "config.json"])
def test_a_key_that_is_there_twice(file: str) -> None:
    """Of two entries, one reader takes the first, another the last."""
    with copy_of(NAMES[0]) as folder:
        text = (folder / file).read_text()
        key = "norm.bias" if file == INDEX else "quant_method"
        (folder / file).write_text(text.replace(f'"{key}"', f'"{key}": "gptq", "{key}"'))
        assert_refused(folder, file, "", f"the key '{key}' is there twice")


@pytest.mark.parametrize("name", ["a\ud800", "a\x1b[31m", "a\nb", "a\0"])
def test_names_that_no_terminal_takes(name: str) -> None:
    with copy_of(NAMES[0]) as folder:
        index = json.loads((folder / INDEX).read_text())
        for listed in ({name: SHARDS[0]}, {"norm.bias": f"{name}.safetensors"}):
            (folder / INDEX).write_text(json.dumps({"weight_map": {**index["weight_map"], **listed}}))
            assert_refused(folder, INDEX, "", ascii(name)[1:-1])
        (folder / INDEX).unlink()
        entries = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}})
        (folder / SINGLE).write_bytes(header(entries, 4))
        assert_refused(folder, SINGLE, "", f"has a tensor {name!a}")


def test_a_name_longer_than_files_have() -> None:
    with copy_of(NAMES[0]) as folder:
        index, shard = json.loads((folder / INDEX).read_text()), "x" * 300 + ".safetensors"
        index["weight_map"]["norm.bias"] = shard
        (folder / INDEX).write_text(json.dumps(index))
        assert_refused(folder, shard, "", f"is missing; {INDEX} puts norm.bias there")


@pytest.mark.parametrize("name", [SINGLE, "other.safetensors"])
@pytest.mark.parametrize("what", ["folder", "dangling link"])
def test_a_file_that_is_none(name: str, what: str) -> None:
    """A link to nothing is what a cache that was cleaned, or git-annex without its content, leaves."""
    with copy_of(NAMES[0]) as folder:
        for path in (folder / INDEX, *(folder / shard for shard in SHARDS)):
            path.unlink()
        if what == "folder":
            (folder / name).mkdir()
        else:
            (folder / name).symlink_to("blobs/gone")
        assert_refused(folder, name, "", "is no file" if what == "folder" else "is a link to nothing")
        assert_inspected(folder, name, "")


def header(entries: str, data: int = 0) -> bytes:
    return len(entries).to_bytes(8, "little") + entries.encode() + bytes(data)


@pytest.mark.parametrize(
    ("entries", "data", "words"),
    [
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
         4, "is there twice in the header"),
        ('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', 4, "needs 8 bytes"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}', 8, "after a gap"),
        ('{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
         6, "overlaps with a"),
        ('{"a":{"dtype":"F4","shape":[1],"data_offsets":[0,4]}}', 4, "has dtype F4, which is not read"),
        ('{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}', 4, "its header entry is"),
        ('{"a":{"dtype":"F32","shape":[true],"data_offsets":[0,4]}}', 4, "its header entry is"),
        ('{"a":7}', 0, "its header entry is 7"),
        ('{"a":{"dtype":"F8_E4M3","shape":[' + "9" * 30 + '],"data_offsets":[0,4]}}', 4, "its header entry is"),
        ("[" * 100_000, 0, "its header is not JSON"),
        ("[]x", 0, "its header is not JSON"),
        ("3", 0, "its header is not a JSON object"),
    ],
)  # fmt: skip
def test_headers(entries: str, data: int, words: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(header(entries, data))
    (tmp_path / "config.json").write_text("{}")
    findings: Any = fp8ref.inspect_checkpoint(tmp_path, scan=False).findings
    assert any(words in finding.message and finding.file == "model.safetensors" for finding in findings), findings


def test_no_folder_and_no_files(tmp_path: Path) -> None:
    with pytest.raises(fp8ref.CheckpointError, match="no such folder"):
        fp8ref.inspect_checkpoint(tmp_path / "absent")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(fp8ref.CheckpointError, match="no safetensors file at all"):
        fp8ref.load_checkpoint(tmp_path, small_model())
