"""What the interpreting process computes: kernel calls on exact data in poisoned, guarded buffers.

Triton's interpreter has neither the accumulator nor the FP8 conversions of the hardware. On small integers every
product, partial sum and code is exact, in any order, so the oracle, and a plain matrix product, must be equal to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import quantize
from fp8ref.emulation.scales import Scaling
from fp8ref.kernels import calls, launch, plan
from fp8ref.kernels import linear as linear_module
from fp8ref.kernels import quantize as quantize_module
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.matmul import scaled_matmul
from fp8ref.kernels.pack import PackedWeight, pack_weight
from fp8ref.kernels.quantize import quantize_rows
from fp8ref.testing.guards import changed_guards, guarded_empty

E4M3 = torch.float8_e4m3fn
_memories: list[Tensor] = []


def _guarded_empty(shape: tuple[int, ...], _strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    out, memory = guarded_empty(shape, dtype)
    _memories.append(memory)
    return out


def guarded(x: Tensor) -> Tensor:
    """Return a copy of ``x`` between guard bands of NaN."""
    out = _guarded_empty(tuple(x.shape), (), x.dtype)
    out.copy_(x)
    return out


@contextmanager
def guards() -> Iterator[None]:
    """Guard the library's allocations; afterwards no guard byte may have changed."""
    real, launch.empty = launch.empty, _guarded_empty
    try:
        yield
    finally:
        launch.empty = real
    broken = sum(map(changed_guards, _memories))
    _memories.clear()
    assert broken == 0, f"{broken} guard bytes were overwritten"


def integers(shape: tuple[int, ...], g: torch.Generator, limit: int = 4) -> Tensor:
    """Return random integers of at most ``limit`` in magnitude, as floats."""
    return torch.randint(-limit, limit + 1, shape, generator=g).float()


def activations(m: int, k: int, g: torch.Generator, *, blockwise: bool, largest: float = 448.0) -> Tensor:
    """Integers whose scales are powers of two: every row, or block, holds ``largest``, where the weights hold 0."""
    x = integers((m, k), g)
    x[:, :: 128 if blockwise else max(1, k)] = largest
    return x


def largest_of(options: dict[str, Any]) -> float:
    """Return the absmax that makes a power of two of the scale: rounded up to one for ue8m0, or else exactly."""
    return 256.0 if options.get("scale_format") == "ue8m0" else 448.0


def exact_weight(n: int, k: int, scaling: Scaling, g: torch.Generator) -> PackedWeight:
    """Integer codes, 0 where the activations hold 448, with scales that are powers of two."""
    codes = integers((n, k), g)
    codes[:, :: max(1, k) if scaling in ("row", "tensor") else 128] = 0.0
    blocks = -(-k // 128)
    shapes = {"tensor": (1,), "row": (n, 1), "1x128": (n, blocks), "128x128": (-(-n // 128), blocks)}
    scale = torch.exp2(torch.randint(-1, 2, shapes[scaling], generator=g).float())
    w = pack_weight(codes.to(E4M3), scaling, scale)
    return replace(w, codes=guarded(w.codes), scale=guarded(w.scale))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Return ``x`` [M, K] with other strides or dimensions, NaN in the gaps."""
    m, k = x.shape
    if layout == "columns":
        return guarded(x.t().contiguous()).t()
    if layout == "gaps":
        wide = guarded(torch.full((2 * m + 1, k + 3), float("nan"), dtype=x.dtype))
        view = wide[1::2, 2 : k + 2]
        view.copy_(x)
        return view
    if layout == "batch":
        return guarded(x).view(1, m, 1, k)
    return guarded(x)


def linear(m: int, n: int, k: int, seed: int, layout: str, scaling: Scaling, options: dict[str, Any]) -> str:
    """Compare a linear layer with the oracle and with a plain product; return what differs, nothing if all is well."""
    g = torch.Generator().manual_seed(seed)
    bias_dtype, x_dtype = options.pop("bias"), options.pop("x")
    w = exact_weight(n, k, scaling, g)
    largest = largest_of(options)
    x = laid_out(activations(m, k, g, blockwise=w.scaling != "row", largest=largest).to(x_dtype), layout)
    bias = None if bias_dtype is None else guarded(integers((n,), g).to(bias_dtype))
    if options.pop("static"):
        options["input_scale"] = guarded(torch.tensor([2.0]))
        x = x * 2.0
    with guards():
        y = scaled_linear(x, w, bias, **options)
    oracle = scaled_linear(x, w, bias, backend="emulate", **options)
    return _difference(y, oracle, "the oracle") or _plain_difference(y, x, w, bias)


def _plain_difference(y: Tensor, x: Tensor, w: PackedWeight, bias: Tensor | None) -> str:
    scale = w.as_scaled().scale
    weight = w.codes[: w.n, : w.k].double()
    if w.scaling != "row":
        scale = scale.repeat_interleave(128, 1)[:, : w.k]
    if w.scaling == "128x128":
        scale = scale.repeat_interleave(128, 0)[: w.n]
    plain = x.double() @ (weight * scale).t() + (0.0 if bias is None else bias.double())
    return _difference(y.double(), plain, "a plain product") if y.dtype == torch.float32 else ""


def _difference(mine: Tensor, theirs: Tensor, name: str) -> str:
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype or not mine.is_contiguous():
        return f"{name}: {mine.dtype} {list(mine.shape)} {mine.stride()}, expected {theirs.dtype} {list(theirs.shape)}"
    wrong = (mine.double() != theirs.double()).nonzero()
    if len(wrong) == 0:
        return ""
    at = tuple(wrong[0].tolist())
    return f"{name}: {len(wrong)} of {mine.numel()} differ, first at {at}: {mine[at]} instead of {theirs[at]}"


def matmul(m: int, n: int, k: int, seed: int, layout: str, kind: str, options: dict[str, Any]) -> str:
    """Compare a product of ready operands with the oracle; return what differs."""
    g = torch.Generator().manual_seed(seed)
    a = laid_out(integers((m, k), g).to(E4M3), layout)
    b = integers((k, n), g).to(torch.float8_e5m2)
    b = guarded(b) if layout == "columns" else guarded(b.t().contiguous()).t()
    blocks = -(-k // 128)
    shapes = {
        "tensor": ((1,), ()),
        "row": ((m, 1), (1, n)),
        "1x128": ((m, blocks), (blocks, n)),
        "128x128": ((m, blocks), (blocks, -(-n // 128))),
        "128x128 by 1x128": ((-(-m // 128), blocks), (blocks, n)),
    }[kind]
    scales = [guarded(torch.exp2(torch.randint(-1, 2, shape, generator=g).float())) for shape in shapes]
    pair = {"128x128": ("1x128", "128x128"), "128x128 by 1x128": ("128x128", "1x128")}.get(kind, (kind, kind))
    with guards():
        y = scaled_matmul(a, b, *scales, scaling=pair, **options)  # type: ignore[arg-type]
    return _difference(y, emulate_matmul(a, b, *scales, scaling=pair, **options), "the oracle")  # type: ignore[arg-type]


def with_wide_offsets(task: Callable[..., str], *arguments: Any) -> str:
    """Run a task as if every tensor reached over 2**31 elements along K."""
    real, quantize_module.INT32 = quantize_module.INT32, 1
    try:
        return task(*arguments)
    finally:
        quantize_module.INT32 = real


def quantiser(m: int, k: int, seed: int, layout: str, scaling: Scaling, options: dict[str, Any]) -> str:
    """Compare codes and scales with the oracle's, on rows (or blocks) of 448, of zeros and with NaN and Inf."""
    g, blockwise, largest = torch.Generator().manual_seed(seed), scaling == "1x128", largest_of(options)
    x = activations(m, k, g, blockwise=blockwise, largest=largest)
    x[torch.rand(m, k, generator=g) < 0.05] = float("nan")
    x[torch.rand(m, k, generator=g) < 0.05] = float("-inf")
    x[::3] = 0.0
    x[:: 128 if blockwise else max(1, k)] = largest
    x = laid_out(x.bfloat16(), layout).reshape(m, k)
    with guards():
        mine = quantize_rows(x, scaling=scaling, **options)
    theirs = quantize(x, scaling=scaling, **options)
    # The interpreter has no NaN code of its own, so the codes of NaN are for the GPU to show.
    shown = x.isfinite() if mine.data.dtype == E4M3 else ~x.isnan()
    # Nor does it saturate.
    shown &= x.isinf() | (x.abs() <= options.get("absmax_bound", largest))
    codes = [q.data.view(torch.uint8).masked_fill(~shown, 0) for q in (mine, theirs)]
    return _difference(mine.scale, theirs.scale, "scales") or _difference(codes[0], codes[1], "codes")


def bounded_memory(limit: int) -> str:
    """Many kinds of calls keep no more than ``limit`` ready, and all give the right results."""
    g = torch.Generator().manual_seed(0)
    w = exact_weight(9, 40, "row", g)
    real, linear_module._MOST_PREPARED = linear_module._MOST_PREPARED, limit
    linear_module._PREPARED.clear()
    try:
        for m in (*range(1, 3 * limit), 1):
            x = activations(m, 40, g, blockwise=False)
            found = _difference(scaled_linear(x, w), scaled_linear(x, w, backend="emulate"), f"{m} rows")
            if found or not 0 < len(linear_module._PREPARED) <= limit:
                return found or f"{len(linear_module._PREPARED)} calls are kept, at most {limit} may be"
    finally:
        linear_module._MOST_PREPARED = real
    return ""


def negated() -> str:
    """Views that stand for the negatives of what lies in memory, as ``z.conj().imag`` does, in every place."""

    def view(x: Tensor) -> Tensor:
        negative = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert negative.is_neg()
        assert torch.equal(negative, x)
        return negative

    g = torch.Generator().manual_seed(0)
    for n in (1, 9):
        w, x, two = exact_weight(n, 40, "row", g), activations(3, 40, g, blockwise=False), torch.tensor([2.0])
        bias = integers((n,), g)
        options: dict[str, Any] = {"input_scale": view(two), "out_dtype": torch.float32}
        mine = scaled_linear(view(2.0 * x), w, bias if n > 1 else view(bias), **options)
        found = _difference(mine, scaled_linear(2.0 * x, w, bias, backend="emulate", **options), f"linear, N = {n}")
        a, b = integers((3, 40), g).to(E4M3), integers((40, n), g).to(E4M3)
        scales = [torch.exp2(integers(shape, g)) for shape in ((3, 1), (1, n))]
        product = scaled_matmul(a, b, *map(view, scales), bias=view(bias), out_dtype=torch.float32)
        found += _difference(product, emulate_matmul(a, b, *scales, bias=bias, out_dtype=torch.float32), "matmul")
        if found:
            return found
    return ""


def refusals() -> list[str]:
    """What is said of sizes that the kernels cannot count, and of arguments that the quantiser alone cannot take."""

    def zeros(rows: int, columns: int, dtype: torch.dtype = E4M3) -> Tensor:
        return torch.zeros(1, 1).to(dtype).expand(rows, columns)

    one, most = torch.ones(()), 2**31 - 2**14
    x = zeros(1, 4, torch.bfloat16)
    calls: list[Callable[[], object]] = [
        *(lambda m=m, n=n, k=k: scaled_matmul(zeros(m, k), zeros(k, n), one, one)
          for m, n, k in ((1, 1, 2**31 - 1), (1, 1, 2**32), (1, most + 1, 1), (most + 1, 1, 1))),
        lambda: quantize_rows(zeros(1, 2**27, torch.bfloat16), scaling="1x128"),
        lambda: quantize_rows(zeros(1, 2**31, torch.bfloat16)),
        lambda: quantize_rows(x[0]),
        lambda: quantize_rows(x.double()),
        lambda: quantize_rows(x, torch.float16),
        lambda: quantize_rows(x, scale=torch.ones(2)),
        lambda: quantize_rows(x, scale=torch.ones((), device="meta")),
        lambda: quantize_rows(x, absmax_bound=0.0),
    ]  # fmt: skip
    said = []
    for call in calls:
        try:
            call()
        except (TypeError, ValueError) as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def dropped_part(k: int) -> str:
    """A split product whose plan leaves a part out must not equal the oracle: the comparison can fail."""
    g = torch.Generator().manual_seed(0)
    w, x = exact_weight(64, k, "row", g), activations(2, k, g, blockwise=False).bfloat16()
    good = plan.choose("NVIDIA H200", 64, k, 2)
    request = calls.Request(x, False, (2, 64), w, None, None, good, "sm90", False, torch.float32)
    whole = calls.triton_call(request)(x, w, None, None)
    shorter = PackedWeight(w.codes[:, : k - 128].contiguous(), w.scale, w.scaling, w.n, k - 128)
    request = replace(request, x=x[:, : k - 128], w=shorter)
    return _difference(calls.triton_call(request)(x[:, : k - 128], shorter, None, None), whole, "all of K")
