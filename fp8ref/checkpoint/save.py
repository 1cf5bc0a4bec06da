"""Save a model with FP8 layers as a compressed-tensors checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from fp8ref.checkpoint.compressed import engine_findings, layer_tensors, left_out, quantization_config, unwritable
from fp8ref.checkpoint.findings import CheckpointError, warn_of
from fp8ref.checkpoint.header import DTYPES
from fp8ref.checkpoint.plan import named_tensors
from fp8ref.checkpoint.writer import MAX_SHARD, ShardWriter, check_shard_size, check_target, replacing
from fp8ref.linear import Fp8Linear
from fp8ref.selection import survey


def save_checkpoint(
    model: nn.Module, folder: Path | str, *, max_shard_size: int = MAX_SHARD, overwrite: bool = False
) -> None:
    """Write a model whose linear layers are :class:`fp8ref.Fp8Linear` as a compressed-tensors checkpoint.

    Args:
        model: any module; config.json and generation_config.json are written of those that it has, as models of
            transformers do.
        folder: where to; it appears only when it is complete.
        max_shard_size: bytes of tensors in a file; beyond it the checkpoint is cut into shards with an index.
        overwrite: True replaces a checkpoint that is there; files of other kinds beside it stay.

    The weights are F8_E4M3 with fp32 ``weight_scale`` [1], [N, 1] or [ceil(N/128), ceil(K/128)]; activations dynamic
    per token, per tensor or per group of 128, or static with ``input_scale`` [1]. What is no FP8 layer is written as it
    is, a tied parameter once. A recipe's ``use_fast_accum`` and a layer's ``kept_weight`` are no part of the format.

    Warns:
        CheckpointWarning: serving engines do not load what is written: the output head is FP8, or of layers that they
            fuse (queries, keys and values; gate and up) one is stored otherwise than another.

    Raises:
        TypeError: ``model`` is no module, or a layer that is in no model.
        CheckpointError: nothing in the model is FP8, a recipe is not to be said in the format, or the folder is there.
        ImportError: safetensors is missing.

    >>> import tempfile
    >>> model = nn.Sequential(Fp8Linear.from_linear(nn.Linear(4, 3), "row"))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_checkpoint(model, Path(folder, "saved"))
    ...     sorted(path.name for path in Path(folder, "saved").iterdir())
    ['config.json', 'model.safetensors']
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; give a torch.nn.Module")
    if isinstance(model, Fp8Linear):
        raise TypeError("model: got an Fp8Linear, which has no name; give the model that it is in, or its state_dict()")
    folder = Path(folder)
    check_shard_size(max_shard_size)
    check_target(folder, overwrite=overwrite)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, Fp8Linear)}
    _check_layers(layers)
    aliases = {name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, Fp8Linear)}
    recipes = {name: module.recipe for name, module in layers.items()}
    ignore = left_out(survey(model), recipes)
    plain = named_tensors(model, {id(module) for module in layers.values()})
    config = _config(model, {*aliases}, [tensor for tensor, _ in plain])
    config["quantization_config"] = quantization_config(recipes, ignore)
    for tensor, names in [*plain, *((layer.weight, [f"{name}.weight"]) for name, layer in layers.items())]:
        if tensor.device.type == "meta":
            raise CheckpointError(f"model: {names[0]} is on the meta device and has no values; load it first")
        if tensor.dtype not in DTYPES.values():
            raise CheckpointError(f"model: {names[0]} is {tensor.dtype}, which is not written; convert it first")
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    head_name = next((name for name, module in layers.items() if module is head), None)
    warn_of(folder, engine_findings(recipes, ignore, head_name))
    with replacing(folder) as temporary:
        writer = ShardWriter(temporary, max_shard_size)
        for name, module in layers.items():
            writer.add(_tensors(name, module))
        for tensor, names in plain:
            writer.add({names[0]: tensor})
        writer.finish(config)
        generation: Any = getattr(model, "generation_config", None)
        if generation is not None:
            generation.save_pretrained(str(temporary))


def _check_layers(layers: dict[str, Fp8Linear]) -> None:
    """Refuse a model without FP8 layers, and recipes that the format has no words for."""
    if not layers:
        raise CheckpointError("model: no fp8ref.Fp8Linear in it; convert it first (fp8ref.convert_)")
    for name, layer in layers.items():
        problem = unwritable(layer.recipe)
        if problem is not None:
            raise CheckpointError(f"model: {name}: {problem}")
        if 0 in layer.packed.shape:
            raise CheckpointError(
                f"model: {name}: its weight is {list(layer.packed.shape)}, without values; no loader takes it"
            )


def _tensors(name: str, layer: Fp8Linear) -> dict[str, Tensor]:
    """The tensors of a layer under their names in the checkpoint."""
    state = layer.state_dict()
    return layer_tensors(
        name, state["weight"], state["weight_scale"], bias=state.get("bias"), input_scale=state.get("input_scale")
    )


def _config(model: nn.Module, fp8: set[str], plain: Sequence[Tensor]) -> dict[str, Any]:
    """config.json of the model: with the dtype that it has, and a head that is FP8 no longer tied to the embedding."""
    own: Any = getattr(model, "config", None)
    if own is None or not hasattr(own, "to_json_string"):
        return {"architectures": [type(model).__name__]}
    config: dict[str, Any] = json.loads(own.to_json_string())
    config["architectures"] = [type(model).__name__]
    dtype = next((p.dtype for p in plain if isinstance(p, nn.Parameter) and p.is_floating_point()), None)
    if dtype is not None:
        config["torch_dtype" if "torch_dtype" in config else "dtype"] = str(dtype).removeprefix("torch.")
    if config.get("tie_word_embeddings") and any(name.rpartition(".")[2] == "lm_head" for name in fp8):
        config["tie_word_embeddings"] = False
    return config
