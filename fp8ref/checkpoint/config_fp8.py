"""The configs of AutoFP8, DeepSeek-style blocks and FineGrainedFP8 (all three say ``fp8``), and of FBGEMM."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from fp8ref.checkpoint.findings import Broken
from fp8ref.checkpoint.scheme import Activation, Declared, LayerScheme, Rule, check_patterns, one_of
from fp8ref.emulation.quantize import SMALLEST_SCALE

BLOCK_SIZE = [128, 128]


def parse_fp8(section: dict[str, Any], file: str, *, inverse: bool, grid: bool) -> Declared:
    """``quant_method: fp8``.

    Args:
        section: the config's ``quantization_config``.
        file: where it is.
        inverse: whether the checkpoint has scales named ``weight_scale_inv``, which decides where the config is silent.
        grid: whether one of these has two dimensions, as those of blocks have.

    Raises:
        Broken: something in it is not read, or contradicts the tensors.
    """
    one_of(section, "fmt", (None, "e4m3", "float8_e4m3fn"), file)
    size = section.get("weight_block_size")
    if size is None and not grid:
        return _one_scale(section, file, inverse=inverse)
    if size not in (None, BLOCK_SIZE):
        raise Broken.at(file, f"weight_block_size: got {size!r}; {BLOCK_SIZE} is read, the hardware path's only one")
    one_of(section, "activation_scheme", ("dynamic",), file, why=" beside block scales")
    ue8m0 = one_of(section, "scale_fmt", (None, "float", "float32", "ue8m0"), file) == "ue8m0"
    said = f"weight_block_size {size}" if size else "activation_scheme 'dynamic' beside weight_scale_inv"
    scheme = LayerScheme(("block",), "group", said, ue8m0=ue8m0)
    return _declared("DeepSeek blocks", section, file, scheme, scale_name="weight_scale_inv")


def _one_scale(section: dict[str, Any], file: str, *, inverse: bool) -> Declared:
    """One scale for each weight (AutoFP8: or each of its rows), activations static or dynamic.

    transformers' own FineGrainedFP8 without blocks calls the two scales otherwise; both multiply.
    """
    given = one_of(section, "activation_scheme", ("static", "dynamic"), file)
    activation: Activation = "static" if given == "static" else "token"
    scheme = LayerScheme(("tensor", "channel"), activation, f"activation_scheme {given!r}")
    if not inverse:
        return _declared("AutoFP8", section, file, scheme)
    scheme = replace(scheme, weight=("tensor",))
    names = {"scale_name": "weight_scale_inv", "input_name": "activation_scale"}
    return _declared("FineGrainedFP8", section, file, scheme, **names)


def parse_fbgemm(section: dict[str, Any], file: str) -> Declared:
    """``quant_method: fbgemm_fp8``: a scale for each row, activations per token with a bound on their absmax.

    Raises:
        Broken: ``activation_scale_ub`` is no number that bounds an absmax (see :func:`fp8ref.quantize`).
    """
    bound = section.get("activation_scale_ub")
    number = bound if isinstance(bound, int | float) and not isinstance(bound, bool) else math.nan
    if not SMALLEST_SCALE <= number <= torch.finfo(torch.float32).max:
        raise Broken.at(
            file, f"activation_scale_ub: got {bound!r}; a number belongs that is finite in fp32 and at least 2**-126"
        )
    said = f"quant_method 'fbgemm_fp8', activation_scale_ub {bound}"
    scheme = LayerScheme(("channel",), "token", said, activation_bound=float(number))
    return _declared("FBGEMM", section, file, scheme)


def _declared(format_name: Any, section: dict[str, Any], file: str, scheme: LayerScheme, **names: str) -> Declared:
    """The rest, which the three have in common."""
    keys = [key for key in ("ignored_layers", "modules_to_not_convert") if section.get(key) is not None]
    patterns = [check_patterns(section[key], file, key) for key in keys]
    return Declared(
        format_name,
        file,
        (Rule(("Linear",), scheme),),
        tuple(pattern for group in patterns for pattern in group),
        " and ".join(keys) or "ignored_layers",
        bool(keys),
        "modules",
        _kv_cache(section, file),
        **names,
    )


def _kv_cache(section: dict[str, Any], file: str) -> str | None:
    """AutoFP8 names the layers whose outputs the KV cache keeps."""
    targets = check_patterns(section.get("kv_cache_quant_targets"), file, "kv_cache_quant_targets")
    return f"kv_cache_quant_targets {list(targets)}" if targets else None
