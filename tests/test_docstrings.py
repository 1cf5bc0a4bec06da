"""Every example in a docstring or a document gives the output that it shows, and everything public has one."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import fp8ref
from package_files import ROOT, package_modules

# `python -m` entry points run the command line when they are imported.
MODULES = [name for name in package_modules() if not name.endswith(".__main__")]
CALLABLES = sorted(
    name
    for name in fp8ref.__all__
    if inspect.isclass(getattr(fp8ref, name)) or inspect.isroutine(getattr(fp8ref, name))
)
DOCUMENTS = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))) if ">>> " in path.read_text()]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not failed, capsys.readouterr().out


@pytest.mark.parametrize("name", CALLABLES)
def test_public_names_have_an_example(name: str) -> None:
    thing = getattr(fp8ref, name)
    assert any(found.examples for found in doctest.DocTestFinder().find(thing, name)), (
        f"fp8ref.{name} ({thing.__module__}): its docstring has no >>> example"
    )


def test_the_readme_has_an_example() -> None:
    assert ROOT / "README.md" in DOCUMENTS


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_documented_examples(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # The fence that closes a code block would count as the last line of the output.
    text = re.sub(r"^```.*$", "", path.read_text(), flags=re.MULTILINE)
    test = doctest.DocTestParser().get_doctest(text, {}, path.name, str(path), 0)
    failed, _ = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test)
    assert not failed, capsys.readouterr().out
