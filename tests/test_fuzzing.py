"""`make test` gives every run the same examples; `make fuzz` keeps what it finds, and later runs try that first."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from package_files import ROOT

LIMIT = 1_111 * 1_013
"""A number that Hypothesis has no reason to try by itself: it likes powers of ten, and the literals of the code."""

FAILS = f"""
from hypothesis import given, strategies as st

@given(st.integers(0, 2**62))
def test_small(x):
    assert x < {LIMIT}
"""
# Another text of the same test: what is kept is filed under its name.
LATER = FAILS.replace(f"assert x < {LIMIT}", f"print('tried', x)\n    assert x != {LIMIT}")


def run(*command: str, kept: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "FP8REF_KEPT_FAILURES": str(kept), "HYPOTHESIS_PROFILE": "ci"}
    environment.pop("PYTEST_XDIST_WORKER", None)  # these are no processes of pytest-xdist
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, cwd=ROOT, env=environment
    )


SHOWS = """
from hypothesis import given, strategies as st

@given(st.lists(st.integers(0, 2**62)), st.floats())
def test_any(xs, y):
    print("tried", xs, y)
"""


def test_every_run_has_the_same_examples(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    test, other = tmp_path / "test_any.py", tmp_path / "literals.py"
    outputs = []
    for start in ("", "", "import literals"):
        other.write_text(f"MANY = {list(range(10_000, 10_900))}")
        test.write_text(f"import sys\nsys.path.append({str(tmp_path)!r})\n{start}\n{SHOWS}")
        done = run("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(test), kept=tmp_path / "kept")
        assert done.returncode == 0, done.stdout + done.stderr
        outputs.append([line for line in done.stdout.splitlines() if "tried" in line])
    assert len(set(outputs[0])) > 50
    assert outputs[0] == outputs[1], "the seed is fixed"
    assert outputs[0] == outputs[2], "what a process has imported does not matter"


def test_a_failure_is_kept_and_tried_first(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    kept, test = tmp_path / "fuzz_failures", tmp_path / "test_found.py"
    test.write_text(LATER)
    pytest_run = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", str(test))
    assert run(*pytest_run, kept=kept).returncode == 0, "the examples of every run do not find it"

    test.write_text(FAILS)
    fuzzed = run(str(ROOT / "scripts" / "fuzz.py"), "0", str(test), kept=kept)
    assert fuzzed.returncode == 1, fuzzed.stdout + fuzzed.stderr
    assert f"x={LIMIT}" in fuzzed.stdout.replace("_", "")
    assert "Commit them" in fuzzed.stderr
    files = [path for path in kept.rglob("*") if path.is_file()]
    assert files

    test.write_text(LATER)
    replayed = run(*pytest_run, kept=kept)
    assert replayed.returncode == 1, replayed.stdout
    assert replayed.stdout.split("tried ")[1].split()[0] == str(LIMIT)
    assert [path for path in kept.rglob("*") if path.is_file()] == files, "replaying writes nothing"


def test_without_failures_it_says_so(tmp_path: Path) -> None:
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    test = tmp_path / "test_right.py"
    test.write_text(FAILS.replace(f"assert x < {LIMIT}", "assert x >= 0"))
    done = run(str(ROOT / "scripts" / "fuzz.py"), "0", str(test), kept=tmp_path / "kept")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("fuzz: 0 minutes, ")


def test_minutes_are_a_number(tmp_path: Path) -> None:
    done = run(str(ROOT / "scripts" / "fuzz.py"), "soon", kept=tmp_path)
    assert done.returncode == 1
    assert "got 'soon'; give a number of minutes" in done.stderr
