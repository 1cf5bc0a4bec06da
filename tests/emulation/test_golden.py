"""The oracle returns the bits that an H200 returned: every recorded product is replayed and compared.

``tests/golden/record.py`` made the recordings; ``docs/numerics.md`` says in words what they show.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8ref.emulation.compiled import Engine
from golden.operands import KINDS
from golden.replay import difference, question, replay
from golden.store import Case, Recording, load

FOLDER = Path(__file__).parents[1] / "golden"
FILES = ("scaled_mm", "mma_sync", "tl_dot_wgmma", "tl_dot_hmma", "tl_dot_fp16")
PAIRS = {("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3")}


@cache
def recording(name: str) -> Recording:
    return load(FOLDER / f"{name}.safetensors")


@cache
def pools() -> dict[str, torch.Tensor]:
    return recording("operands").tensors


@cache
def survey() -> dict[str, Any]:
    """Where cuBLASLt cut K: the environment, and per configuration [M, N, K, tiles in a part]."""
    found: dict[str, Any] = json.loads((FOLDER / "split_k.json").read_text())
    return found


@cache
def answer(name: str, case: Case, engine: Engine) -> torch.Tensor:
    return replay(case, recording(name), pools(), engine)


def formats(case: Case) -> tuple[str, str]:
    return case.a.split("/")[1], case.b.split("/")[1]


# Scaled products have two engines; the dots of the other files are single instructions, which plain PyTorch computes.
GROUPS: list[tuple[str, str, Engine]] = [
    (name, group, engine)
    for name in FILES
    for group in dict.fromkeys(case.group for case in recording(name).cases)
    for engine in (("torch", "compiled") if name == "scaled_mm" else ("torch",))
]


@pytest.mark.parametrize(("name", "group", "engine"), GROUPS)
def test_every_recorded_product_has_the_oracles_bits(name: str, group: str, engine: Engine) -> None:
    cases = [case for case in recording(name).cases if case.group == group]
    found = [difference(case, answer(name, question(case), engine), recording(name)) for case in cases]
    wrong = [line for line in found if line is not None]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("bit", [0, 6])
def test_a_flipped_bit_in_a_recording_is_found(name: str, bit: int) -> None:
    case = recording(name).cases[-1]
    changed = recording(name).tensors[case.out].clone()
    changed.view(-1)[-1] ^= 1 << bit
    broken = Recording(tensors={case.out: changed})
    got = recording(name).tensors[case.out].reshape(case.m, case.n)
    assert difference(case, got, recording(name)) is None
    message = difference(case, got, broken)
    assert message is not None
    assert f"1 of {case.m * case.n} differ, first at [{case.m - 1}, {case.n - 1}]" in message


def test_an_output_of_another_shape_is_found() -> None:
    case = recording("mma_sync").cases[0]
    assert "recorded torch.int32 [16, 16]" in str(difference(case, torch.zeros(1), recording("mma_sync")))


@pytest.mark.parametrize("name", [*FILES, "split_k"])
def test_the_environment_of_a_recording_is_known(name: str) -> None:
    known = survey()["environment"] if name == "split_k" else recording(name).environment
    assert known["gpu"] == "NVIDIA H200"
    assert known["capability"] == "9.0"
    assert known["torch"].startswith("2.11.0")
    assert known["triton"] == "3.6.0"
    assert int(known["cublaslt"]) >= 130000
    assert all(known[key] for key in ("driver", "cuda", "python", "numpy", "platform"))
    assert known["CUBLASLT_WORKSPACE_SIZE"] == "not set"


def test_the_recorded_operands_hold_every_code() -> None:
    for name in ("e4m3", "e5m2"):
        codes = torch.cat([pools()[f"bits/{name}/{side}"].flatten() for side in ("a", "b")])
        assert codes.unique().numel() == 256


def test_scaled_mm_was_recorded_in_every_mode() -> None:
    cases = recording("scaled_mm").cases
    tensor, row, small, square = ("tensor",) * 2, ("row",) * 2, ("1x128",) * 2, ("1x128", "128x128")
    for via in ("_scaled_mm", "scaled_mm"):
        modes = {(case.scaling, case.fast) for case in cases if case.via == via}
        assert modes >= {(tensor, True), (tensor, False), (row, True), (row, False), (small, False), (square, False)}
    assert {case.scaling for case in cases} == {tensor, row, small, square, ("128x128", "1x128")}
    for scaling, outputs in ((tensor, {"fp32", "bf16", "fp16", "e4m3", "e5m2"}), (row, {"fp32", "bf16", "fp16"})):
        assert {case.out_dtype for case in cases if case.scaling == scaling} == outputs
        biased = {(case.out_dtype, case.bias_dtype) for case in cases if case.scaling == scaling and case.bias}
        assert biased >= {("bf16", "bf16"), ("fp16", "fp16")}
    accumulated = [case for case in cases if case.group == "accumulation"]
    assert {formats(case) for case in accumulated} == PAIRS
    assert {case.a.split("/")[0] for case in accumulated} == set(KINDS)
    assert {case.k for case in accumulated} == {16, 32, 48, 80, 128, 144, 272, 1040}
    assert {1, 3, 9, 16, 17} <= {case.m for case in accumulated}
    assert {case.k for case in cases} >= {4096, 14336, 16384, 28672}
    for scaling in (tensor, small, square):
        assert {case.split_k > 1 for case in cases if case.scaling == scaling} == {True, False}
    assert {case.workspace for case in cases} == {"default", "0"}


def test_dots_were_recorded_on_every_hardware_path() -> None:
    all_pairs = PAIRS | {("e5m2", "e5m2")}
    for name in FILES[1:]:
        cases = recording(name).cases
        assert {formats(case) for case in cases} == all_pairs
        assert {case.c for case in cases} == {"c/zero", "c/wide", "c/bits"}
        assert max(case.k for case in cases) == 256
    instructions = {name: {word for case in recording(name).cases for word in case.instructions} for name in FILES[1:]}
    assert all(word.startswith("wgmma.mma_async") and ".f32." in word for word in instructions["tl_dot_wgmma"])
    assert instructions["tl_dot_hmma"] == {"mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"}
    assert instructions["mma_sync"] == {"HMMA.16816.F32"}, "no fp8 instruction exists for mma.sync on this GPU"
    assert "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16" in instructions["tl_dot_fp16"]
    assert "wgmma.mma_async.sync.aligned.m64n16k32.f16.e4m3.e4m3" in instructions["tl_dot_fp16"]
    promoted = {case.promote for case in recording("tl_dot_wgmma").cases}
    assert promoted == {None, 32, 64, 128}
    tiles = {case.note for case in recording("tl_dot_hmma").cases}
    assert {"tile 64x16x128 imprecise 0", "tile 16x16x32 imprecise None", "tile 16x16x128 imprecise 128"} <= tiles


def test_parts_of_k_follow_the_rule() -> None:
    cut = [case for case in recording("scaled_mm").cases if case.part_tiles is not None]
    assert len(cut) >= 200
    for case in cut:
        tiles = -(-case.k // 128)
        part = -(-tiles // case.split_k)
        if case.scaling == ("1x128", "128x128"):
            part = -(-part // 4) * 4
        assert case.part_tiles == part, case.label


def test_where_cublaslt_cuts_k() -> None:
    shapes_seen = 0
    for name, rows in survey()["first_part"].items():
        for m, n, k, part in rows:
            tiles = -(-k // 128)
            shapes_seen += 1
            if "row" in name:
                assert part in (tiles, -2), (name, m, n, k)
                continue
            assert 1 <= part <= tiles, (name, m, n, k)
            assert -(-tiles // part) <= max(1, (tiles - 1) // 20), (name, m, n, k)
            if "128x128" in name:
                assert part == tiles or part % 4 == 0, (name, m, n, k)
    assert shapes_seen >= 3000


FINDINGS = (
    ("CUBLASLT_WORKSPACE_SIZE=0", "", "0 without"),
    ("probe without workspace", "", "0 are cut"),
    ("one-element scale_a and scale_b [1, 16]", "", "accepted; equal to ['acc * (scale_a * scale_b)']"),
    ("scale_a [4, 1] and one-element scale_b", "", "accepted; equal to ['acc * (scale_a * scale_b)']"),
    ("M = 1 with [1, 1] and [1, 16]", "", "accepted; equal to ['(acc * scale_b) * scale_a']"),
    ("1-D scales [4] and [16]", "RuntimeError", "Invalid scaling configuration"),
    ("M, N, K = 4, 16, 24", "RuntimeError", "divisible by 16"),
    ("M, N, K = 4, 24, 32", "RuntimeError", "divisible by 16"),
    ("M, N, K = 0, 16, 32", "", "accepted"),
    ("M, N, K = 4, 16, 0", "", "accepted"),
    ("row-major b", "RuntimeError", "row-major and column-major"),
    ("no out_dtype", "", "torch.float8_e4m3fn"),
    ("scale_result=4.0, torch.float8_e4m3fn", "", "equal to the result without it: True"),
    ("0 times a negative tensor scale, K = 32, fp32", "", "[False]"),
    ("0 times a negative tensor scale, K = 16384, fp32", "", "[True]"),
    ("0 times a negative row scale, K = 32, fp32", "", "[True]"),
    ("row-wise scales, bias, torch.bfloat16, fast=True, M, N, K = 16, 64, 5248", "RuntimeError", "NOT_SUPPORTED"),
    ("row-wise scales, bias, torch.bfloat16, fast=False, M, N, K = 16, 64, 5248", "", "accepted"),
    ("_scaled_mm, 1x128 by 128x128, K = 512, N = 272", "", "as the strides say: True"),
    ("_scaled_mm, 1x128 by 128x128, K = 640, N = 272", "", "as the strides say: False"),
)


@pytest.mark.parametrize(("call", "error", "message"), FINDINGS)
def test_what_the_calls_at_the_edge_did(call: str, error: str, message: str) -> None:
    found = [finding for finding in recording("scaled_mm").findings if finding["call"] == call]
    assert found, f"nothing was recorded of {call!r}"
    for finding in found:
        assert finding["error"] == error
        assert message in finding["message"]


@pytest.mark.parametrize(
    ("out", "bias", "accepted"),
    [
        ("bf16", "bfloat16", True),
        ("bf16", "float16", False),
        ("fp16", "float16", True),
        ("fp16", "bfloat16", False),
        ("e4m3", "bfloat16", True),
        ("e4m3", "float16", True),
        ("fp32", "bfloat16", False),
        ("bf16", "float32", False),
    ],
)
def test_which_bias_dtypes_an_output_takes(out: str, bias: str, accepted: bool) -> None:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[bias]
    start = f"types _scaled_mm normal/e4m3xnormal/e4m3 3x16x48 {out} "
    end = f"{('tensor', 'tensor')} 3x16 bias=torch.{bias}"
    refused = [
        finding
        for finding in recording("scaled_mm").findings
        if finding["call"].startswith(start) and finding["call"].endswith(end)
    ]
    kept = [
        case
        for case in recording("scaled_mm").cases
        if case.group == "types"
        and formats(case) == ("e4m3", "e4m3")
        and (case.scaling, case.out_dtype, case.bias_dtype) == (("tensor", "tensor"), out, short)
    ]
    assert (len(kept), len(refused)) == ((1, 0) if accepted else (0, 1))


def test_questions_are_equal_only_for_equal_products() -> None:
    case = recording("scaled_mm").cases[0]
    assert question(case) == question(replace(case, group="x", via="y", out="z"))
    assert question(case) != question(replace(case, fast=not case.fast))
    assert question(case) != question(replace(case, k=case.k + 1))
