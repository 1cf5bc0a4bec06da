"""The file that tuning writes: whole or not at all, and read back as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from fp8ref.kernels.tune import write_table

ROW = {"n": 640, "k": 512, "m": 16, "us": 1.0, "path": "triton", "split_k": 4}


def test_a_table_is_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    file, device = tmp_path / "tuning.json", torch.device("cuda", 0)
    write_table(file, device, [])
    write_table(file, device, [ROW])
    table = json.loads(file.read_text())
    assert (table["device"], table["entries"]) == ("a GPU", [ROW])
    assert list(tmp_path.iterdir()) == [file]
    with pytest.raises(TypeError):
        write_table(file, device, [{"n": object()}])
    assert json.loads(file.read_text()) == table
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
    with pytest.raises(OSError, match="no space left"):
        write_table(file, device, [])
    assert json.loads(file.read_text()) == table
