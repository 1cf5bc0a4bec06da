"""Fp8Linear on a GPU with FP8 units: the emulate backend's bits, graphs, torch.compile, gradients, moves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fp8ref import RECIPES, Fp8Linear, Recipe, calibrate, convert_
from tiny_layers import same_bits

pytestmark = pytest.mark.gpu

SIZES = [(1, 1024, 4096), (5, 300, 513), (17, 64, 100), (200, 512, 1024)]


def pair(recipe: Recipe | str, n: int, k: int, **options: Any) -> tuple[Fp8Linear, Fp8Linear]:
    """A layer that runs on the GPU and its copy that is emulated there."""
    static = (RECIPES[recipe] if isinstance(recipe, str) else recipe).dynamic is False
    layer = Fp8Linear.from_linear(
        nn.Linear(k, n, device="cuda"), recipe, input_scale=0.01 if static else None, **options
    )
    oracle = copy.deepcopy(layer)
    oracle.backend = "emulate"
    return layer, oracle


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_bits_of_the_emulate_backend(name: str, dtype: torch.dtype) -> None:
    for m, n, k in SIZES:
        layer, oracle = pair(name, n, k)
        x = torch.randn(m, k, device="cuda", dtype=dtype)
        x[0, ::5] *= 40.0
        with torch.no_grad():
            assert same_bits(layer(x), oracle(x)), (m, n, k)
            assert same_bits(layer(x.view(1, m, k))[0], layer(x))


@pytest.mark.parametrize("name", RECIPES)
def test_a_captured_layer_follows_new_inputs_and_a_loaded_state(name: str) -> None:
    layer, oracle = pair(name, 300, 1031)
    other, _ = pair(name, 300, 1031)
    x = torch.randn(3, 1031, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        layer(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x)
        for state in (layer.state_dict(), other.state_dict()):
            layer.load_state_dict(state)
            oracle.load_state_dict(state)
            x.normal_()
            graph.replay()
            assert same_bits(y, oracle(x))


@pytest.mark.parametrize("name", ["row", "tensor", "tensor-static", "block-ue8m0"])
def test_compiles_whole(name: str) -> None:
    torch._dynamo.reset()
    layer, oracle = pair(name, 300, 513)
    model = nn.Sequential(layer, nn.ReLU())
    x = torch.randn(5, 513, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        assert same_bits(torch.compile(model, fullgraph=True)(x), oracle(x).relu())


@pytest.mark.parametrize("name", ["row", "tensor-static", "block"])
def test_gradients_are_those_of_the_emulate_backend(name: str) -> None:
    grads = []
    for layer in pair(name, 300, 513, keep_weight=True):
        torch.manual_seed(0)
        x = torch.randn(5, 513, device="cuda", requires_grad=True)
        layer(x).square().sum().backward()
        grads.append([x.grad, *(parameter.grad for parameter in layer.parameters())])
    assert len(grads[0]) == 3
    assert all(same_bits(mine, theirs) for mine, theirs in zip(*grads, strict=True))


def test_moves_between_devices() -> None:
    layer, _ = pair("row", 300, 513)
    x = torch.randn(5, 513, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        wanted = layer(x)
        back = copy.deepcopy(layer).cpu()
        with pytest.raises(ValueError, match="on cpu while x is on cuda"):
            back(x)
        assert same_bits(back.cuda()(x), wanted)
        assert back.half().packed.scale.dtype == torch.float32


def test_a_calibrated_model() -> None:
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 100)).cuda().bfloat16()
    batches = [torch.randn(7, 256, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    for observer in ("absmax", "percentile"):
        current = copy.deepcopy(model)
        calibration = calibrate(current, batches, "row-static", observer=observer)
        convert_(current, "row-static", calibration=calibration, show=False)
        emulated = copy.deepcopy(current)
        for layer in emulated:
            if isinstance(layer, Fp8Linear):
                layer.backend = "emulate"
        with torch.no_grad():
            assert same_bits(current(batches[0]), emulated(batches[0]))
