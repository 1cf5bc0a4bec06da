"""convert_: every layer is converted or listed with its reason, and a failed call changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from fp8ref import Calibration, ConversionReport, Fp8Linear, calibrate, convert_


class Special(nn.Linear):
    """A subclass, as adapters are."""


class Model(nn.Module):
    """Layers of every kind, some in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)) for _ in range(3))
        self.again = self.layers[1]
        self.special = Special(32, 32)
        self.normed = parametrizations.weight_norm(nn.Linear(32, 32))
        self.head = nn.Linear(32, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in (*self.layers, self.again, self.special, self.normed):
            x = layer(x)
        out: Tensor = self.head(x)
        return out


IDS = torch.arange(6)


def made(seed: int = 0) -> Model:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Model()


def convert(model: nn.Module, recipe: str = "row", **options: Any) -> ConversionReport:
    return convert_(model, recipe, backend="emulate", show=False, **options)


def reasons(report: ConversionReport) -> dict[str, str]:
    return {layer.name: layer.reason for layer in report.layers}


def test_every_layer_is_listed_with_what_was_done() -> None:
    model = made()
    assert reasons(convert(model)) == {
        "embed": "a look-up, no product",
        **{f"layers.{i}.{j}": "FP8" for i in range(3) for j in (0, 2)},
        "special": "Special is a subclass of Linear that may compute something else",
        "normed": "its weight is parametrised: torch.nn.utils.parametrize.remove_parametrizations first",
        "head": 'its weight is that of embed too (tied="untie" converts it)',
    }
    assert model(IDS).shape == (6, 40)


def test_the_converted_model_is_the_one_with_converted_layers() -> None:
    model, reference = made(), made()
    convert(model)
    for i, j in ((i, j) for i in range(3) for j in (0, 2)):
        reference.layers[i][j] = Fp8Linear.from_linear(reference.layers[i][j], "row", backend="emulate")  # type: ignore[index, operator]
    assert torch.equal(model(IDS), reference(IDS))
    assert not torch.equal(model(IDS), made()(IDS))


def test_a_layer_used_twice_stays_one_layer() -> None:
    model = made()
    report = convert(model, skip=["special"])
    assert model.again is model.layers[1]
    assert isinstance(model.again[0], Fp8Linear)  # type: ignore[index]
    first = next(layer for layer in report.layers if layer.name == "layers.1.0")
    assert first.aliases == ("again.0",)
    shared = nn.Linear(32, 32)
    twice = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    assert len(convert(twice).converted) == 1
    assert twice["a"] is twice["b"][0]  # type: ignore[index]
    skipped = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared), "c": nn.Linear(2, 2)})
    assert reasons(convert(skipped, skip=["b.*"]))["a"] == "skip: 'b.*'", "a layer counts under each of its names"


def test_tied_weights() -> None:
    kept, untied = made(), made()
    report = convert(kept)
    assert kept.head.weight is kept.embed.weight
    assert kept.embed.weight in set(kept.parameters())
    other = convert(untied, tied="untie")
    assert isinstance(untied.head, Fp8Linear)
    assert untied.embed.weight.shape == (40, 32)
    head = next(layer for layer in other.layers if layer.name == "head")
    assert head.reason == "FP8, untied from embed"
    assert head.nbytes_saved == -untied.head.packed.nbytes < 0
    assert other.nbytes_saved < report.nbytes_saved
    twins = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    twins[1].weight = twins[0].weight
    both = convert(twins, tied="untie")
    assert [layer.nbytes_saved for layer in both.layers] == [4 * 32 * 32 - 32 * 32 - 4 * 32, -32 * 32 - 4 * 32]
    twins = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    twins[1].weight = twins[0].weight
    with pytest.raises(
        ValueError, match=r"no layer to convert \(its weight is that of 1 too .*its weight is that of 0"
    ):
        convert(twins)


def test_the_bytes_saved_are_those_of_the_model() -> None:
    for keep_weight in (False, True):
        model = made()
        report = convert(model, tied="untie", keep_weight=keep_weight)
        assert report.nbytes_saved == sum(layer.nbytes_saved for layer in report.layers)
        assert (report.nbytes_saved < 0) == keep_weight
        distinct = {t.data_ptr(): t.numel() * t.element_size() for m in model.modules()
                    for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}  # fmt: skip
        assert report.nbytes_after == sum(distinct.values())


def test_parametrised_and_hooked_layers() -> None:
    model = made()
    parametrize.remove_parametrizations(model.normed, "weight")
    model.layers[0][0].register_forward_pre_hook(lambda *_: None)  # type: ignore[index]
    model.layers[0][2].forward = model.layers[0][2].forward  # type: ignore[index]
    found = reasons(convert(model))
    assert found["normed"] == "FP8"
    assert found["layers.0.0"] == found["layers.0.2"] != "FP8"
    assert "hooks" in found["layers.0.0"]


def test_a_second_conversion_lists_the_first() -> None:
    model = made()
    convert(model, only=["layers.*.0"])
    layer = model.layers[0][0]  # type: ignore[index]
    report = convert(model, "block")
    assert model.layers[0][0] is layer  # type: ignore[index]
    assert reasons(report)["layers.0.0"] == "already FP8"
    assert reasons(report)["layers.0.2"] == "FP8"
    with pytest.raises(ValueError, match=r"no layer to convert \(.*already FP8"):
        convert(model)


def test_the_transformer_layer_that_reads_weights_of_others() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
    model = nn.Sequential(layer, nn.Linear(16, 16))
    found = reasons(convert(model))
    assert (
        found["0.linear1"]
        == found["0.linear2"]
        == "its TransformerEncoderLayer reads the weight without calling the layer"
    )
    assert found["0.self_attn.out_proj"].startswith("NonDynamicallyQuantizableLinear is a subclass")
    assert found["0.self_attn"] == "a MultiheadAttention, no linear layer"
    assert found["1"] == "FP8"
    assert model(torch.ones(1, 3, 16)).shape == (1, 3, 16)


def corrupt(change: Callable[[Model], None]) -> Model:
    model = made()
    change(model)
    return model


def set_nan(model: Model) -> None:
    model.layers[2][2].weight.data[0, 0] = float("nan")  # type: ignore[index]


def to_meta(model: Model) -> None:
    model.layers[2].to("meta")


STATIC = {f"layers.{i}.{j}": 0.01 for i in range(3) for j in (0, 2)}


@pytest.mark.parametrize(
    ("model", "recipe", "options", "error", "words"),
    [
        (
            made(),
            "row",
            {"skip": ["lm_head"]},
            ValueError,
            r"skip: got 'lm_head', which matches none of .*there is 'head'",
        ),
        (
            made(),
            "row",
            {"only": ["layers.0"]},
            ValueError,
            r"only: got 'layers.0', which matches none.*'layers.0\.\*'",
        ),
        (made(), "row", {"only": ["layers.*", "x"]}, ValueError, "only: got 'x', which matches none"),
        (made(), "row", {"only": []}, ValueError, "no layer to convert .*not among only"),
        (made(), "row", {"skip": ["*"]}, ValueError, r"no layer to convert .*skip: '\*'"),
        (made(), "row", {"skip": "head"}, TypeError, "skip: got 'head'; give a list of name patterns"),
        (made(), "row", {"skip": [1]}, TypeError, "skip: got 1 among the patterns"),
        (made(), "row", {"tied": "both"}, ValueError, "tied: got 'both'"),
        (made(), "row", {"backend": "gpu"}, ValueError, "backend: got 'gpu'"),
        (made(), "row", {"keep_weight": 1}, TypeError, "keep_weight: got 1"),
        (made(), "rows", {}, ValueError, "recipe: got 'rows'"),
        (made(), "row", {"calibration": STATIC}, ValueError, "calibration: got one for a dynamic recipe"),
        (made(), "row-static", {}, TypeError, "calibration: got NoneType; a static recipe needs"),
        (made(), "row-static", {"calibration": {**STATIC, "layers.2.0": 0.0}}, ValueError, "got 0.0 for layers.2.0"),
        (made(), "row-static", {"calibration": {**STATIC, "layers.2.0": 1}}, ValueError, "got 1 for layers.2.0"),
        (
            made(),
            "row-static",
            {"calibration": {name: scale for name, scale in STATIC.items() if name != "layers.2.2"}},
            ValueError,
            "calibration: it has no scale for layers.2.2; give batches that reach",
        ),
        (
            made(),
            "row-static",
            {"calibration": Calibration(STATIC, torch.float8_e5m2, "absmax", 1, ())},
            ValueError,
            "calibration: got scales for torch.float8_e5m2",
        ),
        (made(), "row-static", {"calibration": {**STATIC, "layers.2.0": 1e-50}}, ValueError, "got 1e-50 for layers.2"),
        (made().double(), "row", {}, TypeError, "layers.0.0: bias: got torch.float64; give one of"),
        (corrupt(set_nan), "row", {}, ValueError, "layers.2.2: its weight holds NaN or Inf"),
        (corrupt(to_meta), "row", {}, ValueError, "layers.2.0: its weight is on the meta device.*load the model's"),
        (nn.Linear(2, 2), "row", {}, TypeError, "model: got a Linear, which is in no model; use Fp8Linear.from_linear"),
        (nn.Sequential(nn.ReLU()), "row", {}, ValueError, r"no layer to convert \(no linear layer\)"),
        ("model", "row", {}, TypeError, "model: got str"),
    ],
)
def test_a_failed_call_changes_nothing(
    model: Any, recipe: str, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    before = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    with pytest.raises(error, match=words):
        convert_(model, recipe, **{"backend": "emulate", **options})
    after = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    assert before.keys() == after.keys()
    assert all(after[name] is module for name, module in before.items())


def test_an_error_in_the_middle_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, real, calls = made(), Fp8Linear.from_linear, []

    def failing(*arguments: Any, **options: Any) -> Fp8Linear:
        calls.append(1)
        if len(calls) == 4:
            raise MemoryError("no memory left")
        return real(*arguments, **options)

    monkeypatch.setattr(Fp8Linear, "from_linear", failing)
    before = list(model.modules())
    with pytest.raises(MemoryError):
        convert(model)
    assert len(calls) == 4
    assert list(model.modules()) == before


def test_static_conversion_uses_the_calibrated_scales() -> None:
    model = made()
    calibration = calibrate(model, [IDS], "row-static", show=False)
    convert(model, "row-static", calibration=calibration)
    for name, layer in model.named_modules():
        if isinstance(layer, Fp8Linear):
            assert layer.input_scale is not None
            assert layer.input_scale.item() == calibration[name]
    assert model(IDS).shape == (6, 40)


def test_options_reach_the_layers() -> None:
    model = made().half()
    model.train()
    convert(model, only=["layers.0.*"], batch_invariant=True, keep_weight=True)
    layer = model.layers[0][0]  # type: ignore[index]
    assert isinstance(layer, Fp8Linear)
    assert (layer.backend, layer.batch_invariant, layer.training) == ("emulate", True, True)
    assert layer.kept_weight is not None
    assert layer.kept_weight.dtype == torch.float16
    assert model.get_parameter("layers.0.0.bias") is layer.bias


def test_a_converted_model_is_saved_and_loaded(tmp_path: Path) -> None:
    model, other = (nn.Sequential(nn.Linear(140, 24), nn.ReLU(), nn.Linear(24, 8)) for _ in range(2))
    for each in (model, other):
        convert(each, "block")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    x = torch.randn(3, 140)
    assert not torch.equal(model(x), other(x))
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model(x), other(x))
