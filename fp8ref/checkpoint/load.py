"""Load an FP8 checkpoint into a model: everything is placed, read and checked before anything is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fp8ref.checkpoint.build import build_model
from fp8ref.checkpoint.contents import Contents, read_contents
from fp8ref.checkpoint.findings import Broken, CheckpointError, Finding, warn_of
from fp8ref.checkpoint.fp8layer import Fp8Layer, recipe_for
from fp8ref.checkpoint.fused import FUSED, check_fused
from fp8ref.checkpoint.plan import LayerPlace, Plan, TensorPlace, exact_dtype, plan_load
from fp8ref.checkpoint.progress import byte_bar
from fp8ref.checkpoint.values import overflow_error, scale_errors, to_float32, weight_error
from fp8ref.kernels.activations import Backend
from fp8ref.kernels.pack import PackedWeight, pack_weight
from fp8ref.linear import Fp8Linear

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass
class _Reader:
    """Tensors that were read and are not used up yet, and what was made of those that were."""

    contents: Contents
    device: torch.device | None
    dtype: torch.dtype | None
    backend: Backend
    values: dict[str, Tensor]
    layers: list[tuple[LayerPlace, nn.Module]]
    tensors: list[tuple[TensorPlace, Tensor]]
    findings: list[Finding]


def load_checkpoint(
    folder: Path | str,
    model: nn.Module | None = None,
    *,
    backend: Backend = "auto",
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    fused: Mapping[str, Sequence[str]] = FUSED,
    progress: bool = True,
) -> nn.Module:
    """Load an FP8 checkpoint, in one of the six formats of docs/checkpoints.md, into :class:`fp8ref.Fp8Linear` layers.

    Args:
        folder: config.json and safetensors files.
        model: the model to fill, on any device, meta too; its linear layers are replaced. None builds the
            transformers model that config.json describes, in evaluation mode; nothing but the checkpoint is in memory.
        backend: of every layer: "auto" runs the kernels, "emulate" the oracle.
        device: where everything goes; None: where the model's own tensors are, and the CPU for those on meta.
        dtype: float32, bfloat16 or float16 for the parameters that are not FP8, converted by torch's rounding; None:
            as the checkpoint has them, in a model with values as the model has them, if that changes no value.
        fused: modules of the model that hold several layers of the checkpoint, as last part of the name and the parts
            that it fuses, in the order of their rows. Scalar scales become scales for each row, which changes no value.
        progress: show a bar (needs rich, and a terminal).

    Returns:
        ``model``, or the one built. Static checkpoints run static, dynamic ones dynamic.

    Raises:
        CheckpointError: something is wrong; the message names each file and tensor, and the model is as it was.
        ImportError: a package of the extra ``checkpoints`` is missing.
        TypeError, ValueError: a wrong argument.

    Warns:
        CheckpointWarning: something is not used (scales of the KV cache), or runs otherwise than the checkpoint says.

    >>> import tempfile
    >>> from fp8ref.checkpoint.save import save_checkpoint
    >>> source = nn.Sequential(Fp8Linear.from_linear(nn.Linear(4, 3), "row", backend="emulate"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(source, Path(folder, "saved"))
    ...     loaded = load_checkpoint(Path(folder, "saved"), nn.Sequential(nn.Linear(4, 3)), backend="emulate")
    >>> x = torch.randn(2, 4)
    >>> torch.equal(loaded(x), source(x))
    True
    """
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; give a torch.nn.Module, or leave it out")
    if backend not in ("auto", "emulate"):
        raise ValueError(f'backend: got {backend!r}; give "auto" or "emulate"')
    if dtype is not None and dtype not in _DTYPES:
        raise TypeError(f"dtype: got {dtype}; give one of {list(_DTYPES)}, or leave it out")
    where = None if device is None else torch.device(device)
    if where is not None and where.type == "meta":
        raise ValueError("device: got meta, where nothing has values; give a device with memory")
    check_fused(fused)
    contents = read_contents(folder)
    _stop_on_errors(folder, contents.findings)
    target = build_model(Path(folder)) if model is None else model
    plan = plan_load(contents, target, fused)
    _stop_on_errors(folder, plan.findings)
    reader = _Reader(contents, where, dtype, backend, {}, [], [], [])
    with byte_bar("loading", contents.files.nbytes(), show=progress) as done:
        _read(reader, plan, done)
    _stop_on_errors(folder, reader.findings)
    _commit(target, reader)
    if where is not None:
        target.to(where)  # buffers that no checkpoint holds
    warn_of(folder, [*contents.findings, *plan.findings])
    return target


def _stop_on_errors(folder: Path | str, findings: Iterable[Finding]) -> None:
    """Raise if there is an error among the findings."""
    found = list(findings)
    if any(finding.level == "error" for finding in found):
        raise CheckpointError.of(folder, found)


def _read(reader: _Reader, plan: Plan, done: Callable[[int], None]) -> None:
    """Read shard after shard; make each part of the model as soon as all of its tensors are there."""
    waiting: list[tuple[set[str], LayerPlace | TensorPlace]] = [
        ({info.name for layer in spot.layers for info in layer.tensors}, spot) for spot in plan.layers
    ]
    waiting += [({info.name for info in spot.infos}, spot) for spot in plan.tensors]
    owners: dict[str, list[tuple[set[str], LayerPlace | TensorPlace]]] = {}
    for entry in waiting:
        for name in entry[0]:
            owners.setdefault(name, []).append(entry)
    for shard in reader.contents.files.shards:
        try:
            with reader.contents.files.open(shard) as opened:
                for info in reader.contents.files.in_shard(shard):
                    for missing, place in owners.get(info.name, []):
                        if info.name not in reader.values:
                            reader.values[info.name] = opened.get_tensor(info.name)
                        missing.discard(info.name)
                        if not missing:
                            _make(reader, place)
                    done(info.nbytes)
        except Broken as broken:
            reader.findings.append(broken.finding)


def _make(reader: _Reader, place: LayerPlace | TensorPlace) -> None:
    """Check and convert the tensors of a place, and let go of them."""
    if isinstance(place, TensorPlace):
        _make_tensor(reader, place)
        return
    taken = {info.name: reader.values.pop(info.name) for layer in place.layers for info in layer.tensors}
    for layer in place.layers:
        error = weight_error(layer.weight, taken[layer.weight.name])
        reader.findings += [error] if error else []
        for info in (layer.scale, layer.input_scale, layer.input_bound):
            if info is not None:
                reader.findings += scale_errors(info, taken[info.name], layer)
        if layer.bias is not None:
            error = overflow_error(layer.bias, taken[layer.bias.name], reader.dtype)
            reader.findings += [error] if error else []
    if not reader.findings:
        device = target_device(reader.device, place.module)
        made = make_layer(place.layers, taken, reader.backend, device, reader.dtype)
        if made is None:
            first = place.layers[0]
            message = (
                f"has another input_scale than the layers that {place.names[0]} fuses with it; they get the same x"
            )
            reader.findings.append(Finding("error", first.weight.file, first.weight.name, message))
        else:
            if made.bias is not None and isinstance(place.module.bias, Tensor):
                made.bias.requires_grad_(place.module.bias.requires_grad)
            reader.layers.append((place, made.train(place.module.training)))


def target_device(device: torch.device | None, module: nn.Module) -> torch.device:
    """Where a layer goes: the given device, or that of the module it replaces, or the CPU."""
    if device is not None:
        return device
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return next((tensor.device for tensor in tensors if tensor.device.type != "meta"), torch.device("cpu"))


def make_layer(
    layers: Sequence[Fp8Layer],
    values: Mapping[str, Tensor],
    backend: Backend,
    device: torch.device,
    dtype: torch.dtype | None,
) -> Fp8Linear | None:
    """Make one linear layer of one or several of a checkpoint's; None where their static scales differ."""
    first = layers[0]
    recipe = (
        first.recipe if len(layers) == 1 else recipe_for(first.scheme, "block" if first.kind == "block" else "channel")
    )
    inputs = [values[layer.input_scale.name] for layer in layers if layer.input_scale is not None]
    scalars = {to_float32(scale).flatten()[0].item() for scale in inputs}
    if len(scalars) > 1:
        return None
    biases = [values[layer.bias.name] for layer in layers if layer.bias is not None]
    return Fp8Linear.from_packed(
        pack(layers, values).to(device),
        recipe,
        bias=torch.cat(biases).to(device=device, dtype=dtype) if biases else None,
        input_scale=torch.tensor(scalars.pop(), dtype=torch.float32, device=device) if scalars else None,
        backend=backend,
    )


def pack(layers: Sequence[Fp8Layer], values: Mapping[str, Tensor]) -> PackedWeight:
    """The packed weight of one or several layers, rows after rows."""
    codes = torch.cat([values[layer.weight.name] for layer in layers])
    first = layers[0]
    if first.kind == "block":
        rows = [to_float32(values[layer.scale.name]).reshape(-1, -(-codes.shape[1] // 128)) for layer in layers]
        return pack_weight(codes, "128x128", torch.cat(rows))
    if len(layers) == 1 and first.kind == "tensor" and not first.shards:
        return pack_weight(codes, "tensor", to_float32(values[first.scale.name]).reshape(()))
    return pack_weight(codes, "row", torch.cat([row_scales(layer, values[layer.scale.name]) for layer in layers]))


def row_scales(layer: Fp8Layer, scale: Tensor) -> Tensor:
    """Tensor-wise or per-channel scales as fp32 [N, 1]: each row keeps the scale that it had."""
    n = layer.weight.shape[0]
    flat = to_float32(scale).reshape(-1)
    if layer.kind == "tensor":
        flat = flat.repeat_interleave(torch.tensor(layer.shards or (n,)))
    return flat.reshape(n, 1)


def _make_tensor(reader: _Reader, place: TensorPlace) -> None:
    """Convert the values of a parameter, if that is allowed; values of tied parameters must agree."""
    parts = [reader.values.pop(info.name) for info in place.infos]
    info, current = place.infos[0], place.current
    dtype = exact_dtype(place.infos, current)
    if reader.dtype is not None and parts[0].is_floating_point():
        dtype = reader.dtype
    if dtype is None:
        got = " and ".join(sorted({part.dtype for part in place.infos}))
        fix = "give dtype=" if parts[0].is_floating_point() else "give the model that dtype"
        message = f"is {got}, {place.names[0]} in the model is {current.dtype}: values would change; {fix}"
        reader.findings.append(Finding("error", info.file, info.name, message))
        return
    errors = [overflow_error(*pair, dtype) for pair in zip(place.infos, parts, strict=True)]
    reader.findings += [error for error in errors if error]
    given = reader.device or (torch.device("cpu") if current.device.type == "meta" else current.device)
    value = torch.cat(parts) if len(parts) > 1 else parts[0]
    made = value.to(device=given, dtype=dtype, copy=True)
    for other, twin in reader.tensors:
        if other.current is current and not _same_bits(twin, made):
            message = f"differs from {other.infos[0].name}, but the model ties the two"
            reader.findings.append(Finding("error", info.file, info.name, message))
            return
    reader.tensors.append((place, made))


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors hold the same bytes."""
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def _commit(model: nn.Module, reader: _Reader) -> None:
    """Put everything in its place; nothing here can fail."""
    for place, layer in reader.layers:
        for name in place.names:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, layer)
    for spot, value in reader.tensors:
        current: Any = spot.current
        is_parameter = isinstance(current, nn.Parameter)
        made = nn.Parameter(value, requires_grad=current.requires_grad) if is_parameter else value
        for name in spot.names:
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, made)
