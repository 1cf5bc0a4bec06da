"""Checks on a GPU beside the random cases: determinism, graphs, streams, compilation, invariance, size, host time."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import torch
from guarded import Guards, differing_bits

import fp8ref
from fp8ref.emulation.scales import Scaling
from fp8ref.kernels.explain import explain
from fp8ref.kernels.linear import scaled_linear
from fp8ref.kernels.pack import PackedWeight, pack_weight

BF16 = torch.bfloat16


def _pair(m: int, n: int, k: int) -> tuple[torch.Tensor, PackedWeight]:
    x = torch.randn(m, k, device="cuda", dtype=BF16)
    return x, pack_weight(torch.randn(n, k, device="cuda", dtype=BF16))


def the_checks_can_fail() -> str:
    """A flipped bit and a write into a guard band are both seen."""
    guards = Guards()
    inside = guards.empty((4,), dtype=torch.float32, device="cuda")
    torch.as_strided(inside, (1,), (1,), inside.storage_offset() + 4).fill_(1.0)
    assert guards.broken() > 0, "a write past the end was not seen"
    a = torch.zeros(4, device="cuda")
    b = a.clone()
    b[3] = -0.0
    assert differing_bits(a, b) == 1, "a sign of zero was not seen"
    return "a flipped sign of zero and a write past an end are seen"


def repeats() -> str:
    """100 runs of each of 8 shapes give the same bits."""
    shapes = [(1, 1024, 4096), (15, 4096, 4096), (3, 4097, 4099), (16, 256, 14336), (64, 1000, 5001), (300, 2048, 4096),
              (7, 129, 20000), (2, 14336, 4096)]  # fmt: skip
    for m, n, k in shapes:
        x, w = _pair(m, n, k)
        first = scaled_linear(x, w)
        for _ in range(99):
            assert differing_bits(first, scaled_linear(x, w)) == 0, f"{m}x{n}x{k} differs between runs"
    return f"{len(shapes)} shapes, 100 runs each, identical"


def graphs() -> str:
    """A captured call, behind a copy, gives the eager bits for new inputs."""
    for m, n, k in [(1, 1024, 4096), (15, 4096, 4096), (3, 257, 4099), (512, 4096, 4096)]:
        x, w = _pair(m, n, k)
        source = x.clone()
        scaled_linear(x, w)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x.copy_(source)
            y = scaled_linear(x, w)
        for _ in range(5):
            source.normal_()
            y.fill_(float("nan"))
            graph.replay()
            assert differing_bits(y, scaled_linear(source, w)) == 0, f"{m}x{n}x{k} differs in a graph"
    return "4 shapes, 5 replays each, equal to eager"


def streams() -> str:
    """Calls on four streams at once do not disturb each other."""
    x, w = _pair(15, 1024, 8192)
    wanted = scaled_linear(x, w)
    torch.cuda.synchronize()
    side = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(50):
        for stream in side:
            with torch.cuda.stream(stream):
                results.append(scaled_linear(x, w))
    torch.cuda.synchronize()
    assert all(differing_bits(wanted, y) == 0 for y in results), "calls on several streams disturb each other"
    return "200 split-K calls on 4 streams, identical"


def compiled() -> str:
    """torch.compile(fullgraph=True) gives the eager bits."""
    x, w = _pair(5, 300, 513)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(scaled_linear(x * 2.0, w))

    assert differing_bits(torch.compile(layer, fullgraph=True)(x), layer(x)) == 0, "compiled differs from eager"
    return "fullgraph=True, equal to eager"


def batch_invariance() -> str:
    """A row has the same bits at every batch size, from 1 to 4,096, on both paths."""
    sizes = [1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 100, 128, 129, 256, 300, 1000, 4096]
    compared = 0
    for n, k in [(1024, 4096), (4096, 14336), (515, 1031)]:
        x, w = _pair(max(sizes), n, k)
        whole = scaled_linear(x, w, batch_invariant=True)
        for m in sizes:
            for start in {0, max(sizes) - m}:
                part = scaled_linear(x[start : start + m], w, batch_invariant=True)
                assert differing_bits(part, whole[start : start + m]) == 0, f"rows change at M={m}, {n}x{k}"
                compared += part.numel()
        paths = {explain(w, m, batch_invariant=True).path for m in sizes}
    return f"M in {sizes}: {compared:,} elements equal at every M (paths of the last weight: {sorted(paths)})"


def batch_mates() -> str:
    """Without the option too, a row does not depend on the other rows of its batch, NaN and Inf among them."""
    x, w = _pair(16, 1024, 8192)
    alone = scaled_linear(x, w)[5].clone()
    y = torch.full_like(x, float("nan"))
    y[::2] = float("inf")
    y[5] = x[5]
    assert differing_bits(alone, scaled_linear(y, w)[5]) == 0, "a row depends on its batch mates"
    return "a row among rows of NaN and Inf keeps its bits"


def huge() -> str:
    """Tensors of more than 2**31 elements: the ends of x and of the weight equal the oracle."""
    m, k, n = 2**31 // 4096 + 8, 4096, 48
    x = torch.empty(m, k, device="cuda", dtype=BF16).normal_()
    w = pack_weight(torch.randn(n, k, device="cuda", dtype=BF16))
    y = scaled_linear(x, w, batch_invariant=True)
    wanted = scaled_linear(x[-40:].clone(), w, batch_invariant=True, backend="emulate")
    assert differing_bits(y[-40:], wanted) == 0, "the end of a large x differs"
    del x, y
    codes = torch.randint(0, 120, (2**31 // 16384 + 9, 16384), device="cuda", dtype=torch.uint8)
    big = pack_weight(codes.view(torch.float8_e4m3fn), scale=torch.ones(codes.shape[0], 1, device="cuda"))
    x = torch.randn(3, 16384, device="cuda", dtype=BF16)
    tail = pack_weight(codes[-70:].view(torch.float8_e4m3fn), scale=torch.ones(70, 1, device="cuda"))
    y = scaled_linear(x, big, batch_invariant=True)[:, -70:].contiguous()
    assert differing_bits(y, scaled_linear(x, tail, batch_invariant=True, backend="emulate")) == 0, "a large weight"
    return f"x of {m * k:,} and a weight of {codes.numel():,} elements"


def host_time() -> str:
    """Outside a graph a call costs little host time."""
    found = {}
    for name, (m, n, k) in {"triton": (1, 256, 1024), "split": (1, 256, 8192), "library": (128, 256, 256)}.items():
        x, w = _pair(m, n, k)
        times = []
        for _ in range(30):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(50):
                scaled_linear(x, w)
            times.append((time.perf_counter() - start) / 50 * 1e6)
        found[f"{name} ({explain(w, m).path})"] = round(sorted(times)[len(times) // 2], 1)
    return f"us a call: {found}"


def oracle_devices() -> str:
    """The oracle returns the same bits for CUDA tensors as on the CPU: rounding, quantising, every unit and scale."""
    generator = torch.Generator().manual_seed(7)
    compared = 0
    kinds: list[tuple[Scaling, Scaling]] = [
        ("tensor", "tensor"),
        ("row", "row"),
        ("1x128", "1x128"),
        ("1x128", "128x128"),
    ]
    for dtype in fp8ref.FORMATS:
        x, w = (torch.randn(rows, 1031, generator=generator) * 8 for rows in (33, 257))
        x[0, 5], w[3, 9], w[4] = torch.nan, torch.inf, 0.0
        for pair, unit, split_k in itertools.product(kinds, fp8ref.UNITS, (1, 3)):
            results = []
            for device in ("cpu", "cuda"):
                a = fp8ref.quantize(x.to(device), dtype, scaling=pair[0])
                b = fp8ref.quantize(w.to(device), dtype, scaling=pair[1])
                product = fp8ref.emulate_matmul(a, b.t(), out_dtype=torch.float32, unit=unit, split_k=split_k)
                results.append((a.data.view(torch.uint8), a.scale, b.data.view(torch.uint8), b.scale, product))
            for on_cpu, on_cuda in zip(*results, strict=True):
                assert differing_bits(on_cpu, on_cuda.cpu()) == 0, f"{dtype} {pair} {unit} split_k={split_k}"
                compared += on_cpu.numel()
    for dtype, source in itertools.product(
        fp8ref.FORMATS, (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ):
        bits = torch.randint(-(2**15), 2**15, (1 << 18,), generator=generator, dtype=torch.int16)
        values = bits.view(source) if source.itemsize == 2 else bits.view(torch.bfloat16).to(source) * (1 + 2.0**-20)
        for mode in ("nearest_even", "toward_zero"):
            a, b = (fp8ref.round_to_fp8(v, dtype, rounding=mode).view(torch.uint8) for v in (values, values.cuda()))
            assert differing_bits(a, b.cpu()) == 0, f"{source} to {dtype}, {mode}"
            compared += a.numel()
    return f"{compared:,} codes, scales and outputs, CPU against CUDA, identical"


ALL: list[Callable[[], str]] = [
    the_checks_can_fail, repeats, graphs, streams, compiled, batch_invariance, batch_mates, huge, host_time,
    oracle_devices,
]  # fmt: skip
