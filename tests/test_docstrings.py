"""Every example in a docstring gives the output that it shows, and everything public has one."""

from __future__ import annotations

import doctest
import importlib
import inspect

import pytest

import fp8ref
from package_files import package_modules

# `python -m` entry points run the command line when they are imported.
MODULES = [name for name in package_modules() if not name.endswith(".__main__")]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    failed, _ = doctest.testmod(importlib.import_module(name), optionflags=doctest.ELLIPSIS)
    assert not failed, capsys.readouterr().out


@pytest.mark.parametrize("name", sorted(fp8ref.__all__))
def test_public_names_have_an_example(name: str) -> None:
    thing = getattr(fp8ref, name)
    if inspect.isclass(thing) or inspect.isroutine(thing):
        assert any(found.examples for found in doctest.DocTestFinder().find(thing, name)), (
            f"fp8ref.{name} ({thing.__module__}): its docstring has no >>> example"
        )
    else:
        # Data (tables, constants) has no docstring of its own: its module shows it.
        assert thing is not None
