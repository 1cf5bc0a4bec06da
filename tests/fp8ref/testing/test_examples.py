"""The worked example of docs/testing.md: it runs, and prints what the page shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from package_files import ROOT

EXAMPLE = ROOT / "examples" / "test_triton_matmul.py"
PAGE = (ROOT / "docs" / "testing.md").read_text()

pytest.importorskip("triton", reason="the example is a Triton kernel; Triton has no wheels for this platform")


def block(name: str) -> str:
    """A code block of the page, without trailing blanks."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", PAGE, re.DOTALL)
    assert found is not None, name
    return "\n".join(line.rstrip() for line in found[1].splitlines())


@pytest.fixture(scope="module")
def output() -> str:
    """What pytest prints on a machine without a GPU."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    options = ("-rP", "--tb=short", "-p", "no:cacheprovider", "--hypothesis-profile=ci")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "examples", *options],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def test_the_right_kernel_passes_and_the_wrong_one_fails(output: str) -> None:
    assert output.index("= FAILURES =") < output.index("_ test_kernel[without_tail] _") < output.index("= PASSES =")
    assert output.index("= PASSES =") < output.index("_ test_kernel[right] _")
    assert "1 failed, 1 passed" in output


@pytest.mark.parametrize("name", ["output of the wrong kernel", "output of the right kernel"])
def test_the_page_shows_what_it_prints(output: str, name: str) -> None:
    assert block(name) in output


def test_the_page_shows_the_test() -> None:
    assert EXAMPLE.read_text().rstrip().endswith(block("the end of examples/test_triton_matmul.py"))
