"""The files of a checkpoint folder: config, index and shards, read lazily, every claim of the index checked."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from torch import Tensor

from fp8ref.checkpoint.findings import Broken, CheckpointError, Finding
from fp8ref.checkpoint.header import TensorInfo, read_header

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class Slice(Protocol):
    """A tensor in a file, of which rows are read on demand."""

    def __getitem__(self, rows: slice) -> Tensor:
        """Some rows."""


class Shard(Protocol):
    """An open safetensors file."""

    def get_tensor(self, name: str) -> Tensor:
        """A whole tensor."""

    def get_slice(self, name: str) -> Slice:
        """A tensor to take rows of."""


@dataclass
class CheckpointFiles:
    """A folder, its config files and the tensors that its headers promise.

    Attributes:
        folder: where.
        config: config.json, {} where there is none.
        quantization: hf_quant_config.json where there is one, which ModelOpt writes beside config.json.
        shards: names of the safetensors files, in the order of the index.
        tensors: each tensor by name.
        findings: what is wrong so far.
    """

    folder: Path
    config: dict[str, Any] = field(default_factory=dict)
    quantization: dict[str, Any] = field(default_factory=dict)
    shards: list[str] = field(default_factory=list)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def open(self, shard: str) -> AbstractContextManager[Shard]:
        """Open a shard for lazy reading.

        Raises:
            ImportError: safetensors is missing.
            Broken: the file cannot be opened.
        """
        return open_shard(self.folder / shard)

    def in_shard(self, shard: str) -> list[TensorInfo]:
        """The tensors of a shard, in the order in which they lie there."""
        return sorted((t for t in self.tensors.values() if t.file == shard), key=lambda info: info.start)

    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())


def open_shard(path: Path) -> AbstractContextManager[Shard]:
    """Open a safetensors file, memory-mapped: a tensor is read when it is asked for."""
    try:
        from safetensors import SafetensorError, safe_open
    except ModuleNotFoundError:
        raise ImportError("reading a checkpoint needs safetensors; run: pip install 'fp8ref[checkpoints]'") from None
    try:
        return cast("AbstractContextManager[Shard]", safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise Broken.at(path.name, f"cannot be opened: {error}") from None


def read_files(folder: Path | str, argument: str = "folder") -> CheckpointFiles:
    """Read the config files and every header of a folder, which is the caller's ``argument``; no tensor is read.

    Raises:
        CheckpointError: there is no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{argument}: no such folder: {folder}; give a checkpoint folder on this machine")
    files = CheckpointFiles(folder)
    for attribute, name, needed in (("config", "config.json", True), ("quantization", "hf_quant_config.json", False)):
        try:
            setattr(files, attribute, read_json(folder / name, needed=needed))
        except Broken as broken:
            files.findings.append(broken.finding)
    try:
        listed = _read_index(files)
    except Broken as broken:
        files.findings.append(broken.finding)
        return files
    seen: dict[str, TensorInfo] = {}
    for shard in files.shards:
        _add_shard(files, shard, seen, listed)
    if listed is not None:
        _check_index(files, listed)
    others = sorted(set(_safetensors(folder)) - set(files.shards))
    files.findings += [Finding("warning", name, "", f"is not named by {INDEX} and is not read") for name in others]
    return files


def read_json(path: Path, *, needed: bool) -> dict[str, Any]:
    """Read a JSON object from a file; {} where a file that is not needed is absent.

    Raises:
        Broken: absent though needed, unreadable, no JSON object, or one with a key twice.
    """
    if not path.exists() and not needed:
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_doubles)
    except OSError as error:
        raise Broken.at(path.name, f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise Broken.at(path.name, f"is not JSON that is read: {error}") from None
    if not isinstance(content, dict):
        raise Broken.at(path.name, f"holds a JSON {type(content).__name__}, not an object")
    return content


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, in which readers may take the first or the last of two entries with one key."""
    content = dict(pairs)
    if len(content) < len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {key!a} is there twice in an object")
    return content


def _safetensors(folder: Path) -> Iterator[str]:
    """Names of the safetensors files of a folder."""
    return (path.name for path in folder.glob("*.safetensors"))


def _read_index(files: CheckpointFiles) -> dict[str, str] | None:
    """Find the shards; return where the index says that each tensor lies, or None without an index."""
    if not (files.folder / INDEX).exists():
        files.shards = [SINGLE] if (files.folder / SINGLE).exists() else sorted(_safetensors(files.folder))
        if len(files.shards) != 1:
            found = ", ".join(files.shards) or "no safetensors file at all"
            raise Broken.at(str(INDEX), f"is missing, {SINGLE} too; the folder holds {found}")
        return None
    index = read_json(files.folder / INDEX, needed=True)
    listed = index.get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(shard, str) for shard in listed.values()):
        raise Broken.at(INDEX, "its weight_map does not map names of tensors to names of files")
    if not listed:
        raise Broken.at(INDEX, "its weight_map names no tensor")
    for tensor, shard in listed.items():
        if not (tensor + shard).isprintable():
            raise Broken.at(INDEX, f"puts {tensor!a} into {shard!a}; such letters belong in no name")
        if "/" in shard or "\\" in shard or not shard.endswith(".safetensors") or shard.startswith("."):
            raise Broken.at(
                INDEX, f"puts it into {shard!r}; a plain file name that ends in .safetensors belongs", tensor
            )
    files.shards = sorted(set(listed.values()))
    return listed


def _add_shard(files: CheckpointFiles, shard: str, seen: dict[str, TensorInfo], listed: dict[str, str] | None) -> None:
    """Read the header of one shard and add its tensors."""
    if not _is_file(files.folder / shard):
        files.findings.append(Finding("error", shard, "", _absence(files.folder / shard, listed)))
        return
    try:
        infos, findings = read_header(files.folder / shard)
    except Broken as broken:
        files.findings.append(broken.finding)
        return
    files.findings += findings
    for name, info in infos.items():
        if name in seen:
            files.findings.append(
                Finding("error", shard, name, f"is there a second time; {seen[name].file} has it too")
            )
        else:
            seen[name] = info
            files.tensors[name] = info


def _is_file(path: Path) -> bool:
    """Whether a file is there; none is under a name that no file can have."""
    try:
        return path.is_file()
    except OSError:
        return False


def _absence(path: Path, listed: dict[str, str] | None) -> str:
    """Say of a shard that it is not there, and how that is known."""
    if listed is None:
        return "is a link to nothing" if path.is_symlink() else "is no file"
    absent = [name for name, file in listed.items() if file == path.name]
    more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"is missing; {INDEX} puts {absent[0]}{more} there"


def _check_index(files: CheckpointFiles, listed: dict[str, str]) -> None:
    """Compare the index with what the shards hold."""
    broken = {finding.file for finding in files.findings if finding.level == "error"}
    for name, shard in listed.items():
        info = files.tensors.get(name)
        if (info is None or info.file != shard) and shard not in broken:
            where = f"; {info.file} has it" if info is not None else ""
            files.findings.append(Finding("error", shard, name, f"is not in the file where {INDEX} puts it{where}"))
    for name, info in files.tensors.items():
        if name not in listed:
            files.findings.append(Finding("error", info.file, name, f"is not listed in {INDEX}"))
    claimed = _total_size(files)
    if claimed is not None and claimed != files.nbytes() and not broken:
        files.findings.append(
            Finding("warning", INDEX, "", f"total_size says {claimed}, the tensors have {files.nbytes()} bytes")
        )


def _total_size(files: CheckpointFiles) -> object:
    """What the index says about the size of all tensors."""
    metadata = read_json(files.folder / INDEX, needed=True).get("metadata")
    return metadata.get("total_size") if isinstance(metadata, dict) else None
