"""Buffers between guard bands of NaN: a write outside is seen, a read outside poisons the result."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fp8ref.kernels import launch

GUARD = 256
NAN_BYTE = 0xFF
"""Every byte 0xFF is a NaN in both FP8 formats, bf16, fp16 and fp32."""


class Guards:
    """Makes guarded buffers and remembers them until they are checked."""

    def __init__(self) -> None:
        self._raw: list[tuple[Tensor, int]] = []
        self.checked = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
        """Return a contiguous buffer of NaN between guard bands."""
        nbytes = math.prod(shape) * dtype.itemsize
        raw = torch.full((nbytes + 2 * GUARD,), NAN_BYTE, dtype=torch.uint8, device=device)
        self._raw.append((raw, nbytes))
        inside: Tensor = raw[GUARD : GUARD + nbytes].view(dtype).view(torch.Size(shape))
        return inside

    def copy(self, x: Tensor) -> Tensor:
        """Return a guarded copy of a contiguous tensor."""
        out = self.empty(x.shape, dtype=x.dtype, device=x.device)
        if x.numel():
            out.copy_(x)
        return out

    def broken(self) -> int:
        """Return how many guard bytes changed since the last check, and forget the buffers."""
        if not self._raw:
            return 0
        bands = torch.cat([torch.cat([raw[:GUARD], raw[GUARD + n :]]) for raw, n in self._raw])
        self.checked += len(self._raw)
        self._raw = []
        return int((bands != NAN_BYTE).sum())

    @contextmanager
    def allocations(self) -> Iterator[None]:
        """Guard what the library itself allocates: results, codes, scales, counters, partial results."""
        real = launch.empty
        launch.empty = lambda shape, _strides, dtype: self.empty(shape, dtype=dtype, device="cuda")
        try:
            yield
        finally:
            launch.empty = real


def differing_bits(a: Tensor, b: Tensor) -> int:
    """Return in how many elements two tensors differ in any bit."""
    if a.shape != b.shape or a.dtype != b.dtype:
        raise ValueError(f"got {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}; compare like with like")
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return int((a.contiguous().view(whole) != b.contiguous().view(whole)).sum())
