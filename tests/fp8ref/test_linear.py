"""Fp8Linear: the oracle's bits, a validated state, copies and conversions, gradients, compilation, export."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import fp8ref
from fp8ref import RECIPES, Fp8Linear, Recipe

DYNAMIC = [name for name, recipe in RECIPES.items() if recipe.dynamic]
E4M3 = torch.float8_e4m3fn


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear(n: int = 20, k: int = 140, *, bias: bool = True) -> nn.Linear:
    made = nn.Linear(k, n, bias=bias)
    made.weight.data.copy_(random(n, k))
    if bias:
        made.bias.data.copy_(random(n, seed=1))
    return made


def layer_of(name: str = "row", **options: Any) -> Fp8Linear:
    scale = None if RECIPES[name].dynamic else 0.01
    return Fp8Linear.from_linear(linear(), name, input_scale=scale, backend="emulate", **options)


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return (
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.reshape(-1).view(whole), b.reshape(-1).view(whole))
    )


def expected(x: Tensor, source: nn.Linear, recipe: Recipe, scale: float | None = None) -> Tensor:
    """The layer's result from the oracle's own two functions."""
    w = fp8ref.quantize(
        source.weight.detach(), recipe.weight_dtype, scaling=recipe.weight_scaling, scale_format=recipe.scale_format
    )
    how: dict[str, Any] = {"scale_format": recipe.scale_format, "absmax_bound": recipe.activation_bound}
    if scale is not None:
        how = {"scale": scale}
    rows = x.reshape(-1, x.shape[-1])
    q = fp8ref.quantize(rows, recipe.activation_dtype, scaling=recipe.activation_scaling, **how)
    if (q.scaling, w.scaling) == ("row", "tensor"):
        w = fp8ref.ScaledTensor(w.data, w.scale.expand(w.shape[0], 1), "row")
    if (q.scaling, w.scaling) == ("tensor", "row"):
        q = fp8ref.ScaledTensor(q.data, q.scale.expand(rows.shape[0], 1), "row")
    y = fp8ref.emulate_matmul(q, w.t(), bias=source.bias, out_dtype=x.dtype, use_fast_accum=recipe.use_fast_accum)
    return y.view(*x.shape[:-1], source.out_features)


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
        other = Fp8Linear.from_linear(linear(bias=assign), "tensor-static", input_scale=1.0, backend="emulate").to(
            device
        )
        mine = {name: value for name, value in state.items() if assign or name != "bias"}
        other.load_state_dict(mine, assign=assign)
        wanted = layer_of("tensor-static")(x) if assign else None
        assert wanted is None or same_bits(other(x), wanted)
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
