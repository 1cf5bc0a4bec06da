"""Wrong kernels made of a right one: what a test suite for matmuls has to tell apart from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fp8ref.testing import mutations as inputs
from fp8ref.testing import mutations_of_results as results
from fp8ref.testing.cases import Kernel
from fp8ref.testing.mutations import Call, Change
from fp8ref.testing.supports import Supports

_Shows = Callable[[Supports], bool]


@dataclass(frozen=True, eq=False)
class Mutant:
    """A wrong kernel, called as the right one is.

    Attributes:
        name: what is wrong, in a few words.
        calls: how often it was called.
    """

    name: str
    _kernel: Kernel
    _change: Change
    _memory: dict[str, Tensor] = field(default_factory=dict)
    _calls: list[None] = field(default_factory=list)

    @property
    def calls(self) -> int:
        """How often it was called."""
        return len(self._calls)

    def __call__(self, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        """Compute the product, wrongly."""
        call = Call(a, b, scale_a, scale_b, options, self.calls, self._memory)
        self._calls.append(None)
        return self._change(self._kernel, call)


def _always(_of: Supports) -> bool:
    return True


def _tail(position: int, multiple: int) -> _Shows:
    """Sizes that are no multiple come."""
    return lambda of: of.multiple_of[position] % multiple != 0


def _kinds(*names: str) -> _Shows:
    """One of these kinds of scales comes."""
    return lambda of: any(name in pair for pair in of.scalings for name in names)


def _outputs(*dtypes: torch.dtype) -> _Shows:
    return lambda of: any(dtype in of.out_dtypes for dtype in dtypes)


def _long(of: Supports) -> bool:
    """An accurate product of several chains without block scales comes."""
    return of.largest[2] > 128 and False in of.use_fast_accum and _kinds("tensor", "row")(of)


def _with_bias(of: Supports) -> bool:
    return of.bias_dtypes != (None,)


_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALVES = (torch.bfloat16, torch.float16)

_TABLE: tuple[tuple[str, Change, _Shows], ...] = (
    ("zeroed output", results.zeroed, _always),
    ("flipped sign", results.negated, _always),
    ("dropped K tail", inputs.drop_k_tail, _tail(2, 128)),
    ("off-by-one mask along K", inputs.drop_last_k, _tail(2, 32)),
    ("off-by-one mask along N", inputs.drop_last_column, _tail(1, 16)),
    ("last row from the one before", inputs.repeat_row, lambda of: of.largest[0] > 1),
    ("K tail not masked", inputs.read_past_k, _tail(2, 16)),
    ("strides ignored", inputs.ignore_strides, lambda of: bool({"columns", "padded", "sliced"} & {*of.layouts})),
    ("storage offset rounded down", inputs.ignore_offset, lambda of: of.offsets),
    ("writes beside its operand", inputs.write_beside, _always),
    ("changes its operand", inputs.change_operand, _always),
    ("swapped scales", inputs.swap_scales, _kinds("row", "1x128", "128x128")),
    ("first scale for all", inputs.first_scale_only, _kinds("row", "1x128")),
    ("transposed block scales", inputs.transpose_block_scales, _kinds("1x128", "128x128")),
    ("one scale for the batch", inputs.scale_of_batch, _kinds("row")),
    ("scales in the other order", results.scales_in_other_order, _kinds("tensor", "row")),
    ("one skipped promotion", results.skip_promotion, _long),
    ("promotion every 64", results.promote_often, _long),
    ("total kept in bf16", results.total_in_bf16, _long),
    ("always fast accumulation", results.always_fast, _long),
    ("never fast accumulation", results.never_fast, lambda of: True in of.use_fast_accum and of.largest[2] > 128),
    ("k taken backwards", results.backwards, _kinds("tensor", "row")),
    ("split K when the batch is small", results.split_by_batch, lambda of: of.largest[2] > 128),
    ("fp32 product of dequantised operands", results.dequantised, _always),
    ("bias added after rounding", results.bias_after_rounding, _with_bias),
    ("bias in an FMA", results.fused_bias, lambda of: _with_bias(of) and _kinds("tensor", "row")(of)),
    ("bias of the next column", results.shifted_bias, _with_bias),
    ("FP8 rounded by way of bf16", results.rounded_twice, _outputs(*_FP8)),
    ("output truncated", results.truncated, _outputs(*_HALVES)),
    ("FP8 saturation missing", results.unsaturated, _outputs(*_FP8)),
    ("saturation instead of Inf", results.saturated, _outputs(*_HALVES)),
    ("subnormal operands flushed", inputs.flush_subnormals, _always),
    ("wrong sign of zero", results.minus_zero, _always),
    ("another NaN", results.other_nan, lambda of: of.specials),
    ("NaN read as a number", inputs.read_nan_as_number, lambda of: of.specials),
    ("NaN and Inf dropped", inputs.drop_nan, lambda of: of.specials),
    ("NaN spreads to batch mates", inputs.spread_nan, lambda of: of.specials and of.largest[0] > 1),
    ("stale output element", inputs.stale_element, _always),
    ("another bit now and then", inputs.race, _always),
)


def mutants(kernel: Kernel, supports: Supports | None = None) -> list[Mutant]:
    """Wrap a right kernel into wrong ones, each with one fault that real kernels have had.

    A test suite that is worth its name fails on each of them.

    Args:
        kernel: a right matmul with the arguments of :func:`fp8ref.emulate_matmul`: tensor-wise scales, fp32 output,
            ``use_fast_accum``, ``split_k`` and ``scaling`` among them, which the faults are made with.
        supports: what the suite asks for; None for everything. Faults that cannot show there are left out.

    Returns:
        Callables with a ``name``.

    >>> import fp8ref
    >>> wrong = mutants(fp8ref.emulate_matmul)
    >>> len(wrong), wrong[0].name
    (39, 'zeroed output')
    >>> a, one = torch.ones(1, 2).to(torch.float8_e4m3fn), torch.ones(())
    >>> wrong[0](a, a.t(), one, one), fp8ref.emulate_matmul(a, a.t(), one, one)
    (tensor([[0.]], dtype=torch.bfloat16), tensor([[2.]], dtype=torch.bfloat16))
    """
    of = Supports() if supports is None else supports
    return [Mutant(name, kernel, change) for name, change, shows in _TABLE if shows(of)]
