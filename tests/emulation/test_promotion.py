"""How a block of K joins the fp32 total: both engines against exact rationals, wherever fp32 has an edge."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import fp8ref
from fp8ref.emulation import compiled, matmul
from fp8ref.emulation.bits import canonical_nan
from fp8ref.emulation.compiled_loops import promote
from fp8ref.emulation.compiled_numba import compiled_promote
from reference.rationals import FP32, decode, encode, fp32_fma, fp32_multiply
from reference.strategies import arranged
from reference.tensors import bits_of, from_bits

ENGINES = ("torch", "compiled")
PROMOTIONS = {"torch": matmul._promote_scaled, "compiled": compiled.promote_scaled}
EDGES = [
    magnitude | sign
    for sign in (0, 1 << 31)
    for magnitude in (
        0,
        1,  # the smallest subnormal
        0x007FFFFF,  # the largest
        0x00800000,  # the smallest normal
        0x33800000,  # 2**-24, half a place of 1
        0x3F7FFFFF,
        0x3F800000,
        0x3F800001,
        0x4B800001,
        0x7F7FFFFF,  # the largest
        0x7F800000,  # Inf
        0x7FC00000,  # NaN
    )
]
FIELDS = st.one_of(st.sampled_from((0, 1, 2, 103, 126, 127, 128, 151, 253, 254, 255)), st.integers(0, 255))
FRACTIONS = st.one_of(st.sampled_from((0, 1, 0x7FFFFF, 0x400000, 0x400001, 0x3FFFFF)), st.integers(0, 0x7FFFFF))
WORDS = st.one_of(
    st.sampled_from(EDGES), st.builds(lambda s, e, f: s << 31 | e << 23 | f, st.integers(0, 1), FIELDS, FRACTIONS)
)


def expected(total: int, chain: int, left: int, right: int, *, joined: bool) -> int:
    """The bits of one promoted element, in rational arithmetic."""
    t, c, x, y = (decode(bits, FP32) for bits in (total, chain, left, right))
    if joined:
        return encode(fp32_fma(c, fp32_multiply(x, y), t), FP32)
    return encode(fp32_fma(fp32_multiply(c, x), y, t), FP32)


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
@given(st.lists(st.tuples(WORDS, WORDS), min_size=9, max_size=9), st.lists(WORDS, min_size=6, max_size=6))
# 2**-24 above the middle of two fp32 numbers, or below it: float64 loses that, and its sum is the middle itself.
@example([(0x4B800001, 0x3F800000), *[(0xCB800001, 0x3F800001)] * 8], [0x3F800001, 0x3F7FFFFF, 0x33800000] * 2)
# Half of the smallest subnormal, and a little more or less.
@example([(0x00000000, 0x00000001), *[(0x80000002, 0x80000003)] * 8], [0x3F000000, 0x3F000001, 0x3EFFFFFF] * 2)
def test_every_element_is_rounded_once(
    engine: str, joined: bool, pairs: list[tuple[int, int]], scales: list[int]
) -> None:
    total, chain = (from_bits([pair[i] for pair in pairs], torch.float32, 3, 3) for i in (0, 1))
    left, right = from_bits(scales[:3], torch.float32, 3), from_bits(scales[3:], torch.float32, 3)
    wanted = [
        [expected(*pairs[3 * i + j], scales[i], scales[3 + j], joined=joined) for j in range(3)] for i in range(3)
    ]
    for transposed in (False, True):
        sums, results = total.clone(), chain.clone()
        if transposed:  # the same matrices, the columns of which are consecutive
            sums, results = sums.t().contiguous().t(), results.t().contiguous().t()
        got = PROMOTIONS[engine](sums, results, left, right, joined=joined)
        assert bits_of(canonical_nan(got)).tolist() == wanted


def test_the_edges_of_fp32_meet_each_other() -> None:
    """Every combination of them, long enough for vector instructions; the loop as Python runs it gives the same."""
    words = torch.tensor(list(itertools.product(EDGES[:12], EDGES, EDGES)), dtype=torch.int64).int().t().contiguous()
    chain, left, right = (row.view(torch.float32) for row in words)
    for order in (False, True):
        for total in EDGES[::5]:
            total_of = from_bits([total] * chain.numel(), torch.float32, chain.numel(), 1)
            got = [
                canonical_nan(add(total_of.clone(), chain.view(-1, 1), left, right[:1], joined=order))
                for add in PROMOTIONS.values()
            ]
            assert torch.equal(*map(bits_of, got))
            across = [
                canonical_nan(add(total_of.clone().t(), chain.view(1, -1), left[:1], right, joined=order))
                for add in PROMOTIONS.values()
            ]
            assert torch.equal(*map(bits_of, across))
    some = slice(None, None, 37)
    sums = torch.ones_like(chain[some]).view(1, -1)
    plain, machine = sums.clone().numpy(), sums.clone().numpy()
    how = chain[some].contiguous().view(1, -1).numpy(), left[5:6].numpy(), right[some].contiguous().numpy()
    with np.errstate(all="ignore"):
        promote(plain, *how, 1)
    compiled_promote()(machine, *how, 1)
    assert np.array_equal(plain, machine, equal_nan=True)


SCALES = [0x00000000, 0x80000000, 0x00000001, 0x807FFFFF, 0x7F7FFFFF, 0x3F800000, 0xBF9A3C7B, 0x7F800000, 0x7FC00000]


@pytest.mark.parametrize("kinds", [("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128")])
@pytest.mark.parametrize(("m", "n"), [(9, 150), (150, 9), (70, 600)], ids=["wide", "tall", "tiles"])
@pytest.mark.parametrize("unit", ["sm90", "sm90_mma_sync", "exact"])
@pytest.mark.parametrize("specials", [False, True])
def test_scales_that_are_zero_subnormal_huge_or_not_numbers(
    kinds: tuple[fp8ref.Scaling, fp8ref.Scaling], m: int, n: int, unit: str, specials: bool
) -> None:
    """Products of every orientation, with such scales in every block; both engines, split or not."""
    k = 300
    codes = [0x00, 0x38, 0xB8, 0x01, 0x7E, 0xFE, 0x4D]
    palettes = ([0x38] * 200 + codes, [0x38, 0xB4, 0x3D] * 70 + codes)
    a, b = (arranged(palette, 0.2, seed, rows, k) for palette, seed, rows in zip(palettes, (1, 2), (m, n), strict=True))
    if specials:
        a[1, 5] = b[2, 299] = 0x7F
    a, b = a.view(torch.float8_e4m3fn), b.view(torch.float8_e4m3fn)
    rows, columns = (-(-size // 128) if kind == "128x128" else size for size, kind in ((m, kinds[0]), (n, kinds[1])))
    scale_a = arranged(list(range(len(SCALES))), 0.0, 3, rows, 3).int()
    scale_b = arranged(list(range(len(SCALES))), 0.0, 4, 3, columns).int()
    words = torch.tensor(SCALES, dtype=torch.int64).int()
    left, right = (words[index.long()].view(torch.float32) for index in (scale_a, scale_b))
    for split_k in (1, 2):
        answers = [
            fp8ref.emulate_matmul(
                a,
                b.t(),
                left,
                right,
                out_dtype=torch.float32,
                unit=unit,
                split_k=split_k,
                scaling=kinds,
                engine=engine,  # type: ignore[arg-type]  # one of ENGINES
            )
            for engine in ENGINES
        ]
        assert torch.equal(*map(bits_of, answers))
        assert answers[0].isnan().any()
        assert answers[0].isfinite().any()
