"""The kernels under Triton's interpreter: indexing, masks, tails, strides, splits and epilogues, with equality."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from interpreted import interpreter, tasks

Run = Callable[..., Any]
# Each example is a second or so of interpretation.
few = settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])

rows = st.one_of(st.integers(1, 17), st.sampled_from([1, 16, 33]))
columns = st.one_of(st.integers(1, 130), st.sampled_from([63, 64, 65]))
depths = st.one_of(st.integers(1, 260), st.sampled_from([15, 16, 127, 128, 129, 513]))
layouts = st.sampled_from(["plain", "columns", "gaps", "batch"])
seeds = st.integers(0, 2**16)
# The interpreter rounds ties to bf16 wrongly; test_bfloat16 has results that bf16 holds.
out_dtypes = st.sampled_from([torch.float32, torch.float16])
kinds_of_x = st.sampled_from(["row", "tensor", "1x128"])
quantisers = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
        "scale_format": st.sampled_from(["float32", "ue8m0"]),
        "absmax_bound": st.just(224.0),
    },
)
biases = st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16])


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with interpreter() as call:
        yield call


@few
@given(m=rows, n=columns, k=depths, seed=seeds, layout=layouts, out=out_dtypes, bias=biases, data=st.data())
def test_linear(
    run: Run, m: int, n: int, k: int, seed: int, layout: str, out: torch.dtype, bias: torch.dtype, data: st.DataObject
) -> None:
    options = {
        "out_dtype": out,
        "bias": bias,
        "x": data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32])),
        "static": data.draw(st.booleans()),
        "use_fast_accum": data.draw(st.booleans()),
        "batch_invariant": data.draw(st.booleans()),
    }
    assert run(tasks.linear, m, n, k, seed, layout, data.draw(st.sampled_from(["row", "tensor"])), options) == ""


@few
@given(m=rows, n=columns, k=depths, seed=seeds, layout=layouts, scaling=st.sampled_from(["1x128", "128x128"]))
def test_linear_with_block_scales(run: Run, m: int, n: int, k: int, seed: int, layout: str, scaling: str) -> None:
    options = {"out_dtype": torch.float32, "bias": torch.float32, "x": torch.bfloat16, "static": False}
    assert run(tasks.linear, m, n, k, seed, layout, scaling, options) == ""


@few
@given(
    m=rows,
    n=columns,
    k=depths,
    seed=seeds,
    layout=st.sampled_from(["plain", "columns", "gaps"]),
    kind=st.sampled_from(["tensor", "row", "1x128", "128x128", "128x128 by 1x128"]),
    split_k=st.integers(1, 5),
    out=out_dtypes,
)
def test_matmul(
    run: Run, m: int, n: int, k: int, seed: int, layout: str, kind: str, split_k: int, out: torch.dtype
) -> None:
    assert run(tasks.matmul, m, n, k, seed, layout, kind, {"split_k": split_k, "out_dtype": out}) == ""


@few
@given(m=st.integers(1, 20), k=depths, seed=seeds, layout=layouts, scaling=kinds_of_x, options=quantisers)
def test_quantiser(run: Run, m: int, k: int, seed: int, layout: str, scaling: str, options: dict[str, Any]) -> None:
    assert run(tasks.quantiser, m, k, seed, layout, scaling, options) == ""


@settings(few, max_examples=25)
@given(
    m=rows, n=columns, k=depths, seed=seeds, layout=layouts, scaling=st.sampled_from(["row", "tensor", "1x128"]),
    options=quantisers, one=st.booleans(), data=st.data(),
)  # fmt: skip
def test_linear_with_other_activations(
    run: Run, m: int, n: int, k: int, seed: int, layout: str, scaling: str, options: dict[str, Any], one: bool,
    data: st.DataObject,
) -> None:  # fmt: skip
    if "absmax_bound" in options:
        options.pop("dtype", None)  # the interpreter's e5m2 does not saturate
    names = {"dtype": "activation_dtype", "absmax_bound": "activation_bound"}
    options = {names.get(name, name): value for name, value in options.items()}
    options |= {"out_dtype": torch.float32, "bias": None, "x": torch.bfloat16, "static": False}
    if scaling != "1x128" and one:
        options["activation_scaling"] = "tensor"
        static = not {"scale_format", "activation_bound"} & set(options)
        options["static"] = static and data.draw(st.booleans())
    assert run(tasks.linear, m, n, k, seed, layout, scaling, options) == ""


def test_the_calls_kept_ready_are_bounded(run: Run) -> None:
    assert run(tasks.bounded_memory, 3) == ""


def test_bfloat16(run: Run) -> None:
    options = {"out_dtype": torch.bfloat16, "bias": None, "x": torch.bfloat16, "static": False}
    assert run(tasks.linear, 5, 70, 9, 0, "plain", "row", options) == ""


@pytest.mark.parametrize(
    ("m", "n", "k"), [(3, 64, 2049), (1, 64, 17000), (16, 130, 1024), (65, 70, 129), (130, 65, 64)]
)
def test_splits_long_rows_and_large_tiles(run: Run, m: int, n: int, k: int) -> None:
    options = {"out_dtype": torch.float32, "bias": None, "x": torch.bfloat16, "static": False}
    assert run(tasks.linear, m, n, k, 0, "plain", "row", options) == ""


@pytest.mark.parametrize("kind", ["tensor", "row", "1x128", "128x128", "128x128 by 1x128"])
def test_matmul_in_runs_of_many_tiles(run: Run, kind: str) -> None:
    for split_k in (2, 3, 5):
        assert (
            run(tasks.matmul, 130, 33, 1700, 0, "plain", kind, {"split_k": split_k, "out_dtype": torch.float32}) == ""
        )


def test_offsets_of_64_bits(run: Run) -> None:
    for layout in ("plain", "columns", "gaps"):
        options = {"split_k": 2, "out_dtype": torch.float32}
        assert run(tasks.with_wide_offsets, tasks.matmul, 5, 71, 391, 1, layout, "row", options) == ""
        assert run(tasks.with_wide_offsets, tasks.quantiser, 5, 391, 1, layout, "row", {}) == ""
        assert run(tasks.with_wide_offsets, tasks.quantiser, 5, 391, 1, layout, "tensor", {}) == ""
        assert run(tasks.with_wide_offsets, tasks.quantiser, 5, 391, 1, layout, "1x128", {}) == ""


@pytest.mark.parametrize(("m", "n", "k"), [(0, 5, 7), (3, 0, 7), (3, 5, 0), (0, 0, 0), (2, 3, 1)])
def test_empty_sizes(run: Run, m: int, n: int, k: int) -> None:
    for scaling in ("row", "1x128", "128x128"):
        options = {"out_dtype": torch.float32, "bias": torch.float32, "x": torch.bfloat16, "static": False}
        assert run(tasks.linear, m, n, k, 0, "plain", scaling, options) == ""


def test_negated_views(run: Run) -> None:
    assert run(tasks.negated) == ""


def test_what_the_kernels_cannot_take_is_refused(run: Run) -> None:
    wanted = [
        *["M, N, K: got .*; the kernels count each in 32 bits"] * 4,
        "x: got rows of 134217728; the kernels take at most 67107840",
        "x: got rows of 2147483648; the kernels take at most 1073725440",
        r"x: got torch.bfloat16 \[4\]; give \[M, K\]",
        r"x: got torch.float64 \[1, 4\]; give \[M, K\]",
        "dtype: got torch.float16",
        r"scale: got torch.float32 \[2\]; give one float32 element",
        "scale: got a tensor on meta while x is on cpu",
        "absmax_bound: got 0.0",
    ]
    for said, words in zip(run(tasks.refusals), wanted, strict=True):
        assert re.match(words, said), f"{said!r} instead of {words!r}"


def test_a_dropped_tail_is_seen(run: Run) -> None:
    assert run(tasks.dropped_part, 1024).startswith("all of K: ")
