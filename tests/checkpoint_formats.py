"""An independent writer of FP8 checkpoints in the six formats, and what their dequantisation rule says they hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import fp8ref
from checkpoint_variants import VARIANTS, Variant

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class Written:
    """What was written: the dequantised weights, scales and codes by the rule, computed here, without fp8ref.

    Attributes:
        folder: where.
        variant: how.
        tensors: every tensor of the checkpoint.
        weights: fp32 [N, K], code times scale, of each FP8 layer.
        codes: FP8 [N, K].
        scales: fp32, of the shape that the kind has.
        inputs: static scales.
    """

    folder: Path
    variant: Variant
    tensors: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    codes: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, float] = field(default_factory=dict)


def spread(scale: Tensor, kind: str, n: int, k: int) -> Tensor:
    """The scale of each element, [N, K]."""
    if kind != "block":
        return scale.reshape(-1, 1).expand(n, k)
    rows, columns = torch.arange(n) // 128, torch.arange(k) // 128
    return scale[rows][:, columns]


def make_scales(weight: Tensor, kind: str, dtype: torch.dtype, *, power_of_two: bool) -> Tensor:
    """Scales of a weight as a quantiser would choose them, rounded to the dtype they are stored in; fp32."""
    n, k = weight.shape
    if kind == "tensor":
        absmax = weight.abs().max().reshape(1)
    elif kind == "channel":
        absmax = weight.abs().amax(1, keepdim=True)
    else:
        rows, columns = range(0, n, 128), range(0, k, 128)
        absmax = torch.tensor([[weight[i : i + 128, j : j + 128].abs().max() for j in columns] for i in rows])
    scale = absmax.clamp(min=1e-12) / 448
    if power_of_two:
        scale = torch.exp2(scale.log2().ceil())
    return scale.to(dtype).float()


def write(
    folder: Path, variant: Variant, state: Mapping[str, Tensor], linears: list[str], config: Mapping[str, Any]
) -> Written:
    """Quantise the linear layers of a state dict and write a checkpoint of two shards."""
    folder.mkdir(parents=True, exist_ok=True)
    written = Written(folder, variant)
    for name, tensor in state.items():
        layer = name.removesuffix(".weight")
        if layer in linears and name != layer:
            _quantise(written, layer, tensor.float())
        else:
            written.tensors[name] = tensor.detach().clone()
    full = {key: value for key, value in config.items() if key != "quantization_config"}
    if variant.place == "hf_quant_config.json":
        (folder / variant.place).write_text(json.dumps(variant.config))
    else:
        full[variant.place] = variant.config
    (folder / "config.json").write_text(json.dumps(full))
    write_shards(folder, written.tensors)
    return written


def write_shards(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors as two shards with an index, every second tensor in each: a layer's scales are not beside it."""
    names = sorted(tensors)
    where = {name: SHARDS[position % 2] for position, name in enumerate(names)}
    for shard in SHARDS:
        save_file({name: tensors[name] for name in names if where[name] == shard}, folder / shard)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": where}))


def _quantise(written: Written, layer: str, weight: Tensor) -> None:
    """One layer: codes, scales in their stored form, a static input scale."""
    variant, (n, k) = written.variant, weight.shape
    scale = make_scales(weight, variant.weight, variant.scale_dtype, power_of_two=variant.power_of_two)
    each = spread(scale, variant.weight, n, k)
    codes = (weight / each).clamp(-448, 448).to(torch.float8_e4m3fn)
    written.codes[layer], written.scales[layer] = codes, scale
    written.weights[layer] = codes.float() * each
    stored = scale.to(variant.scale_dtype)
    shapes = {0: [], 1: [-1], 2: list(stored.shape), 4: [stored.shape[0], 1, stored.shape[-1], 1]}
    if variant.scale_dims == 4 and stored.numel() == 1:
        shapes[4] = []  # what ModelOpt itself does to a single block
    written.tensors[f"{layer}.weight"] = codes
    written.tensors[f"{layer}.{variant.scale}"] = stored.reshape(shapes[variant.scale_dims])
    if variant.activation == "static":
        # Layers that one input feeds have one scale.
        static = 0.001 * (1 + len(layer) % 7)
        static = 0.0015 if layer.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj") else static
        stored_input = torch.tensor(static).to(variant.scale_dtype).reshape([1] * (variant.scale_dims > 0))
        written.tensors[f"{layer}.{variant.input_scale}"] = stored_input
        written.inputs[layer] = stored_input.float().item()


class OracleLinear(nn.Module):
    """A layer of a written checkpoint, computed with the oracle's public functions alone."""

    def __init__(self, written: Written, layer: str, bias: Tensor | None) -> None:
        super().__init__()
        self.variant, self.bias = written.variant, bias
        self.codes, self.scale = written.codes[layer], written.scales[layer]
        self.static = written.inputs.get(layer)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] to [..., N]."""
        flat = x.detach().reshape(-1, x.shape[-1])
        m, n = flat.shape[0], self.codes.shape[0]
        activation, weight = self.variant.activation, self.variant.weight
        if activation == "group":
            qx = fp8ref.quantize(
                flat, scaling="1x128", scale_format="ue8m0" if self.variant.power_of_two else "float32"
            )
            qw = fp8ref.ScaledTensor(self.codes, self.scale, "128x128")
        else:
            whole = activation in ("static", "tensor")
            static = None if self.static is None else torch.tensor(self.static)
            qx = fp8ref.quantize(
                flat, scaling="tensor" if whole else "row", scale=static, absmax_bound=self.variant.bound
            )
            qw = fp8ref.ScaledTensor(self.codes, self.scale.reshape(()) if weight == "tensor" else self.scale, "tensor")
            if not (whole and weight == "tensor"):
                rows = qx.scale.expand(m, 1).contiguous()
                qx = fp8ref.ScaledTensor(qx.data, rows, "row")
                qw = fp8ref.ScaledTensor(self.codes, self.scale.reshape(-1, 1).expand(n, 1).contiguous(), "row")
        kind: Any = {"tensor": "tensor", "channel": "row", "block": "128x128"}[weight]
        packed = fp8ref.pack_weight(self.codes, kind, self.scale)
        split = fp8ref.explain(packed, m=m).split_k
        out = fp8ref.emulate_matmul(qx, qw.t(), bias=self.bias, out_dtype=x.dtype, split_k=split)
        return out.view(*x.shape[:-1], n)


def put_oracle(model: nn.Module, written: Written) -> nn.Module:
    """Replace the layers of a model by those of a written checkpoint, in place."""
    for layer in written.codes:
        parent, _, last = layer.rpartition(".")
        old: Any = model.get_submodule(layer)
        setattr(model.get_submodule(parent), last, OracleLinear(written, layer, old.bias))
    return model


class SmallBlock(nn.Module):
    """Two linear layers; 136 and 48 are no multiples of 128, 136 leaves a tail of 8."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 136)
        self.down = nn.Linear(136, 48, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(torch.relu(self.up(x)))
        return out


class SmallModel(nn.Module):
    """A model that loads in milliseconds, for tests that load it a thousand times."""

    def __init__(self) -> None:
        super().__init__()
        self.block = SmallBlock()
        self.norm = nn.LayerNorm(48)
        self.lm_head = nn.Linear(48, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.lm_head(self.norm(self.block(x)))
        return out


SMALL_LAYERS = ["block.up", "block.down"]


def small_model(seed: int = 0) -> SmallModel:
    """A SmallModel with weights from the seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SmallModel().eval()


def write_small(folder: Path, variant: str) -> Written:
    """A checkpoint of a SmallModel."""
    return write(folder, VARIANTS[variant], small_model().state_dict(), SMALL_LAYERS, {})


def snapshot(model: nn.Module) -> tuple[list[tuple[str, int]], dict[str, bytes]]:
    """Which modules and parameters a model has, and their bytes."""
    things = [(name, id(module)) for name, module in model.named_modules()]
    things += [(name, id(parameter)) for name, parameter in model.named_parameters()]
    state = {
        name: tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }
    return things, state
