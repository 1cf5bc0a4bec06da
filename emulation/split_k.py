"""Into how many parts cuBLASLt cuts K on an H200: a recorded table, compressed into decision trees.

cuBLASLt chooses the number of parts by a heuristic of its own, which no simple rule reproduces. What is certain, and
recorded without an exception (``benchmarks/split_k_map.py``): no cut with fewer than 41 tiles of 128 along K, at most
(tiles - 1) // 20 parts, and never more than fit into the workspace that PyTorch offers, 1 MiB, at 4 bytes for each
output and part. Row-wise scales never cut. Within those bounds two decision trees, grown from cuBLASLt's own answers,
are asked; where they disagree, or nothing was recorded, the function raises.

Where K is no multiple of the S parts and K // S is one of 128, cuBLASLt 13.1.0 makes S parts of K // S and never adds
the products left over: a defect (``benchmarks/split_k_tail.py``). :func:`dropped_k` says how many.

It holds for one version: cuBLASLt 13.1.0 with torch 2.11.0+cu130 on an NVIDIA H200, with the default workspace.
"""

from __future__ import annotations

import warnings
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fp8ref.emulation.checks import check_bool, check_split_k
from fp8ref.emulation.scales import Scaling, check_pair
from fp8ref.emulation.units import UNITS, TensorCoreUnit, check_int

TABLE = Path(__file__).with_name("split_k_h200.npz")
WORKSPACE = 2**20
"""Bytes that PyTorch 2.11 offers cuBLASLt for scaled products (``at::cuda::getCUDABlasLtWorkspaceSize``)."""
LEAST_TILES = 41
LARGEST_K = 80_000
"""The largest K that was recorded."""
DEVICES = ("h200",)
TILES = ((8, 64), (64, 16), (16, 64), (64, 32), (32, 64), (24, 64), (40, 64), (8, 128), (8, 192), (64, 24), (64, 48))
"""Output tiles (rows, columns) of kernels that cuBLASLt was seen to choose; their counts are features of the trees."""

_KINDS = {
    (torch.bfloat16, None): "bf16",
    (torch.bfloat16, torch.bfloat16): "bf16",
    (torch.float16, None): "fp16",
    (torch.float16, torch.float16): "fp16",
    (torch.float32, None): "fp32",
    (torch.float8_e4m3fn, None): "e4m3",
    (torch.float8_e4m3fn, torch.bfloat16): "e4m3+bf16",
}
_LEAF = 255


class NoEvidenceError(ValueError):
    """cuBLASLt's choice for this product was not recorded, or the recordings near it contradict each other.

    >>> issubclass(NoEvidenceError, ValueError)
    True
    """


class DroppedProductsWarning(UserWarning):
    """cuBLASLt leaves out the last products of K for this shape, so its result is not the product of a and b.

    >>> issubclass(DroppedProductsWarning, UserWarning)
    True
    """


def split_k(
    m: int,
    n: int,
    k: int,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    scaling: tuple[Scaling, Scaling] = ("tensor", "tensor"),
    bias_dtype: torch.dtype | None = None,
    operands: tuple[torch.dtype, torch.dtype] = (torch.float8_e4m3fn, torch.float8_e4m3fn),
    device: str = "h200",
) -> int:
    """Return into how many parts cuBLASLt cuts K of ``torch._scaled_mm``: what ``split_k=`` of the oracle takes.

    With a warning where cuBLASLt leaves the last products of K out (3 of 9,000 random shapes, K above 43,000). There
    only ``split_k="auto"`` of the oracle returns what the GPU does: a number adds every product, as it always does.

    Args:
        m: rows of a, at least 1.
        n: columns of b, a multiple of 16.
        k: K, a multiple of 16.
        out_dtype: type of the output.
        use_fast_accum: as :func:`fp8ref.emulate_matmul` takes it. The table is that of True; with False one answer in
            1,250 was another where K is cut, which counts among the wrong ones.
        scaling: kinds of scales. Row-wise never cuts; for block scales only the bounds are known.
        bias_dtype: type of the bias, None for none; it matters with an fp8 output.
        operands: formats of a and b.
        device: what the answer is for: ``"h200"``, with cuBLASLt 13.1.0, torch 2.11 and its default workspace.

    Returns:
        The number of parts, 1 for no cut.

    Raises:
        NoEvidenceError: nothing was recorded that decides it. Other types of output or of operands, block scales within
            the bounds, K above 80,000, and shapes about which the two trees disagree.
        TypeError, ValueError: an argument that does not fit.

    Warns:
        DroppedProductsWarning: cuBLASLt never adds the last ``K % parts`` products.

    Source: cuBLASLt's answers on an H200, each kind checked against measured cuts (``benchmarks/split_k_map.py``); how
    often this function is right about shapes that it was not made from: ``docs/probe.md``.

    >>> split_k(8, 64, 16384), split_k(4096, 4096, 4096)
    (6, 1)
    """
    check_bool(use_fast_accum, "use_fast_accum")
    check_int(m, "m", 1, 2**31 - 1)
    for name, value in (("n", n), ("k", k)):
        check_int(value, name, 16, 2**31 - 1)
        if value % 16:
            raise ValueError(f"{name}: got {value}; cuBLASLt takes multiples of 16")
    if device not in DEVICES:
        raise NoEvidenceError(f"device: got {device!r}; recorded were {list(DEVICES)}")
    pair = check_pair(scaling)
    tiles = -(-k // 128)
    if pair == ("row", "row") or tiles < LEAST_TILES or 2 * 4 * m * n > WORKSPACE:
        return 1
    where = f"M={m}, N={n}, K={k}"
    if k > LARGEST_K:
        raise NoEvidenceError(f"k: got {k}; cuBLASLt was recorded up to K={LARGEST_K}. Give split_k as a number")
    kind = _KINDS.get((out_dtype, bias_dtype))
    if kind is None or pair != ("tensor", "tensor") or operands != (torch.float8_e4m3fn,) * 2:
        raise NoEvidenceError(
            f"split_k: {where} may be cut, and when was not recorded for out_dtype={out_dtype}, "
            f"bias_dtype={bias_dtype}, scaling={pair}, operands={operands}. Give split_k as a number"
        )
    features = describe(m, n, k)
    if kind != "bf16":
        features.append(_walk("bf16-fast.a", features))
    one, two = (_walk(f"{kind}-fast.{tree}", features) for tree in ("a", "b"))
    if one != two:
        raise NoEvidenceError(
            f"split_k: {where} lies where the recordings are too sparse: {one} or {two} parts. Give split_k as a number"
        )
    if dropped := dropped_k(k, one):
        warnings.warn(
            f"split_k: cuBLASLt 13.1.0 cuts {where} into {one} parts of {k // one} and never adds the last {dropped} "
            "products of K; fp8ref.scaled_matmul and fp8ref.scaled_linear do",
            DroppedProductsWarning,
            stacklevel=2,
        )
    return one


def dropped_k(k: int, parts: int) -> int:
    """Return how many products at the end of K cuBLASLt never adds when it cuts K into so many parts.

    Source: 28 shapes and both outputs of ``benchmarks/split_k_tail.py`` on an H200: ones at every one of these places.

    >>> dropped_k(51216, 20), dropped_k(51232, 20), dropped_k(51200, 20)
    (16, 0, 0)
    """
    return k % parts if (k // parts) % 128 == 0 else 0


known_split_k = split_k
"""Under a name that an argument called ``split_k`` leaves free."""


def resolve_split_k(
    split_k: int | Literal["auto"],
    device: str | None,
    a: Tensor,
    b: Tensor,
    *,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    scaling: tuple[Scaling, Scaling],
    bias: Tensor | None,
    unit: TensorCoreUnit,
) -> tuple[int, int]:
    """What ``split_k=`` and ``device=`` of :func:`fp8ref.emulate_matmul` mean: parts, and how much of K they add up.

    Raises:
        NoEvidenceError: ``"auto"`` where it is not known.
        TypeError, ValueError: ``"auto"`` without a device or with another unit than the H200's, or a device without it.
    """
    if split_k != "auto":
        check_split_k(split_k)
        if device is not None:
            raise ValueError(f'device: got {device!r} with split_k={split_k}; it goes with split_k="auto" alone')
        return split_k, a.shape[1]
    if device is None:
        raise TypeError(f'device: missing with split_k="auto"; give one of {list(DEVICES)}')
    if unit != UNITS["sm90"]:
        raise ValueError(f'unit: got {unit.name!r} with split_k="auto", which is known for unit "sm90" alone')
    if a.shape[0] == 0:
        return 1, a.shape[1]
    parts = known_split_k(
        a.shape[0],
        b.shape[1],
        a.shape[1],
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        scaling=scaling,
        bias_dtype=None if bias is None else bias.dtype,
        operands=(a.dtype, b.dtype),
        device=device,
    )
    return parts, a.shape[1] - dropped_k(a.shape[1], parts)


def describe(m: int, n: int, k: int) -> list[int]:
    """The features that the trees ask about, in their order."""
    tiles = -(-k // 128)
    most, room = (tiles - 1) // 20, min(WORKSPACE // (4 * m * n), 63)
    features = [m, n, tiles, k, most, room, m * n, k % 128, n % 64, min(most, room)]
    features += [-(-m // rows) * -(-n // columns) for rows, columns in TILES]
    features += [-(-m // rows) for rows in (8, 16, 24, 32, 40, 48, 64)]
    return features + [-(-n // columns) for columns in (16, 32, 64, 128, 192, 256)]


@cache
def _tree(name: str) -> tuple[Any, Any, Any]:
    """One tree of the table: the feature, the threshold (at a leaf the answer) and the right child of each node."""
    with np.load(TABLE) as file:
        return file[f"{name}.feature"], file[f"{name}.threshold"], file[f"{name}.right"]


def _walk(name: str, features: list[int]) -> int:
    """The answer of one tree; a node's left child is the next node."""
    feature, threshold, right = _tree(name)
    node = 0
    while feature[node] != _LEAF:
        node = node + 1 if features[feature[node]] <= threshold[node] else int(right[node])
    return int(threshold[node])
