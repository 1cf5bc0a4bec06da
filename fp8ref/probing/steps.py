"""A step of a matrix instruction for any operand format and rounding, in float64: what the oracle has no unit for.

For FP8 with truncation the oracle (:func:`fp8ref.accumulate`) is used; this serves fp16 and bf16 operands, and
accumulators that round to nearest, and is held against the oracle where both apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fp8ref.probing.subject import range_of

Rounding = Literal["truncate", "nearest"]
Accumulator = Literal["float32", "float16"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
_LARGEST_FP16 = torch.finfo(torch.float16).max


@dataclass(frozen=True)
class Arithmetic:
    """What a step does with its terms.

    Attributes:
        fraction_bits: F, bits kept of every term below the largest exponent; None where nothing is cut off.
        significant_bits: B, of a step's result.
        rounding: of a step's result.
        accumulator: the range of a step's result: float16 ends in Inf from 65520 on, and in multiples of 2**-24.
    """

    fraction_bits: int | None
    significant_bits: int
    rounding: Rounding
    accumulator: Accumulator = "float32"


def run_chain(a: Tensor, b: Tensor, steps: Sequence[Sequence[int]], ways: Sequence[Arithmetic]) -> Tensor:
    """One chain from +0, computed in several ways at once: fp32 [ways, ...] from a and b [..., K], which broadcast.

    ``steps`` lists the products of each step, which must be finite. Of the ways either all cut terms off or none does.
    """
    shape = torch.broadcast_shapes(a.shape[:-1], b.shape[:-1])
    total = torch.zeros(len(ways), *shape, dtype=torch.float32, device=a.device)
    low_a, low_b = range_of(a.dtype).low, range_of(b.dtype).low
    x, y = a.double(), b.double()
    plain = ways[0].fraction_bits is None
    scale_x, scale_y = (x, y) if plain else (_pow2(x, low_a), _pow2(y, low_b))
    column = [len(ways)] + [1] * len(shape)
    last_bit = torch.tensor([2.0 ** -(way.fraction_bits or 0) for way in ways], dtype=torch.float64).view(column)
    width = torch.tensor([2.0 ** (1 - way.significant_bits) for way in ways], dtype=torch.float64).view(column)
    nearest = torch.tensor([way.rounding == "nearest" for way in ways]).view(column)
    half = torch.tensor([way.accumulator == "float16" for way in ways]).view(column)
    last_bit, width, nearest, half = (t.to(a.device) for t in (last_bit, width, nearest, half))
    least, finest = torch.where(half, 2.0**-14, 0.0).double(), torch.where(half, 2.0**-24, 0.0).double()
    touched = [(flat != 0).flatten(0, -2).any(0) for flat in (x, y)]
    silent = False
    for step in steps:
        places = torch.tensor(step, device=a.device)
        before, silent = silent, not bool((touched[0] & touched[1])[places].any())
        if before and silent:
            continue  # zeros change c at most once
        products = x[..., places] * y[..., places]
        if plain:
            assert len(step) == 1, "without alignment, only one product at a time has one right answer in float64"
            total = total + products[..., 0].float()
            continue
        scales = torch.where(products == 0, 0.0, scale_x[..., places] * scale_y[..., places]).amax(-1)
        addend = total.double()
        largest = torch.maximum(scales, torch.where(addend == 0, 0.0, _pow2(addend, -126).maximum(least)))
        unit = torch.where(largest == 0, 1.0, largest) * last_bit
        exact = ((products / unit[..., None]).trunc().sum(-1) + (addend / unit).trunc()) * unit
        coarse = (_pow2(exact, -1000) * width).maximum(finest)
        scaled = torch.where(exact == 0, 0.0, exact / coarse)
        total = (torch.where(nearest, scaled.round(), scaled.trunc()) * coarse + 0.0).float()
        total = torch.where(half & (total.abs() > _LARGEST_FP16), torch.inf * total.sign(), total)
        total = torch.where(addend.isinf(), addend.float(), total)
    return total


def _pow2(x: Tensor, low: int) -> Tensor:
    """``2 ** e`` of each value, e at least ``low``."""
    _, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), (exponent - 1).clamp(min=low))
