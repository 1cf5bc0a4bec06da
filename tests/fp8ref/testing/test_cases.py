"""Cases and strategies: what they make, how they print, how far they reach."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st

import fp8ref
from fp8ref import TensorCoreUnit
from fp8ref.emulation.scales import PAIRS, scale_fits
from fp8ref.testing import Fill, MatmulCase, Supports, assert_bits_equal, fp8_tensors, matmul_cases, scales
from fp8ref.testing.floats import bits_of
from fp8ref.testing.guards import GUARD, GUARD_BYTE
from fp8ref.testing.strategies import float_fills, fp8_fills, integers_that_stay_exact, shapes, units
from fp8ref.testing.supports import LAYOUTS

NAMES = {"torch": torch, "Fill": Fill, "MatmulCase": MatmulCase, "TensorCoreUnit": TensorCoreUnit}
QUICK = settings(max_examples=3000, database=None, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
SHRUNK = (Phase.generate, Phase.shrink)
SMALL = Supports(largest=(17, 40, 300))


@given(matmul_cases(SMALL, unit=units()))
def test_the_repr_of_a_case_makes_it_again(case: MatmulCase) -> None:
    again = eval(repr(case), dict(NAMES))
    assert again == case
    assert_bits_equal(again.operands().a, case.operands().a)


@given(matmul_cases(SMALL))
def test_the_snippet_repeats_the_case(case: MatmulCase) -> None:
    seen: list[torch.Tensor] = []

    def kernel(*operands: torch.Tensor, **options: object) -> torch.Tensor:
        seen.extend(operands)
        return fp8ref.emulate_matmul(*operands, **{"scaling": case.scaling, **options})  # type: ignore[arg-type]

    exec(case.snippet(), {"kernel": kernel})
    made = case.operands()
    for ours, theirs in zip((made.a, made.b, made.scale_a, made.scale_b), seen, strict=True):
        assert_bits_equal(theirs.contiguous(), ours.contiguous())
        assert theirs.stride() == ours.stride()
        assert theirs.storage_offset() == ours.storage_offset()


@given(matmul_cases(Supports(smallest=(1, 1, 0), split_k=(1, 2, 5))))
def test_cases_are_what_the_oracle_takes(case: MatmulCase) -> None:
    y = case.expected()
    assert list(y.shape) == [case.m, case.n]
    assert y.dtype == case.out_dtype
    made = case.operands()
    assert (made.bias is None) == (case.bias is None)
    assert scale_fits(made.scale_a, case.scaling[0], case.m, case.k)


def test_failures_shrink_and_print_a_case() -> None:
    """The smallest failing case is short, and what Hypothesis prints of it runs."""

    @settings(max_examples=200, database=None, report_multiple_bugs=False, phases=SHRUNK)
    @given(matmul_cases())
    def check(case: MatmulCase) -> None:
        assert case.k < 33

    with pytest.raises(AssertionError) as caught:
        check()
    notes = "\n".join(caught.value.__notes__)
    printed = re.search(r"case=(MatmulCase\(.*\)),\n", notes)
    assert printed is not None, notes
    smallest = eval(printed[1], dict(NAMES))
    assert (smallest.m, smallest.n, smallest.k) == (1, 1, 33)
    assert len(printed[1]) < 250, printed[1]


def test_tensors_print_how_to_make_them() -> None:
    @settings(database=None, phases=SHRUNK)
    @given(fp8_tensors(2, 3), scales("row", 2, 3))
    def check(x: torch.Tensor, scale: torch.Tensor) -> None:
        assert x is scale

    with pytest.raises(AssertionError) as caught:
        check()
    notes = "\n".join(caught.value.__notes__)
    made = [eval(text, dict(NAMES)) for text in re.findall(r"import Fill; (Fill\(.*)\n", notes + "\n")]
    assert [(list(x.shape), x.dtype.itemsize) for x in made] == [([2, 3], 1), ([2, 1], 4)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_layouts_hold_the_same_values_between_guard_bands(layout: str, dtype: torch.dtype) -> None:
    plain = Fill(dtype, "finite", seed=5, zeros=0.3).tensor(7, 11)
    view, memory = Fill(dtype, "finite", seed=5, zeros=0.3, layout=layout, offset=3).buffer(7, 11)  # type: ignore[arg-type]
    wanted = plain[:1].expand(7, 11) if layout == "expanded" else plain
    assert torch.equal(view.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8))
    bands = torch.cat([memory[: GUARD + 3], memory[-GUARD:]])
    assert (bands == GUARD_BYTE).all()
    outside = int((memory == GUARD_BYTE).sum())
    assert outside == len(memory) - (11 if layout == "expanded" else 77)
    assert view.storage_offset() >= GUARD + 3
    assert view.is_contiguous() == (layout == "rows")


@given(matmul_cases(exact=True), st.sampled_from(list(fp8ref.UNITS)), st.randoms(use_true_random=False))
def test_exact_data_agree_in_any_order_on_any_unit(case: MatmulCase, unit: str, random: object) -> None:
    made = case.operands()
    options = {**case.options(made), "scaling": case.scaling}
    y = case.expected()
    assert_bits_equal(fp8ref.emulate_matmul(made.a, made.b, made.scale_a, made.scale_b, unit=unit, **options), y)
    if case.scaling[0] in ("tensor", "row"):
        order = list(range(case.k))
        random.shuffle(order)  # type: ignore[attr-defined]
        a, b = (x.view(torch.uint8) for x in (made.a, made.b))
        a, b = a[:, order].view(made.a.dtype), b[order].view(made.b.dtype)
        assert_bits_equal(fp8ref.emulate_matmul(a, b, made.scale_a, made.scale_b, **options), y)
        plain = (a.double() @ b.double()) * made.scale_a.double() * made.scale_b.double()
        plain = plain if made.bias is None else plain + made.bias.double()
        if case.out_dtype == torch.float32:
            assert_bits_equal(y, plain.float())


def test_exact_data_end_where_they_would_not_be_exact() -> None:
    assert [integers_that_stay_exact(k) for k in (1023, 1024, 4095, 4096, 16383)] == [4, 2, 2, 1, 1]
    with pytest.raises(ValueError, match=r"k: got 16384; exact data has K below 16384"):
        integers_that_stay_exact(16384)


@pytest.mark.parametrize(
    "wanted",
    [
        lambda s: s[0] < 16 and s[1] % 2 and s[2] % 2 and s[2] > 128,
        lambda s: s[1] == 131 and s[2] % 128 == 1,
        lambda s: s[2] % 16 == 15,
        lambda s: s[0] == 17 and s[1] == 129,
    ],
)
def test_hard_shapes_are_found_quickly(wanted: object) -> None:
    found = find(shapes(), wanted, settings=QUICK)  # type: ignore[arg-type]
    assert len(found) == 3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_is_drawn(layout: str) -> None:
    assert find(fp8_fills(3, 5), lambda fill: fill.layout == layout and fill.offset % 2 == 1, settings=QUICK).zeros < 1


@pytest.mark.parametrize("pair", PAIRS)
def test_every_kind_of_scales_is_drawn(pair: tuple[str, str]) -> None:
    assert find(matmul_cases(), lambda case: case.scaling == pair, settings=QUICK).m


def test_operands_and_scales_reach_what_is_hard() -> None:
    assert find(fp8_fills(3, 5), lambda fill: bool(fill.tensor(3, 5).isnan().any()), settings=QUICK).at
    wild = float_fills(torch.float32)
    assert find(wild, lambda fill: bool(fill.tensor(4).isinf().any()), settings=QUICK).palette
    assert find(wild, lambda fill: bool((fill.tensor(4).abs() < 2.0**-126).any()), settings=QUICK).palette


PLAIN = Supports(multiple_of=(1, 16, 32), smallest=(4, 1, 1), specials=False, offsets=False, layouts=("rows",))


@given(matmul_cases(PLAIN))
def test_cases_keep_to_what_is_supported(case: MatmulCase) -> None:
    assert case.m >= 4
    assert (case.n % 16, case.k % 32) == (0, 0)
    assert min(case.n, case.k) > 0
    assert (case.a.layout, case.b.layout, case.a.offset, case.b.offset) == ("rows", "rows", 0, 0)
    made = case.operands()
    assert made.a.data_ptr() % 16 == made.b.data_ptr() % 16 == 0
    for x in (made.a, made.b, made.scale_a, made.scale_b, *([] if made.bias is None else [made.bias])):
        assert x.float().isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"scalings": ("row",)}, ValueError, "scaling: got 'row'"),
        ({"scalings": []}, TypeError, "scalings: got \\[\\]; give a tuple"),
        ({"out_dtypes": (torch.int8,)}, ValueError, "out_dtypes: got torch.int8"),
        ({"dtypes": (torch.float8_e4m3fn,)}, TypeError, "dtypes: got torch.float8_e4m3fn; give pairs"),
        ({"layouts": ("diagonal",)}, ValueError, "layouts: got 'diagonal'"),
        ({"split_k": (0,)}, ValueError, "split_k: got 0"),
        ({"specials": 1}, TypeError, "specials: got 1"),
        ({"multiple_of": (0, 1, 1)}, ValueError, "multiple_of: got 0"),
        ({"smallest": (1, 1)}, ValueError, "smallest: got \\(1, 1\\); give three"),
        ({"largest": (17, 8, 640), "multiple_of": (1, 16, 1)}, ValueError, "largest: .* no size is left"),
        ({"use_fast_accum": (True,)}, ValueError, "use_fast_accum: got only True beside block scales"),
    ],
)
def test_what_supports_refuses(arguments: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Supports(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.int32, (1,)), "dtype: got torch.int32"),
        ((torch.float8_e4m3fn, (256,)), "give codes of 8 bits"),
        ((torch.float8_e4m3fn, ()), "give codes of 8 bits"),
        ((torch.float8_e4m3fn, "primes"), "palette: got 'primes' for e4m3"),
        ((torch.float32, "every"), "palette: got 'every' for fp32"),
    ],
)
def test_what_a_fill_refuses(arguments: tuple[torch.dtype, object], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        Fill(*arguments)  # type: ignore[arg-type]


def test_at_places_codes() -> None:
    x = Fill(torch.float8_e5m2, (0x3C,), at=((4, 0x7C), (99, 0x00))).tensor(2, 3)
    assert bits_of(x).tolist() == [[0x3C, 0x3C, 0x3C], [0x3C, 0x7C, 0x3C]]
