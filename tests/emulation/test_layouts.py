"""Scale layouts of PyTorch's two functions: shapes and strides as recorded, values unmoved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fp8ref

BLOCK_PAIRS = (("1x128", "1x128"), ("1x128", "128x128"))


@given(st.integers(1, 20), st.integers(1, 300), st.integers(1, 1200), st.sampled_from(BLOCK_PAIRS))
def test_block_layouts_have_the_recorded_shapes_and_strides(
    m: int, n: int, k: int, scaling: tuple[fp8ref.Scaling, fp8ref.Scaling]
) -> None:
    count = -(-k // 128)
    columns = n if scaling[1] == "1x128" else -(-n // 128)
    scale_a, scale_b = torch.rand(m, count), torch.rand(count, columns)
    left, right = fp8ref.to_torch_layout(scale_a, scale_b, scaling=scaling, function="_scaled_mm")
    assert torch.equal(left, scale_a)
    assert torch.equal(right, scale_b)
    assert torch.as_strided(left, (m, count), (1, m)).equal(scale_a)
    strides = (n, 1) if scaling[1] == "1x128" else (1, count)
    assert torch.as_strided(right, (count, columns), strides).equal(scale_b)
    left, right = fp8ref.to_torch_layout(scale_a, scale_b, scaling=scaling, function="scaled_mm")
    assert torch.as_strided(left, (m, count), (1, m)).equal(scale_a)
    if scaling[1] == "1x128":
        assert list(right.shape) == [n, count]
        assert torch.as_strided(right, (n, count), (1, n)).equal(scale_b.t())
    else:
        padded = -(-count // 4) * 4
        assert list(right.shape) == [padded, columns]
        assert torch.as_strided(right, (count, columns), (1, padded)).equal(scale_b)
        assert not right[count:].any()


@given(
    st.integers(0, 5),
    st.integers(0, 300),
    st.integers(0, 700),
    st.sampled_from((("tensor", "tensor"), ("row", "row"), *BLOCK_PAIRS)),
    st.sampled_from(("_scaled_mm", "scaled_mm")),
)
def test_from_undoes_to(m: int, n: int, k: int, scaling: tuple[fp8ref.Scaling, fp8ref.Scaling], function: str) -> None:
    a = fp8ref.quantize(torch.rand(m, k), scaling=scaling[0])
    b = fp8ref.quantize(torch.rand(n, k), scaling=scaling[1]).t()
    there = fp8ref.to_torch_layout(a.scale, b.scale, scaling=scaling, function=function)  # type: ignore[arg-type]
    back = fp8ref.from_torch_layout(*there, scaling=scaling, function=function)  # type: ignore[arg-type]
    assert torch.equal(back[0], a.scale)
    assert torch.equal(back[1], b.scale)


def test_errors_name_the_argument() -> None:
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"scaling: got \('row', 'tensor'\)"):
        fp8ref.to_torch_layout(one, one, scaling=("row", "tensor"), function="scaled_mm")
    with pytest.raises(ValueError, match="function: got 'mm'"):
        fp8ref.to_torch_layout(one, one, scaling=("row", "row"), function="mm")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"scale_a: got shape \[1\]"):
        fp8ref.to_torch_layout(one, one, scaling=("1x128", "1x128"), function="scaled_mm")
    with pytest.raises(TypeError, match="scale_b: got float"):
        fp8ref.from_torch_layout(one, 1.0, scaling=("row", "row"), function="scaled_mm")  # type: ignore[arg-type]
