"""Fp8Linear gives the oracle's bits, and refuses what it cannot be made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrizations

import fp8ref
from fp8ref import RECIPES, Fp8Linear, Recipe
from tiny_layers import expected, layer_of, linear, random, same_bits


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_recipe_is_quantize_and_emulate_matmul(name: str, dtype: torch.dtype) -> None:
    x = random(2, 3, 140, seed=2).to(dtype)
    wanted = expected(x, linear(), RECIPES[name], None if RECIPES[name].dynamic else 0.01)
    assert same_bits(layer_of(name)(x), wanted)


formats = st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])


@settings(max_examples=40)
@given(
    pair=st.sampled_from([("row", "row"), ("row", "tensor"), ("tensor", "row"), ("tensor", "tensor"),
                          ("1x128", "1x128"), ("128x128", "1x128")]),
    weight_dtype=formats, activation_dtype=formats, scale_format=st.sampled_from(["float32", "ue8m0"]),
    bound=st.none() | st.floats(0.5, 4.0), m=st.integers(0, 5), n=st.integers(1, 40), k=st.integers(1, 300),
)  # fmt: skip
def test_any_recipe_and_size(pair: Any, bound: float | None, m: int, n: int, k: int, **fields: Any) -> None:
    recipe = Recipe(pair[0], pair[1], activation_bound=bound, **fields)
    source, x = linear(n, k, bias=k % 2 == 0), random(m, k, seed=3)
    layer = Fp8Linear.from_linear(source, recipe, backend="emulate", batch_invariant=True)
    assert same_bits(layer(x), expected(x, source, recipe))


def test_a_cpu_without_emulation_is_an_error_that_names_it() -> None:
    layer = Fp8Linear.from_linear(linear(), "row")
    with pytest.raises(ValueError, match=r'on cpu; the kernels need an NVIDIA GPU.*backend="emulate"'):
        layer(random(1, 140))
    layer.backend = "emulate"
    assert layer(random(1, 140)).shape == (1, 20)


def test_conv1d_of_gpt2_is_transposed() -> None:
    from transformers.pytorch_utils import Conv1D

    source = Conv1D(20, 140)
    plain = nn.Linear(140, 20)
    plain.weight.data.copy_(source.weight.data.t())
    plain.bias.data.copy_(source.bias.data)
    layer, x = Fp8Linear.from_linear(source, "row", backend="emulate", keep_weight=True), random(3, 140, seed=2)
    assert same_bits(layer(x), Fp8Linear.from_linear(plain, "row", backend="emulate")(x))
    assert layer.kept_weight.shape == (20, 140)  # type: ignore[union-attr]


def hooked() -> nn.Linear:
    made = linear()
    made.register_forward_hook(lambda *_: None)
    return made


def broken(value: float) -> nn.Linear:
    made = linear()
    made.weight.data[3, 4] = value
    return made


class Special(nn.Linear):
    pass


@pytest.mark.parametrize(
    ("source", "error", "words"),
    [
        (nn.Embedding(3, 4), TypeError, "linear: an Embedding, no linear layer"),
        (Special(3, 4), TypeError, "linear: Special is a subclass of Linear that may compute something else"),
        (
            parametrizations.weight_norm(linear()),
            TypeError,
            "linear: its weight is parametrised.*remove_parametrizations",
        ),
        (hooked(), TypeError, "linear: it has hooks"),
        (broken(float("nan")), ValueError, "linear: its weight holds NaN or Inf"),
        (broken(float("-inf")), ValueError, "linear: its weight holds NaN or Inf"),
        (nn.Linear(3, 4, device="meta"), ValueError, "linear: its weight is on the meta device"),
    ],
)
def test_what_cannot_be_quantised(source: nn.Module, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Fp8Linear.from_linear(source, "row")


PACKED = fp8ref.pack_weight(torch.ones(4, 8))


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((PACKED, "rows"), {}, ValueError, "recipe: got 'rows'; give one of .*'row'"),
        ((PACKED, None), {}, TypeError, "recipe: got NoneType"),
        ((torch.ones(4, 8), "row"), {}, TypeError, "packed: got Tensor"),
        ((PACKED, "block"), {}, ValueError, "packed: got a weight with 'row' scales for a recipe with '128x128'"),
        ((PACKED, "tensor"), {}, ValueError, "packed: got a weight with 'row' scales for a recipe with 'tensor'"),
        ((fp8ref.pack_weight(torch.ones(4, 8), "tensor"), "row"), {}, ValueError, "packed: got a weight with 'tensor'"),
        ((PACKED, Recipe(weight_dtype=torch.float8_e5m2)), {}, ValueError, "packed: got torch.float8_e4m3fn codes"),
        ((fp8ref.pack_weight(torch.ones(4, 8) * float("nan")), "row"), {}, ValueError, "packed: its codes hold NaN"),
        ((PACKED, "row"), {"input_scale": 1.0}, ValueError, "input_scale: got one for a dynamic recipe"),
        ((PACKED, "row-static"), {}, ValueError, "input_scale: missing"),
        ((PACKED, "row-static"), {"input_scale": 0.0}, ValueError, "input_scale: got 0.0"),
        ((PACKED, "row-static"), {"input_scale": float("inf")}, ValueError, "input_scale: got inf"),
        ((PACKED, "row-static"), {"input_scale": torch.ones(2)}, ValueError, r"input_scale: got torch.float32 \[2\]"),
        ((PACKED, "row-static"), {"input_scale": 1}, TypeError, "input_scale: got int"),
        ((PACKED, "row"), {"bias": torch.ones(5)}, ValueError, r"bias: got shape \[5\]; give \[4\]"),
        ((PACKED, "row"), {"bias": torch.ones(4).double()}, TypeError, "bias: got torch.float64"),
        ((PACKED, "row"), {"backend": "cuda"}, ValueError, "backend: got 'cuda'"),
        ((PACKED, "row"), {"batch_invariant": 1}, TypeError, "batch_invariant: got 1"),
    ],
)
def test_refusals(arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Fp8Linear.from_packed(*arguments, **options)


def test_from_packed_is_from_linear() -> None:
    source = linear()
    packed = fp8ref.pack_weight(source.weight.detach(), "128x128")
    made = Fp8Linear.from_packed(packed, "block", bias=source.bias.detach(), backend="emulate")
    x = random(3, 140, seed=2)
    assert same_bits(made(x), layer_of("block")(x))
    assert made.packed is packed
    assert not made.bias.requires_grad  # type: ignore[union-attr]


def test_explains_and_describes_itself() -> None:
    text = str(layer_of("tensor-static").explain(3))
    assert text.startswith('weight e4m3 tensor, x e4m3 tensor static; backend "emulate"')
    assert "the scale given" in text
    assert "two Triton kernels: absmax of all of x" in str(layer_of("tensor").explain(3))
    assert "ue8m0" in str(layer_of("block-ue8m0").explain(3))
    assert "absmax up to 1200" in str(layer_of("row-bounded").explain(3))
    assert repr(layer_of("block-ue8m0")).endswith(
        "weight e4m3 128x128 ue8m0, x e4m3 1x128 dynamic ue8m0, backend=emulate)"
    )
    with pytest.raises(ValueError, match="m: got -1"):
        layer_of().explain(-1)
