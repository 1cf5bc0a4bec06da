"""``backend="emulate"``: the kernels' bits from the oracle, on any device, and what both backends refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import ScaledTensor, dequantize, quantize
from fp8ref.emulation.scales import Scaling
from fp8ref.kernels.explain import explain
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.matmul import scaled_matmul
from fp8ref.kernels.pack import pack_weight

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_bits(a: Tensor, b: Tensor) -> bool:
    whole = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.view(whole), b.view(whole))


@pytest.mark.parametrize("scaling", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize(("m", "n", "k"), [(3, 70, 300), (1, 1, 1), (5, 64, 4097)])
def test_is_quantize_and_emulate_matmul(scaling: Scaling, m: int, n: int, k: int) -> None:
    w, x, bias = pack_weight(random(n, k), scaling), random(m, k, seed=1).bfloat16(), random(n, seed=2)
    q = quantize(x, scaling="row" if w.scaling == "row" else "1x128")
    split_k = explain(w, m).split_k
    wanted = emulate_matmul(q, w.as_scaled().t(), bias=bias, split_k=split_k)
    assert same_bits(scaled_linear(x, w, bias, backend="emulate"), wanted)


def test_options_reach_the_oracle() -> None:
    w, x = pack_weight(random(64, 4096)), random(4, 4096, seed=1).half()
    static = torch.tensor([0.02])
    q = quantize(x, scaling="row", scale=static.view(1, 1).expand(4, 1).contiguous())
    b = w.as_scaled().t()
    got = scaled_linear(x, w, input_scale=static, use_fast_accum=True, out_dtype=torch.float32, backend="emulate")
    wanted = emulate_matmul(q, b, use_fast_accum=True, out_dtype=torch.float32, split_k=explain(w, 4).split_k)
    assert same_bits(got, wanted)
    options: dict[str, Any] = {"out_dtype": torch.float32, "use_fast_accum": True}
    whole = scaled_linear(x, w, batch_invariant=True, backend="emulate", **options)
    assert same_bits(whole, emulate_matmul(quantize(x, scaling="row"), b, **options))
    assert explain(w, 4).split_k == 8
    parts = scaled_linear(x, w, backend="emulate", **options)
    assert not same_bits(whole, parts), "the split left no trace: this test is blind"


@pytest.mark.parametrize(
    ("scaling", "options"),
    [
        ("row", {"activation_dtype": E5M2}),
        ("128x128", {"activation_dtype": E5M2, "scale_format": "ue8m0"}),
        ("1x128", {"activation_bound": 1.5}),
        ("row", {"scale_format": "ue8m0", "activation_bound": 0.7}),
    ],
)
def test_quantiser_options_reach_the_oracle(scaling: Scaling, options: dict[str, Any]) -> None:
    w, x = pack_weight(random(20, 300), scaling), random(3, 300, seed=1)
    q = quantize(
        x,
        options.get("activation_dtype", E4M3),
        scaling="row" if scaling == "row" else "1x128",
        scale_format=options.get("scale_format", "float32"),
        absmax_bound=options.get("activation_bound"),
    )
    got = scaled_linear(x, w, backend="emulate", **options)
    assert same_bits(got, emulate_matmul(q, w.as_scaled().t(), out_dtype=torch.float32))
    assert not same_bits(got, scaled_linear(x, w, backend="emulate")), "the option left no trace: this test is blind"


@pytest.mark.parametrize("static", [None, torch.tensor(0.02), torch.tensor([[0.02]])])
def test_one_scale_for_all_of_x(static: Tensor | None) -> None:
    weight, x = random(20, 300), random(3, 300, seed=1) * torch.tensor([[1.0], [30.0], [0.01]])
    options: dict[str, Any] = {"activation_scaling": "tensor", "input_scale": static, "backend": "emulate"}
    q = quantize(x, scale=static)
    # A single scale on either side: both are multiplied first, as torch._scaled_mm does.
    both = emulate_matmul(q, quantize(weight).t(), out_dtype=torch.float32)
    got = scaled_linear(x, pack_weight(weight, "tensor"), **options)
    assert same_bits(got, both)
    # A scale per channel: x's is applied after the channel's.
    rows = ScaledTensor(q.data, q.scale.reshape(1, 1).expand(3, 1), "row")
    mixed = emulate_matmul(rows, quantize(weight, scaling="row").t(), out_dtype=torch.float32)
    assert same_bits(scaled_linear(x, pack_weight(weight), **options), mixed)
    per_row = scaled_linear(x, pack_weight(weight, "tensor"), input_scale=static, backend="emulate")
    assert not same_bits(per_row, got), "the kinds cannot be told apart: this test is blind"


def test_one_scale_of_nothing() -> None:
    for m, n, k in [(0, 3, 5), (2, 0, 5), (2, 3, 0)]:
        for weight in (pack_weight(random(n, k), "tensor"), pack_weight(random(n, k))):
            y = scaled_linear(random(m, k), weight, activation_scaling="tensor", backend="emulate")
            assert torch.equal(y, torch.zeros(m, n))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["row", "tensor", "1x128", "128x128"])
def test_the_gradient_goes_straight_through(scaling: Scaling, dtype: torch.dtype) -> None:
    w = pack_weight(random(20, 300), scaling)
    x = random(2, 3, 300, seed=1).to(dtype).requires_grad_()
    bias = random(20, seed=2).requires_grad_()
    grad = random(2, 3, 20, seed=3).to(dtype)
    y = scaled_linear(x, w, bias, backend="emulate")
    assert same_bits(y.detach(), scaled_linear(x.detach(), w, bias.detach(), backend="emulate"))
    y.backward(grad)
    assert x.grad is not None
    assert bias.grad is not None
    assert same_bits(x.grad.view(6, 300), grad.view(6, 20) @ dequantize(w.as_scaled(), dtype))
    assert same_bits(bias.grad, grad.view(6, 20).sum(0).float())
    with torch.no_grad():
        assert not scaled_linear(x, w, bias, backend="emulate").requires_grad
    with pytest.raises(TypeError, match=r"out_dtype: got torch\.float8_e4m3fn where a gradient is needed"):
        scaled_linear(x, w, bias, out_dtype=E4M3, backend="emulate")


def test_leading_dimensions_and_strides() -> None:
    w, x = pack_weight(random(9, 33)), random(2, 3, 66, seed=1).bfloat16()
    view = x[..., ::2]
    flat = scaled_linear(view.reshape(6, 33).contiguous(), w, backend="emulate")
    assert same_bits(scaled_linear(view, w, backend="emulate"), flat.view(2, 3, 9))
    assert scaled_linear(view[0, 0], w, backend="emulate").shape == (9,)
    assert scaled_linear(view[:0], w, backend="emulate").shape == (0, 3, 9)


def test_rows_do_not_depend_on_the_batch() -> None:
    w, x = pack_weight(random(20, 1100)), random(70, 1100, seed=1).bfloat16()
    whole = scaled_linear(x, w, batch_invariant=True, backend="emulate")
    for m in (1, 2, 17, 69):
        assert same_bits(scaled_linear(x[:m], w, batch_invariant=True, backend="emulate"), whole[:m])


def test_matmul_is_emulate_matmul() -> None:
    a, b = quantize(random(3, 200), scaling="row"), quantize(random(5, 200, seed=1), scaling="row").t()
    options: dict[str, Any] = {"split_k": 2, "out_dtype": torch.float16, "use_fast_accum": True}
    assert same_bits(scaled_matmul(a, b, backend="emulate", **options), emulate_matmul(a, b, **options))


WEIGHT = pack_weight(torch.ones(4, 8))
BLOCKS = pack_weight(torch.ones(4, 8), "128x128")
X = torch.ones(2, 8)
STATIC = {"input_scale": torch.ones(1)}


@pytest.mark.parametrize("backend", ["auto", "emulate"])
@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((X.to(E4M3), WEIGHT), {}, TypeError, "x: got torch.float8_e4m3fn.*scaled_matmul"),
        (([1.0], WEIGHT), {}, TypeError, "x: got list"),
        ((X.to_sparse(), WEIGHT), {}, TypeError, "x: got a torch.sparse_coo tensor on cpu"),
        ((X.to("meta"), WEIGHT), {}, TypeError, "x: got a torch.strided tensor on meta"),
        ((X, WEIGHT, torch.ones(4).to_sparse()), {}, TypeError, "bias: got a torch.sparse_coo tensor"),
        ((X, WEIGHT), {"out_dtype": [torch.bfloat16]}, TypeError, "out_dtype: got .torch.bfloat16"),
        ((X, WEIGHT), {"activation_scaling": ["row"]}, ValueError, "activation_scaling: got .'row'"),
        ((X, WEIGHT), {"input_scale": torch.ones(1, requires_grad=True)}, ValueError, "input_scale: got.*a gradient"),
        ((X, torch.ones(4, 8)), {}, TypeError, "w: got Tensor; give what fp8ref.pack_weight returned"),
        ((X[:, :7], WEIGHT), {}, ValueError, r"x: got shape \[2, 7\]; the weight is \[4, 8\]"),
        ((torch.tensor(1.0), WEIGHT), {}, ValueError, r"x: got shape \[\]"),
        ((X.clone().requires_grad_(), WEIGHT, 1.0), {}, TypeError, "bias: got float"),
        ((X, WEIGHT, torch.ones(5)), {}, ValueError, r"bias: got shape \[5\]"),
        ((X, WEIGHT, torch.ones(4).double()), {}, TypeError, "bias: got torch.float64"),
        ((X, WEIGHT), {"input_scale": torch.ones(2)}, ValueError, r"input_scale: got torch.float32 \[2\]"),
        ((X, WEIGHT), {"input_scale": torch.ones(1).half()}, ValueError, "input_scale: got torch.float16"),
        ((X, WEIGHT), {"input_scale": 1.0}, TypeError, "input_scale: got float"),
        ((X, BLOCKS), {"input_scale": torch.ones(1)}, ValueError, "input_scale: got one beside a weight with 128x128"),
        ((X, BLOCKS), {"use_fast_accum": True}, ValueError, "use_fast_accum: got True with block scales"),
        ((X, WEIGHT), {"use_fast_accum": 1}, TypeError, "use_fast_accum: got 1"),
        ((X, WEIGHT), {"batch_invariant": None}, TypeError, "batch_invariant: got None"),
        ((X, WEIGHT), {"out_dtype": torch.int8}, TypeError, "out_dtype: got torch.int8"),
        (
            (X, WEIGHT),
            {"activation_scaling": "1x128"},
            ValueError,
            "activation_scaling: got '1x128' beside a weight with row",
        ),
        ((X, BLOCKS), {"activation_scaling": "tensor"}, ValueError, "activation_scaling: got 'tensor'.*128x128"),
        ((X, WEIGHT), {"activation_dtype": torch.float16}, TypeError, "activation_dtype: got torch.float16"),
        ((X, WEIGHT), {"activation_dtype": "e4m3"}, TypeError, "activation_dtype: got 'e4m3'"),
        ((X, WEIGHT), {"scale_format": "e8m0"}, ValueError, "scale_format: got 'e8m0'"),
        ((X, WEIGHT), {"activation_bound": 0.0}, ValueError, "activation_bound: got 0.0"),
        ((X, WEIGHT), {"activation_bound": True}, TypeError, "activation_bound: got True"),
        ((X, WEIGHT), {"activation_bound": 1.0, **STATIC}, ValueError, "activation_bound: got 1.0 beside input_scale"),
        ((X, WEIGHT), {"scale_format": "ue8m0", **STATIC}, ValueError, "scale_format: got 'ue8m0' beside input_scale"),
    ],
)
def test_refusals_name_the_argument(
    backend: str, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        scaled_linear(*arguments, backend=backend, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_static_scale_is_finite_and_above_zero(value: float) -> None:
    for scaling in ("row", "tensor"):
        with pytest.raises(ValueError, match=f"input_scale: got {value}; give a finite scale"):
            scaled_linear(
                X,
                WEIGHT,
                input_scale=torch.tensor(value),
                activation_scaling=scaling,
                backend="emulate",
            )


def test_a_weight_elsewhere() -> None:
    with pytest.raises(ValueError, match="w: got a tensor on meta while x is on cpu"):
        scaled_linear(X, WEIGHT.to("meta"), backend="emulate")


@pytest.mark.parametrize("call", [scaled_linear, scaled_matmul])
def test_no_silent_fallback_from_the_gpu(call: Callable[..., Tensor]) -> None:
    q = quantize(X, scaling="row")
    arguments = (X, WEIGHT) if call is scaled_linear else (q, q.t())
    name = "x" if call is scaled_linear else "a"
    words = rf'^{name}: got a tensor on cpu; the kernels need an NVIDIA GPU.*backend="emulate"'
    with pytest.raises(ValueError, match=words):
        call(*arguments)
    with pytest.raises(ValueError, match="backend: got 'cuda'"):
        call(*arguments, backend="cuda")
