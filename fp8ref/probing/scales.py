"""How scales and a bias meet the sum: every order of operations is computed, and those that differ anywhere are out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ref.emulation.bits import fma_fp32
from fp8ref.emulation.scales import Scaling, scale_shape
from fp8ref.probing.rounding import OUTPUTS
from fp8ref.probing.subject import Subject

Epilogue = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Result from the fp32 sum, scale_a and scale_b, which broadcast."""

FORMULAS: dict[str, Epilogue] = {
    "acc * (scale_a * scale_b)": lambda acc, sa, sb: acc * (sa * sb),
    "fma(acc, scale_a * scale_b, +0)": lambda acc, sa, sb: fma_fp32(acc, sa * sb + 0 * acc, torch.zeros_like(acc)),
    "(acc * scale_b) * scale_a": lambda acc, sa, sb: (acc * sb) * sa,
    "(acc * scale_a) * scale_b": lambda acc, sa, sb: (acc * sa) * sb,
}
BLOCK_FORMULAS: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "fma(chain * scale_a, scale_b, total)": lambda t, c, sa, sb: fma_fp32(c * sa, sb + 0 * c, t),
    "fma(chain * scale_b, scale_a, total)": lambda t, c, sa, sb: fma_fp32(c * sb, sa + 0 * c, t),
    "fma(chain, scale_a * scale_b, total)": lambda t, c, sa, sb: fma_fp32(c, sa * sb + 0 * c, t),
    "total + chain * (scale_a * scale_b)": lambda t, c, sa, sb: t + c * (sa * sb),
    "total + (chain * scale_a) * scale_b": lambda t, c, sa, sb: t + (c * sa) * sb,
    "total + (chain * scale_b) * scale_a": lambda t, c, sa, sb: t + (c * sb) * sa,
}
SEPARATE = "added in fp32 after the scales, rounded on its own"
FUSED = "fused with the last product of the scales"
LATE = "added after rounding to the output"
BIASES = (SEPARATE, FUSED, LATE)


@dataclass(frozen=True)
class Scales:
    """What was found about scales and bias: names of formulas, those that no input told apart listed together."""

    kinds: tuple[Scaling, Scaling]
    formulas: list[str]
    bias: list[str] | None
    compared: int


def ones(kinds: tuple[Scaling, Scaling], m: int, n: int, k: int, device: str) -> tuple[Tensor, Tensor]:
    """Scales of one, in the oracle's layout."""
    shapes = scale_shape(kinds[0], m, k), scale_shape(kinds[1], n, k)[::-1]
    return torch.ones(shapes[0], device=device), torch.ones(shapes[1], device=device)


def _draw(like: Tensor, generator: torch.Generator, spread: float) -> Tensor:
    """Scales of any significand, their exponents uniform within ``spread``."""
    exponents = (torch.rand(like.shape, generator=generator) * 2 - 1) * spread
    signs = torch.where(torch.rand(like.shape, generator=generator) < 0.2, -1.0, 1.0)
    return (signs * (1 + torch.rand(like.shape, generator=generator)) * 2.0 ** exponents.round()).to(like.device)


SIZES = ((1, 0, 0), (6, 0, 0), (40, 0, 0), (3, 70, 58), (3, 120, -124), (3, -124, 120), (3, 58, 70), (66, 0, 0))
"""Spreads of scales, and powers of two beside them: the product of scales overflows, or a first product underflows."""


def _sums(subject: Subject, generator: torch.Generator, *, small: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Operands with one product of a row in every block of 128: each chain is exact whatever the unit."""
    x, y = torch.zeros(subject.m, subject.k), torch.zeros(subject.n, subject.k)
    x[:, ::128] = torch.randint(-8, 9, x[:, ::128].shape, generator=generator).float()
    y[:, ::128] = torch.randint(1, 9, y[:, ::128].shape, generator=generator).float()
    if small:
        y *= 2.0**-6
    a, b = subject.operands(x, y)
    return a, b, (x[:, None, ::128] * y[None, :, ::128]).to(subject.device)


def find_scales(
    subject: Subject,
    kinds: tuple[Scaling, Scaling],
    out: torch.dtype,
    *,
    with_bias: bool,
    rounding: str,
    draws: int = 16,
) -> Scales:
    """Call the subject with scales of many sizes, zeros and overflow among them, and keep the formulas that agree."""
    generator = torch.Generator().manual_seed(6)
    blocks = "1x128" in kinds
    names: list[str] = list(BLOCK_FORMULAS if blocks else FORMULAS)
    biases: list[str] | None = list(BIASES) if with_bias else None
    compared = 0
    for draw in range(draws):
        spread, up_a, up_b = SIZES[draw % len(SIZES)]
        left, right = ones(kinds, subject.m, subject.n, subject.k, subject.device)
        left, right = (_draw(x, generator, spread) * 2.0**up for x, up in ((left, up_a), (right, up_b)))
        a, b, chains = _sums(subject, generator, small=up_a != up_b)
        if not blocks:
            chains = chains[..., :1]
            a[:, 1:] = torch.zeros_like(a[:, 1:])
        seen = subject.multiply(a, b, (left, right))
        names = [
            name for name in names if _same(OUTPUTS[rounding](_apply(name, chains, kinds, left, right), out), seen)
        ]
        compared += seen.numel()
        if biases is not None and names:
            bias_type = torch.float16 if out == torch.float16 else torch.bfloat16
            bias = _draw(torch.ones(subject.n, device=subject.device), generator, min(spread, 12)).to(bias_type)
            biases = _fitting(subject, biases, names[0], (a, b, left, right, bias), chains[..., 0], out, rounding)
            compared += seen.numel()
    if biases is not None and names:
        *call, bias = _fused_apart(subject, kinds, 10 if out == torch.float16 else 20)
        three = torch.full((subject.m, subject.n), 3.0, device=subject.device)
        operands = (
            call[0],
            call[1],
            call[2],
            call[3],
            bias.to(torch.float16 if out == torch.float16 else torch.bfloat16),
        )
        biases = _fitting(subject, biases, names[0], operands, three, out, rounding)
    return Scales(kinds, names, biases, compared)


def _fitting(
    subject: Subject,
    biases: list[str],
    formula: str,
    call: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    acc: Tensor,
    out: torch.dtype,
    rounding: str,
) -> list[str]:
    """Of some ways of adding a bias those that give what the subject gives."""
    a, b, left, right, bias = call
    seen = subject.multiply(a, b, (left, right), bias)
    return [way for way in biases if _same(_with_bias(way, formula, acc, left, right, bias, out, rounding), seen)]


def _apply(name: str, chains: Tensor, kinds: tuple[Scaling, Scaling], left: Tensor, right: Tensor) -> Tensor:
    """The result of a formula; chains [M, N, blocks]."""
    if name in FORMULAS:
        return FORMULAS[name](chains[..., 0], left, right)
    m, n, count = chains.shape
    rows = left.repeat_interleave(128, 0)[:m] if kinds[0] == "128x128" else left
    columns = right.repeat_interleave(128, 1)[:, :n] if kinds[1] == "128x128" else right
    total = torch.zeros(m, n, device=chains.device)
    for block in range(count):
        total = BLOCK_FORMULAS[name](total, chains[..., block], rows[:, block : block + 1], columns[block : block + 1])
    return total


def _with_bias(
    way: str, formula: str, acc: Tensor, left: Tensor, right: Tensor, bias: Tensor, out: torch.dtype, rounding: str
) -> Tensor:
    """The result with a bias, [M, N]."""
    wide = bias.float().expand_as(acc)
    if way == FUSED:
        first, last = acc, left * right
        if formula.startswith("(acc * scale_b)"):
            first, last = acc * right, left
        elif formula.startswith("(acc * scale_a)"):
            first, last = acc * left, right
        return OUTPUTS[rounding](fma_fp32(first, last.expand_as(acc), wide), out)
    scaled = FORMULAS[formula](acc, left, right)
    if way == SEPARATE:
        return OUTPUTS[rounding](scaled + wide, out)
    return OUTPUTS[rounding](OUTPUTS[rounding](scaled, out).float() + wide, out)


def _fused_apart(
    subject: Subject, kinds: tuple[Scaling, Scaling], up: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Operands, scales and a bias for which a fused addition gives ``2**(up - 25)`` and a separate one 0.

    3 * fl(1/3) is 1 + 2**-25 and rounds to 1; the factor ``2**up`` makes the difference visible in the output.
    """
    left, right = ones(kinds, subject.m, subject.n, subject.k, subject.device)
    x, y = torch.zeros(subject.m, subject.k), torch.zeros(subject.n, subject.k)
    x[:, 0], y[:, 0] = 3.0, 1.0
    a, b = subject.operands(x, y)
    factor = torch.tensor(1 / 3) * 2.0**up
    return a, b, left * factor, right, torch.full((subject.n,), -(2.0**up), device=subject.device)


def _same(expected: Tensor, seen: Tensor) -> bool:
    """Equal bits, NaN as NaN."""
    one, two = expected.double(), seen.double()
    both_nan = one.isnan() & two.isnan()
    return bool((both_nan | ((one == two) & (one.signbit() == two.signbit()))).all())
