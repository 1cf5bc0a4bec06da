"""The engine that Triton compiles for CUDA tensors: the chains of :mod:`fp8ref.emulation.chain`, same bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fp8ref.emulation.decode import Span, k_order
from fp8ref.emulation.formats import FORMATS
from fp8ref.emulation.units import TensorCoreUnit

_ZERO_EXPONENT = -64  # as in compiled_loops: any other factor's exponent added, it is below every product's
_TILE_OUTPUTS = 1 << 24
_CHAIN_OUTPUTS = 1 << 26
# Measured on an H200: cells of 32 x 32 or 16 x 32 outputs, 8 products of each at a time.
_BLOCK_N = 32
_CHUNK = 8
_ELEMENTS = 1024


@cache
def triton_obstacle() -> Exception | None:
    """Why Triton cannot be imported, None where it can.

    >>> isinstance(triton_obstacle(), Exception | None)
    True
    """
    try:
        import triton  # noqa: F401 - whether it is there is the question
    except Exception as error:  # noqa: BLE001 - a package that is broken raises whatever its parts raise
        return error
    return None


def promote_scaled_cuda(total: Tensor, chain: Tensor, left: Tensor, right: Tensor, *, joined: bool) -> Tensor:
    """:func:`fp8ref.emulation.compiled.promote_scaled` on CUDA tensors, of any strides.

    >>> if torch.cuda.is_available():
    ...     one = torch.ones(1, 1, device="cuda")
    ...     assert float(promote_scaled_cuda(one.clone(), one, one[0], one[0], joined=True)) == 2.0
    """
    from fp8ref.emulation.jit_chains import promote_kernel

    m, n = total.shape
    grid = (max(1, -(-m * n // _ELEMENTS)),)
    promote_kernel[grid](
        total, chain, left, right, m, n, *total.stride(), *chain.stride(), JOINED=joined, BLOCK=_ELEMENTS
    )
    return total


@dataclass(frozen=True)
class _Plan:
    """What does not depend on the operands' rows: the order of K, and where chains begin, on a device."""

    slots: Tensor
    first_steps: Tensor


class _Operand(NamedTuple):
    """Finite FP8 values, fp32 [steps * length, rows], and their exponents, int8."""

    values: Tensor
    exponents: Tensor


class CompiledCuda:
    """A tensor-core unit, for the chains of K that ``spans`` names."""

    def __init__(self, unit: TensorCoreUnit, spans: Sequence[Span], k: int, device: torch.device) -> None:
        """Raise ImportError without Triton."""
        from fp8ref.emulation.jit_chains import chains_kernel

        assert unit.products_per_step is not None
        self.kernel = chains_kernel
        steps_per_instruction = unit.instruction_k // unit.products_per_step
        length = 1 << (unit.products_per_step - 1).bit_length()
        steps = [-(-(stop - start) // unit.instruction_k) * steps_per_instruction for start, stop in spans]
        self.plan = _Plan(
            _slots(unit, spans, k, length).to(device),
            torch.tensor([0, *steps], dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32).to(device),
        )
        self.chain_count = len(spans)
        self.constants = _constants(unit, length, steps_per_instruction)

    def tile_shape(self, m: int, n: int, k: int) -> tuple[int, int]:
        """Outputs and codes of a tile take some hundred megabytes at most."""
        width = max(64, min(n, 1 << 14, (1 << 27) // max(k, 1)))
        return max(1, min(m, _TILE_OUTPUTS // width)), width

    def prepare(self, operand: Tensor, spans: Sequence[Span]) -> _Operand:  # noqa: ARG002 - as the other engines take it
        """Lay out ``operand`` [rows, K] as [steps * length, rows], zero where a slot has no k."""
        fmt = FORMATS[operand.dtype]
        by_k = operand.view(torch.uint8).t()
        padded = torch.cat([by_k, by_k.new_zeros(1, by_k.shape[1])])
        codes = padded.index_select(0, self.plan.slots)
        magnitude = codes & 0x7F
        exponents = (magnitude >> fmt.mantissa_bits).clamp_(min=1).to(torch.int8).sub_(fmt.bias)
        return _Operand(codes.view(fmt.dtype).float(), exponents.masked_fill_(magnitude == 0, _ZERO_EXPONENT))

    def chains(self, a: _Operand, b: _Operand, spans: Sequence[Span]) -> CudaChains:  # noqa: ARG002 - as above
        """Run each chain of one tile; yields fp32 [M, N]."""
        return CudaChains(self._groups(a, b))

    def _groups(self, a: _Operand, b: _Operand) -> Iterator[Tensor]:
        """Yield the results of as many consecutive chains as fit into memory, fp32 [chains, M, N]."""
        m, n = a.values.shape[1], b.values.shape[1]
        group = max(1, min(_CHAIN_OUTPUTS // max(1, m * n), 32768))
        block_m = 32 if m > 16 else 16
        cells = -(-m // block_m) * -(-n // _BLOCK_N)
        for start in range(0, self.chain_count, group):
            shape = min(group, self.chain_count - start), m, n
            out = torch.empty(shape, dtype=torch.float32, device=a.values.device)
            self.kernel[(cells, shape[0])](
                a.values, a.exponents, b.values, b.exponents, self.plan.first_steps[start:], out, m, n,
                BLOCK_M=block_m, BLOCK_N=_BLOCK_N, num_warps=block_m // 4, **self.constants,
            )  # fmt: skip
            yield out


class CudaChains(Iterator[Tensor]):
    """The results of a tile's chains, one after the other; or the sums of runs of them, each in one launch.

    >>> list(CudaChains(iter([torch.ones(2, 1, 1)])))
    [tensor([[1.]]), tensor([[1.]])]
    """

    def __init__(self, groups: Iterator[Tensor]) -> None:
        """Take the results in groups, fp32 [chains, M, N]."""
        self._groups = groups
        self._group: Tensor | None = None
        self._at = 0

    def __next__(self) -> Tensor:
        """Return the next chain's result."""
        return self._take(1)[0]

    def _take(self, most: int) -> Tensor:
        if self._group is None or self._at == self._group.shape[0]:
            self._group, self._at = next(self._groups), 0
        taken = self._group[self._at : self._at + most]
        self._at += taken.shape[0]
        return taken

    def add_up(self, count: int) -> Tensor:
        """Return the sum of the next ``count`` chains, added to +0 one by one in fp32."""
        from fp8ref.emulation.jit_chains import add_kernel

        chains = self._take(count)
        total = torch.zeros_like(chains[0])
        grid = (max(1, -(-total.numel() // _ELEMENTS)),)
        while True:
            add_kernel[grid](total, chains, total.numel(), chains.shape[0], BLOCK=_ELEMENTS)
            count -= chains.shape[0]
            if not count:
                return total
            chains = self._take(count)


def _slots(unit: TensorCoreUnit, spans: Sequence[Span], k: int, length: int) -> Tensor:
    """Return the k of every product, [steps * length], and ``k`` itself for a zero."""
    assert unit.products_per_step is not None
    order = k_order(unit, spans, k)
    slots = (torch.arange(k, device="cpu") if order is None else order).view(-1, unit.products_per_step)
    return pad(slots, (0, length - slots.shape[1]), value=k).flatten()


def _constants(unit: TensorCoreUnit, length: int, steps_per_instruction: int) -> dict[str, Any]:
    """Return the compile-time arguments: int32 holds the sum of a chunk, ``total`` that of a step and c."""
    import triton
    import triton.language as tl

    from fp8ref.emulation.jit_chains import chains_kernel

    narrow = unit.fraction_bits <= 25
    # L products below 2**(F + 2) and an accumulator below 2**(F + 1) must be exact in fp32.
    wide = (length + 1) << (unit.fraction_bits + 2) > 1 << 24
    return {
        "LENGTH": length,
        "CHUNK": min(length, _CHUNK, 1 << (29 - unit.fraction_bits) if narrow else 32),
        "F": unit.fraction_bits,
        "B": unit.significant_bits,
        "RESTART_EVERY": steps_per_instruction if unit.c_enters == "after" else 0,
        "REAL": tl.float32 if narrow else tl.float64,
        "INTEGER": tl.int32 if narrow else tl.int64,
        "WIDE": wide,
        "IN_PLACE": not wide and isinstance(chains_kernel, triton.JITFunction),
        "ZERO": _ZERO_EXPONENT,
    }
