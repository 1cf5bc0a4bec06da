"""Compiling a kernel once per specialisation, and launching it with little Python."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8ref.kernels.device import interpreting

Address = int | Tensor
"""What a kernel takes as a pointer: an address on a GPU, a tensor under the interpreter."""

Runner = Callable[..., None]
"""``runner(*arguments, stream=...)``, the arguments being those before the compile-time ones."""


class Pointer:
    """Stands in for a tensor while a kernel is compiled: Triton asks for the dtype and the alignment alone."""

    def __init__(self, dtype: torch.dtype, aligned: bool = True) -> None:
        self.dtype = dtype
        self._address = 16 if aligned else 1

    def data_ptr(self) -> int:
        """Return an address with the alignment that the kernel may count on."""
        return self._address

    @staticmethod
    def ptr_range() -> int:
        """Triton's AMD backend asks for this."""
        return 0


def addresser() -> Callable[[Tensor], Address]:
    """Return what turns a tensor into what a kernel takes for it."""
    return (lambda tensor: tensor) if interpreting() else Tensor.data_ptr


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor.

    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    device = "cpu" if interpreting() else "cuda"
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = _empty
"""Allocates on the current device. Where torch has it, the allocation of its compiler: 1 us instead of 4."""
if not interpreting() and hasattr(torch._C._dynamo.guards, "_empty_strided_cuda"):  # noqa: SLF001
    empty = torch._C._dynamo.guards._empty_strided_cuda  # noqa: SLF001

Carve = Callable[[Tensor], tuple[Address, ...]]
"""Gives the places of buffers inside one allocation of bytes."""


def carver(offsets: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> Carve:
    """Return what cuts an allocation of uint8 at ``offsets``, multiples of 16."""
    if not interpreting():

        def addresses(scratch: Tensor) -> tuple[Address, ...]:
            base = scratch.data_ptr()
            return tuple([base + offset for offset in offsets])

        return addresses

    def views(scratch: Tensor) -> tuple[Address, ...]:
        ends = (*offsets[1:], scratch.numel())
        pieces = (scratch[start:end] for start, end in zip(offsets, ends, strict=True))
        return tuple(
            piece[: piece.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
            for piece, dtype in zip(pieces, dtypes, strict=True)
        )

    return views


def compile_runner(
    kernel: Any,
    grid: tuple[int, ...],
    pointers: tuple[Pointer, ...],
    integers: tuple[int, ...],
    constants: dict[str, Any],
    options: dict[str, Any],
) -> Runner:
    """Compile ``kernel`` for the current device and return what launches it with these integers.

    The runner takes the pointers (:data:`Address`) and ``stream``. The integers are baked into it because Triton
    specialises on them (1, multiples of 16).
    """
    if interpreting():
        interpreted = kernel[grid]

        def interpret(*addresses: Address, stream: int) -> None:
            del stream
            interpreted(*addresses, *integers, **constants)

        return interpret
    compiled = kernel.warmup(*pointers, *integers, grid=grid, **constants, **options)
    x, y, z = (*grid, 1, 1)[:3]
    compiled[x, y, z]  # loads the binary
    launch, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    tail = (*integers, *constants.values())

    def run(*addresses: Address, stream: int) -> None:
        # The three None are Triton's launch hooks, which a profiler of Triton's own would set.
        launch(x, y, z, stream, function, metadata, None, None, None, *addresses, *tail)

    return run


def current_stream(index: int | None) -> int:
    """Return the raw handle of the current stream of the GPU with this index; 0 under the interpreter."""
    if index is None:
        return 0
    return int(torch._C._cuda_getCurrentRawStream(index))  # noqa: SLF001 - torch.cuda.current_stream costs 1 us
