"""Convert a checkpoint to FP8 file by file: a model larger than memory needs no more than a shard of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8ref.checkpoint.build import build_model
from fp8ref.checkpoint.compressed import layer_tensors, quantization_config, unwritable
from fp8ref.checkpoint.files import CheckpointFiles, read_files
from fp8ref.checkpoint.findings import Broken, CheckpointError, Finding
from fp8ref.checkpoint.header import FLOATS, TensorInfo
from fp8ref.checkpoint.progress import byte_bar
from fp8ref.checkpoint.scheme import match_rank
from fp8ref.checkpoint.writer import (
    MAX_SHARD,
    ShardWriter,
    check_shard_size,
    check_target,
    is_checkpoint_file,
    replacing,
)
from fp8ref.emulation.quantize import quantize
from fp8ref.emulation.scales import BLOCK
from fp8ref.recipes import Recipe, recipe_of

_CHUNK = 1 << 22
"""Values that are quantised together."""


@dataclass(frozen=True)
class ConvertedLayer:
    """What became of one linear layer: its name and shape, whether it is FP8 now, why not, and its bytes."""

    name: str
    shape: tuple[int, ...]
    converted: bool
    reason: str
    bytes_before: int
    bytes_after: int


@dataclass(frozen=True)
class CheckpointConversion:
    """What :func:`convert_checkpoint` did; printed, it is a table.

    Attributes:
        layers: every linear layer.
        bytes_before: of all tensors of the source.
        bytes_after: of all tensors written.

    >>> layer = ConvertedLayer("up", (4, 8), True, "row", 64, 48)
    >>> print(CheckpointConversion((layer,), 164, 148))
    up  [4, 8]  FP8: row  64 -> 48 bytes
    1 of 1 linear layers in FP8; 164 -> 148 bytes in all
    """

    layers: tuple[ConvertedLayer, ...]
    bytes_before: int
    bytes_after: int

    def __str__(self) -> str:
        """One line for each layer and a total."""
        rows = [
            (
                layer.name,
                str(list(layer.shape)),
                f"{'FP8' if layer.converted else 'kept'}: {layer.reason}",
                f"{layer.bytes_before:,} -> {layer.bytes_after:,} bytes",
            )
            for layer in self.layers
        ]
        widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
        lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        done = sum(layer.converted for layer in self.layers)
        total = f"{self.bytes_before:,} -> {self.bytes_after:,} bytes in all"
        return "\n".join([*lines, f"{done} of {len(rows)} linear layers in FP8; {total}"])


def convert_checkpoint(
    source: Path | str,
    target: Path | str,
    recipe: Recipe | str = "row",
    *,
    skip: Sequence[str] = ("lm_head",),
    device: torch.device | str = "cpu",
    max_shard_size: int = MAX_SHARD,
    overwrite: bool = False,
    progress: bool = True,
) -> CheckpointConversion:
    """Write an FP8 copy of a float32, bfloat16 or float16 checkpoint, in the format of :func:`fp8ref.save_checkpoint`.

    Args:
        source: config.json and safetensors files of a transformers model; its ``nn.Linear`` layers are converted.
        target: where to; it appears only when it is complete. Other files (tokenizer, licence) are copied.
        recipe: dynamic, e4m3, with tensor, row or 128x128 scales.
        skip: layers that stay as they are: names, last or first parts of them, wildcards, or ``re:`` and a regular
            expression. Layers that are tied to an embedding stay too.
        device: where the weights are quantised; the bits do not depend on it.
        max_shard_size: bytes of tensors in a file; about so much is in memory, and one tensor more.
        overwrite: True replaces a checkpoint that is there.
        progress: show a bar (needs rich, and a terminal).

    Returns:
        A :class:`CheckpointConversion`: every linear layer, and why it was left out if it was.

    Raises:
        CheckpointError: the source is broken, already quantised or holds a NaN or Inf; nothing is written.
        ValueError: a recipe that the format cannot say; a pattern of ``skip`` that matches nothing.
        ImportError: a package of the extra ``checkpoints`` is missing.

    >>> convert_checkpoint("no/such/folder", "new")
    Traceback (most recent call last):
    fp8ref.checkpoint.findings.CheckpointError: folder: no such folder: no/such/folder; give a checkpoint folder ...
    """
    recipe, source, target = recipe_of(recipe), Path(source), Path(target)
    _check_recipe(recipe)
    check_shard_size(max_shard_size)
    files = read_files(source)
    _check_source(files)
    check_target(target, overwrite=overwrite)
    if target.resolve() == source.resolve():
        raise CheckpointError(f"target: got the source {source} itself; give another folder")
    model = build_model(source)
    kept, chosen = _choose(model, files, skip)
    before = files.nbytes()
    layers: list[ConvertedLayer] = []
    with replacing(target) as temporary, byte_bar("converting", before, show=progress) as done:
        writer = ShardWriter(temporary, max_shard_size)
        for shard in files.shards:
            try:
                _convert_shard(files, shard, writer, layers, recipe, {*chosen}, torch.device(device), done)
            except Broken as broken:
                raise CheckpointError.of(source, [broken.finding]) from None
        names = {layer.name: recipe for layer in layers}
        config = {**files.config, "quantization_config": quantization_config(names, [*kept])}
        writer.finish(config)
        for path in source.iterdir():
            if path.is_file() and (not is_checkpoint_file(path) or path.name == "generation_config.json"):
                shutil.copy(path, temporary / path.name)
    for name, reason in kept.items():
        info = files.tensors.get(f"{name}.weight")
        size = 0 if info is None else info.nbytes
        shape = tuple(model.get_submodule(name).get_parameter("weight").shape)
        layers.append(ConvertedLayer(name, shape, False, reason, size, size))
    return CheckpointConversion(tuple(layers), before, writer.total)


def _check_recipe(recipe: Recipe) -> None:
    """Refuse recipes that need more than the weights, or that cannot be written."""
    if not recipe.dynamic:
        raise ValueError("recipe: got a static one, whose scales need a calibration; calibrate a loaded model instead")
    problem = unwritable(recipe)
    if problem is not None:
        raise ValueError(f"recipe: {problem}")


def _check_source(files: CheckpointFiles) -> None:
    """Refuse a source with errors, or one that is quantised already."""
    found = list(files.findings)
    found += [
        Finding("error", "config.json", "", f"has a {key}: it is quantised already; give its source")
        for key in ("quantization_config", "compression_config")
        if files.config.get(key) is not None
    ]
    narrow = [info for info in files.tensors.values() if info.dtype.startswith("F8_")]
    found += [Finding("error", info.file, info.name, f"is {info}: it is quantised already") for info in narrow[:1]]
    if any(finding.level == "error" for finding in found):
        raise CheckpointError.of(files.folder, found)


def _choose(model: nn.Module, files: CheckpointFiles, skip: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The linear layers that stay, each with the reason, and those that are converted."""
    if isinstance(skip, str):
        raise TypeError(f"skip: got {skip!r}; give a list of names or patterns")
    linears = [name for name, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear]
    for pattern in skip:
        if not any(match_rank(pattern, name, "modules") for name in linears):
            raise ValueError(f"skip: {pattern!r} matches no linear layer; the first are {linears[:3]}")
    owners: dict[int, set[type]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(type(module))
    kept: dict[str, str] = {}
    chosen: list[str] = []
    for name in linears:
        skipped = next((pattern for pattern in skip if match_rank(pattern, name, "modules")), None)
        weight: Any = model.get_submodule(name).weight
        info = files.tensors.get(f"{name}.weight")
        if skipped is not None:
            kept[name] = f"skip {skipped!r}"
        elif owners[id(weight)] != {nn.Linear}:
            kept[name] = "tied to an embedding"
        elif info is None or info.dtype not in FLOATS or info.shape != tuple(weight.shape):
            found = "missing" if info is None else str(info)
            message = f"is {found}; {list(weight.shape)} in F32, BF16 or F16 belongs"
            file = files.shards[0] if info is None else info.file
            raise CheckpointError.of(files.folder, [Finding("error", file, f"{name}.weight", message)])
        else:
            chosen.append(name)
    return kept, chosen


def _convert_shard(
    files: CheckpointFiles,
    shard: str,
    writer: ShardWriter,
    layers: list[ConvertedLayer],
    recipe: Recipe,
    chosen: set[str],
    device: torch.device,
    done: Callable[[int], None],
) -> None:
    """Convert the layers of one shard and copy the rest."""
    with files.open(shard) as opened:
        for info in files.in_shard(shard):
            name = info.name.removesuffix(".weight")
            value = opened.get_tensor(info.name)
            if name in chosen and info.name != name:
                made = _quantise(info, name, value.to(device), recipe)
                size = sum(tensor.numel() * tensor.element_size() for tensor in made.values())
                layers.append(ConvertedLayer(name, info.shape, True, recipe.weight_scaling, info.nbytes, size))
            else:
                made = {info.name: value}
            writer.add(made)
            done(info.nbytes)


def _quantise(info: TensorInfo, name: str, weight: Tensor, recipe: Recipe) -> dict[str, Tensor]:
    """One weight in FP8, under the names of the format; some rows at a time, so that little is in memory twice."""
    step = max(BLOCK, _CHUNK // max(1, weight.shape[1]) // BLOCK * BLOCK)
    chunks = weight.split(step)
    for number, chunk in enumerate(chunks):
        if not bool(chunk.isfinite().all()):
            row, column = (~chunk.isfinite()).nonzero()[0].tolist()
            place = [number * step + row, column]
            raise Broken.at(info.file, f"has {chunk[row, column].item()} at {place}; FP8 weights are finite", info.name)
    scale = None
    if recipe.weight_scaling == "tensor":
        absmax = torch.stack([chunk.abs().amax().float() for chunk in chunks]).amax()
        scale = quantize(absmax.reshape(1, 1), recipe.weight_dtype).scale
    made = [quantize(chunk, recipe.weight_dtype, scaling=recipe.weight_scaling, scale=scale) for chunk in chunks]
    scales = made[0].scale if scale is not None else torch.cat([part.scale for part in made])
    return layer_tensors(name, torch.cat([part.data for part in made]), scales)
