"""What a layer saves and loads, and what copies and conversions leave alone."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import fp8ref
from fp8ref import RECIPES, Fp8Linear, Recipe
from tiny_layers import layer_of, linear, random, same_bits

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("name", RECIPES)
def test_state_dict_round_trip(name: str) -> None:
    layer, other = layer_of(name), layer_of(name)
    state = layer.state_dict()
    recipe = RECIPES[name]
    q = fp8ref.quantize(
        linear().weight.detach(), recipe.weight_dtype, scaling=recipe.weight_scaling, scale_format=recipe.scale_format
    )
    assert same_bits(state["weight"], q.data)
    assert same_bits(state["weight_scale"], q.scale)
    assert list(state) == ["weight", "weight_scale", "bias"] + ["input_scale"] * (not recipe.dynamic)
    source = linear()
    source.weight.data.neg_()
    other = Fp8Linear.from_linear(source, name, input_scale=None if recipe.dynamic else 3.0, backend="emulate")
    before = other._codes
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert other._codes is before, "a captured graph reads from the old buffer"
    x = random(3, 140, seed=2)
    assert same_bits(other(x), layer(x))
    assert all(same_bits(tensor, state[key]) for key, tensor in other.state_dict().items())


def test_loading_with_assign_and_into_the_meta_device() -> None:
    state, x = layer_of("tensor-static").state_dict(), random(3, 140, seed=2)
    for assign, device in ((True, "cpu"), (True, "meta"), (False, "meta")):
        other = Fp8Linear.from_linear(linear(), "tensor-static", input_scale=1.0, backend="emulate").to(device)
        other.load_state_dict(state, assign=assign)
        assert same_bits(other(x), layer_of("tensor-static")(x))
        assert other.packed.codes.device.type == "cpu"


BAD_STATES: list[tuple[str, Any, str]] = [
    ("weight", lambda t: t.to(torch.bfloat16), r"weight: got torch.bfloat16"),
    ("weight", lambda t: t.view(torch.uint8).view(torch.float8_e5m2), r"weight: got torch.float8_e5m2"),
    ("weight", lambda t: t[:, :-1], r"weight: got torch.float8_e4m3fn \[20, 139\]"),
    ("weight", lambda t: torch.full_like(t.float(), float("nan")).to(E4M3), "weight: it holds codes of NaN"),
    ("weight_scale", lambda t: t.double(), r"weight_scale: got torch.float64"),
    ("weight_scale", lambda t: t.flatten(), r"weight_scale: got torch.float32 \[20\]"),
    ("weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), float("inf")), "weight_scale: .*not finite"),
    ("weight_scale", lambda t: t.index_fill(0, torch.tensor([3]), 0.0), "weight_scale: .*above zero"),
    ("weight_scale", lambda t: -t, "weight_scale: .*above zero"),
    ("weight_scale", lambda _: None, "weight_scale: got NoneType"),
    ("bias", lambda t: t[:3], r"bias: got torch.float32 \[3\]"),
    ("bias", lambda t: t.long(), "bias: got torch.int64"),
    ("input_scale", lambda t: t * float("nan"), "input_scale: got nan"),
    ("input_scale", lambda t: t.half(), "input_scale: got torch.float16"),
    ("input_scale", lambda _: torch.ones(2), r"input_scale: got torch.float32 \[2\]"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "change", "words"), BAD_STATES)
def test_a_wrong_state_changes_nothing(key: str, change: Any, words: str) -> None:
    layer = layer_of("row-static")
    model = nn.Sequential(layer)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    source = linear()
    source.weight.data.neg_()
    state = nn.Sequential(Fp8Linear.from_linear(source, "row-static", input_scale=5.0)).state_dict()
    state[f"0.{key}"] = change(state[f"0.{key}"])
    with pytest.raises(RuntimeError, match=f"0.{words}"):
        model.load_state_dict(state)
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_scales_of_a_ue8m0_recipe_are_powers_of_two() -> None:
    layer = layer_of("block-ue8m0")
    before = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    words = r"it holds a value that is no power of two"
    with pytest.raises(RuntimeError, match=f"weight_scale: {words}"):
        layer.load_state_dict({**before, "weight_scale": before["weight_scale"] * 1.5})
    assert all(same_bits(value, before[name]) for name, value in layer.state_dict().items())
    layer.load_state_dict({**before, "weight_scale": before["weight_scale"] * 2.0**-140})  # subnormal
    packed = fp8ref.pack_weight(torch.ones(3, 5).to(E4M3), "128x128", torch.tensor([[3.0]]))
    with pytest.raises(ValueError, match=f"packed: its scale: {words}"):
        Fp8Linear.from_packed(packed, "block-ue8m0")
    recipe = Recipe("tensor", "tensor", dynamic=False, scale_format="ue8m0")
    with pytest.raises(ValueError, match=f"input_scale: {words}"):
        Fp8Linear.from_linear(linear(), recipe, input_scale=0.01)
    assert Fp8Linear.from_linear(linear(), recipe, input_scale=0.25).input_scale == 0.25


def test_hooks_before_loading_are_called() -> None:
    """As those of any module are; here one that renames what an older version saved."""
    layer, other = layer_of(), layer_of()
    state = {f"0.{name.replace('bias', 'b')}": value for name, value in layer.state_dict().items()}

    def rename(_: nn.Module, given: dict[str, Any], prefix: str, *__: Any) -> None:
        given[f"{prefix}bias"] = given.pop(f"{prefix}b")

    other.bias.data.zero_()  # type: ignore[union-attr]
    other.register_load_state_dict_pre_hook(rename)  # type: ignore[no-untyped-call]
    nn.Sequential(other).load_state_dict(state)
    assert same_bits(other.bias.detach(), layer.bias.detach())  # type: ignore[union-attr]


def test_a_state_is_taken_whole_or_not_at_all() -> None:
    layer = layer_of()
    before, source = {name: tensor.clone() for name, tensor in layer.state_dict().items()}, linear()
    source.weight.data.neg_()
    state = Fp8Linear.from_linear(source, "row").state_dict()
    for key in state:
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=f"{key}: missing; a layer is loaded whole"):
                layer.load_state_dict({name: value for name, value in state.items() if name != key}, strict=strict)
    with pytest.raises(RuntimeError, match=r'Missing key.*"bias", "weight", "weight_scale"'):
        layer.load_state_dict({})
    assert layer.load_state_dict({}, strict=False).missing_keys == ["bias", "weight", "weight_scale"]
    assert all(same_bits(value, before[name]) for name, value in layer.state_dict().items())
    with pytest.raises(RuntimeError, match=r'Unexpected key.*"input_scale"'):
        layer.load_state_dict({**state, "input_scale": torch.ones(())})


@pytest.mark.parametrize("name", ["row", "tensor-static", "block"])
def test_copies_are_equal_and_independent(name: str) -> None:
    layer, x = layer_of(name), random(3, 140, seed=2)
    wanted = layer(x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert same_bits(other(x), wanted)
        assert other.recipe == layer.recipe
        other._codes.view(torch.uint8).zero_()
        assert not same_bits(other(x), wanted)
        assert same_bits(layer(x), wanted)


@pytest.mark.parametrize("name", ["row", "row-static", "tensor-static", "1x128"])
@pytest.mark.parametrize(
    "move",
    [
        lambda m: m.half(), lambda m: m.bfloat16(), lambda m: m.double(), lambda m: m.to(torch.bfloat16),
        lambda m: m.to("cpu", torch.float16), lambda m: m.type(torch.float16), lambda m: m.cpu(),
        lambda m: m.share_memory(),
    ],
)  # fmt: skip
def test_conversions_leave_codes_and_scales_alone(name: str, move: Any) -> None:
    recipe = Recipe("1x128", "1x128") if name == "1x128" else RECIPES[name]
    scale = None if recipe.dynamic else 0.01
    layer = Fp8Linear.from_linear(linear(bias=False), recipe, input_scale=scale, backend="emulate")
    x, before = random(3, 140, seed=2), {key: value.clone() for key, value in layer.state_dict().items()}
    wanted = layer(x)
    moved = move(nn.Sequential(layer))[0]
    assert moved is layer
    assert all(same_bits(value, before[key]) for key, value in layer.state_dict().items())
    assert same_bits(layer(x), wanted)


def test_the_bias_follows_a_conversion_and_a_parameter_stays_itself() -> None:
    source = linear()
    layer = Fp8Linear.from_linear(source, "row", backend="emulate")
    assert layer.bias is source.bias
    assert layer.bfloat16().bias.dtype == torch.bfloat16  # type: ignore[union-attr]
    meta = layer_of("tensor-static").to("meta")
    assert {tensor.device.type for tensor in (meta._codes, meta._scale, meta.bias, meta.input_scale)} == {"meta"}  # type: ignore[union-attr]
    empty = meta.to_empty(device="cpu")
    assert (empty.weight.dtype, empty.weight_scale.dtype, empty.weight.device.type) == (E4M3, torch.float32, "cpu")
