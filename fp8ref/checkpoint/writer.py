"""Write a checkpoint folder: shards as they fill up, an index; the folder gets its name when it is complete."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8ref.checkpoint.files import INDEX, SINGLE
from fp8ref.checkpoint.findings import CheckpointError

MAX_SHARD = 5_000_000_000
"""Bytes of tensors in a shard, as other tools cut them."""

_STALE = (
    "*.safetensors", "*.index.json", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pt", "*.pth", "config.json",
    "generation_config.json", "hf_quant_config.json",
)  # fmt: skip
"""What belongs to the checkpoint itself: replaced, never carried over."""


class ShardWriter:
    """Collects tensors and writes a shard when the next one would make it too large; ``total`` counts their bytes."""

    def __init__(self, folder: Path, max_shard_size: int) -> None:
        """Write into ``folder``, at most ``max_shard_size`` bytes of tensors a shard (one tensor may be larger)."""
        self._folder = folder
        self._limit = max_shard_size
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._parts: list[list[str]] = []
        self.total = 0

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors that belong together: they go into one shard, moved to the CPU, without sharing memory."""
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if self._pending and self._pending_bytes + size > self._limit:
            self.flush()
        for name, tensor in tensors.items():
            self._pending[name] = tensor.detach().cpu().clone().contiguous()
        self._pending_bytes += size
        self.total += size

    def flush(self) -> None:
        """Write what is pending."""
        if not self._pending:
            return
        save_file = _save_file()
        save_file(self._pending, self._folder / _part(len(self._parts)), metadata={"format": "pt"})
        self._parts.append(list(self._pending))
        self._pending, self._pending_bytes = {}, 0

    def finish(self, config: dict[str, Any]) -> None:
        """Write the rest, give the shards their names, write index and config.json."""
        self.flush()
        count = len(self._parts)
        names = [SINGLE] if count == 1 else [f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
        write_json(self._folder / "config.json", config)
        # The library lets nobody but the owner read what it writes; these files are as readable as any other.
        mode = (self._folder / "config.json").stat().st_mode
        for number, name in enumerate(names):
            (self._folder / _part(number)).chmod(mode)
            (self._folder / _part(number)).rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: name for name, part in zip(names, self._parts, strict=True) for tensor in part}
            index = {"metadata": {"total_size": self.total}, "weight_map": dict(sorted(weight_map.items()))}
            write_json(self._folder / INDEX, index)


def _part(number: int) -> str:
    """The name of a shard before it is known how many there are."""
    return f"part-{number}.safetensors"


def _save_file() -> Any:
    """The library's function."""
    try:
        from safetensors.torch import save_file
    except ModuleNotFoundError:
        raise ImportError("writing a checkpoint needs safetensors; run: pip install 'fp8ref[checkpoints]'") from None
    return save_file


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write an object as JSON."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def check_target(folder: Path, argument: str = "folder", *, overwrite: bool) -> None:
    """Raise unless a checkpoint may be written to this folder, which is the caller's ``argument``.

    Raises:
        CheckpointError: it is there and ``overwrite`` is not given, is a file, or lies in a folder that is not there.
    """
    parent = folder.resolve().parent
    if not parent.is_dir():
        raise CheckpointError(f"{argument}: cannot write {folder}: {parent} does not exist; make it first")
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(f"{argument}: cannot write {folder}: it is a file; give a folder")
    if folder.is_dir() and any(folder.iterdir()) and not overwrite:
        raise CheckpointError(f"{argument}: {folder} is there already and not empty; give overwrite=True to replace it")


def check_shard_size(max_shard_size: object) -> int:
    """Return ``max_shard_size`` if it is a number of bytes.

    Raises:
        TypeError, ValueError: it is not an int, or not above zero.
    """
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int):
        raise TypeError(f"max_shard_size: got {max_shard_size!r}; give an int, in bytes")
    if max_shard_size < 1:
        raise ValueError(f"max_shard_size: got {max_shard_size}; give 1 or more, in bytes")
    return max_shard_size


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside ``folder``; it takes its name when the block ends, and goes when the block fails.

    Files of an old folder that are no part of a checkpoint (a tokenizer, a licence) are in the new one too. A link to a
    folder stays one: what it leads to is replaced.
    """
    folder = folder.resolve()
    temporary = folder.with_name(f".{folder.name}.new-{secrets.token_hex(4)}")
    temporary.mkdir()
    old = temporary.with_name(f"{temporary.name}-old")
    try:
        yield temporary
        if folder.exists():
            _keep_others(folder, temporary)
            folder.rename(old)
        temporary.rename(folder)
    except BaseException:  # an interrupt between the two names too
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if old.exists():
        shutil.rmtree(old)


def _keep_others(old: Path, new: Path) -> None:
    """Put what is no part of a checkpoint into the new folder too, as links: the old one stays whole until it goes."""
    for entry in old.iterdir():
        target = new / entry.name
        if is_checkpoint_file(entry) or target.exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, target, symlinks=True, copy_function=_link)
        else:
            _link(str(entry), str(target))


def _link(source: str, target: str) -> None:
    """A second name for a file (or symbolic link); a copy where the file system has no such names."""
    try:
        os.link(source, target, follow_symlinks=False)
    except (OSError, NotImplementedError):
        shutil.copy2(source, target, follow_symlinks=False)


def is_checkpoint_file(path: Path) -> bool:
    """Whether a file holds weights or configs of a model, by its name."""
    return any(path.match(pattern) for pattern in _STALE)
