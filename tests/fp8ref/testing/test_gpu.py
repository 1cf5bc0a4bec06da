"""The kit on a GPU: the library's kernel, cuBLASLt and the example's kernels, judged where they run."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import fp8ref
from fp8ref.emulation.scales import PAIRS
from fp8ref.testing import CheckError, Fill, Supports, assert_bits_equal, check_matmul, mutants
from fp8ref.testing.supports import LAYOUTS
from package_files import ROOT

pytestmark = pytest.mark.gpu
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture(autouse=True)
def _hopper() -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_librarys_kernel(pair: Any) -> None:
    """A few forms each, since every one is a kernel to compile."""
    supports = Supports(
        scalings=(pair,), dtypes=((E4M3, E4M3), (E4M3, E5M2)), out_dtypes=(torch.float32, torch.bfloat16),
        bias_dtypes=(None, torch.bfloat16), split_k=(1, 3),
    )  # fmt: skip
    check_matmul(fp8ref.scaled_matmul, supports, device="cuda", examples=25)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, **options: Any) -> Tensor:
    """``torch._scaled_mm`` with the kit's arguments."""
    result: Tensor = torch._scaled_mm(a, b, scale_a, scale_b, **options)
    return result


@pytest.mark.parametrize("pair", [("tensor", "tensor"), ("row", "row")], ids=str)
def test_cublaslt(pair: Any) -> None:
    supports = Supports(
        scalings=(pair,), dtypes=((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)), out_dtypes=(torch.bfloat16,),
        bias_dtypes=(None,), multiple_of=(1, 16, 16), layouts=("rows",), offsets=False, says_scaling=False,
    )  # fmt: skip
    check_matmul(scaled_mm, supports, device="cuda", examples=40)


def test_the_example() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "pytest", "examples", "-rP", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, env=environment)
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert done.stdout.index("_ test_kernel[without_tail] _") < done.stdout.index("= PASSES =")
    assert "ok    NaN and Inf" in done.stdout


def test_mutants_of_the_kernel_die() -> None:
    named = {"one skipped promotion", "wrong sign of zero", "stale output element", "swapped scales"}
    for mutant in mutants(fp8ref.scaled_matmul):
        if mutant.name in named:
            supports = Supports(out_dtypes=(torch.float32,), bias_dtypes=(None,), dtypes=((E4M3, E4M3),))
            with pytest.raises(CheckError):
                check_matmul(mutant, supports, device="cuda", examples=25, quiet=True, fail_fast=True, shrink=False)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_the_same_on_both_devices(layout: Any) -> None:
    fill = Fill(E4M3, "every", seed=3, layout=layout, offset=5)
    here, there = fill.tensor(7, 33), fill.tensor(7, 33, device="cuda")
    assert here.stride() == there.stride()
    assert_bits_equal(there.cpu().contiguous(), here.contiguous())
    with pytest.raises(ValueError, match="actual: got a tensor on cuda"):
        assert_bits_equal(there, here)
