"""The linear layer: activations quantised on the fly, a packed weight, one or two kernel launches."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fp8ref.emulation.checks import check_same_device
from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import ScaledTensor, ScaleFormat
from fp8ref.emulation.scales import Scaling
from fp8ref.kernels.activations import Activations, Backend, activations_of, check_arguments
from fp8ref.kernels.calls import Call, Request, empty_call, library_call, product_kind, triton_call
from fp8ref.kernels.device import check_placement, interpreting, unit_of_device
from fp8ref.kernels.ops import is_traced, scaled_linear_operator
from fp8ref.kernels.pack import PackedWeight
from fp8ref.kernels.plan import Plan, choose, run_multiple
from fp8ref.kernels.product import gpu_name

_PREPARED: dict[tuple[object, ...], Call] = {}
_MOST_PREPARED = 4096
"""Kinds of calls that are kept ready. With more, all are prepared anew, from kernels that Triton has compiled."""


def scaled_linear(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None = None,
    *,
    input_scale: Tensor | None = None,
    use_fast_accum: bool = False,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
    activation_scaling: Scaling | None = None,
    activation_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_format: ScaleFormat = "float32",
    activation_bound: float | None = None,
) -> Tensor:
    """Return ``x @ weight.t() + bias`` in FP8, with the bits of the oracle.

    Args:
        x: [..., K] bfloat16, float16 or float32; quantised with a scale for each row (each 1x128 block, for a weight
            with block scales). Any strides; leading dimensions that do not collapse into one are copied.
        w: what :func:`fp8ref.pack_weight` returned, on the device of ``x``.
        bias: [N] float32, bfloat16 or float16, added in fp32 with a rounding of its own.
        input_scale: fp32, one element, finite and above zero (unchecked: that would wait for the GPU): a static scale
            for all of ``x``. None computes a scale for each row, so that no row depends on another.
        use_fast_accum: False promotes the accumulator to fp32 every 128 of K; True never does.
        out_dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2; None: the dtype of ``x``.
        batch_invariant: True never splits K, so that a row has the same bits at every batch size.
        backend: "auto" runs the kernels; "emulate" computes the same bits with the oracle, on any device, slowly.
        activation_scaling: "tensor" makes one scale of all of ``x``, so that rows depend on their batch mates; the
            kernels then read ``x`` twice. None or "row" ("1x128" for block scales): see ``x``.
        activation_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scale_format: "ue8m0" rounds each computed scale of ``x`` up to a power of two.
        activation_bound: clips each absmax of ``x`` before a scale is made of it; larger values saturate.

    Returns:
        [..., N] of ``out_dtype``, contiguous. Equal to ``emulate_matmul(quantize(x, scaling="row"),
        w.as_scaled().t(), bias=bias, split_k=explain(w, m).split_k)`` bit for bit. With "tensor" for both operands
        their scales are multiplied first, which rounds once less, as ``torch._scaled_mm`` does.

        Differentiable in ``x`` and ``bias``, straight through the roundings: the gradient of ``x`` is that of the
        result times the dequantised weight, computed in the dtype of ``x``.

    Raises:
        ValueError: a tensor on a CPU or a GPU without FP8 units, unless emulated; a shape that does not fit.
        TypeError: a dtype that is not listed.

    >>> from fp8ref.kernels.pack import pack_weight
    >>> w = pack_weight(torch.eye(2, 3))
    >>> scaled_linear(torch.tensor([[448.0, 2.0, 3.0]]), w, backend="emulate")
    tensor([[448.0000,   2.0000]])
    """
    compiling = torch.compiler.is_compiling()
    if compiling or _seen_by_torch(x, bias, input_scale):
        if not compiling:
            check_arguments(x, w, bias, input_scale, use_fast_accum, out_dtype, batch_invariant, backend)
        out: Tensor = scaled_linear_operator(
            x, w.codes, w.scale, w.scaling, w.n, w.k, bias, input_scale, use_fast_accum, out_dtype, batch_invariant,
            backend, w.one_scale, activation_scaling, activation_dtype, scale_format, activation_bound,
        )  # fmt: skip
        return out
    mode = (use_fast_accum, out_dtype, batch_invariant)
    return run_linear(
        x, w, bias, input_scale, mode, backend, (activation_scaling, activation_dtype, scale_format, activation_bound)
    )


Given = TypeVar("Given", Tensor, Tensor | None)
Mode = tuple[bool, torch.dtype | None, bool]
"""``use_fast_accum``, ``out_dtype`` and ``batch_invariant`` of a call."""
Quantising = tuple[str | None, torch.dtype, str, float | None]
"""``activation_scaling``, ``activation_dtype``, ``scale_format`` and ``activation_bound`` of a call."""


def _seen_by_torch(x: object, bias: object, input_scale: object) -> bool:
    """Whether more is asked of a call than values, which only an operator gives: gradients, or what a tracer wants.

    For anything but tensors the checks say what is wrong.
    """
    if not isinstance(x, Tensor):
        return False
    if is_traced(x) or forward_ad._current_level >= 0:  # noqa: SLF001 - torch has no public name for it
        return True
    if not torch.is_grad_enabled():
        return False
    wanted = x.requires_grad or (isinstance(bias, Tensor) and bias.requires_grad)
    return wanted or (isinstance(input_scale, Tensor) and input_scale.requires_grad)


def run_linear(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None,
    input_scale: Tensor | None,
    mode: Mode,
    backend: str,
    how: Quantising,
) -> Tensor:
    """Do the work of :func:`scaled_linear`, unseen by torch."""
    optional = isinstance(bias, Tensor | None) and isinstance(input_scale, Tensor | None)
    if backend != "auto" or not (isinstance(x, Tensor) and isinstance(w, PackedWeight) and optional):
        return _emulated(x, w, bias, input_scale, mode, _checked(x, w, bias, input_scale, mode, backend, how))
    try:
        x, bias, input_scale = _as_in_memory(x), _as_in_memory(bias), _as_in_memory(input_scale)
        key = (
            x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16, w.signature, mode, how,
            None if input_scale is None else (input_scale.dtype, input_scale.get_device(), input_scale.shape),
            None if bias is None else (bias.dtype, bias.get_device(), bias.shape, bias.stride(), bias.data_ptr() % 16),
        )  # fmt: skip
        call = _PREPARED.get(key)
    except (RuntimeError, TypeError):  # no strides, no memory, no hash: the checks say of what
        _checked(x, w, bias, input_scale, mode, backend, how)
        raise
    if call is None:
        activations = _checked(x, w, bias, input_scale, mode, backend, how)
        check_placement(x, {"w": w.codes, "scale of w": w.scale, "bias": bias, "input_scale": input_scale})
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            call = _prepare(x, w, bias, input_scale, mode, activations)
        if len(_PREPARED) >= _MOST_PREPARED:
            _PREPARED.clear()
        _PREPARED[key] = call
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():  # noqa: SLF001 - torch.cuda's costs 1 us
        with torch.cuda.device(x.device):
            return call(x, w, bias, input_scale)
    return call(x, w, bias, input_scale)


def _as_in_memory(tensor: Given) -> Given:
    """The tensor itself, but for a view that stands for the negatives of what lies in memory."""
    return tensor if tensor is None or not tensor.is_neg() else tensor.resolve_neg()


def _checked(
    x: object, w: PackedWeight, bias: object, input_scale: object, mode: Mode, backend: object, how: Quantising
) -> Activations:
    """Return how x is quantised, or raise where the arguments do not fit together."""
    check_arguments(x, w, bias, input_scale, *mode, backend)
    return activations_of(w, *how, input_scale)


def plan_for(
    w: PackedWeight,
    m: int,
    device: torch.device,
    out_dtype: torch.dtype,
    bias: torch.dtype | None,
    invariant: bool,
    activations: Activations | None = None,
    *,
    aligned: bool = True,
) -> Plan:
    """Return the plan of a :func:`scaled_linear` call with ``m`` rows.

    ``aligned``: whether weight, scales and bias begin at multiples of 16 bytes, as cuBLASLt demands. The bits do not
    depend on it: both paths add up K whole.
    """
    # torch._scaled_mm: row-wise scales want e4m3, bf16 output and a bf16 bias; block scales have limits of their own.
    activations = activations or Activations("row" if w.scaling == "row" else "1x128")
    library = (
        aligned
        and product_kind(w, activations) == "row"
        and activations.dtype == torch.float8_e4m3fn
        and out_dtype == torch.bfloat16
        and bias in (None, torch.bfloat16)
        and unit_or_sm90(device) == "sm90"
        and not (device.type == "cpu" and interpreting())
    )
    return choose(
        gpu_name(device),
        w.n,
        w.k,
        m,
        batch_invariant=invariant,
        library_allowed=library,
        multiple=run_multiple(w.scaling),
    )


def unit_or_sm90(device: torch.device) -> str:
    """Return the unit of a device that the kernels run on, and sm90 for any other, whose bits are then emulated."""
    try:
        return unit_of_device(device)
    except (ValueError, ImportError):
        return "sm90"


def _prepare(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None,
    input_scale: Tensor | None,
    mode: Mode,
    activations: Activations,
) -> Call:
    """Compile what a call needs and return the call; the tensors' values are not kept."""
    use_fast_accum, out_dtype, batch_invariant = mode
    out_dtype = out_dtype or x.dtype
    flat = x.reshape(-1, w.k) if w.k else x.new_empty(x.shape[:-1].numel(), 0)
    m, shape = flat.shape[0], (*x.shape[:-1], w.n)
    aligned = all(t is None or t.data_ptr() % 16 == 0 for t in (w.codes, w.scale, bias))
    bias_dtype = None if bias is None else bias.dtype
    plan = plan_for(w, m, x.device, out_dtype, bias_dtype, batch_invariant, activations, aligned=aligned)
    unit = unit_of_device(x.device)
    request = Request(
        flat, x.dim() != 2, shape, w, bias, input_scale, plan, unit, use_fast_accum, out_dtype, activations
    )
    if m == 0 or w.n == 0:
        return empty_call(request)
    return library_call(request) if plan.path == "library" else triton_call(request)


def _emulated(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None,
    input_scale: Tensor | None,
    mode: Mode,
    activations: Activations,
) -> Tensor:
    """Compute the kernels' bits with the oracle."""
    use_fast_accum, out_dtype, batch_invariant = mode
    out_dtype = out_dtype or x.dtype
    check_same_device(w.codes, x, "w", "x")
    for argument, tensor in (("bias", bias), ("input_scale", input_scale)):
        if tensor is not None:
            check_same_device(tensor, x, argument, "x")
    if input_scale is not None and not 0.0 < input_scale.item() < math.inf:
        raise ValueError(f"input_scale: got {input_scale.item()}; give a finite scale above zero")
    flat = x.detach().reshape(x.shape[:-1].numel(), w.k)
    m = flat.shape[0]
    plan = plan_for(w, m, x.device, out_dtype, None if bias is None else bias.dtype, batch_invariant, activations)
    codes, weight = activations.reference(flat, input_scale), w.as_scaled()
    if activations.scaling == "tensor" and not w.one_scale:
        codes = ScaledTensor(codes.data, codes.scale.reshape(1, 1).expand(m, 1), "row")
    elif activations.scaling == "tensor" and w.n:
        weight = ScaledTensor(weight.data, weight.scale[0, 0], "tensor")
    elif activations.scaling == "tensor":
        return x.new_empty(*x.shape[:-1], 0, dtype=out_dtype)
    out = emulate_matmul(
        codes,
        weight.t(),
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        unit=unit_or_sm90(x.device),
        split_k=plan.split_k,
    )
    return out.view(*x.shape[:-1], w.n)
