"""``quantize`` and ``dequantize`` against exact rational arithmetic: scales, codes, groups, NaN and Inf, errors."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import example, given, settings
from torch import Tensor

from fp8ref.emulation.quantize import ScaledTensor, ScaleFormat, dequantize, quantize
from fp8ref.emulation.scales import Scaling
from reference.fp8_tables import NAN_CODE, TABLES
from reference.quantize import code_of, group_of, scales_of
from reference.rationals import BF16, FP16, FP32, Binary, encode, number, round_to
from reference.rounding_inputs import SOURCES

SCALINGS: tuple[Scaling, ...] = get_args(Scaling)
FORMATS: tuple[ScaleFormat, ...] = get_args(ScaleFormat)
E4M3 = torch.float8_e4m3fn

each_scaling = pytest.mark.parametrize("scaling", SCALINGS)
each_name = pytest.mark.parametrize("name", TABLES)
each_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def raw(x: Tensor) -> Tensor:
    """The codes of an FP8 tensor, or the bits of fp32."""
    return x.contiguous().view(torch.uint8 if x.element_size() == 1 else torch.int32)


def assert_quantised(
    x: Tensor, name: str, scaling: Scaling, scale_format: ScaleFormat, bound: float | None = None
) -> ScaledTensor:
    """Quantise and compare every scale and code with the reference."""
    table = TABLES[name]
    result = quantize(x, table.dtype, scaling=scaling, scale_format=scale_format, absmax_bound=bound)
    assert result.scale.dtype == torch.float32
    assert (result.data.shape, result.data.dtype, result.scaling) == (x.shape, table.dtype, scaling)
    values = x.double().tolist()
    scales = scales_of(values, table, scaling, scale_format, bound)
    found = result.scale.reshape(1, 1) if scaling == "tensor" else result.scale
    assert set(scales) == {(i, j) for i in range(found.shape[0]) for j in range(found.shape[1])}
    for group, scale in scales.items():
        got = Fraction(float(found[group]))
        assert got == scale, f"scale of {scaling} group {group}: expected {float(scale)!r}, got {float(got)!r}"
    codes = raw(result.data).tolist()
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            scale = scales[group_of(i, j, scaling)]
            expected = code_of(value, scale, table, wide=x.dtype == torch.float64)
            assert codes[i][j] == expected, (
                f"x[{i}, {j}] = {value!r}, scale {float(scale)!r}: expected {expected:#04x}, got {codes[i][j]:#04x}"
            )
    return result


@each_scaling
@each_name
@each_source
@pytest.mark.parametrize("scale_format", FORMATS)
def test_scales_and_codes_of_ragged_shapes(
    scaling: Scaling, name: str, source: torch.dtype, scale_format: ScaleFormat
) -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, k in ((1, 1), (3, 127), (2, 128), (2, 129), (130, 3)):
        x = torch.randn(rows, k, dtype=torch.float64, generator=generator) * torch.logspace(-3, 3, k).double()
        assert_quantised(x.to(source), name, scaling, scale_format)


edges = st.sampled_from(
    [0.0, -0.0, 1.0, -448.0, 2.0**-149, 2.0**-126, 2.0**-118, 57344.0, 3.4028234663852886e38, 1e-310, 1e300, 2.0**127]
)
elements = st.floats() | edges | edges.map(lambda v: -v * 1.75)


@settings(max_examples=300)
@given(
    st.lists(elements, min_size=1, max_size=12),
    st.sampled_from(list(TABLES)),
    st.sampled_from(SCALINGS),
    st.sampled_from(SOURCES),
    st.sampled_from(FORMATS),
    st.none() | st.sampled_from([2.0**-126, 0.1, 1, 1200.0, 3.4028234663852886e38]),
)
@example([2.0**-149, 0.0], "e4m3", "row", torch.float32, "ue8m0", None)
@example([448.0 * 2.0**-126, 1e-40], "e4m3", "row", torch.float32, "ue8m0", None)
@example([1e300, 1.0], "e5m2", "tensor", torch.float64, "float32", 1e30)
def test_any_values(
    values: list[float],
    name: str,
    scaling: Scaling,
    source: torch.dtype,
    scale_format: ScaleFormat,
    bound: float | None,
) -> None:
    x = torch.tensor([values, values[::-1]], dtype=torch.float64).to(source)
    before = x.clone()
    result = assert_quantised(x, name, scaling, scale_format, bound)
    assert bool((result.scale.isfinite() & (result.scale >= 2.0**-126)).all())
    if scale_format == "ue8m0":
        assert not bool((raw(result.scale) & 0x7FFFFF).any())
    assert torch.equal(before.view(torch.uint8), x.view(torch.uint8))


@each_scaling
@each_name
def test_zero_groups_have_scale_one_and_keep_signs(scaling: Scaling, name: str) -> None:
    x = torch.tensor([[0.0, -0.0] * 100, [1.0, -2.0] * 100])
    result = quantize(x[:1], TABLES[name].dtype, scaling=scaling)
    assert bool((result.scale == 1).all())
    assert raw(result.data).tolist() == [[0, 0x80] * 100]
    both = quantize(x, TABLES[name].dtype, scaling=scaling)
    assert raw(both.data)[0].tolist() == [0, 0x80] * 100


@each_scaling
@each_name
@each_source
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_inf_stay_in_their_own_place(scaling: Scaling, name: str, source: torch.dtype, bad: float) -> None:
    x = torch.randn(131, 260, generator=torch.Generator().manual_seed(1)).to(source)
    zeroed = x.clone()
    at = (torch.tensor([0, 130, 5]), torch.tensor([1, 259, 128]))
    x[at], zeroed[at] = bad, 0.0
    result, plain = (quantize(v, TABLES[name].dtype, scaling=scaling) for v in (x, zeroed))
    assert torch.equal(raw(result.scale), raw(plain.scale))
    expected = NAN_CODE if math.isnan(bad) or name == "e4m3" else 0x7C if bad > 0 else 0xFC
    assert raw(result.data)[at].tolist() == [expected] * 3
    mask = torch.ones(x.shape, dtype=torch.bool)
    mask[at] = False
    assert torch.equal(raw(result.data)[mask], raw(plain.data)[mask])


def test_a_group_without_a_finite_element_has_scale_one() -> None:
    result = quantize(torch.tensor([[math.nan, math.inf], [1.0, 2.0]]), scaling="row")
    assert result.scale.flatten().tolist() == [1.0, float(torch.tensor(2.0) / torch.tensor(448.0))]


@each_scaling
@each_name
def test_strides_and_leading_dimensions_change_nothing(scaling: Scaling, name: str) -> None:
    x, dtype = torch.randn(6, 260, generator=torch.Generator().manual_seed(2)), TABLES[name].dtype
    plain = quantize(x, dtype, scaling=scaling)
    strided = quantize(x.t().contiguous().t(), dtype, scaling=scaling)
    assert torch.equal(raw(strided.data), raw(plain.data))
    assert torch.equal(raw(strided.scale), raw(plain.scale))
    assert strided.data.is_contiguous()
    if scaling != "128x128":
        batched = quantize(x.reshape(2, 3, 260), dtype, scaling=scaling)
        assert batched.scale.shape == (plain.scale.shape if scaling == "tensor" else (2, 3, *plain.scale.shape[1:]))
        assert torch.equal(raw(batched.data).reshape(6, 260), raw(plain.data))
        assert torch.equal(raw(batched.scale).flatten(), raw(plain.scale).flatten())


@each_scaling
@pytest.mark.parametrize(("rows", "k"), [(0, 5), (3, 0), (0, 0)])
def test_empty(scaling: Scaling, rows: int, k: int) -> None:
    result = quantize(torch.empty(rows, k), scaling=scaling)
    blocks = -(-k // 128)
    shapes = {"tensor": (), "row": (rows, 1), "1x128": (rows, blocks), "128x128": (-(-rows // 128), blocks)}
    assert result.data.shape == (rows, k)
    assert result.scale.shape == shapes[scaling]
    assert bool((result.scale == 1).all())
    assert dequantize(result).shape == (rows, k)


@each_scaling
@each_name
@each_source
def test_a_given_scale_is_used_and_saturates(scaling: Scaling, name: str, source: torch.dtype) -> None:
    table = TABLES[name]
    x = (torch.randn(2, 130, generator=torch.Generator().manual_seed(3)) * 300).to(source)
    computed = quantize(x, table.dtype, scaling=scaling)
    # A third of what the data asks for: the largest values must clamp.
    scale = computed.scale / 3
    result = quantize(x, table.dtype, scaling=scaling, scale=scale)
    assert torch.equal(raw(result.scale), raw(scale))
    spread = scale.reshape(1, 1) if scaling == "tensor" else scale
    for i, row in enumerate(x.double().tolist()):
        for j, value in enumerate(row):
            factor = Fraction(float(spread[group_of(i, j, scaling)]))
            expected = code_of(value, factor, table, wide=source == torch.float64)
            assert int(raw(result.data)[i, j]) == expected
    assert bool(((raw(result.data) & 0x7F) == table.max_code).any())
    assert not bool(((raw(result.data) & 0x7F) > table.max_code).any())


def test_a_given_scale_of_the_data_changes_nothing_and_may_be_a_float() -> None:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(4))
    for scaling in SCALINGS:
        once = quantize(x, scaling=scaling)
        again = quantize(x, scaling=scaling, scale=once.scale)
        assert torch.equal(raw(once.data), raw(again.data))
    assert torch.equal(raw(quantize(x, scale=0.25).data), raw(quantize(x, scale=torch.tensor(0.25)).data))
    assert torch.equal(raw(quantize(x, scale=2).data), raw(quantize(x, scale=torch.tensor(2.0)).data))
    assert quantize(x, scale=torch.full((1, 1), 0.25)).scale.shape == ()
    # x / scale is Inf, x is not: it clamps, in e5m2 too.
    assert raw(quantize(torch.tensor([1e30, -1e30]), torch.float8_e5m2, scale=1e-30).data).tolist() == [0x7B, 0xFB]


@each_scaling
@each_name
@pytest.mark.parametrize("out", SOURCES, ids=str)
def test_dequantize_is_the_fp32_product_rounded_once_more(scaling: Scaling, name: str, out: torch.dtype) -> None:
    # Scales far apart, so that fp32 products and fp16 and bf16 results reach their ends.
    x = torch.randn(131, 150, generator=torch.Generator().manual_seed(5)) * torch.logspace(-30, 30, 131)[:, None]
    q = quantize(x, TABLES[name].dtype, scaling=scaling)
    binaries: dict[torch.dtype, Binary] = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}
    got = dequantize(q, out)
    assert torch.equal(dequantize(q.t(), out), got.t())
    scale = q.scale.reshape(1, 1) if scaling == "tensor" else q.scale
    for i in range(0, 131, 10):
        for j in range(0, 150, 7):
            value = TABLES[name].decode(int(raw(q.data)[i, j])) or 0
            product = round_to(number(Fraction(value) * Fraction(float(scale[group_of(i, j, scaling)]))), FP32)
            result = float(got[i, j])
            if out == torch.float64:
                assert Fraction(result) == product.value
                continue
            expected = round_to(product, binaries[out])
            if expected.is_infinite:
                assert math.isinf(result)
            else:
                assert encode(number(Fraction(result)), binaries[out]) == encode(number(expected.value), binaries[out])


@each_scaling
@each_name
def test_round_trip_error_is_within_half_a_step(scaling: Scaling, name: str) -> None:
    """Normal codes keep 1 / 2**(m + 1) of |x|, subnormal ones half a subnormal step times the scale.

    The division and the product add two fp32 roundings, 2**-24 of |x| each; products of them are below 2**-24 too.
    """
    mantissa = {"e4m3": 3, "e5m2": 2}[name]
    table = TABLES[name]
    x = torch.randn(130, 260, generator=torch.Generator().manual_seed(6)) * 10
    q = quantize(x, table.dtype, scaling=scaling)
    ones = ScaledTensor(torch.ones(x.shape).to(table.dtype), q.scale, scaling)
    scale = dequantize(ones, torch.float64)
    error = (dequantize(q, torch.float64) - x.double()).abs()
    half_step = torch.maximum(x.double().abs() * 2.0 ** -(mantissa + 1), scale * float(table.values[1]) / 2)
    bound = half_step + x.double().abs() * 3 * 2.0**-24
    assert bool((error <= bound).all())


def test_transposing_twice_gives_the_same_and_swaps_the_shapes() -> None:
    q = quantize(torch.randn(3, 200), scaling="1x128")
    assert (q.shape, q.t().shape, q.t().scale.shape) == ((3, 200), (200, 3), (2, 3))
    assert torch.equal(raw(q.t().t().data), raw(q.data))
    assert q.t().data.data_ptr() == q.data.data_ptr()
