"""A kernel under test: how it is called, and in what surroundings."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from fp8ref.emulation.units import TensorCoreUnit
from fp8ref.testing.cases import Kernel, MatmulCase, Operands
from fp8ref.testing.compare import assert_bits_equal
from fp8ref.testing.guards import GUARD, GUARD_BYTE, changed_guards, guarded_empty
from fp8ref.testing.supports import Supports
from fp8ref.testing.within import assert_within_bound

Expect = Literal["bits", "bound", "exact"]


@dataclass(frozen=True, eq=False)
class Subject:
    """A kernel and what is known of it; the attributes are arguments of :func:`fp8ref.testing.check_matmul`."""

    kernel: Kernel
    supports: Supports
    expect: Expect
    unit: str | TensorCoreUnit
    device: torch.device
    takes_out: bool
    repeats: int

    def run(self, case: MatmulCase, *, poison: int = GUARD_BYTE) -> Tensor:
        """The kernel's result of a case, on the CPU."""
        return self.call(case, case.operands(self.device), poison=poison)

    def call(self, case: MatmulCase, made: Operands, *, poison: int = GUARD_BYTE) -> Tensor:
        """The kernel's result on tensors of the kind that the case has; its shape, dtype and place are checked."""
        shape = [made.a.shape[0], made.b.shape[1]]
        options = case.options(made)
        if self.takes_out:
            result = self._into_poison(made, options, shape, poison)
        else:
            result = self.kernel(made.a, made.b, made.scale_a, made.scale_b, **options)
        if not isinstance(result, Tensor):
            raise AssertionError(f"the kernel returned {type(result).__name__}, no tensor")
        got = (list(result.shape), result.dtype, result.device.type)
        if got != (shape, case.out_dtype, self.device.type):
            raise AssertionError(
                f"the kernel returned {got[1]} {got[0]} on {got[2]}, expected {case.out_dtype} {shape} on "
                f"{self.device.type}"
            )
        # A copy, for a kernel may write its next result to the same memory.
        return result.detach().to("cpu", copy=True)

    def _into_poison(self, made: Operands, options: dict[str, Any], shape: list[int], poison: int) -> Tensor:
        """Give the kernel an ``out`` full of one byte, between guard bands that must not change."""
        out, memory = guarded_empty(shape, options["out_dtype"], self.device)
        memory[GUARD:-GUARD].fill_(poison)
        result: Tensor | None = self.kernel(made.a, made.b, made.scale_a, made.scale_b, **options, out=out)
        if result is not None and result.data_ptr() != out.data_ptr():
            raise AssertionError("the kernel returned another tensor than the out= that it was given")
        if changed := changed_guards(memory):
            raise AssertionError(f"{changed} bytes beside out= were overwritten")
        return out

    def judge(self, case: MatmulCase, actual: Tensor) -> None:
        """Require of a result what is expected of it."""
        if self.expect != "bound":
            assert_bits_equal(actual, case.expected())
            return
        made = case.operands()
        options = case.options(made)
        del options["out_dtype"]
        assert_within_bound(
            actual, made.a, made.b, made.scale_a, made.scale_b, unit=self.unit, **{**options, "scaling": case.scaling}
        )


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """While it lasts, torch fills what it allocates without initial values with NaN (or the largest integer)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # Not written through the module, whose type does not show the property.
    how = vars(torch.utils)["deterministic"]
    filled = how.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    how.fill_uninitialized_memory = True
    try:
        with warnings.catch_warnings():
            # What has no deterministic form warns; here only the filling matters.
            warnings.filterwarnings("ignore", message=".*deterministic", category=UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        how.fill_uninitialized_memory = filled


def only_row(case: MatmulCase, made: Operands, row: int, *, offsets: bool) -> Operands:
    """The product of one row of a; without ``offsets`` at addresses of its own, as an allocation gives them."""
    a = made.a[row : row + 1]
    scale = made.scale_a if case.scaling[0] == "tensor" else made.scale_a[row : row + 1]
    return replace(made, a=a, scale_a=scale) if offsets else replace(made, a=_moved(a), scale_a=_moved(scale))


def _moved(tensor: Tensor) -> Tensor:
    """A copy with the same strides."""
    bits = torch.uint8 if tensor.element_size() == 1 else tensor.dtype
    copied = torch.empty_strided(tensor.shape, tensor.stride(), dtype=bits, device=tensor.device)
    return copied.copy_(tensor.view(bits)).view(tensor.dtype)


def among_nan(made: Operands, row: int) -> Operands:
    """The same row of a, all others NaN."""
    others = torch.arange(made.a.shape[0], device=made.a.device) != row
    bits = made.a.contiguous().view(torch.uint8).masked_fill(others.unsqueeze(1), 0x7F)
    return replace(made, a=bits.view(made.a.dtype))
