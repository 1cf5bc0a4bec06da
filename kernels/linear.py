"""The linear layer: activations quantised on the fly, a packed weight, one or two kernel launches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from fp8ref.emulation.checks import BIAS_DTYPES, check_bool, check_out_dtype, check_tensor
from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import quantize
from fp8ref.kernels.calls import Call, Request, empty_call, library_call, triton_call
from fp8ref.kernels.device import check_placement, interpreting, unit_of_device
from fp8ref.kernels.ops import scaled_linear_operator
from fp8ref.kernels.pack import PackedWeight
from fp8ref.kernels.plan import Plan, choose, run_multiple
from fp8ref.kernels.product import gpu_name

Backend = Literal["auto", "emulate"]

_INPUTS = (torch.bfloat16, torch.float16, torch.float32)
_PREPARED: dict[tuple[object, ...], Call] = {}


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
) -> Tensor:
    """Return ``x @ weight.t() + bias`` in FP8, with the bits of the oracle.

    Args:
        x: [..., K] bfloat16, float16 or float32; quantised to e4m3 with a scale for each row (each 1x128 block, for a
            weight with block scales). Any strides; leading dimensions that do not collapse into one are copied.
        w: what :func:`fp8ref.pack_weight` returned, on the device of ``x``.
        bias: [N] float32, bfloat16 or float16, added in fp32 with a rounding of its own.
        input_scale: fp32, one element, finite and above zero (unchecked: that would wait for the GPU): a static scale
            for all of ``x``. None computes a scale for each row, so that no row depends on another.
        use_fast_accum: False promotes the accumulator to fp32 every 128 of K; True never does.
        out_dtype: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2; None: the dtype of ``x``.
        batch_invariant: True never splits K, so that a row has the same bits at every batch size.
        backend: "auto" runs the kernels; "emulate" computes the same bits with the oracle, on any device, slowly.

    Returns:
        [..., N] of ``out_dtype``, contiguous. Equal to ``emulate_matmul(quantize(x, scaling="row"),
        w.as_scaled().t(), bias=bias, split_k=explain(w, m).split_k)`` bit for bit.

    Raises:
        ValueError: a tensor on a CPU or a GPU without FP8 units, unless emulated; a shape that does not fit.
        TypeError: a dtype that is not listed.
        RuntimeError: ``x`` requires a gradient; this is inference only.

    >>> from fp8ref.kernels.pack import pack_weight
    >>> w = pack_weight(torch.eye(2, 3))
    >>> scaled_linear(torch.tensor([[448.0, 2.0, 3.0]]), w, backend="emulate")
    tensor([[448.0000,   2.0000]])
    """
    if torch.compiler.is_compiling():
        out: Tensor = scaled_linear_operator(
            x, w.codes, w.scale, w.scaling, w.n, w.k, bias, input_scale, use_fast_accum, out_dtype, batch_invariant,
            backend,
        )  # fmt: skip
        return out
    optional = isinstance(bias, Tensor | None) and isinstance(input_scale, Tensor | None)
    if backend != "auto" or not (isinstance(x, Tensor) and isinstance(w, PackedWeight) and optional):
        return _emulated(x, w, bias, input_scale, use_fast_accum, out_dtype, batch_invariant, backend)
    key = (
        x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() % 16, w.signature, use_fast_accum, out_dtype,
        batch_invariant, x.requires_grad and torch.is_grad_enabled(),
        None if input_scale is None else (input_scale.dtype, input_scale.get_device(), input_scale.shape),
        None if bias is None else (bias.dtype, bias.get_device(), bias.shape, bias.stride(), bias.data_ptr() % 16),
    )  # fmt: skip
    call = _PREPARED.get(key)
    if call is None:
        check_arguments(x, w, bias, input_scale, use_fast_accum, out_dtype, batch_invariant, backend)
        check_placement(x, {"w": w.codes, "bias": bias, "input_scale": input_scale})
        with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
            call = _prepare(x, w, bias, input_scale, use_fast_accum, out_dtype or x.dtype, batch_invariant)
        _PREPARED[key] = call
    if x.is_cuda and x.get_device() != torch._C._cuda_getDevice():  # noqa: SLF001 - torch.cuda's costs 1 us
        with torch.cuda.device(x.device):
            return call(x, w, bias, input_scale)
    return call(x, w, bias, input_scale)


def check_arguments(
    x: object,
    w: object,
    bias: object,
    input_scale: object,
    use_fast_accum: object,
    out_dtype: object,
    batch_invariant: object,
    backend: object,
) -> None:
    """Raise unless the arguments of :func:`scaled_linear` fit together; devices are checked elsewhere."""
    if backend not in ("auto", "emulate"):
        raise ValueError(f'backend: got {backend!r}; give "auto" or "emulate"')
    x = check_tensor(x, "x")
    if not isinstance(w, PackedWeight):
        raise TypeError(f"w: got {type(w).__name__}; give what fp8ref.pack_weight returned")
    if x.dtype not in _INPUTS:
        raise TypeError(f"x: got {x.dtype}; give one of {list(_INPUTS)} (fp8ref.scaled_matmul takes FP8 operands)")
    if x.dim() < 1 or x.shape[-1] != w.k:
        raise ValueError(f"x: got shape {list(x.shape)}; the weight is [{w.n}, {w.k}]: give [..., {w.k}]")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            "x: requires a gradient, and scaled_linear has no backward; use torch.no_grad() or x.detach()"
        )
    if bias is not None:
        bias = check_tensor(bias, "bias")
        if bias.dtype not in BIAS_DTYPES:
            raise TypeError(f"bias: got {bias.dtype}; give one of {list(BIAS_DTYPES)}")
        if list(bias.shape) != [w.n] or not bias.is_contiguous():
            raise ValueError(f"bias: got shape {list(bias.shape)}, strides {bias.stride()}; give a contiguous [{w.n}]")
    if input_scale is not None:
        input_scale = check_tensor(input_scale, "input_scale")
        if input_scale.dtype != torch.float32 or input_scale.numel() != 1:
            raise ValueError(
                f"input_scale: got {input_scale.dtype} {list(input_scale.shape)}; give one float32 element"
            )
        if w.scaling != "row":
            raise ValueError(f"input_scale: got one beside a weight with {w.scaling} scales; leave it out")
    if use_fast_accum is True and w.scaling != "row":
        raise ValueError("use_fast_accum: got True with block scales, which are always promoted; pass False")
    check_bool(use_fast_accum, "use_fast_accum")
    check_bool(batch_invariant, "batch_invariant")
    if out_dtype is not None:
        check_out_dtype(out_dtype)


def plan_for(
    w: PackedWeight, m: int, device: torch.device, out_dtype: torch.dtype, bias: torch.dtype | None, invariant: bool
) -> Plan:
    """Return the plan of a :func:`scaled_linear` call with ``m`` rows."""
    # torch._scaled_mm: row-wise scales want bf16 output and a bf16 bias; block scales have limits of their own.
    library = (
        w.scaling == "row"
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
    use_fast_accum: bool,
    out_dtype: torch.dtype,
    batch_invariant: bool,
) -> Call:
    """Compile what a call needs and return the call; the tensors' values are not kept."""
    flat = x.reshape(-1, w.k) if w.k else x.new_empty(x.shape[:-1].numel(), 0)
    m, shape = flat.shape[0], (*x.shape[:-1], w.n)
    bias_dtype = None if bias is None else bias.dtype
    plan = plan_for(w, m, x.device, out_dtype, bias_dtype, batch_invariant)
    unit = unit_of_device(x.device)
    request = Request(flat, x.dim() != 2, shape, w, bias, input_scale, plan, unit, use_fast_accum, out_dtype)
    if m == 0 or w.n == 0:
        return empty_call(request)
    return library_call(request) if plan.path == "library" else triton_call(request)


def _emulated(
    x: Tensor,
    w: PackedWeight,
    bias: Tensor | None,
    input_scale: Tensor | None,
    use_fast_accum: bool,
    out_dtype: torch.dtype | None,
    batch_invariant: bool,
    backend: Backend,
) -> Tensor:
    """Compute the kernels' bits with the oracle; raise for arguments of the wrong kind."""
    check_arguments(x, w, bias, input_scale, use_fast_accum, out_dtype, batch_invariant, backend)
    out_dtype = out_dtype or x.dtype
    flat = x.detach().reshape(x.shape[:-1].numel(), w.k)
    plan = plan_for(w, flat.shape[0], x.device, out_dtype, None if bias is None else bias.dtype, batch_invariant)
    static = None if input_scale is None else input_scale.reshape(1, 1).expand(flat.shape[0], 1).contiguous()
    codes = quantize(flat, scaling="row" if w.scaling == "row" else "1x128", scale=static)
    out = emulate_matmul(
        codes,
        w.as_scaled().t(),
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=use_fast_accum,
        unit=unit_or_sm90(x.device),
        split_k=plan.split_k,
    )
    return out.view(*x.shape[:-1], w.n)
