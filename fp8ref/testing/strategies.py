"""Hypothesis strategies: FP8 products whose operands, scales and shapes lie on the edges of the arithmetic.

Boundary tables are crossed with weighted random draws, as in Berkeley TestFloat. Large tensors are drawn as a palette
of a few codes and a seed that arranges them: quick to make, and what shrinks is the palette.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch
from hypothesis import note
from hypothesis import strategies as st
from torch import Tensor

from fp8ref.emulation.formats import format_of
from fp8ref.emulation.scales import Scaling, check_scaling, scale_shape
from fp8ref.emulation.units import UNITS, TensorCoreUnit
from fp8ref.testing.cases import MatmulCase
from fp8ref.testing.fills import Fill, boundary_codes, integer_codes, named_palette
from fp8ref.testing.floats import FLOATS, FloatFormat, float_of
from fp8ref.testing.supports import Supports

ROWS = (1, 2, 3, 5, 7, 8, 13, 15, 16, 17, 33, 65, 129)
COLUMNS = (1, 2, 3, 5, 7, 13, 16, 17, 31, 32, 37, 63, 64, 65, 127, 128, 129, 131)
SHORT_K = (0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65, 127, 128, 129)
LONG_K = (160, 255, 256, 257, 300, 384, 385, 513, 640)
EXACT_BITS = 14
"""Significant bits that exact-integer data may need: as many as the narrowest known accumulator keeps."""

_ANY = Supports()
_SEEDS = st.integers(0, 2**32 - 1)
_SPREAD = 6  # binades around one that "moderate" numbers lie in


@lru_cache
def moderate_bits(fmt: FloatFormat) -> st.SearchStrategy[int]:
    """Bit patterns of both signs within 2^6 of one."""
    spread = min(_SPREAD << fmt.fraction_bits, fmt.one)
    away = st.integers(-spread, spread)  # shrinks to one
    return st.builds(lambda places, sign: (fmt.one + places) | sign, away, st.sampled_from((0, fmt.sign)))


@lru_cache
def wild_bits(fmt: FloatFormat, *, specials: bool = True) -> st.SearchStrategy[int]:
    """Bit patterns of every kind: moderate, edges, and with ``specials`` NaN, Inf and any bits at all."""
    finite = [moderate_bits(fmt), st.sampled_from(boundary_codes(fmt))]
    if not specials:
        return st.one_of(*finite)
    known = [fmt.magnitude] if fmt.infinity is None else [fmt.infinity, fmt.infinity | fmt.sign, fmt.infinity + 1]
    return st.one_of(*finite, st.integers(0, 2 * fmt.sign - 1), st.sampled_from([*known, fmt.magnitude]))


@lru_cache
def palettes(fmt: FloatFormat) -> st.SearchStrategy[str | tuple[int, ...]]:
    """A few finite FP8 codes to fill an operand with, or the name of many."""
    drawn = st.lists(st.sampled_from(named_palette("finite", fmt)), min_size=1, max_size=6).map(tuple)
    near = st.integers(0, fmt.largest >> fmt.fraction_bits).map(lambda field: f"near {field}")
    return st.one_of(drawn, st.sampled_from(("finite", "edges", "powers", "subnormal")), near)


@lru_cache
def _specials_of(fmt: FloatFormat, size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    codes = [code for code in range(256) if not fmt.is_finite(code)]
    places = st.tuples(st.integers(0, size - 1), st.sampled_from(codes))
    return st.lists(places, min_size=1, max_size=2)


@st.composite
def fp8_fills(
    draw: st.DrawFn, rows: int, columns: int, dtype: torch.dtype | None = None, supports: Supports = _ANY
) -> Fill:
    """How an FP8 [rows, columns] is filled; where specials are supported one in four holds a NaN or an Inf or two."""
    fmt = FLOATS[draw(st.sampled_from([one for pair in supports.dtypes for one in pair])) if dtype is None else dtype]
    at: list[tuple[int, int]] = []
    if supports.specials and rows * columns and draw(st.integers(0, 3)) == 3:
        at = draw(_specials_of(fmt, rows * columns))
    return Fill(
        fmt.dtype,
        draw(palettes(fmt)),
        seed=draw(_SEEDS),
        zeros=draw(st.sampled_from((0.0, 0.0, 0.5, 0.95))),
        at=tuple(at),
        layout=draw(st.sampled_from(supports.layouts)),
        offset=draw(st.integers(0, 17)) if supports.offsets else 0,
    )


@st.composite
def fp8_tensors(
    draw: st.DrawFn, rows: int, columns: int, dtype: torch.dtype | None = None, *, supports: Supports = _ANY
) -> Tensor:
    """An FP8 tensor, finite but for a NaN or Inf here and there, in any layout, between guard bands of NaN.

    A failing test also prints how to make the tensor: ``Fill(...).tensor(rows, columns)``.

    Args:
        draw: given by Hypothesis.
        rows: its first dimension.
        columns: its second.
        dtype: one of the two FP8 dtypes; None draws one of those that ``supports`` names.
        supports: its ``layouts``, ``offsets``, ``specials`` and ``dtypes`` say what may come.

    >>> from hypothesis import given
    >>> @given(fp8_tensors(3, 5, torch.float8_e5m2))
    ... def check(x):
    ...     assert x.shape == (3, 5) and x.dtype == torch.float8_e5m2
    >>> check()
    """
    if dtype is not None:
        format_of(dtype)
    fill = draw(fp8_fills(rows, columns, dtype, supports))
    note(f"from fp8ref.testing import Fill; {fill!r}.tensor({rows}, {columns})")
    return fill.tensor(rows, columns)


@lru_cache
def float_fills(
    dtype: torch.dtype, *, specials: bool = True, wild: bool = True, most: int = 4
) -> st.SearchStrategy[Fill]:
    """How a vector or a tensor of scales is filled: a few drawn numbers, moderate or wild, arranged by a seed."""
    fmt = float_of(dtype, "dtype")
    kinds = [moderate_bits(fmt), *([wild_bits(fmt, specials=specials)] if wild else [])]
    few = st.one_of(*(st.lists(bits, min_size=1, max_size=most).map(tuple) for bits in kinds))
    return st.builds(Fill, st.just(dtype), few, seed=_SEEDS)


@lru_cache
def exact_scales() -> st.SearchStrategy[Fill]:
    """Scales of 1, 1/2 and 2."""
    one = FLOATS[torch.float32].one
    half, two = one - (1 << 23), one + (1 << 23)
    return st.builds(Fill, st.just(torch.float32), st.sampled_from(((one,), (one, half, two))), seed=_SEEDS)


@st.composite
def scales(
    draw: st.DrawFn, scaling: Scaling, rows: int, k: int, *, exact: bool = False, specials: bool = True
) -> Tensor:
    """The fp32 scales of an operand [rows, k], in the shape of their kind; transpose them for ``b`` [k, rows].

    Args:
        draw: given by Hypothesis.
        scaling: "tensor", "row", "1x128" or "128x128".
        rows: M, or N.
        k: K.
        exact: only 1, 1/2 and 2, which keep exact data exact.
        specials: whether NaN and Inf may come; zeros, subnormals and negative numbers do anyway.

    >>> from hypothesis import given
    >>> @given(scales("1x128", 3, 300))
    ... def check(x):
    ...     assert x.shape == (3, 3) and x.dtype == torch.float32
    >>> check()
    """
    shape = scale_shape(check_scaling(scaling), rows, k)
    fill = draw(exact_scales() if exact else float_fills(torch.float32, specials=specials))
    note(f"from fp8ref.testing import Fill; {fill!r}.tensor(*{shape})")
    return fill.tensor(*shape)


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


@lru_cache
def _sizes(edges: tuple[int, ...], low: int, high: int, multiple: int) -> st.SearchStrategy[int]:
    """Sizes at the edges, and any others, that are multiples between ``low`` and ``high``."""
    found = sorted({size for edge in edges if low <= (size := -(-edge // multiple) * multiple) <= high})
    anything = st.integers(low // multiple, high // multiple).map(lambda count: count * multiple)
    return st.one_of(st.sampled_from(found), anything) if found else anything


@st.composite
def shapes(draw: st.DrawFn, supports: Supports = _ANY) -> tuple[int, int, int]:
    """M below 16 and beyond a block, odd and prime N around one block of 128, K around every boundary."""
    edges = (ROWS, COLUMNS, SHORT_K + LONG_K)
    limits = zip(edges, supports.smallest, supports.largest, supports.multiple_of, strict=True)
    m, n, k = (draw(_sizes(*limit)) for limit in limits)
    return m, n, k


def integers_that_stay_exact(k: int) -> int:
    """The largest L with ``k`` products of integers up to L below 2^14.

    Raises:
        ValueError: K is too long even for ones.

    >>> integers_that_stay_exact(640), integers_that_stay_exact(4000)
    (4, 2)
    """
    for limit in (4, 2, 1):
        if k * limit * limit < 1 << EXACT_BITS:
            return limit
    raise ValueError(f"k: got {k}; exact data has K below {1 << EXACT_BITS}")


@st.composite
def _exact_operands(draw: st.DrawFn, case: MatmulCase) -> MatmulCase:
    name = f"integers {integers_that_stay_exact(case.k)}"
    a, b = (replace(fill, palette=name, zeros=0.0, at=()) for fill in (case.a, case.b))
    bias = case.bias and replace(case.bias, palette=tuple(integer_codes(case.bias.format, 4)))
    return replace(case, a=a, b=b, bias=bias, scale_a=draw(exact_scales()), scale_b=draw(exact_scales()))


@st.composite
def matmul_cases(
    draw: st.DrawFn,
    supports: Supports = _ANY,
    *,
    exact: bool = False,
    unit: str | TensorCoreUnit | st.SearchStrategy[TensorCoreUnit] = "sm90",
    shape: tuple[int, int, int] | None = None,
) -> MatmulCase:
    """A :class:`fp8ref.testing.MatmulCase`: everything that ``emulate_matmul`` takes.

    Args:
        draw: given by Hypothesis.
        supports: what may come.
        exact: operands are small integers and scales 1, 1/2 and 2, so that every product, partial sum and scaled sum
            is exact in an accumulator of 14 bits, whatever the order: all right kernels that round once to the output
            agree on every bit.
        unit: what ``case.expected()`` computes with; or a strategy of units.
        shape: M, N and K; None draws them.

    >>> from hypothesis import given
    >>> @given(matmul_cases(exact=True))
    ... def check(case):
    ...     assert torch.equal(case.expected().double(), case.call(fp8ref.emulate_matmul, unit="exact").double())
    >>> import fp8ref
    >>> check()
    """
    m, n, k = draw(shapes(supports)) if shape is None else shape
    pair = draw(st.sampled_from(supports.scalings))
    dtype_a, dtype_b = draw(st.sampled_from(supports.dtypes))
    bias_dtype = draw(st.sampled_from(supports.bias_dtypes))
    scale = float_fills(torch.float32, specials=supports.specials)
    case = MatmulCase(
        m,
        n,
        k,
        a=draw(fp8_fills(m, k, dtype_a, supports)),
        b=draw(fp8_fills(n, k, dtype_b, supports)),
        scaling=pair,
        scale_a=draw(scale),
        scale_b=draw(scale),
        scale_dims=draw(st.tuples(st.integers(0, 2), st.integers(0, 2))) if pair[0] == "tensor" else (0, 0),
        bias=None if bias_dtype is None else draw(float_fills(bias_dtype, specials=supports.specials)),
        out_dtype=draw(st.sampled_from(supports.out_dtypes)),
        use_fast_accum=draw(st.sampled_from(supports.modes_of(pair))),
        split_k=draw(st.sampled_from(supports.split_k)),
        unit=draw(unit) if isinstance(unit, st.SearchStrategy) else unit,
    )
    # Otherwise left out only where the shapes alone say the same, whatever the sizes.
    open_shapes = pair != ("tensor", "tensor")
    if not supports.says_scaling or not (open_shapes or draw(st.booleans())):
        case = replace(case, say_scaling=False)
    return draw(_exact_operands(case)) if exact else case
