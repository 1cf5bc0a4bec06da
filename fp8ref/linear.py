"""The linear layer as a module: FP8 codes and scales inside, the dtype of x outside."""

from __future__ import annotations

import dataclasses
from typing import Self

import torch
from torch import Tensor, nn

from fp8ref.emulation.checks import check_bool
from fp8ref.emulation.quantize import dequantize
from fp8ref.kernels.activations import Backend, checked_backend
from fp8ref.kernels.explain import Explanation, explain
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.ops import pack_float, pack_operator, scaled_linear_operator
from fp8ref.kernels.pack import PackedWeight
from fp8ref.linear_state import PackedModule
from fp8ref.recipes import Recipe, recipe_of
from fp8ref.sources import check_weight, obstacle, weight_of


class Fp8Linear(PackedModule):
    """``x @ weight.t() + bias`` with both operands in FP8, with the bits of the oracle.

    Takes x [..., K] in bfloat16, float16 or float32 and returns [..., N] in the same dtype (autocast has no say).
    Made by :meth:`from_linear` or :meth:`from_packed`, :func:`fp8ref.convert_` or :func:`fp8ref.load_checkpoint`.

    **Devices.** ``backend="auto"`` runs the kernels, which need an NVIDIA GPU with FP8 units; a call on any other
    device raises and says so. ``"emulate"`` computes the same bits with the oracle, anywhere.

    **State.** ``state_dict()`` holds ``weight`` (FP8 [N, K]), ``weight_scale`` (fp32, in the shape that
    :func:`fp8ref.quantize` gives it), ``input_scale`` (fp32 [], static recipes), and ``bias`` and ``kept_weight`` where
    there are such. ``load_state_dict`` takes exactly these, all or none; wrong dtypes or shapes, NaN codes and scales
    that are not finite and above zero are errors, and this layer then stays as it was. The recipe is not in it.

    **Dtypes.** ``.to(dtype)``, ``.half()`` and the like change the bias and a kept weight; codes and scales keep their
    dtypes, devices they follow. Copies, pickles, ``torch.compile(fullgraph=True)``, ``torch.export`` and CUDA graphs
    work.

    **Gradients.** Straight through the roundings, in the dtype of x: for x the result's gradient times the dequantised
    weight, for the bias its sum. With ``keep_weight=True`` also for ``kept_weight``: the result's gradient times the
    dequantised x. The codes are made anew from it in the first call after it changed (its version, storage or dtype;
    a change through ``.data`` shows in neither: call :meth:`requantize`); under ``torch.compile`` in every call.

    Attributes:
        recipe: the :class:`fp8ref.Recipe`.
        in_features: K.
        out_features: N.
        backend: "auto" or "emulate"; may be set.
        batch_invariant: True never splits K, so that a row has the same bits in every batch; may be set.
        bias: [N] or None.
        input_scale: fp32 [] of a static recipe, or None.
        kept_weight: the weight in high precision [N, K] that is trained, or None.

    >>> layer = Fp8Linear.from_linear(nn.Linear(3, 2), "row", backend="emulate")
    >>> layer(torch.ones(4, 1, 3, dtype=torch.bfloat16)).shape
    torch.Size([4, 1, 2])
    >>> {name: (tensor.dtype, list(tensor.shape)) for name, tensor in layer.state_dict().items() if "weight" in name}
    {'weight': (torch.float8_e4m3fn, [2, 3]), 'weight_scale': (torch.float32, [2, 1])}
    """

    def __init__(
        self,
        packed: PackedWeight,
        recipe: Recipe | str,
        *,
        bias: Tensor | None = None,
        input_scale: Tensor | float | None = None,
        backend: Backend = "auto",
        batch_invariant: bool = False,
        kept_weight: nn.Parameter | None = None,
    ) -> None:
        super().__init__(packed, recipe_of(recipe), bias=bias, input_scale=input_scale, kept_weight=kept_weight)
        self.backend: Backend = checked_backend(backend)
        check_bool(batch_invariant, "batch_invariant")
        self.batch_invariant = batch_invariant

    @classmethod
    def from_packed(
        cls,
        packed: PackedWeight,
        recipe: Recipe | str,
        *,
        bias: Tensor | None = None,
        input_scale: Tensor | float | None = None,
        backend: Backend = "auto",
        batch_invariant: bool = False,
    ) -> Self:
        """Make a layer of a packed weight, whose tensors it takes over.

        Args:
            packed: what :func:`fp8ref.pack_weight` returned, with the recipe's weight scaling and dtype.
            recipe: a :class:`fp8ref.Recipe` or a name in :data:`fp8ref.RECIPES`.
            bias: [N] float32, bfloat16 or float16, on the device of ``packed``; a Parameter stays the same object.
            input_scale: one fp32 scale of all of x, finite and above zero: needed by static recipes, refused by others.
            backend: see :class:`Fp8Linear`.
            batch_invariant: see :class:`Fp8Linear`.

        Raises:
            TypeError, ValueError: the message names the argument, what it got and the fix.

        >>> from fp8ref import pack_weight
        >>> layer = Fp8Linear.from_packed(pack_weight(torch.eye(2, 3)), "row", backend="emulate")
        >>> layer(torch.tensor([[448.0, 2.0, 3.0]]))
        tensor([[448.0000,   2.0000]])
        """
        return cls(
            packed,
            recipe,
            bias=bias,
            input_scale=input_scale,
            backend=backend,
            batch_invariant=batch_invariant,
        )

    @classmethod
    def from_linear(
        cls,
        linear: nn.Module,
        recipe: Recipe | str,
        *,
        input_scale: Tensor | float | None = None,
        backend: Backend = "auto",
        batch_invariant: bool = False,
        keep_weight: bool = False,
    ) -> Self:
        """Quantise a linear layer, which is only read.

        Args:
            linear: a ``torch.nn.Linear``, or the ``Conv1D`` of transformers' GPT-2, with finite weights.
            recipe: a :class:`fp8ref.Recipe` or a name in :data:`fp8ref.RECIPES`.
            input_scale: as in :meth:`from_packed`.
            backend: see :class:`Fp8Linear`.
            batch_invariant: see :class:`Fp8Linear`.
            keep_weight: keep the weight, as the Parameter ``kept_weight``, to train it: see Gradients there. That of a
                ``Linear`` stays the same object; that of a ``Conv1D`` becomes a new one, transposed.

        Raises:
            TypeError: a module that is not such a layer, or is parametrised or hooked; the message has the remedy.
            ValueError: a weight with NaN or Inf, or without values; a missing or superfluous ``input_scale``.

        >>> Fp8Linear.from_linear(nn.Linear(3, 2), "tensor-static", input_scale=0.01)
        Fp8Linear(in_features=3, out_features=2, bias=True, weight e4m3 tensor, x e4m3 tensor static, backend=auto)
        """
        recipe = recipe_of(recipe)
        reason = obstacle(linear)
        if reason is not None:
            raise TypeError(f"linear: {reason}")
        weight = weight_of(linear)
        check_weight(weight, "linear")
        packed = pack_float(weight, recipe.weight_scaling, recipe.weight_dtype, recipe.scale_format)
        bias = linear.bias
        assert bias is None or isinstance(bias, Tensor)
        kept: nn.Parameter | None = None
        if keep_weight:
            whole = linear.weight
            if isinstance(whole, nn.Parameter) and type(linear) is nn.Linear:
                kept = whole
            else:
                kept = nn.Parameter(weight.contiguous().clone())
        layer = cls(
            packed,
            recipe,
            bias=bias,
            input_scale=input_scale,
            backend=backend,
            batch_invariant=batch_invariant,
            kept_weight=kept,
        )
        layer._made_of = layer._mark()  # the codes are of this very weight
        return layer.train(linear.training)

    def dequantized_weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the weight [N, K] that codes and scales stand for, as :func:`fp8ref.dequantize` does.

        >>> linear = nn.Linear(3, 2)
        >>> _ = linear.weight.data.fill_(448.0)
        >>> torch.equal(Fp8Linear.from_linear(linear, "row").dequantized_weight(), linear.weight)
        True
        """
        self._refresh()
        return dequantize(self.packed.as_scaled(), dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., N] in the dtype of ``x`` [..., K]."""
        parameters = self._parameters  # as in ``packed``: several times faster than attributes
        kept = parameters["kept_weight"]
        if torch.compiler.is_compiling():
            codes, scale = self._codes, self._scale
            if kept is not None:
                r = self.recipe
                codes, scale = pack_operator(kept.detach(), r.weight_scaling, r.weight_dtype, r.scale_format)
            return self._operate(x, codes, scale)
        if kept is not None:
            self._refresh()
            if torch.is_grad_enabled() and kept.requires_grad:
                return self._operate(x, self._codes, self._scale)
        r = self.recipe
        return scaled_linear(
            x,
            self.packed,
            parameters["bias"],
            input_scale=self._buffers["input_scale"],
            use_fast_accum=r.use_fast_accum,
            batch_invariant=self.batch_invariant,
            backend=self.backend,
            activation_scaling=r.activation_scaling,
            activation_dtype=r.activation_dtype,
            scale_format=r.scale_format if r.dynamic else "float32",
            activation_bound=r.activation_bound,
        )

    def _operate(self, x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        """Call the operator that torch.compile and autograd know."""
        r, kind = self.recipe, self.recipe.weight_scaling
        out: Tensor = scaled_linear_operator(
            x, codes, scale, "row" if kind == "tensor" else kind, self.out_features, self.in_features, self.bias,
            self.input_scale, r.use_fast_accum, None, self.batch_invariant, self.backend, kind == "tensor",
            r.activation_scaling, r.activation_dtype, r.scale_format if r.dynamic else "float32", r.activation_bound,
            self.kept_weight,
        )  # fmt: skip
        return out

    def explain(self, m: int, *, dtype: torch.dtype = torch.bfloat16) -> Explanation:
        """Say what a call with ``m`` rows of ``dtype`` runs: path, scales, packing, and why.

        >>> print(Fp8Linear.from_linear(nn.Linear(100, 64), "row", backend="emulate").explain(3))
        weight e4m3 row, x e4m3 row dynamic; backend "emulate": the oracle computes the bits of what follows
        [3, 100] x [64, 100] on NVIDIA H200 (unit sm90)
        weight: e4m3, row scales, stored [64, 112]: 7424 bytes, 768 padding
        quantise: one Triton kernel, 3 x 1 programs of 128 elements
        product: triton, tile 64 weight rows x 16 rows of x x 128 of K, 8 stages, 4 warps, split_k 1 of 1 tile of 128
        why: M <= 64: one pass over the weights is the cost
        """
        r = self.recipe
        found = explain(
            self.packed,
            m,
            out_dtype=dtype,
            bias_dtype=None if self.bias is None else self.bias.dtype,
            batch_invariant=self.batch_invariant,
            activation_scaling=r.activation_scaling,
            activation_dtype=r.activation_dtype,
            static=not r.dynamic,
        )
        what = {"auto": "the kernels", "emulate": "the oracle computes the bits of what follows"}[self.backend]
        first = f'{r.in_words()}; backend "{self.backend}": {what}'
        return dataclasses.replace(found, text=f"{first}\n{found.text}")

    def extra_repr(self) -> str:
        """Sizes, formats and backend, for ``repr``."""
        kept = "" if self.kept_weight is None else ", kept_weight=True"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"{self.recipe.in_words()}, backend={self.backend}{kept}"
        )
