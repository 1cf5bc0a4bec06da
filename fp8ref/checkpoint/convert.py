"""Convert a checkpoint to FP8 file by file: a model larger than memory needs no more than a shard of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fp8ref.calibration import static_scales
from fp8ref.checkpoint.build import build_model
from fp8ref.checkpoint.compressed import engine_findings, layer_tensors, left_out, quantization_config, unwritable
from fp8ref.checkpoint.files import CheckpointFiles, read_files
from fp8ref.checkpoint.findings import Broken, CheckpointError, Finding, warn_of
from fp8ref.checkpoint.header import FLOATS, TensorInfo
from fp8ref.checkpoint.progress import byte_bar
from fp8ref.checkpoint.writer import (
    MAX_SHARD,
    ShardWriter,
    check_shard_size,
    check_target,
    is_checkpoint_file,
    replacing,
)
from fp8ref.conversion import ConversionReport, LayerConversion
from fp8ref.emulation.quantize import quantize
from fp8ref.emulation.scales import BLOCK
from fp8ref.recipes import Recipe, recipe_of
from fp8ref.selection import Found, check_matches, check_patterns, reason_to_keep, survey
from fp8ref.sources import is_conv1d, weight_of

_CHUNK = 1 << 22
"""Values that are quantised together."""


def convert_checkpoint(
    source: Path | str,
    target: Path | str,
    recipe: Recipe | str = "row",
    *,
    skip: Sequence[str] | None = None,
    only: Sequence[str] | None = None,
    calibration: Mapping[str, float] | None = None,
    device: torch.device | str = "cpu",
    max_shard_size: int = MAX_SHARD,
    overwrite: bool = False,
    progress: bool = True,
    show: bool = True,
) -> ConversionReport:
    """Write an FP8 copy of a float32, bfloat16 or float16 checkpoint, in the format of :func:`fp8ref.save_checkpoint`.

    Args:
        source: config.json and safetensors files of a transformers model.
        target: where to; it appears only when it is complete. Other files (tokenizer, licence) are copied.
        recipe: e4m3 with tensor, row or 128x128 scales.
        skip: patterns of names to leave alone, as in :func:`fp8ref.convert_`; None leaves the output head alone, which
            serving engines expect in 16 bits. Layers that are tied to an embedding stay in any case.
        only: patterns of names; what none of them matches is left alone.
        calibration: input scales by layer name, for a static recipe: what :func:`fp8ref.calibrate` returned.
        device: where the weights are quantised; the bits do not depend on it.
        max_shard_size: bytes of tensors in a file; about so much is in memory, and one tensor more.
        overwrite: True replaces a checkpoint that is there.
        progress: show a bar (needs rich, and a terminal).
        show: print the report.

    Returns:
        A :class:`fp8ref.ConversionReport`; its bytes are those of the files' tensors.

    Warns:
        CheckpointWarning: as :func:`fp8ref.save_checkpoint` does; something in ``source`` is not read.

    Raises:
        CheckpointError: the source is broken, already quantised or holds a NaN or Inf; nothing is written.
        TypeError, ValueError: a wrong argument, a recipe that the format cannot say, a pattern that matches nothing.
        ImportError: a package of the extra ``checkpoints`` is missing.

    >>> convert_checkpoint("no/such/folder", "new")
    Traceback (most recent call last):
    fp8ref.checkpoint.findings.CheckpointError: source: no such folder: no/such/folder; give a checkpoint folder ...
    """
    recipe, source, target = recipe_of(recipe), Path(source), Path(target)
    problem = unwritable(recipe)
    if problem is not None:
        raise ValueError(f"recipe: {problem}")
    check_shard_size(max_shard_size)
    files = read_files(source, "source")
    _check_source(files)
    if target.resolve() == source.resolve():
        raise CheckpointError(f"target: got the source {source} itself; give another folder")
    check_target(target, "target", overwrite=overwrite)
    model = build_model(source)
    layers = survey(model)
    reasons = _reasons(model, layers, files, skip, only)
    found_fp8 = [found for found, reason in zip(layers, reasons, strict=True) if reason is None]
    scales = static_scales(found_fp8, recipe, calibration)
    chosen = {found.name: recipe for found in sorted(found_fp8, key=lambda found: found.name)}
    ignore = left_out(layers, chosen)
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head_name = next((found.name for found in found_fp8 if found.module is head), None)
    warn_of(source, [*files.findings, *engine_findings(chosen, ignore, head_name)])
    sizes: dict[str, int] = {}
    with replacing(target) as temporary, byte_bar("converting", files.nbytes(), show=progress) as done:
        writer = ShardWriter(temporary, max_shard_size)
        for shard in files.shards:
            try:
                for made in _converted(files, shard, chosen, recipe, scales, torch.device(device), done):
                    sizes |= {name: tensor.numel() * tensor.element_size() for name, tensor in made.items()}
                    writer.add(made)
            except Broken as broken:
                raise CheckpointError.of(source, [broken.finding]) from None
        writer.finish({**files.config, "quantization_config": quantization_config(chosen, ignore)})
        for path in source.iterdir():
            if path.is_file() and (not is_checkpoint_file(path) or path.name == "generation_config.json"):
                shutil.copy(path, temporary / path.name)
    rows = tuple(_row(found, reason, files, sizes) for found, reason in zip(layers, reasons, strict=True))
    report = ConversionReport(recipe, rows, files.nbytes(), writer.total)
    if show:
        report.print()
    return report


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


def _reasons(
    model: Any, layers: Sequence[Found], files: CheckpointFiles, skip: Sequence[str] | None, only: Sequence[str] | None
) -> list[str | None]:
    """Why each module is left alone; None for those that are converted, whose weights must be there."""
    patterns = () if skip is None else check_patterns(skip, "skip")
    chosen = None if only is None else check_patterns(only, "only")
    check_matches(layers, patterns, "skip")
    check_matches(layers, chosen or (), "only")
    head = model.get_output_embeddings()
    reasons: list[str | None] = []
    for found in layers:
        reason = reason_to_keep(found, patterns, chosen)
        if reason is None and found.sharers:
            reason = f"its weight is that of {', '.join(found.sharers)} too"
        elif reason is None and is_conv1d(found.module):
            reason = "Conv1D stores its weight transposed, which FP8 checkpoints do not"
        elif reason is None and skip is None and found.module is head:
            reason = "output head: engines keep it in 16 bits (skip=[] converts it)"
        if reason is None:
            _check_weight(found, files)
        reasons.append(reason)
    if None not in reasons:
        raise ValueError(f"model: {files.folder} has no layer to convert; see skip and only")
    return reasons


def _check_weight(found: Found, files: CheckpointFiles) -> None:
    """Raise unless the file has the weight of a layer that is to be converted."""
    wanted = tuple(weight_of(found.module).shape)
    info = files.tensors.get(f"{found.name}.weight")
    if info is None or info.dtype not in FLOATS[:3] or info.shape != wanted:
        message = f"is {info or 'missing'}; {list(wanted)} in F32, BF16 or F16 belongs"
        file = files.shards[0] if info is None else info.file
        raise CheckpointError.of(files.folder, [Finding("error", file, f"{found.name}.weight", message)])


def _converted(
    files: CheckpointFiles,
    shard: str,
    chosen: Container[str],
    recipe: Recipe,
    scales: Mapping[str, float],
    device: torch.device,
    done: Callable[[int], None],
) -> Iterator[dict[str, Tensor]]:
    """The tensors of one shard: layers converted, the rest as it is."""
    with files.open(shard) as opened:
        for info in files.in_shard(shard):
            name = info.name.removesuffix(".weight")
            value = opened.get_tensor(info.name)
            if name in chosen and info.name != name:
                yield _quantise(info, name, value.to(device), recipe, scales.get(name))
            else:
                yield {info.name: value}
            done(info.nbytes)


def _row(found: Found, reason: str | None, files: CheckpointFiles, sizes: Mapping[str, int]) -> LayerConversion:
    """What became of a module."""
    weight = next(p for p in found.module.parameters(recurse=False) if p.dim() >= 2)
    saved = 0
    if reason is None:
        after = sum(sizes.get(f"{found.name}.{part}", 0) for part in ("weight", "weight_scale", "input_scale"))
        saved = files.tensors[f"{found.name}.weight"].nbytes - after
    kind, shape = type(found.module).__name__, tuple(weight.shape)
    return LayerConversion(found.name, found.names[1:], kind, shape, reason is None, reason or "FP8", saved)


def _quantise(info: TensorInfo, name: str, weight: Tensor, recipe: Recipe, static: float | None) -> dict[str, Tensor]:
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
    input_scale = None if static is None else torch.tensor(static, dtype=torch.float32)
    return layer_tensors(name, torch.cat([part.data for part in made]), scales, input_scale=input_scale)
