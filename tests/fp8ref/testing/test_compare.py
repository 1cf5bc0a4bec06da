"""assert_bits_equal: what it counts, what it shows, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fp8ref.testing import assert_bits_equal, differences
from fp8ref.testing.floats import FLOATS, bits_of, from_bits
from fp8ref.testing.textmap import runs_of, text_map

DTYPES = tuple(FLOATS)


def report(actual: torch.Tensor, expected: torch.Tensor) -> str:
    with pytest.raises(AssertionError) as caught:
        assert_bits_equal(actual, expected)
    return str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4, 5)])
def test_equal_bits_pass(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    bits = torch.randint(0, 1 << 8, shape, generator=torch.Generator().manual_seed(1))
    assert_bits_equal(from_bits(bits, dtype), from_bits(bits.clone(), dtype))


@given(st.sampled_from([dtype for dtype in DTYPES if dtype != torch.float64]), st.data())
def test_each_element_is_of_one_kind(dtype: torch.dtype, data: st.DataObject) -> None:
    """Against a count in plain Python, over every bit pattern."""
    fmt = FLOATS[dtype]
    codes = st.one_of(
        st.integers(0, 2 * fmt.sign - 1), st.sampled_from((0, fmt.sign, fmt.magnitude, fmt.largest, 2 * fmt.sign - 1))
    )
    pairs = data.draw(st.lists(st.tuples(codes, codes), min_size=1, max_size=20))
    x, y = (from_bits(torch.tensor(side), dtype) for side in zip(*pairs, strict=True))
    found = differences(x, y)
    for i, (one, other) in enumerate(pairs):
        p, q = float(x[i].double()), float(y[i].double())
        if one == other:
            kind = ""
        elif math.isnan(p) and math.isnan(q):
            kind = "nan_payloads"
        elif math.isnan(p) or math.isnan(q):
            kind = "nan_against_number"
        else:
            kind = "zero_signs" if p == q == 0 else "values"
        for name in ("values", "zero_signs", "nan_against_number", "nan_payloads"):
            assert bool(getattr(found, name)[i]) == (name == kind), (name, kind, hex(one), hex(other))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_distance_counts_the_numbers_between(dtype: torch.dtype) -> None:
    fmt = FLOATS[dtype]
    expected = from_bits(torch.tensor([[fmt.one, fmt.one, 3]]), dtype)
    # 4 above 1; and from 3 above zero to 2 below it, across one zero.
    actual = from_bits(torch.tensor([[fmt.one, fmt.one + 4, 2]]), dtype).clone()
    actual[0, 2] = -actual[0, 2].double()
    text = report(actual, expected)
    assert "2 of 3 elements differ: 2 values\n" in text
    assert "largest distance: 5 units in the last place at (0, 2): " in text


def test_fp64_distances_beyond_int64() -> None:
    largest = torch.finfo(torch.float64).max
    text = report(torch.tensor([largest], dtype=torch.float64), torch.tensor([-largest], dtype=torch.float64))
    assert f"largest distance: {2 * (0x7FF0000000000000 - 1):,} units" in text


def test_the_report_shows_bits_values_and_places() -> None:
    expected = torch.zeros(67, 131)
    actual = expected.clone()
    actual[64:, :] = 1.0
    actual[2, 7] = -0.0
    actual[3, 9] = torch.nan
    lines = report(actual, expected).splitlines()
    assert lines[0] == "395 of 8,777 elements differ: 393 values, 1 zero sign, 1 NaN against a number"
    assert lines[1] == "first at (2, 7): actual 0x80000000 = -0.0, expected 0x00000000 = 0.0"
    assert lines[3] == "rows: 2-3, 64-66 of 67"
    assert lines[4] == "columns: all 131"
    assert lines[5] == "map of 67 x 131 in cells of 8 x 4, '.' equal, '+' some, '#' all different"
    assert lines[6] == "     0 |.++.............................."
    assert lines[7] == "     8 |................................."
    assert lines[-1] == "    64 |#################################"


def test_nan_payloads_are_named() -> None:
    x = from_bits(torch.tensor([0x7FC00000, 0x7FFFFFFF]), torch.float32)
    text = report(x, x.flip(0).contiguous())
    assert text.startswith("2 of 2 elements differ: 2 NaN payloads\nfirst at (0,): actual 0x7fc00000 = nan, expected")
    assert "largest distance" not in text


@pytest.mark.parametrize(
    ("index", "of", "text"),
    [
        ([0], 1, "all of 1"),
        ([0, 1, 2], 3, "all 3"),
        ([2], 3, "2 (the last of 3)"),
        ([5, 6], 7, "5-6 (the last 2 of 7)"),
        ([0, 1], 7, "0-1 of 7"),
        ([1, 3], 9, "1, 3 of 9"),
        ([2, 4, 6, 8], 10, "2, 4 ... 8: every 2nd of 10"),
        ([0, 3, 6, 9, 12], 13, "0, 3 ... 12: every 3rd of 13"),
        ([0, 11, 22, 33], 40, "0, 11 ... 33: every 11th of 40"),
        ([0, 2, 5, 9, 14, 20, 27], 40, "0, 2, 5, 9, 14 ... (7 of 40)"),
    ],
)
def test_runs(index: list[int], of: int, text: str) -> None:
    assert runs_of(torch.tensor(index), of) == text


@given(st.integers(1, 200), st.integers(1, 300), st.integers(0, 2**32))
def test_the_map_covers_the_matrix(rows: int, columns: int, seed: int) -> None:
    wrong = torch.rand(rows, columns, generator=torch.Generator().manual_seed(seed)) < 0.01
    lines = text_map(wrong)[1:]
    assert len(lines) <= 16
    assert len({len(line) for line in lines}) == 1
    high, wide = (1 << max(0, (-(-size // most) - 1).bit_length()) for size, most in ((rows, 16), (columns, 64)))
    for line in lines:
        top, marks = int(line[:6]), line.split("|")[1]
        for j, mark in enumerate(marks):
            cell = wrong[top : top + high, j * wide : (j + 1) * wide]
            assert mark == ("." if not cell.any() else "#" if cell.all() else "+")


def test_what_cannot_be_compared_is_an_error_of_its_own() -> None:
    x = torch.zeros(2, 3)
    with pytest.raises(TypeError, match=r"actual: got torch.float32, expected torch.float16"):
        assert_bits_equal(x, x.half())
    with pytest.raises(ValueError, match=r"actual: got shape \[2, 3\], expected \[3, 2\]"):
        assert_bits_equal(x, x.t())
    with pytest.raises(TypeError, match=r"expected: got list; give a torch.Tensor"):
        assert_bits_equal(x, [1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"actual: got torch.int32; give one of"):
        assert_bits_equal(x.int(), x.int())
    with pytest.raises(TypeError, match=r"on meta"):
        assert_bits_equal(x.to("meta"), x)


def test_strides_do_not_matter() -> None:
    x = torch.arange(12.0).view(3, 4)
    assert_bits_equal(x.t().contiguous().t(), x)
    assert "first at (1, 0)" in report(x.t(), x.t() + (torch.arange(4) == 1)[:, None])


def test_bits_of_fp64_are_signed() -> None:
    assert int(bits_of(torch.tensor(-0.0, dtype=torch.float64))) == -(1 << 63)
