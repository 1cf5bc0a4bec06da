"""The probe finds, from the outside, every arithmetic that the oracle knows, and mistakes nothing else for one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fp8ref
from fp8ref import ProbeError, TensorCoreUnit, accumulate, emulate_matmul, probe
from fp8ref.emulation.scales import Scaling
from fp8ref.probing.targets import scaled_mm
from golden.replay import step_fp16

FEW = 8192
UNITS = [name for name in fp8ref.UNITS if name != "exact"]


def summed(unit: str | TensorCoreUnit, fast: bool, split_k: int = 1) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda a, b: accumulate(a, b, unit=unit, use_fast_accum=fast, split_k=split_k)


@pytest.mark.parametrize("fast", [True, False], ids=["fast", "accurate"])
@pytest.mark.parametrize("name", UNITS)
def test_every_unit_is_found_from_the_outside(name: str, fast: bool) -> None:
    report = probe(summed(name, fast), k=384, elements=FEW)
    unit = fp8ref.UNITS[name]
    assert report.known_as == name
    assert report.equal
    assert report["products per step"] == unit.products_per_step
    assert report["fraction bits"] == unit.fraction_bits
    assert report["significant bits"] == unit.significant_bits
    assert report["cut of a term"] == "toward zero"
    assert report["c joins the alignment"] is True
    afresh = [unit.instruction_k] if unit.c_enters == "after" else []
    assert report["promotion"] == afresh + ([] if fast else [128])
    assert f"unit={name!r}, use_fast_accum={fast}" in str(report.reproduced_by)


def test_one_exact_sum_is_found() -> None:
    report = probe(summed("exact", True), k=256, elements=FEW)
    assert report.known_as == "exact"
    assert report.equal
    assert report["products per step"] is None


@st.composite
def units(draw: st.DrawFn) -> TensorCoreUnit:
    per_step = draw(st.sampled_from([4, 8, 16, 32]))
    length = per_step * draw(st.sampled_from([1, 2] if per_step < 32 else [1]))
    return TensorCoreUnit(
        "drawn",
        per_step,
        draw(st.integers(6, 25)),
        draw(st.integers(4, 24)),
        tuple(draw(st.permutations(range(length)))),
        draw(st.sampled_from(["alignment", "after"])),
        "drawn",
    )


@settings(max_examples=3, deadline=None)
@given(unit=units(), fast=st.booleans())
def test_units_nobody_has_seen_are_found(unit: TensorCoreUnit, fast: bool) -> None:
    report = probe(summed(unit, fast), k=384, elements=FEW)
    assert report.equal, str(report)
    assert report.unit is not None
    assert report["products per step"] == unit.products_per_step
    assert report["fraction bits"] == unit.fraction_bits


@pytest.mark.parametrize(
    "order", [(0,), (3, 6, 1, 5, 7, 0, 4, 2), tuple(range(7, -1, -1))], ids=["in order", "mixed", "reversed"]
)
@pytest.mark.parametrize(("fraction", "significant"), [(13, 14), (10, 8), (16, 15)])
def test_one_product_at_a_time_with_truncation(order: tuple[int, ...], fraction: int, significant: int) -> None:
    """B shows in the last step of a chain alone: the next one aligns to c, and cuts as much of it as B does."""
    unit = TensorCoreUnit("serial", 1, fraction, significant, order, "alignment", "made up")
    report = probe(summed(unit, True), k=128, elements=FEW)
    assert report.equal, str(report)
    assert (report["products per step"], report["significant bits"]) == (1, significant)


def test_a_result_that_the_next_call_overwrites_is_read_in_time() -> None:
    memory = torch.empty(64, 64)
    report = probe(lambda a, b: memory.copy_(accumulate(a, b, use_fast_accum=True)), k=128, elements=FEW)
    assert report.known_as == "sm90"
    calls: list[None] = []

    def other_each_time(a: Tensor, b: Tensor) -> Tensor:
        calls.append(None)
        return memory.copy_(accumulate(a, b)).mul_(1 + len(calls) // 4)

    with pytest.raises(ProbeError, match="not deterministic"):
        probe(other_each_time, k=128)


@pytest.mark.parametrize("which", ["a", "b"])
def test_a_callable_that_changes_its_operands_is_refused(which: str) -> None:
    def product(a: Tensor, b: Tensor) -> Tensor:
        out = accumulate(a, b)
        {"a": a, "b": b}[which].view(torch.uint8)[-1, -1] ^= 1
        return out

    with pytest.raises(ProbeError, match=f"changes its operand {which}"):
        probe(product, k=128)


@pytest.mark.slow
def test_a_unit_that_keeps_almost_everything_is_found_with_fewer_small_products() -> None:
    unit = TensorCoreUnit("wide", 32, 30, 24, tuple(range(32)), "alignment", "made up")
    report = probe(summed(unit, False), k=384, elements=FEW)
    assert (report["fraction bits"], report["promotion"], report.equal) == (30, [128], True)


@pytest.mark.parametrize(("split_k", "fast"), [(3, False), (4, True)])
def test_parts_of_k_are_found_to_the_element(split_k: int, fast: bool) -> None:
    k = 1360
    report = probe(summed("sm90", fast, split_k), m=16, n=16, k=k, elements=512)
    tiles = -(-k // 128)
    length = -(-tiles // split_k) * 128
    assert report["parts of K"] == [[first, min(first + length, k)] for first in range(0, k, length)]
    assert report["promotion"] == ([] if fast else [128])
    assert report.equal
    assert f"split_k={split_k}" in str(report.reproduced_by)


@pytest.mark.parametrize(
    ("scaling", "scales", "bias"),
    [
        (("tensor", "tensor"), "fma(acc, scale_a * scale_b, +0)", True),
        (("row", "row"), "(acc * scale_b) * scale_a", True),
        (("1x128", "1x128"), "fma(chain * scale_a, scale_b, total)", False),
        (("1x128", "128x128"), "fma(chain, scale_a * scale_b, total)", False),
    ],
)
def test_scales_and_bias_are_found(scaling: tuple[Scaling, Scaling], scales: str, bias: bool) -> None:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
        return emulate_matmul(a, b, scale_a, scale_b, bias=bias, scaling=scaling, out_dtype=torch.float32)

    report = probe(product, m=64, n=64, k=256, scaling=scaling, bias=bias, elements=1024)
    assert report["scales"] == [scales]
    assert report.known_as == "sm90"
    assert report.equal
    if bias:
        # Without a rounding to the output the third way is the first.
        assert report["bias"][0] == "added in fp32 after the scales, rounded on its own"
        assert "fused with the last product of the scales" not in report["bias"]


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_narrow_outputs_hide_nothing_that_matters(out: torch.dtype) -> None:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return emulate_matmul(a, b, scale_a, scale_b, scaling=("tensor", "tensor"), out_dtype=out)

    report = probe(product, k=256, scaling=("tensor", "tensor"), elements=FEW)
    assert report.known_as == "sm90"
    assert report["output rounding"] == "to nearest, ties to even"
    assert report.equal
    if out != torch.bfloat16:
        assert report["overflow of the output"] == {torch.float16: "+Inf", torch.float8_e4m3fn: "+448"}[out]


def test_a_plain_fp32_product_is_no_unit() -> None:
    report = probe(lambda a, b: a.float() @ b.float(), k=128, elements=FEW)
    assert report.unit is None
    assert report.known_as is None
    assert report["products per step"] == 1
    assert report["rounding of a step"] == "nearest"


def test_torch_on_a_cpu_is_no_unit() -> None:
    target = scaled_mm(out_dtype=torch.bfloat16)
    report = probe(target.call, m=16, n=16, k=64, scaling=target.scaling, elements=FEW, name=target.name)
    assert report.unit is None
    assert report["products per step"] == 1
    assert report["output rounding"] == "to nearest, ties to even"


def test_a_first_difference_is_shown() -> None:
    calls = []

    def wrong_later(a: Tensor, b: Tensor) -> Tensor:
        calls.append(1)
        out = accumulate(a, b, use_fast_accum=True)
        if out.abs().max() > 0 and a.float().count_nonzero() > a.numel() // 2:
            out[3, 5] *= 1.25
        return out

    report = probe(wrong_later, k=128, elements=FEW)
    assert not report.equal
    assert report.known_as is None
    assert report.reproduced_by is None
    assert report.verdict is not None
    first = report.verdict.first
    assert first is not None
    assert (first.row, first.column) == (3, 5)
    assert first.seen == first.expected * 1.25
    assert "does not reproduce the subject" in str(report)


@pytest.mark.parametrize(
    ("subject", "message"),
    [
        (lambda a, b: accumulate(a, b) * 2, "does not return a @ b"),
        (lambda a, b: accumulate(a, b)[:1], "expected \\[M, N\\]"),
        (lambda a, b: (a.float() @ b.float()).long(), "expected \\[M, N\\]"),
        (lambda a, b: torch.linalg.inv(a) + b, "raised"),
        (lambda a, b: accumulate(a, b) + torch.rand(64, 64) * (a.float().count_nonzero() > 4096), "not deterministic"),
    ],
)
def test_what_is_no_product_is_refused(subject: Callable[[Tensor, Tensor], Tensor], message: str) -> None:
    with pytest.raises(ProbeError, match=message):
        probe(subject, k=128)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 32}, "k: got 32"),
        ({"m": 0}, "m: got 0"),
        ({"device": "nonsense"}, "device: got 'nonsense'"),
        ({"dtypes": (torch.float8_e4m3fn,)}, "dtypes: got"),
        ({"scaling": ("row", "tensor")}, "scaling: got"),
        ({"bias": True}, "bias: got True"),
        ({"elements": True}, "elements: got True"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        probe(summed("sm90", True), **arguments)  # type: ignore[arg-type]


def test_every_finding_carries_its_inputs() -> None:
    report = probe(summed("sm90", False), k=384, elements=FEW)
    found = {finding.name: finding for finding in report.findings}
    kept, lost = found["fraction bits"].evidence
    big, minus, small = (x * y for x, y in kept[0].values())
    assert big == -minus
    assert big / small == 2**13
    assert kept[1] == small
    assert [x * y for x, y in lost[0].values()][2] == small / 2
    assert lost[1] == 0
    json = report.to_json()
    assert json["verdict"] == {"elements": report.verdict and report.verdict.elements, "differing": 0, "first": None}
    assert json["unit"]["fraction_bits"] == 13


def test_fp16_operands_are_probed() -> None:
    report = probe(lambda a, b: a.float() @ b.float(), k=128, dtypes=(torch.float16,) * 2, elements=FEW)
    assert report["products per step"] == 1
    assert report.equal


@pytest.mark.parametrize("out", [torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("name", ["sm90", "sm90_hmma"])
def test_an_fp16_accumulator_is_told_by_its_range(name: str, dtype: torch.dtype, out: torch.dtype) -> None:
    """The subject is the model that replays what an H200 returned for tl.dot with out_dtype=tl.float16."""
    unit = fp8ref.UNITS[name]
    length = unit.products_per_step
    assert length is not None

    def product(a: Tensor, b: Tensor) -> Tensor:
        acc = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float16)
        for first in range(0, a.shape[1], length):
            base, step = divmod(first, unit.instruction_k)
            chosen = [base * unit.instruction_k + place for place in unit.k_order[step : step + length]]
            acc = step_fp16(a[:, None, chosen], b.t()[None, :, chosen], acc, unit.fraction_bits)
        return acc.to(out)

    report = probe(product, k=128, dtypes=(dtype, dtype), elements=3 * FEW)
    assert report["accumulator"] == "float16", str(report)
    assert (report["significant bits"], report["rounding of a step"]) == (11, "nearest")
    assert report["fraction bits"] == unit.fraction_bits
    assert report.equal, str(report)
