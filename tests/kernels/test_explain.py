"""``explain``: what it refuses is what the call refuses, and what it says is what the call does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fp8ref.kernels.explain import explain
from fp8ref.kernels.pack import pack_weight

ROWS, BLOCKS = pack_weight(torch.ones(64, 300)), pack_weight(torch.ones(64, 300), "128x128")


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((torch.ones(4, 8), 3), {}, TypeError, "w: got Tensor"),
        ((ROWS, -1), {}, ValueError, "m: got -1"),
        ((ROWS, True), {}, ValueError, "m: got True"),
        ((ROWS, 3.0), {}, ValueError, "m: got 3.0"),
        ((ROWS, np.int64(3)), {}, ValueError, "m: got np.int64"),
        ((ROWS, 3), {"out_dtype": "bf16"}, TypeError, "out_dtype: got bf16"),
        ((ROWS, 3), {"out_dtype": None}, TypeError, "out_dtype: got None"),
        ((ROWS, 3), {"bias_dtype": torch.int8}, TypeError, "bias_dtype: got torch.int8"),
        ((ROWS, 3), {"batch_invariant": 1}, TypeError, "batch_invariant: got 1"),
        ((ROWS, 3), {"static": "yes"}, TypeError, "static: got 'yes'"),
        ((BLOCKS, 3), {"static": True}, ValueError, "static: got True beside a weight with 128x128"),
        ((BLOCKS, 3), {"activation_scaling": "row"}, ValueError, "activation_scaling: got 'row'"),
        ((ROWS, 3), {"activation_dtype": torch.int8}, TypeError, "activation_dtype: got torch.int8"),
    ],
)
def test_refusals_name_the_argument(
    arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        explain(*arguments, **options)


def test_nothing_runs_for_a_result_without_elements() -> None:
    for w, m in ((ROWS, 0), (BLOCKS, 0), (pack_weight(torch.ones(0, 5)), 3)):
        assert str(explain(w, m)).count("no kernel runs, for the result has no elements") == 2
    assert "no kernel" not in str(explain(pack_weight(torch.ones(5, 0)), 3))


def test_the_quantiser_of_each_kind() -> None:
    said = {
        "one Triton kernel, 3 x 1": explain(ROWS, 3),
        "the scale given": explain(ROWS, 3, static=True),
        "two Triton kernels: absmax of all of x": explain(ROWS, 3, activation_scaling="tensor"),
        "of e5m2": explain(ROWS, 3, activation_dtype=torch.float8_e5m2),
        "3 rows in blocks of 128": explain(BLOCKS, 3),
    }
    for words, found in said.items():
        assert words in found.text.splitlines()[2]
