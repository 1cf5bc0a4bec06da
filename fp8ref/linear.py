"""The linear layer as a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fp8ref.emulation.quantize import dequantize, quantize
from fp8ref.kernels.linear import Backend, scaled_linear
from fp8ref.kernels.pack import PackedWeight, pack_weight
from fp8ref.recipes import Recipe, recipe_of


class Fp8Linear(nn.Module):
    """SKELETON: ``x @ weight.t() + bias`` in FP8.

    >>> layer = Fp8Linear.from_linear(nn.Linear(3, 2), "row", backend="emulate")
    >>> layer(torch.ones(1, 3)).shape
    torch.Size([1, 2])
    """

    def __init__(
        self,
        packed: PackedWeight,
        recipe: Recipe | str = "row",
        *,
        bias: Tensor | None = None,
        input_scale: Tensor | float | None = None,
        backend: Backend = "auto",
        batch_invariant: bool = False,
    ) -> None:
        super().__init__()
        self.recipe = recipe_of(recipe)
        self.out_features, self.in_features = packed.shape
        self.backend: Backend = backend
        self.batch_invariant = batch_invariant
        self.packed = packed
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.input_scale: Tensor | None = None
        if input_scale is not None:
            self.input_scale = torch.as_tensor(input_scale, dtype=torch.float32)

    @classmethod
    def from_packed(cls, packed: PackedWeight, recipe: Recipe | str, **options: Any) -> Fp8Linear:
        """Make a layer of a packed weight."""
        return cls(packed, recipe, **options)

    @classmethod
    def from_linear(cls, linear: nn.Module, recipe: Recipe | str, **options: Any) -> Fp8Linear:
        """Quantise a linear layer."""
        recipe = recipe_of(recipe)
        assert isinstance(linear, nn.Linear)
        q = quantize(
            linear.weight.detach(), recipe.weight_dtype, scaling=recipe.weight_scaling, scale_format=recipe.scale_format
        )
        return cls(pack_weight(q.data, q.scaling, q.scale), recipe, bias=linear.bias, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] in the dtype of ``x`` [..., K]."""
        return scaled_linear(x, self.packed, self.bias, input_scale=self.input_scale, backend=self.backend)

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K] that the codes and scales stand for."""
        return dequantize(self.packed.as_scaled(), dtype)
