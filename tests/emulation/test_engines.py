"""Which engine computes a product: what "auto" takes, with numba and without; and the loops as Python runs them."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import fp8ref
from fp8ref.emulation import chain, compiled
from fp8ref.emulation.compiled import is_compiled
from fp8ref.emulation.compiled_cuda import triton_obstacle
from fp8ref.emulation.compiled_loops import BLOCK, _decode, run_steps
from fp8ref.emulation.compiled_numba import RunSteps, compiled_promote, compiled_run_steps
from fp8ref.emulation.decode import Span
from reference.tensors import bits_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def clear_caches() -> None:
    compiled._numba_obstacle.cache_clear()
    compiled._say_once.cache_clear()
    compiled_run_steps.cache_clear()
    compiled_promote.cache_clear()


@pytest.fixture
def without_numba(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a default install is: numba cannot be imported."""
    monkeypatch.setitem(sys.modules, "numba", None)
    clear_caches()
    yield
    clear_caches()


def codes(rows: int, k: int, seed: int, dtype: torch.dtype = E4M3) -> torch.Tensor:
    """Finite codes of both signs, zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    largest = fp8ref.FORMATS[dtype].max_code
    magnitude = torch.randint(0, largest + 1, (rows, k), generator=generator, dtype=torch.uint8)
    sign = torch.randint(0, 2, (rows, k), generator=generator, dtype=torch.uint8) << 7
    return (magnitude | sign).view(dtype)


def engines_that_ran(monkeypatch: pytest.MonkeyPatch, engine: compiled.Engine, unit: str = "sm90") -> set[str]:
    """The classes that compute a product."""
    ran = set()
    walk = chain._walk

    def spy(a: torch.Tensor, b: torch.Tensor, used: object, spans: list[Span]) -> Iterator[chain.Tile]:
        ran.add(type(used).__name__)
        return walk(a, b, used, spans)  # type: ignore[arg-type]  # any engine

    monkeypatch.setattr(chain, "_walk", spy)
    a = codes(3, 40, 1)
    fp8ref.emulate_matmul(a, a.t(), torch.ones(3, 1), torch.ones(1, 3), unit=unit, engine=engine)
    fp8ref.accumulate(a, a.t(), unit=unit, engine=engine)
    return ran


@pytest.mark.parametrize(
    ("engine", "unit", "expected"),
    [
        ("auto", "sm90", "Compiled"),
        ("compiled", "sm90", "Compiled"),
        ("torch", "sm90", "_Steps"),
        ("auto", "exact", "_Exact"),
        ("compiled", "exact", "_Exact"),
        ("torch", "exact", "_Exact"),
    ],
)
def test_the_engine_that_is_asked_for_runs(
    monkeypatch: pytest.MonkeyPatch, engine: compiled.Engine, unit: str, expected: str
) -> None:
    assert engines_that_ran(monkeypatch, engine, unit) == {expected}


@pytest.mark.usefixtures("without_numba")
def test_auto_without_numba_is_torch_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(RuntimeWarning, match=r"torch engine.*pip install 'fp8ref\[fast\]'") as said:
        assert engines_that_ran(monkeypatch, "auto") == {"_Steps"}
    assert len(said) == 1


@pytest.mark.usefixtures("without_numba")
def test_torch_is_asked_for_without_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert engines_that_ran(monkeypatch, "torch") == {"_Steps"}


@pytest.mark.usefixtures("without_numba")
@pytest.mark.parametrize("unit", ["sm90", "exact"])
def test_compiled_without_numba_says_what_to_install(unit: str) -> None:
    a = codes(3, 40, 1)
    with pytest.raises(ImportError, match=r"^engine: got 'compiled'.*pip install 'fp8ref\[fast\]'"):
        fp8ref.accumulate(a, a.t(), unit=unit, engine="compiled")
    with pytest.raises(ImportError, match=r"^engine: got 'compiled'.*pip install 'fp8ref\[fast\]'"):
        fp8ref.emulate_matmul(a, a.t(), torch.tensor(1.0), torch.tensor(1.0), unit=unit, engine="compiled")


@pytest.mark.parametrize("raised", [ImportError, OSError, AttributeError])
def test_a_broken_numba_is_named_with_its_reason(raised: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """As one for another numpy is, or one without its libLLVM."""

    def broken() -> RunSteps:
        raise raised("made for another numpy")

    clear_caches()
    monkeypatch.setattr(compiled, "compiled_run_steps", broken)
    reason = rf"numba, which cannot be imported here \({raised.__name__}: made for another numpy\): repair it"
    try:
        with pytest.warns(RuntimeWarning, match=f"torch engine.*{reason}"):
            assert not is_compiled("auto", CPU)
        with pytest.raises(ImportError, match=f"^engine: got 'compiled'.*{reason}"):
            is_compiled("compiled", CPU)
    finally:
        clear_caches()


def test_what_compiles_for_which_device(monkeypatch: pytest.MonkeyPatch) -> None:
    meta = torch.device("meta")
    for device in (CPU, CUDA):
        assert is_compiled("auto", device)
        assert is_compiled("compiled", device)
        assert not is_compiled("torch", device)
    assert not is_compiled("auto", meta)
    with pytest.raises(ValueError, match=r"^engine: got 'compiled' for tensors on meta; "):
        is_compiled("compiled", meta)
    monkeypatch.setitem(sys.modules, "triton", None)
    triton_obstacle.cache_clear()
    compiled._say_once.cache_clear()
    try:
        with pytest.raises(
            ImportError, match=r"^engine: got 'compiled', which needs Triton: pip install 'fp8ref\[kern"
        ):
            is_compiled("compiled", CUDA)
        with pytest.warns(RuntimeWarning, match="needs Triton"):
            assert not is_compiled("auto", CUDA)
    finally:
        triton_obstacle.cache_clear()
        compiled._say_once.cache_clear()


def test_the_import_of_fp8ref_leaves_numba_alone() -> None:
    script = "import sys, fp8ref; sys.exit('numba' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.parametrize("unit", [name for name in fp8ref.UNITS if name != "exact"])
@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E5M2)], ids=["44", "45", "55"])
@pytest.mark.parametrize("fast", [False, True])
def test_many_tiles_and_blocks(unit: str, formats: tuple[torch.dtype, torch.dtype], fast: bool) -> None:
    """More rows than a tile has, more columns than a block and a tile have, and a ragged end of each."""
    a, b = codes(130, 161, 2, formats[0]), codes(2 * BLOCK + 77, 161, 3, formats[1]).t()
    answers = [
        bits_of(fp8ref.accumulate(a, b, unit=unit, use_fast_accum=fast, engine=engine))
        for engine in ("torch", "compiled")
    ]
    assert torch.equal(*answers)


@pytest.mark.parametrize("fraction_bits", [13, 24, 25, 26, 40])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64])
def test_the_largest_sums_fit(length: int, fraction_bits: int) -> None:
    """Products of the largest significand all of one sign, around F = 25, where 16 of them just fit an int32."""
    unit = fp8ref.TensorCoreUnit("mine", length, fraction_bits, 24, tuple(range(length)), "alignment", "made up")
    for code in (0x7E, 0x77, 0x0F):  # 1.75 * 2**8, 1.875 * 2**7, 1.875 * 2**-6
        a = torch.full((70, 4 * length), code, dtype=torch.uint8).view(E4M3)
        for b in (a, (a.view(torch.uint8) | 0x80).view(E4M3)):
            wanted, got = (
                fp8ref.accumulate(a, b.t(), unit=unit, use_fast_accum=True, engine=engine)
                for engine in ("torch", "compiled")
            )
            assert torch.equal(bits_of(got), bits_of(wanted))
            one_step = fp8ref.accumulate(a[:, :length], b[:, :length].t(), unit=unit, engine="compiled")
            assert torch.all(one_step == a[0, 0].float() * b[0, 0].float() * length)


@pytest.mark.parametrize("unit", ["sm90", "sm90_mma_sync", "sm100"])
def test_the_loops_are_python_too(monkeypatch: pytest.MonkeyPatch, unit: str) -> None:
    """Nothing depends on how numba types what Python computes."""
    plain: RunSteps = run_steps
    a, b = codes(2, 67, 4), codes(66, 67, 5).t()
    wanted = fp8ref.accumulate(a, b, unit=unit, use_fast_accum=True, engine="compiled")
    monkeypatch.setattr(compiled, "compiled_run_steps", lambda: plain)
    with np.errstate(over="ignore"):
        got = fp8ref.accumulate(a, b, unit=unit, use_fast_accum=True, engine="compiled")
    assert torch.equal(bits_of(got), bits_of(wanted))


def test_machine_code_that_cannot_be_kept_is_compiled_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba

    clear_caches()
    njit = numba.njit

    def refusing(**options: Any) -> object:
        if options.get("cache"):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", refusing)
    a = codes(2, 33, 6)
    got = fp8ref.accumulate(a, a.t(), engine="compiled")
    clear_caches()
    assert torch.equal(bits_of(got), bits_of(fp8ref.accumulate(a, a.t(), engine="torch")))


def test_every_made_up_unit_has_an_engine() -> None:
    """The extremes of what TensorCoreUnit takes; with L = 1 there are steps of zero by zero from +0."""
    a, b = codes(5, 200, 7, E5M2), codes(70, 200, 8, E5M2).t()
    for length, fraction_bits, bits in ((1, 1, 1), (64, 40, 24), (64, 1, 24), (3, 40, 1)):
        mine = replace(
            fp8ref.UNITS["sm90"],
            products_per_step=length,
            fraction_bits=fraction_bits,
            significant_bits=bits,
            k_order=tuple(reversed(range(2 * length))),
        )
        for c_enters in ("alignment", "after"):
            unit = replace(mine, c_enters=c_enters)
            answers = [
                bits_of(fp8ref.accumulate(a, b, unit=unit, use_fast_accum=True, engine=engine))
                for engine in ("torch", "compiled")
            ]
            assert torch.equal(*answers)


def test_another_shape_or_unit_is_not_compiled_anew() -> None:
    """Machine code is per type: the narrow units' and, with F above 25, the wide ones'."""
    a = codes(3, 200, 9)
    fp8ref.accumulate(a, a.t(), engine="compiled")
    loops: Any = compiled_run_steps()
    known = len(loops.signatures)
    for m, n, k in ((1, 1, 1), (1, 70, 33), (70, 1, 128), (2, 600, 500), (65, 513, 129)):
        for unit in ("sm90", "sm90_mma_sync", "sm100"):
            x, w = codes(m, k, 10), codes(n, k, 11)
            fp8ref.accumulate(x, w.t(), unit=unit, engine="compiled")
            fp8ref.accumulate(x.t().contiguous().t(), w.t().contiguous(), unit=unit, engine="compiled")
    assert len(loops.signatures) == known


@pytest.mark.parametrize("real", [np.float32, np.float64])
def test_codes_are_decoded_as_the_formats_say(real: type) -> None:
    codes = np.arange(256, dtype=np.uint8)
    for fmt in fp8ref.FORMATS.values():
        values: Any = np.empty(256, real)
        exponents = np.empty(256, np.int8)
        _decode(codes, fmt.mantissa_bits, fmt.bias, values, exponents)
        expected = torch.from_numpy(codes).view(fmt.dtype).double()
        for code in range(256):
            if code & 0x7F > fmt.max_code:
                continue
            assert values[code] == expected[code]
            if code & 0x7F == 0:
                assert exponents[code] == -64
            else:
                assert exponents[code] == max(int(np.frexp(values[code])[1]) - 1, fmt.e_min)
