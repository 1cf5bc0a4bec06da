"""The notebooks: their sources and what is committed agree, they run, and their text says what the run gives."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

import scripts.notebooks
from scripts.notebooks import FOLDER, NAMES, NotebookError, read_source, run_notebook, text_of, unchecked_numbers

FAST = ("rounding", "decode")
"""The two that `make test` executes; `make slow` and `make notebooks` execute the others."""


def committed(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)  # type: ignore[no-untyped-call]


def test_examples() -> None:
    assert doctest.testmod(scripts.notebooks).failed == 0


def test_every_notebook_is_known() -> None:
    assert {path.stem for path in FOLDER.glob("*.py")} == {path.stem for path in FOLDER.glob("*.ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_comes_from_the_source(name: str) -> None:
    source, found = read_source(name), committed(name)
    assert [(cell.cell_type, cell.id, cell.source) for cell in found.cells] == [
        (cell.cell_type, cell.id, cell.source) for cell in source.cells
    ], "run `make notebooks`"


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_was_run_from_top_to_bottom(name: str) -> None:
    code = [cell for cell in committed(name).cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    # An address in memory would differ in every run.
    texts = [output.get("text", "") + str(output.get("data", {}).get("text/plain", "")) for output in outputs]
    assert [text for text in texts if re.search(r" at 0x[0-9a-f]{6}", text)] == []


@pytest.mark.parametrize("name", NAMES)
def test_it_starts_with_a_question_and_ends_with_the_answer_in_two_sentences(name: str) -> None:
    cells = [cell.source for cell in read_source(name).cells]
    assert cells[0].startswith("# ")
    assert "?" in cells[0].splitlines()[0]
    _, heading, answer = cells[-1].rpartition("## The answer\n")
    assert heading
    plain = re.sub(r"<!--.*?-->|`[^`]*`", "", answer, flags=re.DOTALL).strip()
    assert len(re.findall(r"[.!?](?=\s|$)", plain)) == 2
    assert plain.endswith(".")


@pytest.mark.parametrize("name", NAMES)
def test_every_number_of_the_text_is_held_to_the_run_or_is_given(name: str) -> None:
    assert unchecked_numbers(text_of(read_source(name))) == []


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_it_runs_and_its_text_is_true(name: str) -> None:
    assert run_notebook(name).values


@pytest.mark.parametrize(
    ("text", "code", "message"),
    [
        ("3.1 dB<!--= {x:.1f} dB -->", "x = 3.2", "the run gives '3.2 dB'"),
        ("13.2 dB<!--= {x:.1f} dB -->", "x = 3.2", "the run gives '3.2 dB'"),
        ("3.2 dB", "x = 3.2", "unchecked number 3.2"),
        ("3.2<!--= {x} -->", "x = 3.2\nraise ValueError('broken')", "broken"),
        ("3.2<!--= {x} -->", "x = 3.2\nimport warnings\nwarnings.warn('odd')", "standard error: .*odd"),
        ("3.2<!--= {y} -->", "x = 3.2", "'y' is not defined"),
    ],
)
def test_what_is_not_so_fails(text: str, code: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(f'# %% [markdown]\n"""\n{text}\n"""\n\n# %%\n{code}\n')
    with pytest.raises(NotebookError, match=message):
        run_notebook("one", tmp_path)


def test_what_is_so_passes(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(
        '# %% [markdown]\n"""\nIt is **3.2 dB**<!--= {x:.1f} dB --> in `2 cases`, 1<!--given: a book --> ago.\n"""\n\n'
        "# %%\nx = 3.2\nx\n"
    )
    ran = run_notebook("one", tmp_path)
    assert ran.values == ["3.2 dB"]
    assert ran.notebook.cells[1].outputs[0].data["text/plain"] == "3.2"
