"""Shapes of weight scales: which kind a shape is, and which rows belong to each scale of a fused layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fp8ref.checkpoint.header import TensorInfo
from fp8ref.checkpoint.scheme import WeightScale
from fp8ref.emulation.scales import blocks


def block_shapes(n: int, k: int) -> list[list[int]]:
    """Shapes that scales of 128x128 blocks have; ModelOpt writes four dimensions, or none for a single block."""
    rows, columns = blocks(n), blocks(k)
    shapes = [[rows, columns], [rows, 1, columns, 1]]
    return [*shapes, [], [1]] if rows * columns == 1 else shapes


def fitting_kinds(scale: TensorInfo, weight: TensorInfo) -> list[WeightScale]:
    """The kinds of weight scales that a shape can be.

    >>> w = TensorInfo("w", "F8_E4M3", (300, 128), "", 0, 0)
    >>> [fitting_kinds(TensorInfo("s", "F32", shape, "", 0, 0), w) for shape in ((1,), (300, 1), (3, 1), (4,))]
    [['tensor'], ['channel'], ['block'], []]
    """
    n, k = weight.shape
    shape = list(scale.shape)
    fits: dict[WeightScale, bool] = {
        "tensor": scale.numel == 1 and len(shape) <= 2,
        "channel": shape in ([n], [n, 1]),
        "block": shape in block_shapes(n, k),
    }
    return [kind for kind, fit in fits.items() if fit]


def wanted_shapes(kinds: Sequence[WeightScale], weight: TensorInfo) -> str:
    """The shapes that belong, in words."""
    n, k = weight.shape
    shapes: dict[WeightScale, str] = {"tensor": "[1]", "channel": f"[{n}, 1]", "block": f"[{blocks(n)}, {blocks(k)}]"}
    return " or ".join(shapes[kind] for kind in kinds)


def shard_sizes(layer: str, weight: TensorInfo, scale: TensorInfo, config: dict[str, Any]) -> tuple[int, ...]:
    """The rows that each scalar of a fused layer belongs to; () where that is unknown.

    ``gate_up_proj`` and ``w13`` have two halves; ``qkv_proj`` has the sizes that the model's config gives.

    >>> w, s = TensorInfo("w", "F8_E4M3", (64, 8), "", 0, 0), TensorInfo("s", "F32", (2,), "", 0, 0)
    >>> shard_sizes("mlp.gate_up_proj", w, s, {})
    (32, 32)
    """
    n = weight.shape[0]
    count = scale.numel
    if list(scale.shape) not in ([count], [count, 1]):
        return ()
    last = layer.rpartition(".")[2]
    if count == 2 and last in ("gate_up_proj", "w13") and n % 2 == 0:
        return (n // 2, n // 2)
    if count == 3 and last in ("qkv_proj", "query_key_value", "Wqkv"):
        text = config.get("text_config")
        sizes = _qkv_sizes(text if isinstance(text, dict) else config)
        return sizes if sum(sizes) == n else ()
    return ()


def _qkv_sizes(config: dict[str, Any]) -> tuple[int, ...]:
    """Rows of the queries, keys and values, by the config of a transformers model."""
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if type(heads) is not int or type(hidden) is not int or heads < 1:
        return ()
    groups = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    if type(groups) is not int or type(size) is not int or min(groups, size) < 1:
        return ()
    return (heads * size, groups * size, groups * size)
