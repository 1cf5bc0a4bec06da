"""The linear layers of torchao and FBGEMM for linear.py, where they are installed; ready weights, bf16 in and out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fp8ref.kernels.pack import PackedWeight

Layer = Callable[[Tensor, int], Any]
"""``layer(x, i)`` on the i-th weight."""


def torchao_layer(weights: list[PackedWeight]) -> Layer:
    """torchao's dynamic per-row layer on weights of the same sizes."""
    from torchao.quantization import Float8DynamicActivationFloat8WeightConfig, PerRow, quantize_

    layers = []
    for w in weights:
        linear = torch.nn.Linear(w.k, w.n, bias=False, device="cuda", dtype=torch.bfloat16)
        quantize_(linear, Float8DynamicActivationFloat8WeightConfig(granularity=PerRow()))
        layers.append(linear)
    return lambda x, i: layers[i](x)


def fbgemm_layer(weights: list[PackedWeight], *, gemv: bool) -> Layer:
    """FBGEMM's per-row quantiser and its rowwise product, or its product for a few rows."""
    import fbgemm_gpu.experimental.gen_ai  # noqa: F401 - registers the operators

    ops: Any = torch.ops.fbgemm
    codes = [w.as_scaled().data.contiguous() for w in weights]
    scales = [w.as_scaled().scale.flatten().contiguous() for w in weights]

    def layer(x: Tensor, i: int) -> Tensor:
        q, scale = ops.quantize_fp8_per_row(x)
        product = ops.fp8fp8bf16_fast_gemv if gemv else ops.f8f8bf16_rowwise
        out: Tensor = product(q, codes[i], scale, scales[i])
        return out

    return layer


def peers(weights: list[PackedWeight], m: int) -> tuple[dict[str, Layer], dict[str, str]]:
    """Return the layers that run at batch size ``m``, and why the others do not."""
    makers: dict[str, tuple[str, Callable[[], Layer]]] = {
        "torchao dynamic per-row": ("torchao", lambda: torchao_layer(weights)),
        "FBGEMM quantise + rowwise": ("fbgemm_gpu", lambda: fbgemm_layer(weights, gemv=False)),
    }
    if m <= 4:
        makers["FBGEMM quantise + gemv"] = ("fbgemm_gpu", lambda: fbgemm_layer(weights, gemv=True))
    found: dict[str, Layer] = {}
    missing: dict[str, str] = {}
    x = torch.randn(m, weights[0].k, device="cuda", dtype=torch.bfloat16)
    for name, (package, make) in makers.items():
        if importlib.util.find_spec(package) is None:
            missing[name] = f"{package} is not installed"
            continue
        try:
            layer = make()
            out = layer(x, 0)
            torch.cuda.synchronize()
            if out.shape != (m, weights[0].n) or not bool(out.isfinite().all()):
                raise ValueError(f"shape {list(out.shape)}, or values that are not finite")
            found[name] = layer
        except Exception as error:  # noqa: BLE001 - a peer that fails is a row that says so
            missing[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}" if str(error) else repr(error)
    return found, missing
