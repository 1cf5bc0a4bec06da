"""What a checkpoint holds, and what is wrong with it, as far as headers and configs tell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from fp8ref.checkpoint.detect import detect
from fp8ref.checkpoint.files import CheckpointFiles, read_files
from fp8ref.checkpoint.findings import Broken, Finding
from fp8ref.checkpoint.fp8layer import INPUT_NAMES, PARTS, SCALE_NAMES, Fp8Layer, pair_layer
from fp8ref.checkpoint.header import FLOATS, TensorInfo
from fp8ref.checkpoint.scheme import Declared

_CACHE_SCALE = re.compile(r"(^|\.)((q|k|v|kv|prob|kv_cache)_scale|(q|k|v|kv|qkv)_proj\.output_scale)$")


@dataclass
class Contents:
    """A checkpoint, as far as its headers and configs tell.

    Attributes:
        files: its files.
        declared: its quantisation config; None where that cannot be read.
        layers: the FP8 layers by name.
        plain: the tensors that are loaded as they are, by name.
        unused: scales of the KV cache and of attention, by name.
        rejected: tensors that an error keeps out of the three, by name.
        findings: everything that is wrong or worth knowing.
    """

    files: CheckpointFiles
    declared: Declared | None = None
    layers: dict[str, Fp8Layer] = field(default_factory=dict)
    plain: dict[str, TensorInfo] = field(default_factory=dict)
    unused: dict[str, TensorInfo] = field(default_factory=dict)
    rejected: dict[str, TensorInfo] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that keep it from being loaded."""
        return [finding for finding in self.findings if finding.level == "error"]


def read_contents(folder: Path | str) -> Contents:
    """Read a folder's configs and headers and check all that they tell; no tensor is read.

    Raises:
        CheckpointError: there is no such folder.
    """
    files = read_files(folder)
    contents = Contents(files, findings=list(files.findings))
    if not files.tensors and not contents.errors:
        contents.findings.append(Finding("error", files.shards[0], "", "holds no tensors"))
    if any(finding.file == "config.json" for finding in contents.errors):
        return contents
    try:
        contents.declared = detect(files)
    except Broken as broken:
        contents.findings.append(broken.finding)
        return contents
    _sort_tensors(contents, contents.declared)
    if not contents.layers and not contents.errors:
        message = f"says {contents.declared.format}, but no tensor is F8_E4M3"
        contents.findings.append(Finding("error", contents.declared.file, "", message))
    _check_ignored(contents, contents.declared)
    return contents


def _sort_tensors(contents: Contents, declared: Declared) -> None:
    """Give every tensor its place."""
    tensors = contents.files.tensors
    taken: set[str] = set()
    for name, info in tensors.items():
        if info.dtype != "F8_E4M3":
            continue
        layer = name.removesuffix(".weight")
        parts = {part: tensors[f"{layer}.{part}"] for part in PARTS if f"{layer}.{part}" in tensors}
        taken |= {name, *(part.name for part in parts.values())}
        try:
            contents.layers[layer] = pair_layer(layer, info, parts, declared, contents.files.config)
        except Broken as broken:
            contents.findings.append(broken.finding)
            contents.rejected |= {part.name: part for part in (info, *parts.values())}
    for name, info in tensors.items():
        if name in taken:
            continue
        if _CACHE_SCALE.search(name):
            contents.unused[name] = info
            message = f"is {info}, a scale of the KV cache or of attention, and not used: both run unquantised"
            contents.findings.append(Finding("warning", info.file, name, message))
        elif problem := _misplaced(name, info, contents):
            contents.findings.append(Finding("error", info.file, name, problem))
            contents.rejected[name] = info
        else:
            contents.plain[name] = info


def _misplaced(name: str, info: TensorInfo, contents: Contents) -> str | None:
    """Why a tensor that belongs to no FP8 layer cannot be loaded as it is, or None."""
    layer, _, part = name.rpartition(".")
    if part in (*SCALE_NAMES, *INPUT_NAMES, "input_scale_ub", "output_scale"):
        weight = contents.files.tensors.get(f"{layer}.weight")
        return f"has no F8_E4M3 weight beside it: {layer}.weight is {weight or 'missing'}"
    if info.dtype not in FLOATS and info.dtype.startswith("F"):
        return f"is {info}; weights are F8_E4M3"
    if layer in contents.layers:
        return f"is {info}; it is unknown what it means beside an F8_E4M3 weight"
    return None


def _check_ignored(contents: Contents, declared: Declared) -> None:
    """Layers that the config wants in FP8 and that are not, and activations that it leaves alone."""
    last_parts = {name.rpartition(".")[2] for name in contents.layers}
    for name, info in contents.plain.items():
        layer = name.removesuffix(".weight")
        if len(info.shape) != 2 or layer == name or layer.rpartition(".")[2] not in last_parts:
            continue
        if declared.ignored_by(layer) is None and declared.scheme_of(layer) is not None:
            message = f"is {info}, but {declared.ignore_key} in {declared.file} does not leave it out of FP8"
            contents.findings.append(Finding("error" if declared.complete else "warning", info.file, name, message))
    weight_only = [layer.name for layer in contents.layers.values() if layer.scheme.activation == "none"]
    if weight_only:
        message = (
            f"leaves the activations of {len(weight_only)} layers unquantised ({weight_only[0]} first); they are "
            "quantised here, with dynamic scales: the product takes two FP8 operands"
        )
        contents.findings.append(Finding("warning", declared.file, "", message))
    if declared.kv_cache is not None:
        message = f"{declared.kv_cache}: the KV cache stays unquantised here"
        contents.findings.append(Finding("warning", declared.file, "", message))
