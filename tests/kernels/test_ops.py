"""What torch sees of the kernels: compilers, tracers, fake tensors and torch.func go through operators, or raise."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

from fp8ref.emulation.quantize import quantize
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.matmul import scaled_matmul
from fp8ref.kernels.ops import scaled_linear_operator, scaled_matmul_operator
from fp8ref.kernels.pack import PackedWeight, pack_weight

W = pack_weight(torch.randn(9, 33, generator=torch.Generator().manual_seed(0)))
X = torch.randn(2, 3, 33, generator=torch.Generator().manual_seed(1)).bfloat16()
A, B = quantize(X[0], scaling="row"), quantize(X[1], scaling="row").t()
# Its check of the schema multiplies FP8 tensors, which torch cannot do.
CHECKS = (
    "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static", "test_aot_dispatch_dynamic"
)  # fmt: skip


@pytest.mark.parametrize("dynamic", [None, True])
def test_linear_compiles_without_a_graph_break(dynamic: bool | None) -> None:
    bias = torch.ones(9)

    def layer(x: Tensor, w: PackedWeight) -> Tensor:
        return scaled_linear(x * 2.0, w, bias, out_dtype=torch.float32, backend="emulate") + 1.0

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for x in (X, X[:, :0], X[0, 0], torch.cat([X, X], 1)):
        assert torch.equal(compiled(x, W), layer(x, W))


@pytest.mark.parametrize("dynamic", [None, True])
def test_matmul_compiles_without_a_graph_break(dynamic: bool | None) -> None:
    bias = torch.ones(3, requires_grad=True)

    def product(a: Any, b: Any, *scales: Tensor) -> Tensor:
        return scaled_matmul(a, b, *scales, bias=bias, split_k=2, out_dtype=torch.float32, backend="emulate") * 2.0

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for arguments in ((A, B), (A.data, B.data, A.scale, B.scale)):
        got = compiled(*arguments)
        assert torch.equal(got, product(*arguments))
        assert not got.requires_grad


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(2, 33),
        torch.randn(33),
        torch.randn(0, 33),
        torch.randn(2, 33, 3).transpose(1, 2),
        torch.randn(2, 33, requires_grad=True),
    ],
    ids=["matrix", "vector", "no rows", "strides", "gradient"],
)
def test_the_operators_pass_torchs_own_checks(x: Tensor) -> None:
    arguments = (x, W.codes, W.scale, W.scaling, W.n, W.k, None, None, False, torch.bfloat16, False, "emulate")
    result = torch.library.opcheck(scaled_linear_operator, arguments, test_utils=CHECKS)
    assert result == dict.fromkeys(CHECKS, "SUCCESS")


def test_the_operator_of_the_product_passes_them_too() -> None:
    arguments = (A.data, B.data, A.scale, B.scale, None, torch.float16, False, 1, "row", "row", "emulate")
    result = torch.library.opcheck(scaled_matmul_operator, arguments, test_utils=CHECKS)
    assert result == dict.fromkeys(CHECKS, "SUCCESS")


@pytest.mark.parametrize("backend", ["auto", "emulate"])
def test_fake_tensors_have_the_shape_of_the_result(backend: Any) -> None:
    mode = FakeTensorMode()
    w = dataclasses.replace(W, codes=mode.from_tensor(W.codes), scale=mode.from_tensor(W.scale))
    x, data, scale = (mode.from_tensor(t) for t in (X, A.data, A.scale))
    for inside in (True, False):
        with mode if inside else torch.no_grad():
            y = scaled_linear(x, w, out_dtype=torch.float16, backend=backend)
            product = scaled_matmul(data, data.t(), scale, scale.t(), backend=backend)
        assert (y.shape, y.dtype, y.stride()) == (torch.Size([2, 3, 9]), torch.float16, (27, 9, 1))
        assert (product.shape, product.dtype) == (torch.Size([3, 3]), torch.bfloat16)
        with pytest.raises(ValueError, match=r"x: got shape \[2, 3, 32\]; the weight is \[9, 33\]"):
            scaled_linear(x[..., :32], w, backend=backend)
        with pytest.raises(ValueError, match=r"b: got shape \[3, 33\] for a of shape \[3, 33\]"):
            scaled_matmul(data, data, scale, scale, backend=backend)


def test_a_trace_holds_the_operators() -> None:
    calls: list[tuple[Callable[..., Tensor], str, tuple[Tensor, ...]]] = [
        (lambda x: scaled_linear(x, W, backend="emulate"), "fp8ref.scaled_linear", (X,)),
        (lambda *x: scaled_matmul(*x, backend="emulate"), "fp8ref.scaled_matmul", (A.data, B.data, A.scale, B.scale)),
    ]
    for call, name, arguments in calls:
        traced = make_fx(call)(*arguments)
        assert traced.code.count(name) == 1
        assert torch.equal(traced(*arguments), call(*arguments))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_a_loop() -> None:
    rows = torch.func.vmap(lambda x: scaled_linear(x, W, backend="emulate"))(X)
    assert torch.equal(rows, torch.stack([scaled_linear(x, W, backend="emulate") for x in X]))


def test_a_subclass_stays_one() -> None:
    class Mine(Tensor):
        pass

    y = scaled_linear(X.as_subclass(Mine), W, backend="emulate")
    assert type(y) is Mine
    assert torch.equal(y.as_subclass(Tensor), scaled_linear(X, W, backend="emulate"))


@pytest.mark.parametrize("backend", ["auto", "emulate"])
def test_no_forward_derivative_is_dropped(backend: Any) -> None:
    one, bias = torch.ones(()), torch.ones(9)
    words = "{}: got a dual tensor; scaled_linear has no forward derivative"
    with forward_ad.dual_level():
        dual = [forward_ad.make_dual(x, torch.ones_like(x)) for x in (X, bias, one)]
        with pytest.raises(ValueError, match=words.format("x")):
            scaled_linear(dual[0], W, backend=backend)
        with pytest.raises(ValueError, match=words.format("bias")):
            scaled_linear(X, W, dual[1], backend=backend)
        with pytest.raises(ValueError, match=words.format("input_scale")):
            scaled_linear(X, W, input_scale=dual[2], backend=backend)
        assert torch.equal(scaled_linear(X, W, backend="emulate"), scaled_linear(X.clone(), W, backend="emulate"))
    with pytest.raises(ValueError, match=words.format("x")):
        torch.func.jvp(lambda x: scaled_linear(x, W, backend=backend), (X,), (X,))
