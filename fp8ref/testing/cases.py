"""One matrix product to try a kernel on, described by a few numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.scales import Scaling, scale_shape
from fp8ref.emulation.units import TensorCoreUnit
from fp8ref.testing.fills import Fill

Kernel = Callable[..., Tensor]
"""A matmul with the arguments of :func:`fp8ref.emulate_matmul`."""

_ONE = Fill(torch.float32, (0x3F800000,))


@dataclass(frozen=True, eq=False)
class Operands:
    """The tensors of a case, made anew, and the memory that holds each of them."""

    a: Tensor
    b: Tensor
    scale_a: Tensor
    scale_b: Tensor
    bias: Tensor | None
    memory: dict[str, Tensor]


@dataclass(frozen=True)
class MatmulCase:
    """A product of ``a`` [m, k] by ``b`` [k, n]; its ``repr`` is Python that makes it again.

    Attributes:
        m: rows of a and of the result.
        n: columns of b and of the result.
        k: products in each output.
        a: how a is filled.
        b: how the transpose of b, [n, k], is filled.
        scaling: the kinds of scales of a and of b.
        scale_a: how the scales of a are filled.
        scale_b: how those of the transpose of b are filled.
        scale_dims: dimensions of two tensor-wise scales: 0, 1 or 2, their one element apart.
        say_scaling: whether the call says the kinds of scales; False leaves them to the shapes.
        bias: how the bias [n] is filled, None for none.
        out_dtype: dtype of the result.
        use_fast_accum: as in :func:`fp8ref.emulate_matmul`.
        split_k: likewise.
        unit: the unit that the expected result is computed with; a kernel is never given it.

    >>> case = MatmulCase(1, 2, 3, Fill(torch.float8_e4m3fn, (0x40,)), Fill(torch.float8_e5m2, (0x3C,)))
    >>> case.expected()
    tensor([[6., 6.]])
    >>> case
    MatmulCase(1, 2, 3, Fill(torch.float8_e4m3fn, (0x40,)), Fill(torch.float8_e5m2, (0x3c,)))
    """

    m: int
    n: int
    k: int
    a: Fill
    b: Fill
    scaling: tuple[Scaling, Scaling] = ("tensor", "tensor")
    scale_a: Fill = _ONE
    scale_b: Fill = _ONE
    scale_dims: tuple[int, int] = (0, 0)
    say_scaling: bool = True
    bias: Fill | None = None
    out_dtype: torch.dtype = torch.float32
    use_fast_accum: bool = False
    split_k: int = 1
    unit: str | TensorCoreUnit = "sm90"

    def operands(self, device: torch.device | str = "cpu") -> Operands:
        """Make the tensors, each between guard bands of its own."""
        shapes = [
            [1] * dims if kind == "tensor" else scale_shape(kind, rows, self.k)
            for kind, rows, dims in zip(self.scaling, (self.m, self.n), self.scale_dims, strict=True)
        ]
        made = {
            "a": self.a.buffer(self.m, self.k, device=device),
            "b": self.b.buffer(self.n, self.k, device=device),
            "scale_a": self.scale_a.buffer(*shapes[0], device=device),
            "scale_b": self.scale_b.buffer(*shapes[1], device=device),
        }
        if self.bias is not None:
            made["bias"] = self.bias.buffer(self.n, device=device)
        tensors = {name: view for name, (view, _) in made.items()}
        scale_b = tensors["scale_b"]
        return Operands(
            tensors["a"],
            tensors["b"].t(),
            tensors["scale_a"],
            scale_b.t() if scale_b.dim() == 2 else scale_b,
            tensors.get("bias"),
            {name: memory for name, (_, memory) in made.items()},
        )

    def options(self, operands: Operands) -> dict[str, Any]:
        """The keyword arguments of a call: ``out_dtype``, and the others where they differ from the defaults."""
        given: dict[str, Any] = {"out_dtype": self.out_dtype}
        if self.bias is not None:
            given["bias"] = operands.bias
        if self.use_fast_accum:
            given["use_fast_accum"] = True
        if self.split_k != 1:
            given["split_k"] = self.split_k
        if self.say_scaling:
            given["scaling"] = self.scaling
        return given

    def call(self, kernel: Kernel, device: torch.device | str = "cpu", **more: Any) -> Tensor:
        """Run a kernel on freshly made tensors: ``kernel(a, b, scale_a, scale_b, **options, **more)``."""
        made = self.operands(device)
        return kernel(made.a, made.b, made.scale_a, made.scale_b, **{**self.options(made), **more})

    def expected(self) -> Tensor:
        """The oracle's result, on the CPU; it is always told the kinds of scales."""
        return self.call(emulate_matmul, unit=self.unit, scaling=self.scaling)

    def snippet(self, check: str = "assert_bits_equal(case.call(kernel), case.expected())") -> str:
        """Python that repeats the case on a function named ``kernel``."""
        names = ("Supports", "assert_bits_equal", "assert_within_bound", "check_matmul")
        used = ", ".join(["Fill", "MatmulCase", *(name for name in names if f"{name}(" in check)])
        unit = "from fp8ref import TensorCoreUnit\n" if "TensorCoreUnit(" in f"{self!r}{check}" else ""
        return f"import torch\n{unit}from fp8ref.testing import {used}\n\ncase = {self!r}\n{check}"

    def __repr__(self) -> str:
        """Python that makes it again, defaults left out."""
        given = [repr(getattr(self, field.name)) for field in fields(self)[:5]]
        for field in fields(self)[5:]:
            value = getattr(self, field.name)
            if value != field.default:
                given.append(f"{field.name}={value!r}")
        return f"MatmulCase({', '.join(given)})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:
        """What Hypothesis prints of a failing example: the same Python."""
        printer.text(repr(self))
