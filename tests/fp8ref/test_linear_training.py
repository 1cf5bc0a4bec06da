"""Gradients, a weight that is trained, torch.compile and torch.export."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fp8ref
from fp8ref import RECIPES, Fp8Linear
from tiny_layers import layer_of, linear, random, same_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", RECIPES)
def test_gradients_are_those_of_the_dequantised_operands(name: str, dtype: torch.dtype) -> None:
    layer = layer_of(name, keep_weight=True)
    recipe = layer.recipe
    x = random(2, 3, 140, seed=2).to(dtype).requires_grad_()
    grad = random(2, 3, 20, seed=3).to(dtype)
    y = layer(x)
    assert same_bits(y.detach(), layer_of(name)(x.detach()))
    y.backward(grad)
    how: dict[str, Any] = {"scale_format": recipe.scale_format, "absmax_bound": recipe.activation_bound}
    how = how if recipe.dynamic else {"scale": 0.01}
    rows = x.detach().view(6, 140)
    q = fp8ref.quantize(rows, recipe.activation_dtype, scaling=recipe.activation_scaling, **how)
    flat = grad.view(6, 20)
    assert x.grad is not None
    assert layer.kept_weight is not None
    assert layer.kept_weight.grad is not None
    assert same_bits(x.grad.view(6, 140), flat @ layer.dequantized_weight(dtype))
    assert same_bits(layer.kept_weight.grad, (flat.t() @ fp8ref.dequantize(q, dtype)).float())
    assert same_bits(layer.bias.grad, flat.sum(0).float())  # type: ignore[union-attr, arg-type]


def test_a_layer_that_is_trained_learns() -> None:
    target, x = linear(8, 32), random(64, 32, seed=5)
    layer = Fp8Linear.from_linear(nn.Linear(32, 8), "row", backend="emulate", keep_weight=True)
    optimiser = torch.optim.Adam(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(40):
        loss = (layer(x) - target(x).detach()).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 20


def test_the_codes_follow_the_kept_weight() -> None:
    source = linear()
    layer = Fp8Linear.from_linear(source, "row", backend="emulate", keep_weight=True)
    assert layer.kept_weight is source.weight
    x, codes = random(3, 140, seed=2), layer._codes
    layer(x)
    assert layer._codes is codes, "nothing changed, so nothing is made anew"
    with torch.no_grad():
        source.weight.mul_(-1.0)
    assert same_bits(layer(x), Fp8Linear.from_linear(source, "row", backend="emulate")(x))
    with torch.no_grad():
        source.weight.add_(1.0)
    fresh = Fp8Linear.from_linear(source, "row", backend="emulate")
    assert same_bits(layer.state_dict()["weight"], fresh.weight), "a state is never stale"
    source.weight.data.mul_(3.0)  # which torch does not count as a change
    layer.requantize()
    assert same_bits(layer.dequantized_weight(), Fp8Linear.from_linear(source, "row").dequantized_weight())
    other = Fp8Linear.from_linear(linear(), "row", backend="emulate", keep_weight=True)
    other.load_state_dict(layer.state_dict())
    assert same_bits(other(x), layer(x))
    again = copy.deepcopy(layer)
    with torch.no_grad():
        again.kept_weight.zero_()  # type: ignore[union-attr]
    assert not again.dequantized_weight().any()
    assert layer.dequantized_weight().any()
    narrow = copy.deepcopy(layer).bfloat16()
    assert narrow.kept_weight.dtype == torch.bfloat16  # type: ignore[union-attr]
    wanted = fp8ref.quantize(source.weight.detach().bfloat16(), scaling="row")
    assert same_bits(narrow.dequantized_weight(), fp8ref.dequantize(wanted))


def test_no_gradient_for_the_weight_unless_it_is_kept() -> None:
    layer = layer_of()
    assert [name for name, _ in layer.named_parameters()] == ["bias"]
    layer(random(1, 140).requires_grad_()).sum().backward()


@pytest.mark.parametrize("name", ["row", "tensor-static", "block-ue8m0"])
@pytest.mark.parametrize("keep", [False, True])
def test_compiles_whole_with_gradients(name: str, keep: bool) -> None:
    torch._dynamo.reset()
    layer = layer_of(name, keep_weight=keep)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    x = random(3, 140, seed=2)
    with torch.no_grad():
        assert same_bits(compiled(x), layer(x))
    grads = []
    for call in (layer, compiled):
        y = x.clone().requires_grad_()
        layer.zero_grad()
        call(y).square().sum().backward()
        grads.append([y.grad, *(p.grad for p in layer.parameters())])
    assert all(same_bits(a, b) for a, b in zip(*grads, strict=True))
    if keep:
        with torch.no_grad():
            layer.kept_weight.neg_()  # type: ignore[union-attr]
            assert same_bits(compiled(x), layer(x)), "the compiled call follows the kept weight too"


@pytest.mark.parametrize("name", ["row", "tensor-static", "block"])
def test_exports(name: str) -> None:
    layer, x = layer_of(name), random(3, 140, seed=2)
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(layer.requires_grad_(False), (x,), dynamic_shapes=({0: rows},))
    for m in (3, 7):
        y = random(m, 140, seed=m)
        assert same_bits(program.module()(y), layer(y))
