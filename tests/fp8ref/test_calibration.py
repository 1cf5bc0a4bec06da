"""calibrate: the scales that static recipes need, from what the layers really see."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fp8ref
from fp8ref import Fp8Linear, Recipe, calibrate, convert_
from tiny_models import tiny_model, tokens

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


class Model(nn.Module):
    """Two layers in a row, one that is used twice and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.twice = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: Tensor, factor: float = 1.0) -> Tensor:
        out: Tensor = self.twice(self.twice(self.up(input=x * factor)))
        return out


def batches(count: int = 3) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(4, 8, generator=g) * (i + 1) for i in range(count)]


def scale_of(absmax: float, dtype: torch.dtype = E4M3) -> float:
    return fp8ref.quantize(torch.tensor([[absmax]]), dtype).scale.item()


def test_absmax_is_the_largest_magnitude_of_all_batches() -> None:
    model, data = Model(), batches()
    calibration = calibrate(model, data, "row-static")
    inner = [model.up(x) for x in data]
    outer = [model.twice(x) for x in inner]
    assert calibration["up"] == scale_of(max(x.abs().max().item() for x in data))
    assert calibration["twice"] == scale_of(max(x.abs().max().item() for x in (*inner, *outer)))
    assert set(calibration) == {"up", "twice"}
    assert (calibration.unreached, calibration.batches, calibration.observer) == (("unused",), 3, "absmax")


def test_batches_are_called_as_they_come() -> None:
    model, x = Model(), batches(1)[0]
    wanted = calibrate(model, [x * 2.0], "row-static")
    for batch in ({"x": x, "factor": 2.0}, (x, 2.0), [x, 2.0]):
        assert calibrate(model, iter([batch]), "row-static") == wanted


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scale_format", ["float32", "ue8m0"])
def test_the_scale_is_what_quantize_makes_of_the_data(dtype: torch.dtype, scale_format: Any) -> None:
    recipe = Recipe("row", "tensor", activation_dtype=dtype, scale_format=scale_format, dynamic=False)
    x = torch.cat(batches())
    model = nn.Sequential(nn.Linear(8, 4))
    calibration = calibrate(model, [x], recipe)
    assert calibration.dtype == dtype
    assert calibration["0"] == fp8ref.quantize(x, dtype, scale_format=scale_format).scale.item()
    # Calibrated on the very data, a static layer computes what the dynamic one does.
    static, dynamic = nn.Sequential(nn.Linear(8, 4)), nn.Sequential(nn.Linear(8, 4))
    static.load_state_dict(model.state_dict())
    dynamic.load_state_dict(model.state_dict())
    convert_(static, recipe, calibration=calibration, backend="emulate", show=False)
    other = Recipe("row", "tensor", activation_dtype=dtype, scale_format=scale_format)
    convert_(dynamic, other, backend="emulate", show=False)
    assert torch.equal(static(x), dynamic(x))


@settings(max_examples=60)
@given(
    values=st.lists(st.floats(-1e4, 1e4, width=16), min_size=1, max_size=40),
    percentile=st.sampled_from([0.1, 1, 25, 50, 90, 99, 99.9, 100]),
    cuts=st.integers(1, 4),
)
def test_a_percentile_is_the_smallest_value_that_covers_the_share(
    values: list[float], percentile: float, cuts: int
) -> None:
    x = torch.tensor(values).bfloat16()
    model = nn.Sequential(nn.Linear(1, 1)).bfloat16()
    parts = [part[:, None] for part in x.chunk(cuts)]
    found = calibrate(model, parts, "row-static", observer="percentile", percentile=percentile)
    magnitudes = sorted(x.abs().float().tolist())
    covering = next(v for i, v in enumerate(magnitudes) if (i + 1) * 1000 >= round(percentile * 10) * len(magnitudes))
    assert found["0"] == scale_of(covering)
    assert found.observer == f"percentile {percentile:g}"


def test_a_percentile_of_fp32_is_at_most_a_bf16_step_high() -> None:
    x = torch.randn(5000, 1, generator=torch.Generator().manual_seed(0))
    found = calibrate(nn.Sequential(nn.Linear(1, 1)), [x], "row-static", observer="percentile", percentile=99.0)["0"]
    exact = float(np.percentile(x.abs().numpy(), 99.0, method="inverted_cdf"))
    assert scale_of(exact) <= found <= scale_of(exact * (1 + 2**-7))
    # All of it: never above the absmax.
    whole = calibrate(nn.Sequential(nn.Linear(1, 1)), [x], "row-static", observer="percentile", percentile=100)["0"]
    assert whole == scale_of(x.abs().max().item())


def test_the_model_is_left_as_it_was_even_by_an_error() -> None:
    model = Model().train()
    model.twice.eval()
    weights = {name: value.clone() for name, value in model.state_dict().items()}

    def state() -> tuple[Any, ...]:
        hooks = [len(m._forward_pre_hooks) for m in model.modules()]
        return [m.training for m in model.modules()], hooks, [p.grad for p in model.parameters()]

    before = state()
    calibrate(model, batches(), "row-static")
    assert state() == before
    bad = batches()
    bad[1][0, 0] = math.nan
    with pytest.raises(ValueError, match=r"batches: the input of up holds NaN or Inf"):
        calibrate(model, bad, "row-static")
    with pytest.raises(TypeError):
        calibrate(model, [{"nothing": 1}], "row-static")
    assert state() == before
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())


def test_zeros_and_empty_batches() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert calibrate(model, [torch.zeros(1, 2)], "row-static")["0"] == 1.0
    empty = calibrate(model, [torch.zeros(0, 2)], "row-static")
    assert (dict(empty), empty.unreached) == ({}, ("0",))
    with pytest.raises(ValueError, match="calibration: it has no scale for 0"):
        convert_(model, "row-static", calibration=empty, show=False)


@pytest.mark.parametrize(
    ("recipe", "options", "error", "words"),
    [
        ("row", {}, ValueError, "recipe: got a dynamic one"),
        ("rows", {}, ValueError, "recipe: got 'rows'"),
        ("row-static", {"observer": "mean"}, ValueError, "observer: got 'mean'"),
        ("row-static", {"percentile": 0}, ValueError, "percentile: got 0"),
        ("row-static", {"percentile": 100.1}, ValueError, "percentile: got 100.1"),
        ("row-static", {"percentile": True}, ValueError, "percentile: got True"),
        ("row-static", {"skip": ["down"]}, ValueError, "skip: got 'down', which matches none"),
        ("row-static", {"only": "up"}, TypeError, "only: got 'up'; give a list"),
        ("row-static", {"skip": ["*"]}, ValueError, "model: it has no layer to calibrate"),
        ("row-static", {"batches": []}, ValueError, "batches: got none"),
        ("row-static", {"batches": torch.ones(3, 8)}, TypeError, "batches: got Tensor; give a list"),
        ("row-static", {"batches": {"x": torch.ones(3, 8)}}, TypeError, "batches: got dict; give a list"),
        ("row-static", {"batches": 5}, TypeError, "batches: got int; give a list"),
        ("row-static", {"model": "model"}, TypeError, "model: got str; give a torch.nn.Module"),
    ],
)
def test_refusals(recipe: str, options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        calibrate(**{"model": Model(), "batches": batches(), "recipe": recipe, **options})


def test_a_calibration_is_a_frozen_mapping() -> None:
    calibration = calibrate(Model(), batches(), "row-static", only=["up"])
    assert isinstance(calibration, Mapping)
    assert len(calibration) == 1
    with pytest.raises(AttributeError):
        calibration.batches = 3  # type: ignore[misc]
    with pytest.raises(TypeError):
        calibration.scales["up"] = 1.0  # type: ignore[index]


def test_copies_of_a_calibration(tmp_path: Path) -> None:
    calibration = calibrate(Model(), batches(), "row-static", observer="percentile")
    torch.save(calibration, tmp_path / "saved")
    loaded = torch.load(tmp_path / "saved", weights_only=False)
    others: list[Any] = [copy.deepcopy(calibration), pickle.loads(pickle.dumps(calibration)), loaded]
    for other in others:
        assert dict(other) == dict(calibration)
        for name in ("dtype", "observer", "batches", "unreached"):
            assert getattr(other, name) == getattr(calibration, name)
        with pytest.raises(TypeError):
            other.scales["up"] = 1.0


def test_a_language_model_is_calibrated_and_converted() -> None:
    model = tiny_model()
    data = [{"input_ids": tokens(24, seed=seed)[None], "use_cache": False} for seed in range(3)]
    calibration = calibrate(model, data, "tensor-static", observer="percentile", percentile=99.0, skip=["head"])
    report = convert_(
        model, "tensor-static", calibration=calibration, skip=["head", "unused"], backend="emulate", show=False
    )
    assert [layer.name for layer in report.converted] == ["up", "down"]
    assert isinstance(model.up, Fp8Linear)
    assert model(tokens(24)[None], use_cache=False).logits.isfinite().all()


def test_the_bar_is_for_terminals(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = calibrate(Model(), iter(batches()), "row-static")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    found = calibrate(Model(), iter(batches()), "row-static")
    shown = capsys.readouterr().err
    assert "calibrating" in shown
    assert found.keys() == wanted.keys()
    calibrate(Model(), batches(), "row-static", show=False)
    assert capsys.readouterr().err == ""
