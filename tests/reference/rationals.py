"""Floating-point numbers as exact rationals: decode, encode, round, add, multiply.

Everything here is Python integers and :class:`fractions.Fraction`; no float takes part, so nothing is rounded
except where :func:`round_to` says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cache, lru_cache


@dataclass(frozen=True)
class Number:
    """A real number whose zero has a sign, an infinity (``magnitude`` None), or NaN (``is_nan``).

    >>> -Number(False, Fraction(3))
    Number(negative=True, magnitude=Fraction(3, 1), is_nan=False)
    """

    negative: bool
    magnitude: Fraction | None
    is_nan: bool = False

    @property
    def is_infinite(self) -> bool:
        """True for the two infinities."""
        return self.magnitude is None and not self.is_nan

    @property
    def is_zero(self) -> bool:
        """True for the two zeros."""
        return self.magnitude == 0 and not self.is_nan

    @property
    def value(self) -> Fraction:
        """The signed value of a finite number."""
        if self.magnitude is None:
            raise ValueError(f"{self} has no finite value")
        return -self.magnitude if self.negative else self.magnitude

    def __neg__(self) -> Number:
        """The number with its sign flipped."""
        return Number(not self.negative, self.magnitude, self.is_nan)


NAN = Number(False, None, is_nan=True)
ZERO = Number(False, Fraction(0))


def infinity(negative: bool) -> Number:
    """An infinity of the given sign."""
    return Number(negative, None)


def number(value: Fraction | int) -> Number:
    """A finite number; zero is +0.

    >>> number(-2).negative
    True
    """
    return Number(value < 0, abs(Fraction(value)))


@cache
def power_of_two(exponent: int) -> Fraction:
    """2 ** exponent.

    >>> power_of_two(-3)
    Fraction(1, 8)
    """
    return Fraction(2) ** exponent


def exponent_of(x: Number, e_min: int) -> int:
    """The exponent e with 2**e <= abs(x) < 2**(e+1), or ``e_min`` where that is larger (a subnormal keeps e_min).

    >>> exponent_of(number(Fraction(3, 4)), -126), exponent_of(number(Fraction(1, 512)), -6)
    (-1, -6)
    """
    magnitude = abs(x.value)
    if magnitude == 0:
        return e_min
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    if magnitude < power_of_two(exponent):
        exponent -= 1
    return max(exponent, e_min)


def multiply(x: Number, y: Number) -> Number:
    """The exact product; Inf * 0 is NaN, the sign of a zero is the product of the signs.

    >>> multiply(-ZERO, number(2)).negative
    True
    """
    if x.is_nan or y.is_nan:
        return NAN
    negative = x.negative != y.negative
    if x.magnitude is None or y.magnitude is None:
        return NAN if x.is_zero or y.is_zero else infinity(negative)
    return Number(negative, x.magnitude * y.magnitude)


def add(x: Number, y: Number) -> Number:
    """The exact sum; Inf - Inf is NaN, and only -0 + -0 is -0 (IEEE 754, rounding to nearest).

    >>> add(number(1), number(-1)).negative, add(-ZERO, -ZERO).negative
    (False, True)
    """
    if x.is_nan or y.is_nan:
        return NAN
    if x.is_infinite or y.is_infinite:
        if x.is_infinite and y.is_infinite and x.negative != y.negative:
            return NAN
        return x if x.is_infinite else y
    if x.is_zero and y.is_zero:
        return Number(x.negative and y.negative, Fraction(0))
    return number(x.value + y.value)


@dataclass(frozen=True)
class Binary:
    """A binary floating-point format with subnormals: sign, exponent field, fraction field.

    ``has_infinity`` False means e4m3fn's convention: the largest exponent field holds numbers too, and only the
    all-ones code is NaN.

    >>> E4M3.largest, E5M2.largest, FP16.largest
    (Fraction(448, 1), Fraction(57344, 1), Fraction(65504, 1))
    """

    name: str
    exponent_bits: int
    fraction_bits: int
    has_infinity: bool = True

    @property
    def e_min(self) -> int:
        """Exponent of the smallest normal number, which subnormals keep."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def sign_bit(self) -> int:
        """The code of -0."""
        return 1 << (self.exponent_bits + self.fraction_bits)

    @property
    def nan_code(self) -> int:
        """The NaN that NVIDIA hardware writes: every bit set but the sign."""
        return self.sign_bit - 1

    @property
    def infinity_code(self) -> int:
        """The code of +Inf (of formats that have one)."""
        return ((1 << self.exponent_bits) - 1) << self.fraction_bits

    @property
    def largest_code(self) -> int:
        """The code of the largest finite number."""
        return self.infinity_code - 1 if self.has_infinity else self.nan_code - 1

    @property
    def largest(self) -> Fraction:
        """The largest finite number."""
        return decode(self.largest_code, self).value


E4M3 = Binary("e4m3", 4, 3, has_infinity=False)
E5M2 = Binary("e5m2", 5, 2)
FP16 = Binary("fp16", 5, 10)
BF16 = Binary("bf16", 8, 7)
FP32 = Binary("fp32", 8, 23)


@lru_cache(maxsize=65536)
def decode(code: int, binary: Binary) -> Number:
    """The number that a code means.

    >>> decode(0x3F800000, FP32).value, decode(0x01, E4M3).value, decode(0xFC, E5M2).is_infinite
    (Fraction(1, 1), Fraction(1, 512), True)
    """
    negative = code >= binary.sign_bit
    bits = code % binary.sign_bit
    if binary.has_infinity:
        if bits == binary.infinity_code:
            return infinity(negative)
        is_nan = bits > binary.infinity_code
    else:
        is_nan = bits == binary.nan_code
    if is_nan:
        return NAN
    field, fraction = divmod(bits, 2**binary.fraction_bits)
    significand = fraction + (2**binary.fraction_bits if field else 0)
    exponent = binary.e_min + max(field - 1, 0) - binary.fraction_bits
    return Number(negative, significand * power_of_two(exponent))


def encode(x: Number, binary: Binary) -> int:
    """The code of a number that the format holds.

    Raises:
        ValueError: the format does not hold the number.

    >>> hex(encode(-ZERO, FP16)), hex(encode(NAN, FP32)), hex(encode(number(448), E4M3))
    ('0x8000', '0x7fffffff', '0x7e')
    """
    if x.is_nan:
        return binary.nan_code
    sign = binary.sign_bit if x.negative else 0
    if x.magnitude is None:
        code = binary.infinity_code
    else:
        exponent = exponent_of(x, binary.e_min)
        significand = x.magnitude / power_of_two(exponent - binary.fraction_bits)
        # A subnormal's missing leading bit and a normal's field of at least 1 are the same addition.
        code = int(significand) + (exponent - binary.e_min) * 2**binary.fraction_bits
    if decode(sign + code, binary) != x:
        raise ValueError(f"{x} is no {binary.name} number")
    return sign + code


def round_to(x: Number, binary: Binary, *, saturate: bool = False) -> Number:
    """The nearest number of the format, ties to even; what is too large becomes Inf, or the largest number.

    Saturating clamps infinities too, as PTX ``cvt.rn.satfinite`` does.

    >>> round_to(number(Fraction(17, 16)), E4M3).value, round_to(number(10**6), E4M3, saturate=True).value
    (Fraction(1, 1), Fraction(448, 1))
    """
    if x.is_nan:
        return NAN
    overflow = Number(x.negative, binary.largest) if saturate else infinity(x.negative)
    if x.magnitude is None:
        return overflow
    quantum = power_of_two(exponent_of(x, binary.e_min) - binary.fraction_bits)
    # round() of a Fraction is exact and goes to even on a tie.
    magnitude = round(x.magnitude / quantum) * quantum
    return overflow if magnitude > binary.largest else Number(x.negative, magnitude)


def fp32_add(x: Number, y: Number) -> Number:
    """The fp32 sum, rounded to nearest even.

    >>> fp32_add(number(2**24), number(1)).value
    Fraction(16777216, 1)
    """
    return round_to(add(x, y), FP32)


def fp32_multiply(x: Number, y: Number) -> Number:
    """The fp32 product, rounded to nearest even.

    >>> fp32_multiply(number(2**70), number(2**60)).is_infinite
    True
    """
    return round_to(multiply(x, y), FP32)


def fp32_fma(x: Number, y: Number, z: Number) -> Number:
    """The fp32 fused multiply-add x * y + z, rounded once.

    >>> fp32_fma(number(2**24 + 2), number(2**24 + 2), -number(2**48 + 2**26)).value
    Fraction(4, 1)
    """
    return round_to(add(multiply(x, y), z), FP32)
