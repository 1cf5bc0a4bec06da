"""The derived bound: every unit of the oracle keeps to it, adversaries nearly attain it, faults break it."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8ref
from fp8ref import UNITS, TensorCoreUnit
from fp8ref.emulation.scales import Scaling
from fp8ref.testing import Bound, Fill, MatmulCase, Supports, assert_within_bound, matmul_bound, matmul_cases
from fp8ref.testing.strategies import float_fills, units

EXAMPLES = settings().max_examples
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FINITE = Supports(specials=False, split_k=(1, 2, 3), smallest=(1, 1, 0), largest=(5, 20, 400))
ADVERSARIES = {"sm90": 32, "sm89": 32, "sm90_hmma": 128, "sm100": 128, "sm90_mma_sync": 32}


def bound_of(case: MatmulCase, unit: str | TensorCoreUnit | None = None) -> Bound:
    made = case.operands()
    options = {**case.options(made), "scaling": case.scaling, "unit": case.unit if unit is None else unit}
    return matmul_bound(made.a, made.b, made.scale_a, made.scale_b, **options)


def outside(y: torch.Tensor, bound: Bound) -> torch.Tensor:
    low, value, high = bound.low.double(), y.double(), bound.high.double()
    within = torch.where(low.isnan(), value.isnan(), (low <= value) & (value <= high))
    return ~within & bound.radius.isfinite()


def exact_value(case: MatmulCase, i: int, j: int) -> Fraction:
    """The exact scaled and biased sum of one output, by rational arithmetic."""
    made = case.operands()

    def scale(x: torch.Tensor, kind: Scaling, row: int, k: int) -> Fraction:
        if kind == "tensor":
            return Fraction(x.reshape(()).item())
        return Fraction(x[row // 128 if kind == "128x128" else row, 0 if kind == "row" else k // 128].item())

    scale_b = made.scale_b.t() if made.scale_b.dim() == 2 else made.scale_b
    pairs = zip(made.a[i].double().tolist(), made.b[:, j].double().tolist(), strict=True)
    terms = (
        Fraction(x) * Fraction(y) * scale(made.scale_a, case.scaling[0], i, k) * scale(scale_b, case.scaling[1], j, k)
        for k, (x, y) in enumerate(pairs)
    )
    return sum(terms, Fraction(0) if made.bias is None else Fraction(float(made.bias[j])))


moderate = float_fills(torch.float32, wild=False)


@settings(max_examples=2 * EXAMPLES)
@given(matmul_cases(FINITE, unit=units()), moderate, moderate, st.integers(0, 3))
def test_every_unit_in_every_mode_keeps_to_its_bound(case: MatmulCase, left: Fill, right: Fill, wild: int) -> None:
    """Named and made-up units, any scales (moderate ones, so that a bound exists, in three cases of four)."""
    if wild < 3:
        case = replace(case, scale_a=left, scale_b=right)
    bound = bound_of(case)
    if wild < 3 and case.bias is None:
        assert bound.radius.isfinite().all()
    wrong = outside(case.expected(), bound)
    assert not wrong.any(), (wrong.nonzero()[0].tolist(), bound.exact[wrong][0], bound.radius[wrong][0])


@settings(max_examples=EXAMPLES // 2)
@given(matmul_cases(replace(FINITE, largest=(3, 5, 300))), moderate, moderate)
def test_the_exact_result_is_exact(case: MatmulCase, left: Fill, right: Fill) -> None:
    """The centre, and what lies a radius and float64's own rounding around it, hold the rational result."""
    bias = case.bias and replace(case.bias, palette=(case.bias.format.one,))
    case = replace(case, scale_a=left, scale_b=right, bias=bias)
    bound = bound_of(case)
    for i in range(case.m):
        for j in range(case.n):
            exact = exact_value(case, i, j)
            size = abs(exact) + Fraction(bound.radius[i, j].item())
            assert abs(Fraction(bound.exact[i, j].item()) - exact) <= size / 2**40


@settings(max_examples=EXAMPLES)
@given(matmul_cases(replace(FINITE, scalings=(("tensor", "tensor"), ("row", "row")))), moderate, moderate, st.data())
def test_fp32_additions_in_any_order_keep_to_their_bound(
    case: MatmulCase, left: Fill, right: Fill, data: st.DataObject
) -> None:
    """A random order, cut into runs that are added one after the other, scales in either order."""
    case = replace(case, scale_a=left, scale_b=right, bias=None, out_dtype=torch.float32)
    made = case.operands()
    seed, runs = data.draw(st.integers(0, 2**32)), data.draw(st.integers(1, 7))
    order = torch.randperm(case.k, generator=torch.Generator().manual_seed(seed))
    total = torch.zeros(case.m, case.n)
    for run in order.tensor_split(runs):
        part = torch.zeros(case.m, case.n)
        for k in run.tolist():
            part = part + made.a[:, k].float()[:, None] * made.b[k].float()[None]
        total = total + part
    first, second = (made.scale_a, made.scale_b) if data.draw(st.booleans()) else (made.scale_b, made.scale_a)
    assert not outside(total * first * second, bound_of(case, "fp32")).any()


@given(matmul_cases(replace(FINITE, smallest=(1, 1, 1)), exact=True), st.sampled_from([*UNITS, "fp32"]))
def test_exact_data_leave_nothing_open(case: MatmulCase, unit: str) -> None:
    bound = bound_of(case, unit)
    assert torch.equal(bound.low.double(), bound.high.double())
    assert torch.equal(bound.low.double(), case.expected().double())


def adversary(unit: str, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A first product of 2^16, and others just below the last place that the unit keeps beside it."""
    exponent = 16 - UNITS[unit].fraction_bits - 2
    small = max(exponent // 2, -6)
    a, b = torch.full((1, k), 1.875 * 2.0**small), torch.full((1, k), 1.875 * 2.0 ** (exponent - small))
    a[:, 0] = b[:, 0] = 256.0
    return a.to(E4M3), b.to(E4M3).t()


@pytest.mark.parametrize("use_fast_accum", [True, False])
@pytest.mark.parametrize("unit", ADVERSARIES)
def test_adversaries_come_close_to_the_bound(unit: str, use_fast_accum: bool) -> None:
    a, b = adversary(unit, ADVERSARIES[unit])
    y = fp8ref.accumulate(a, b, unit=unit, use_fast_accum=use_fast_accum)
    bound = matmul_bound(a, b, unit=unit, use_fast_accum=use_fast_accum, out_dtype=torch.float32)
    share = ((y.double() - bound.exact).abs() / bound.radius).item()
    assert 0.74 < share <= 1, share


@pytest.mark.parametrize("k", [640, 4096, 8192])
def test_adversaries_of_a_long_chain(k: int) -> None:
    a, b = adversary("sm90", k)
    y = fp8ref.accumulate(a, b, use_fast_accum=True)
    bound = matmul_bound(a, b, use_fast_accum=True, out_dtype=torch.float32)
    assert 0.92 < ((y.double() - bound.exact).abs() / bound.radius).item() <= 1


def test_fp32_additions_come_close_to_their_bound() -> None:
    """2^16 first, then products of half its last place: all are lost, by round to even."""
    a, b = torch.full((1, 1000), 2.0**-5), torch.full((1, 1000), 2.0**-4)
    a[:, 0] = b[:, 0] = 256.0
    a, b = a.to(E4M3), b.to(E4M3).t()
    lost = 999 * 2.0**-9
    total = torch.zeros(1, 1)
    for k in range(1000):
        total = total + a[:, k].float()[:, None] * b[k].float()[None]
    bound = matmul_bound(a, b, unit="fp32", out_dtype=torch.float32)
    assert (bound.exact - total.double()).item() == lost
    assert lost <= bound.radius.item() <= 2.01 * lost


FAULTS = {
    "a dropped product": lambda y, a, b: y - a[:, -1].float()[:, None] * b[-1].float()[None],
    "one unit too many": lambda y, a, b: (
        torch.nextafter(torch.nextafter(y, y + 1), y + 1) + 0 * (a.float() @ b.float())
    ),
    "zeros": lambda y, a, b: 0 * y + 0 * (a.float() @ b.float()),
    "NaN": lambda y, a, b: y + torch.nan * (a.float() @ b.float()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_break_the_bound(fault: str) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(1, 5, shape, generator=generator).float().to(E4M3) for shape in ((5, 200), (200, 7)))
    y = fp8ref.accumulate(a, b)
    assert_within_bound(y, a, b)
    with pytest.raises(AssertionError, match=r"of 35 outputs lie outside their bound"):
        assert_within_bound(FAULTS[fault](y, a, b), a, b)


def test_a_skipped_promotion_breaks_the_bound() -> None:
    a, b = adversary("sm90", 512)
    fast = fp8ref.accumulate(a, b, use_fast_accum=True)
    assert_within_bound(fast, a, b, use_fast_accum=True)
    with pytest.raises(AssertionError, match=r"\(unit sm90, accurate, split_k 1\)\nfirst at \(0, 0\): actual 0x4780"):
        assert_within_bound(fast, a, b)
    assert_within_bound(fp8ref.accumulate(a, b), a, b)


def test_a_narrow_accumulator_breaks_the_bound_of_a_wide_one() -> None:
    a, b = adversary("sm90", 64)
    with pytest.raises(AssertionError, match="unit sm100"):
        assert_within_bound(fp8ref.accumulate(a, b), a, b, unit="sm100")


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, E4M3, E5M2])
def test_a_wrong_output_rounding_breaks_the_bound(out_dtype: torch.dtype) -> None:
    a, b = torch.tensor([[1.0, 0.0625]]).to(E4M3), torch.tensor([[1.0], [0.875]]).to(E4M3)
    exact = 1.0546875
    y = fp8ref.emulate_matmul(a, b, torch.ones(()), torch.ones(()), out_dtype=out_dtype, unit="exact")
    assert_within_bound(y, a, b)
    up = y if y.double().item() > exact else y.view(torch.uint8 if y.itemsize == 1 else torch.int16) + 1
    wrong = up.view(out_dtype) if up.dtype != out_dtype else (y.view(torch.int16) - 1).view(out_dtype)
    with pytest.raises(AssertionError, match="1 of 1 outputs"):
        assert_within_bound(wrong, a, b)


def test_overflow_and_specials() -> None:
    a = torch.tensor([[448.0, 448.0], [float("nan"), 1.0]]).to(E4M3)
    b = torch.tensor([[448.0], [448.0]]).to(E4M3)
    y = fp8ref.emulate_matmul(a, b, torch.ones(()), torch.ones(()), out_dtype=torch.float16)
    assert y.isinf().tolist() == [[True], [False]]
    assert_within_bound(y, a, b)
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_within_bound(torch.tensor([[65504.0], [torch.nan]], dtype=torch.float16), a, b)
    with pytest.raises(AssertionError, match="1 of 2"):
        assert_within_bound(torch.tensor([[torch.inf], [1.0]], dtype=torch.float16), a, b)


def test_what_has_no_bound_is_an_error() -> None:
    a = torch.ones(1, 2).to(E4M3)
    big, small = torch.tensor(2.0**100), torch.tensor(2.0**-100)
    y = torch.tensor([[2.0]])
    with pytest.raises(ValueError, match=r"actual: 1 of 1 outputs have no bound, the first at \(0, 0\)"):
        assert_within_bound(y, a, a.t(), big, big)
    with pytest.raises(ValueError, match="scale_b: got NaN"):
        assert_within_bound(y, a, a.t(), small, torch.tensor(torch.inf))
    with pytest.raises(ValueError, match="bias: got NaN or Inf"):
        assert_within_bound(y, a, a.t(), bias=torch.tensor([torch.nan]))


def test_what_it_refuses() -> None:
    a = torch.ones(1, 2).to(E4M3)
    with pytest.raises(ValueError, match=r"unit: got 'sm75'; give one of \['fp32', 'sm90'"):
        assert_within_bound(torch.ones(1, 1), a, a.t(), unit="sm75")
    with pytest.raises(TypeError, match="unit: got int"):
        assert_within_bound(torch.ones(1, 1), a, a.t(), unit=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"actual: got shape \[1, 2\]; the product is \[1, 1\]"):
        assert_within_bound(torch.ones(1, 2), a, a.t())
    with pytest.raises(TypeError, match=r"out_dtype: got torch.float64"):
        assert_within_bound(torch.ones(1, 1).double(), a, a.t())
    with pytest.raises(ValueError, match="use_fast_accum: got True with block scales"):
        assert_within_bound(
            torch.ones(1, 1), a, a.t(), torch.ones(1, 1), torch.ones(1, 1), use_fast_accum=True,
            scaling=("1x128", "1x128"),
        )  # fmt: skip
