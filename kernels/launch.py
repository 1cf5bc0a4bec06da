"""Compiling a kernel once per specialisation and launching it with little Python: about 4 us instead of 15."""

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


def address(tensor: Tensor, offset: int = 0, dtype: torch.dtype | None = None) -> Address:
    """Return what a kernel takes for ``tensor`` moved by ``offset`` bytes and read as ``dtype``."""
    if not interpreting():
        return tensor.data_ptr() + offset
    if dtype is None:
        return tensor
    flat = tensor.view(torch.uint8)[offset:]
    return flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


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
    launcher = compiled[(*grid, 1, 1)[:3]]
    tail = (*integers, *constants.values())

    def run(*addresses: Address, stream: int) -> None:
        launcher(*addresses, *tail, stream=stream)

    return run


def current_stream(device: torch.device) -> int:
    """Return the raw handle of the current stream of ``device``; 0 under the interpreter."""
    if device.type != "cuda":
        return 0
    return int(torch._C._cuda_getCurrentRawStream(device.index))  # noqa: SLF001 - torch.cuda.current_stream costs 1 us
