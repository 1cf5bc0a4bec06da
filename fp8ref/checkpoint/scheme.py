"""What a checkpoint's config says about its layers, in one form for all six formats."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from fp8ref.checkpoint.findings import Broken

Format = Literal["compressed-tensors", "AutoFP8", "FBGEMM", "DeepSeek blocks", "FineGrainedFP8", "ModelOpt", "Quark"]
WeightScale = Literal["tensor", "channel", "block"]
"""How many scales a weight [N, K] has: one, N, or one for each 128x128 square."""
Activation = Literal["static", "token", "tensor", "group", "none"]
"""How an activation [M, K] gets its scale: one from the checkpoint; computed for each row, for all of it, or for each
run of 128 along K; not quantised at all."""
Matching = Literal["compressed-tensors", "modules"]

CALLS: dict[Activation, str] = {
    "static": "static",
    "token": "dynamic, per token",
    "tensor": "dynamic, per tensor",
    "group": "dynamic, per 1x128",
    "none": "not quantised",
}


@dataclass(frozen=True)
class LayerScheme:
    """What the config says about a layer.

    Attributes:
        weight: the kinds of weight scales that fit what it says.
        activation: how activations are scaled.
        ue8m0: whether every scale must be a power of two, those of activations too.
        activation_bound: the largest absmax that a token's scale is computed from; None: no bound.
        said: the words of the config, for messages.
    """

    weight: tuple[WeightScale, ...]
    activation: Activation
    said: str
    ue8m0: bool = False
    activation_bound: float | None = None


@dataclass(frozen=True)
class Rule:
    """Layers, named by patterns, and their scheme."""

    targets: tuple[str, ...]
    scheme: LayerScheme


@dataclass(frozen=True)
class Declared:
    """What the config says about the checkpoint.

    Attributes:
        format: which of the six formats it is.
        file: the file that says so.
        rules: the schemes of the layers; where several fit, the most exact pattern decides.
        ignore: patterns of the layers that are not quantised.
        ignore_key: the key that holds them.
        complete: whether the config claims to name every linear layer that is not quantised.
        matching: how the patterns are read.
        kv_cache: what it says about the KV cache, or None.
        scale_name: the last part of the name of weight scales.
        input_name: the last part of the name of static scales.
    """

    format: Format
    file: str
    rules: tuple[Rule, ...]
    ignore: tuple[str, ...]
    ignore_key: str
    complete: bool
    matching: Matching
    kv_cache: str | None = None
    scale_name: str = "weight_scale"
    input_name: str = "input_scale"

    def ignored_by(self, layer: str) -> str | None:
        """The pattern that takes a layer out, or None."""
        return next((pattern for pattern in self.ignore if match_rank(pattern, layer, self.matching)), None)

    def scheme_of(self, layer: str) -> LayerScheme | None:
        """The scheme of a layer, the ignored ones aside; None where no rule names it."""
        ranked = [
            (max((match_rank(target, layer, self.matching) for target in rule.targets), default=0), rule.scheme)
            for rule in self.rules
        ]
        rank, scheme = max(ranked, key=lambda pair: pair[0], default=(0, None))
        return scheme if rank else None


def match_rank(pattern: str, layer: str, matching: Matching) -> int:
    """How exactly a pattern names a layer: 0 not at all, 1 by its class, 2 by a pattern, 3 by its name.

    "compressed-tensors" knows the full name, ``re:`` and a regular expression that matches from the start, and the name
    of a class, of which every FP8 layer here is ``Linear``. "modules" also takes wildcards and whole parts of a dotted
    name from its start or end, as the other formats' own loaders do.

    >>> match_rank("lm_head", "model.lm_head", "modules"), match_rank("gate", "mlp.gate_proj", "modules")
    (2, 0)
    >>> match_rank("re:.*down.*", "layers.0.down_proj", "compressed-tensors"), match_rank("Linear", "a", "modules")
    (2, 1)
    """
    if pattern == layer:
        return 3
    if pattern.startswith("re:"):
        return 2 * bool(re.match(pattern[3:], layer))
    if pattern == "Linear":
        return 1
    if matching == "compressed-tensors":
        return 0
    if any(letter in pattern for letter in "*?["):
        return 2 * fnmatchcase(layer, pattern)
    return 2 * (f".{layer}.".startswith(f".{pattern}.") or f".{layer}.".endswith(f".{pattern}."))


def check_patterns(value: object, file: str, key: str) -> tuple[str, ...]:
    """A list of layer patterns from the config; None is an empty one.

    Raises:
        Broken: it is no list of strings, or holds a regular expression that does not compile.
    """
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(pattern, str) for pattern in value):
        raise Broken.at(file, f"{key}: got {value!r}; a list of names or patterns of layers belongs")
    for pattern in value:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except (re.error, OverflowError, RecursionError) as error:
                raise Broken.at(file, f"{key}: {pattern!r} is no regular expression: {error}") from None
    return tuple(value)


def one_of(section: dict[str, Any], key: str, allowed: Sequence[Any], file: str, *, why: str = "") -> Any:
    """The value of a key if it is one of those that are read.

    Raises:
        Broken: it is another; the message names it.
    """
    value = section.get(key)
    if value not in allowed or (isinstance(value, bool) and value not in [a for a in allowed if isinstance(a, bool)]):
        reads = " or ".join("nothing" if choice is None else repr(choice) for choice in allowed)
        raise Broken.at(file, f"{key}: got {value!r}; {reads} is read{why}")
    return value
