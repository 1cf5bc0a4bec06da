"""What a checkpoint holds, and what is wrong with it, as far as headers and configs tell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from fp8ref.checkpoint.detect import detect
from fp8ref.checkpoint.files import CheckpointFiles, read_files
from fp8ref.checkpoint.findings import Broken, Finding
from fp8ref.checkpoint.header import FLOATS, TensorInfo
from fp8ref.checkpoint.scheme import CALLS, Declared, LayerScheme, WeightScale
from fp8ref.checkpoint.shapes import fitting_kinds, shard_sizes, wanted_shapes
from fp8ref.emulation.quantize import ScaleFormat
from fp8ref.recipes import Recipe

SCALE_NAMES = ("weight_scale", "weight_scale_inv")
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of scales; fp32 holds every value of each."""

_CACHE_SCALE = re.compile(r"(^|\.)((q|k|v|kv|prob|kv_cache)_scale|(q|k|v|kv|qkv)_proj\.output_scale)$")
_PARTS = (*SCALE_NAMES, "input_scale", "input_scale_ub", "bias")


@dataclass(frozen=True)
class Fp8Layer:
    """A linear layer in FP8.

    Attributes:
        name: of the layer, without ``.weight``.
        scheme: what the config says about it.
        kind: of its weight scales, as they are.
        weight: F8_E4M3 [N, K].
        scale: the weight's scales.
        input_scale: the activations' scale, of a static layer.
        input_bound: FBGEMM's bound, where it is stored too.
        bias: [N], where there is one.
        shards: rows of the fused layers that the scales belong to; () where there is one scale for all, or one a row.
    """

    name: str
    scheme: LayerScheme
    kind: WeightScale
    weight: TensorInfo
    scale: TensorInfo
    input_scale: TensorInfo | None = None
    input_bound: TensorInfo | None = None
    bias: TensorInfo | None = None
    shards: tuple[int, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """How the layer runs."""
        return recipe_for(self.scheme, "channel" if self.shards else self.kind)

    @property
    def tensors(self) -> list[TensorInfo]:
        """All of its tensors."""
        parts = (self.weight, self.scale, self.input_scale, self.input_bound, self.bias)
        return [part for part in parts if part is not None]


@dataclass
class Contents:
    """A checkpoint, as far as its headers and configs tell.

    Attributes:
        files: its files.
        declared: its quantisation config; None where that cannot be read.
        layers: the FP8 layers by name.
        plain: the tensors that are loaded as they are, by name.
        unused: scales of the KV cache and of attention, by name.
        findings: everything that is wrong or worth knowing.
    """

    files: CheckpointFiles
    declared: Declared | None = None
    layers: dict[str, Fp8Layer] = field(default_factory=dict)
    plain: dict[str, TensorInfo] = field(default_factory=dict)
    unused: dict[str, TensorInfo] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    @property
    def errors(self) -> list[Finding]:
        """The findings that keep it from being loaded."""
        return [finding for finding in self.findings if finding.level == "error"]


def recipe_for(scheme: LayerScheme, kind: WeightScale) -> Recipe:
    """The recipe that runs a layer as its checkpoint declares.

    Activations that the checkpoint leaves alone get dynamic scales, per token or per 1x128: both operands are FP8.
    """
    scale_format: ScaleFormat = "ue8m0" if scheme.ue8m0 else "float32"
    if kind == "block":
        return Recipe("128x128", "1x128", scale_format=scale_format)
    static, whole = scheme.activation == "static", scheme.activation in ("static", "tensor")
    return Recipe(
        "tensor" if kind == "tensor" else "row",
        "tensor" if whole else "row",
        dynamic=not static,
        scale_format=scale_format,
        activation_bound=scheme.activation_bound,
    )


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
        parts = {part: tensors[f"{layer}.{part}"] for part in _PARTS if f"{layer}.{part}" in tensors}
        taken |= {name, *(part.name for part in parts.values())}
        try:
            contents.layers[layer] = _layer(layer, info, parts, contents, declared)
        except Broken as broken:
            contents.findings.append(broken.finding)
    for name, info in tensors.items():
        if name in taken:
            continue
        if _CACHE_SCALE.search(name):
            contents.unused[name] = info
            message = f"{info} is a scale of the KV cache or of attention; it is not used: both run unquantised"
            contents.findings.append(Finding("warning", info.file, name, message))
        elif problem := _misplaced(name, info, contents):
            contents.findings.append(Finding("error", info.file, name, problem))
        else:
            contents.plain[name] = info


def _misplaced(name: str, info: TensorInfo, contents: Contents) -> str | None:
    """Why a tensor that belongs to no FP8 layer cannot be loaded as it is, or None."""
    layer, _, part = name.rpartition(".")
    if part in (*SCALE_NAMES, "input_scale", "input_scale_ub", "output_scale"):
        weight = contents.files.tensors.get(f"{layer}.weight")
        return f"has no F8_E4M3 weight beside it: {layer}.weight is {weight or 'missing'}"
    if info.dtype not in FLOATS and info.dtype.startswith("F"):
        return f"is {info}; weights are F8_E4M3"
    if layer in contents.layers:
        return f"is {info}; it is unknown what it means beside an F8_E4M3 weight"
    return None


def _layer(
    name: str, weight: TensorInfo, parts: dict[str, TensorInfo], contents: Contents, declared: Declared
) -> Fp8Layer:
    """Pair a weight with its scales and check them against the config.

    Raises:
        Broken: they do not fit.
    """
    file = weight.file
    if len(weight.shape) != 2 or not weight.name.endswith(".weight"):
        raise Broken.at(file, f"is {weight}; F8_E4M3 is read for the weight [N, K] of a linear layer only", weight.name)
    pattern = declared.ignored_by(name)
    if pattern is not None:
        message = f"is {weight}, but {declared.ignore_key} in {declared.file} leaves it out by {pattern!r}"
        raise Broken.at(file, message, weight.name)
    scheme = declared.scheme_of(name)
    if scheme is None:
        raise Broken.at(file, f"is {weight}, but no group in {declared.file} targets {name!r}", weight.name)
    scale = _scale(name, weight, parts, scheme, declared)
    kinds = [kind for kind in fitting_kinds(scale, weight) if kind in scheme.weight]
    shards: tuple[int, ...] = ()
    if not kinds and "tensor" in scheme.weight:
        shards = shard_sizes(name, weight, scale, contents.files.config)
        kinds = ["tensor"] if shards else []
    if not kinds:
        wanted = wanted_shapes(scheme.weight, weight)
        message = (
            f"is {scale} for a weight {list(weight.shape)}, but {declared.file} says {scheme.said}: {wanted} belongs"
        )
        raise Broken.at(scale.file, message, scale.name)
    _check_activation(kinds[0], scheme, declared, weight)
    _check_inputs(parts, scheme, declared, weight, max(1, len(shards)))
    bias = parts.get("bias")
    if bias is not None and (bias.dtype not in FLOATS[:3] or list(bias.shape) != [weight.shape[0]]):
        raise Broken.at(bias.file, f"is {bias}; F32, BF16 or F16 [{weight.shape[0]}] belongs", bias.name)
    return Fp8Layer(
        name, scheme, kinds[0], weight, scale, parts.get("input_scale"), parts.get("input_scale_ub"), bias, shards
    )


def _scale(
    name: str, weight: TensorInfo, parts: dict[str, TensorInfo], scheme: LayerScheme, declared: Declared
) -> TensorInfo:
    """The one tensor of weight scales that a layer must have."""
    found = [parts[part] for part in SCALE_NAMES if part in parts]
    if len(found) == 2:
        raise Broken.at(found[1].file, f"is there beside {found[0].name}; a layer has one of the two", found[1].name)
    wanted = "weight_scale_inv" if declared.format == "DeepSeek blocks" else "weight_scale"
    if not found:
        raise Broken.at(weight.file, f"has no scale: {name}.{wanted} is missing", weight.name)
    scale = found[0]
    if scale.dtype not in SCALE_DTYPES:
        raise Broken.at(scale.file, f"is {scale}; a scale is one of {', '.join(SCALE_DTYPES)}", scale.name)
    if not scale.name.endswith(f".{wanted}"):
        message = f"is there, but {declared.file} says {scheme.said}: {wanted} belongs"
        raise Broken.at(scale.file, message, scale.name)
    return scale


def _check_activation(kind: WeightScale, scheme: LayerScheme, declared: Declared, weight: TensorInfo) -> None:
    """Refuse pairs of weight and activation scales that no product takes."""
    fitting = ("group", "none") if kind == "block" else ("static", "token", "tensor", "none")
    if scheme.activation not in fitting:
        message = (
            f"has {kind} scales, but {declared.file} says {scheme.said}: activations {CALLS[scheme.activation]}; "
            "block weights go with dynamic groups of 128, others with static, per-tensor or per-token scales"
        )
        raise Broken.at(weight.file, message, weight.name)


def _check_inputs(
    parts: dict[str, TensorInfo], scheme: LayerScheme, declared: Declared, weight: TensorInfo, count: int
) -> None:
    """A static layer has an input scale, any other has none."""
    given, name = parts.get("input_scale"), weight.name.removesuffix(".weight")
    if scheme.activation == "static" and given is None:
        message = f"is static by {declared.file} ({scheme.said}), but {name}.input_scale is missing"
        raise Broken.at(weight.file, message, weight.name)
    if given is None:
        return
    if scheme.activation != "static":
        message = f"is there, but {declared.file} says {scheme.said}: activations {CALLS[scheme.activation]}"
        raise Broken.at(given.file, message, given.name)
    if given.dtype not in SCALE_DTYPES or given.numel not in (1, count) or len(given.shape) > 2:
        raise Broken.at(given.file, f"is {given}; one F32 or BF16 scale belongs", given.name)


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
