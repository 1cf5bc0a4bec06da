"""The folder that is written: under its name when it is complete, and never in place of something half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8ref


def small() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3))
    fp8ref.convert_(model, "row", backend="emulate", show=False)
    return model


def content(path: Path) -> bytes | str:
    """The bytes of a file, the target of a link."""
    if path.is_symlink():
        return str(path.readlink())
    return path.read_bytes() if path.is_file() else "a folder"


def tree(folder: Path) -> dict[str, bytes | str]:
    """Everything below a folder."""
    return {str(path.relative_to(folder)): content(path) for path in folder.rglob("*")}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint with files and folders of other kinds beside it."""
    folder = tmp_path / "saved"
    fp8ref.save_checkpoint(small(), folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes" / "more").mkdir(parents=True)
    (folder / "notes" / "more" / "a.txt").write_text("a")
    (folder / "readme").symlink_to("notes/more/a.txt")
    (folder / "gone").symlink_to("nowhere")
    return folder


def others(folder: Path) -> dict[str, bytes | str]:
    return {name: found for name, found in tree(folder).items() if name not in ("config.json", "model.safetensors")}


def test_what_is_no_part_of_a_checkpoint_stays(saved: Path) -> None:
    before = others(saved)
    fp8ref.save_checkpoint(small(), saved, overwrite=True)
    assert others(saved) == before
    assert len(before) == 6
    assert [path.name for path in saved.parent.iterdir()] == ["saved"]
    fp8ref.load_checkpoint(saved, nn.Sequential(nn.Linear(4, 3)), backend="emulate")


def test_files_stay_on_a_file_system_without_hard_links(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise OSError("Operation not permitted")

    before = others(saved)
    monkeypatch.setattr("os.link", refuse)
    fp8ref.save_checkpoint(small(), saved, overwrite=True)
    assert others(saved) == before


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("step", ["link", "first rename", "second rename"])
def test_an_interrupted_replacement_leaves_the_old_folder(
    error: type[BaseException], step: str, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, rename, steps = tree(saved.parent), Path.rename, []

    def stop(path: Path, target: Path) -> Path:
        if saved in (path, target):
            steps.append(path)
            if len(steps) == (1 if step == "first rename" else 2):
                raise error(step)
        return rename(path, target)

    def stop_link(*_: Any, **__: Any) -> None:
        raise error(step)

    if step == "link":
        monkeypatch.setattr("fp8ref.checkpoint.writer.shutil.copytree", stop_link)
    else:
        monkeypatch.setattr(Path, "rename", stop)
    with pytest.raises(error, match=step):
        fp8ref.save_checkpoint(small(), saved, overwrite=True)
    monkeypatch.undo()
    assert tree(saved.parent) == before


def test_a_link_to_a_folder_stays_one(saved: Path) -> None:
    link = saved.with_name("latest")
    link.symlink_to("saved")
    before, model = others(saved), small()
    fp8ref.save_checkpoint(model, link, overwrite=True)
    assert content(link) == "saved"
    assert others(saved) == before
    loaded: Any = fp8ref.load_checkpoint(saved, nn.Sequential(nn.Linear(4, 3)), backend="emulate")
    assert torch.equal(loaded[0].dequantized_weight(), model.get_submodule("0").dequantized_weight())  # type: ignore[operator]
    link.with_name("next").symlink_to("new")
    fp8ref.save_checkpoint(model, link.with_name("next"))
    assert sorted(path.name for path in saved.parent.iterdir()) == ["latest", "new", "next", "saved"]
    link.with_name("far").symlink_to("no/where")
    with pytest.raises(fp8ref.CheckpointError, match=r"folder: cannot write .*far: .*no does not exist; make it first"):
        fp8ref.save_checkpoint(model, link.with_name("far"))
