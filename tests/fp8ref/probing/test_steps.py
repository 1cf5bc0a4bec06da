"""The probe's own step, for formats and roundings that the oracle has not, against the oracle where both apply."""

from __future__ import annotations

import pytest
import torch

from fp8ref import UNITS, TensorCoreUnit, accumulate
from fp8ref.probing.model import build, dots, same_arithmetic
from fp8ref.probing.steps import Arithmetic
from fp8ref.probing.structure import Structure, period
from fp8ref.probing.tree import Node
from fp8ref.probing.verify import KINDS

FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)


def structure(unit: TensorCoreUnit, k: int, chains: tuple[int, ...]) -> Structure:
    assert unit.products_per_step is not None
    length = unit.products_per_step
    cycle = [unit.k_order[first : first + length] for first in range(0, len(unit.k_order), length)]
    steps = tuple(tuple(sorted(p + first for p in step)) for first in range(0, 64, len(unit.k_order)) for step in cycle)
    return Structure(False, steps, length, chains, ((0, k),))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("name", [name for name in UNITS if name != "exact"])
def test_steps_equal_the_oracle(name: str, kind: str) -> None:
    unit, k = UNITS[name], 160
    generator = torch.Generator().manual_seed(3)
    a = KINDS[kind]((12, k), FORMATS[0], generator).clamp(-448, 448).to(FORMATS[0])
    b = KINDS[kind]((9, k), FORMATS[1], generator).clamp(-57344, 57344).to(FORMATS[1])
    afresh = (unit.instruction_k,) if unit.c_enters == "after" else ()
    for fast in (True, False):
        found = structure(unit, k, afresh if fast else (*afresh, 128))
        how = Arithmetic(unit.fraction_bits, unit.significant_bits, "truncate")
        expected = accumulate(a, b.t(), unit=unit, use_fast_accum=fast)
        assert torch.equal(dots(found, [how], a[:, None], b[None])[0], expected)
        model = build(found, how, k)
        assert model.unit is not None
        assert same_arithmetic(model.unit) == name
        assert model.use_fast_accum is fast
        assert torch.equal(model.sums(a, b.t()), expected)


def test_rounding_to_nearest_is_that_of_fp16() -> None:
    generator = torch.Generator().manual_seed(4)
    a, b = (torch.randn(50, 8, generator=generator).to(FORMATS[0]) for _ in range(2))
    plain = Structure(False, tuple((k,) for k in range(8)), 1, (), ((0, 8),))
    seen = dots(plain, [Arithmetic(40, 11, "nearest")], a, b)[0]
    expected = torch.zeros(50, dtype=torch.float16)
    for k in range(8):
        # The products have at most 8 bits, so that fp32 holds the sum exactly and one rounding follows.
        expected = (expected.double() + a[:, k].double() * b[:, k].double()).half()
    assert torch.equal(seen.half(), expected)


def test_the_shortest_period_is_an_instruction() -> None:
    assert period([(0, 1), (2, 3), (4, 5), (6, 7)]) == [(0, 1)]
    assert period([(0, 2), (1, 3), (4, 6), (5, 7)]) == [(0, 2), (1, 3)]
    assert period([(2, 3), (0, 1)]) == [(2, 3), (0, 1)]


def test_a_node_counts_its_products() -> None:
    assert Node((4,), (Node((0, 1), ()), Node((2, 3), ()))).size == 5
