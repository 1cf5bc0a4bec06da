"""The model that a probe builds from its findings, and computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ref.emulation.accumulate import PROMOTION_K, accumulate, split_parts
from fp8ref.emulation.formats import FORMATS
from fp8ref.emulation.units import UNITS, TensorCoreUnit
from fp8ref.probing.steps import Arithmetic, run_chain
from fp8ref.probing.structure import Structure, period

_MOST_PRODUCTS = 64  # of a step of a TensorCoreUnit


@dataclass(frozen=True)
class Model:
    """Sums as the subject is believed to form them.

    Attributes:
        structure: the order of additions.
        how: the arithmetic of a step; None for one exact sum rounded once.
        unit: the tensor-core unit, where there is one; else None.
        use_fast_accum: what :func:`fp8ref.accumulate` takes beside ``unit``.
        split_k: likewise; 1 where K is not cut, 0 where it is cut as no ``split_k`` does.
    """

    structure: Structure
    how: Arithmetic | None
    unit: TensorCoreUnit | None
    use_fast_accum: bool
    split_k: int

    def sums(self, a: Tensor, b: Tensor) -> Tensor:
        """fp32 [M, N] for a [M, K] and b [K, N]."""
        if self.unit is not None and a.dtype in FORMATS and b.dtype in FORMATS:
            if self.split_k:
                return accumulate(a, b, unit=self.unit, use_fast_accum=self.use_fast_accum, split_k=self.split_k)
            sums = [
                accumulate(a[:, start:stop], b[start:stop], unit=self.unit, use_fast_accum=self.use_fast_accum)
                for start, stop in self.structure.parts
            ]
        else:
            if self.how is None:
                raise ValueError("an exact sum of other formats than FP8 is not computed here")
            return dots(self.structure, [self.how], a[:, None, :], b.t()[None])[0]
        total = torch.zeros_like(sums[0])
        for part in sums:
            total = total + part
        return total


def dots(structure: Structure, ways: Sequence[Arithmetic], x: Tensor, y: Tensor) -> Tensor:
    """fp32 [ways, ...] from x and y [..., K], which broadcast: the sums of their products, step by step in float64."""
    inner = [n for n in structure.chains if len(structure.parts) == 1 or n < structure.parts[0][1]]
    total = torch.zeros(())
    for index, (start, stop) in enumerate(structure.parts):
        part = _chains(structure, ways, x, y, (start, stop), inner)
        total = total + part if index else part
    return total


def _chains(
    structure: Structure, ways: Sequence[Arithmetic], x: Tensor, y: Tensor, span: tuple[int, int], lengths: list[int]
) -> Tensor:
    """Sums of sums, the longest outermost."""
    start, stop = span
    if lengths:
        total = torch.zeros((), device=x.device)
        for first in range(start, stop, lengths[-1]):
            inner = (first, min(first + lengths[-1], stop))
            total = total + _chains(structure, ways, x, y, inner, lengths[:-1])
        return total
    steps = period(structure.steps)
    cycle = sum(map(len, steps))
    moved = [
        [place + first for place in step if place + first < stop]
        for first in range(start, stop, cycle)
        for step in steps
    ]
    return run_chain(x, y, [step for step in moved if step], ways)


def build(structure: Structure, how: Arithmetic | None, k: int) -> Model:
    """The model of the findings; with a unit where a :class:`fp8ref.TensorCoreUnit` can say it."""
    if how is None:
        return Model(structure, None, UNITS["exact"], True, 1)
    split = _split_k(structure.parts, k)
    inner = [n for n in structure.chains if len(structure.parts) == 1 or n < structure.parts[0][1]]
    steps = period(structure.steps)
    order = tuple(place for step in steps for place in step)
    plain = how.rounding == "truncate" and how.fraction_bits is not None
    equal = {len(step) for step in steps} == {structure.products_per_step}
    sorted_order = sorted(order) == list(range(len(order)))
    if not plain or not equal or not sorted_order or structure.products_per_step > _MOST_PRODUCTS:
        return Model(structure, how, None, False, split)
    after = [n for n in inner if n != PROMOTION_K]
    promoted = PROMOTION_K in inner
    if len(after) > 1 or (after and promoted and after[0] > PROMOTION_K):
        return Model(structure, how, None, False, split)
    if after:
        if after[0] % len(order):
            return Model(structure, how, None, False, split)
        order = tuple(place + first for first in range(0, after[0], len(order)) for place in order)
    assert how.fraction_bits is not None
    unit = TensorCoreUnit(
        name="probed",
        products_per_step=structure.products_per_step,
        fraction_bits=how.fraction_bits,
        significant_bits=how.significant_bits,
        k_order=order,
        c_enters="after" if after else "alignment",
        evidence="found by fp8ref.probe",
    )
    return Model(structure, how, unit, not promoted, split)


def _split_k(parts: tuple[tuple[int, int], ...], k: int) -> int:
    """The ``split_k`` that cuts K into these parts, 0 if none does."""
    for count in range(1, len(parts) + 1):
        if tuple(split_parts(k, count)) == parts:
            return count
    return 0


def same_arithmetic(unit: TensorCoreUnit) -> str | None:
    """The name of the known unit that computes the same, if there is one.

    The order within a step is free, and an instruction of two may be one of the length of both.
    """
    if unit.products_per_step is None:
        return unit.name
    for known in UNITS.values():
        if known.products_per_step is None or known.c_enters != unit.c_enters:
            continue
        one, two = (_steps_of(x) for x in (known, unit))
        length = known.instruction_k * unit.instruction_k
        same_steps = (
            known.instruction_k == unit.instruction_k and one == two
            if unit.c_enters == "after"
            else _tiled(known, one, length) == _tiled(unit, two, length)
        )
        numbers = [(x.fraction_bits, x.significant_bits) for x in (known, unit)]
        if same_steps and numbers[0] == numbers[1]:
            return known.name
    return None


def _steps_of(unit: TensorCoreUnit) -> list[frozenset[int]]:
    assert unit.products_per_step is not None
    order, length = unit.k_order, unit.products_per_step
    return [frozenset(order[first : first + length]) for first in range(0, len(order), length)]


def _tiled(unit: TensorCoreUnit, steps: list[frozenset[int]], length: int) -> list[frozenset[int]]:
    return [frozenset(k + first for k in step) for first in range(0, length, unit.instruction_k) for step in steps]
