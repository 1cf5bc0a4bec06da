"""Memory between guard bands of NaN: a write beside a tensor shows, and a read beside it spoils the result."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

GUARD = 256
"""Bytes before and after every tensor of the kit."""
GUARD_BYTE = 0xFF
"""A byte that makes every element made of it a NaN, in each of the formats."""


def guarded_empty(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu", *, offset: int = 0
) -> tuple[Tensor, Tensor]:
    """A contiguous tensor of NaN, and the uint8 memory around it, guard bands included.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: where it lies.
        offset: elements between the guard band and the first element.

    >>> inside, memory = guarded_empty((1, 3), torch.float32)
    >>> inside, memory.numel() - 2 * GUARD
    (tensor([[nan, nan, nan]]), 12)
    """
    start = GUARD + offset * dtype.itemsize
    size = math.prod(shape) * dtype.itemsize
    memory = torch.full((start + size + GUARD,), GUARD_BYTE, dtype=torch.uint8, device=device)
    inside: Tensor = memory[start : start + size].view(dtype).view(torch.Size(shape))
    return inside, memory


def changed_guards(memory: Tensor) -> int:
    """How many bytes of the two guard bands are no longer what :func:`guarded_empty` wrote.

    >>> inside, memory = guarded_empty((2,), torch.bfloat16)
    >>> memory[GUARD + 4 : GUARD + 6] = 0  # one element past the end
    >>> changed_guards(memory)
    2
    """
    return int((torch.cat([memory[:GUARD], memory[-GUARD:]]) != GUARD_BYTE).sum())
