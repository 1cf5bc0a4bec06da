"""What torch.compile sees of the linear layer: one opaque operator with a known shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fp8ref.emulation.scales import check_scaling
from fp8ref.kernels.pack import PackedWeight


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
) -> Tensor:
    """Run :func:`fp8ref.scaled_linear` on the parts of a packed weight."""
    from fp8ref.kernels.linear import scaled_linear

    return scaled_linear(
        x,
        PackedWeight(codes, scale, check_scaling(scaling), n, k),
        bias,
        input_scale=input_scale,
        use_fast_accum=use_fast_accum,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
        backend="emulate" if backend == "emulate" else "auto",
    )


@scaled_linear_operator.register_fake
def _shape_of_result(*arguments: Any) -> Tensor:
    """Return an empty tensor of the result's shape, dtype and device; the weight's K must be that of ``x``."""
    x, n, k, out_dtype = arguments[0], arguments[4], arguments[5], arguments[9]
    if x.shape[-1] != k:
        raise ValueError(f"x: got shape {list(x.shape)}; the weight is [{n}, {k}]: give [..., {k}]")
    out: Tensor = x.new_empty((*x.shape[:-1], n), dtype=out_dtype or x.dtype)
    return out
