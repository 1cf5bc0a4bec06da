"""What torch.compile, autograd and tracers see of the kernels: opaque operators with known shapes and gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.checks import check_operands
from fp8ref.emulation.quantize import dequantize, quantize
from fp8ref.emulation.scales import check_scaling, scale_shape
from fp8ref.kernels.activations import NO_GRADIENT, Activations
from fp8ref.kernels.pack import PackedWeight, pack_weight, padded_k

_PLAIN = (Tensor, torch.nn.Parameter)
# torch has no public names for these; looked up once, for every call of a kernel asks them.
_dispatch_modes = torch._C._len_torch_dispatch_stack  # noqa: SLF001
_functorch_level = torch._C._functorch.peek_interpreter_stack  # noqa: SLF001


def is_traced(x: Tensor) -> bool:
    """Whether the values of ``x`` may not lie at its address, or whether torch watches what is done to them.

    Fake tensors and other subclasses, dispatch modes (``make_fx``) and ``torch.func`` know operators alone.
    """
    return type(x) not in _PLAIN or _dispatch_modes() != 0 or _functorch_level() is not None


@torch.library.custom_op("fp8ref::scaled_linear", mutates_args=())
def scaled_linear_operator(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    scaling: str,
    n: int,
    k: int,
    bias: Tensor | None,
    input_scale: Tensor | None,
    use_fast_accum: bool,
    out_dtype: torch.dtype | None,
    batch_invariant: bool,
    backend: str,
    one_scale: bool = False,
    activation_scaling: str | None = None,
    activation_dtype: torch.dtype = torch.float8_e4m3fn,
    scale_format: str = "float32",
    activation_bound: float | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Run :func:`fp8ref.scaled_linear` on the parts of a packed weight.

    ``weight`` [N, K], what the codes were made of, takes no part in the result: it is who gets the weight's gradient.
    """
    from fp8ref.kernels.linear import run_linear

    del weight
    with torch.no_grad():
        return run_linear(
            x,
            PackedWeight(codes, scale, check_scaling(scaling), n, k, one_scale),
            bias,
            input_scale,
            (use_fast_accum, out_dtype, batch_invariant),
            backend,
            (activation_scaling, activation_dtype, scale_format, activation_bound),
        )


@scaled_linear_operator.register_fake
def _shape_of_result(*arguments: Any) -> Tensor:
    """Return an empty tensor of the result's shape, dtype and device; the weight's K must be that of ``x``."""
    x, n, k, out_dtype = arguments[0], arguments[4], arguments[5], arguments[9]
    if x.dim() < 1 or x.shape[-1] != k:
        raise ValueError(f"x: got shape {list(x.shape)}; the weight is [{n}, {k}]: give [..., {k}]")
    out: Tensor = x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    return out


@torch.library.custom_op("fp8ref::scaled_matmul", mutates_args=())
def scaled_matmul_operator(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None,
    scale_b: Tensor | None,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    split_k: int,
    scaling_a: str | None,
    scaling_b: str | None,
    backend: str,
) -> Tensor:
    """Run :func:`fp8ref.scaled_matmul` on plain tensors."""
    from fp8ref.kernels.matmul import run_matmul

    scaling = None if scaling_a is None or scaling_b is None else (check_scaling(scaling_a), check_scaling(scaling_b))
    return run_matmul(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, split_k, scaling, backend)


@scaled_matmul_operator.register_fake
def _shape_of_product(a: Tensor, b: Tensor, *arguments: Any) -> Tensor:
    check_operands(a, b)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=arguments[3])


@torch.library.custom_op("fp8ref::fake_quantize", mutates_args=())
def fake_quantize_operator(
    x: Tensor,
    input_scale: Tensor | None,
    scaling: str,
    dtype: torch.dtype,
    scale_format: str,
    bound: float | None,
) -> Tensor:
    """Return the values [M, K] that the codes and scales of ``x`` [M, K] stand for, in the dtype of ``x``."""
    activations = Activations(check_scaling(scaling), dtype, scale_format, bound)  # type: ignore[arg-type]
    return dequantize(activations.reference(x, input_scale), x.dtype)


@fake_quantize_operator.register_fake
def _shape_of_values(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("fp8ref::pack_weight", mutates_args=())
def pack_operator(weight: Tensor, scaling: str, dtype: torch.dtype, scale_format: str) -> tuple[Tensor, Tensor]:
    """Quantise and pack a weight [N, K]: the codes and scales of a :class:`fp8ref.PackedWeight`."""
    packed = pack_float(weight, scaling, dtype, scale_format)
    return packed.codes, packed.scale


def pack_float(weight: Tensor, scaling: str, dtype: torch.dtype, scale_format: str) -> PackedWeight:
    """Quantise a weight [N, K] with scales of its own, of either format, and pack it."""
    q = quantize(weight.detach(), dtype, scaling=check_scaling(scaling), scale_format=scale_format)  # type: ignore[arg-type]
    return pack_weight(q.data, q.scaling, q.scale)


@pack_operator.register_fake
def _shape_of_packed(weight: Tensor, scaling: str, dtype: torch.dtype, _: str) -> tuple[Tensor, Tensor]:
    n, k = weight.shape
    rows = -(-n // 16) * 16
    shape = [rows] if scaling in ("tensor", "row") else scale_shape(check_scaling(scaling), n, k)
    codes = weight.new_empty((rows, padded_k(k)), dtype=dtype)
    return codes, weight.new_empty(shape, dtype=torch.float32)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Keep what the gradients need; x only for the weight's."""
    x, codes, scale, scaling, n, k, bias, input_scale = inputs[:8]
    one_scale, activation_scaling, activation_dtype, scale_format, bound, weight = inputs[12:]
    if output.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"out_dtype: got {output.dtype} where a gradient is needed; give a dtype of 16 bits or more")
    if ctx.needs_input_grad[7]:
        raise ValueError(NO_GRADIENT)
    needs_x = weight is not None and ctx.needs_input_grad[17]
    ctx.save_for_backward(codes, scale, input_scale, x if needs_x else None)
    ctx.weight = (check_scaling(scaling), n, k, one_scale)
    chosen = activation_scaling or ("row" if scaling == "row" else "1x128")
    ctx.activations = (chosen, activation_dtype, scale_format, bound)
    ctx.dtypes = (x.dtype, None if bias is None else bias.dtype, None if weight is None else weight.dtype)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of x, bias and weight, straight through the roundings, in the dtype of x."""
    codes, scale, input_scale, x = ctx.saved_tensors
    scaling, n, k, one_scale = ctx.weight
    x_dtype, bias_dtype, weight_dtype = ctx.dtypes
    grads: list[Tensor | None] = [None] * 18
    flat = grad.to(x_dtype).reshape(-1, n)
    if ctx.needs_input_grad[0]:
        weight = dequantize(PackedWeight(codes, scale, scaling, n, k, one_scale).as_scaled(), x_dtype)
        grads[0] = (flat @ weight).view(*grad.shape[:-1], k)
    if bias_dtype is not None and ctx.needs_input_grad[6]:
        grads[6] = flat.sum(0).to(bias_dtype)
    if weight_dtype is not None and ctx.needs_input_grad[17]:
        values = fake_quantize_operator(x.reshape(-1, k), input_scale, *ctx.activations)
        grads[17] = (flat.t() @ values).to(weight_dtype)
    return tuple(grads)


scaled_linear_operator.register_autograd(_backward, setup_context=_save_for_backward)
