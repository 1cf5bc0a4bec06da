"""The changes that :func:`fp8ref.testing.mutants` makes: faults of a kernel's operands, scales and memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.formats import FORMATS
from fp8ref.emulation.scales import Scaling, resolve_pair
from fp8ref.testing.cases import Kernel

Change = Callable[[Kernel, "Call"], Tensor]


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a matmul: its tensors and options, its number (from 0), and what earlier calls left."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    options: dict[str, Any]
    number: int = 0
    memory: dict[str, Tensor] = field(default_factory=dict)

    @property
    def kinds(self) -> tuple[Scaling, Scaling]:
        """The kinds of scales."""
        return resolve_pair(self.a, self.b, self.scale_a, self.scale_b, self.options.get("scaling"))[0]

    @property
    def in_blocks(self) -> bool:
        """Whether each 128 of K has scales of its own."""
        return "1x128" in self.kinds

    @property
    def out_dtype(self) -> torch.dtype:
        """The dtype of the result."""
        found: torch.dtype = self.options.get("out_dtype", torch.bfloat16)
        return found

    def run(self, kernel: Kernel, **options: Any) -> Tensor:
        """Call a kernel, some options changed; one that becomes None is left out."""
        merged = {**self.options, "scaling": None, **options}
        merged["scaling"] = merged["scaling"] or self.kinds
        given = {name: value for name, value in merged.items() if value is not None}
        return kernel(self.a, self.b, self.scale_a, self.scale_b, **given)

    def cut(self, k: int) -> Call:
        """The same product with the first ``k`` of K only."""
        blocks = -(-k // 128)
        scale_a, scale_b = self.scale_a, self.scale_b
        if self.in_blocks:
            scale_a, scale_b = scale_a[:, :blocks], scale_b[:blocks]
        return replace(
            self,
            a=self.a[:, :k],
            b=self.b[:k],
            scale_a=scale_a,
            scale_b=scale_b,
            options={**self.options, "scaling": self.kinds},
        )


def drop_k_tail(kernel: Kernel, call: Call) -> Tensor:
    """K stops at a multiple of 128."""
    return call.cut(call.a.shape[1] // 128 * 128).run(kernel)


def drop_last_k(kernel: Kernel, call: Call) -> Tensor:
    """A mask that is one too short where K ends within a step."""
    k = call.a.shape[1]
    return call.cut(k - 1 if k % 32 else k).run(kernel)


def drop_last_column(kernel: Kernel, call: Call) -> Tensor:
    """A mask that is one too short where N ends within 16."""
    y = call.run(kernel).clone()
    if y.shape[1] % 16:
        y[:, -1:] = 0.0
    return y


def repeat_row(kernel: Kernel, call: Call) -> Tensor:
    """The last row is the one before."""
    y = call.run(kernel).clone()
    if y.shape[0] > 1:
        y[-1] = y[-2]
    return y


def read_past_k(kernel: Kernel, call: Call) -> Tensor:
    """The k after the last is read too, where the memory goes on."""
    (m, k), n = call.a.shape, call.b.shape[1]
    if k % 16 == 0 or call.in_blocks:
        return call.run(kernel)
    try:
        a = call.a.as_strided((m, k + 1), call.a.stride())
        b = call.b.as_strided((k + 1, n), call.b.stride())
    except RuntimeError:  # the memory ends there
        return call.run(kernel)
    return replace(call, a=a, b=b).run(kernel)


def ignore_strides(kernel: Kernel, call: Call) -> Tensor:
    """``a`` is read as if it were contiguous."""
    m, k = call.a.shape
    try:
        a = call.a.as_strided((m, k), (k, 1))
    except RuntimeError:  # the memory is smaller than that
        return call.run(kernel)
    return replace(call, a=a).run(kernel)


def ignore_offset(kernel: Kernel, call: Call) -> Tensor:
    """``a`` is read from an address rounded down to 16 bytes."""
    offset = call.a.storage_offset() // 16 * 16
    return replace(call, a=call.a.as_strided(call.a.shape, call.a.stride(), offset)).run(kernel)


def write_beside(kernel: Kernel, call: Call) -> Tensor:
    """The byte before ``a`` is overwritten."""
    y = call.run(kernel)
    if call.a.storage_offset():
        call.a.view(torch.uint8).as_strided((1,), (1,), call.a.storage_offset() - 1).fill_(0)
    return y


def change_operand(kernel: Kernel, call: Call) -> Tensor:
    """The last element of ``b`` is overwritten."""
    y = call.run(kernel)
    call.b.view(torch.uint8)[-1:, -1:] = 0
    return y


def swap_scales(kernel: Kernel, call: Call) -> Tensor:
    """Each operand has the other's scales."""
    if call.kinds[0] == "tensor":
        return call.run(kernel)
    left, right = call.scale_a, call.scale_b.t()
    rows_a, rows_b = (torch.arange(len(scale), device=call.a.device) for scale in (left, right))
    return replace(call, scale_a=right[rows_a % len(right)], scale_b=left[rows_b % len(left)].t()).run(kernel)


def first_scale_only(kernel: Kernel, call: Call) -> Tensor:
    """Every column has the first one's scale."""
    if call.scale_b.numel() == 0:
        return call.run(kernel)
    return replace(call, scale_b=call.scale_b.reshape(-1)[0].expand(call.scale_b.shape)).run(kernel)


def transpose_block_scales(kernel: Kernel, call: Call) -> Tensor:
    """Block scales are read with their strides exchanged."""
    if not call.in_blocks:
        return call.run(kernel)
    left, right = (scale.t().contiguous().view(scale.shape) for scale in (call.scale_a, call.scale_b))
    return replace(call, scale_a=left, scale_b=right).run(kernel)


def scale_of_batch(kernel: Kernel, call: Call) -> Tensor:
    """Every row has the largest scale of the batch."""
    if call.kinds[0] != "row":
        return call.run(kernel)
    largest = call.scale_a.amax(0, keepdim=True).expand(call.scale_a.shape)
    return replace(call, scale_a=largest).run(kernel)


def flush_subnormals(kernel: Kernel, call: Call) -> Tensor:
    """Subnormal operands count as zero."""
    fmt = FORMATS[call.a.dtype]
    bits = call.a.contiguous().view(torch.uint8)
    small = (bits & 0x7F) < 1 << fmt.mantissa_bits
    return replace(call, a=bits.masked_fill(small, 0).view(call.a.dtype)).run(kernel)


def _replace_specials(call: Call, code: int | None) -> Call:
    """Codes of Inf and NaN of a become ``code``, or where None the largest number."""
    fmt = FORMATS[call.a.dtype]
    bits = call.a.contiguous().view(torch.uint8)
    special = (bits & 0x7F) > fmt.max_code
    return replace(call, a=bits.masked_fill(special, fmt.max_code if code is None else code).view(call.a.dtype))


def read_nan_as_number(kernel: Kernel, call: Call) -> Tensor:
    """NaN and Inf codes mean the largest number."""
    return _replace_specials(call, None).run(kernel)


def drop_nan(kernel: Kernel, call: Call) -> Tensor:
    """NaN and Inf codes mean zero."""
    return _replace_specials(call, 0).run(kernel)


def spread_nan(kernel: Kernel, call: Call) -> Tensor:
    """Every row gets 0 times a sum over the batch: harmless, but for NaN and Inf."""
    y = call.run(kernel)
    if call.out_dtype.itemsize == 1 or not bool(call.a.isnan().any()):
        return y
    return torch.full_like(y, torch.nan)


def stale_element(kernel: Kernel, call: Call) -> Tensor:
    """The last element is what the call before left there, at first 0."""
    y = call.run(kernel).clone()
    if y.numel():
        before, call.memory["last"] = call.memory.get("last", torch.zeros(())), y[-1, -1].float()
        y[-1, -1] = before.to(y.dtype)
    return y


def race(kernel: Kernel, call: Call) -> Tensor:
    """Every third call gives its first element another last bit."""
    y = call.run(kernel).clone()
    if call.number % 3 == 2 and y.numel():
        y.view(torch.uint8).view(-1)[:1] ^= 1
    return y
