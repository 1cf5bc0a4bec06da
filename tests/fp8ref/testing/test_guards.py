"""Guard bands: what lies between them, and that every byte of theirs counts."""

from __future__ import annotations

import pytest
import torch

from fp8ref.testing.floats import FLOATS
from fp8ref.testing.guards import GUARD, GUARD_BYTE, changed_guards, guarded_empty


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_guard_byte_is_nan_in_every_format(dtype: torch.dtype) -> None:
    assert torch.full((8,), GUARD_BYTE, dtype=torch.uint8).view(dtype).isnan().all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (0, 4), (2, 0, 3)])
@pytest.mark.parametrize("offset", [0, 3])
def test_a_tensor_of_nan_lies_between_the_bands(dtype: torch.dtype, shape: tuple[int, ...], offset: int) -> None:
    inside, memory = guarded_empty(shape, dtype, offset=offset)
    assert (inside.shape, inside.dtype, inside.is_contiguous()) == (shape, dtype, True)
    assert inside.isnan().all()
    assert memory.numel() == 2 * GUARD + (offset + inside.numel()) * dtype.itemsize
    if inside.numel():
        assert inside.data_ptr() - memory.data_ptr() == GUARD + offset * dtype.itemsize
    inside.zero_()
    assert changed_guards(memory) == 0
    assert (memory == 0).sum() == inside.numel() * dtype.itemsize


@pytest.mark.parametrize("size", [0, 1, 6])
def test_every_byte_of_the_bands_counts(size: int) -> None:
    _, memory = guarded_empty((size,), torch.bfloat16)
    for place in (0, GUARD - 1, -GUARD, -1):
        memory[place] -= 1
    assert changed_guards(memory) == 4
    memory.fill_(0)
    assert changed_guards(memory) == 2 * GUARD
