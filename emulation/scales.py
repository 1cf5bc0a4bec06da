"""Kinds of scales: which shapes they have for an operand, and which pair of kinds a product was given."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fp8ref.emulation.checks import check_same_device, check_tensor

BLOCK = 128
"""Side of a scale block."""

Scaling = Literal["tensor", "row", "1x128", "128x128"]
SCALINGS: tuple[Scaling, ...] = get_args(Scaling)

PAIRS: tuple[tuple[Scaling, Scaling], ...] = (
    ("tensor", "tensor"),
    ("row", "row"),
    ("1x128", "1x128"),
    ("1x128", "128x128"),
    ("128x128", "1x128"),
)
"""Pairs of kinds (of ``a``, of ``b``) that a product takes; where shapes fit several, the first is meant."""


def blocks(size: int) -> int:
    """Number of scale blocks along ``size`` elements, a ragged tail counted."""
    return -(-size // BLOCK)


def check_scaling(scaling: object, argument: str = "scaling") -> Scaling:
    """Return ``scaling`` if it is a known kind.

    Raises:
        ValueError: it is not.
    """
    for known in SCALINGS:
        if scaling == known:
            return known
    raise ValueError(f"{argument}: got {scaling!r}; give one of {list(SCALINGS)}")


def scale_shape(scaling: Scaling, *shape: int) -> list[int]:
    """Shape of the scales of an operand [..., rows, K] (for ``b`` [K, N]: of its transpose).

    >>> scale_shape("1x128", 3, 300), scale_shape("128x128", 130, 300)
    ([3, 3], [2, 3])
    """
    *leading, k = shape
    if scaling == "tensor":
        return []
    if scaling == "row":
        return [*leading, 1]
    return [*(map(blocks, leading) if scaling == "128x128" else leading), blocks(k)]


def scale_fits(scale: Tensor, scaling: Scaling, rows: int, k: int) -> bool:
    """Whether ``scale`` has the shape of its kind; a tensor-wise scale is any tensor of one element."""
    return scale.numel() == 1 if scaling == "tensor" else list(scale.shape) == scale_shape(scaling, rows, k)


def resolve_pair(
    a: Tensor, b: Tensor, scale_a: object, scale_b: object, scaling: object
) -> tuple[tuple[Scaling, Scaling], Tensor, Tensor]:
    """Check the scales of ``a`` [M, K] and ``b`` [K, N] and find their kinds.

    Args:
        a: the left operand.
        b: the right operand.
        scale_a: its fp32 scales.
        scale_b: fp32 scales of ``b``, laid out as ``b`` is.
        scaling: None to go by the shapes, or the pair of kinds.

    Returns:
        The pair of kinds and the two scales.

    Raises:
        TypeError, ValueError: a missing, wrongly typed or wrongly shaped scale, or an unknown pair.
    """
    tensors: list[Tensor] = []
    for argument, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale is None:
            raise TypeError(f"{argument}: missing; give an fp32 scale (fp8ref.accumulate computes without scales)")
        tensor = check_tensor(scale, argument)
        if tensor.dtype != torch.float32:
            raise TypeError(f"{argument}: got {tensor.dtype}; scales are torch.float32, convert with .float()")
        check_same_device(tensor, a, argument)
        tensors.append(tensor)
    left, right = tensors
    allowed = PAIRS if scaling is None else (check_pair(scaling),)
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    fits_a = [pair for pair in allowed if scale_fits(left, pair[0], m, k)]
    fits_b = [pair for pair in allowed if scale_fits(right.t() if right.dim() == 2 else right, pair[1], n, k)]
    for pair in fits_a:
        if pair in fits_b:
            return pair, left, right
    argument, got = ("scale_a", left) if not fits_a else ("scale_b", right)
    raise ValueError(
        f"{argument}: got shape {list(got.shape)} (scale_a {list(left.shape)}, scale_b {list(right.shape)}) for a "
        f"{list(a.shape)} and b {list(b.shape)}; give "
        + "; or ".join(
            f"{pair[0]} by {pair[1]}: scale_a {scale_shape(pair[0], m, k)}, scale_b {scale_shape(pair[1], n, k)[::-1]}"
            for pair in allowed
        )
    )


def check_pair(scaling: object) -> tuple[Scaling, Scaling]:
    """Return ``scaling`` if it is a pair of kinds that a product takes.

    Raises:
        ValueError: it is not.
    """
    for pair in PAIRS:
        if scaling == pair or list(pair) == scaling:
            return pair
    raise ValueError(f"scaling: got {scaling!r}; give a pair for a and b, one of {list(PAIRS)}, or None")
