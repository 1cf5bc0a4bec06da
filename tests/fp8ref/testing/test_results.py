"""The recorded run of benchmarks/mutants.py: it is about today's mutants, and the manual shows its numbers."""

from __future__ import annotations

import json

import fp8ref
from fp8ref.testing import mutants
from package_files import ROOT

FOUND = json.loads((ROOT / "benchmarks" / "results" / "mutants.json").read_text())
PAGE = (ROOT / "docs" / "testing.md").read_text()


def test_every_mutant_was_tried_and_found() -> None:
    assert list(FOUND["mutants"]) == [mutant.name for mutant in mutants(fp8ref.emulate_matmul)]
    assert all(row["found by"] for row in FOUND["mutants"].values())


def test_the_manual_shows_the_numbers() -> None:
    for tolerance, counts in FOUND["summary"].items():
        assert sum(counts.values()) == len(FOUND["mutants"])
        assert f"| {tolerance} | {' | '.join(map(str, counts.values()))} |" in PAGE
    assert f"| `check_matmul`, equal bits | 0 | 0 | {len(FOUND['mutants'])} | 0 |" in PAGE
