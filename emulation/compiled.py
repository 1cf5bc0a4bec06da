"""The engine that numba compiles: the chains of :mod:`fp8ref.emulation.chain` at several times the speed, same bits.

A step is two passes over its products. The first finds the largest exponent, in int8. The second multiplies in fp32,
scales, and converts to int32, which truncates: the sum of up to ``2 ** (29 - F)`` products, each at most 225/256 of
``2 ** (F + 2)``, and of an accumulator below ``2 ** (F + 1)`` is exact there. Units with F above 25 take float64 and
int64. The sums of more groups than one join in a float64 total, also exact.

The products of two FP8 formats are multiples of ``2 ** -32``, and so is every accumulator made of them: the exponent
that stands for a zero product, at most -64 + 15, is below that of any accumulator but zero.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from typing import Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from fp8ref.emulation.bits import FP32, FP64
from fp8ref.emulation.checks import first_line
from fp8ref.emulation.compiled_cuda import promote_scaled_cuda, triton_obstacle
from fp8ref.emulation.compiled_loops import (
    BLOCK,
    JOINED,
    ROW_FIRST,
    ROW_LAST,
    UNROLL,
    Operand,
    Unit,
    Workspace,
)
from fp8ref.emulation.compiled_numba import compiled_promote, compiled_run_steps
from fp8ref.emulation.decode import Span, k_order
from fp8ref.emulation.formats import Fp8Format
from fp8ref.emulation.units import TensorCoreUnit

Engine = Literal["auto", "torch", "compiled"]
"""What ``engine=`` takes."""

_WIDTH = 512
_HEIGHT = 64
_ONE_THREAD = 1 << 20  # products, a fraction of a millisecond


@cache
def _numba_obstacle() -> Exception | None:
    try:
        compiled_run_steps()
        compiled_promote()
    except Exception as error:  # noqa: BLE001 - a package that is broken raises whatever its parts raise
        return error
    return None


_COMPILERS: dict[str, tuple[Callable[[], Exception | None], str, str]] = {
    "cpu": (_numba_obstacle, "numba", "fast"),
    "cuda": (triton_obstacle, "Triton", "kernels"),
}
"""By type of device: why its compiler cannot be used, its name, and the extra that brings it."""


def _remedy(compiler: str, extra: str, obstacle: Exception) -> str:
    if isinstance(obstacle, ModuleNotFoundError) and obstacle.name == compiler.lower():
        return f"needs {compiler}: pip install 'fp8ref[{extra}]'"
    reason = f"{type(obstacle).__name__}: {first_line(obstacle)}"
    return f"needs {compiler}, which cannot be imported here ({reason}): repair it"


def is_compiled(engine: Engine, device: torch.device) -> bool:
    """Whether ``engine`` means the compiled one for tensors on ``device``.

    "auto" does on a CPU with numba and on a CUDA device with Triton.

    Raises:
        ValueError: an engine that does not exist, or "compiled" for tensors on another kind of device.
        ImportError: "compiled" without the compiler.

    >>> is_compiled("torch", torch.device("cpu")), is_compiled("auto", torch.device("meta"))
    (False, False)
    """
    if engine not in get_args(Engine):
        raise ValueError(f"engine: got {engine!r}; give one of {list(get_args(Engine))}")
    if engine == "torch" or (engine == "auto" and device.type not in _COMPILERS):
        return False
    if device.type not in _COMPILERS:
        raise ValueError(f"engine: got 'compiled' for tensors on {device}; give 'torch', or move the tensors to a CPU")
    obstacle_of, compiler, extra = _COMPILERS[device.type]
    obstacle = obstacle_of()
    if obstacle is None:
        return True
    remedy = _remedy(compiler, extra, obstacle)
    if engine == "compiled":
        raise ImportError(f"engine: got 'compiled', which {remedy}; or give 'torch'") from obstacle
    _say_once(remedy)
    return False


@cache
def _say_once(remedy: str) -> None:
    warnings.warn(
        f"fp8ref computes with its torch engine, several times slower than the compiled one, which {remedy}, or give "
        "engine='torch' to agree",
        RuntimeWarning,
        stacklevel=2,
    )


def promote_scaled(total: Tensor, chain: Tensor, left: Tensor, right: Tensor, *, joined: bool) -> Tensor:
    """Add to ``total`` a scaled chain: ``(chain * left) * right``, the last multiplication and the addition an FMA.

    Args:
        total: fp32 [M, N] laid out as ``chain`` is; it is written to.
        chain: fp32 [M, N], contiguous or the transpose of what is.
        left: fp32 scales [M], contiguous.
        right: fp32 scales [N], contiguous.
        joined: ``chain * (left * right)`` instead.

    Returns:
        ``total``.

    >>> chain, ones = torch.full((1, 2), 2.0), torch.ones(2)
    >>> promote_scaled(torch.ones(1, 2), chain, torch.tensor([3.0]), ones, joined=False)
    tensor([[7., 7.]])
    """
    if total.is_cuda:
        return promote_scaled_cuda(total, chain, left, right, joined=joined)
    order = JOINED if joined else ROW_FIRST
    sums, of_row, of_column = total, left, right
    if not chain.is_contiguous():
        order = JOINED if joined else ROW_LAST
        sums, chain, of_row, of_column = total.t(), chain.t(), right, left
    compiled_promote()(sums.numpy(), chain.numpy(), of_row.numpy(), of_column.numpy(), order)
    return total


@lru_cache(maxsize=64)
def _slots(unit: TensorCoreUnit, spans: tuple[Span, ...], k: int) -> NDArray[np.int64]:
    """Return the k of every product, [steps, L padded to what the loops unroll], and ``k`` itself for a zero."""
    assert unit.products_per_step is not None
    order = k_order(unit, spans, k)
    slots = (torch.arange(k, device="cpu") if order is None else order).view(-1, unit.products_per_step)
    padded: NDArray[np.int64] = pad(slots, (0, -slots.shape[1] % UNROLL), value=k).numpy()
    return padded


class Compiled:
    """A tensor-core unit on two formats, for the chains of K that ``spans`` names."""

    def __init__(
        self, unit: TensorCoreUnit, format_a: Fp8Format, format_b: Fp8Format, spans: Sequence[Span], k: int
    ) -> None:
        """Raise ImportError without numba."""
        assert unit.products_per_step is not None
        self.run_steps = compiled_run_steps()
        narrow = unit.fraction_bits <= 25
        layout = FP32 if narrow else FP64
        self.types = (np.float32, np.int32) if narrow else (np.float64, np.int64)
        self.unit = Unit(
            fraction_bits=unit.fraction_bits,
            group=1 << (29 - unit.fraction_bits) if narrow else 64,
            mask=-1 << (FP64.mantissa_bits + 1 - unit.significant_bits),
            bias=layout.bias,
            mantissa_bits=layout.mantissa_bits,
        )
        self.slots = _slots(unit, tuple(spans), k)
        self.steps_per_instruction = unit.instruction_k // unit.products_per_step
        self.instructions = [-(-(stop - start) // unit.instruction_k) for start, stop in spans]
        self.restarts = unit.c_enters == "after"
        self.formats = {fmt.dtype: fmt for fmt in (format_a, format_b)}

    def tile_shape(self, m: int, n: int, k: int) -> tuple[int, int]:
        """Rows enough to decode ``b`` for, and tiles enough for several threads where these are worth starting."""
        if m * n * max(k, 1) <= _ONE_THREAD:
            return max(1, m), max(1, n)
        return max(1, min(m, _HEIGHT)), max(1, min(n, _WIDTH))

    def prepare(self, operand: Tensor, spans: Sequence[Span]) -> Operand:  # noqa: ARG002 - as the other engines take it
        """Take the codes of ``operand`` [rows, K]; they are decoded a step at a time."""
        fmt = self.formats[operand.dtype]
        return Operand(operand.contiguous().view(torch.uint8).numpy(), fmt.mantissa_bits, fmt.bias)

    def chains(self, a: Operand, b: Operand, spans: Sequence[Span]) -> Iterator[Tensor]:  # noqa: ARG002 - as above
        """Run each chain of one tile; yields fp32 [M, N]."""
        shape = a.codes.shape[0], b.codes.shape[0]
        work = self._workspace(shape[0])
        step = 0
        for instructions in self.instructions:
            total = np.zeros(shape, np.float32)
            for run in [1] * instructions if self.restarts else [instructions]:
                c = np.zeros(shape, np.float32)
                stop = step + run * self.steps_per_instruction
                self.run_steps(a, b, self.slots[step:stop], self.unit, work, c)
                total += c
                step = stop
            yield torch.from_numpy(total)

    def _workspace(self, rows: int) -> Workspace:
        length = self.slots.shape[1]
        real, integer = self.types
        scale, unscale = np.empty(BLOCK, real), np.empty(BLOCK, real)
        return Workspace(
            a_codes=np.empty((length, rows), np.uint8),
            a_values=np.empty((length, rows), real),
            a_exponents=np.empty((length, rows), np.int8),
            b_codes=np.empty((length, BLOCK), np.uint8),
            b_values=np.empty((length, BLOCK), real),
            b_exponents=np.empty((length, BLOCK), np.int8),
            peak=np.empty(BLOCK, np.int8),
            scale=scale,
            scale_bits=scale.view(integer),
            unscale=unscale,
            unscale_bits=unscale.view(integer),
            sums=np.empty(BLOCK, integer),
            total=np.zeros(BLOCK, np.float64),
        )
