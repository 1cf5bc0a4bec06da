"""Relations between two answers of the oracle that hold whatever the bits are; no reference takes part."""

from __future__ import annotations

from math import fsum
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fp8ref
from fp8ref.emulation.units import UNITS
from reference.rationals import E4M3
from reference.strategies import arranged, operands, own_units, products, units
from reference.tensors import SCALING, Product, bits_of, from_bits

EXAMPLES = settings().max_examples
LARGE_K = st.sampled_from((1, 31, 32, 33, 127, 128, 129, 300, 520))


def run(product: Product, **changed: Any) -> torch.Tensor:
    """The bits of the oracle's answer, some of the arguments changed."""
    arguments: dict[str, Any] = {
        "a": product.a,
        "b": product.b,
        "scale_a": product.scale_a,
        "scale_b": product.scale_b,
        "bias": product.bias,
        "out_dtype": product.out_dtype,
        "use_fast_accum": product.use_fast_accum,
        "unit": product.unit,
        "split_k": product.split_k,
        # Said, because a part of a product may have shapes that mean something else.
        "scaling": SCALING[product.kind],
        **changed,
    }
    return bits_of(fp8ref.emulate_matmul(**arguments))


def rows(scale: torch.Tensor, kind: str, index: torch.Tensor) -> torch.Tensor:
    """The scales of some rows of a."""
    if kind == "128x128 by 1x128":
        assert scale.shape[0] == 1, "one block holds all rows"
    return scale if kind in ("tensor", "128x128 by 1x128") else scale[index]


@given(st.data(), products())
def test_a_row_does_not_depend_on_the_others(data: st.DataObject, product: Product) -> None:
    m = product.a.shape[0]
    chosen = torch.tensor(data.draw(st.lists(st.integers(0, m - 1), min_size=1, max_size=5)))
    some = product.a.view(torch.uint8)[chosen].view(product.a.dtype)
    part = run(product, a=some, scale_a=rows(product.scale_a, product.kind, chosen))
    assert torch.equal(part, run(product)[chosen])


@given(st.data(), products().filter(lambda p: p.kind != "1x128 by 128x128"))
def test_a_column_does_not_depend_on_the_others(data: st.DataObject, product: Product) -> None:
    n = product.b.shape[1]
    order = torch.tensor(data.draw(st.permutations(range(n)) if n < 20 else st.just(list(reversed(range(n))))))
    chosen = order[: data.draw(st.integers(1, n))]
    some = product.b.view(torch.uint8)[:, chosen].view(product.b.dtype)
    scale_b = product.scale_b if product.kind == "tensor" else product.scale_b[:, chosen]
    bias = None if product.bias is None else product.bias[chosen]
    assert torch.equal(run(product, b=some, scale_b=scale_b, bias=bias), run(product)[:, chosen])


def with_strides(x: torch.Tensor, how: str) -> torch.Tensor:
    """The same values in other memory."""
    codes = x.view(torch.uint8) if x.element_size() == 1 else x
    if how == "contiguous":
        codes = codes.contiguous()
    elif how == "transposed":
        codes = codes.t().contiguous().t()
    else:
        room = torch.zeros([2 * size + 3 for size in codes.shape], dtype=codes.dtype)
        view = room[tuple(slice(3, None, 2) for _ in codes.shape)]
        view.copy_(codes)
        codes = view
    return codes.view(x.dtype)


@given(products(), st.sampled_from(("contiguous", "transposed", "sliced")), st.data())
def test_strides_do_not_matter_and_inputs_are_not_written(product: Product, how: str, data: st.DataObject) -> None:
    other = data.draw(st.sampled_from(("contiguous", "transposed", "sliced")))
    scales = {"scale_a": product.scale_a, "scale_b": product.scale_b}
    if product.kind != "tensor":
        scales = {name: with_strides(scale, other) for name, scale in scales.items()}
    bias = product.bias
    if bias is not None:
        bias = with_strides(bias[None], "sliced")[0]
    a, b = with_strides(product.a, how), with_strides(product.b, other)
    before = [bits_of(x).clone() for x in (a, b, *scales.values())]
    assert torch.equal(run(product, a=a, b=b, bias=bias, **scales), run(product))
    assert all(torch.equal(bits_of(x), y) for x, y in zip((a, b, *scales.values()), before, strict=True))


@given(products().filter(lambda p: p.kind == "tensor"))
def test_the_transposed_product_is_the_product_transposed(product: Product) -> None:
    other = run(product, a=product.b.t(), b=product.a.t(), scale_a=product.scale_b, scale_b=product.scale_a, bias=None)
    assert torch.equal(other.t(), run(product, bias=None))


@given(st.data(), st.sampled_from(list(UNITS)), LARGE_K, st.booleans())
def test_zeros_up_to_a_multiple_of_32_change_nothing(data: st.DataObject, unit: str, k: int, fast: bool) -> None:
    a, b = data.draw(operands(3, k)), data.draw(operands(5, k))
    longer = []
    for x in (a, b):
        room = torch.zeros(x.shape[0], -(-k // 32) * 32, dtype=torch.uint8)
        room[:, :k] = x.view(torch.uint8)
        longer.append(room.view(x.dtype))
    padded = fp8ref.accumulate(longer[0], longer[1].t(), use_fast_accum=fast, unit=unit)
    assert torch.equal(bits_of(padded), bits_of(fp8ref.accumulate(a, b.t(), use_fast_accum=fast, unit=unit)))


@given(st.data(), LARGE_K, st.integers(1, 5))
def test_one_tile_a_part_with_fast_accumulation_is_the_promoted_sum(data: st.DataObject, k: int, more: int) -> None:
    """A split into parts of one tile adds the same chains in the same order as promotion does."""
    a, b, unit = data.draw(operands(3, k)), data.draw(operands(4, k)), data.draw(own_units())
    tiles = -(-k // 128)
    split = fp8ref.accumulate(a, b.t(), unit=unit, use_fast_accum=True, split_k=tiles + more)
    if unit.products_per_step is None:
        return
    assert torch.equal(bits_of(split), bits_of(fp8ref.accumulate(a, b.t(), unit=unit)))


@given(st.data(), LARGE_K, st.booleans())
def test_the_exact_unit_is_the_exact_sum(data: st.DataObject, k: int, fast: bool) -> None:
    # Finite e4m3 products are multiples of 2^-18 below 2^18, so math.fsum holds their sum without rounding.
    finite = [code for code in range(256) if code % 128 != 127]
    a, b = (arranged(finite, 0.3, data.draw(st.integers(0, 2**32 - 1)), n, k).view(torch.float8_e4m3fn) for n in (3, 4))
    found = fp8ref.accumulate(a, b.t(), unit="exact", use_fast_accum=fast)
    terms = (a.double()[:, None] * b.double()[None]).tolist()
    expected = torch.tensor([[fsum(products) for products in row] for row in terms], dtype=torch.float64).float()
    assert torch.equal(bits_of(found), bits_of(expected + 0.0))


@given(st.data(), units(), LARGE_K, st.booleans(), st.integers(-3, 3), st.integers(1, 3))
def test_powers_of_two_pass_through(
    data: st.DataObject, unit: Any, k: int, fast: bool, exponent: int, split_k: int
) -> None:
    """Normal operands times 2**e give the result times 2**e: every cut is relative to an exponent that moves along."""
    normal = [sign | field << 3 | fraction for sign in (0, 128) for field in range(4, 12) for fraction in range(8)]
    codes = arranged(normal, 0.2, data.draw(st.integers(0, 2**32 - 1)), 3, k)
    moved = torch.where(codes % 128 == 0, codes, codes + (exponent << E4M3.fraction_bits) % 256)
    b = data.draw(operands(4, k)).t()
    found = [
        fp8ref.accumulate(x.view(torch.float8_e4m3fn), b, unit=unit, use_fast_accum=fast, split_k=split_k)
        for x in (codes, moved)
    ]
    assert torch.equal(bits_of(found[1]), bits_of(found[0] * 2.0**exponent).where(~found[0].isnan(), 0x7FFFFFFF))


@given(st.data(), products())
def test_nan_and_inf_stay_in_their_row(data: st.DataObject, product: Product) -> None:
    m, k = product.a.shape
    if k == 0:
        return
    codes = product.a.view(torch.uint8).clone()
    i = data.draw(st.integers(0, m - 1))
    codes[i, data.draw(st.integers(0, k - 1))] = 0x7F
    poisoned, clean = run(product, a=codes.view(product.a.dtype)), run(product)
    others = torch.arange(m) != i
    assert torch.equal(poisoned[others], clean[others])
    nan = {1: 0x7F, 2: 0x7FFF, 4: 0x7FFFFFFF}[product.out_dtype.itemsize]
    assert (poisoned[i] == nan).all()


@pytest.mark.parametrize("scaling", ["tensor", "row", "1x128"])
@given(st.data(), LARGE_K, st.sampled_from(list(UNITS)))
def test_scaled_tensors_bring_their_scales(scaling: Any, data: st.DataObject, k: int, unit: str) -> None:
    seed = data.draw(st.integers(0, 2**32 - 1))
    generator = torch.Generator().manual_seed(seed)
    x, w = (torch.randn(n, k, generator=generator) for n in (3, 133))
    kind_of_b: Any = data.draw(st.sampled_from(("1x128", "128x128"))) if scaling == "1x128" else scaling
    a, b = fp8ref.quantize(x, scaling=scaling), fp8ref.quantize(w, torch.float8_e5m2, scaling=kind_of_b).t()
    y = fp8ref.emulate_matmul(a, b, unit=unit)
    z = fp8ref.emulate_matmul(a.data, b.data, a.scale, b.scale, unit=unit, scaling=(scaling, kind_of_b))
    assert torch.equal(bits_of(y), bits_of(z))


@pytest.mark.parametrize(("m", "n", "k"), [(0, 3, 40), (3, 0, 40), (0, 0, 0), (2, 3, 0), (0, 3, 0)])
@pytest.mark.parametrize("unit", list(UNITS))
def test_empty_products(m: int, n: int, k: int, unit: str) -> None:
    a, b = (from_bits([0x38] * (r * k), torch.float8_e4m3fn, r, k) for r in (m, n))
    bias = torch.arange(n, dtype=torch.float32)
    for fast in (False, True):
        assert torch.equal(
            bits_of(fp8ref.accumulate(a, b.t(), unit=unit, use_fast_accum=fast, split_k=2)),
            torch.full((m, n), 0 if k == 0 else 0x42200000),
        )
    blocks = -(-k // 128)
    for scale_a, scale_b, scaling in (
        (torch.ones(()), torch.ones(()), None),
        (torch.ones(m, 1), torch.ones(1, n), ("row", "row")),
        (torch.ones(m, blocks), torch.ones(blocks, n), ("1x128", "1x128")),
        (torch.ones(m, blocks), torch.ones(blocks, -(-n // 128)), ("1x128", "128x128")),
    ):
        pair: Any = scaling
        y = fp8ref.emulate_matmul(a, b.t(), scale_a, scale_b, bias=bias, unit=unit, scaling=pair)
        assert torch.equal(y, (bias + k).expand(m, n).bfloat16())
