"""The README's tables of the oracle's rates are those of the committed runs, each of its own."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from package_files import ROOT

README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "benchmarks" / "results"


def table(before: str) -> tuple[list[str], dict[str, list[str]]]:
    """Columns and rows of the first table after ``before``."""
    lines = README[README.index(before) :].splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("|"))
    rows = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows[0][1:], {row[0]: row[1:] for row in rows[2:]}


def test_the_rates_on_cuda() -> None:
    recorded: dict[str, Any] = json.loads((RESULTS / "emulation_cuda.json").read_text())
    rates = recorded["billions_of_products_per_second"]
    columns, rows = table("**The oracle on CUDA tensors**")
    assert len(rows) >= 11
    for name, cells in rows.items():
        assert cells == [f"{rates[shape][name]:,.0f}" for shape in columns], name


@pytest.mark.parametrize("name", ["mmaemu hopper accurate", "mmaemu hopper fast"])
def test_the_two_tables_are_of_two_runs(name: str) -> None:
    """The CPU's figures once stood in both."""
    (_, here), (_, there) = table("**The oracle** on two CPU cores"), table("**The oracle on CUDA tensors**")
    assert re.sub(",", "", here[name][0]).isdigit()
    assert here[name] != there[name]
