"""Scaled FP8 matrix products with the bits of an NVIDIA H200."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fp8ref.emulation.accumulate import PROMOTION_K, run_chains, split_parts
from fp8ref.emulation.bits import canonical_nan, fma_fp32
from fp8ref.emulation.checks import check_bias, check_bool, check_operands, check_out_dtype
from fp8ref.emulation.compiled import Engine, is_compiled, promote_scaled
from fp8ref.emulation.decode import Span
from fp8ref.emulation.quantize import ScaledTensor
from fp8ref.emulation.rounding import round_to_fp8
from fp8ref.emulation.scales import BLOCK, Scaling, resolve_pair
from fp8ref.emulation.split_k import resolve_split_k
from fp8ref.emulation.subnormals import subnormals_kept
from fp8ref.emulation.units import TensorCoreUnit, unit_of

assert BLOCK == PROMOTION_K, "a scale block is one promoted chain"

_TILES_OF_A_RUN = 4  # cuBLASLt's split of K counts in fours of tiles where one operand has 128x128 scales


@torch.no_grad()
@subnormals_kept()
def emulate_matmul(
    a: Tensor | ScaledTensor,
    b: Tensor | ScaledTensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    unit: str | TensorCoreUnit = "sm90",
    split_k: int | Literal["auto"] = 1,
    device: str | None = None,
    scaling: tuple[Scaling, Scaling] | None = None,
    engine: Engine = "auto",
) -> Tensor:
    """Multiply scaled FP8 matrices and return, bit for bit, what ``torch._scaled_mm`` returns on an H200.

    Args:
        a: FP8 [M, K], any strides; or a :class:`fp8ref.ScaledTensor`, which brings its scales.
        b: FP8 [K, N], any strides; or a ScaledTensor (``fp8ref.quantize(weight).t()``). Both or neither.
        scale_a: fp32 scales of ``a``; its shape says the kind. One element: tensor-wise. [M, 1]: row-wise.
            [M, ceil(K/128)]: 1x128 blocks along K. [ceil(M/128), ceil(K/128)]: 128x128 blocks.
        scale_b: fp32 scales of ``b``, of the matching kind. One element; [1, N]; [ceil(K/128), N] (1x128 blocks) or
            [ceil(K/128), ceil(N/128)] (128x128 blocks). Values are taken as they are, NaN and negative included.
        bias: [N], fp32, bf16 or fp16 whatever the output (torch takes fewer); added in fp32 after the scales, with a
            rounding of its own.
        out_dtype: float32, bfloat16, float16 (overflow to Inf), float8_e4m3fn or float8_e5m2 (saturating).
        use_fast_accum: False promotes the accumulator to fp32 every 128 of K; True never does. Block scales are
            always promoted, so True is refused there.
        unit: the tensor-core unit, a name of :data:`fp8ref.UNITS` or a :class:`fp8ref.TensorCoreUnit`.
        split_k: number of parts that K is cut into (cuBLASLt's split), 1 for none; with 128x128 scales runs are rounded
            up to four tiles of 128, which can leave fewer parts. cuBLASLt never cuts with row-wise scales; kernels do.
            ``"auto"``: what cuBLASLt on ``device`` would do, by :func:`fp8ref.split_k`, leaving products out where it
            does; a number adds every product.
        device: with ``split_k="auto"`` alone: the GPU to ask about, ``"h200"``.
        scaling: the kinds of scales of ``a`` and ``b``, where the shapes leave it open: with K <= 128 row-wise is
            meant unless this says otherwise, with all-one-element scales tensor-wise, and with N = 1 1x128 by 1x128
            rather than by 128x128. One of
            ``("tensor", "tensor")``, ``("row", "row")``, ``("1x128", "1x128")``, ``("1x128", "128x128")``,
            ``("128x128", "1x128")``.
        engine: what computes it; the bits are the same. ``"torch"``: plain PyTorch, on any device. ``"compiled"``:
            loops that numba compiles for CPU tensors (``pip install 'fp8ref[fast]'``) and Triton for CUDA tensors,
            several times faster. ``"auto"``: compiled where the compiler can be imported, else torch, which is said
            once. The ``exact`` unit has one engine, PyTorch, whatever this says. On a CPU a large product works on up
            to 8 threads of its own, and until it is done ``torch.get_num_threads()`` is 1 in the whole process.

    Returns:
        [M, N] of ``out_dtype``, contiguous, detached, on the device of ``a``. NaN is 0x7FFFFFFF, 0x7FFF or 0x7F.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it, what it got and the fix.
        NoEvidenceError: ``split_k="auto"`` where it is not known what the GPU does; a ValueError.
        ImportError: ``engine="compiled"`` without numba, or without Triton for CUDA tensors.

    Warns:
        DroppedProductsWarning: ``split_k="auto"`` for a shape whose last products of K cuBLASLt never adds.

    Source: recorded on an H200, ``tests/emulation/test_golden.py``. Where the hardware refuses (odd K or N, e5m2 by
    e5m2, a bias with fp32 output) this computes what the unit would.

    >>> import fp8ref
    >>> x = fp8ref.quantize(torch.tensor([[1.0, -2.0, 3.0]]), torch.float8_e4m3fn, scaling="row")
    >>> w = fp8ref.quantize(torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.5, 4.0]]), torch.float8_e4m3fn, scaling="row")
    >>> fp8ref.emulate_matmul(x, w.t(), out_dtype=torch.float32)
    tensor([[ 2.0357, 11.0357]])
    """
    a, b, scale_a, scale_b, scaling = unpack_scaled(a, b, scale_a, scale_b, scaling)
    check_operands(a, b)
    kinds, left, right = resolve_pair(a, b, scale_a, scale_b, scaling)
    check_out_dtype(out_dtype)
    check_bias(bias, a, b.shape[1])
    check_bool(use_fast_accum, "use_fast_accum")
    model = unit_of(unit)
    split_k, added = resolve_split_k(
        split_k, device, a, b, out_dtype=out_dtype, use_fast_accum=use_fast_accum, scaling=kinds, bias=bias, unit=model
    )
    blocks = "1x128" in kinds
    if blocks and use_fast_accum:
        raise ValueError("use_fast_accum: got True with block scales, which are always promoted; pass False")
    parts = split_parts(added, split_k, _TILES_OF_A_RUN if "128x128" in kinds else 1)
    promote = None
    if blocks:
        add = promote_scaled if is_compiled(engine, a.device) else _promote_scaled
        promote = partial(_promote_block, kinds=kinds, scale_a=left, scale_b=right, add=add)
    factor = left.reshape(()) * right.reshape(()) if kinds[0] == "tensor" else None

    def finish(total: Tensor, rows: slice, columns: slice) -> Tensor:
        if factor is not None:
            total = _scale_tensor_wise(total, factor, cut=len(parts) > 1)
        elif not blocks:
            total = total * right[:, columns] * left[rows]
        if bias is not None:
            total = total + bias[columns].float()
        return _convert(total, out_dtype)

    return run_chains(a, b, model, parts, engine, finish, out_dtype, promoted=not use_fast_accum, promote=promote)


def unpack_scaled(
    a: Tensor | ScaledTensor,
    b: Tensor | ScaledTensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    scaling: tuple[Scaling, Scaling] | None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, tuple[Scaling, Scaling] | None]:
    """Take scales and their kinds out of scaled operands; plain tensors pass through."""
    if not isinstance(a, ScaledTensor) and not isinstance(b, ScaledTensor):
        return a, b, scale_a, scale_b, scaling
    if not (isinstance(a, ScaledTensor) and isinstance(b, ScaledTensor)):
        raise TypeError(
            f"a, b: got {type(a).__name__} and {type(b).__name__}; give two ScaledTensors, or two tensors with scales"
        )
    for argument, value in (("scale_a", scale_a), ("scale_b", scale_b), ("scaling", scaling)):
        if value is not None:
            raise TypeError(f"{argument}: given beside a ScaledTensor, which brings its own; leave it out")
    if a.transposed or not b.transposed:
        raise ValueError(
            f"a, b: got transposed={a.transposed} and transposed={b.transposed}; give a as quantised, [M, K], and b as "
            "quantised [N, K] and then .t(), so that both have their scales along K"
        )
    return a.data, b.data, a.scale, b.scale, (a.scaling, b.scaling)


def _scale_tensor_wise(acc: Tensor, factor: Tensor, *, cut: bool) -> Tensor:
    """``fma(acc, factor, +0)``, or ``acc * factor`` where K is cut: they differ in the sign of an exact zero."""
    product = acc * factor
    exact_zero = factor == 0 if cut else (factor == 0) | (acc == 0)
    return torch.where(exact_zero & (product == 0), 0.0, product)


def _promote_block(
    total: Tensor,
    chain: Tensor,
    span: Span,
    rows: slice,
    columns: slice,
    *,
    kinds: tuple[Scaling, Scaling],
    scale_a: Tensor,
    scale_b: Tensor,
    add: Callable[..., Tensor],
) -> Tensor:
    """One scaled block of K, in the order that the hardware was recorded to use."""
    if span[0] == span[1]:
        return total
    block = span[0] // BLOCK
    left = scale_a[_groups(rows, kinds[0], scale_a), block]
    right = scale_b[block, _groups(columns, kinds[1], scale_b)]
    return add(total, chain, left, right, joined="128x128" in kinds)


def _promote_scaled(total: Tensor, chain: Tensor, left: Tensor, right: Tensor, *, joined: bool) -> Tensor:
    """Plain PyTorch of :func:`fp8ref.emulation.compiled.promote_scaled`: an fp32 multiply and an FMA."""
    left = left.unsqueeze(1)
    return fma_fp32(chain, left * right, total) if joined else fma_fp32(chain * left, right, total)


def _groups(span: slice, kind: Scaling, scale: Tensor) -> Tensor:
    """Which scale each row or column of a tile takes."""
    index = torch.arange(span.start, span.stop, device=scale.device)
    return index // BLOCK if kind == "128x128" else index


def _convert(result: Tensor, out_dtype: torch.dtype) -> Tensor:
    if out_dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        return round_to_fp8(result, out_dtype)
    return canonical_nan(result.to(out_dtype))
