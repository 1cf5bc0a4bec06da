"""Strategies of cases that are each hard in one way, within what a subject supports."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from hypothesis import strategies as st

from fp8ref.testing.bound import FP32_ANY_ORDER
from fp8ref.testing.cases import MatmulCase
from fp8ref.testing.fills import Fill
from fp8ref.testing.floats import FLOATS
from fp8ref.testing.strategies import float_fills, matmul_cases
from fp8ref.testing.subject import Subject
from fp8ref.testing.supports import Supports
from fp8ref.testing.within import model_of

_FP32 = FLOATS[torch.float32]
_EDGES = (
    (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129),
    (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 159, 255, 256, 257, 383, 385),
)
_NEAR_ONE = tuple(range(0x30, 0x40))  # e4m3: 0.5 to 1.875; e5m2: 0.125 to 1.75


def moderate(dtype: torch.dtype) -> st.SearchStrategy[Fill]:
    """A few numbers within 2^6 of one."""
    return float_fills(dtype, wild=False)


@st.composite
def drawn(
    draw: st.DrawFn,
    /,
    subject: Subject,
    *,
    tame: bool = False,
    exact: bool = False,
    shape: tuple[int, int, int] | None = None,
    **changed: Any,
) -> MatmulCase:
    """Any case that the subject supports.

    ``tame``: operands without NaN and Inf, scales and bias near one, as a bound needs them. ``changed``: fields of
    :class:`fp8ref.testing.Supports`.
    """
    exact = exact or subject.expect == "exact"
    tame = tame or exact or subject.expect == "bound"
    supports = replace(subject.supports, **{**({"specials": False} if tame else {}), **changed})
    unit = "exact" if subject.unit == FP32_ANY_ORDER else subject.unit
    case = draw(matmul_cases(supports, exact=exact, unit=unit, shape=shape))
    if exact or not tame:
        return case
    bias = case.bias and draw(moderate(case.bias.dtype))
    return replace(case, scale_a=draw(moderate(torch.float32)), scale_b=draw(moderate(torch.float32)), bias=bias)


def exact_data(subject: Subject) -> st.SearchStrategy[MatmulCase]:
    """Small integers and powers of two: every order of addition gives the same bits."""
    return drawn(subject, exact=True)


@st.composite
def tails(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """Sizes at, just below and just above every block that a kernel might have."""
    of = subject.supports
    sizes = []
    for edges, multiple, low, high in zip(_EDGES, of.multiple_of, of.smallest, of.largest, strict=True):
        fitting = {-(-edge // multiple) * multiple for edge in edges}
        found = sorted(size for size in fitting if low <= size <= high) or [low]
        # The last ones twice as often: a second large block is where most can go wrong.
        sizes.append(draw(st.sampled_from(found) | st.sampled_from(found[-4:])))
    m, n, k = sizes
    return draw(drawn(subject, tame=True, shape=(m, n, k)))


@st.composite
def independent_rows(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """Two rows of a or more, with scales that are not shared among some rows only."""
    of = subject.supports
    case = draw(drawn(subject, tame=True, smallest=(2, *of.smallest[1:]), scalings=row_scalings(of)))
    return replace(case, say_scaling=of.says_scaling)


def row_scalings(supports: Supports) -> tuple[Any, ...]:
    """The kinds of scales under which one row of a is a product of its own."""
    return tuple(pair for pair in supports.scalings if pair[0] != "128x128")


@st.composite
def specials(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """NaN and Inf in a few places of either operand."""
    case = draw(drawn(subject, tame=True))
    fills = []
    for fill, rows, fewest in ((case.a, case.m, 1), (case.b, case.n, 0)):
        codes = [code for code in range(256) if not fill.format.is_finite(code)]
        places = st.tuples(st.integers(0, max(0, rows * case.k - 1)), st.sampled_from(codes))
        fills.append(replace(fill, at=tuple(draw(st.lists(places, min_size=fewest, max_size=3)))))
    return replace(case, a=fills[0], b=fills[1])


def _without_bias(subject: Subject) -> tuple[torch.dtype | None, ...]:
    return (None,) if None in subject.supports.bias_dtypes else subject.supports.bias_dtypes


def _widest(subject: Subject) -> tuple[torch.dtype, ...]:
    """The output with most bits: a narrow one hides what the accumulator and the scales do."""
    return (max(subject.supports.out_dtypes, key=lambda dtype: FLOATS[dtype].fraction_bits),)


@st.composite
def scale_order(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """Scales whose products round: another order, or one in the place of another, shows in the last bits."""
    of = subject.supports
    pair = draw(st.sampled_from(of.scalings))
    beyond = [-(-129 // multiple) * multiple for multiple in of.multiple_of]
    # More than one block of 128 rows, where that is how they are scaled.
    several = [pair[i] == "128x128" and beyond[i] <= of.largest[i] for i in range(2)]
    smallest = (*(max(of.smallest[i], beyond[i]) if several[i] else of.smallest[i] for i in range(2)), of.smallest[2])
    changed: dict[str, Any] = {"scalings": (pair,), "smallest": smallest}
    case = draw(drawn(subject, tame=True, bias_dtypes=_without_bias(subject), out_dtypes=_widest(subject), **changed))
    a, b = (replace(fill, palette=_NEAR_ONE, zeros=0.0) for fill in (case.a, case.b))
    many = float_fills(torch.float32, wild=False, most=8)
    return replace(case, a=a, b=b, scale_a=draw(many), scale_b=draw(many))


def narrow_outputs(supports: Supports) -> tuple[torch.dtype, ...]:
    """The outputs with fewer bits than the fp32 that they are rounded from."""
    return tuple(dtype for dtype in supports.out_dtypes if dtype.itemsize < 4)


@st.composite
def output_rounding(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """Results of many significant bits about one, in a narrow output: rounding twice, or elsewhere, shows."""
    case = draw(drawn(subject, tame=True, out_dtypes=narrow_outputs(subject.supports)))
    near = f"near {case.a.format.one >> case.a.format.fraction_bits}"
    many = float_fills(torch.float32, wild=False, most=8)
    a, b = replace(case.a, palette=near), replace(case.b, palette=_NEAR_ONE)
    return replace(case, a=a, b=b, scale_a=draw(many), scale_b=draw(many))


def _with_scales_of(case: MatmulCase, exponent: int) -> MatmulCase:
    """Scales of 1.5 by 2^x whose products are about 2^exponent; those of a of either sign."""
    half = exponent // 2
    codes = tuple(_FP32.code(sign * 1.5 * 2.0**half) for sign in (1, -1))
    one = (_FP32.code(1.5 * 2.0 ** (exponent - half)),)
    return replace(case, scale_a=replace(case.scale_a, palette=codes), scale_b=replace(case.scale_b, palette=one))


@st.composite
def overflow(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """Results about as large as the largest of the output, and larger."""
    case = draw(drawn(subject, tame=True, bias_dtypes=_without_bias(subject)))
    fmt = FLOATS[case.out_dtype]
    last = (fmt.largest >> fmt.fraction_bits) + fmt.e_min - 1
    # No bound where fp32 itself may overflow on the way.
    exponent = draw(st.integers(last - 8, last + 4)) if last < 100 or subject.expect != "bound" else 64
    a, b = (replace(fill, palette=_NEAR_ONE, zeros=0.0) for fill in (case.a, case.b))
    return replace(_with_scales_of(case, exponent), a=a, b=b)


@st.composite
def subnormals(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """Subnormal operands, results among the subnormals of the output, or a product of scales among those of fp32."""
    kind = draw(st.sampled_from(("operands", "results", "scales")))
    changed: dict[str, Any] = {"bias_dtypes": _without_bias(subject)}
    if kind == "scales":
        joined = tuple(pair for pair in subject.supports.scalings if pair != ("row", "row"))
        changed |= {"out_dtypes": _widest(subject), "scalings": joined or subject.supports.scalings}
    case = draw(drawn(subject, tame=True, **changed))
    if kind == "scales":
        # The operands are large, so that the results are none and only the scales can be flushed.
        a, b = (replace(fill, palette=(fill.format.largest, fill.format.one), zeros=0.0) for fill in (case.a, case.b))
        return replace(_with_scales_of(case, _FP32.e_min - draw(st.integers(2, 12))), a=a, b=b)
    case = replace(case, a=replace(case.a, palette="subnormal"), b=replace(case.b, palette="subnormal"))
    operands = case.a.format.e_min + case.b.format.e_min
    down = FLOATS[case.out_dtype].e_min - operands + draw(st.integers(-6, 3))
    return _with_scales_of(case, down) if kind == "results" else case


@st.composite
def zeros(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """Sums that are zero, with negative scales and biases of either zero."""
    case = draw(drawn(subject, tame=True))
    a = replace(case.a, palette=(0x00, 0x80, case.a.format.one), zeros=draw(st.sampled_from((0.5, 0.9, 0.99))))
    bias = case.bias and replace(case.bias, palette=(0, case.bias.format.sign))
    return replace(case, a=a, bias=bias)


@st.composite
def biased(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """A bias as large as the scaled sum: its rounding, and where it happens, shows."""
    dtypes = tuple(dtype for dtype in subject.supports.bias_dtypes if dtype is not None)
    outputs = _widest(subject) if draw(st.booleans()) else subject.supports.out_dtypes
    return draw(drawn(subject, tame=True, bias_dtypes=dtypes, out_dtypes=outputs))


@st.composite
def accumulation(draw: st.DrawFn, subject: Subject) -> MatmulCase:
    """The longest K, terms of like size: every promotion, every part and the order of k leave their mark."""
    of = subject.supports
    multiple = of.multiple_of[2]
    low = max(of.smallest[2], of.largest[2] // 2 // multiple * multiple)
    smallest = (*of.smallest[:2], low)
    wide = _widest(subject)
    case = draw(drawn(subject, tame=True, smallest=smallest, bias_dtypes=_without_bias(subject), out_dtypes=wide))
    if draw(st.booleans()):
        return _with_losses(case, subject)
    one = case.a.format.one >> case.a.format.fraction_bits
    return replace(case, a=replace(case.a, palette=f"near {one}", zeros=0.0), b=replace(case.b, palette=_NEAR_ONE))


def _with_losses(case: MatmulCase, subject: Subject) -> MatmulCase:
    """One output whose first product is 2^16, beside which the accumulator loses all others of its chain."""
    model = model_of(subject.unit)
    kept = 24 if model is None or model.products_per_step is None else model.fraction_bits
    # 1.75 * 1.75 times this is just below the last place that is kept beside 2^16.
    exponent = max(16 - kept - 2, -12)
    fills = []
    for fill, power in ((case.a, exponent // 2), (case.b, exponent - exponent // 2)):
        small, large = fill.format.code(1.75 * 2.0**power), fill.format.code(256.0)
        fills.append(replace(fill, palette=(small,), zeros=0.0, at=((0, large),)))
    return replace(case, a=fills[0], b=fills[1])
