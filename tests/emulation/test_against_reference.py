"""The oracle equals the second reference, bit for bit, on operands that lie on the edges of its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import fp8ref
from fp8ref.emulation.formats import FORMATS
from fp8ref.emulation.units import UNITS, TensorCoreUnit
from reference import exact
from reference.rationals import FP32, decode, encode
from reference.strategies import arranged, instructions, products, ties_of, units
from reference.tensors import BINARIES, Product, bits_of, from_bits, vector

ENGINES = ("torch", "compiled")
EXAMPLES = settings().max_examples
"""Of the Hypothesis profile in use; a test that covers more takes a multiple."""
CHEAP = 1000
"""Products (M * N * K) up to which every output is compared; beyond it a few are, the corners among them."""


def product_indices(product: Product) -> list[tuple[int, int]]:
    """All outputs."""
    return [(i, j) for i in range(product.a.shape[0]) for j in range(product.b.shape[1])]


@st.composite
def samples(draw: st.DrawFn, product: Product) -> list[tuple[int, int]]:
    """The outputs to compare."""
    (m, k), n = product.a.shape, product.b.shape[1]
    if m * n * k <= CHEAP:
        return product_indices(product)
    some = st.tuples(st.integers(0, m - 1), st.integers(0, n - 1))
    return [(0, 0), (m - 1, n - 1), *draw(st.lists(some, min_size=2, max_size=2))]


def by_both_engines(function: Callable[..., torch.Tensor], *operands: Any, **how: Any) -> torch.Tensor:
    """The answer of plain PyTorch, after every one of its bits was found equal in the compiled engine's."""
    answers = {engine: function(*operands, **how, engine=engine) for engine in ENGINES}
    plain, compiled = answers["torch"], answers["compiled"]
    assert compiled.dtype == plain.dtype
    assert compiled.shape == plain.shape
    assert compiled.stride() == plain.stride()
    different = bits_of(compiled) != bits_of(plain)
    assert not different.any(), (
        f"the engines differ at {different.nonzero()[:5].tolist()}: "
        f"{ {engine: bits_of(answer)[different][:5].tolist() for engine, answer in answers.items()} }, {how}"
    )
    return plain


def emulate(product: Product) -> torch.Tensor:
    """The oracle's answer to everything that a Product holds."""
    return by_both_engines(
        fp8ref.emulate_matmul,
        product.a,
        product.b,
        product.scale_a,
        product.scale_b,
        bias=product.bias,
        out_dtype=product.out_dtype,
        use_fast_accum=product.use_fast_accum,
        unit=product.unit,
        split_k=product.split_k,
        scaling=product.scaling,
    )


def accumulate(
    a: torch.Tensor, b: torch.Tensor, unit: str | TensorCoreUnit, *, use_fast_accum: bool, split_k: int
) -> torch.Tensor:
    """The oracle's accumulators."""
    return by_both_engines(fp8ref.accumulate, a, b, unit=unit, use_fast_accum=use_fast_accum, split_k=split_k)


def report(product: Product, i: int, j: int, ours: int, theirs: int) -> str:
    """What a failure should say: both operands' codes, the reference's bits and the oracle's."""
    return (
        f"output ({i}, {j}): the reference gives {theirs:#x}, the oracle {ours:#x}\n"
        f"a[{i}] = {vector(product.a[i])}\nb[:, {j}] = {vector(product.b[:, j])}\n"
        f"scales {product.scales_of(i, j)}, {product.mode}"
    )


@settings(max_examples=5 * EXAMPLES)
@given(data=st.data(), product=products())
def test_emulate_matmul_equals_the_reference(data: st.DataObject, product: Product) -> None:
    result = emulate(product)
    m, n = product.a.shape[0], product.b.shape[1]
    assert result.dtype == product.out_dtype
    assert result.shape == (m, n)
    assert result.is_contiguous()
    bits = bits_of(result)
    for i, j in data.draw(samples(product)):
        expected = product.expected(i, j)
        assert bits[i, j] == expected, report(product, i, j, int(bits[i, j]), expected)


@settings(max_examples=3 * EXAMPLES)
@given(data=st.data(), product=products())
def test_accumulate_equals_the_reference(data: st.DataObject, product: Product) -> None:
    result = accumulate(
        product.a, product.b, product.unit, use_fast_accum=product.use_fast_accum, split_k=product.split_k
    )
    assert result.dtype == torch.float32
    assert result.shape == (product.a.shape[0], product.b.shape[1])
    bits = bits_of(result)
    for i, j in data.draw(samples(product)):
        expected = exact.accumulate(vector(product.a[i]), vector(product.b[:, j]), product.mode)
        assert bits[i, j] == expected, report(product, i, j, int(bits[i, j]), expected)


@pytest.mark.parametrize("use_fast_accum", [False, True])
@pytest.mark.parametrize("unit", list(UNITS))
@pytest.mark.parametrize(("m", "n", "k", "split_k"), [(67, 1501, 161, 1), (3, 17, 6200, 5), (1, 5, 14341, 1)])
def test_large_products_equal_the_reference(
    m: int, n: int, k: int, split_k: int, unit: str, use_fast_accum: bool
) -> None:
    """Shapes that the oracle cannot walk through in one piece: outputs at both ends, in the middle and around 1024."""
    finite = [code for code in range(256) if code % 128 != 127]
    a, b = (arranged(finite, 0.1, seed, rows, k).view(torch.float8_e4m3fn) for seed, rows in ((1, m), (2, n)))
    b = b.view(torch.uint8).bitwise_and(0xBF).view(torch.float8_e4m3fn)  # another range of exponents than a's
    bits = bits_of(accumulate(a, b.t(), unit, use_fast_accum=use_fast_accum, split_k=split_k))
    mode = exact.Mode(UNITS[unit], use_fast_accum, split_k)
    columns = {0, n // 2, n - 1, *(j for j in (1023, 1024) if j < n)}
    for i, j in {(i, j) for i in (0, m // 2, m - 1) for j in columns}:
        expected = exact.accumulate(vector(a[i]), vector(b[j]), mode)
        assert bits[i, j] == expected, f"({i}, {j}): {int(bits[i, j]):#x}, the reference {expected:#x}"


def assert_every_output(product: Product) -> None:
    """All outputs equal the reference."""
    bits = bits_of(emulate(product))
    for i, j in product_indices(product):
        expected = product.expected(i, j)
        assert bits[i, j] == expected, report(product, i, j, int(bits[i, j]), expected)


SMALL_OUT = (torch.bfloat16, torch.float16, *FORMATS)


@settings(max_examples=2 * EXAMPLES)
@given(st.data(), st.sampled_from(SMALL_OUT), st.integers(0, 2**32 - 1))
def test_a_bias_that_makes_a_tie(data: st.DataObject, out_dtype: torch.dtype, seed: int) -> None:
    """A tiny accumulator vanishes when the bias is added in fp32: what the output rounds is then the tie itself."""
    tiny = [0x2F800000, 0xAF800000, 0x33800001, 0xB3800001, 0x00000000, 0x80000000]
    zero = st.sampled_from((0x00000000, 0x80000000))
    bias = data.draw(st.lists(st.one_of(ties_of(BINARIES[out_dtype]), zero), min_size=4, max_size=4))
    scales = data.draw(st.lists(st.sampled_from(tiny), min_size=3, max_size=3))
    product = Product(
        a=arranged([0x38, 0xB8, 0x3F, 0x00, 0x80], 0.0, seed, 3, 1).view(torch.float8_e4m3fn),
        b=arranged([0x38, 0xB8, 0x3F], 0.0, seed + 1, 4, 1).view(torch.float8_e4m3fn).t(),
        scale_a=from_bits(scales, torch.float32, 3, 1),
        scale_b=torch.ones(1, 4),
        kind="row",
        unit=UNITS["sm90"],
        use_fast_accum=False,
        split_k=1,
        bias=from_bits(bias, torch.float32, 4),
        out_dtype=out_dtype,
        say_scaling=False,
    )
    assert_every_output(product)


@given(st.data(), units(), st.sampled_from((385, 513, 640)), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_block_scales_that_make_every_rounding_count(
    data: st.DataObject, unit: TensorCoreUnit, k: int, split_k: int, seed: int
) -> None:
    """Blocks of like size and either sign, split or not: another order or one rounding less gives other bits."""
    kind: exact.Kind = data.draw(st.sampled_from(("1x128 by 1x128", "1x128 by 128x128", "128x128 by 1x128")))
    tiles = -(-k // exact.TILE)
    generator = torch.Generator().manual_seed(seed)
    product = Product(
        a=arranged(list(range(0x30, 0x40)), 0.2, seed, 1, k).view(torch.float8_e4m3fn),
        b=arranged([*range(0x30, 0x40), *range(0xB0, 0xC0)], 0.2, seed + 1, 2, k).view(torch.float8_e4m3fn).t(),
        scale_a=torch.randn(1, tiles, generator=generator),
        scale_b=torch.randn(tiles, 1 if kind == "1x128 by 128x128" else 2, generator=generator),
        kind=kind,
        unit=unit,
        use_fast_accum=False,
        split_k=split_k,
        bias=None,
        out_dtype=torch.float32,
        say_scaling=True,
    )
    assert_every_output(product)


SUBNORMAL_C = (
    from_bits([0x38, 0x38], torch.float8_e4m3fn, 2, 1),
    from_bits([0x00, 0x80], torch.float8_e4m3fn, 2, 1),
    from_bits([0x00000007, 0x80000007], torch.float32, 2),
)
# Minus zero throughout: the sum is +0 all the same.
MINUS_ZERO_C = (SUBNORMAL_C[0], from_bits([0x80, 0x80], torch.float8_e4m3fn, 2, 1), torch.full((2,), -0.0))


@settings(max_examples=10 * EXAMPLES)
@given(instructions())
# Significant bits count from the leading bit of a subnormal result: 7 * 2^-149 keeps two of its three.
@example((*SUBNORMAL_C, UNITS["exact"]))
@example((*MINUS_ZERO_C, UNITS["exact"]))
@example((*MINUS_ZERO_C, UNITS["sm90_mma_sync"]))
@example((*SUBNORMAL_C, TensorCoreUnit("mine", 1, 25, 2, (0,), "alignment", "made up")))
def test_fused_dot_add_equals_the_reference(
    drawn: tuple[torch.Tensor, torch.Tensor, torch.Tensor, TensorCoreUnit],
) -> None:
    a, b, c, unit = drawn
    bits = bits_of(fp8ref.fused_dot_add(a, b, c, unit))
    assert bits.shape == c.shape
    for row, one_c in enumerate(bits_of(c).tolist()):
        left, right = vector(a[row]), vector(b[row])
        number = exact.padded_instruction(left, right, decode(one_c, FP32), unit)
        expected = encode(number, FP32)
        assert bits[row] == expected, f"{left} {right} c={one_c:#x} {unit}: {int(bits[row]):#x}, not {expected:#x}"


@settings(max_examples=EXAMPLES // 2)
@given(st.data())
def test_fused_dot_add_broadcasts_leading_dimensions(data: st.DataObject) -> None:
    a, b, c, unit = data.draw(instructions())
    every = fp8ref.fused_dot_add(a[:, None], b[None, :], c[:, None], unit)
    rows = len(c)
    assert every.shape == (rows, rows)
    for i in range(rows):
        for j in range(rows):
            alone = fp8ref.fused_dot_add(a[i], b[j], c[i], unit)
            assert bits_of(every[i, j]) == bits_of(alone)
