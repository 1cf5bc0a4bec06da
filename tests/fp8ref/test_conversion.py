"""The report of a conversion, as text and in rich."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from torch import nn

from fp8ref import convert_
from fp8ref.conversion import in_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 kB"), (-99_950, "-100 kB"), (999_600, "1.00 MB"), (5 * 10**12, "5.00 TB")],
)
def test_bytes_in_three_digits(count: int, text: str) -> None:
    assert in_bytes(count) == text


def test_the_report_prints(capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.ModuleList(nn.Sequential(nn.Linear(32, 16), nn.Linear(16, 16)) for _ in range(4))
    report = convert_(model, "block-ue8m0", skip=["2.0"])
    printed = capsys.readouterr().out
    assert printed == f"{report}\n"
    lines = [line.split() for line in printed.splitlines()]
    assert lines[1][:7] == ["{0-1,3}.0", "3", "Linear", "16", "x", "32", "FP8"]
    assert lines[2][:7] == ["{0-3}.1", "4", "Linear", "16", "x", "16", "FP8"]
    assert lines[3][:8] == ["2.0", "1", "Linear", "16", "x", "32", "skip:", "'2.0'"]
    assert (
        printed.splitlines()[-2]
        == "7 of 8 linear layers converted: weight e4m3 128x128 ue8m0, x e4m3 1x128 dynamic ue8m0"
    )
    out = io.StringIO()
    Console(file=out, width=120, highlight=False, force_terminal=True).print(report)
    assert "{0-1,3}.0" in out.getvalue()
    assert "7 of 8 linear layers converted" in out.getvalue()


def test_it_needs_no_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("fp8ref.conversion.util.find_spec", lambda _: None)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    convert_(nn.Sequential(nn.Linear(2, 2)), "row")
    assert "1 of 1 linear layers converted" in capsys.readouterr().out
