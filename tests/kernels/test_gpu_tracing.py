"""The product of ready operands on a GPU, as torch.compile, tracers and CUDA graphs see it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fp8ref.kernels.matmul import scaled_matmul
from tiny_layers import same_bits

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"out_dtype": torch.bfloat16, "split_k": 2}


def operands(m: int = 5, n: int = 300, k: int = 513) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b = (torch.randn(size, k, device="cuda").to(torch.float8_e4m3fn) for size in (m, n))
    return a, b.t(), torch.rand(m, 1, device="cuda"), torch.rand(1, n, device="cuda")


def multiply(*args: Tensor) -> Tensor:
    return scaled_matmul(*args, **OPTIONS).relu()


def wanted(*args: Tensor) -> Tensor:
    return scaled_matmul(*args, backend="emulate", **OPTIONS).relu()


def test_compiles_whole() -> None:
    torch._dynamo.reset()
    args = operands()
    assert same_bits(torch.compile(multiply, fullgraph=True)(*args), wanted(*args))


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_a_traced_product_runs_on_other_operands(mode: Any) -> None:
    traced = make_fx(multiply, tracing_mode=mode)(*operands())
    args = operands()
    assert same_bits(traced(*args), wanted(*args))


def test_a_captured_product_follows_its_operands() -> None:
    args = operands()
    multiply(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = multiply(*args)
    for _ in range(3):
        for mine, other in zip(args, operands(), strict=True):
            mine.copy_(other)
        graph.replay()
        assert same_bits(y, wanted(*args))


FIRST_CALL = """
import torch, fp8ref
from fp8ref import emulate_matmul, pack_weight, scaled_linear, scaled_matmul
m, n, k = {m}, 256, 1024
x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
w = pack_weight(torch.randn(n, k, device="cuda"), "{scaling}")
a, b = (fp8ref.quantize(torch.randn(size, k, device="cuda")) for size in (m, n))
{warmed_up}
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = scaled_linear(x, w)
    z = scaled_matmul(a, b.t())
graph.replay()
torch.cuda.synchronize()
assert torch.equal(y, scaled_linear(x, w, backend="emulate"))
assert torch.equal(z, scaled_matmul(a, b.t(), backend="emulate"))
print("the same bits")
"""


@pytest.mark.parametrize("scaling", ["row", "tensor", "128x128"])
@pytest.mark.parametrize("m", [3, 128])
def test_the_first_call_of_a_process_may_be_captured(scaling: str, m: int) -> None:
    """Kernels are compiled and loaded then: in a process of its own, for nothing may be prepared.

    But for cuBLAS, which torch cannot start while it captures: row-wise and tensor-wise products of M > 64 need it.
    """
    warmed_up = "torch.cuda.current_blas_handle()" if m > 64 else ""
    script = FIRST_CALL.format(scaling=scaling, m=m, warmed_up=warmed_up)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout == "the same bits\n", done.stderr
