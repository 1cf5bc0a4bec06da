"""check_matmul: right kernels pass, wrong ones fail with a report that repeats the failure."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8ref
from fp8ref.emulation.scales import PAIRS, Scaling
from fp8ref.testing import CheckError, Fill, MatmulCase, Supports, check_matmul, mutants
from fp8ref.testing.properties import PROPERTIES

NAMES = [one.name for one in PROPERTIES]
SMALL = Supports(largest=(9, 33, 300))
ROW = Supports(scalings=(("row", "row"),), out_dtypes=(torch.float32,), bias_dtypes=(None,), use_fast_accum=(False,))


def into(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A kernel that writes to ``out=``."""

    def write(*operands: Tensor, out: Tensor, **options: Any) -> Tensor:
        return out.copy_(kernel(*operands, **options))

    return write


def plain(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, out_dtype: torch.dtype, **_: Any) -> Tensor:
    """The oracle's row-wise form in torch's own fp32, in another order."""
    return ((a.float() @ b.float()) * scale_a * scale_b).to(out_dtype)


def failure(kernel: Callable[..., Tensor], *arguments: Any, **options: Any) -> CheckError:
    with pytest.raises(CheckError) as caught:
        check_matmul(kernel, *arguments, **{"quiet": True, "examples": 30, **options})
    return caught.value


@pytest.mark.parametrize("unit", ["sm90", "sm90_mma_sync"])
def test_the_oracle_passes(unit: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = check_matmul(partial(fp8ref.emulate_matmul, unit=unit), SMALL, unit=unit, examples=8)
    assert [one.name for one in found] == NAMES
    assert [one.tried for one in found] == [8] * len(NAMES)
    lines = capsys.readouterr().out.splitlines()
    assert [line[:27].split(maxsplit=1) for line in lines] == [["ok", name + " " * (21 - len(name))] for name in NAMES]


def test_a_kernel_that_takes_out_passes() -> None:
    found = check_matmul(into(fp8ref.emulate_matmul), SMALL, takes_out=True, examples=6, quiet=True)
    assert not any(one.failure or one.skipped for one in found)


def test_another_order_passes_the_bound_and_exact_data_but_not_bits() -> None:
    named = ["random cases", "exact data", "tails", "guard bands", "accumulation", "NaN and Inf"]
    check_matmul(plain, ROW, expect="bound", unit="fp32", properties=named, examples=15, quiet=True)
    finite = Supports(**{**vars(ROW), "specials": False})
    check_matmul(plain, finite, expect="exact", examples=10, quiet=True)
    error = failure(plain, ROW, properties=["accumulation"], shrink=False)
    assert "elements differ" in str(error)


def test_what_cannot_be_checked_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    supports = Supports(
        scalings=(("128x128", "1x128"),), specials=False, offsets=False, layouts=("rows",), bias_dtypes=(None,)
    )
    found = check_matmul(fp8ref.emulate_matmul, supports, examples=2)
    assert {one.name: one.skipped for one in found if one.skipped} == {
        "strides and offsets": "one layout, no offsets",
        "batch invariance": "128x128 scales of a are shared among rows",
        "bias": "no bias",
        "NaN and Inf": "specials=False",
    }
    assert "-     bias                  not checked: no bias\n" in capsys.readouterr().out


def test_the_report_has_every_failure_and_repeats_it() -> None:
    (wrong,) = (one for one in mutants(fp8ref.emulate_matmul) if one.name == "off-by-one mask along N")
    error = failure(wrong, ROW, properties=["repeated runs", "tails", "scale order"], examples=10)
    failed = [one for one in error.findings if one.failure]
    text = str(error)
    lines = text.splitlines()
    assert lines[0] == "2 of 3 properties fail"
    assert lines[1] == "ok    repeated runs         10 cases"
    assert lines[2].startswith("FAIL  tails                 case ")
    for one in failed:
        assert f"\n{one.name}: {one.failure}\nto repeat it:\n    import torch\n" in text
    (tails,) = (one for one in failed if one.name == "tails")
    assert tails.case is not None
    assert (tails.case.m, tails.case.n) == (1, 1), "the smallest case that fails"
    assert len(repr(tails.case)) < 250

    assert "properties=['tails'], supports=Supports(scalings=(('row', 'row'),), out_dtypes=(torch.float32,)" in text
    snippet = re.search(r"\ntails: .*?to repeat it:\n(.*?)(\n\n\w|\Z)", text, re.DOTALL)
    assert snippet is not None
    repeated = "\n".join(line[4:] for line in snippet[1].splitlines())
    with pytest.raises(CheckError, match="1 of 1 properties fails"):
        exec(repeated, {"kernel": wrong})
    exec(repeated, {"kernel": fp8ref.emulate_matmul})


@pytest.mark.parametrize("supports", [Supports(), SMALL, ROW, Supports(multiple_of=(1, 16, 16), offsets=False)])
def test_what_a_kernel_takes_is_shown_as_python(supports: Supports) -> None:
    assert eval(repr(supports), {"torch": torch, "Supports": Supports}) == supports


def test_given_cases_are_checked_instead_of_drawn_ones() -> None:
    one = Fill(torch.float8_e4m3fn, (0x38,))
    seen: list[torch.Size] = []

    def kernel(a: Tensor, *others: Any, **options: Any) -> Tensor:
        seen.append(a.shape)
        return fp8ref.emulate_matmul(a, *others, **options)

    cases = [MatmulCase(2, 3, 4, one, one), MatmulCase(5, 3, 4, one, one)]
    (found,) = check_matmul(kernel, cases=cases, properties=["random cases"], quiet=True)
    assert (found.tried, seen) == (2, [torch.Size([2, 4]), torch.Size([5, 4])])


def test_fail_fast_stops_at_the_first() -> None:
    error = failure(mutants(fp8ref.emulate_matmul)[0], fail_fast=True, shrink=False)
    assert [one.name for one in error.findings] == ["random cases"]


WRONG: dict[str, tuple[Callable[..., Any], str, str]] = {
    "raises": (lambda *_, **__: 1 // 0, "random cases", "ZeroDivisionError: integer division or modulo by zero"),
    "returns nothing": (lambda *_, **__: None, "random cases", "the kernel returned NoneType, no tensor"),
    "wrong shape": (
        lambda *_, **o: torch.zeros(3, 3, dtype=o["out_dtype"]),
        "tails",
        r"returned .* \[3, 3\] on cpu",
    ),
    "wrong dtype": (lambda *x, **o: fp8ref.emulate_matmul(*x, **o).double(), "tails", "returned torch.float64"),
}


@pytest.mark.parametrize("name", WRONG)
def test_kernels_that_return_no_result_fail(name: str) -> None:
    kernel, which, message = WRONG[name]
    (found,) = failure(kernel, properties=[which]).findings
    assert re.search(message, found.failure), found.failure


def test_a_kernel_that_changes_its_mind_is_seen() -> None:
    calls: list[None] = []

    def kernel(*operands: Any, **options: Any) -> Tensor:
        calls.append(None)
        y = fp8ref.emulate_matmul(*operands, **options)
        return -y.float() if len(calls) == 5 else y

    (found,) = failure(kernel, ROW, properties=["random cases"]).findings
    assert "(not on every run: the same case also passed)" in found.failure


def shifted_rows(tile: int) -> Callable[..., Tensor]:
    def kernel(*operands: Any, **options: Any) -> Tensor:
        y = fp8ref.emulate_matmul(*operands, **options)
        return torch.cat([y[:tile], y[: max(0, len(y) - tile)]])

    return kernel


def last_scales_from_before(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
    if options.get("scaling", ("", ""))[0] == "128x128" and len(scale_a) > 1:
        scale_a = torch.cat([scale_a[:-1], scale_a[-2:-1]])
    return fp8ref.emulate_matmul(a, b, scale_a, scale_b, **options)


def flushed_scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
    tiny = torch.finfo(torch.float32).smallest_normal
    if scale_a.numel() == scale_b.numel() == 1 and abs(scale_a.double().item() * scale_b.double().item()) < tiny:
        scale_a = torch.zeros_like(scale_a)
    return fp8ref.emulate_matmul(a, b, scale_a, scale_b, **options)


@pytest.mark.parametrize(
    ("kernel", "which"),
    [
        (shifted_rows(32), "tails"),
        (shifted_rows(64), "tails"),
        (shifted_rows(128), "tails"),
        (last_scales_from_before, "scale order"),
        (flushed_scales, "subnormals"),
    ],
    ids=["rows beyond 32", "rows beyond 64", "rows beyond 128", "second block of rows", "product of scales flushed"],
)
def test_faults_beyond_one_tile_and_in_small_scales_are_seen(kernel: Callable[..., Tensor], which: str) -> None:
    (found,) = failure(kernel, properties=[which], examples=100, shrink=False).findings
    assert "elements differ" in found.failure


def test_a_result_that_the_next_call_overwrites_is_compared_as_it_was() -> None:
    """Without a copy, two runs of a kernel with one buffer would be the same tensor, whatever they gave."""
    memory = torch.empty(1 << 20, dtype=torch.uint8)
    calls: list[None] = []

    def kernel(*operands: Any, **options: Any) -> Tensor:
        calls.append(None)
        y = fp8ref.emulate_matmul(*operands, **options)
        result = memory[: y.nbytes].view(y.dtype).view(y.shape)
        result.copy_(y).view(torch.uint8)[:1, :1] ^= len(calls) % 2
        return result

    (found,) = failure(kernel, properties=["repeated runs"]).findings
    assert "run 2 of the same call gives other bits than run 1" in found.failure


def keeps(*operands: Tensor, out: Tensor, **options: Any) -> Tensor:
    y = fp8ref.emulate_matmul(*operands, **options)
    out.view(-1)[1:].copy_(y.view(-1)[1:])
    return out


def elsewhere(*operands: Tensor, out: Tensor, **options: Any) -> Tensor:
    del out
    return fp8ref.emulate_matmul(*operands, **options)


def beyond(*operands: Tensor, out: Tensor, **options: Any) -> Tensor:
    out.copy_(fp8ref.emulate_matmul(*operands, **options))
    bytes_of = out.view(torch.uint8)
    bytes_of.as_strided((1,), (1,), bytes_of.storage_offset() + bytes_of.numel()).fill_(0)
    return out


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (keeps, "full of bytes 0x00 gives other bits"),
        (elsewhere, "returned another tensor than the out= that it was given"),
        (beyond, "1 bytes beside out= were overwritten"),
    ],
)
def test_faults_of_out_are_seen(kernel: Callable[..., Tensor], message: str) -> None:
    (found,) = failure(kernel, ROW, takes_out=True, properties=["poisoned output"]).findings
    assert message in found.failure


def test_memory_that_nothing_wrote_is_seen() -> None:
    def kernel(*operands: Any, **options: Any) -> Tensor:
        y = fp8ref.emulate_matmul(*operands, **options)
        result = torch.empty_like(y)
        result[:-1] = y[:-1]
        return result

    (found,) = failure(kernel, ROW, properties=["poisoned output"]).findings
    assert "NaN" in found.failure
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"kernel": 3}, TypeError, "kernel: got int; give a function"),
        ({"supports": {}}, TypeError, "supports: got dict"),
        ({"expect": "luck"}, ValueError, r"expect: got 'luck'; give one of \['bits', 'bound', 'exact'\]"),
        ({"unit": "sm75"}, ValueError, "unit: got 'sm75'"),
        ({"unit": "fp32"}, ValueError, "unit: got 'fp32', which has no order; give expect='bound'"),
        ({"repeats": 1}, ValueError, "repeats: got 1"),
        ({"examples": 0}, ValueError, "examples: got 0"),
        ({"properties": ["speed"]}, ValueError, r"properties: got \['speed'\]; give a list of some of"),
        ({"properties": []}, ValueError, r"properties: got \[\]"),
        ({"properties": "tails"}, ValueError, "properties: got 'tails'"),
    ],
)
def test_what_it_refuses(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_matmul(**{"kernel": fp8ref.emulate_matmul, **arguments})


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_without_offsets_nothing_begins_at_other_addresses(pair: tuple[Scaling, Scaling]) -> None:
    """cuBLASLt refuses scales, operands and biases that do not begin at multiples of 16 bytes."""

    def aligned(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
        given = {"a": a, "b": b, "scale_a": scale_a, "scale_b": scale_b, "bias": options.get("bias")}
        moved = [name for name, tensor in given.items() if tensor is not None and tensor.data_ptr() % 16]
        assert not moved, f"{moved} at an odd address"
        return fp8ref.emulate_matmul(a, b, scale_a, scale_b, **options)

    supports = Supports(scalings=(pair,), offsets=False, layouts=("rows", "padded"), multiple_of=(1, 16, 16))
    check_matmul(aligned, supports, examples=12, quiet=True)
