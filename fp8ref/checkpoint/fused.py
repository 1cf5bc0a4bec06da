"""Modules that hold several layers of a checkpoint: which, and when that is possible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8ref.checkpoint.fp8layer import Fp8Layer
from fp8ref.emulation.scales import BLOCK

FUSED: Mapping[str, Sequence[str]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Modules of a model that hold several layers of a checkpoint, rows after rows in this order."""


def check_fused(fused: object) -> None:
    """Raise TypeError unless ``fused`` maps names to lists of names."""
    good = isinstance(fused, Mapping) and all(
        isinstance(name, str)
        and isinstance(parts, Sequence)
        and not isinstance(parts, str)
        and all(isinstance(part, str) for part in parts)
        for name, parts in fused.items()
    )
    if not good:
        raise TypeError(f"fused: got {fused!r}; give a mapping such as {{'qkv_proj': ['q_proj', 'k_proj', 'v_proj']}}")


def fused_names(name: str, fused: Mapping[str, Sequence[str]]) -> list[str]:
    """The names, in a checkpoint, of the layers that a module fuses."""
    parent, _, last = name.rpartition(".")
    return [f"{parent}.{part}".lstrip(".") for part in fused.get(last, ())]


def fusing_problem(layers: tuple[Fp8Layer, ...]) -> str | None:
    """Why several layers cannot become one without a change of bits, or None."""
    first = layers[0]
    for layer in layers[1:]:
        same = (layer.scheme.activation, layer.scheme.ue8m0, layer.scheme.activation_bound, layer.kind == "block")
        wanted = (first.scheme.activation, first.scheme.ue8m0, first.scheme.activation_bound, first.kind == "block")
        if same != wanted or layer.weight.shape[1] != first.weight.shape[1]:
            return f"cannot be fused with {layer.name}: {first.scheme.said} here, {layer.scheme.said} there"
    if first.kind == "block" and any(layer.weight.shape[0] % BLOCK for layer in layers[:-1]):
        return f"cannot be fused: its {first.weight.shape[0]} rows end inside a block of {BLOCK}"
    return None
