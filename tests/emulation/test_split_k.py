"""``fp8ref.split_k`` against what cuBLASLt answered on an H200 about shapes that the table was not made from."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fp8ref
from fp8ref import DroppedProductsWarning, NoEvidenceError, accumulate, emulate_matmul, split_k
from fp8ref.emulation.compiled import Engine
from fp8ref.emulation.scales import Scaling
from fp8ref.emulation.split_k import dropped_k
from package_files import ROOT

E4M3 = torch.float8_e4m3fn
SAMPLE = np.load(Path(__file__).with_name("split_k_fresh.npz"))
RESULT = json.loads((ROOT / "benchmarks" / "results" / "split_k_holdout.json").read_text())
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": E4M3}
PAIRS: dict[str, tuple[Scaling, Scaling]] = {"tensor": ("tensor", "tensor"), "row": ("row", "row")}
TAILS = json.loads((ROOT / "benchmarks" / "results" / "split_k_tail.json").read_text())["rows"]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "split_k.json").read_text())["first_part"]


# The shapes of every sample are asked about, those among them whose last products are left out as well.
pytestmark = pytest.mark.filterwarnings("ignore::fp8ref.DroppedProductsWarning")


def predict(m: int, n: int, k: int, out: torch.dtype, fast: bool, bias: torch.dtype | None) -> int | None:
    try:
        return split_k(m, n, k, out_dtype=out, use_fast_accum=fast, bias_dtype=bias)
    except NoEvidenceError:
        return None


@pytest.mark.parametrize("kind", sorted(RESULT))
def test_fresh_shapes(kind: str) -> None:
    out, mode = kind.split("-")
    name, _, bias = out.partition("+")
    rows = SAMPLE[kind].tolist()
    found = [predict(m, n, k, DTYPES[name], mode == "fast", torch.bfloat16 if bias else None) for m, n, k, _ in rows]
    unknown = found.count(None)
    right = sum(guess == parts for guess, (_, _, _, parts) in zip(found, rows, strict=True))
    assert (len(rows), right, unknown) == tuple(RESULT[kind][key] for key in ("shapes", "right", "unknown"))
    assert len(rows) >= 5000
    assert right >= 0.995 * len(rows)


def test_the_cuts_that_were_measured() -> None:
    """Lengths of the first part found from results alone (tests/golden/split_k.py), not the library's word."""
    rows = SAMPLE["measured"].tolist()
    wrong = unknown = 0
    for m, n, k, first, _ in rows:
        parts = predict(m, n, k, torch.bfloat16, True, None)
        tiles = -(-k // 128)
        unknown += parts is None
        wrong += parts is not None and -(-tiles // parts) != first
    assert len(rows) == 4000
    assert wrong + unknown <= 0.005 * len(rows)


@pytest.mark.parametrize(
    "kind", ["bf16 fast tensor -", "bf16 accurate tensor -", "fp32 fast tensor -", "bf16 fast row -"]
)
def test_the_golden_cuts(kind: str) -> None:
    out, mode, scaling, _ = kind.split()
    wrong = 0
    for m, n, k, first in GOLDEN[kind]:
        try:
            parts = split_k(m, n, k, out_dtype=DTYPES[out], use_fast_accum=mode == "fast", scaling=PAIRS[scaling])
        except NoEvidenceError:
            continue
        tiles = -(-k // 128)
        wrong += -(-tiles // parts) != first
    assert wrong <= 0.01 * len(GOLDEN[kind])


def test_the_bounds_have_no_exception() -> None:
    for kind in RESULT:
        m, n, k, parts = SAMPLE[kind].astype(np.int64).T
        tiles = -(-k // 128)
        assert (parts <= np.maximum(1, (tiles - 1) // 20)).all()
        assert (parts[8 * m * n > 2**20] == 1).all()
        assert ((parts == 1) | (4 * m * n * parts <= 2**20)).all()


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 64, 80016), {}, "k: got 80016"),
        ((8, 64, 16384), {"device": "h100"}, "device: got 'h100'"),
        ((8, 64, 16384), {"out_dtype": torch.float8_e5m2}, "float8_e5m2"),
        ((8, 64, 16384), {"scaling": ("1x128", "1x128")}, "1x128"),
        ((8, 64, 16384), {"operands": (torch.float8_e5m2, E4M3)}, "float8_e5m2"),
        ((8, 64, 16384), {"out_dtype": E4M3, "bias_dtype": torch.float16}, "bias_dtype=torch.float16"),
    ],
)
def test_without_evidence_it_says_so(shape: tuple[int, int, int], options: dict[str, object], message: str) -> None:
    with pytest.raises(NoEvidenceError, match=message):
        split_k(*shape, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(0, 16, 16), (1, 8, 16), (1, 16, 24), (True, 16, 16)])
def test_shapes_are_checked(shape: tuple[int, int, int]) -> None:
    with pytest.raises((TypeError, ValueError)):
        split_k(*shape)


@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (100_000, 16, 80_000), (1, 16, 16), (1, 16384, 5104)])
def test_beyond_the_bounds_k_is_not_cut(shape: tuple[int, int, int]) -> None:
    assert split_k(*shape, scaling=("1x128", "1x128"), out_dtype=torch.float8_e5m2) == 1


def test_emulate_matmul_asks() -> None:
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(8, 16384, generator=generator).to(E4M3)
    b = torch.randn(64, 16384, generator=generator).to(E4M3).t()
    one = torch.ones(())
    asked = emulate_matmul(a, b, one, one, split_k="auto", device="h200", use_fast_accum=True)
    assert torch.equal(asked, emulate_matmul(a, b, one, one, split_k=6, use_fast_accum=True))
    assert not torch.equal(asked, emulate_matmul(a, b, one, one, use_fast_accum=True))
    assert torch.equal(asked, accumulate(a, b, use_fast_accum=True, split_k=6).bfloat16())


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"split_k": "auto"}, TypeError, "device: missing"),
        ({"split_k": 2, "device": "h200"}, ValueError, "device: got 'h200' with split_k=2"),
        ({"split_k": "auto", "device": "h200", "unit": "sm89"}, ValueError, "unit: got 'sm89'"),
        ({"split_k": "auto", "device": "mi300"}, NoEvidenceError, "device: got 'mi300'"),
        ({"split_k": "some"}, TypeError, "split_k: got 'some'"),
    ],
)
def test_what_auto_needs(options: dict[str, object], error: type[Exception], message: str) -> None:
    a, one = torch.ones(16, 32).to(E4M3), torch.ones(())
    with pytest.raises(error, match=message):
        emulate_matmul(a, a.t(), one, one, **options)  # type: ignore[arg-type]


def test_an_empty_product_is_not_cut() -> None:
    a, b, one = torch.zeros(0, 32).to(E4M3), torch.zeros(32, 16).to(E4M3), torch.ones(())
    assert fp8ref.emulate_matmul(a, b, one, one, split_k="auto", device="h200").shape == (0, 16)


def test_cublaslt_leaves_out_what_is_left_over() -> None:
    """The shapes that an H200 was asked about place by place: how many products at the end of K count."""
    seen = {(row["parts"], row["M, N, K"][2]): row["never added"] for row in TAILS}
    assert {dropped_k(k, parts) for parts, k in seen} == {0, 16}
    assert all(dropped_k(k, parts) == dropped for (parts, k), dropped in seen.items())
    assert not any(row["differing from the oracle"] or row["NaN there is seen"] for row in TAILS)
    assert all(row["they are the last"] for row in TAILS)


@pytest.mark.parametrize("engine", ["torch", "compiled"])
@pytest.mark.parametrize("fast", [True, False])
def test_the_oracle_leaves_them_out_and_says_so(fast: bool, engine: Engine) -> None:
    m, n, k = 5, 208, 51216
    generator = torch.Generator().manual_seed(6)
    a, b = (torch.randn(size, k, generator=generator).to(E4M3) for size in (m, n))
    one = torch.ones(())
    options: dict[str, Any] = {"use_fast_accum": fast, "out_dtype": torch.float32}
    with pytest.warns(DroppedProductsWarning, match="20 parts of 2560 and never adds the last 16 products of K"):
        asked = emulate_matmul(a, b.t(), one, one, split_k="auto", device="h200", engine=engine, **options)
    assert torch.equal(asked, emulate_matmul(a[:, :-16], b[:, :-16].t(), one, one, split_k=20, **options))
    whole = emulate_matmul(a, b.t(), one, one, split_k=20, **options)
    tail = (a[:, -16:].float() @ b[:, -16:].float().t()).abs()
    assert int((whole - asked).abs().gt(tail / 2).sum()) > m * n / 2, "a number adds every product"


def test_a_whole_k_gives_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [split_k(5, 208, k) for k in (51200, 51232, 51248)] == [19, 20, 20]
