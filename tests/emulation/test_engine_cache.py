"""The machine code that numba keeps on disk: a help, never a condition."""

from __future__ import annotations

import errno
import importlib
from pathlib import Path

import numpy as np
import pytest

from fp8ref.emulation.compiled_numba import compile_loops


def test_machine_code_that_cannot_be_written_or_read_is_compiled_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A full disk, and files that one has cut short."""
    from numba.core.caching import IndexDataCacheFile

    (tmp_path / "a_loop.py").write_text("def double(x):\n    for i in range(len(x)):\n        x[i] *= 2\n")
    monkeypatch.syspath_prepend(tmp_path)

    def check() -> None:
        x = np.ones(3)
        compile_loops(importlib.import_module("a_loop").double)(x)
        assert x.tolist() == [2.0, 2.0, 2.0]

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as full_disk:
        full_disk.setattr(IndexDataCacheFile, "_save_data", refuse)
        check()
    check()
    for kind in ("*.nbc", "*.nbi"):
        kept = list(tmp_path.rglob(kind))
        assert kept
        for file in kept:
            file.write_bytes(b"")
        check()
