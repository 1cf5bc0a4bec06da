"""What is wrong with the values of a checkpoint: NaN codes in weights, scales that are no scales. Read in chunks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fp8ref.checkpoint.contents import Contents
from fp8ref.checkpoint.files import Shard
from fp8ref.checkpoint.findings import Broken, Finding
from fp8ref.checkpoint.fp8layer import Fp8Layer
from fp8ref.checkpoint.header import TensorInfo

CHUNK = 1 << 24
"""Bytes of a weight that are looked at together."""


def scan_values(contents: Contents, progress: Callable[[int], None] = lambda _: None) -> list[Finding]:
    """Look at the values of every weight, scale and bound; at most a chunk of a weight is in memory.

    Args:
        contents: what the headers told.
        progress: called with the number of bytes looked at.

    Returns:
        An error for each tensor with a wrong value (a warning for scales that are not used).
    """
    findings: list[Finding] = []
    for shard in contents.files.shards:
        layers = [layer for layer in contents.layers.values() if any(part.file == shard for part in layer.tensors)]
        unused = [info for info in contents.unused.values() if info.file == shard]
        if not layers and not unused:
            continue
        try:
            with contents.files.open(shard) as opened:
                for layer in layers:
                    findings += _scan_layer(layer, shard, opened, progress)
                for info in unused:
                    findings += [
                        Finding("warning", error.file, error.tensor, error.message)
                        for error in scale_errors(info, opened.get_tensor(info.name))
                    ]
        except Broken as broken:
            findings.append(broken.finding)
    return findings


def _scan_layer(layer: Fp8Layer, shard: str, opened: Shard, progress: Callable[[int], None]) -> list[Finding]:
    """Look at the tensors of a layer that lie in this shard."""
    findings: list[Finding] = []
    if layer.weight.file == shard:
        findings += _scan_weight(layer.weight, opened, progress)
    for info in (layer.scale, layer.input_scale, layer.input_bound):
        if info is not None and info.file == shard:
            findings += scale_errors(info, opened.get_tensor(info.name), layer)
    return findings


def _scan_weight(info: TensorInfo, opened: Shard, progress: Callable[[int], None]) -> list[Finding]:
    """Look for NaN codes, some rows at a time."""
    rows, columns = info.shape
    step = max(1, CHUNK // max(1, columns))
    part = opened.get_slice(info.name)
    for first in range(0, rows, step):
        chunk = part[first : min(first + step, rows)]
        if error := weight_error(info, chunk, first):
            return [error]
        progress(chunk.numel())
    return []


def weight_error(info: TensorInfo, codes: Tensor, first_row: int = 0) -> Finding | None:
    """An error for the first NaN code in some rows of a weight, or None."""
    bits = codes.contiguous().view(torch.uint8)
    if bits.numel() == 0 or int(bits.bitwise_and(0x7F).max()) != 0x7F:
        return None
    wrong = bits.bitwise_and(0x7F) == 0x7F
    row, column = wrong.nonzero()[0].tolist()
    message = f"has the NaN code {hex(int(bits[row, column]))} at [{first_row + row}, {column}]"
    return Finding("error", info.file, info.name, message)


def scale_errors(info: TensorInfo, value: Tensor, layer: Fp8Layer | None = None) -> list[Finding]:
    """Errors for scales that are not finite, not above zero, or not what the config declares."""
    scale = to_float32(value)
    good = scale.isfinite() & (scale > 0)
    if not bool(good.all()):
        count, first = int((~good).sum()), (~good).reshape(-1).nonzero()[0].item()
        place = [] if not info.shape else torch.unravel_index(torch.tensor(int(first)), info.shape)
        where = [int(index) for index in place]
        value_there = scale.reshape(-1)[int(first)].item()
        message = f"has {value_there} at {where}, {count} of {scale.numel()} wrong; a scale is finite and above 0"
        return [Finding("error", info.file, info.name, message)]
    if layer is None:
        return []
    if info is layer.input_bound and scale.flatten().tolist() != [layer.scheme.activation_bound]:
        message = f"is {scale.flatten()[0].item()}, but the config says {layer.scheme.said}"
        return [Finding("error", info.file, info.name, message)]
    if info is layer.input_scale and bool((scale != scale.reshape(-1)[0]).any()):
        message = f"has different scales for one input, {scale.flatten().tolist()}; the fused layers get the same x"
        return [Finding("error", info.file, info.name, message)]
    if layer.scheme.ue8m0 and bool((scale.frexp()[0] != 0.5).any()):
        message = f"has scales that are no powers of two, but the config says scale_fmt 'ue8m0' ({layer.scheme.said})"
        return [Finding("error", info.file, info.name, message)]
    return []


def overflow_error(info: TensorInfo, value: Tensor, dtype: torch.dtype | None) -> Finding | None:
    """An error where a conversion to ``dtype`` makes a finite value infinite, or None."""
    if dtype in (None, value.dtype) or not value.is_floating_point():
        return None
    lost = value.to(dtype).isinf() & value.isfinite()
    if not bool(lost.any()):
        return None
    message = f"has {value[lost][0].item()}, which {dtype} does not reach; give a wider dtype="
    return Finding("error", info.file, info.name, message)


def to_float32(scale: Tensor) -> Tensor:
    """A scale in fp32, exactly: fp32 holds every value of bf16, fp16 and e8m0."""
    return scale.to(torch.float32)
