"""The package as files: which modules it has, and under which names they must be imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "fp8ref"


def package_modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name, those behind the two symlinks included."""
    return {_dotted(path.relative_to(ROOT)): path for path in sorted(_python_files())}


def _python_files() -> Iterator[Path]:
    for folder, _, names in os.walk(PACKAGE, followlinks=True):
        yield from (Path(folder) / name for name in names if name.endswith(".py"))


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
