"""Nearest even and toward zero against exact tables: every boundary, all 16-bit inputs, the peers, any layout."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import FormatInfo, RoundMode, encode_ndarray, round_ndarray  # type: ignore[import-untyped]
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2  # type: ignore[import-untyped]
from torch import Tensor

from fp8ref.emulation.rounding import Rounding, round_to_fp8
from reference.fp8_tables import NAN_CODE, TABLES, Table, place, rounded
from reference.rounding_inputs import SOURCES, all_16_bit_inputs, boundary_inputs, boundary_places, turning_points

DETERMINISTIC: tuple[Rounding, ...] = ("nearest_even", "toward_zero")
ALL_MODES: tuple[Rounding, ...] = get_args(Rounding)
# ml_dtypes writes the NaN of e5m2 as 0x7E, gfloat writes 0xFF for both, and both keep a NaN's sign.
PEER_NANS = {"e4m3": {0x7F, 0xFF}, "e5m2": {0x7E, 0xFE, 0x7F, 0xFF}}
GFLOAT: dict[str, FormatInfo] = {"e4m3": format_info_ocp_e4m3, "e5m2": format_info_ocp_e5m2}
ML_DTYPES = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}

each_table = pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
each_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def codes_of(x: Tensor) -> list[int]:
    """The codes of an FP8 tensor, in row-major order."""
    return [int(code) for code in x.contiguous().view(torch.uint8).flatten().tolist()]


def settings() -> Iterator[tuple[Rounding, bool]]:
    """Every deterministic mode, saturating and not."""
    return itertools.product(DETERMINISTIC, (True, False))


def assert_codes(x: Tensor, got: list[int], expected: list[int], what: str) -> None:
    """Equal codes, or the first difference with its input."""
    wrong = [i for i, (g, e) in enumerate(zip(got, expected, strict=True)) if g != e]
    assert not wrong, (
        f"{what}: {len(wrong)} of {len(got)} codes differ; first x = {x.flatten()[wrong[0]].item()!r} ({x.dtype}): "
        f"expected {expected[wrong[0]]:#04x}, got {got[wrong[0]]:#04x}"
    )


def as_numpy(x: Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """A numpy array of the same dtype, bfloat16 by ml_dtypes."""
    if x.dtype == torch.bfloat16:
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return x.numpy()


@each_table
@each_source
def test_boundary_inputs_hold_every_turning_point_with_both_neighbours(table: Table, source: torch.dtype) -> None:
    x = boundary_inputs(table, source)
    held = set(x.double().tolist())
    for point in turning_points(table):
        exact = torch.tensor(float(point), dtype=torch.float64).to(source)
        # 65536, which no fp16 holds, is Inf there: it overflows the same.
        assert float(exact) == float(point) or (float(point), source) == (65536.0, torch.float16)
        number = as_numpy(exact)
        beside = [float(np.nextafter(number, number.dtype.type(end))) for end in (np.inf, -np.inf)]
        assert {sign * v for v in (float(exact), *beside) for sign in (1, -1)} <= held


@each_table
@each_source
def test_every_boundary_rounds_as_the_table_says(table: Table, source: torch.dtype) -> None:
    x = boundary_inputs(table, source)
    where = boundary_places(table.name, source)
    for rounding, saturate in settings():
        got = codes_of(round_to_fp8(x, table.dtype, rounding=rounding, saturate=saturate))
        expected = [rounded(at, table, rounding, saturate) for at in where]
        assert_codes(x, got, expected, f"{rounding}, saturate={saturate}")


@each_table
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16], ids=str)
def test_all_65536_inputs_round_as_the_table_says(table: Table, source: torch.dtype) -> None:
    x = all_16_bit_inputs(source)
    where = [place(v, table) for v in x.double().tolist()]
    for rounding, saturate in settings():
        got = codes_of(round_to_fp8(x, table.dtype, rounding=rounding, saturate=saturate))
        expected = [rounded(at, table, rounding, saturate) for at in where]
        assert_codes(x, got, expected, f"{rounding}, saturate={saturate}")


@pytest.mark.parametrize(
    ("x", "dtype", "saturating", "overflowing"),
    [
        # 464 is midway between 448 and the 480 that e4m3 lacks: the tie goes to 448, whose code is even.
        (464.0, torch.float8_e4m3fn, 0x7E, 0x7E),
        (464.0000305, torch.float8_e4m3fn, 0x7E, 0x7F),
        (-1e30, torch.float8_e4m3fn, 0xFE, 0x7F),
        (-torch.inf, torch.float8_e4m3fn, 0xFE, 0x7F),
        # 61440 is midway between 57344 (odd) and 65536, so the tie overflows.
        (61440.0, torch.float8_e5m2, 0x7B, 0x7C),
        (61439.996, torch.float8_e5m2, 0x7B, 0x7B),
        (-torch.inf, torch.float8_e5m2, 0xFB, 0xFC),
        (-torch.nan, torch.float8_e4m3fn, 0x7F, 0x7F),
        (-torch.nan, torch.float8_e5m2, 0x7F, 0x7F),
        (-0.0, torch.float8_e4m3fn, 0x80, 0x80),
        # Half the smallest subnormal is a tie with 0.
        (-(2.0**-10), torch.float8_e4m3fn, 0x80, 0x80),
        (-(2.0**-10) * 1.0001, torch.float8_e4m3fn, 0x81, 0x81),
        (-1e-45, torch.float8_e5m2, 0x80, 0x80),
    ],
)
def test_worked_examples(x: float, dtype: torch.dtype, saturating: int, overflowing: int) -> None:
    for source in (torch.float32, torch.float64):
        value = torch.tensor(x, dtype=torch.float32).to(source)
        assert codes_of(round_to_fp8(value, dtype)) == [saturating]
        assert codes_of(round_to_fp8(value, dtype, saturate=False)) == [overflowing]


def canonical(codes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], name: str) -> list[int]:
    """A peer's codes with its NaN written as ours."""
    return [NAN_CODE if code in PEER_NANS[name] else int(code) for code in codes.tolist()]


@pytest.mark.parametrize("name", TABLES)
@each_source
def test_ml_dtypes_agrees(name: str, source: torch.dtype) -> None:
    x = boundary_inputs(TABLES[name], source)
    # Up to 0.6 ml_dtypes takes float64 through float32: it rounds rightly what float32 has left of x.
    rounds_once = float(np.float64(1.0625 + 2.0**-40).astype(ML_DTYPES["e4m3"])) == 1.125
    seen = x.float() if source == torch.float64 and not rounds_once else x
    with np.errstate(over="ignore"):
        peer = canonical(as_numpy(x).astype(ML_DTYPES[name]).view(np.uint8), name)
    assert_codes(x, codes_of(round_to_fp8(seen, TABLES[name].dtype, saturate=False)), peer, "ml_dtypes")


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("source", [torch.float64, torch.float32], ids=str)
def test_gfloat_agrees(name: str, source: torch.dtype) -> None:
    x = boundary_inputs(TABLES[name], source)
    modes = {"nearest_even": RoundMode.TiesToEven, "toward_zero": RoundMode.TowardZero}
    for rounding, saturate in settings():
        with np.errstate(over="ignore"):
            values = round_ndarray(GFLOAT[name], x.double().numpy(), modes[rounding], saturate)
        peer = canonical(encode_ndarray(GFLOAT[name], values).astype(np.uint8), name)
        got = codes_of(round_to_fp8(x, TABLES[name].dtype, rounding=rounding, saturate=saturate))
        assert_codes(x, got, peer, f"gfloat, {rounding}, saturate={saturate}")


def test_float64_is_rounded_once_where_torch_rounds_twice() -> None:
    x = torch.tensor([1.0625 + 2.0**-40, 1.1875 - 2.0**-40], dtype=torch.float64)
    assert x.to(torch.float8_e4m3fn).tolist() == [1.0, 1.25]
    assert round_to_fp8(x, torch.float8_e4m3fn).tolist() == [1.125, 1.125]


@each_table
@each_source
@pytest.mark.parametrize("rounding", ALL_MODES)
@pytest.mark.parametrize("saturate", [True, False])
def test_every_value_that_the_format_holds_stays(
    table: Table, source: torch.dtype, rounding: Rounding, saturate: bool
) -> None:
    codes = torch.arange(256).to(torch.uint8)
    x = codes.view(table.dtype).to(source)
    got = codes_of(round_to_fp8(x, table.dtype, rounding=rounding, saturate=saturate))
    for code in range(256):
        magnitude = code & 0x7F
        if magnitude <= table.max_code:
            expected = code
        elif table.has_infinity and magnitude == table.max_code + 1:
            expected = code - 1 if saturate else code
        else:
            expected = NAN_CODE
        assert got[code] == expected, f"{code:#04x}: expected {expected:#04x}, got {got[code]:#04x}"
