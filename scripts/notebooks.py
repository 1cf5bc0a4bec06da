"""Execute the notebooks afresh and hold their text to what the run gives.

The sources are ``notebooks/*.py`` (jupytext, percent format). Each becomes the ``.ipynb`` beside it, with outputs, if
nothing raises, nothing is written to standard error, and every number in the text is what the run gives.

A number is stated as ``30.3 dB<!--= {snr:.1f} dB -->``: the comment, which readers do not see, is an f-string over the
notebook's variables after the run, and what stands before it must be its value. A number of another's is marked
``<!--given: where-->``. A number that is neither fails; in code spans, where settings belong, numbers are free.

    python scripts/notebooks.py [NAME ...]          run, check and write; all notebooks if none is named
    python scripts/notebooks.py --check [NAME ...]  run and check only
    python scripts/notebooks.py --update NAME ...   put the run's numbers into the sources; then read what they now say
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NAMES = ("rounding", "accumulation", "scaling", "model", "decode")
CELL_SECONDS = 900  # far above what any cell needs: a machine under load must not fail a notebook

_STATED = re.compile(r"<!--=\s*(.*?)\s*-->", re.DOTALL)
_GIVEN = re.compile(r"[−-]?\d[\d,.]*(?:\s*%)?<!--given:[^>]*-->")
_FREE = re.compile(r"```.*?```|`[^`]*`|\]\([^)]*\)|<!--.*?-->", re.DOTALL)
_NUMBER = re.compile(r"(?<![\w.^])\d[\d,]*(?:\.\d+)?(?!\w)")


class NotebookError(Exception):
    """A notebook that fails, or whose text says what its run does not."""


@dataclass(frozen=True)
class Ran:
    """An executed notebook, the values of the numbers that it states, and the processor time of its kernel."""

    notebook: Any
    values: list[str]
    cpu_seconds: float


def read_source(name: str, folder: Path = FOLDER) -> Any:
    """Return the notebook that the source ``NAME.py`` describes, with cell ids that do not change between runs."""
    notebook = jupytext.read(folder / f"{name}.py")
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"{name}-{index}"
    notebook.metadata = nbformat.from_dict(  # type: ignore[no-untyped-call]
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def text_of(notebook: Any) -> str:
    """The text of a notebook, one paragraph of blank lines between its cells."""
    return "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")


def unchecked_numbers(text: str) -> list[str]:
    """Return the numbers of a text that are neither stated, nor given, nor part of a name or a code span.

    >>> unchecked_numbers("`K = 4096` of e4m3: 2 % less, 3.1 dB<!--= {x:.1f} dB --> more")
    ['2']
    """
    # A stated number goes with its comment: whatever digits stand right before it.
    text = re.sub(r"[−+-]?\d[\d,.]*(?:\s*[^\s\d]{1,7}?)?\**<!--=.*?-->", "", text, flags=re.DOTALL)
    return _NUMBER.findall(_FREE.sub(" ", _GIVEN.sub("", text)))


def templates(text: str) -> list[str]:
    """Return the f-strings of the numbers that a text states.

    >>> templates("about 3.1 dB<!--= {x:.1f} dB --> more")
    ['{x:.1f} dB']
    """
    return _STATED.findall(text)


def disagreements(text: str, values: list[str]) -> list[str]:
    """Compare each stated number with its value in the run; return a line for each that differs.

    >>> disagreements("about 3.1 dB<!--= {x:.1f} dB -->", ["3.2 dB"])
    ["the text states '... about 3.1 dB', the run gives '3.2 dB'"]
    """
    found, begin = [], 0
    for match, value in zip(_STATED.finditer(text), values, strict=True):
        before = " ".join(text[begin : match.start()].split()).rstrip("*")
        # Not the tail of a longer number: 3.1 is not stated by 13.1.
        if not value or not re.search(rf"(?<![\d.,]){re.escape(value)}$", before):
            found.append(f"the text states '... {before[-40:]}', the run gives '{value}'")
        begin = match.end()
    return found


def updated(text: str, values: list[str]) -> str:
    """Put the values of a run in the place of the numbers that a text states.

    >>> updated("about **3.1 dB**<!--= {x:.1f} dB --> more", ["-3.2 dB"])
    'about **-3.2 dB**<!--= {x:.1f} dB --> more'
    """
    pieces, begin = [], 0
    for match, value in zip(_STATED.finditer(text), values, strict=True):
        unit = re.escape(value.lstrip("−+-0123456789.,"))
        pieces += [
            re.sub(rf"[−+-]?\d[\d,.]*{unit}(\**)$", rf"{value}\1", text[begin : match.start()]),
            match[0],
        ]
        begin = match.end()
    return "".join(pieces) + text[begin:]


def run_notebook(name: str, folder: Path = FOLDER) -> Ran:
    """Execute a notebook in a fresh kernel and check its text.

    Raises:
        NotebookError: a cell raised or wrote to standard error, or a number is unchecked or differs; the message lists
            them.
    """
    ran = execute(name, folder)
    check(name, ran)
    return ran


def check(name: str, ran: Ran) -> None:
    """Raise NotebookError unless all that a notebook says is what its run gave."""
    text = text_of(ran.notebook)
    wrong = [
        f"unchecked number {number}: state it with <!--= ... -->, or write it as code"
        for number in unchecked_numbers(text)
    ]
    wrong += disagreements(text, ran.values)
    wrong += [
        f"standard error: {output.text.strip()[:300]}"
        for cell in ran.notebook.cells
        for output in cell.get("outputs", [])
        if output.get("name") == "stderr"
    ]
    if wrong:
        raise NotebookError("\n".join(f"{name}: {line}" for line in wrong))


def execute(name: str, folder: Path = FOLDER) -> Ran:
    """Execute a notebook in a fresh kernel.

    Raises:
        NotebookError: a cell raised.
    """
    notebook = read_source(name, folder)
    expressions = [f"f'''{template}'''" for template in templates(text_of(notebook))]
    last = f"import json, time\nprint(json.dumps([time.process_time(), *map(eval, {expressions!r})]))"
    notebook.cells.append(nbformat.v4.new_code_cell(last))  # type: ignore[no-untyped-call]
    client = NotebookClient(
        notebook,
        extra_arguments=["--IPKernelApp.log_level=40"],  # it warns that its sockets are not encrypted
        timeout=CELL_SECONDS,
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    try:
        # Threads that wait for work sleep: spinning, they would take the cores from each other.
        client.execute(env={**os.environ, "OMP_WAIT_POLICY": "passive"})
    except CellExecutionError as error:
        raise NotebookError(f"{name}: {error}") from None
    outcome = json.loads(notebook.cells.pop().outputs[0].text)
    return Ran(notebook, outcome[1:], outcome[0])


def update(name: str) -> Ran:
    """Execute a notebook, put the numbers of the run into its source, and check it."""
    ran = execute(name)
    path = FOLDER / f"{name}.py"
    path.write_text(updated(path.read_text(encoding="utf-8"), ran.values), encoding="utf-8")
    for cell, source in zip(ran.notebook.cells, read_source(name).cells, strict=True):
        cell.source = source.source
    check(name, ran)
    return ran


def main(arguments: list[str]) -> None:
    """Run the named notebooks; exit with every complaint."""
    options = {argument for argument in arguments if argument.startswith("--")}
    names = [argument for argument in arguments if argument not in options] or list(NAMES)
    unknown = sorted(options - {"--check", "--update"}) + [name for name in names if name not in NAMES]
    if unknown:
        sys.exit(f"notebooks: got {', '.join(unknown)}; give --check, --update, or names among {', '.join(NAMES)}")
    failed = []
    for name in names:
        try:
            ran = update(name) if "--update" in options else run_notebook(name)
        except NotebookError as error:
            failed.append(str(error))
            print(f"{name}: failed", flush=True)
            continue
        if "--check" not in options:
            nbformat.write(ran.notebook, FOLDER / f"{name}.ipynb")  # type: ignore[no-untyped-call]
        print(
            f"{name}: {len(ran.values)} stated numbers agree with the run, {ran.cpu_seconds:.0f} s of CPU", flush=True
        )
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main(sys.argv[1:])
