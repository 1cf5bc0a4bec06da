"""Rounding to FP8, once, from any float dtype: nearest even, toward zero, stochastic.

Two paths give the same codes. Nearest even from at most 32 bits clamps and lets torch convert, because inside the
format's range torch's conversion is nearest even on every version (beyond it, versions differ). Everything else is
written out in float64, which holds each input exactly: scale by a power of two so that neighbours are one apart,
split into a whole number and a fraction, decide from the fraction. No step of it rounds.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from fp8ref.emulation.checks import check_bool, check_tensor
from fp8ref.emulation.formats import FORMATS, Fp8Format

Rounding = Literal["nearest_even", "toward_zero", "stochastic"]

RANDOM_BITS = 62
"""Random bits drawn for each element by stochastic rounding; probabilities are multiples of 2**-62."""

_SOURCE_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# torch keeps an operation on this many elements on one thread, and its temporaries in that core's cache.
_GRAIN = 1 << 15
_DEVICE_CHUNK = 1 << 24


def round_to_fp8(
    x: Tensor,
    dtype: torch.dtype,
    *,
    rounding: Rounding = "nearest_even",
    saturate: bool = True,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Round ``x`` to FP8, once: float64 does not pass through float32, as it does in torch.

    ========================  ======================  ==============================  =========================
    input                     ``saturate=True``       ``saturate=False``, e4m3        ``saturate=False``, e5m2
    ========================  ======================  ==============================  =========================
    finite, rounds past max   +-448, +-57344          NaN (nearest: ``|x|`` > 464)    +-Inf (``|x|`` >= 61440)
    +-Inf                     +-448, +-57344          NaN                             +-Inf
    NaN, either sign          0x7F                    0x7F                            0x7F
    ========================  ======================  ==============================  =========================

    "Rounds past max" means: rounded as if larger exponents existed. So ``toward_zero`` never takes a finite input
    past the maximum (IEEE 754), and ``stochastic`` takes 450 to 448 or, with probability 2/32, to the 480 that e4m3
    lacks. Signed zeros are kept, also where a negative input underflows. ``saturate=True`` with nearest even is the
    PTX instruction ``cvt.rn.satfinite`` (PTX ISA, "cvt"); every NaN written is 0x7F, as there.

    Stochastic: between neighbours lo < ``|x|`` < hi the magnitude becomes hi with probability p = (``|x|`` - lo) /
    (hi - lo): when a whole number drawn from 62 random bits is below p * 2**62. That is exact wherever p * 2**62 is
    whole: for all of float16, bfloat16 from ``|x|`` >= 2**-64 on, float32 from 2**-48, float64 from 2**-19; for smaller
    inputs p is cut down to a multiple of 2**-62. A value that the format holds never moves. Bits are drawn in
    row-major order of ``x`` whatever its strides, so the result depends on the generator's state, the values and the
    kind of device only; torch's CPU and CUDA generators give different bits.

    Args:
        x: float64, float32, bfloat16 or float16, any shape, strides and device. It is not changed.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        rounding: ``"nearest_even"``, ``"toward_zero"`` or ``"stochastic"``.
        saturate: clamp to the largest finite value instead of overflowing.
        generator: for ``"stochastic"``: a generator on ``x.device``; None takes torch's default one there
            (``torch.manual_seed``).

    Returns:
        A tensor of ``dtype``, detached, with the shape, device and (as in ``Tensor.to``) memory layout of ``x``.

    Raises:
        TypeError: ``x`` is no dense tensor with values in one of those four dtypes, or ``dtype``, ``saturate`` or
            ``generator`` has the wrong type.
        ValueError: an unknown ``rounding``, a generator without ``"stochastic"`` or on another device than ``x``.

    >>> x = torch.tensor([1.0625 + 2**-40, 464.0, 1e9, -1e-9], dtype=torch.float64)
    >>> round_to_fp8(x, torch.float8_e4m3fn).tolist()
    [1.125, 448.0, 448.0, -0.0]
    >>> round_to_fp8(x, torch.float8_e4m3fn, rounding="toward_zero", saturate=False).tolist()
    [1.0, 448.0, 448.0, -0.0]
    >>> half = torch.full((1000,), 1.0625)
    >>> coins = round_to_fp8(half, torch.float8_e4m3fn, rounding="stochastic", generator=torch.Generator())
    >>> sorted(set(coins.tolist()))
    [1.0, 1.125]
    """
    _check_arguments(x, dtype, rounding, saturate, generator)
    fmt = FORMATS[dtype]
    x = x.detach()
    codes = torch.empty_like(x, dtype=torch.uint8)
    if rounding == "stochastic":
        # Row-major, not memory order: a transposed view must meet the same random bits as its copy.
        source, target = x.contiguous(), torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    else:
        source, target = x if x.stride() == codes.stride() else x.clone(), codes
    flat_source = source.as_strided((x.numel(),), (1,))
    flat_target = target.as_strided((x.numel(),), (1,))
    chunk = _chunk(x.device)
    if rounding == "nearest_even" and x.dtype != torch.float64:
        _round_nearest_narrow(flat_source, flat_target, fmt, saturate, chunk)
    else:
        for piece, out in zip(torch.split(flat_source, chunk), torch.split(flat_target, chunk), strict=True):
            out.copy_(_round_exactly(piece, fmt, rounding, saturate, generator))
    if target is not codes:
        codes = target if target.stride() == codes.stride() else codes.copy_(target)
    return codes.view(dtype)


def _check_arguments(x: object, dtype: object, rounding: object, saturate: object, generator: object) -> None:
    """Raise for whatever ``round_to_fp8`` cannot take; see its ``Raises``."""
    x = check_tensor(x, "x")
    if x.dtype in FORMATS:
        raise TypeError(f"x: got {x.dtype}, already FP8; widen it first, x.to(torch.float32) is exact")
    if x.dtype not in _SOURCE_DTYPES:
        raise TypeError(
            f"x: got {x.dtype}; give float64, float32, bfloat16 or float16, e.g. x.to(torch.float64) "
            "(exact for integers up to 2**53)"
        )
    if not isinstance(dtype, torch.dtype) or dtype not in FORMATS:
        raise TypeError(f"dtype: got {dtype!r}; give torch.float8_e4m3fn or torch.float8_e5m2")
    if rounding not in get_args(Rounding):
        raise ValueError(f"rounding: got {rounding!r}; give one of {list(get_args(Rounding))}")
    check_bool(saturate, "saturate")
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator: got {type(generator).__name__}; give a torch.Generator or None")
    if rounding != "stochastic":
        raise ValueError(f'generator: given with rounding={rounding!r}, which draws nothing; use "stochastic" or None')
    place = generator.device
    if place.type != x.device.type or place.index not in (None, x.device.index):
        raise ValueError(f"generator: is on {place} but x is on {x.device}; use torch.Generator(device=x.device)")


def _round_nearest_narrow(x: Tensor, codes: Tensor, fmt: Fp8Format, saturate: bool, chunk: int) -> None:
    """Write the nearest-even codes of float32, bfloat16 or float16 ``x`` [n] to uint8 ``codes`` [n]."""
    # One scratch that stays in cache: fresh pages for a clamped copy of x would cost more than the arithmetic.
    scratch = torch.empty(min(chunk, x.numel()), dtype=x.dtype, device=x.device)
    midpoint = fmt.max + _step_at_max(fmt) / 2
    max_is_odd = bool(fmt.max_code & 1)
    for piece, out in zip(torch.split(x, chunk), torch.split(codes, chunk), strict=True):
        clamped = scratch[: piece.numel()]
        torch.clamp(piece, -fmt.max, fmt.max, out=clamped)
        out.view(fmt.dtype).copy_(clamped)
        if not saturate:
            # The code after max's is Inf in e5m2 and NaN in e4m3.
            magnitude = torch.abs(piece, out=clamped)
            out.add_(magnitude >= midpoint if max_is_odd else magnitude > midpoint)
        # torch keeps the sign of a NaN. A sync is free on a CPU, and there a look is cheaper than the write.
        if out.device.type != "cpu" or (out.numel() and int(out.max()) == 0xFF):
            out.masked_fill_(out == 0xFF, fmt.nan_code)


def _round_exactly(
    x: Tensor, fmt: Fp8Format, rounding: Rounding, saturate: bool, generator: torch.Generator | None
) -> Tensor:
    """Return the codes, int64 [n], of ``x`` [n] in any source dtype and mode."""
    value = x.to(torch.float64)
    nan = value.isnan()
    # Everything from the first value past max on overflows, and this keeps the codes inside seven bits.
    magnitude = value.abs().clamp_(max=fmt.max + _step_at_max(fmt)).masked_fill_(nan, 0.0)
    exponent = ((magnitude.view(torch.int64) >> 52) - 1023).clamp_(min=fmt.e_min)
    # A power of two from its bits: torch.pow and ldexp are inexact on CUDA.
    per_step = ((1023 + fmt.mantissa_bits - exponent) << 52).view(torch.float64)
    steps = magnitude * per_step
    whole = steps.to(torch.int64)
    fraction = steps - whole
    codes = whole + ((exponent - fmt.e_min) << fmt.mantissa_bits)
    if rounding == "nearest_even":
        codes += (fraction > 0.5) | ((fraction == 0.5) & (codes & 1).bool())
    elif rounding == "stochastic":
        bits = torch.empty_like(codes).random_(0, 1 << RANDOM_BITS, generator=generator)
        codes += bits < (fraction * 2.0**RANDOM_BITS).to(torch.int64)
    if saturate or rounding == "toward_zero":
        codes.clamp_(max=fmt.max_code)
    if not saturate:
        codes.masked_fill_(value.isinf(), fmt.max_code + 1)
    if fmt.inf_code is None:
        nan |= codes > fmt.max_code
    codes |= value.signbit().to(torch.int64) << 7
    return codes.masked_fill_(nan, fmt.nan_code)


def _chunk(device: torch.device) -> int:
    """Return how many elements to take at a time."""
    if device.type != "cpu":
        return _DEVICE_CHUNK
    # A few threads do no better than one here, and wait for each other at every step on a machine that is busy.
    threads = torch.get_num_threads()
    return _GRAIN if threads <= 4 else _GRAIN * threads


def _step_at_max(fmt: Fp8Format) -> float:
    """Return the distance between neighbours just below ``fmt.max``."""
    return float(2.0 ** (fmt.e_max - fmt.mantissa_bits))
