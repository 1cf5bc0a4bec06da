"""The state of a linear layer in FP8: buffers that no dtype is imposed on, and what a state_dict of it must hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from fp8ref.emulation.checks import check_tensor
from fp8ref.emulation.scales import scale_shape
from fp8ref.kernels.ops import pack_float
from fp8ref.kernels.pack import PackedWeight, pack_weight
from fp8ref.linear_checks import (
    check_fits,
    check_like,
    check_powers,
    checked_bias,
    checked_input_scale,
    has_special_codes,
)
from fp8ref.recipes import Recipe


class PackedModule(nn.Module):
    """A module around a packed weight: its buffers, copies, conversions and state; see :class:`fp8ref.Fp8Linear`."""

    bias: nn.Parameter | None
    kept_weight: nn.Parameter | None
    input_scale: Tensor | None
    _codes: Tensor
    _scale: Tensor

    def __init__(
        self,
        packed: PackedWeight,
        recipe: Recipe,
        *,
        bias: Tensor | None,
        input_scale: Tensor | float | None,
        kept_weight: nn.Parameter | None,
    ) -> None:
        super().__init__()
        check_fits(packed, recipe)
        scale = checked_input_scale(input_scale, recipe, packed.codes.device)
        self.recipe = recipe
        self.out_features, self.in_features = packed.shape
        self.register_buffer("_codes", packed.codes, persistent=False)
        self.register_buffer("_scale", packed.scale, persistent=False)
        self.register_buffer("input_scale", scale)
        self.register_parameter("bias", checked_bias(bias, packed))
        self.register_parameter("kept_weight", kept_weight)
        self._packed: PackedWeight | None = packed
        self._made_of: tuple[object, ...] | None = None

    @property
    def packed(self) -> PackedWeight:
        """The weight as the kernels take it; its tensors are this layer's own."""
        # From the dictionary: torch's __getattr__ costs as much as the rest of this, several times a call.
        packed, codes, scale = self._packed, self._buffers["_codes"], self._buffers["_scale"]
        if packed is None or packed.codes is not codes or packed.scale is not scale:
            kind = self.recipe.weight_scaling
            assert codes is not None
            assert scale is not None
            packed = PackedWeight(
                codes, scale, "row" if kind == "tensor" else kind, self.out_features, self.in_features, kind == "tensor"
            )
            self._packed = packed
        return packed

    @property
    def weight(self) -> Tensor:
        """The FP8 codes [N, K], a view."""
        return self._codes[: self.out_features, : self.in_features]

    @property
    def weight_scale(self) -> Tensor:
        """The fp32 scales of the weight in the shape that :func:`fp8ref.quantize` gives them, a view."""
        scale = self.packed.as_scaled().scale
        return scale[0, 0] if self.recipe.weight_scaling == "tensor" else scale

    def requantize(self) -> None:
        """Make the codes anew from ``kept_weight``, whether or not it changed; without one there is nothing to do.

        >>> from fp8ref import Fp8Linear
        >>> layer = Fp8Linear.from_linear(nn.Linear(3, 2), "row", keep_weight=True)
        >>> _ = layer.kept_weight.data.fill_(448.0)
        >>> layer.requantize()
        >>> layer.dequantized_weight().unique()
        tensor([448.])
        """
        kept = self.kept_weight
        if kept is None:
            return
        r = self.recipe
        packed = pack_float(kept, r.weight_scaling, r.weight_dtype, r.scale_format)
        self._codes, self._scale = packed.codes, packed.scale
        self._made_of = self._mark()

    def _mark(self) -> tuple[object, ...] | None:
        """What tells one state of the kept weight from another."""
        kept = self.kept_weight
        if kept is None:
            return None
        version = -1 if kept.is_inference() else kept._version  # noqa: SLF001 - torch has no other name for it
        return version, kept.data_ptr(), kept.dtype, kept.device

    def _refresh(self) -> None:
        if self.kept_weight is not None and self._made_of != self._mark():
            self.requantize()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move and convert as torch does, but show it codes and scales as integers, which no dtype is imposed on."""
        held = {name: tensor for name, tensor in self._buffers.items() if tensor is not None}
        for name in held:
            self._buffers[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._buffers.update(held)
        for name, tensor in held.items():
            integers = tensor.view(torch.uint8 if tensor.itemsize == 1 else torch.int32)
            moved = fn(integers)
            if moved.dtype != integers.dtype:  # Module.type() converts integers too
                moved = integers.to(moved.device)
            self._buffers[name] = moved.view(tensor.dtype)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what holds for this copy alone; show codes as integers, since torch pickles no FP8 tensors."""
        buffers = {**self._buffers, "_codes": self._codes.view(torch.uint8)}
        return {**self.__dict__, "_buffers": buffers, "_packed": None, "_made_of": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state of :meth:`__getstate__`."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._codes = self._codes.view(self.recipe.weight_dtype)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        self._refresh()
        destination[f"{prefix}weight"] = self.weight.contiguous()
        destination[f"{prefix}weight_scale"] = self.weight_scale.contiguous()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        for hook in self._load_state_dict_pre_hooks.values():
            hook(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        own = {name.removeprefix(prefix): value for name, value in state_dict.items() if name.startswith(prefix)}
        wanted = {"weight", "weight_scale"}
        wanted |= {name for name in ("input_scale", "bias", "kept_weight") if getattr(self, name) is not None}
        missing = sorted(wanted - own.keys())
        if missing == sorted(wanted):
            missing_keys += [prefix + name for name in missing]
        elif missing:
            # Also where strict is False, which torch does not tell: half a layer is never what was meant.
            error_msgs.append(f"{prefix}{missing[0]}: missing; a layer is loaded whole")
        if strict:
            unexpected_keys += [prefix + name for name in own if name not in wanted]
        if missing:
            return
        given = {name: own[name] for name in wanted}
        packed, errors = self._checked(given)
        if packed is None or errors:
            error_msgs += [f"{prefix}{error}" for error in errors]
        else:
            self._take(packed, given, assign=bool(local_metadata.get("assign_to_params_buffers", False)))

    def _checked(self, given: Mapping[str, Any]) -> tuple[PackedWeight | None, list[str]]:
        """Check the tensors of a state_dict; return the weight packed, and what is wrong."""
        packed, errors = None, []
        checks: dict[str, Callable[[], object]] = {
            "bias": lambda: check_like(given["bias"], self.bias, "bias"),
            "kept_weight": lambda: check_like(given["kept_weight"], self.kept_weight, "kept_weight"),
            "input_scale": lambda: checked_input_scale(
                given["input_scale"], self.recipe, check_tensor(given["input_scale"], "input_scale").device
            ),
        }
        for name in checks.keys() & given.keys():
            try:
                checks[name]()
            except (TypeError, ValueError) as error:
                errors.append(str(error))
        try:
            packed = self._pack(given["weight"], given["weight_scale"])
        except (TypeError, ValueError) as error:
            errors.append(str(error))
        return packed, errors

    def _pack(self, codes: object, scale: object) -> PackedWeight:
        """Pack codes and scales of exactly this layer's sizes, dtype and scaling."""
        codes, scale = check_tensor(codes, "weight"), check_tensor(scale, "weight_scale")
        n, k, kind = self.out_features, self.in_features, self.recipe.weight_scaling
        if codes.dtype != self.recipe.weight_dtype or list(codes.shape) != [n, k]:
            raise ValueError(
                f"weight: got {codes.dtype} {list(codes.shape)}; this layer takes {self.recipe.weight_dtype} {[n, k]}"
            )
        wanted = scale_shape(kind, n, k)
        if scale.dtype != torch.float32 or not (
            list(scale.shape) == wanted or (kind == "tensor" and scale.numel() == 1)
        ):
            raise ValueError(
                f"weight_scale: got {scale.dtype} {list(scale.shape)}; {kind!r} scales of {[n, k]} are torch.float32 "
                f"{wanted}"
            )
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise ValueError("weight_scale: it holds a value that is not finite and above zero")
        check_powers(scale, self.recipe, "weight_scale")
        if has_special_codes(codes):
            raise ValueError("weight: it holds codes of NaN or Inf")
        return pack_weight(codes, kind, scale.to(codes.device))

    def _take(self, packed: PackedWeight, given: Mapping[str, Tensor], *, assign: bool) -> None:
        """Take over checked tensors: in place, as torch does, where there is memory and no ``assign``."""
        with torch.no_grad():
            self._put("_codes", packed.codes, assign=assign)
            self._put("_scale", packed.scale, assign=assign)
            if "input_scale" in given:
                self._put("input_scale", given["input_scale"].reshape(()), assign=assign)
            for name in ("bias", "kept_weight"):
                mine = getattr(self, name)
                if name not in given:
                    continue
                if assign or mine.device.type == "meta":
                    setattr(self, name, nn.Parameter(given[name].detach(), requires_grad=mine.requires_grad))
                else:
                    mine.copy_(given[name])
        # A kept weight leads: the codes are made of it again.
        self._made_of = None

    def _put(self, name: str, tensor: Tensor, *, assign: bool) -> None:
        mine = getattr(self, name)
        if assign or mine.device.type == "meta":
            setattr(self, name, tensor.detach())
        else:
            mine.copy_(tensor)
