"""Chains of tensor-core steps over whole matrices, in tiles: the fast form of :mod:`fp8ref.emulation.dot`.

A chain is a run of k that one accumulator walks through, starting from +0. Inside a step everything is exact in fp32
for 14-bit units (33 integers below 2**16) and in float64 for the wide ones, so that one step is four vector operations
a product: multiply, scale, truncate, add. The largest exponent of a step comes from one matrix product of powers of
2**8: the sum of at most 64 of them has the exponent of the largest, times eight, plus less than eight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from fp8ref.emulation.bits import FP32, FP64, floor_pow2, truncate_significand
from fp8ref.emulation.compiled import Compiled, Engine, is_compiled
from fp8ref.emulation.compiled_cuda import CompiledCuda
from fp8ref.emulation.decode import POWER, Span, decode, k_order
from fp8ref.emulation.exact import exact_matmul
from fp8ref.emulation.formats import E4M3, FORMATS, Fp8Format
from fp8ref.emulation.lanes import Once
from fp8ref.emulation.specials import finite_part, has_specials, specials_of_product
from fp8ref.emulation.units import TensorCoreUnit

Prepared = TypeVar("Prepared")

_LOWEST = 2.0**-100  # below every power that a chain of FP8 products can hold
_TILE_PRODUCTS = {"cpu": 1 << 18, "cuda": 1 << 25}
_OPERAND_BYTES = 3 << 24
_PEAKS = {"cpu": 1 << 18, "cuda": 1 << 26}


@dataclass(frozen=True)
class Tile:
    """A rectangle of the output; ``chains`` computes the fp32 results of its chains, in the order of the spans."""

    rows: slice
    columns: slice
    chains: Callable[[], Iterator[Tensor]]


def tiles(a: Tensor, b: Tensor, unit: TensorCoreUnit, spans: Sequence[Span], engine: Engine = "auto") -> Iterator[Tile]:
    """Walk every chain of ``spans`` for ``a`` [M, K] by ``b`` [K, N], a tile of the output at a time.

    ``engine`` says what walks, not what comes out: see :func:`fp8ref.emulate_matmul`. A unit without an instruction is
    one exact sum under each of them.

    Yields:
        Tiles that cover the output once; the results of a tile are fp32 [rows, columns], Inf and NaN included.
    """
    if b.shape[1] < 64 and b.shape[1] < a.shape[0]:  # vector lanes run along the second operand's free dimension
        for tile in tiles(b.t(), a.t(), unit, spans, engine):
            yield Tile(tile.columns, tile.rows, partial(_transposed, tile.chains))
        return
    if unit.products_per_step is None:
        yield from _walk(a, b, _Exact(FORMATS[a.dtype], FORMATS[b.dtype]), spans)
    elif is_compiled(engine, a.device):
        if a.device.type == "cuda":
            yield from _walk(a, b, CompiledCuda(unit, spans, a.shape[1], a.device), spans)
        else:
            yield from _walk(a, b, Compiled(unit, FORMATS[a.dtype], FORMATS[b.dtype], spans, a.shape[1]), spans)
    else:
        yield from _walk(a, b, _Steps(unit, FORMATS[a.dtype], FORMATS[b.dtype], a.device.type), spans)


class _Engine(Protocol[Prepared]):
    """Computes the chains of a tile from operands that it has laid out to its liking."""

    def tile_shape(self, m: int, n: int, k: int) -> tuple[int, int]: ...

    def prepare(self, operand: Tensor, spans: Sequence[Span]) -> Prepared: ...

    def chains(self, a: Prepared, b: Prepared, spans: Sequence[Span]) -> Iterator[Tensor]: ...


def _walk(a: Tensor, b: Tensor, engine: _Engine[Prepared], spans: Sequence[Span]) -> Iterator[Tile]:
    special = has_specials(a) or has_specials(b)
    height, width = engine.tile_shape(a.shape[0], b.shape[1], a.shape[1])

    def prepare(operand: Tensor) -> Prepared:
        return engine.prepare(finite_part(operand) if special else operand, spans)

    def chains(left: Tensor, right: Tensor, prepared: Once[Prepared]) -> Iterator[Tensor]:
        finite = engine.chains(prepare(left), prepared(), spans)
        return _with_specials(finite, left, right.t(), spans) if special else finite

    for column in range(0, b.shape[1], width):
        columns = slice(column, min(column + width, b.shape[1]))
        right = b[:, columns].t()
        prepared = Once(partial(prepare, right))
        for row in range(0, a.shape[0], height):
            rows = slice(row, min(row + height, a.shape[0]))
            yield Tile(rows, columns, partial(chains, a[rows], right, prepared))


def _transposed(chains: Callable[[], Iterator[Tensor]]) -> Iterator[Tensor]:
    return (chain.t() for chain in chains())


def _with_specials(chains: Iterator[Tensor], a: Tensor, b: Tensor, spans: Sequence[Span]) -> Iterator[Tensor]:
    for chain, (start, stop) in zip(chains, spans, strict=True):
        yield chain + specials_of_product(a[:, start:stop], b[start:stop])


class _Exact:
    """The unit without an instruction: one exact sum a chain."""

    def __init__(self, format_a: Fp8Format, format_b: Fp8Format) -> None:
        # Sums that one float64 does not hold take some twenty of them.
        self.outputs = 1 << (19 if format_a == format_b == E4M3 else 18)

    def tile_shape(self, m: int, n: int, k: int) -> tuple[int, int]:
        edge = max(64, (1 << 21) // max(k, 1))
        height = max(1, min(m, edge))
        return height, max(1, min(n, edge, self.outputs // height))

    def prepare(self, operand: Tensor, spans: Sequence[Span]) -> Tensor:  # noqa: ARG002 - as _Steps needs them
        return operand

    def chains(self, a: Tensor, b: Tensor, spans: Sequence[Span]) -> Iterator[Tensor]:
        for start, stop in spans:
            yield exact_matmul(a[:, start:stop], b[:, start:stop].t())


@dataclass(frozen=True)
class _Operand:
    """FP8 values laid out by step, [steps, L, rows], in the type that a step computes in; and their exponents."""

    values: Tensor
    powers: Tensor


class _Steps:
    """A tensor-core unit on two formats."""

    def __init__(self, unit: TensorCoreUnit, format_a: Fp8Format, format_b: Fp8Format, device: str) -> None:
        assert unit.products_per_step is not None
        self.unit = unit
        self.step = unit.products_per_step
        # L products below 2**(F + 2) and an accumulator below 2**(F + 1) must be exact integers.
        self.layout = FP32 if (self.step + 1) << (unit.fraction_bits + 2) <= 1 << 24 else FP64
        # e4m3 by e4m3 spans 29 exponents, 8 * 29 < 254; anything with e5m2 needs float64 powers.
        self.powers = FP32 if format_a == format_b == E4M3 else FP64
        self.offset = -2 if self.powers is FP32 else 0  # centres the 29 exponents in fp32's range
        int_dtype = self.layout.int_dtype
        shift = unit.fraction_bits << self.layout.mantissa_bits
        # Tensors without dimensions: Python numbers are converted anew at every use.
        self.exponent_mask = torch.tensor(self.layout.exponent_mask, dtype=int_dtype, device="cpu")
        self.to_scale = (
            torch.tensor(self.layout.field(0), dtype=int_dtype, device="cpu") * 2 + shift
        )  # wraps, as the use of it does
        self.to_last_place = torch.tensor(shift, dtype=int_dtype, device="cpu")
        self.device = device if device in _TILE_PRODUCTS else "cpu"

    def tile_shape(self, m: int, n: int, k: int) -> tuple[int, int]:
        """A step's products stay in cache, and the operands of a tile below some tens of megabytes."""
        outputs = max(1, _TILE_PRODUCTS[self.device] // self.step)
        narrowest = 512 if self.device == "cpu" else 4096
        operand = _OPERAND_BYTES // (self.layout.float_dtype.itemsize + self.powers.float_dtype.itemsize)
        width = max(64, min(n, max(narrowest, outputs // max(m, 1)), operand // max(k, 1)))
        return max(1, min(m, outputs // width)), width

    def prepare(self, operand: Tensor, spans: Sequence[Span]) -> _Operand:
        """Lay out ``operand`` [rows, K], every chain padded with zeros to whole instructions."""
        fmt = FORMATS[operand.dtype]
        by_k = operand.view(torch.uint8).t().contiguous()
        order = k_order(self.unit, spans, operand.shape[1])
        if order is not None:
            padded = torch.cat([by_k, by_k.new_zeros(1, by_k.shape[1])])
            by_k = padded.index_select(0, order.to(by_k.device))
        codes = by_k.view(-1, self.step, by_k.shape[1])
        return _Operand(*decode(codes, fmt, self.layout, self.powers))

    def _peaks(self, a: Tensor, b: Tensor) -> Tensor:
        """The bits of ``2 ** emax`` over each step's products, [steps, M, N]; of a tiny power where all are zero."""
        sums = torch.bmm(a.transpose(1, 2) * 2.0 ** (POWER * self.offset), b)
        assert POWER == 8, "three square roots"
        root = sums.sqrt_().sqrt_().sqrt_()
        powers = floor_pow2(root, self.powers).to(self.layout.float_dtype)
        return powers.mul_(2.0**-self.offset).clamp_(min=_LOWEST).view(self.layout.int_dtype)

    def chains(self, a: _Operand, b: _Operand, spans: Sequence[Span]) -> Iterator[Tensor]:
        """Run each chain of one tile; yields fp32 [M, N]."""
        m, n = a.values.shape[2], b.values.shape[2]
        products = a.values.new_empty(self.step, m, n)
        group = max(1, _PEAKS[self.device] // max(1, m * n))
        peaks = products
        step = 0
        for start, stop in spans:
            total = torch.zeros(m, n, dtype=torch.float32, device=products.device)
            accumulator = products.new_zeros(m, n)
            for _ in range(-(-(stop - start) // self.unit.instruction_k)):
                for _ in range(self.unit.instruction_k // self.step):
                    if step % group == 0:
                        peaks = self._peaks(a.powers[step : step + group], b.powers[step : step + group])
                    accumulator = self._one_step(
                        a.values[step], b.values[step], accumulator, peaks[step % group], products
                    )
                    step += 1
                if self.unit.c_enters == "after":
                    total += accumulator.float()
                    accumulator.zero_()
            yield total + accumulator.float()

    def _one_step(self, a: Tensor, b: Tensor, c: Tensor, peak: Tensor, products: Tensor) -> Tensor:
        """``fused_dot_add`` of one step on [L, M] by [L, N] and an accumulator [M, N], which is used up."""
        layout = self.layout
        largest = torch.maximum(peak, c.view(layout.int_dtype) & self.exponent_mask)
        scale = torch.sub(self.to_scale, largest).view(layout.float_dtype)
        torch.mul(a.unsqueeze(2), b.unsqueeze(1), out=products)
        aligned = products.mul_(scale).trunc_().sum(0)
        aligned += c.mul_(scale).trunc_()
        truncate_significand(aligned, self.unit.significant_bits, layout)
        return aligned.mul_(largest.sub_(self.to_last_place).view(layout.float_dtype))
