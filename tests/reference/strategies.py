"""Hypothesis strategies: FP8 products whose operands, scales and shapes lie on the edges of the arithmetic.

Large tensors are drawn as a palette of a few codes and a seed that arranges them: quick to generate, and the palette
still shrinks to the codes that matter.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

import torch
from hypothesis import strategies as st

from fp8ref.emulation.units import UNITS, TensorCoreUnit
from reference.exact import Kind
from reference.rationals import FP32, Binary, decode
from reference.tensors import BINARIES, SCALING, Product, from_bits

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
OUT_DTYPES = tuple(BINARIES)
SHORT_K = (0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129)
LONG_K = (160, 255, 256, 257, 300, 384, 385, 513, 640)
BIAS_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def is_finite(code: int, binary: Binary) -> bool:
    """Whether a code is a finite number."""
    return decode(code, binary).magnitude is not None


def boundary_codes(binary: Binary) -> list[int]:
    """Codes of both signs: significands 0, 1, all ones and all ones but one, at the edges and around exponent 0.

    >>> len(boundary_codes(E4M3)) < 60
    True
    """
    ones = (1 << binary.fraction_bits) - 1
    last = binary.largest_code >> binary.fraction_bits
    fields = (0, 1, 2, -binary.e_min, 1 - binary.e_min, 2 - binary.e_min, last - 1, last)
    codes = {field << binary.fraction_bits | fraction for field in fields for fraction in (0, 1, ones - 1, ones)}
    finite = [code for code in sorted(codes) if is_finite(code, binary)]
    return finite + [code | binary.sign_bit for code in finite]


def moderate_bits(binary: Binary) -> st.SearchStrategy[int]:
    """Bit patterns of both signs within 2^6 of one."""
    one = (1 - binary.e_min) << binary.fraction_bits
    within = st.integers(one - (6 << binary.fraction_bits), one + (6 << binary.fraction_bits))
    return st.builds(lambda bits, sign: bits | sign, within, st.sampled_from((0, binary.sign_bit)))


def wild_bits(binary: Binary) -> st.SearchStrategy[int]:
    """Bit patterns of a format with infinities: edges, specials, everything."""
    special = [binary.infinity_code, binary.infinity_code | binary.sign_bit, binary.infinity_code + 1, binary.nan_code]
    return st.one_of(
        moderate_bits(binary),
        st.sampled_from(boundary_codes(binary)),
        st.integers(0, 2 * binary.sign_bit - 1),
        st.sampled_from(special),
    )


def ties_of(binary: Binary) -> st.SearchStrategy[int]:
    """The fp32 bits of numbers midway between two neighbours of a smaller format, within 2^6 of one."""
    dropped = FP32.fraction_bits - binary.fraction_bits
    return moderate_bits(FP32).map(lambda bits: bits >> dropped << dropped | 1 << dropped - 1)


@st.composite
def palettes(draw: st.DrawFn, binary: Binary) -> list[int]:
    """A few finite codes to fill an operand with."""
    finite = [code for code in range(256) if is_finite(code, binary)]
    family = draw(st.sampled_from(("drawn", "all", "edges", "close", "powers", "subnormal")))
    if family == "drawn":
        return draw(st.lists(st.sampled_from(finite), min_size=1, max_size=6))
    if family == "edges":
        return boundary_codes(binary)
    if family == "powers":
        return [code for code in finite if code % (1 << binary.fraction_bits) == 0]
    if family == "subnormal":
        return [code for code in finite if code % binary.sign_bit < 2 << binary.fraction_bits]
    if family == "close":
        # Exponents within one of each other and both signs: sums that cancel.
        field = draw(st.integers(0, binary.largest_code >> binary.fraction_bits))
        return [c for c in finite if abs((c % binary.sign_bit >> binary.fraction_bits) - field) <= 1]
    return finite


def arranged(palette: list[int], zeros: float, seed: int, rows: int, columns: int) -> torch.Tensor:
    """A uint8 [rows, columns] of codes from the palette, a share of them replaced by zeros of either sign."""
    generator = torch.Generator().manual_seed(seed)
    choice = torch.randint(len(palette), (rows, columns), generator=generator)
    codes = torch.tensor(palette, dtype=torch.uint8)[choice]
    blank = torch.rand(rows, columns, generator=generator) < zeros
    signs = torch.randint(2, (rows, columns), generator=generator, dtype=torch.uint8) << 7
    return torch.where(blank, signs, codes)


def laid_out(codes: torch.Tensor, layout: str) -> torch.Tensor:
    """The same codes with other strides: column-major, a slice of something larger."""
    rows, columns = codes.shape
    if layout == "column-major":
        return codes.t().contiguous().t()
    if layout == "sliced":
        larger = torch.full((2 * rows + 1, 3 * columns + 2), 0x7F, dtype=torch.uint8)
        view = larger[1 : 2 * rows + 1 : 2, 2 : 3 * columns + 2 : 3]
        view.copy_(codes)
        return view
    return codes


@st.composite
def operands(draw: st.DrawFn, rows: int, columns: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    """An fp8 [rows, columns] in some layout; one in four holds a NaN or an Inf or two."""
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    binary = BINARIES[dtype]
    zeros = draw(st.sampled_from((0.0, 0.0, 0.5, 0.95)))
    codes = arranged(draw(palettes(binary)), zeros, draw(st.integers(0, 2**32 - 1)), rows, columns)
    layout = draw(st.sampled_from(("row-major", "column-major", "sliced", "expanded")))
    if codes.numel() and draw(st.integers(0, 3)) == 0:
        special = [code for code in range(256) if not is_finite(code, binary)]
        for _ in range(draw(st.integers(1, 2))):
            row, column = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
            codes[row, column] = draw(st.sampled_from(special))
    if layout == "expanded" and rows:
        return codes[:1].expand(rows, columns).view(dtype)
    return laid_out(codes, layout).view(dtype)


@st.composite
def own_units(draw: st.DrawFn) -> TensorCoreUnit:
    """A unit that a user might make up."""
    if draw(st.integers(0, 15)) == 0:
        return replace(UNITS["exact"], name="mine")
    steps = draw(st.sampled_from((1, 2, 3, 4, 5, 7, 8, 16, 31, 32, 33, 63, 64)))
    k = steps * draw(st.integers(1, 3))
    order = draw(st.one_of(st.just(list(range(k))), st.permutations(range(k))))
    return TensorCoreUnit(
        name="mine",
        products_per_step=steps,
        fraction_bits=draw(st.integers(1, 40)),
        significant_bits=draw(st.integers(1, 24)),
        k_order=tuple(order),
        c_enters=draw(st.sampled_from(("alignment", "after"))),
        evidence="made up",
    )


def units() -> st.SearchStrategy[TensorCoreUnit]:
    """A named unit, or in one of three a made-up one."""
    named = st.sampled_from(list(UNITS.values()))
    return st.one_of(named, named, own_units())


@st.composite
def float_tensors(draw: st.DrawFn, binary: Binary, *shape: int) -> torch.Tensor:
    """A tensor of a format from a few drawn bit patterns, arranged by a seed."""
    dtype = next(key for key, value in BINARIES.items() if value == binary)
    bits = draw(st.sampled_from((moderate_bits(binary), wild_bits(binary))))
    palette = draw(st.lists(bits, min_size=1, max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    choice = torch.randint(len(palette), shape, generator=generator)
    return from_bits(palette, dtype, len(palette))[choice]


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int, int]:
    """M from 1 to 17, an odd or prime N (and sometimes beyond one block of 128), K around every boundary."""
    m = draw(st.integers(1, 17))
    n = draw(st.sampled_from((1, 2, 3, 5, 7, 13, 17, 31, 37, 131)))
    return m, n, draw(st.one_of(st.sampled_from(SHORT_K), st.sampled_from(LONG_K), st.integers(0, 300)))


@st.composite
def products(draw: st.DrawFn) -> Product:
    """Everything that ``emulate_matmul`` takes."""
    m, n, k = draw(shapes())
    kind = draw(st.sampled_from(list(SCALING)))
    of_a, of_b = draw(scale_shapes(kind, m, n, k))
    bias = draw(st.none() | st.sampled_from(BIAS_DTYPES).flatmap(lambda d: float_tensors(BINARIES[d], n)))
    return Product(
        a=draw(operands(m, k)),
        b=draw(operands(n, k)).t(),
        unit=draw(units()),
        # Block scales are always promoted; fast accumulation is refused there.
        use_fast_accum=draw(st.booleans()) and kind in ("tensor", "row"),
        split_k=draw(st.integers(1, 5)),
        kind=kind,
        scale_a=draw(float_tensors(FP32, *of_a)),
        scale_b=draw(float_tensors(FP32, *of_b)),
        bias=bias,
        out_dtype=draw(st.sampled_from(OUT_DTYPES)),
        say_scaling=draw(st.booleans()),
    )


@st.composite
def scale_shapes(draw: st.DrawFn, kind: Kind, m: int, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the two scales of a kind; one element may come in any number of dimensions."""
    if kind == "tensor":
        one = st.sampled_from(((), (1,), (1, 1)))
        return draw(one), draw(one)
    if kind == "row":
        return (m, 1), (1, n)
    rows = ceil(m / 128) if kind == "128x128 by 1x128" else m
    return (rows, ceil(k / 128)), (ceil(k / 128), ceil(n / 128) if kind == "1x128 by 128x128" else n)


@st.composite
def instructions(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, TensorCoreUnit]:
    """The a [R, k], b [R, k] and c [R] of one instruction of a unit; k may be less than the instruction's."""
    unit = draw(units())
    rows = draw(st.integers(1, 4))
    k = draw(st.integers(0, unit.instruction_k)) if draw(st.booleans()) else unit.instruction_k
    return draw(operands(rows, k)), draw(operands(rows, k)), draw(float_tensors(FP32, rows)), unit
