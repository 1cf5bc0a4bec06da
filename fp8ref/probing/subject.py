"""The matmul under test, asked one crafted sum of products at a time.

A trial is a few products ``{k: (x, y)}``; every other product of that sum is zero. Trial i lies in row i of a and in
column i of b, so that one call answers min(M, N) trials on its diagonal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from fp8ref.emulation.checks import first_line

Trial = Mapping[int, tuple[float, float]]
"""Products by their place along K; the factors are exact in the operands' formats."""


class ProbeError(Exception):
    """The callable cannot be probed: it failed, or does not return a matrix product.

    >>> import fp8ref
    >>> try:
    ...     fp8ref.probe(lambda a, b: fp8ref.accumulate(a, b) * 2)
    ... except ProbeError as error:
    ...     print(str(error)[:42])
    the callable does not return a @ b: a prod
    """


@dataclass
class Subject:
    """A callable and how it wants to be called.

    Attributes:
        call: ``call(a, b)`` with a [M, K] row-major and b [K, N] column-major, returning [M, N]; with ``scales`` also
            ``call(a, b, scale_a, scale_b)``, and ``bias=`` where a bias is given.
        m: rows of a.
        n: columns of b.
        k: K; every call has these sizes, for kernels may take another path at others.
        tail: products at the end of K, beyond ``k``, that the callable never adds: every call has ones there.
        dtype_a: format of a.
        dtype_b: format of b.
        device: where the operands lie.
        scales: makes scales of ones, [..] as the callable wants them, or None where it takes none.
        lift: with scales, a power of two by which results are raised, for outputs too coarse to show small sums.
        calls: calls made so far.
        trials_asked: trials answered so far.
    """

    call: Callable[..., Tensor]
    m: int
    n: int
    k: int
    dtype_a: torch.dtype = torch.float8_e4m3fn
    dtype_b: torch.dtype = torch.float8_e4m3fn
    device: str = "cpu"
    scales: Callable[[], tuple[Tensor, Tensor]] | None = None
    lift: int = 0
    tail: int = 0
    calls: int = 0
    trials_asked: int = 0
    on_call: Callable[[], None] = field(default=lambda: None)

    def multiply(
        self, a: Tensor, b: Tensor, scales: tuple[Tensor, Tensor] | None = None, bias: Tensor | None = None
    ) -> Tensor:
        """Call the subject on a [M, K] and b [K, N]; its result, checked for shape and type.

        Raises:
            ProbeError: it raised, or returned something else than [M, N] of a floating-point type.
        """
        self.calls += 1
        self.on_call()
        extra = {} if bias is None else {"bias": bias}
        if scales is None and self.scales is not None:
            left, right = self.scales()
            scales = left * 2.0**self.lift, right
        try:
            out = self.call(a, b, *(scales or ()), **extra)
        except Exception as error:
            raise ProbeError(
                f"the callable raised {type(error).__name__} for a {list(a.shape)} {a.dtype}, b {list(b.shape)} "
                f"{b.dtype} on {a.device}: {' '.join(str(error).split())[:300]}"
            ) from error
        if not isinstance(out, Tensor) or list(out.shape) != [a.shape[0], b.shape[1]] or not out.is_floating_point():
            got = f"{list(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else type(out).__name__
            raise ProbeError(
                f"the callable returned {got} for a {list(a.shape)} and b {list(b.shape)}; expected [M, N]"
            )
        # A copy, for the callable may write its next result to the same memory.
        return out.detach().clone()

    def multiply_untouched(self, a: Tensor, b: Tensor) -> Tensor:
        """As :meth:`multiply`.

        Raises:
            ProbeError: also where the operands are not afterwards what they were.
        """
        before = [t.clone().view(torch.uint8) for t in (a, b.t())]
        out = self.multiply(a, b)
        for argument, was, now in zip("ab", before, (a, b.t()), strict=True):
            if not torch.equal(was, now.view(torch.uint8)):
                raise ProbeError(f"the callable changes its operand {argument}: wrap it so that it works on a copy")
        return out

    def operands(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Operands in the subject's formats from exact values: x [M, K], y [N, K]; b comes out column-major.

        Where there is a ``tail`` they are longer by it, and ones there.
        """
        x, y = (functional.pad(t, (0, self.tail), value=1.0) if self.tail else t for t in (x, y))
        a = x.to(self.device, torch.float32).to(self.dtype_a).contiguous()
        b = y.to(self.device, torch.float32).to(self.dtype_b).contiguous()
        return a, b.t()

    def sums(self, x: Tensor, y: Tensor) -> Tensor:
        """Answers [E] to E trials given densely: x [E, K], y [E, K], fp32 values exact in the formats; on the CPU.

        In the output type, or with ``lift`` in float64 and lowered again.
        """
        step, found = min(self.m, self.n), []
        for first in range(0, x.shape[0], step):
            part = slice(first, first + step)
            count = x[part].shape[0]
            rows, columns = (torch.zeros(size, self.k, device=self.device) for size in (self.m, self.n))
            rows[:count], columns[:count] = x[part].to(self.device), y[part].to(self.device)
            found.append(self.multiply(*self.operands(rows, columns)).diagonal()[:count].cpu())
        self.trials_asked += x.shape[0]
        answers = torch.cat(found)
        return answers.double() * 2.0**-self.lift if self.lift else answers

    def ask_raised(self, trials: Sequence[Trial], exponents: Sequence[int], least: int, most: int) -> list[float]:
        """Answers to trials of about ``2**exponents``, raised or lowered where the output has no such values."""
        if self.scales is None:
            return self.ask(trials)
        answers: dict[int, float] = {}
        kept = self.lift
        for lift in (0, -most, -least, 2 * -least):
            rows = [
                row for row, exponent in enumerate(exponents) if row not in answers and least <= exponent + lift <= most
            ]
            if rows:
                self.lift = lift
                answers.update(zip(rows, self.ask([trials[row] for row in rows]), strict=True))
        self.lift = kept
        return [answers.get(row, 0.0) for row in range(len(trials))]

    def ask(self, trials: Sequence[Trial]) -> list[float]:
        """Answers to trials, as Python floats."""
        x, y = torch.zeros(len(trials), self.k), torch.zeros(len(trials), self.k)
        for row, trial in enumerate(trials):
            for place, (left, right) in trial.items():
                x[row, place], y[row, place] = left, right
        values: list[float] = self.sums(x, y).double().tolist()
        return values


@dataclass(frozen=True)
class Range:
    """Exponents that a format has: those of its normal values, and of its smallest subnormal."""

    low: int
    lowest: int
    high: int


def range_of(dtype: torch.dtype) -> Range:
    """The exponents of a format; of bf16 and fp32 only those whose products an accumulator can hold.

    >>> range_of(torch.float8_e4m3fn)
    Range(low=-6, lowest=-9, high=8)
    """
    known = {
        torch.float8_e4m3fn: Range(-6, -9, 8),
        torch.float8_e5m2: Range(-14, -16, 15),
        torch.float16: Range(-14, -24, 15),
        torch.bfloat16: Range(-30, -30, 30),
        torch.float32: Range(-30, -30, 30),
    }
    if dtype not in known:
        raise ProbeError(f"operands: got {dtype}; give one of {[str(name) for name in known]}")
    return known[dtype]


def factors(exponent: int, significand: float, left: Range, right: Range) -> tuple[float, float]:
    """Two values whose product is ``significand * 2**exponent``, the significand in the first; subnormals last.

    >>> factors(-12, 1.5, range_of(torch.float8_e4m3fn), range_of(torch.float8_e4m3fn))
    (0.0234375, 0.015625)
    """
    one = min(max(exponent // 2, left.low), left.high)
    other = exponent - one
    if other > right.high:
        one, other = exponent - right.high, right.high
    elif other < right.low:
        one, other = max(exponent - right.low, left.lowest), exponent - max(exponent - right.low, left.lowest)
    if not (left.lowest <= one <= left.high and right.lowest <= other <= right.high):
        raise ValueError(f"no product of {significand} * 2**{exponent} in these formats")
    return significand * 2.0**one, 2.0**other


def check_subject(matmul: object, dtypes: object, device: str) -> None:
    """Raise unless these can be asked: a callable, two formats, a device that is here."""
    if not callable(matmul):
        raise TypeError(f"matmul: got {type(matmul).__name__}; give a callable matmul(a, b)")
    if not isinstance(dtypes, tuple) or len(dtypes) != 2:
        raise ValueError(f"dtypes: got {dtypes!r}; give two, those of a and of b")
    for dtype in dtypes:
        range_of(dtype)
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device: got {device!r}, but {first_line(error)}; give one that torch has here, such as cpu"
        ) from error
