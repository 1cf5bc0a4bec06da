"""A suite built on the kit kills every mutant; the mutants are wrong in the way that they say."""

from __future__ import annotations

import pytest
import torch

import fp8ref
from fp8ref.testing import CheckError, Mutant, Supports, check_matmul, mutants

ALL = mutants(fp8ref.emulate_matmul)
# What no tolerance of an unknown order can tell: other orders of the same additions and scales, another NaN.
WITHIN_BOUND = {
    "scales in the other order",
    "promotion every 64",
    "never fast accumulation",
    "k taken backwards",
    "split K when the batch is small",
    "bias in an FMA",
    "another NaN",
}


# The property that is made for a fault; random cases find the others.
MADE_FOR = {
    "writes beside its operand": "guard bands",
    "changes its operand": "guard bands",
    "one skipped promotion": "accumulation",
    "total kept in bf16": "accumulation",
    "FP8 rounded by way of bf16": "output rounding",
    "output truncated": "output rounding",
    "one scale for the batch": "scale order",
    "swapped scales": "scale order",
    "first scale for all": "scale order",
    "promotion every 64": "accumulation",
    "always fast accumulation": "accumulation",
    "never fast accumulation": "accumulation",
    "split K when the batch is small": "accumulation",
    "k taken backwards": "accumulation",
    "scales in the other order": "scale order",
    "bias in an FMA": "bias",
    "bias added after rounding": "bias",
    "FP8 saturation missing": "overflow",
    "saturation instead of Inf": "overflow",
    "subnormal operands flushed": "subnormals",
    "wrong sign of zero": "exact data",
    "another NaN": "NaN and Inf",
    "NaN read as a number": "NaN and Inf",
    "NaN and Inf dropped": "NaN and Inf",
    "NaN spreads to batch mates": "batch invariance",
    "stale output element": "poisoned output",
    "another bit now and then": "repeated runs",
    "dropped K tail": "tails",
    "strides ignored": "strides and offsets",
    "storage offset rounded down": "strides and offsets",
}


def kill(mutant: Mutant, **options: object) -> str:
    """Check the property made for a mutant; return how it failed."""
    named = [MADE_FOR.get(mutant.name, "random cases")]
    with pytest.raises(CheckError) as caught:
        check_matmul(mutant, examples=600, quiet=True, properties=named, shrink=False, **options)  # type: ignore[arg-type]
    return caught.value.findings[-1].failure


@pytest.mark.parametrize("mutant", ALL, ids=lambda mutant: mutant.name)
def test_every_mutant_is_killed(mutant: Mutant) -> None:
    failure = kill(mutant)
    # Killed for its result, not because the mutant itself broke down.
    assert any(word in failure for word in ("elements differ", "overwritten")), failure


@pytest.mark.parametrize("mutant", [one for one in ALL if one.name not in WITHIN_BOUND], ids=lambda mutant: mutant.name)
def test_a_derived_bound_kills_all_but_other_orders(mutant: Mutant) -> None:
    failure = kill(mutant, expect="bound")
    assert any(word in failure for word in ("elements differ", "overwritten", "outside their bound")), failure


def test_there_are_many_with_names_of_their_own() -> None:
    names = [one.name for one in ALL]
    assert len(names) >= 15
    assert len(set(names)) == len(names)


def test_those_that_cannot_show_are_left_out() -> None:
    plain = Supports(
        scalings=(("tensor", "tensor"),), out_dtypes=(torch.float32,), bias_dtypes=(None,), specials=False,
        use_fast_accum=(False,), offsets=False, layouts=("rows",), multiple_of=(1, 16, 128), largest=(1, 128, 128),
    )  # fmt: skip
    assert {one.name for one in mutants(fp8ref.emulate_matmul, plain)} == {
        "zeroed output",
        "flipped sign",
        "writes beside its operand",
        "changes its operand",
        "scales in the other order",
        "k taken backwards",
        "fp32 product of dequantised operands",
        "subnormal operands flushed",
        "wrong sign of zero",
        "stale output element",
        "another bit now and then",
    }


def test_a_mutant_counts_its_calls() -> None:
    mutant = mutants(fp8ref.emulate_matmul)[0]
    a, one = torch.ones(1, 1).to(torch.float8_e4m3fn), torch.ones(())
    mutant(a, a, one, one)
    assert mutant.calls == 1
