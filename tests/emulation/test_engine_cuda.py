"""The oracle's Triton engine against its PyTorch one: under the interpreter here, and on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import fp8ref
from fp8ref.emulation.compiled import Engine
from fp8ref.emulation.specials import finite_part
from fp8ref.emulation.units import UNITS, TensorCoreUnit
from interpreted import chains, interpreter
from reference.strategies import own_units
from reference.tensors import bits_of

Run = Callable[..., Any]
ENGINES: tuple[Engine, ...] = ("compiled", "torch")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
STEPPING = [unit for unit in UNITS.values() if unit.products_per_step is not None]
WIDEST = TensorCoreUnit("widest", 64, 40, 24, tuple(range(64)), "alignment", "made up")
ODD = TensorCoreUnit("odd", 12, 30, 20, tuple(range(24))[::-1], "after", "made up")


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with interpreter() as call:
        yield call


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(
    unit=st.one_of(st.sampled_from(STEPPING), own_units().filter(lambda unit: unit.products_per_step is not None)),
    dtypes=st.sampled_from([(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3), (E5M2, E5M2)]),
    m=st.integers(1, 18),
    n=st.integers(1, 70),
    spans=st.sampled_from(
        [[(0, 1)], [(0, 33)], [(0, 128), (128, 200)], [(0, 300)], [(0, 128), (128, 256), (256, 257)]]
    ),
    seed=st.integers(0, 2**16),
    spread=st.integers(1, 7),
)
@example(WIDEST, (E5M2, E5M2), 3, 40, [(0, 130)], 0, 7)
@example(ODD, (E4M3, E5M2), 17, 33, [(0, 128), (128, 200)], 0, 7)
def test_chains_under_the_interpreter(
    run: Run,
    unit: TensorCoreUnit,
    dtypes: tuple[torch.dtype, torch.dtype],
    m: int,
    n: int,
    spans: list[tuple[int, int]],
    seed: int,
    spread: int,
) -> None:
    assert run(chains.differing, unit, dtypes, m, n, spans, seed, spread) == 0


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(groups=st.lists(st.integers(1, 5), min_size=1, max_size=5), data=st.data(), seed=st.integers(0, 2**16))
def test_sums_of_runs_of_chains(run: Run, groups: list[int], data: st.DataObject, seed: int) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(1, sum(groups)), max_size=4)) | {sum(groups)})
    counts = [stop - start for start, stop in zip([0, *cuts[:-1]], cuts, strict=True)]
    assert run(chains.differing_sums, groups, counts, seed) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("unit", [unit.name for unit in STEPPING])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 300, 1031), (130, 257, 129), (300, 65, 4097)])
def test_engines_agree_on_a_gpu(unit: str, dtypes: tuple[torch.dtype, torch.dtype], m: int, n: int, k: int) -> None:
    g = torch.Generator("cuda").manual_seed(m + n + k)
    a = torch.randint(0, 256, (m, k), dtype=torch.uint8, device="cuda", generator=g).view(dtypes[0])
    b = torch.randint(0, 256, (n, k), dtype=torch.uint8, device="cuda", generator=g).view(dtypes[1]).t()
    for x, y in ((a, b), (finite_part(a), finite_part(b))):
        for fast in (False, True):
            options: dict[str, Any] = {"unit": unit, "use_fast_accum": fast, "split_k": 2}
            results = [fp8ref.accumulate(x, y, engine=engine, **options) for engine in ENGINES]
            results.append(fp8ref.accumulate(x.cpu(), y.cpu(), **options).cuda())
            assert torch.equal(bits_of(results[0]), bits_of(results[1]))
            assert torch.equal(bits_of(results[0]), bits_of(results[2]))


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [("1x128", "1x128"), ("1x128", "128x128"), ("128x128", "1x128")])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (7, 300, 1031), (300, 7, 1031), (130, 257, 129)])
def test_block_scales_agree_on_a_gpu(kinds: Any, m: int, n: int, k: int) -> None:
    g = torch.Generator("cuda").manual_seed(m + n + k)
    a = fp8ref.quantize(torch.randn(m, k, device="cuda", generator=g) * 1e-3, scaling=kinds[0])
    b = fp8ref.quantize(torch.randn(n, k, device="cuda", generator=g) * 1e4, scaling=kinds[1]).t()
    operands = (a.data, b.data, a.scale, b.scale)
    options: dict[str, Any] = {"out_dtype": torch.float32, "scaling": kinds}
    results = [fp8ref.emulate_matmul(*operands, **options, engine=engine) for engine in ENGINES]
    results.append(fp8ref.emulate_matmul(*(x.cpu() for x in operands), **options).cuda())
    assert torch.equal(bits_of(results[0]), bits_of(results[1]))
    assert torch.equal(bits_of(results[0]), bits_of(results[2]))
