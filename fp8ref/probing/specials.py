"""What a product does with subnormals, NaN, Inf and zeros, and how its result is rounded to the output type."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ref.probing.arithmetic import Outcome
from fp8ref.probing.rounding import BITS, OUTPUTS
from fp8ref.probing.subject import Subject, Trial, factors
from fp8ref.probing.tree import Masks


@dataclass(frozen=True)
class Special:
    """One behaviour: a name, what was seen, and the trials that show it."""

    name: str
    seen: str | None
    evidence: list[Outcome]


def bits_of(x: Tensor) -> str:
    """The bits of a one-element tensor, such as 0x7FC0."""
    width = x.element_size()
    value = int(x.reshape(1).contiguous().view(BITS[width]).item())
    return f"0x{value & (1 << 8 * width) - 1:0{2 * width}X}"


def _name(x: Tensor) -> str:
    value = x.double().item()
    if math.isnan(value):
        return f"NaN ({bits_of(x)})"
    return {math.inf: "+Inf", -math.inf: "-Inf"}.get(
        value, f"{'-' if math.copysign(1, value) < 0 else '+'}{abs(value):g}"
    )


def _ask(subject: Subject, name: str, trial: Trial) -> Special:
    x, y = torch.zeros(1, subject.k), torch.zeros(1, subject.k)
    for place, (left, right) in trial.items():
        x[0, place], y[0, place] = left, right
    answer = subject.sums(x, y)[0]
    return Special(name, _name(answer), [(trial, answer.double().item())])


def find_specials(subject: Subject, masks: Masks, out: torch.dtype) -> list[Special]:
    """Subnormal operands, NaN, Inf and the signs of zeros, as far as the operands' formats have them."""
    one = factors(0, 1.0, masks.left, masks.right)
    low = 2.0**masks.left.lowest
    # A subnormal times a large value, so that the result is seen in any output type.
    subnormal = {0: (3 * low, 2.0 ** min(masks.right.high, -masks.left.lowest))}
    exact = 3 * low * subnormal[0][1]
    answer = subject.ask([subnormal])[0]
    words = "kept" if answer == exact else "flushed to zero" if answer == 0 else f"{answer:g} in place of {exact:g}"
    found = [Special("subnormal operands", words, [(subnormal, answer)])]
    nan, inf = math.nan, math.inf
    cases: list[tuple[str, Trial]] = [
        ("NaN times 1", {0: (nan, one[1])}),
        ("NaN times 0", {0: (nan, 0.0)}),
        ("no products at all", {}),
        ("-0 times 1", {0: (-0.0, one[1])}),
        ("1 - 1", {0: one, 1: (-one[0], one[1])}),
    ]
    if 2.0**masks.big > torch.finfo(out).max:
        cases.append(("overflow of the output", {0: factors(masks.big, 1.0, masks.left, masks.right)}))
    if math.isinf(float(torch.tensor(inf).to(subject.dtype_a).float())):
        cases += [
            ("Inf times 1", {0: (inf, one[1])}),
            ("Inf times 0", {0: (inf, 0.0)}),
            ("Inf - Inf", {0: (inf, one[1]), 1: (-inf, one[1])}),
        ]
    return found + [_ask(subject, name, trial) for name, trial in cases]


def find_output(subject: Subject, masks: Masks, out: torch.dtype) -> Special:
    """How sums of two products that lie between two output values are rounded."""
    if out in (torch.float32, torch.float64):
        return Special("output rounding", "none: the output is as wide as the sum", [])
    digits = round(-math.log2(torch.finfo(out).eps))
    # The second product half a unit of the first, or a little more or less.
    trials: list[Trial] = []
    for significand in (1.0, 1.5, 1.25, 1.75):
        for exponent, small in ((-1, 1.0), (-1, 1.5), (-2, 1.0), (-2, 1.5)):
            for sign in (1, -1):
                try:
                    big = factors(0, significand, masks.left, masks.right)
                    low = factors(exponent - digits, small, masks.left, masks.right)
                except ValueError:
                    continue
                last = {} if digits < 3 else {2: factors(-digits, 1.0, masks.left, masks.right)}
                trial = {0: (sign * big[0], big[1]), 1: (sign * low[0], low[1])}
                trials += [trial, {**trial, **{k: (sign * x, y) for k, (x, y) in last.items()}}]
    answers = subject.ask(trials)
    exact = torch.tensor([sum(x * y for x, y in trial.values()) for trial in trials], dtype=torch.float32)
    fits = [name for name, rounding in OUTPUTS.items() if rounding(exact, out).double().tolist() == answers]
    return Special("output rounding", fits[0] if len(fits) == 1 else None, list(zip(trials, answers, strict=True))[:4])
