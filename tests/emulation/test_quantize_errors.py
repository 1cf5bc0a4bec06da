"""What quantize and dequantize refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fp8ref.emulation.quantize import dequantize, quantize

E4M3 = torch.float8_e4m3fn
X = torch.ones(3, 200)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, r"x: got torch\.int64; give", {"x": X.long()}),
        (TypeError, r"x: got torch\.float8_e4m3fn; give", {"x": X.to(E4M3)}),
        (ValueError, r"x: got shape \[\]", {"x": torch.tensor(1.0)}),
        (ValueError, r"x: got shape \[2, 3, 4\]; '128x128'", {"x": torch.ones(2, 3, 4), "scaling": "128x128"}),
        (TypeError, r"dtype: got torch\.float16", {"dtype": torch.float16}),
        (ValueError, r"scaling: got 'column'; give one of", {"scaling": "column"}),
        (ValueError, r"scale_format: got 'e8m0'; give", {"scale_format": "e8m0"}),
        (ValueError, r"absmax_bound: got 0\.0; give", {"absmax_bound": 0.0}),
        (ValueError, r"absmax_bound: got nan; give", {"absmax_bound": math.nan}),
        (TypeError, r"absmax_bound: got '1'; give", {"absmax_bound": "1"}),
        (ValueError, r"absmax_bound: got 2\.0 beside a given scale", {"absmax_bound": 2.0, "scale": 1.0}),
        (ValueError, r"scale_format: got 'ue8m0' beside a given scale", {"scale_format": "ue8m0", "scale": 1.0}),
        (TypeError, r"scale: got torch\.float64; scales are torch\.float32", {"scale": torch.tensor(1.0).double()}),
        (TypeError, r"scale: got list; give", {"scale": [1.0]}),
        (
            ValueError,
            r"scale: got shape \[\]; 'row' scales of \[3, 200\] are \[3, 1\]",
            {"scale": 1.0, "scaling": "row"},
        ),
        (ValueError, r"scale: got shape \[2\]; 'tensor'", {"scale": torch.ones(2)}),
        (ValueError, r"scale: got shape \[3, 1\]; '1x128'.*\[3, 2\]", {"scale": torch.ones(3, 1), "scaling": "1x128"}),
        (ValueError, r"scale: got shape \[3, 2\]; '128.*\[1, 2\]", {"scale": torch.ones(3, 2), "scaling": "128x128"}),
        (ValueError, r"scale: got -1\.0 among", {"scale": -1.0}),
        (ValueError, r"scale: got 0\.0 among its values; give finite scales above zero", {"scale": 0.0}),
        (ValueError, r"scale: got nan among", {"scale": math.nan}),
        (ValueError, r"scale: got -0\.0 among", {"scale": torch.tensor([[1.0], [-0.0], [2.0]]), "scaling": "row"}),
        # Beyond fp32 it is Inf, below it 0.
        (ValueError, r"scale: got inf among", {"scale": 1e300}),
        (ValueError, r"scale: got 0\.0 among", {"scale": 1e-300}),
    ],
)
def test_errors_name_the_argument_what_it_got_and_the_fix(
    error: type[Exception], message: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(error, match=message):
        quantize(**{"x": X, **arguments})


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        (r"q: got Tensor; give what fp8ref\.quantize returned", (X,)),
        (r"dtype: got torch\.int32; give one of", (quantize(X), torch.int32)),
        (r"dtype: got torch\.float8_e4m3fn; give one of", (quantize(X), E4M3)),
    ],
)
def test_dequantize_refuses(message: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError, match=message):
        dequantize(*arguments)
