"""What a step does with its terms: bits kept below the largest exponent, rounding, width of the result."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from fp8ref.probing.model import Model, build, dots, same_arithmetic
from fp8ref.probing.rounding import NEAREST, OUTPUTS
from fp8ref.probing.steps import ROUNDINGS, Accumulator, Arithmetic, Rounding
from fp8ref.probing.structure import Structure, period
from fp8ref.probing.subject import Subject, Trial, factors
from fp8ref.probing.tree import SMALLEST, Masks

Outcome = tuple[Trial, float]
"""A trial and its answer."""


@dataclass
class Arithmetics:
    """Findings of :func:`find_arithmetic`; None is "not determined"."""

    fraction_bits: int | None = None
    alignment: str | None = None
    c_bits: int | None = None
    significant_bits: tuple[int, int] | None = None
    result_rounding: Rounding | None = None
    accumulator: Accumulator | None = None
    total_rounding: str | None = None
    evidence: dict[str, list[Outcome]] = field(default_factory=dict)
    model: Model | None = None


LARGEST = {torch.float16: 15, torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}
"""Exponents of the largest powers of two of output types; fp32 otherwise."""


class Places:
    """Products to use: of the first steps, of the last step of a chain, and of later chains."""

    def __init__(self, structure: Structure, k: int) -> None:
        """Take the places from the found structure."""
        self.k = k
        self.steps = structure.steps
        self.chain = structure.chains[0] if structure.chains else k
        self.chains = -(-k // self.chain)
        steps = period(structure.steps)
        cycle = sum(map(len, steps))
        start = (self.chain - 1) // cycle * cycle
        ends = [tuple(place + start for place in step if place + start < self.chain) for step in steps]
        self.final = [step for step in ends if step][-1]

    def other(self, number: int) -> int:
        """A product of a later chain: that of the first chain's first step, moved."""
        return self.steps[0][0] + number * self.chain


def find_arithmetic(subject: Subject, masks: Masks, structure: Structure, out: torch.dtype) -> Arithmetics:
    """Measure the arithmetic of a step of the structure."""
    found, places = Arithmetics(), Places(structure, subject.k)
    _kept(subject, masks, places, found, out)
    _candidates(subject, masks, places, structure, found, out)
    _total(subject, masks, places, found, out)
    return found


def _value(masks: Masks, exponent: int, significand: float = 1.0, sign: int = 1) -> tuple[float, float]:
    x, y = factors(exponent, significand, masks.left, masks.right)
    return sign * x, y


def _scan(
    subject: Subject, found: Arithmetics, name: str, trials: Sequence[Trial], exponents: Sequence[int], out: torch.dtype
) -> int | None:
    """How many of the trials, from the first on, come out as ``2**exponents``; None if a later one does again."""
    least, most = SMALLEST.get(out, -149), LARGEST.get(out, 127)
    wanted = [2.0**e for e in exponents]
    answers = subject.ask_raised(trials, exponents, least, most)
    right = [answer == want for answer, want in zip(answers, wanted, strict=True)]
    if subject.scales is None:
        # What is too large for the output is not seen; the first that is must have survived.
        unseen = sum(want > 2.0**most for want in wanted)
        right = [right[min(unseen, len(right) - 1)] if i < unseen else seen for i, seen in enumerate(right)]
    count = right.index(False) if False in right else len(right)
    last = [i for i in (count - 1, count) if 0 <= i < len(trials)]
    found.evidence[name] = [(trials[i], answers[i]) for i in last]
    return None if any(right[count:]) else count


def _ask_near(subject: Subject, trials: Sequence[Trial], exponent: int, out: torch.dtype) -> list[float]:
    """Answers to trials of up to ``2**(exponent + 2)``, raised or lowered where the output is narrow."""
    if subject.scales is None or out.itemsize > 1:
        return subject.ask(trials)
    kept, subject.lift = subject.lift, -exponent
    answers = subject.ask(trials)
    subject.lift = kept
    return answers


def _kept(subject: Subject, masks: Masks, places: Places, found: Arithmetics, out: torch.dtype) -> None:
    """F: the smallest term that survives +M and -M of its own step; and the same for c from the step before."""
    plus, minus = _value(masks, masks.big), _value(masks, masks.big, sign=-1)
    exponents = range(masks.big, masks.small - 1, -1)
    first, second = places.steps[0], places.steps[1] if len(places.steps) > 1 else ()
    if len(first) >= 3:
        own = [{first[0]: plus, first[1]: minus, first[2]: _value(masks, e)} for e in exponents]
        count = _scan(subject, found, "fraction_bits", own, exponents, out)
        found.fraction_bits = None if count in (None, 0, len(exponents)) else count - 1
    if len(second) >= 2:
        carried = [{first[0]: _value(masks, e), second[0]: plus, second[1]: minus} for e in exponents]
        count = _scan(subject, found, "c_bits", carried, exponents, out)
        found.c_bits = None if count in (None, 0, len(exponents)) else count - 1
    if found.fraction_bits is not None:
        _alignment(subject, masks, places, found, out)


def _alignment(subject: Subject, masks: Masks, places: Places, found: Arithmetics, out: torch.dtype) -> None:
    """Which way a term is cut at its last kept bit."""
    assert found.fraction_bits is not None
    last, first = masks.big - found.fraction_bits, places.steps[0]
    shares = [(0, 1.5), (0, 1.75), (-1, 1.0), (-1, 1.5), (-1, 1.75), (-2, 1.0), (1, 1.25), (1, 1.75)]
    shares = [(e, s) for e, s in shares if last + e >= masks.left.lowest + masks.right.lowest + 2]
    trials: list[Trial] = []
    exact: list[float] = []
    for exponent, significand in shares:
        for sign in (1, -1):
            cut = {first[0]: _value(masks, masks.big), first[1]: _value(masks, masks.big, sign=-1)}
            trials.append({**cut, first[2]: _value(masks, last + exponent, significand, sign)})
            exact.append(sign * significand * 2.0**exponent)
    answers = [answer / 2.0**last for answer in _ask_near(subject, trials, last, out)]
    found.evidence["alignment"] = list(zip(trials, (a * 2.0**last for a in answers), strict=True))[:6]
    found.alignment = _name_of(exact, answers)


MODES: dict[str, Callable[[float], float]] = {
    "toward zero": lambda v: float(int(v)),
    "downward": lambda v: float(v // 1),
    "to nearest, ties to even": lambda v: float(round(v)),
    "to nearest, ties away from zero": lambda v: float(int(abs(v) + 0.5)) * (1 if v > 0 else -1),
}


def _name_of(exact: list[float], answers: list[float]) -> str | None:
    """The way of rounding to integers that all the answers agree with, if it is one alone."""
    fits = [name for name, mode in MODES.items() if [mode(v) for v in exact] == answers]
    return fits[0] if len(fits) == 1 else None


def _candidates(
    subject: Subject, masks: Masks, places: Places, structure: Structure, found: Arithmetics, out: torch.dtype
) -> None:
    """B and the rounding of a result: every candidate is computed, and those that differ anywhere are out."""
    trials = [
        *_beyond_fp16(masks, places),
        *_wide_sums(masks, places, found.fraction_bits, out, -subject.lift),
        *_ties(masks, places, found.fraction_bits, out, -subject.lift),
    ]
    answers = subject.ask(trials)
    found.evidence["significant_bits"] = list(zip(trials, answers, strict=True))[-4:]
    x, y = torch.zeros(len(trials), subject.k), torch.zeros(len(trials), subject.k)
    for row, trial in enumerate(trials):
        for place, (left, right) in trial.items():
            x[row, place], y[row, place] = left, right
    a, b = x.to(subject.dtype_a), y.to(subject.dtype_b)
    fractions = found.fraction_bits if found.fraction_bits is not None else found.c_bits
    fits: list[Arithmetic] = []
    for ways in _ways(structure, fractions):
        if not ways:
            continue
        sums = dots(structure, ways, a, b) * 2.0**subject.lift
        results = (OUTPUTS[NEAREST](sums, out).double() * 2.0**-subject.lift).tolist()
        fits += [way for way, result in zip(ways, results, strict=True) if result == answers]
    if fits:
        bits = [way.significant_bits for way in fits]
        found.significant_bits = (min(bits), max(bits))
        if found.fraction_bits is None and len({way.fraction_bits for way in fits}) == 1:
            found.fraction_bits = fits[0].fraction_bits
        found.result_rounding = fits[0].rounding if len({way.rounding for way in fits}) == 1 else None
        found.accumulator = fits[0].accumulator if len({way.accumulator for way in fits}) == 1 else None
        # Where several cannot be told apart, one that is known, else the widest: fp32 holds no more.
        models = [build(structure, way, subject.k) for way in sorted(fits, key=lambda way: -way.significant_bits)]
        known = [model for model in models if model.unit is not None and same_arithmetic(model.unit)]
        found.model = (known or models)[0]


def _ways(structure: Structure, fraction_bits: int | None) -> Iterable[list[Arithmetic]]:
    """What to try: with F as found; where one product is added at a time, F may hide behind B, or there be none."""
    if structure.products_per_step == 1:
        yield [Arithmetic(None, 24, "nearest")]
    if fraction_bits is not None:
        wide = [Arithmetic(fraction_bits, bits, rounding) for rounding in ROUNDINGS for bits in range(2, 25)]
        yield wide + [Arithmetic(fraction_bits, 11, rounding, "float16") for rounding in ROUNDINGS]
    elif structure.products_per_step == 1:
        yield [Arithmetic(kept, bits, "truncate") for bits in range(2, 25) for kept in range(2, 34)]


def _wide_sums(masks: Masks, places: Places, fraction_bits: int | None, out: torch.dtype, lift: int) -> Iterable[Trial]:
    """Sums whose leading bit lies above the largest exponent, with small last bits.

    In the last step of a chain, for the next step would cut c to F + 1 bits; seen in the result, or once the next chain
    has taken the large part away. And in the first step, with the large part taken away in the next.
    """
    kept = fraction_bits if fraction_bits is not None else 24
    first, final = places.steps[0], places.final
    later = places.steps[1] if len(places.steps) > 1 else ()
    levels = {masks.big - 6, min(masks.big - 6, LARGEST.get(out, 127) + lift - 7)}
    for level, significand in itertools.product(sorted(levels), (1.75, 1.0)):
        x, y = (significand * v for v in factors(level, 1.0, masks.left, masks.right))
        for t in range(kept + 2):
            if level - t < masks.small + 2:
                break
            for small_significand, sign in ((1.0, 1), (1.75, -1)):
                low = _value(masks, level - t, small_significand, sign)
                if len(final) > 1:
                    whole = {**dict.fromkeys(final[:-1], (x, y)), final[-1]: low}
                    yield whole
                    if places.chains > 1 and final[-1] + places.chain < places.k:
                        yield {**whole, **{place + places.chain: (-x, y) for place in final[:-1]}}
                if len(first) > 1 and len(later) >= len(first) - 1:
                    yield {
                        **dict.fromkeys(first[:-1], (x, y)),
                        first[-1]: low,
                        **dict.fromkeys(later[: len(first) - 1], (-x, y)),
                    }
                if len(first) == 1 and len(places.steps) > 2:
                    a, b, c = (step[0] for step in places.steps[:3])
                    yield {a: (x, y), b: low}
                    yield {a: (x, y), b: low, c: (-x, y)}
                    # The next step would take c's exponent, and cut it as B does: only the last one shows B.
                    yield {a: low, final[0]: (x, y)}


def _ties(masks: Masks, places: Places, fraction_bits: int | None, out: torch.dtype, lift: int) -> Iterable[Trial]:
    """Sums half-way between two values of a narrow output, and a last bit that decides the rounding if B keeps it."""
    final = places.final
    if out.itemsize >= 4 or len(final) < 4:
        return
    digits = round(-math.log2(torch.finfo(out).eps)) + 1
    doublings = (len(final) - 2).bit_length() - 1
    copies = 2**doublings
    level = min(masks.big - 6, LARGEST.get(out, 127) + lift - 7)
    top = level + doublings
    for t in range(digits + 1, doublings + (fraction_bits or 24) + 2):
        if top - t < masks.small + 2:
            return
        half, low = _value(masks, top - digits), _value(masks, top - t)
        yield {**dict.fromkeys(final[:copies], _value(masks, level)), final[copies]: half, final[copies + 1]: low}


def _beyond_fp16(masks: Masks, places: Places) -> Iterable[Trial]:
    """A sum above 65504, taken away by later steps: Inf remains of it where fp16 holds c."""
    if len(places.steps) < 2 or masks.big < 14:
        return
    part = min(masks.big, 15)
    for exponent in (part, part - 1):
        first, later = places.steps[0][:4], places.steps[1][:4]
        if len(first) == len(later) == 4:
            up, down = (_value(masks, exponent, 1.0, sign) for sign in (1, -1))
            yield {**dict.fromkeys(first, up), **dict.fromkeys(later, down)}


def _total(subject: Subject, masks: Masks, places: Places, found: Arithmetics, out: torch.dtype) -> None:
    """How sums of chains are added: M and v from two chains, M taken away by a third."""
    if places.chains < 3:
        return
    shares = [(0, 1.0), (-1, 1.0), (-1, 1.5), (0, 1.5), (-2, 1.0), (0, 1.25), (1, 1.25)]
    last = masks.big - 23
    trials: list[Trial] = []
    exact: list[float] = []
    for exponent, significand in shares:
        if last + exponent < masks.left.lowest + masks.right.lowest + 2:
            continue
        for sign in (1, -1):
            trials.append(
                {
                    places.other(0): _value(masks, masks.big),
                    places.other(1): _value(masks, last + exponent, significand, sign),
                    places.other(2): _value(masks, masks.big, sign=-1),
                }
            )
            exact.append(sign * significand * 2.0**exponent)
    answers = [answer / 2.0**last for answer in _ask_near(subject, trials, last, out)]
    found.evidence["total"] = list(zip(trials, (a * 2.0**last for a in answers), strict=True))[:6]
    # Below M the unit is half as large: -1.5 and -0.5 of the coarser one are exact there.
    positive = [(e, a) for e, a in zip(exact, answers, strict=True) if e > 0]
    found.total_rounding = _name_of([e for e, _ in positive], [a for _, a in positive])
