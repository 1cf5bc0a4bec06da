"""Subnormal numbers, which a program (``torch.set_flush_denormal``) or a library it loads may have switched off."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_SMALLEST_NORMAL = 2.0**-1022


def are_flushed() -> bool:
    """Whether this thread's processor takes subnormal numbers for zero.

    >>> are_flushed()
    False
    """
    return _SMALLEST_NORMAL * 0.5 == 0.0


@contextmanager
def subnormals_kept() -> Iterator[None]:
    """Compute with subnormal numbers, whatever the thread is set to; afterwards it is set as before.

    torch's own threads keep the setting that they began with, so that in this rare case the block has one thread.

    >>> _ = torch.set_flush_denormal(True)
    >>> with subnormals_kept():
    ...     half = torch.tensor(2.0**-126) * 0.5
    >>> _ = torch.set_flush_denormal(False)
    >>> float(half) == 2.0**-127
    True
    """
    if not are_flushed():
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.set_flush_denormal(False)
    try:
        yield
    finally:
        torch.set_flush_denormal(True)
        torch.set_num_threads(threads)
