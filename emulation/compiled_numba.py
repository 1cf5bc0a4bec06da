"""numba on the loops of :mod:`fp8ref.emulation.compiled_loops`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pickle import UnpicklingError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8ref.emulation.compiled_loops import (
    Operand,
    Unit,
    Workspace,
    _add_products,
    _align,
    _carry,
    _decode,
    _find_peaks,
    _finish,
    _fma,
    _take,
    promote,
    run_steps,
    use_wide_vectors,
)

RunSteps = Callable[[Operand, Operand, NDArray[np.int64], Unit, Workspace, NDArray[np.float32]], None]
Fp32 = NDArray[np.float32]
Promote = Callable[[Fp32, Fp32, Fp32, Fp32, int], None]


@cache
def compiled_run_steps() -> RunSteps:
    """Return ``run_steps`` as numba compiles it, at its first call for a type, or finds it in its cache.

    Raises:
        ImportError: numba is not here, or does not work with this Python or this numpy.
    """
    compiled: RunSteps = compile_loops(run_steps, _take, _decode, _find_peaks, _align, _add_products, _carry, _finish)
    return compiled


@cache
def compiled_promote() -> Promote:
    """Return ``promote`` as numba compiles it; raises as :func:`compiled_run_steps` does."""
    compiled: Promote = compile_loops(promote, _fma)
    return compiled


def compile_loops(function: Callable[..., None], *helpers: Callable[..., object]) -> Any:
    """Return ``function`` as numba compiles it at its first call, or finds it in its cache; it lets go of the GIL.

    Args:
        function: a module's function of arrays and numbers.
        helpers: the functions that it calls.

    Raises:
        ImportError: numba is not here.
    """
    from numba import njit
    from numba.extending import register_jitable

    _compile_use_wide_vectors()
    for helper in helpers:
        # In line, so that LLVM sees that the slices which they are given need no reference counts, atomic ones.
        register_jitable(forceinline=True)(helper)
    try:
        compiled = njit(nogil=True, cache=True, error_model="numpy")(function)
    except RuntimeError:  # no folder that machine code can be kept in: every process compiles anew
        return njit(nogil=True, error_model="numpy")(function)
    kept: Any = getattr(compiled, "_cache", None)
    if hasattr(kept, "_guard_against_spurious_io_errors"):
        # A full disk, or a file that was cut short by one, is no reason not to compile.
        kept._guard_against_spurious_io_errors = lambda: suppress(OSError, EOFError, UnpicklingError)  # noqa: SLF001
    return compiled


@cache
def _compile_use_wide_vectors() -> None:
    """LLVM takes half of an AVX-512 unit by itself, for the sake of clock rates that newer processors no longer drop.

    llvmlite knows this attribute only as text, and keeps it out of the method that would add it.
    """
    from numba import types
    from numba.extending import intrinsic, overload

    @intrinsic
    def mark(typing_context: Any) -> tuple[Any, Any]:  # noqa: ARG001 - numba gives it
        def generate(context: Any, builder: Any, _signature: Any, _arguments: Any) -> Any:
            attributes = builder.function.attributes
            if isinstance(attributes, set):
                set.add(attributes, '"prefer-vector-width"="512"')
            return context.get_dummy_value()

        return types.none(), generate

    marking: Any = mark

    @overload(use_wide_vectors, inline="always")
    def _() -> Callable[[], None]:
        def call() -> None:
            marking()

        return call
