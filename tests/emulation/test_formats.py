"""Every code of both formats, and what ``Fp8Format`` derives, against a table, torch, ml_dtypes and gfloat."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import FormatInfo, decode_float  # type: ignore[import-untyped]
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2  # type: ignore[import-untyped]

from fp8ref.emulation.formats import E4M3, E5M2, FORMATS, Fp8Format, format_of
from reference.fp8_tables import TABLES

PEERS = [
    pytest.param(E4M3, np.dtype(ml_dtypes.float8_e4m3fn), format_info_ocp_e4m3, id="e4m3"),
    pytest.param(E5M2, np.dtype(ml_dtypes.float8_e5m2), format_info_ocp_e5m2, id="e5m2"),
]


def by_formula(code: int, fmt: Fp8Format) -> float:
    """What the fields of the format say a code is worth, by ldexp."""
    sign = -1.0 if code & 0x80 else 1.0
    magnitude = code & 0x7F
    if magnitude > fmt.max_code:
        return sign * math.inf if magnitude == fmt.inf_code else math.nan
    exponent, fraction = divmod(magnitude, 1 << fmt.mantissa_bits)
    significand = fraction + (1 << fmt.mantissa_bits if exponent else 0)
    return sign * math.ldexp(significand, max(exponent, 1) - fmt.bias - fmt.mantissa_bits)


def identical(a: float, b: float) -> bool:
    """Equal, the sign of a zero included, or both NaN."""
    return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))


@pytest.mark.parametrize(("fmt", "ml_dtype", "gfloat_format"), PEERS)
def test_every_code_has_the_value_that_the_table_and_the_peers_give(
    fmt: Fp8Format, ml_dtype: np.dtype[np.generic], gfloat_format: FormatInfo
) -> None:
    codes = torch.arange(256).to(torch.uint8)
    by_torch = codes.view(fmt.dtype).to(torch.float32).tolist()
    by_ml_dtypes = codes.numpy().view(ml_dtype).astype(np.float64).tolist()
    for code in range(256):
        expected = float(TABLES[fmt.name].decode(code))
        found = {
            "Fp8Format": by_formula(code, fmt),
            "torch": by_torch[code],
            "ml_dtypes": by_ml_dtypes[code],
            "gfloat": float(decode_float(gfloat_format, code).fval),
        }
        wrong = {who: value for who, value in found.items() if not identical(value, expected)}
        assert not wrong, f"{fmt.name} code {code:#04x}: expected {expected}, got {wrong}"


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_derived_properties_are_those_of_the_table(fmt: Fp8Format) -> None:
    values = TABLES[fmt.name].values
    info = torch.finfo(fmt.dtype)
    assert fmt.max_code == len(values) - 1
    assert Fraction(fmt.max) == max(values) == Fraction(info.max)
    assert Fraction(fmt.smallest_subnormal) == values[1]
    first_normal = values[1 << fmt.mantissa_bits]
    assert Fraction(2) ** fmt.e_min == first_normal == Fraction(info.smallest_normal)
    assert Fraction(2) ** fmt.e_max <= max(values) < Fraction(2) ** (fmt.e_max + 1)
    assert 1 + fmt.exponent_bits + fmt.mantissa_bits == 8


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda fmt: fmt.name)
def test_the_special_codes_are_what_they_are_called(fmt: Fp8Format) -> None:
    table = TABLES[fmt.name]
    assert math.isnan(table.decode(fmt.nan_code))
    assert fmt.inf_code == next((c for c in range(128) if table.decode(c) == math.inf), None)


def test_format_of_finds_each_format_and_refuses_the_rest() -> None:
    assert format_of(torch.float8_e4m3fn) is E4M3
    assert format_of(torch.float8_e5m2) is E5M2
    for dtype in (torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float16, torch.uint8):
        with pytest.raises(TypeError, match=rf"operand: got {dtype}.*torch\.float8_e4m3fn"):
            format_of(dtype, "operand")
