"""``fp8ref probe`` on the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fp8ref.commands import app

SOURCE = """
import fp8ref

def matmul(a, b):
    return fp8ref.accumulate(a, b, unit="sm89", use_fast_accum=True)

number = 3
"""


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "someones_kernels.py").write_text(SOURCE)
    (tmp_path / "breaks_when_loaded.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(str(tmp_path))


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["probe", *arguments])
    return done.exit_code, done.output


def test_a_function_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    code, output = run("someones_kernels:matmul", "--k", "128", "--elements", "4096", "--json", str(path))
    assert code == 0, output
    assert "the arithmetic of unit 'sm89'" in output
    assert "equal on 4,096 elements" in output
    assert "the tree of additions" in output, "progress is a line each where there is no terminal"
    found = json.loads(path.read_text())
    assert found["known_as"] == "sm89"
    assert found["subject"]["subject"] == "someones_kernels:matmul"
    assert all({"name", "value", "text", "evidence"} == set(finding) for finding in found["findings"])


def test_a_module_of_the_folder_it_is_started_in(tmp_path: Path) -> None:
    """By the console script, whose search path has its own folder and not that one."""
    (tmp_path / "kernel_beside.py").write_text(SOURCE)
    script = Path(sys.executable).with_name("fp8ref")
    sizes = ("--m", "16", "--n", "16", "--k", "64", "--elements", "256")
    done = subprocess.run(
        [script, "probe", "kernel_beside:matmul", *sizes], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "equal on 256 elements" in done.stdout


def test_torchs_scaled_product() -> None:
    sizes = ("--m", "16", "--n", "16", "--k", "64", "--elements", "256")
    code, output = run("torch._scaled_mm", "--fast", "--out-dtype", "bf16", *sizes)
    assert code == 0, output
    assert "torch._scaled_mm (fast accumulation, tensor by tensor scales, bfloat16 output)" in output
    assert "the arithmetic of unit" not in output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nothing",), "target: got 'nothing'; give module:function"),
        (("no_such_module:f",), "cannot load 'no_such_module:f'"),
        (("breaks_when_loaded:f",), "cannot load 'breaks_when_loaded:f': ZeroDivisionError"),
        (("someones_kernels:matmul", "--device", "nonsense"), "device: got 'nonsense'"),
        (("someones_kernels:missing",), "cannot load 'someones_kernels:missing'"),
        (("someones_kernels:number",), "is int; give a callable"),
        (("someones_kernels:matmul", "--fast"), "--fast, --out-dtype: they are for torch._scaled_mm"),
        (("someones_kernels:matmul", "--operands", "e4m3"), "--operands: got 'e4m3'"),
        (("someones_kernels:matmul", "--operands", "e4m3,int8"), "--operands: got 'int8'"),
        (("someones_kernels:matmul", "--scaling", "row"), "--scaling: got 'row'"),
        (("someones_kernels:matmul", "--k", "3"), "k: got 3"),
        (("someones_kernels:matmul", "--json", "/no/such/folder/x.json"), "--json: cannot write"),
    ],
)
def test_errors_are_one_line(arguments: tuple[str, ...], message: str) -> None:
    code, output = run(*arguments)
    assert code == 2
    assert message in output
    assert "Traceback" not in output
