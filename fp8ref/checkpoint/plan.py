"""Which tensors of a checkpoint go where in a model: every one placed, every place filled, before anything is read."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fp8ref.checkpoint.contents import Contents
from fp8ref.checkpoint.files import INDEX
from fp8ref.checkpoint.findings import Finding
from fp8ref.checkpoint.fp8layer import Fp8Layer
from fp8ref.checkpoint.fused import fused_names, fusing_problem
from fp8ref.checkpoint.header import DTYPES, TensorInfo
from fp8ref.linear import Fp8Linear
from fp8ref.selection import survey
from fp8ref.sources import obstacle, weight_of


@dataclass(frozen=True)
class LayerPlace:
    """A linear module and the layers that fill it.

    Attributes:
        names: every name that the module has in the model.
        module: what is there now.
        layers: the checkpoint's layers, in the order of their rows; more than one where the module is a fused one.
        has_bias: whether the module has a bias.
    """

    names: tuple[str, ...]
    module: nn.Module
    layers: tuple[Fp8Layer, ...]
    has_bias: bool


@dataclass(frozen=True)
class TensorPlace:
    """A parameter or buffer and the tensors that fill it.

    Attributes:
        names: every name that it has in the model, tied ones included.
        current: what is there now.
        infos: the checkpoint's tensors, in the order of their rows.
    """

    names: tuple[str, ...]
    current: Tensor
    infos: tuple[TensorInfo, ...]


@dataclass
class Plan:
    """What goes where.

    Attributes:
        layers: the modules to replace.
        tensors: the parameters and buffers to fill.
        findings: what does not fit.
    """

    layers: list[LayerPlace] = field(default_factory=list)
    tensors: list[TensorPlace] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def plan_load(contents: Contents, model: nn.Module, fused: Mapping[str, Sequence[str]]) -> Plan:
    """Place every tensor; what does not fit becomes an error."""
    plan = Plan()
    modules: dict[int, tuple[nn.Module, list[str]]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(module), (module, []))[1].append(name)
    used: dict[str, str] = {}
    replaced: set[int] = set()
    obstacles = {found.module: found.obstacle for found in survey(model)}
    for module, names in modules.values():
        layers = _sources(names, contents.layers, fused)
        if layers:
            _place_layer(plan, module, names, layers, obstacles.get(module, obstacle(module)))
            _claim(plan, used, [info for layer in layers for info in layer.tensors], names[0])
            replaced.add(id(module))
        elif isinstance(module, Fp8Linear):
            _without_codes(plan, contents, names)
    for current, names in named_tensors(model, replaced):
        _claim(plan, used, _place_tensor(plan, contents, current, names, fused), names[0])
    _without_values(plan, contents, model)
    _unused(plan, contents, model, used)
    _unquantised(plan, contents, model)
    return plan


def _claim(plan: Plan, used: dict[str, str], infos: Sequence[TensorInfo], name: str) -> None:
    """Note that tensors fill a module or parameter, and refuse that one fills two."""
    for info in infos:
        if info.name in used:
            message = f"fills both {used[info.name]} and {name} of the model; see fused"
            plan.findings.append(Finding("error", info.file, info.name, message))
        used[info.name] = name


def _without_codes(plan: Plan, contents: Contents, names: Sequence[str]) -> None:
    """A layer of the model that is FP8 already, and is not in the checkpoint: it would keep the weight that it has."""
    found = [contents.plain[f"{name}.weight"] for name in names if f"{name}.weight" in contents.plain]
    if found:
        message = f"is {found[0]}; {names[0]} in the model is an Fp8Linear: give a model that has a linear layer there"
        plan.findings.append(Finding("error", found[0].file, found[0].name, message))
    else:
        message = "is missing; the model has an Fp8Linear there"
        plan.findings.append(Finding("error", _home(contents), f"{names[0]}.weight", message))


def _sources(
    names: Sequence[str], layers: Mapping[str, Fp8Layer], fused: Mapping[str, Sequence[str]]
) -> tuple[Fp8Layer, ...]:
    """The layers of the checkpoint that fill a module, by its own name or by those that it fuses."""
    for name in names:
        if name in layers:
            return (layers[name],)
        found = [layers.get(part) for part in fused_names(name, fused)]
        if found and all(found):
            return tuple(layer for layer in found if layer is not None)
    return ()


def _place_layer(
    plan: Plan, module: nn.Module, names: Sequence[str], layers: tuple[Fp8Layer, ...], reason: str | None
) -> None:
    """Check that FP8 layers fit a module, and note the place."""
    weight = layers[0].weight

    def wrong(message: str, info: TensorInfo = weight) -> None:
        plan.findings.append(Finding("error", info.file, info.name, message))

    if reason is not None and not isinstance(module, Fp8Linear):
        wrong(f"is an FP8 weight, but {names[0]} in the model cannot be replaced: {reason}")
        return
    rows = sum(layer.weight.shape[0] for layer in layers)
    wanted = list(module.weight.shape if isinstance(module, Fp8Linear) else weight_of(module).shape)
    if [rows, weight.shape[1]] != wanted:
        wrong(f"is {weight}, in all [{rows}, {weight.shape[1]}]; {names[0]} in the model is {wanted}")
        return
    if problem := fusing_problem(layers):
        wrong(problem)
        return
    has_bias = module.bias is not None
    for layer in layers:
        if (layer.bias is not None) != has_bias:
            what = (
                f"{layer.name}.bias is missing" if has_bias else "the model has no bias there, the checkpoint has one"
            )
            wrong(f"does not fit {names[0]}: {what}", layer.bias or layer.weight)
            return
    plan.layers.append(LayerPlace(tuple(names), module, layers, has_bias))


def named_tensors(model: nn.Module, replaced: set[int]) -> list[tuple[Tensor, list[str]]]:
    """The parameters and persistent buffers outside the replaced modules; tied ones once, with all their names."""
    groups: dict[int, tuple[Tensor, list[str]]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if id(module) in replaced:
            continue
        own: dict[str, Tensor | None] = {**module._parameters}  # noqa: SLF001 - no public way leaves sub-modules out
        own |= {
            name: buffer
            for name, buffer in module._buffers.items()  # noqa: SLF001
            if name not in module._non_persistent_buffers_set  # noqa: SLF001
        }
        for name, tensor in own.items():
            if tensor is not None:
                groups.setdefault(id(tensor), (tensor, []))[1].append(f"{prefix}.{name}".lstrip("."))
    return list(groups.values())


def _place_tensor(
    plan: Plan, contents: Contents, current: Tensor, names: Sequence[str], fused: Mapping[str, Sequence[str]]
) -> list[TensorInfo]:
    """Find what fills a parameter; return the tensors used."""
    candidates = [contents.plain[name] for name in names if name in contents.plain]
    infos = candidates[:1]
    if not infos:
        for name in names:
            module, _, last = name.rpartition(".")
            parts = [contents.plain.get(f"{part}.{last}") for part in fused_names(module, fused)]
            if parts and all(parts):
                infos = [part for part in parts if part is not None]
    if not infos:
        message = f"is missing; the model needs it ({list(current.shape)})"
        plan.findings.append(Finding("error", _home(contents), names[0], message))
        return []
    shape = [sum(info.shape[0] for info in infos), *infos[0].shape[1:]] if len(infos) > 1 else [*infos[0].shape]
    if shape != list(current.shape) or any(info.shape[1:] != infos[0].shape[1:] for info in infos):
        message = f"is {infos[0]}, in all {shape}; {names[0]} in the model is {list(current.shape)}"
        plan.findings.append(Finding("error", infos[0].file, infos[0].name, message))
    elif any(DTYPES[info.dtype].is_floating_point != current.is_floating_point() for info in infos):
        message = f"is {infos[0]}; {names[0]} in the model is {current.dtype}"
        plan.findings.append(Finding("error", infos[0].file, infos[0].name, message))
    else:
        plan.tensors.append(TensorPlace(tuple(names), current, tuple(infos)))
        # The others are tied to the first; that they are equal is checked when they are read.
        plan.tensors += [TensorPlace(tuple(names), current, (info,)) for info in candidates[1:]]
    return [*infos, *candidates[1:]]


def _without_values(plan: Plan, contents: Contents, model: nn.Module) -> None:
    """Buffers on meta that no checkpoint holds, such as the frequencies of rotary embeddings: they would stay empty."""
    for prefix, module in model.named_modules():
        for name in module._non_persistent_buffers_set:  # noqa: SLF001 - as above
            buffer = module._buffers.get(name)  # noqa: SLF001
            if buffer is not None and buffer.device.type == "meta" and not isinstance(module, Fp8Linear):
                message = (
                    "is a buffer on meta that checkpoints do not hold; build the model with real buffers "
                    "(accelerate.init_empty_weights(include_buffers=False))"
                )
                plan.findings.append(Finding("error", _home(contents), f"{prefix}.{name}".lstrip("."), message))


def _home(contents: Contents) -> str:
    """The file that should have what is missing."""
    return contents.files.shards[0] if len(contents.files.shards) == 1 else INDEX


def _unused(plan: Plan, contents: Contents, model: nn.Module, used: Mapping[str, str]) -> None:
    """Name each tensor that has no place in the model; those that the model's own class ignores are noted."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    everything = {**contents.plain}
    everything |= {info.name: info for layer in contents.layers.values() for info in layer.tensors}
    placed = {finding.tensor for finding in plan.findings}
    for name, info in everything.items():
        if name in used or name in placed:
            continue
        if any(re.search(pattern, name) for pattern in patterns):
            message = f"is not used: {type(model).__name__} ignores it"
            plan.findings.append(Finding("warning", info.file, name, message))
        else:
            one = " (its experts are one parameter, no linear layers)" if re.search(r"\bexperts\.\d+\.", name) else ""
            plan.findings.append(Finding("error", info.file, name, f"is {info}; the model has no place for it{one}"))


def _unquantised(plan: Plan, contents: Contents, model: nn.Module) -> None:
    """Linear layers that the config wants in FP8 although their weight is not."""
    declared = contents.declared
    assert declared is not None
    if not declared.complete:
        return
    known = {finding.tensor for finding in contents.findings}
    for place in plan.tensors:
        owners = {type(model.get_submodule(name.rpartition(".")[0])) for name in place.names}
        for name in place.names:
            layer, _, last = name.rpartition(".")
            # A head that is tied to an embedding cannot be FP8.
            is_linear = last == "weight" and owners == {nn.Linear}
            if is_linear and declared.ignored_by(layer) is None and declared.scheme_of(layer) and name not in known:
                info = place.infos[0]
                message = f"is {info}, but {declared.ignore_key} in {declared.file} does not leave it out of FP8"
                plan.findings.append(Finding("error", info.file, info.name, message))


def exact_dtype(infos: Sequence[TensorInfo], current: Tensor) -> torch.dtype | None:
    """The dtype in which a parameter takes the checkpoint's values without a change; None where there is none."""
    given = DTYPES[infos[0].dtype]
    if any(info.dtype != infos[0].dtype for info in infos):
        return None
    if current.device.type == "meta" or given == current.dtype:
        return given
    return current.dtype if torch.promote_types(given, current.dtype) == current.dtype else None
