"""Hypothesis strategies: products for the second reference, made of the cases that ``fp8ref.testing`` draws."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from fp8ref.emulation.units import TensorCoreUnit
from fp8ref.testing import fills
from fp8ref.testing.cases import MatmulCase
from fp8ref.testing.floats import FLOATS
from fp8ref.testing.strategies import (
    LONG_K,
    SHORT_K,
    float_fills,
    fp8_fills,
    matmul_cases,
    moderate_bits,
    own_units,
    units,
)
from fp8ref.testing.supports import Supports
from reference.exact import Kind
from reference.rationals import Binary
from reference.tensors import SCALING, Product

__all__ = ["arranged", "instructions", "operands", "own_units", "products", "ties_of", "units"]

_KINDS: dict[tuple[str, str], Kind] = {pair: kind for kind, pair in SCALING.items()}
# The second reference takes a while for each output: N of at most 37 and, beyond one block, 131; K down to nothing.
_COLUMNS = (1, 2, 3, 5, 7, 13, 17, 31, 37, 131)


def arranged(palette: list[int], zeros: float, seed: int, rows: int, columns: int) -> torch.Tensor:
    """A uint8 [rows, columns] of codes from the palette, a share of them replaced by zeros of either sign."""
    return fills.arranged(palette, zeros, seed, rows, columns).to(torch.uint8)


def ties_of(binary: Binary) -> st.SearchStrategy[int]:
    """The fp32 bits of numbers midway between two neighbours of a smaller format, within 2^6 of one."""
    fp32 = FLOATS[torch.float32]
    dropped = fp32.fraction_bits - binary.fraction_bits
    return moderate_bits(fp32).map(lambda bits: bits >> dropped << dropped | 1 << dropped - 1)


@st.composite
def operands(draw: st.DrawFn, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An fp8 [rows, columns] in some layout; one in four holds a NaN or an Inf or two."""
    return draw(fp8_fills(rows, columns, dtype)).tensor(rows, columns)


@st.composite
def products(draw: st.DrawFn) -> Product:
    """Everything that ``emulate_matmul`` takes."""
    n = draw(st.sampled_from(_COLUMNS))
    k = draw(st.one_of(st.sampled_from(SHORT_K), st.sampled_from(LONG_K), st.integers(0, 300)))
    supports = Supports(split_k=(1, 2, 3, 4, 5), smallest=(1, n, k), largest=(17, n, k))
    return product_of(draw(matmul_cases(supports, unit=units())), say_scaling=draw(st.booleans()))


def product_of(case: MatmulCase, *, say_scaling: bool) -> Product:
    """The reference's form of a case."""
    made = case.operands()
    assert isinstance(case.unit, TensorCoreUnit)
    return Product(
        a=made.a,
        b=made.b,
        scale_a=made.scale_a,
        scale_b=made.scale_b,
        kind=_KINDS[case.scaling],
        unit=case.unit,
        use_fast_accum=case.use_fast_accum,
        split_k=case.split_k,
        bias=made.bias,
        out_dtype=case.out_dtype,
        say_scaling=say_scaling,
    )


@st.composite
def instructions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TensorCoreUnit]:
    """The a [R, k], b [R, k] and c [R] of one instruction of a unit; k may be less than the instruction's."""
    unit = draw(units())
    rows = draw(st.integers(1, 4))
    k = draw(st.integers(0, unit.instruction_k)) if draw(st.booleans()) else unit.instruction_k
    return draw(operands(rows, k)), draw(operands(rows, k)), draw(float_fills(torch.float32)).tensor(rows), unit
