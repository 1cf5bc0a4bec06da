"""What a program has switched on around a call does not change a bit of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

import fp8ref
from fp8ref.emulation.compiled import Engine
from fp8ref.emulation.rounding import Rounding
from fp8ref.emulation.scales import Scaling
from reference.tensors import bits_of

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROUNDINGS: tuple[Rounding, ...] = ("nearest_even", "toward_zero")


@contextmanager
def default_dtype() -> Iterator[None]:
    """float64 for whatever does not name a dtype."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def two_threads() -> Iterator[None]:
    """Tiles on two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        yield
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@contextmanager
def low_precision_matmul() -> Iterator[None]:
    """What allows torch to multiply fp32 matrices in bf16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "inference mode": torch.inference_mode,
    "grad": torch.enable_grad,
    "default dtype": default_dtype,
    "meta as the default device": lambda: torch.device("meta"),
    "two threads": two_threads,
    "low-precision matmul": low_precision_matmul,
}


def compute(x: torch.Tensor, w: torch.Tensor, dtype: torch.dtype, unit: str, engine: Engine) -> list[torch.Tensor]:
    """Codes, scales and products with specials among the operands, in several tiles."""
    a, b = fp8ref.quantize(x, dtype, scaling="row"), fp8ref.quantize(w, dtype, scaling="row").t()
    blocks = fp8ref.quantize(x, dtype, scaling="1x128"), fp8ref.quantize(w, dtype, scaling="128x128").t()
    return [
        a.data.view(torch.uint8),
        a.scale,
        fp8ref.emulate_matmul(a, b, out_dtype=torch.float32, unit=unit, engine=engine).view(torch.int32),
        fp8ref.emulate_matmul(*blocks, out_dtype=torch.float32, unit=unit, split_k=2, engine=engine).view(torch.int32),
        fp8ref.accumulate(a.data, b.data, use_fast_accum=True, unit=unit, engine=engine).view(torch.int32),
    ]


@pytest.mark.parametrize("around", SURROUNDINGS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("unit", ["sm90", "sm90_mma_sync", "exact"])
@pytest.mark.parametrize("engine", ["torch", "compiled"])
def test_the_bits_are_the_same(around: str, dtype: torch.dtype, unit: str, engine: Engine) -> None:
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(9, 300, generator=generator), torch.randn(600, 300, generator=generator)
    x[2, 7], w[5, 9], w[6] = torch.nan, torch.inf, 0.0
    plain = compute(x, w, dtype, unit, engine)
    x.requires_grad_(around == "grad")
    with SURROUNDINGS[around]():
        inside = compute(x, w, dtype, unit, engine)
    for one, other in zip(plain, inside, strict=True):
        assert not other.requires_grad
        assert torch.equal(one, other)


def near_subnormals(rows: int, engine: Engine) -> Callable[[], list[torch.Tensor]]:
    """Bits of everything that reads, makes or writes subnormal numbers; the operands are made before."""
    x = torch.tensor([1e-39, -1e-41, 3e-38, -0.0]).expand(rows, 4)
    zeros, ones, scale = torch.zeros(rows, 4).to(E4M3), torch.ones(rows, 4).to(E4M3), torch.full((rows, 1), 2.0**-140)
    pairs: tuple[tuple[Scaling, Scaling], ...] = (("row", "row"), ("1x128", "1x128"))

    def results() -> list[torch.Tensor]:
        made = [fp8ref.emulate_matmul(ones, ones.t(), scale[0], torch.ones(1), out_dtype=torch.float32, engine=engine)]
        for pair in pairs:
            for dtype, bias in ((torch.float32, None), (torch.bfloat16, scale[:, 0])):
                how: Any = {"scaling": pair, "bias": bias, "out_dtype": dtype, "engine": engine}
                made.append(fp8ref.emulate_matmul(ones, ones.t(), scale, torch.ones(1, rows), **how))
        quantised = fp8ref.quantize(x, scaling="row")
        made += [quantised.data, quantised.scale, fp8ref.dequantize(quantised)]
        made.append(fp8ref.fused_dot_add(zeros, ones, scale[:, 0], "exact"))
        made += [fp8ref.round_to_fp8(x, dtype, rounding=how) for dtype in (E4M3, E5M2) for how in ROUNDINGS]
        return [bits_of(result) for result in made]

    return results


@pytest.mark.parametrize("engine", ["torch", "compiled"])
@pytest.mark.parametrize("rows", [2, 300])
def test_subnormal_numbers_count_where_the_processor_is_told_to_flush_them(rows: int, engine: Engine) -> None:
    results = near_subnormals(rows, engine)
    plain, smallest = results(), torch.tensor(2.0**-126)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with two_threads():
            flushed = results()
        assert float(smallest * 0.5) == 0.0
    finally:
        torch.set_flush_denormal(False)
    assert all(map(torch.equal, plain, flushed))


def test_an_error_on_a_thread_is_raised_and_the_number_of_threads_restored() -> None:
    from fp8ref.emulation.lanes import for_each

    def work(item: int) -> None:
        raise ArithmeticError(f"item {item}")

    with two_threads(), pytest.raises(ArithmeticError, match="item"):
        for_each(work, iter(range(5)), torch.device("cpu"))


@pytest.mark.parametrize("raised", [ArithmeticError, KeyboardInterrupt])
def test_what_ends_a_product_ends_all_of_its_threads(raised: type[BaseException]) -> None:
    """An error on one thread, or Ctrl-C in the main one: nothing goes on behind it."""
    from fp8ref.emulation.lanes import for_each

    done: list[int] = []

    def work(item: int) -> None:
        if item == 10 and raised is KeyboardInterrupt:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        elif item == 10:
            raise raised
        time.sleep(0.01)
        done.append(item)

    with two_threads(), pytest.raises(raised):
        for_each(work, iter(range(1000)), torch.device("cpu"))
    assert len(done) < 500
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fp8ref_")]
