"""The pytest plugin, in runs of its own."""

from __future__ import annotations

import pytest
import torch

pytest_plugins = ["pytester"]

CHECKS = """
import torch
from hypothesis import given, settings, strategies as st
from fp8ref.testing import assert_bits_equal

counts = {"plain": 0, "own": 0}

@given(st.integers())
def test_plain(x):
    counts["plain"] += 1

@settings(max_examples=5)
@given(st.integers())
def test_own(x):
    counts["own"] += 1

def test_counts():
    assert counts == {"plain": 7, "own": 5}
    assert settings().max_examples == 7
    assert_bits_equal(torch.zeros(2, 3), torch.zeros(2, 3))
    assert_bits_equal(torch.zeros(1000), torch.zeros(1000))

def test_device(fp8ref_device):
    assert isinstance(fp8ref_device, torch.device)
"""


@pytest.fixture(autouse=True)
def _no_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs here are no processes of the pytest-xdist that may run this test."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.mark.parametrize("processes", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_examples_and_the_summary(pytester: pytest.Pytester, processes: list[str]) -> None:
    pytester.makepyfile(test_checks=CHECKS)
    result = pytester.runpytest_subprocess("-v", "--fp8ref-examples", "7", *processes)
    devices = 1 + torch.cuda.is_available()
    result.assert_outcomes(passed=3 + devices)
    result.stdout.fnmatch_lines(["*PASSED*test_device?cpu?*" if processes else "*test_device?cpu? PASSED*"])
    result.stdout.fnmatch_lines(["fp8ref: 2 comparisons, 1,006 elements"])


def test_what_does_not_use_it_does_not_import_torch(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import sys\n\ndef test_nothing():\n    assert not {'torch', 'fp8ref'} & set(sys.modules)\n")
    result = pytester.runpytest_subprocess()
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("fp8ref: *")


@pytest.mark.parametrize("given", ["0", "-3", "many"])
def test_examples_are_a_number(pytester: pytest.Pytester, given: str) -> None:
    result = pytester.runpytest_subprocess(f"--fp8ref-examples={given}")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"*--fp8ref-examples: got '{given}'; give a whole number above 0"])


def test_it_is_listed(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("--help")
    result.stdout.fnmatch_lines(["exact tests of FP8 kernels:", "*--fp8ref-examples=N*"])
