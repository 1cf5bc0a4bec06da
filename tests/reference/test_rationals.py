"""The reference's arithmetic: codes against torch, fp32 operations against IEEE hardware and the C library."""

import ctypes
import ctypes.util
import doctest
import math
import random

import pytest
import torch

import reference.exact
import reference.rationals
import reference.tensors
from reference.rationals import (
    E4M3,
    E5M2,
    FP32,
    Binary,
    Number,
    decode,
    encode,
    fp32_add,
    fp32_fma,
    fp32_multiply,
    round_to,
)
from reference.tensors import BINARIES, bits_of, from_bits, value_of

INF_BITS = 0x7F800000


@pytest.mark.parametrize("module", [reference.exact, reference.rationals, reference.tensors])
def test_the_examples_in_docstrings_hold(module: object) -> None:
    result = doctest.testmod(module)  # type: ignore[arg-type]
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("dtype", [d for d in BINARIES if d.itemsize <= 2])
def test_every_code_decodes_as_torch_says_and_encodes_back(dtype: torch.dtype) -> None:
    binary = BINARIES[dtype]
    count = 1 << 8 * dtype.itemsize
    values = from_bits(list(range(count)), dtype, count).double().tolist()
    for code, value in enumerate(values):
        x = decode(code, binary)
        if x.is_nan:
            assert math.isnan(value)
        else:
            assert x == value_of(value)
            assert encode(x, binary) == code


def fp32_samples(count: int, seed: int) -> list[int]:
    """Random fp32 bit patterns without NaN, half of them near the edges of the exponent."""
    draw = random.Random(seed)
    found: list[int] = []
    while len(found) < count:
        exponent = draw.choice([0, 1, 2, 126, 127, 128, 253, 254, 255, draw.randrange(256)])
        fraction = draw.choice([0, 1, 0x7FFFFF, 0x7FFFFE, 0x400000, draw.randrange(1 << 23), draw.randrange(1 << 23)])
        bits = draw.randrange(2) << 31 | exponent << 23 | fraction
        if bits & 0x7FFFFFFF <= INF_BITS:
            found.append(bits)
    return found


def same_fp32(ours: Number, theirs: torch.Tensor) -> bool:
    """Equal bits, any NaN being the same NaN."""
    return ours.is_nan if bool(theirs.isnan()) else encode(ours, FP32) == int(bits_of(theirs))


def test_fp32_add_and_multiply_are_ieee() -> None:
    xs, ys = fp32_samples(4000, 1), fp32_samples(4000, 2)
    # A close neighbour of x makes cancellation and ties frequent.
    ys = [
        x ^ 0x80000003 if i % 4 == 0 and x & 0x7FFFFFFF < 0x7F7FFFF0 else y
        for i, (x, y) in enumerate(zip(xs, ys, strict=True))
    ]
    tx, ty = from_bits(xs, torch.float32, -1), from_bits(ys, torch.float32, -1)
    sums, products = tx + ty, tx * ty
    for i, (x, y) in enumerate(zip(xs, ys, strict=True)):
        a, b = decode(x, FP32), decode(y, FP32)
        assert same_fp32(fp32_add(a, b), sums[i]), (hex(x), hex(y))
        assert same_fp32(fp32_multiply(a, b), products[i]), (hex(x), hex(y))


def test_fp32_fma_is_that_of_the_c_library() -> None:
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.restype = ctypes.c_float
    library.fmaf.argtypes = [ctypes.c_float] * 3
    samples = [from_bits(fp32_samples(3000, seed), torch.float32, -1) for seed in (3, 4, 5)]
    # Every second addend nearly cancels the product, so that one rounding and two differ.
    near = (samples[0].double() * samples[1].double()).float().neg()
    samples[2][::2] = near[::2].where(near[::2].isfinite(), torch.tensor(1.0))
    one_rounding_matters = 0
    for x, y, z in zip(*samples, strict=True):
        expected = torch.tensor(library.fmaf(x.item(), y.item(), z.item()), dtype=torch.float32)
        one_rounding_matters += bool((x * y + z) != expected)
        a, b, c = (decode(int(bits_of(t)), FP32) for t in (x, y, z))
        assert same_fp32(fp32_fma(a, b, c), expected), (x, y, z)
    assert one_rounding_matters > 100


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_is_that_of_torch_where_torch_is_right(dtype: torch.dtype) -> None:
    bits = fp32_samples(4000, 6) + [code << 16 | 0x8000 for code in range(0, 0x7F80, 7)]
    rounded = from_bits(bits, torch.float32, -1).to(dtype)
    for one, expected in zip(bits, bits_of(rounded).tolist(), strict=True):
        assert encode(round_to(decode(one, FP32), BINARIES[dtype]), BINARIES[dtype]) == expected, hex(one)


@pytest.mark.parametrize(
    ("binary", "value", "expected"),
    [
        (E4M3, 464.0, 0x7E),  # midway to the missing 480: saturates
        (E4M3, math.inf, 0x7E),
        (E4M3, -math.inf, 0xFE),
        (E4M3, -(2.0**-10), 0x80),  # a tie with zero goes to even and keeps its sign
        (E4M3, 3 * 2.0**-10, 0x02),
        (E4M3, 1.0625, 0x38),  # a tie goes to even
        (E4M3, 1.1875, 0x3A),
        (E5M2, math.inf, 0x7B),
        (E5M2, 61440.0, 0x7B),
        (E5M2, 2.0**-17, 0x00),
        (E5M2, 1.125, 0x3C),
    ],
)
def test_rounding_to_fp8_by_hand(binary: Binary, value: float, expected: int) -> None:
    assert encode(round_to(value_of(value), binary, saturate=True), binary) == expected
