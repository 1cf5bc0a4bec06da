"""Units are frozen data, the table is that of the hardware notes, and a bad unit of one's own is refused."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

import fp8ref
from fp8ref.emulation.units import UNITS, TensorCoreUnit, unit_of

IN_ORDER = tuple(range(32))
MMA_SYNC = (
    *(0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
    *(2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31),
)

# L, F, B, k order, how c enters: row by row what docs/numerics.md states.
TABLE: dict[str, tuple[int | None, int, int, tuple[int, ...], str]] = {
    "sm90": (32, 13, 14, IN_ORDER, "alignment"),
    "sm90_mma_sync": (16, 25, 24, MMA_SYNC, "after"),
    "sm90_hmma": (16, 25, 24, MMA_SYNC, "alignment"),  # in order in the notes; the recording says otherwise
    "sm89": (16, 13, 14, IN_ORDER, "alignment"),
    "sm100": (32, 25, 24, IN_ORDER, "alignment"),
}


def test_the_table_is_complete() -> None:
    assert list(UNITS) == [*TABLE, "exact"]
    assert UNITS["exact"].products_per_step is None
    for name, unit in UNITS.items():
        assert unit.name == name
        assert unit.evidence, name


@pytest.mark.parametrize("name", TABLE)
def test_a_unit_is_what_the_notes_say(name: str) -> None:
    unit = UNITS[name]
    found = (unit.products_per_step, unit.fraction_bits, unit.significant_bits, unit.k_order, unit.c_enters)
    assert found == TABLE[name]
    assert unit.instruction_k == len(unit.k_order)


def test_units_are_frozen_and_hashable() -> None:
    unit = UNITS["sm90"]
    for field in dataclasses.fields(unit):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(unit, field.name, getattr(unit, field.name))
    assert len(set(UNITS.values())) == len(UNITS)


def test_unit_of_takes_a_name_or_a_unit() -> None:
    for name, unit in UNITS.items():
        assert unit_of(name) is unit
        assert unit_of(unit) is unit
    mine = dataclasses.replace(UNITS["sm89"], name="mine", fraction_bits=20)
    assert unit_of(mine) is mine
    assert fp8ref.UNITS is UNITS
    assert fp8ref.TensorCoreUnit is TensorCoreUnit


@pytest.mark.parametrize("name", ["", "SM90", "sm_90", "sm120"])
def test_unit_of_names_the_units_that_exist(name: str) -> None:
    with pytest.raises(ValueError, match="unit") as caught:
        unit_of(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in UNITS)


@pytest.mark.parametrize("wrong", [None, 90, ("sm90",), TensorCoreUnit])
def test_unit_of_refuses_other_types(wrong: Any) -> None:
    with pytest.raises(TypeError, match="unit") as caught:
        unit_of(wrong)
    assert type(wrong).__name__ in str(caught.value)


GOOD: dict[str, Any] = {
    "name": "mine",
    "products_per_step": 4,
    "fraction_bits": 13,
    "significant_bits": 14,
    "k_order": tuple(range(8)),
    "c_enters": "alignment",
    "evidence": "made up",
}


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("products_per_step", 0),
        ("products_per_step", -4),
        ("products_per_step", 65),
        ("products_per_step", True),
        ("products_per_step", 4.0),
        ("products_per_step", "4"),
        ("fraction_bits", 0),
        ("fraction_bits", 41),
        ("fraction_bits", 13.0),
        ("fraction_bits", True),
        ("significant_bits", 0),
        ("significant_bits", 25),
        ("significant_bits", 14.5),
        ("k_order", ()),
        ("k_order", (0, 1, 2)),
        ("k_order", (0, 1, 2, 2)),
        ("k_order", (1, 2, 3, 4)),
        ("k_order", (0, 1, 2, -1)),
        ("k_order", tuple(range(6))),
        ("k_order", [0, 1, 2, 3]),
        ("k_order", (0.0, 1.0, 2.0, 3.0)),
        ("k_order", None),
        ("c_enters", "before"),
        ("c_enters", None),
    ],
)
def test_a_bad_unit_is_refused_by_name_of_the_field(field: str, wrong: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{field}: got {re.escape(repr(wrong))}"):
        TensorCoreUnit(**{**GOOD, field: wrong})


@pytest.mark.parametrize(
    ("field", "edge"),
    [
        ("products_per_step", 1),
        ("products_per_step", 8),
        ("fraction_bits", 1),
        ("fraction_bits", 40),
        ("significant_bits", 1),
        ("significant_bits", 24),
        ("k_order", tuple(reversed(range(64)))),
        ("c_enters", "after"),
    ],
)
def test_the_edges_of_what_is_allowed(field: str, edge: Any) -> None:
    unit = TensorCoreUnit(**{**GOOD, field: edge})
    assert getattr(unit, field) == edge
