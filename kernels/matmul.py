"""The product of ready FP8 operands on a GPU: the kernel twin of :func:`fp8ref.emulate_matmul`."""

from __future__ import annotations

from contextlib import nullcontext
from functools import lru_cache

import torch
from torch import Tensor

from fp8ref.emulation.checks import check_bias, check_bool, check_operands, check_out_dtype, check_split_k
from fp8ref.emulation.matmul import emulate_matmul, unpack_scaled
from fp8ref.emulation.quantize import ScaledTensor
from fp8ref.emulation.scales import Scaling, resolve_pair
from fp8ref.kernels import launch
from fp8ref.kernels.activations import Backend, checked_backend
from fp8ref.kernels.device import check_placement
from fp8ref.kernels.launch import Pointer, Runner, addresser, carver, compile_runner, current_stream
from fp8ref.kernels.ops import is_traced, scaled_matmul_operator
from fp8ref.kernels.plan import Plan, choose
from fp8ref.kernels.product import Operands, Product, gpu_name, prepare_product
from fp8ref.kernels.quantize import uses_pdl


def scaled_matmul(
    a: Tensor | ScaledTensor,
    b: Tensor | ScaledTensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    split_k: int = 1,
    scaling: tuple[Scaling, Scaling] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Multiply scaled FP8 matrices on the GPU; the arguments and the bits are those of ``emulate_matmul``.

    Args:
        a: FP8 [M, K], any strides, or a ScaledTensor. Any M, N and K, odd ones too; e5m2 by e5m2 as well.
        b: FP8 [K, N], or a ScaledTensor. Fast where K is contiguous (``weight.t()``) and a multiple of 16.
        scale_a: as in :func:`fp8ref.emulate_matmul`, and so are all the arguments that follow.
        scale_b: see there.
        bias: see there.
        out_dtype: see there.
        use_fast_accum: see there.
        split_k: parts of K, added in order; 1 for none. Always exactly what is asked for.
        scaling: see there.
        backend: "auto" runs the kernel; "emulate" is ``emulate_matmul`` itself, on any device.

    Returns:
        [M, N] of ``out_dtype``, contiguous, detached.

    Raises:
        TypeError, ValueError: an argument that does not fit, or a device without the kernels.

    >>> a = torch.tensor([[1.0, 2.0]]).to(torch.float8_e4m3fn)
    >>> one = torch.ones(())
    >>> scaled_matmul(a, a.t(), one, one, out_dtype=torch.float32, backend="emulate")
    tensor([[5.]])
    """
    checked_backend(backend)
    a, b, scale_a, scale_b, scaling = unpack_scaled(a, b, scale_a, scale_b, scaling)
    if torch.compiler.is_compiling() or (isinstance(a, Tensor) and is_traced(a)):
        left, right = (None, None) if scaling is None else scaling
        floats = (None if x is None else x.detach() for x in (scale_a, scale_b, bias))
        out: Tensor = scaled_matmul_operator(
            a, b, *floats, out_dtype, use_fast_accum, split_k, left, right, backend
        )  # fmt: skip
        return out
    return run_matmul(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, split_k, scaling, backend)


def run_matmul(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    split_k: int,
    scaling: tuple[Scaling, Scaling] | None,
    backend: str,
) -> Tensor:
    """Do the work of :func:`scaled_matmul`, unseen by torch."""
    if backend == "emulate":
        return emulate_matmul(
            a, b, scale_a, scale_b, bias=bias, out_dtype=out_dtype, use_fast_accum=use_fast_accum, split_k=split_k,
            scaling=scaling,
        )  # fmt: skip
    check_operands(a, b)
    kinds, left, right = resolve_pair(a, b, scale_a, scale_b, scaling)
    check_out_dtype(out_dtype)
    check_bias(bias, a, b.shape[1])
    check_split_k(split_k)
    check_bool(use_fast_accum, "use_fast_accum")
    if "1x128" in kinds and use_fast_accum:
        raise ValueError("use_fast_accum: got True with block scales, which are always promoted; pass False")
    left, right = left.resolve_neg(), right.resolve_neg()  # a view may stand for the negatives of what lies in memory
    unit = check_placement(a, {"b": b, "scale_a": left, "scale_b": right, "bias": bias}, "a")
    with torch.cuda.device(a.device) if a.is_cuda else nullcontext():
        out = launch.empty((a.shape[0], b.shape[1]), (b.shape[1], 1), out_dtype)
        if out.numel():
            bias = None if bias is None else bias.contiguous().resolve_neg()
            operands = operands_of(a, b.t(), left, right, kinds)
            _run(operands, a, b, left, right, bias, out, unit, use_fast_accum, split_k)
    return out


def operands_of(a: Tensor, w: Tensor, left: Tensor, right: Tensor, kinds: tuple[Scaling, Scaling]) -> Operands:
    """Describe ``a`` [M, K], ``w`` [N, K] and their scales, ``right`` being laid out as ``w.t()``."""
    (m, k), n = a.shape, w.shape[0]
    if kinds[0] == "tensor":
        strides = (0, 0, 0, 0)
    elif kinds[0] == "row":
        strides = (left.stride(0), 0, right.stride(1), 0)
    else:
        strides = (left.stride(0), left.stride(1), right.stride(1), right.stride(0))
    kind = "128x128 by 1x128" if kinds[0] == "128x128" else kinds[1]
    return Operands(
        m, n, k, (a.stride(0), a.stride(1)), (w.stride(0), w.stride(1)), strides, a.dtype, w.dtype, kind,
        a.data_ptr() % 16 == 0, w.data_ptr() % 16 == 0,
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _prepared(
    operands: Operands,
    unit: str,
    device: torch.device,
    use_fast_accum: bool,
    split_k: int,
    bias: tuple[torch.dtype, bool] | None,
    out_dtype: torch.dtype,
) -> tuple[Product, Runner | None]:
    plan = choose(gpu_name(device), operands.n, operands.k, operands.m, library_allowed=False)
    plan = Plan("triton", split_k, plan.tile)
    product = prepare_product(
        operands, plan, unit, device, use_fast_accum=use_fast_accum, bias=None if bias is None else bias[0],
        bias_aligned=bias is None or bias[1], out_dtype=out_dtype, after_ours=operands.parts(split_k)[1] > 1,
    )  # fmt: skip
    clear = _prepare_clear(product.counters, device) if product.counters else None
    return product, clear


def _prepare_clear(counters: int, device: torch.device) -> Runner:
    from fp8ref.kernels.jit_quantize import clear_kernel

    pdl = uses_pdl(device)
    return compile_runner(clear_kernel, (1,), (Pointer(torch.int32),), (counters,), {"PDL": pdl}, {"launch_pdl": pdl})


def _run(
    operands: Operands,
    a: Tensor,
    b: Tensor,
    left: Tensor,
    right: Tensor,
    bias: Tensor | None,
    out: Tensor,
    unit: str,
    use_fast_accum: bool,
    split_k: int,
) -> None:
    """Launch the product, after clearing the counters of a split one."""
    key = None if bias is None else (bias.dtype, bias.data_ptr() % 16 == 0)
    product, clear = _prepared(operands, unit, a.device, use_fast_accum, split_k, key, out.dtype)
    at_parts = -(-4 * product.counters // 256) * 256
    scratch = launch.empty((max(1, at_parts + product.part_nbytes),), (1,), torch.uint8)
    stream, at = current_stream(a.device.index), addresser()
    counters, parts = carver((0, at_parts), (torch.int32, torch.float32))(scratch)
    if clear is not None:
        clear(counters, stream=stream)
    added = at(left if bias is None else bias)
    product.run(at(a), at(b.t()), at(left), at(right), added, at(out), parts, counters, stream=stream)
