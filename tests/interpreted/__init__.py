"""Runs the kernels under Triton's interpreter, in a process of its own: Triton looks at the environment on import."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

_VARIABLE = "TRITON_INTERPRET"


@contextmanager
def interpreter() -> Iterator[Callable[..., Any]]:
    """Give ``run(function, *arguments)``, which calls a module-level function where Triton interprets."""
    before = os.environ.get(_VARIABLE)
    os.environ[_VARIABLE] = "1"
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:

            def run(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
                return pool.submit(function, *arguments, **options).result()

            run(os.getpid)
            # The process exists now; what this one imports from here on must not be interpreted.
            _restore(before)
            yield run
    finally:
        _restore(before)


def _restore(before: str | None) -> None:
    if before is None:
        os.environ.pop(_VARIABLE, None)
    else:
        os.environ[_VARIABLE] = before
