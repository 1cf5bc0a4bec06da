"""The loops of :mod:`fp8ref.emulation.compiled`: plain Python until :mod:`fp8ref.emulation.compiled_numba`.

Inner loops run over consecutive outputs, on slices of one dimension: what LLVM turns into vector instructions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

BLOCK = 256
"""Outputs of a row that are computed together: their sums and scales stay in the first cache."""
UNROLL = 4
"""Products that an inner loop adds to an output at once; steps are padded to a multiple of it."""
JOINED, ROW_FIRST, ROW_LAST = range(3)
"""In which order :func:`promote` multiplies."""
ZERO_EXPONENT = -64
"""Stands for the exponent of zero: with any other factor's it is below every product's, and a sum of two fits int8."""


class Operand(NamedTuple):
    """Finite FP8 values."""

    codes: NDArray[np.uint8]
    """[rows, K]."""
    mantissa_bits: int
    """Of the format."""
    bias: int
    """Its exponent bias."""


class Unit(NamedTuple):
    """A unit on a floating-point type: the numbers that the loops need of both."""

    fraction_bits: int
    """F."""
    group: int
    """Products that an integer of ``Workspace.sums`` can add up, a multiple of UNROLL."""
    mask: int
    """The bits of a float64 that truncation to B significant bits leaves."""
    bias: int
    """Exponent bias of the type that products are scaled in."""
    mantissa_bits: int
    """Its mantissa bits."""


class Workspace(NamedTuple):
    """Memory for one step of one block of columns; the names in ``_bits`` are the same memory as integers."""

    a_codes: NDArray[np.uint8]
    """[L, rows]; the values and exponents lie beside them, as for b."""
    a_values: NDArray[Any]
    a_exponents: NDArray[np.int8]
    b_codes: NDArray[np.uint8]
    """[L, BLOCK]; what follows the exponents is [BLOCK]."""
    b_values: NDArray[Any]
    b_exponents: NDArray[np.int8]
    peak: NDArray[np.int8]
    scale: NDArray[Any]
    scale_bits: NDArray[Any]
    unscale: NDArray[Any]
    unscale_bits: NDArray[Any]
    sums: NDArray[Any]
    total: NDArray[np.float64]
    """Zero between two steps."""


def use_wide_vectors() -> None:
    """Nothing, as Python runs it; compiled, it has the function that calls it use the processor's widest vectors.

    A function is compiled before it is put in line: each has to call this for itself.
    """


def _take(operand: Operand, start: int, stop: int, slots: NDArray[np.int64], codes: NDArray[np.uint8]) -> None:
    """Lay out the codes of one step of the rows from ``start`` to ``stop`` as [L, rows]; a slot without a k gets +0."""
    k_total = operand.codes.shape[1]
    for row in range(start, stop):
        row_codes = operand.codes[row]
        for slot in range(slots.shape[0]):
            k = slots[slot]
            codes[slot, row - start] = row_codes[k] if k < k_total else np.uint8(0)


def _decode(
    codes: NDArray[np.uint8], mantissa_bits: int, bias: int, values: NDArray[Any], exponents: NDArray[np.int8]
) -> None:
    """Turn codes into values and exponents, those of subnormals the smallest normal one; fp32 holds it all exactly."""
    use_wide_vectors()
    place = np.float32(1 << mantissa_bits)
    per_place = np.float32(1.0) / place
    bias32, of_power = np.int32(bias), np.int32(127 - bias - mantissa_bits)
    for j in range(codes.shape[0]):
        magnitude = np.float32(codes[j] & 127)
        field = np.int32(magnitude * per_place)  # truncates; vectors are not shifted by a variable
        field = field if field > 1 else np.int32(1)
        power = np.int32(np.int32(field + of_power) << 23).view(np.float32)
        value = (magnitude - np.float32(np.int32(field - 1)) * place) * power
        values[j] = -value if codes[j] > 127 else value
        exponents[j] = np.int8(np.int32(field - bias32)) if magnitude > 0 else np.int8(ZERO_EXPONENT)


def _find_peaks(a: NDArray[np.int8], b: NDArray[np.int8], peak: NDArray[np.int8]) -> None:
    """Find the largest exponent among a step's products: ``a`` [L] of one row by ``b`` [L, BLOCK]."""
    use_wide_vectors()
    peak[:] = ZERO_EXPONENT  # bounds the scale of a step in which everything is zero
    for k in range(0, a.shape[0], UNROLL):
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
        for j in range(peak.shape[0]):
            # Narrowed after every addition: int8 fills four times as many lanes as int32.
            e0, e1, e2, e3 = np.int8(a0 + b0[j]), np.int8(a1 + b1[j]), np.int8(a2 + b2[j]), np.int8(a3 + b3[j])
            e0 = e1 if e1 > e0 else e0
            e2 = e3 if e3 > e2 else e2
            e0 = e2 if e2 > e0 else e0
            highest = peak[j]
            peak[j] = e0 if e0 > highest else highest


def _add_products(a: NDArray[Any], b: NDArray[Any], scale: NDArray[Any], sums: NDArray[Any]) -> None:
    """Add the scaled and truncated products of ``a`` [L] by ``b`` [L, BLOCK] to ``sums``; the conversion truncates."""
    use_wide_vectors()
    integer = sums.dtype.type
    for k in range(0, a.shape[0], UNROLL):
        a0, a1, a2, a3 = a[k], a[k + 1], a[k + 2], a[k + 3]
        b0, b1, b2, b3 = b[k], b[k + 1], b[k + 2], b[k + 3]
        for j in range(sums.shape[0]):
            factor = scale[j]
            t0, t1 = integer(a0 * b0[j] * factor), integer(a1 * b1[j] * factor)
            t2, t3 = integer(a2 * b2[j] * factor), integer(a3 * b3[j] * factor)
            sums[j] = integer(sums[j] + t0 + t1 + t2 + t3)


def _align(c: NDArray[np.float32], peak: NDArray[np.int8], unit: Unit, work: Workspace) -> None:
    """Set the scales to ``2 ** (F - emax)`` and its inverse, and start the sums from the aligned ``c``."""
    use_wide_vectors()
    field = integer = work.sums.dtype.type
    c_bits = c.view(np.int32)
    scale_bits, unscale_bits, scale, sums = work.scale_bits, work.unscale_bits, work.scale, work.sums
    highest, lowest = field(unit.bias + unit.fraction_bits), field(unit.bias - unit.fraction_bits)
    place = field(1 << unit.mantissa_bits)  # vectors are not shifted by a variable in the width of their lanes
    for j in range(c.shape[0]):
        of_c = np.int32(np.int32((c_bits[j] >> 23) & 255) - np.int32(127))
        of_products = np.int32(peak[j])
        exponent = of_c if of_c > of_products else of_products
        scale_bits[j] = field(field(highest - exponent) * place)
        unscale_bits[j] = field(field(lowest + exponent) * place)
    for j in range(c.shape[0]):
        sums[j] = integer(c[j] * scale[j])


def _carry(sums: NDArray[Any], total: NDArray[np.float64]) -> None:
    """Add the sums to the totals and start them anew."""
    use_wide_vectors()
    for j in range(sums.shape[0]):
        total[j] += sums[j]
        sums[j] = 0


def _finish(c: NDArray[np.float32], mask: int, work: Workspace) -> None:
    """Truncate sums and totals together to the significant bits; store them, back in their place, in ``c``."""
    use_wide_vectors()
    sums, total, unscale = work.sums, work.total, work.unscale
    for j in range(c.shape[0]):
        bits = np.int64(np.float64(total[j] + sums[j]).view(np.int64) & mask)
        c[j] = bits.view(np.float64) * unscale[j]
        total[j] = 0.0


def _fma(x: np.float32, y: np.float32, z: np.float32) -> np.float32:
    """``x * y + z`` in fp32 with one rounding, as :func:`fp8ref.emulation.bits.fma_fp32`: float64 rounded to odd."""
    product, addend = np.float64(x) * np.float64(y), np.float64(z)
    total = product + addend
    shadow = total - product
    error = (product - (total - shadow)) + (addend - shadow)
    bits = np.float64(total).view(np.int64)
    inexact_and_even = (error != 0.0) & (abs(total) < np.inf) & ((bits & 1) == 0)
    toward = np.int64(1) if (error > 0.0) == (total > 0.0) else np.int64(-1)
    return np.float32(np.int64(bits + toward if inexact_and_even else bits).view(np.float64))


def promote(
    total: NDArray[np.float32],
    chain: NDArray[np.float32],
    of_row: NDArray[np.float32],
    of_column: NDArray[np.float32],
    order: int,
) -> None:
    """Add a scaled chain [M, N] to ``total`` in place, by an fp32 multiply and an FMA.

    Args:
        total: fp32 [M, N], C-contiguous, as is ``chain``.
        chain: what is scaled.
        of_row: scales [M].
        of_column: scales [N].
        order: JOINED multiplies the two scales first; ROW_FIRST the chain by its row's, ROW_LAST by its column's.
    """
    use_wide_vectors()
    for i in range(total.shape[0]):
        scale, sums, results = of_row[i], total[i], chain[i]
        if order == JOINED:
            for j in range(sums.shape[0]):
                sums[j] = _fma(results[j], scale * of_column[j], sums[j])
        elif order == ROW_FIRST:
            for j in range(sums.shape[0]):
                sums[j] = _fma(results[j] * scale, of_column[j], sums[j])
        else:
            for j in range(sums.shape[0]):
                sums[j] = _fma(results[j] * of_column[j], scale, sums[j])


def run_steps(
    a: Operand, b: Operand, slots: NDArray[np.int64], unit: Unit, work: Workspace, c: NDArray[np.float32]
) -> None:
    """Walk some steps, each a ``fused_dot_add`` on the accumulators ``c`` [M, N] in place.

    Args:
        a: [M, K].
        b: [N, K].
        slots: [steps, L], the k of each product; K for a product that is zero.
        unit: what a step does.
        work: memory for M rows.
        c: fp32, C-contiguous.
    """
    use_wide_vectors()
    m, n = c.shape
    length = slots.shape[1]
    for left in range(0, n, BLOCK):
        right = min(left + BLOCK, n)
        for step in range(slots.shape[0]):
            _take(a, 0, m, slots[step], work.a_codes)
            _take(b, left, right, slots[step], work.b_codes)
            for k in range(length):
                _decode(work.a_codes[k], a.mantissa_bits, a.bias, work.a_values[k], work.a_exponents[k])
                _decode(work.b_codes[k], b.mantissa_bits, b.bias, work.b_values[k], work.b_exponents[k])
            sums, total, peak = work.sums[: right - left], work.total[: right - left], work.peak[: right - left]
            for i in range(m):
                _find_peaks(work.a_exponents[:, i], work.b_exponents, peak)
                _align(c[i, left:right], peak, unit, work)
                for k in range(0, length, unit.group):
                    end = min(k + unit.group, length)
                    _add_products(work.a_values[k:end, i], work.b_values[k:end], work.scale, sums)
                    if end < length:
                        _carry(sums, total)
                _finish(c[i, left:right], unit.mask, work)
