"""The reference itself against cases worked out by hand; its arithmetic is checked in test_rationals.py."""

import math

import pytest

from fp8ref.emulation.units import UNITS, TensorCoreUnit
from reference.exact import Kind, Mode, Scales, Vector, accumulate, matmul, step
from reference.rationals import (
    BF16,
    E4M3,
    E5M2,
    FP16,
    FP32,
    ZERO,
    Binary,
    encode,
    number,
)
from reference.tensors import fp32, value_of

NAN_BITS, INF_BITS = 0x7FFFFFFF, 0x7F800000


def codes(*values: float, binary: Binary = E4M3) -> Vector:
    """A vector of values that the format holds."""
    return Vector(binary, tuple(encode(value_of(v), binary) for v in values))


def small_unit(length: int, fraction_bits: int, significant_bits: int) -> TensorCoreUnit:
    """A unit of one step an instruction, c in the alignment."""
    order = tuple(range(length))
    return TensorCoreUnit("mine", length, fraction_bits, significant_bits, order, "alignment", "made up")


STEPS = [
    # numerics.md 1, F = 13: beside 2^16 only multiples of 8 survive.
    ("cut below emax - F", small_unit(2, 13, 14), (256.0, 2.0), (256.0, 2.0), 0.0, 65536.0),
    ("kept at emax - F", small_unit(2, 13, 14), (256.0, 4.0), (256.0, 2.0), 0.0, 65544.0),
    ("cut toward zero, also below it", small_unit(2, 13, 14), (256.0, -3.5), (256.0, 4.0), 0.0, 65528.0),
    # 1.5 * 1.5 = 2.25 has exponent 0, so F = 2 keeps its quarter; renormalised to 1.125 * 2 it would not.
    ("a product is not renormalised", small_unit(1, 2, 24), (1.5,), (1.5,), 0.0, 2.25),
    # 2^-9 is subnormal: exponent -6, so F = 1 cuts at 2^-7.
    ("a subnormal keeps e_min", small_unit(1, 1, 24), (2.0**-9,), (1.0,), 0.0, 0.0),
    ("a subnormal keeps e_min, and F bits below", small_unit(1, 3, 24), (2.0**-9,), (1.0,), 0.0, 2.0**-9),
    ("B bits of the result's own exponent", small_unit(2, 25, 14), (128.0, 1.0), (128.0, 1.0), 0.0, 16384.0),
    ("one bit more is kept", small_unit(2, 25, 15), (128.0, 1.0), (128.0, 1.0), 0.0, 16385.0),
    ("the result is cut toward zero", small_unit(2, 25, 14), (-128.0, -1.0), (128.0, 1.0), 0.0, -16384.0),
    ("cancellation leaves room", small_unit(3, 25, 2), (128.0, -128.0, 1.25), (128.0, 128.0, 1.0), 0.0, 1.0),
    ("zero takes no part in emax", small_unit(2, 3, 24), (0.0, 2.0**-6), (448.0, 2.0**-6), 0.0, 2.0**-12),
    ("c is one more term", small_unit(1, 13, 14), (256.0,), (256.0,), 7.0, 65536.0),
    ("c sets emax", small_unit(1, 13, 14), (1.0,), (1.0,), 2.0**14, 2.0**14),
    ("c of 0 takes no part", small_unit(1, 1, 24), (2.0**-6,), (2.0**-6,), -0.0, 2.0**-12),
    ("a subnormal c has exponent -126", small_unit(1, 13, 14), (0.0,), (0.0,), 2.0**-139 + 2.0**-140, 2.0**-139),
    ("B bits below 2^-126 too", small_unit(1, 25, 2), (0.0,), (0.0,), 7 * 2.0**-140, 6 * 2.0**-140),
    ("a zero sum is +0", small_unit(1, 13, 14), (-0.0,), (0.0,), -0.0, 0.0),
    ("a cancelled sum is +0", small_unit(2, 13, 14), (-1.0, 1.0), (1.0, 1.0), 0.0, 0.0),
]


@pytest.mark.parametrize(("unit", "a", "b", "c", "expected"), [s[1:] for s in STEPS], ids=[s[0] for s in STEPS])
def test_one_step_by_hand(
    unit: TensorCoreUnit, a: tuple[float, ...], b: tuple[float, ...], c: float, expected: float
) -> None:
    assert encode(step(codes(*a), codes(*b), value_of(c), unit), FP32) == fp32(expected)


@pytest.mark.parametrize("unit", list(UNITS.values()), ids=list(UNITS))
@pytest.mark.parametrize(
    ("a", "b", "c", "expected"),
    [
        ((math.nan,), (0.0,), 0.0, NAN_BITS),
        ((math.inf,), (0.0,), 0.0, NAN_BITS),
        ((math.inf, math.inf), (1.0, -1.0), 0.0, NAN_BITS),
        ((math.inf,), (1.0,), -math.inf, NAN_BITS),
        ((math.inf, 1.0), (-1.0, 3.0), 5.0, INF_BITS | 1 << 31),
        ((1.0,), (1.0,), math.inf, INF_BITS),
        ((1.0,), (1.0,), math.nan, NAN_BITS),
        ((0.0,), (0.0,), -0.0, 0),
    ],
)
def test_specials(unit: TensorCoreUnit, a: tuple[float, ...], b: tuple[float, ...], c: float, expected: int) -> None:
    left, right = codes(*a, binary=E5M2), codes(*b, binary=E5M2)
    for fast in (False, True):
        assert accumulate(left, right, Mode(unit, fast), c=fp32(c)) == expected


def sparse(length: int, values: dict[int, float]) -> Vector:
    """Zeros but for the values at the given k."""
    return codes(*(values.get(k, 0.0) for k in range(length)))


@pytest.mark.parametrize(
    ("fast", "split_k", "small_at", "expected"),
    [
        (True, 1, 128, 65536.0),  # one chain: 4 is lost beside 2^16
        (False, 1, 127, 65536.0),  # the same chain of 128
        (False, 1, 128, 65540.0),  # a new chain, added in fp32
        (True, 2, 255, 65536.0),  # 4 tiles in 2 parts: the first part owns k < 256
        (True, 2, 256, 65540.0),
        (True, 3, 256, 65540.0),  # ceil(4 / 3) = 2 tiles a part, so two parts
        (True, 4, 128, 65540.0),
    ],
)
def test_chains_promotion_and_split_k_by_hand(fast: bool, split_k: int, small_at: int, expected: float) -> None:
    a, b = sparse(400, {0: 256.0, small_at: 2.0}), sparse(400, {0: 256.0, small_at: 2.0})
    assert accumulate(a, b, Mode(UNITS["sm90"], fast, split_k)) == fp32(expected)


def test_parts_are_added_from_the_first_one_on() -> None:
    a = Vector(E5M2, codes(*([4096.0] + [0.0] * 127 + [1.0] + [0.0] * 127 + [1.0]), binary=E5M2).codes)
    # (2^24 + 1) + 1 = 2^24 by two ties to even; 2^24 + (1 + 1) would be 2^24 + 2.
    assert accumulate(a, a, Mode(UNITS["sm100"], True, 3)) == fp32(2.0**24)
    assert accumulate(a, a, Mode(UNITS["exact"], True, 1)) == fp32(2.0**24 + 2)


def test_mma_sync_takes_k_in_its_own_order() -> None:
    # 2^30 - 2^30 cuts at 2^5 what shares its step: a 1 survives only in a step of its own that comes later.
    def survives(big_at: int, one_at: int) -> bool:
        left = {big_at: 32768.0, big_at + 1: -32768.0, one_at: 1.0}
        right = {big_at: 32768.0, big_at + 1: 32768.0, one_at: 1.0}
        a, b = (codes(*(v.get(k, 0.0) for k in range(32)), binary=E5M2) for v in (left, right))
        result = accumulate(a, b, Mode(UNITS["sm90_mma_sync"], True))
        assert result in (0, fp32(1.0))
        return result == fp32(1.0)

    assert [k for k in range(2, 32) if survives(0, k)] == [k for k in range(32) if k % 4 >= 2]
    assert not any(survives(30, k) for k in range(30))


def test_mma_sync_adds_c_last_by_one_rounding_to_nearest() -> None:
    unit = UNITS["sm90_mma_sync"]
    for products, expected in ((1.0, 2.0**24), (1.5, 2.0**24 + 2), (3.0, 2.0**24 + 4)):
        assert accumulate(codes(products), codes(1.0), Mode(unit, True), c=fp32(2.0**24)) == fp32(expected)
    # In the alignment (F = 25, B = 24) the same c cuts toward zero.
    assert accumulate(codes(1.5), codes(1.0), Mode(UNITS["sm90_hmma"], True), c=fp32(2.0**24)) == fp32(2.0**24)


ONE = codes(1.0)


def scaled(kind: Kind, a: float, b: float, out: Binary = FP32, bias: float | None = None, acc: Vector = ONE) -> int:
    """1 (or acc) times 1, scaled."""
    scales = Scales(kind, (fp32(a),), (fp32(b),))
    return matmul(acc, ONE, Mode(UNITS["sm90"]), out, scales=scales, bias=None if bias is None else value_of(bias))


def test_scales_are_multiplied_in_the_order_of_their_kind() -> None:
    small = codes(2.0**-9)
    assert scaled("tensor", 2.0**70, 2.0**60, acc=small) == INF_BITS
    assert scaled("row", 2.0**70, 2.0**60, acc=small) == fp32(2.0**121)
    assert scaled("tensor", 2.0**-80, 2.0**-60) == fp32(2.0**-140)
    assert scaled("tensor", 2.0**-80, 2.0**-80, acc=codes(256.0)) == 0
    assert scaled("row", 2.0**-80, 2.0**80) == fp32(1.0)
    assert scaled("row", -1.0, 1.0, acc=codes(0.0)) == 1 << 31
    assert scaled("1x128 by 1x128", -1.0, 1.0, acc=codes(0.0)) == 0
    assert scaled("tensor", math.nan, 1.0, BF16) == 0x7FFF
    assert scaled("tensor", math.nan, 1.0, E4M3) == scaled("tensor", math.nan, 1.0, E5M2) == 0x7F
    assert scaled("tensor", math.inf, 1.0, E4M3) == 0x7E
    assert scaled("tensor", 65536.0, 1.0, FP16) == 0x7C00


def test_the_sign_of_a_tensor_wise_zero() -> None:
    """An uncut K: only a product that is exactly zero becomes +0. A cut one: only a zero factor makes it +0."""
    tiny = codes(2.0**-9)
    assert scaled("tensor", -1.0, 1.0, acc=codes(0.0)) == 0
    assert scaled("tensor", -(2.0**-100), 2.0**-45, acc=tiny) == 1 << 31
    two = Vector(E4M3, (0,) * 256)
    cut = Mode(UNITS["sm90"], split_k=2)
    for factor, expected in ((-1.0, 1 << 31), (1.0, 0), (-0.0, 0)):
        assert matmul(two, two, cut, FP32, scales=Scales("tensor", (fp32(factor),), (fp32(1.0),))) == expected


def test_block_scales_use_a_fused_multiply_add() -> None:
    e, x = 2.0**-12, codes(1.0)
    # (1 + e)^2 = 1 + 2e + e^2 needs 25 bits: the block that cancels 1 + 2e shows whether e^2 was rounded away.
    two = Vector(E4M3, x.codes + (0,) * 127 + codes(1.0).codes)
    a, b = (fp32(-(1 + 2 * e)), fp32(1 + e)), (fp32(1.0), fp32(1 + e))
    run: dict[Kind, float] = {"1x128 by 1x128": e * e, "1x128 by 128x128": 0.0}
    for kind, expected in run.items():
        scales = Scales(kind, a, b)
        assert matmul(two, two, Mode(UNITS["sm90"]), FP32, scales=scales) == fp32(expected), kind


def test_bias_is_a_rounding_of_its_own() -> None:
    # 1 * (1 + 2^-23 each) = 1 + 2^-22 + 2^-46; minus (1 + 2^-22) is 0 after the product's rounding, 2^-46 in an FMA.
    near_one = 1 + 2.0**-23
    assert scaled("row", near_one, near_one, bias=-(1 + 2.0**-22)) == 0
    # 1 + 2^-8 is a tie of bf16; fp32 keeps the bias of 2^-30 out of sight only if it rounds first.
    assert scaled("tensor", 1 + 2.0**-8, 1.0, BF16, bias=2.0**-30) == 0x3F80
    assert scaled("tensor", 1 + 2.0**-8, 1.0, BF16, bias=2.0**-23) == 0x3F81
    assert scaled("row", 1.0, -0.0, BF16, bias=-0.0) == 0x8000
    assert scaled("tensor", 1.0, -0.0, BF16, bias=0.0) == 0x0000


def test_k_of_zero_is_plus_zero_and_the_bias_still_counts() -> None:
    empty = Vector(E4M3, ())
    for unit in UNITS.values():
        assert accumulate(empty, empty, Mode(unit, split_k=3)) == 0
        assert matmul(empty, empty, Mode(unit), BF16, scales=Scales("row", (0,), (0,)), bias=number(3)) == 0x4040
    assert matmul(empty, empty, Mode(UNITS["sm90"]), FP32, scales=Scales("1x128 by 1x128", (), ())) == encode(
        ZERO, FP32
    )
