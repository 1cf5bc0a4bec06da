"""The shape of the package: one copy of every module, imports in one direction, versions that agree, small files."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from package_files import PACKAGE, ROOT, package_modules

MODULES = package_modules()
IMPORTABLE = [name for name in MODULES if not name.endswith(".__main__")]
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60


def layer(module: str) -> int:
    """Return the height of a module of the package: imports only ever go down."""
    parts = module.split(".")
    return {"emulation": 0, "kernels": 1}.get(parts[1] if len(parts) > 1 else "", 2)


def imported_modules(source: str, module: str, *, is_package: bool) -> list[str]:
    """Return the dotted names that `source`, the text of `module`, imports anywhere in it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                cut = len(parents) - node.level + is_package
                base = ".".join(parents[:cut] + ([node.module] if node.module else []))
            # `from fp8ref import emulation` names a layer; `from fp8ref.emulation.units import UNITS` names a module.
            found += [f"{base}.{alias.name}" for alias in node.names] if base == "fp8ref" else [base]
    return found


def wrong_imports(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """Return the imports of `module` that go up, or that reach a folder under its second name."""
    wrong = []
    for name in imported_modules(source, module, is_package=is_package):
        top = name.split(".")[0]
        if top in ("emulation", "kernels") or (top == "fp8ref" and layer(name) > layer(module)):
            wrong.append(name)
    return wrong


@pytest.mark.parametrize("name", MODULES)
def test_imports_go_one_way(name: str) -> None:
    path = MODULES[name]
    assert wrong_imports(path.read_text(), name, is_package=path.name == "__init__.py") == []


@pytest.mark.parametrize(
    ("module", "source", "wrong"),
    [
        ("fp8ref.emulation.dot", "import fp8ref", ["fp8ref"]),
        ("fp8ref.emulation.dot", "import fp8ref.testing", ["fp8ref.testing"]),
        ("fp8ref.emulation.dot", "from fp8ref import emulate_matmul", ["fp8ref.emulate_matmul"]),
        ("fp8ref.emulation.dot", "def f():\n    from fp8ref.kernels.pack import pack", ["fp8ref.kernels.pack"]),
        ("fp8ref.emulation.dot", "from ..kernels import pack", ["fp8ref.kernels"]),
        ("fp8ref.emulation.dot", "from fp8ref.emulation.units import UNITS\nimport torch", []),
        ("fp8ref.emulation.dot", "from . import units", []),
        ("fp8ref.kernels.pack", "from fp8ref.models import load", ["fp8ref.models"]),
        ("fp8ref.kernels.pack", "from .. import models", ["fp8ref.models"]),
        ("fp8ref.kernels.pack", "from fp8ref.emulation.units import UNITS", []),
        ("fp8ref.cli", "from emulation.units import UNITS", ["emulation.units"]),
        ("fp8ref.cli", "from fp8ref.kernels.pack import pack", []),
    ],
)
def test_wrong_imports_are_seen(module: str, source: str, wrong: list[str]) -> None:
    assert wrong_imports(source, module) == wrong


@pytest.mark.parametrize("name", IMPORTABLE)
def test_one_copy_under_one_name(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).resolve() == MODULES[name].resolve()
    for attribute, value in vars(module).items():
        if inspect.isclass(value) or inspect.isfunction(value):
            assert value.__module__.split(".")[0] not in ("emulation", "kernels"), f"{name}.{attribute}"


def test_known_names() -> None:
    units = importlib.import_module("fp8ref.emulation.units")
    assert units.TensorCoreUnit.__module__ == "fp8ref.emulation.units"


@pytest.mark.parametrize("folder", ["emulation", "kernels"])
def test_folders_are_symlinked_and_are_no_packages_of_their_own(folder: str) -> None:
    link = PACKAGE / folder
    assert link.is_symlink(), f"fp8ref/{folder}: git must store it as a symlink (core.symlinks=true)"
    assert link.readlink() == Path("..") / folder
    assert not (ROOT / folder / "__init__.py").exists(), f"with it, `import {folder}` would shadow another project"


def test_versions_agree() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## \[(?:Unreleased\] - next: )?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None, "CHANGELOG.md: no version heading"
    assert newest[1] == version
    assert importlib.metadata.version("fp8ref") == version, "run `make setup`: an older version is installed"


@pytest.mark.parametrize("document", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_documented_commands_exist(document: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"(?:`|^\s*|\$ )make ([a-z]+)", (ROOT / document).read_text(), re.M))
    assert named <= targets, f"{document} names {sorted(named - targets)}, which the Makefile lacks"
    if document == "README.md":
        assert {"demo", "test"} <= named


def python_files() -> list[Path]:
    """Return every Python file of the repository's own folders, each once."""
    folders = ("fp8ref", "pytest_fp8ref", "emulation", "kernels", "tests", "benchmarks", "scripts")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) < MAX_FILE_LINES


def function_lengths(source: str) -> dict[str, int]:
    """Return the lines of each function, from `def` to its end, its docstring left out."""
    lengths = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            if ast.get_docstring(node) is not None:
                first = node.body[0]
                assert first.end_lineno is not None
                length -= first.end_lineno - first.lineno + 1
            lengths[f"{node.name} (line {node.lineno})"] = length
    return lengths


@pytest.mark.parametrize("name", MODULES)
def test_functions_are_small(name: str) -> None:
    lengths = function_lengths(MODULES[name].read_text())
    assert {function: lines for function, lines in lengths.items() if lines >= MAX_FUNCTION_LINES} == {}


def test_function_lengths_leave_the_docstring_out() -> None:
    source = 'def f(\n    x,\n):\n    """One.\n\n    Two.\n    """\n    return x\n'
    assert function_lengths(source) == {"f (line 1)": 4}
