"""Inspect a checkpoint: what it holds, how it would run, what is wrong; no tensor is loaded as a whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8ref.checkpoint.contents import Contents, read_contents
from fp8ref.checkpoint.findings import Finding
from fp8ref.checkpoint.fp8layer import Fp8Layer
from fp8ref.checkpoint.progress import byte_bar
from fp8ref.checkpoint.scheme import CALLS
from fp8ref.checkpoint.values import scan_values

SCHEMA = 1
"""Raised when a field of the JSON changes its meaning or goes."""


@dataclass(frozen=True)
class Inspection:
    """What :func:`inspect_checkpoint` found.

    Attributes:
        folder: where.
        contents: layers, other tensors, unused scales and the quantisation config.
        findings: everything wrong or worth knowing, in the order of discovery.
        scanned: whether the values were looked at too.

    >>> from fp8ref.checkpoint.files import CheckpointFiles
    >>> found = (Finding("error", "config.json", "", "is not JSON"),)
    >>> Inspection(Path("folder"), Contents(CheckpointFiles(Path("folder"))), found, scanned=True).ok
    False
    """

    folder: Path
    contents: Contents
    findings: tuple[Finding, ...]
    scanned: bool

    @property
    def ok(self) -> bool:
        """Whether nothing keeps the checkpoint from being loaded."""
        return not any(finding.level == "error" for finding in self.findings)

    @property
    def format(self) -> str | None:
        """Which of the six formats it is; None where that is not known."""
        return None if self.contents.declared is None else self.contents.declared.format

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data that JSON can hold."""
        contents = self.contents
        return {
            "schema": SCHEMA,
            "folder": str(self.folder),
            "format": self.format,
            "ok": self.ok,
            "scanned": self.scanned,
            "nbytes": contents.files.nbytes(),
            "shards": contents.files.shards,
            "layers": [_layer(layer) for layer in contents.layers.values()],
            "plain": [_tensor(info) for info in contents.plain.values()],
            "unused": [_tensor(info) for info in contents.unused.values()],
            "rejected": [_tensor(info) for info in contents.rejected.values()],
            "findings": [
                {"level": f.level, "file": f.file, "tensor": f.tensor, "message": f.message} for f in self.findings
            ],
        }


def _tensor(info: Any) -> dict[str, Any]:
    """A tensor as plain data."""
    return {"name": info.name, "dtype": info.dtype, "shape": list(info.shape), "file": info.file}


def _layer(layer: Fp8Layer) -> dict[str, Any]:
    """A layer as plain data."""
    return {
        "name": layer.name,
        "shape": list(layer.weight.shape),
        "file": layer.weight.file,
        "weight_scales": describe_scales(layer),
        "activations": describe_activations(layer),
        "tensors": [_tensor(info) for info in layer.tensors],
    }


def describe_scales(layer: Fp8Layer) -> str:
    """The weight scales of a layer in words: kind and dtype."""
    kind = f"tensor x {len(layer.shards)}" if layer.shards else layer.kind
    power = ", 2^n" if layer.scheme.ue8m0 else ""
    return f"{kind}, {layer.scale.dtype}{power}"


def describe_activations(layer: Fp8Layer) -> str:
    """How the activations of a layer are scaled, in words."""
    bound = f", at most {layer.scheme.activation_bound:g}" if layer.scheme.activation_bound is not None else ""
    if layer.scheme.activation == "none":
        return "unquantised; " + CALLS["group" if layer.kind == "block" else "token"] + " here"
    return CALLS[layer.scheme.activation] + bound


def inspect_checkpoint(folder: Path | str, *, scan: bool = True, progress: bool = True) -> Inspection:
    """Say what a checkpoint holds, how it would run and what is wrong with it, without loading it into memory.

    Args:
        folder: config.json and safetensors files, in one of the six formats of docs/checkpoints.md.
        scan: True also reads every weight and scale, in chunks of 16 MiB, for NaN codes and scales that are not finite
            and above zero; False goes by headers and configs alone.
        progress: show a bar while scanning (needs rich, and a terminal).

    Returns:
        An :class:`Inspection`; ``ok`` is False where :func:`fp8ref.load_checkpoint` refuses the folder for any model.
        What only the model tells (its sizes, a linear layer that is neither FP8 nor left out) shows in loading.

    Raises:
        CheckpointError: there is no such folder.
        ImportError: scanning without safetensors.

    >>> import json, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    ...     print(inspect_checkpoint(folder).findings[-1])
    config.json: quant_method: got 'gptq': GPTQ's integers; read are compressed-tensors, ...
    """
    contents = read_contents(folder)
    findings = list(contents.findings)
    if scan:
        total = sum(layer.weight.nbytes for layer in contents.layers.values())
        with byte_bar("scanning", total, show=progress) as done:
            findings += scan_values(contents, done)
    return Inspection(Path(folder), contents, tuple(findings), scan)
