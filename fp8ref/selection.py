"""A model's linear layers, under all their names, and which of them patterns choose."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.utils import parametrize

from fp8ref.linear import Fp8Linear
from fp8ref.sources import is_linear, obstacle


@dataclass(frozen=True, eq=False)
class Found:
    """A module that holds a matrix of parameters, or is a linear layer in FP8 already.

    Attributes:
        names: every name that it has in the model, in the order of ``named_modules``; one, unless it is used twice.
        module: the module.
        obstacle: why it cannot be converted as it stands, None where it can.
        sharers: names of the other modules whose parameters are this weight too.
    """

    names: tuple[str, ...]
    module: nn.Module
    obstacle: str | None
    sharers: tuple[str, ...] = field(default=())

    @property
    def name(self) -> str:
        """The first of the names."""
        return self.names[0]


def survey(model: nn.Module) -> list[Found]:
    """Return every module that holds a matrix of parameters, or is FP8 already, each once.

    >>> shared = nn.Linear(2, 2)
    >>> [found.names for found in survey(nn.Sequential(shared, nn.ReLU(), shared))]
    [('0', '2')]
    """
    names: dict[nn.Module, list[str]] = {}
    readers: set[nn.Module] = set()
    owners: dict[tuple[object, ...], list[nn.Module]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if module not in names and isinstance(module, nn.TransformerEncoderLayer):
            readers.update((module.linear1, module.linear2))
        names.setdefault(module, []).append(name)
    for module in names:
        for weight in module._parameters.values():  # noqa: SLF001 - the module's own, without its children's
            if weight is not None and module not in owners.setdefault(place_of(weight), []):
                owners[place_of(weight)].append(module)
    result = []
    for module, own in names.items():
        if isinstance(module, parametrize.ParametrizationList):
            continue  # a part of the parametrised layer, which is listed itself
        matrices = [p for p in module.parameters(recurse=False) if p.dim() >= 2]
        if not matrices and not is_linear(module) and not isinstance(module, Fp8Linear):
            continue
        sharers: list[str] = []
        for weight in matrices:
            sharers += [names[other][0] for other in owners[place_of(weight)] if other is not module]
        result.append(Found(tuple(own), module, _obstacle(module, readers), tuple(sharers)))
    return result


def place_of(weight: Tensor) -> tuple[object, ...]:
    """What two parameters have in common that are one: their memory; where there is none (meta), the object."""
    if weight.device.type == "meta" or weight.numel() == 0:
        return (id(weight),)
    return weight.device, weight.data_ptr()


def _obstacle(module: nn.Module, readers: set[nn.Module]) -> str | None:
    if isinstance(module, Fp8Linear):
        return "already FP8"
    if isinstance(module, nn.Embedding):
        return "a look-up, no product"
    if module in readers:
        return "its TransformerEncoderLayer reads the weight without calling the layer"
    return obstacle(module)


def check_patterns(patterns: object, argument: str) -> tuple[str, ...]:
    """Return patterns as a tuple; a single string is refused, since it would be read letter by letter."""
    if isinstance(patterns, str) or not isinstance(patterns, Sequence):
        raise TypeError(f"{argument}: got {patterns!r}; give a list of name patterns")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise TypeError(f"{argument}: got {pattern!r} among the patterns; give strings")
    return tuple(patterns)


def matching(found: Found, patterns: Sequence[str]) -> str | None:
    """Return the first pattern that matches one of the names, or None.

    >>> matching(Found(("model.layers.0.up",), nn.Linear(1, 1), None), ["*.down", "*.up"])
    '*.up'
    """
    return next((p for p in patterns if any(fnmatchcase(name, p) for name in found.names)), None)


def check_matches(layers: Sequence[Found], patterns: Sequence[str], argument: str) -> None:
    """Raise ValueError where a pattern matches no name."""
    names = [name for found in layers for name in found.names]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = difflib.get_close_matches(pattern, names, n=2, cutoff=0.3)
            near += [f"{pattern}.*"] if any(fnmatchcase(name, f"{pattern}.*") for name in names) else []
            hint = f" (there is {', '.join(map(repr, near))})" if near else ""
            raise ValueError(
                f"{argument}: got {pattern!r}, which matches none of the model's {len(names)} layers{hint}; patterns "
                "are those of fnmatch, on whole names: '*.down_proj'"
            )


def reason_to_keep(found: Found, skip: Sequence[str], only: Sequence[str] | None) -> str | None:
    """Why a layer is left alone, by what it is or by the patterns; None where it is chosen.

    >>> reason_to_keep(Found(("head",), nn.Linear(1, 1), None), ["head"], None)
    "skip: 'head'"
    """
    if found.obstacle is not None:
        return found.obstacle
    skipped = matching(found, skip)
    if skipped is not None:
        return f"skip: {skipped!r}"
    if only is not None and matching(found, only) is None:
        return "not among only"
    return None
