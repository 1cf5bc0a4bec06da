"""benchmarks/verify.py: no failure of a case, or of the process that runs it, is lost on the way to the verdict."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from package_files import ROOT

GOOD = {"outputs": 10, "differing": 0, "codes": 5, "codes_differing": 0, "guards_broken": 0}


@pytest.fixture(scope="module")
def verify() -> Any:
    spec = importlib.util.spec_from_file_location("verify_of_the_benchmarks", ROOT / "benchmarks" / "verify.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def outcomes(monkeypatch: pytest.MonkeyPatch) -> dict[int, dict[str, int] | Exception]:
    """What the cases give: fill it in."""
    found: dict[int, dict[str, int] | Exception] = {}

    def run(index: int) -> SimpleNamespace:
        outcome = found.get(index, GOOD)
        if isinstance(outcome, Exception):
            raise outcome
        return SimpleNamespace(**outcome)

    suite = types.ModuleType("cases")
    suite.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cases", suite)
    return found


@pytest.mark.parametrize("bad", [[0], [1], [3], [2, 3], [0, 1, 2, 3]])
def test_a_case_that_raises_is_reported_wherever_it_comes(
    verify: Any, outcomes: dict[int, Any], tmp_path: Path, bad: list[int]
) -> None:
    outcomes |= {index: RuntimeError(f"number {index}") for index in bad}
    verify.shard(0, 1, 4, 60.0, tmp_path / "shard0.json")
    total = verify.total_of([tmp_path / "shard0.json"], [0])
    assert [text.splitlines()[-1] for text in total["failures"]] == [f"RuntimeError: number {i}" for i in bad]
    assert (total["cases"], total["outputs"]) == (4, 10 * (4 - len(bad)))


@pytest.mark.parametrize("key", ["differing", "codes_differing", "guards_broken"])
def test_what_differs_is_counted_and_reported(verify: Any, outcomes: dict[int, Any], tmp_path: Path, key: str) -> None:
    outcomes[3] = {**GOOD, key: 1}
    for start in (0, 1):
        verify.shard(start, 2, 4, 60.0, tmp_path / f"shard{start}.json")
    total = verify.total_of([tmp_path / "shard0.json", tmp_path / "shard1.json"], [0, 0])
    assert total[key] == 1
    assert len(total["failures"]) == 1
    assert total["outputs"] == 40


@pytest.mark.parametrize("written", [True, False])
def test_a_process_that_died_is_reported(verify: Any, tmp_path: Path, written: bool) -> None:
    paths = [tmp_path / "shard0.json", tmp_path / "shard1.json"]
    for path in paths[: 1 + written]:
        path.write_text(json.dumps({"cases": 3, **GOOD, "failures": []}))
    total = verify.total_of(paths, [0, -11])
    assert total["cases"] == 3 + 3 * written
    assert total["failures"][-1] == "shard1.json: its process ended with status -11"
    assert len(total["failures"]) == 2 - written
