"""Small seeded linear layers in FP8, and what the oracle says that they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import fp8ref
from fp8ref import RECIPES, Fp8Linear, Recipe


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(n: int = 20, k: int = 140, *, bias: bool = True) -> nn.Linear:
    made = nn.Linear(k, n, bias=bias)
    made.weight.data.copy_(random(n, k))
    if bias:
        made.bias.data.copy_(random(n, seed=1))
    return made


def layer_of(name: str = "row", **options: Any) -> Fp8Linear:
    scale = None if RECIPES[name].dynamic else 0.01
    return Fp8Linear.from_linear(linear(), name, input_scale=scale, backend="emulate", **options)


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.reshape(-1).view(whole), b.reshape(-1).view(whole))
    )


def expected(x: Tensor, source: nn.Linear, recipe: Recipe, scale: float | None = None) -> Tensor:
    """The layer's result from the oracle's own two functions."""
    w = fp8ref.quantize(
        source.weight.detach(), recipe.weight_dtype, scaling=recipe.weight_scaling, scale_format=recipe.scale_format
    )
    how: dict[str, Any] = {"scale_format": recipe.scale_format, "absmax_bound": recipe.activation_bound}
    if scale is not None:
        how = {"scale": scale}
    rows = x.reshape(-1, x.shape[-1])
    q = fp8ref.quantize(rows, recipe.activation_dtype, scaling=recipe.activation_scaling, **how)
    if (q.scaling, w.scaling) == ("row", "tensor"):
        w = fp8ref.ScaledTensor(w.data, w.scale.expand(w.shape[0], 1), "row")
    if (q.scaling, w.scaling) == ("tensor", "row"):
        q = fp8ref.ScaledTensor(q.data, q.scale.expand(rows.shape[0], 1), "row")
    y = fp8ref.emulate_matmul(q, w.t(), bias=source.bias, out_dtype=x.dtype, use_fast_accum=recipe.use_fast_accum)
    return y.view(*x.shape[:-1], source.out_features)
