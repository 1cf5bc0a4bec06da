"""A linear layer in FP8: its weight paired with its scales, and the pair held against the config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fp8ref.checkpoint.findings import Broken
from fp8ref.checkpoint.header import FLOATS, TensorInfo
from fp8ref.checkpoint.scheme import CALLS, Declared, LayerScheme, WeightScale
from fp8ref.checkpoint.shapes import fitting_kinds, shard_sizes, wanted_shapes
from fp8ref.emulation.quantize import ScaleFormat
from fp8ref.recipes import Recipe

SCALE_NAMES = ("weight_scale", "weight_scale_inv")
INPUT_NAMES = ("input_scale", "activation_scale")
PARTS = (*SCALE_NAMES, *INPUT_NAMES, "input_scale_ub", "bias")
"""Last parts of the names of the tensors that a layer has beside its weight."""
SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E8M0")
"""Dtypes of scales; fp32 holds every value of each."""


@dataclass(frozen=True)
class Fp8Layer:
    """A linear layer in FP8.

    Attributes:
        name: of the layer, without ``.weight``.
        scheme: what the config says about it.
        kind: of its weight scales, as they are.
        weight: F8_E4M3 [N, K].
        scale: the weight's scales.
        input_scale: the activations' scale, of a static layer.
        input_bound: FBGEMM's bound, where it is stored too.
        bias: [N], where there is one.
        shards: rows of the fused layers that the scales belong to; () where there is one scale for all, or one a row.
    """

    name: str
    scheme: LayerScheme
    kind: WeightScale
    weight: TensorInfo
    scale: TensorInfo
    input_scale: TensorInfo | None = None
    input_bound: TensorInfo | None = None
    bias: TensorInfo | None = None
    shards: tuple[int, ...] = ()

    @property
    def recipe(self) -> Recipe:
        """How the layer runs."""
        return recipe_for(self.scheme, "channel" if self.shards else self.kind)

    @property
    def tensors(self) -> list[TensorInfo]:
        """All of its tensors."""
        parts = (self.weight, self.scale, self.input_scale, self.input_bound, self.bias)
        return [part for part in parts if part is not None]


def recipe_for(scheme: LayerScheme, kind: WeightScale) -> Recipe:
    """The recipe that runs a layer as its checkpoint declares.

    Activations that the checkpoint leaves alone get dynamic scales, per token or per 1x128: both operands are FP8.
    """
    scale_format: ScaleFormat = "ue8m0" if scheme.ue8m0 else "float32"
    if kind == "block":
        return Recipe("128x128", "1x128", scale_format=scale_format)
    static, whole = scheme.activation == "static", scheme.activation in ("static", "tensor")
    return Recipe(
        "tensor" if kind == "tensor" else "row",
        "tensor" if whole else "row",
        dynamic=not static,
        scale_format=scale_format,
        activation_bound=scheme.activation_bound,
    )


def pair_layer(
    name: str, weight: TensorInfo, parts: Mapping[str, TensorInfo], declared: Declared, config: dict[str, Any]
) -> Fp8Layer:
    """Pair a weight with its scales and check them against the config.

    Args:
        name: of the layer.
        weight: its F8_E4M3 tensor.
        parts: the other tensors of the layer, by the last part of their names.
        declared: what the quantisation config says.
        config: config.json, for the sizes of fused layers.

    Raises:
        Broken: they do not fit.
    """
    file = weight.file
    if len(weight.shape) != 2 or not name or not weight.name.endswith(".weight"):
        raise Broken.at(file, f"is {weight}; F8_E4M3 is read for the weight [N, K] of a linear layer only", weight.name)
    if 0 in weight.shape:
        raise Broken.at(file, f"is {weight}, a weight without values", weight.name)
    pattern = declared.ignored_by(name)
    if pattern is not None:
        message = f"is {weight}, but {declared.ignore_key} in {declared.file} leaves it out by {pattern!r}"
        raise Broken.at(file, message, weight.name)
    scheme = declared.scheme_of(name)
    if scheme is None:
        raise Broken.at(file, f"is {weight}, but no group in {declared.file} targets {name!r}", weight.name)
    scale = _scale(name, weight, parts, scheme, declared)
    kinds = [kind for kind in fitting_kinds(scale, weight) if kind in scheme.weight]
    shards: tuple[int, ...] = ()
    if not kinds and "tensor" in scheme.weight:
        shards = shard_sizes(name, weight, scale, config)
        kinds = ["tensor"] if shards else []
    if not kinds:
        wanted = wanted_shapes(scheme.weight, weight)
        message = (
            f"is {scale} for a weight {list(weight.shape)}, but {declared.file} says {scheme.said}: {wanted} belongs"
        )
        raise Broken.at(scale.file, message, scale.name)
    _check_activation(kinds[0], scheme, declared, weight)
    _check_inputs(parts, scheme, declared, weight, max(1, len(shards)))
    bias = parts.get("bias")
    if bias is not None and (bias.dtype not in FLOATS[:3] or list(bias.shape) != [weight.shape[0]]):
        raise Broken.at(bias.file, f"is {bias}; F32, BF16 or F16 [{weight.shape[0]}] belongs", bias.name)
    static = parts.get(declared.input_name)
    return Fp8Layer(name, scheme, kinds[0], weight, scale, static, parts.get("input_scale_ub"), bias, shards)


def _scale(
    name: str, weight: TensorInfo, parts: Mapping[str, TensorInfo], scheme: LayerScheme, declared: Declared
) -> TensorInfo:
    """The one tensor of weight scales that a layer must have."""
    found = [parts[part] for part in SCALE_NAMES if part in parts]
    if len(found) == 2:
        raise Broken.at(found[1].file, f"is there beside {found[0].name}; a layer has one of the two", found[1].name)
    wanted = declared.scale_name
    if not found:
        raise Broken.at(weight.file, f"has no scale: {name}.{wanted} is missing", weight.name)
    scale = found[0]
    if scale.dtype not in SCALE_DTYPES:
        raise Broken.at(scale.file, f"is {scale}; a scale is one of {', '.join(SCALE_DTYPES)}", scale.name)
    if not scale.name.endswith(f".{wanted}"):
        message = f"is there, but {declared.file} says {scheme.said}: {wanted} belongs"
        raise Broken.at(scale.file, message, scale.name)
    return scale


def _check_activation(kind: WeightScale, scheme: LayerScheme, declared: Declared, weight: TensorInfo) -> None:
    """Refuse pairs of weight and activation scales that no product takes."""
    fitting = ("group", "none") if kind == "block" else ("static", "token", "tensor", "none")
    if scheme.activation not in fitting:
        message = (
            f"has {kind} scales, but {declared.file} says {scheme.said}: activations {CALLS[scheme.activation]}; "
            "block weights go with dynamic groups of 128, others with static, per-tensor or per-token scales"
        )
        raise Broken.at(weight.file, message, weight.name)


def _check_inputs(
    parts: Mapping[str, TensorInfo], scheme: LayerScheme, declared: Declared, weight: TensorInfo, count: int
) -> None:
    """A static layer has an input scale, any other has none."""
    name = weight.name.removesuffix(".weight")
    given = next((parts[part] for part in INPUT_NAMES if part in parts), None)
    if scheme.activation == "static" and (given is None or declared.input_name not in parts):
        message = f"is static by {declared.file} ({scheme.said}), but {name}.{declared.input_name} is missing"
        raise Broken.at(weight.file, message, weight.name)
    if given is None:
        return
    if scheme.activation != "static" or len([part for part in INPUT_NAMES if part in parts]) > 1:
        message = f"is there, but {declared.file} says {scheme.said}: activations {CALLS[scheme.activation]}"
        raise Broken.at(given.file, message, given.name)
    if given.dtype not in SCALE_DTYPES or given.numel not in (1, count) or len(given.shape) > 2:
        raise Broken.at(given.file, f"is {given}; one F32 or BF16 scale belongs", given.name)
