"""The prepared calls behind :func:`fp8ref.scaled_linear`: everything decided, two launches left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fp8ref.kernels import launch
from fp8ref.kernels.activations import Activations
from fp8ref.kernels.launch import Runner, addresser, carver, contiguous_strides, current_stream
from fp8ref.kernels.pack import PackedWeight
from fp8ref.kernels.plan import Plan
from fp8ref.kernels.product import Operands, Product, prepare_product
from fp8ref.kernels.quantize import absmax_parts, prepare_quantiser

Call = Callable[[Tensor, PackedWeight, Tensor | None, Tensor | None], Tensor]
"""``call(x, w, bias, input_scale)``."""


def _round_up(size: int) -> int:
    """Return ``size`` rounded up to the alignment that CUDA's own allocations have."""
    return -(-size // 256) * 256


@dataclass(frozen=True)
class Request:
    """A validated call of :func:`fp8ref.scaled_linear`, whose tensors show dtypes, shapes and alignments only.

    Attributes:
        x: the activations as [M, K].
        flatten: whether calls bring ``x`` with other dimensions than these two.
        shape: the shape of the result.
        activations: how ``x`` is quantised.
    """

    x: Tensor
    flatten: bool
    shape: tuple[int, ...]
    w: PackedWeight
    bias: Tensor | None
    input_scale: Tensor | None
    plan: Plan
    unit: str
    use_fast_accum: bool
    out_dtype: torch.dtype
    activations: Activations = field(default_factory=Activations)

    @property
    def parts(self) -> int:
        """Floats of working memory that the quantiser needs."""
        return absmax_parts(self.activations, static=self.input_scale is not None)

    def quantiser(self, counters: int) -> Runner:
        """Compile the quantiser of ``x``, which also zeroes the counters of the product."""
        return prepare_quantiser(
            self.x,
            self.w.codes.shape[1],
            counters,
            self.activations,
            static=self.input_scale is not None,
            aligned=self.x.data_ptr() % 16 == 0,
        )

    def product(self) -> Product:
        """Compile the product of the codes with the packed weight."""
        w, bias = self.w, self.bias
        (m, k), row = self.x.shape, self.w.codes.shape[1]
        blocks = -(-k // 128)
        strides = (1, 0, 1, 0) if w.scaling == "row" else (blocks, 1, blocks, 1)
        w_aligned = w.codes.data_ptr() % 16 == 0
        kind, dtype = product_kind(w, self.activations), self.activations.dtype
        operands = Operands(m, w.n, row, (row, 1), (row, 1), strides, dtype, w.codes.dtype, kind, True, w_aligned)
        return prepare_product(
            operands,
            self.plan,
            self.unit,
            self.x.device,
            use_fast_accum=self.use_fast_accum,
            bias=None if bias is None else bias.dtype,
            bias_aligned=bias is None or bias.data_ptr() % 16 == 0,
            out_dtype=self.out_dtype,
            after_ours=True,
        )


def product_kind(w: PackedWeight, activations: Activations) -> str:
    """Return the kind of scales of the product: "tensor", with one rounding, where each operand has a single one."""
    return "tensor" if w.one_scale and activations.scaling == "tensor" else w.scaling


def empty_call(request: Request) -> Call:
    """Prepare the call for a result without elements."""
    shape, out_dtype = request.shape, request.out_dtype

    def call(x: Tensor, *_: object) -> Tensor:
        return x.new_empty(shape, dtype=out_dtype)

    return call


def triton_call(request: Request) -> Call:
    """Prepare quantiser and Triton product.

    One allocation a call holds codes, scales, counters and partial results. It belongs to the call, not to a stream or
    a weight, so calls on several streams and captured graphs cannot disturb each other.
    """
    (m, k), device, flatten = request.x.shape, request.x.device, request.flatten
    shape, out_dtype, blockwise = request.shape, request.out_dtype, request.w.scaling != "row"
    product = request.product()
    multiply = product.run
    quantise = request.quantiser(product.counters)
    at = addresser()
    at_scales = _round_up(m * request.w.codes.shape[1])
    at_given = at_scales + _round_up(4 * m * (-(-k // 128) if blockwise else 1))
    at_counters = at_given + _round_up(4 * request.parts)
    at_parts = at_counters + _round_up(4 * product.counters)
    nbytes = max(1, at_parts + product.part_nbytes)
    carve = carver(
        (0, at_scales, at_given, at_counters, at_parts),
        (request.activations.dtype, torch.float32, torch.float32, torch.int32, torch.float32),
    )
    strides, index = contiguous_strides(shape), device.index

    def call(x: Tensor, w: PackedWeight, bias: Tensor | None, input_scale: Tensor | None) -> Tensor:
        if flatten:
            x = x.reshape(m, k)
        out = launch.empty(shape, strides, out_dtype)
        codes, scales, given, counters, parts = carve(launch.empty((nbytes,), (1,), torch.uint8))
        stream = current_stream(index)
        if blockwise:
            quantise(at(x), codes, scales, counters, stream=stream)
        else:
            if input_scale is not None:
                given = at(input_scale)
            quantise(at(x), codes, scales, given, counters, stream=stream)
        added = scales if bias is None else at(bias)
        multiply(codes, at(w.codes), scales, at(w.scale), added, at(out), parts, counters, stream=stream)
        return out

    return call


def library_call(request: Request) -> Call:
    """Prepare quantiser and ``torch._scaled_mm`` on the packed weight (row-wise scales, N a multiple of 16)."""
    (m, k), device, flatten = request.x.shape, request.x.device, request.flatten
    shape, out_dtype, use_fast_accum = request.shape, request.out_dtype, request.use_fast_accum
    row = request.w.codes.shape[1]
    quantise, parts = request.quantiser(0), request.parts
    dtype = request.activations.dtype
    at, index = addresser(), device.index

    def call(x: Tensor, w: PackedWeight, bias: Tensor | None, input_scale: Tensor | None) -> Tensor:
        if flatten:
            x = x.reshape(m, k)
        codes = launch.empty((m, row), (row, 1), dtype)
        scales = launch.empty((m, 1), (1, 1), torch.float32)
        at_scales = given = at(scales)
        if input_scale is not None:
            given = at(input_scale)
        elif parts:
            given = at(launch.empty((parts,), (1,), torch.float32))
        quantise(at(x), at(codes), at_scales, given, at_scales, stream=current_stream(index))
        out: Tensor = torch._scaled_mm(  # noqa: SLF001 - torch's documented name for this product
            codes, w.codes.t(), scales, w.scale.view(1, -1), bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum
        )
        return out.view(shape)

    return call
