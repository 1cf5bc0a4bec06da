"""Scale layouts of PyTorch's two functions: shapes and strides as recorded, values unmoved."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

import fp8ref

BLOCK_PAIRS = (("1x128", "1x128"), ("1x128", "128x128"))


def misread(scale: torch.Tensor, kind: str) -> bool:
    """Whether ``torch._scaled_mm`` was recorded to misread these scales [blocks along K, blocks across]."""
    return kind == "128x128" and scale.shape[0] % 4 != 0 and scale.shape[1] > 1


@given(st.integers(1, 20), st.integers(1, 300), st.integers(1, 1200), st.sampled_from(BLOCK_PAIRS))
def test_block_layouts_have_the_recorded_shapes_and_strides(
    m: int, n: int, k: int, scaling: tuple[fp8ref.Scaling, fp8ref.Scaling]
) -> None:
    count = -(-k // 128)
    columns = n if scaling[1] == "1x128" else -(-n // 128)
    scale_a, scale_b = torch.rand(m, count), torch.rand(count, columns)
    if misread(scale_b, scaling[1]):
        with pytest.raises(ValueError, match=f"scale_b: got {count} blocks along K and {columns} across"):
            fp8ref.to_torch_layout(scale_a, scale_b, scaling=scaling, function="_scaled_mm")
    else:
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
    st.integers(0, 200),
    st.integers(0, 300),
    st.integers(0, 700),
    st.sampled_from((("tensor", "tensor"), ("row", "row"), *BLOCK_PAIRS, ("128x128", "1x128"))),
    st.sampled_from(("_scaled_mm", "scaled_mm")),
)
def test_from_undoes_to(m: int, n: int, k: int, scaling: tuple[fp8ref.Scaling, fp8ref.Scaling], function: str) -> None:
    a = fp8ref.quantize(torch.rand(m, k), scaling=scaling[0])
    b = fp8ref.quantize(torch.rand(n, k), scaling=scaling[1]).t()
    assume(function == "scaled_mm" or not (misread(b.scale, scaling[1]) or misread(a.scale.t(), scaling[0])))
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


def test_square_scales_of_a() -> None:
    scale_a, scale_b = torch.rand(3, 6), torch.rand(6, 16)
    left, right = fp8ref.to_torch_layout(scale_a, scale_b, scaling=("128x128", "1x128"), function="scaled_mm")
    assert (list(left.shape), left.stride()) == ([8, 3], (1, 8))
    assert torch.equal(left[:6], scale_a.t())
    assert (list(right.shape), right.stride()) == ([16, 6], (1, 16))
    with pytest.raises(ValueError, match="scale_a: got 6 blocks along K and 3 across"):
        fp8ref.to_torch_layout(scale_a, scale_b, scaling=("128x128", "1x128"), function="_scaled_mm")
