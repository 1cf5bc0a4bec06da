"""Scales in the memory layouts that PyTorch's two scaled products want, which differ from each other.

The oracle takes one form: ``scale_a`` [M, ceil(K/128)] and ``scale_b`` [ceil(K/128), N] or [ceil(K/128), ceil(N/128)],
any strides. PyTorch wants (recorded on an H200, ``tests/golden/record.py``):

==================  ==================================  ===================================================
kind                ``torch._scaled_mm``                ``torch.nn.functional.scaled_mm``
==================  ==================================  ===================================================
1x128 of a          [M, B], strides (1, M)              [M, B], strides (1, M)
1x128 of b          [B, N], strides (N, 1)              [N, B], strides (1, N)
128x128 of b        [B, ceil(N/128)], strides (1, B)    [B', ceil(N/128)], strides (1, B')
128x128 of a        [ceil(M/128), B], strides (B, 1)    [B', ceil(M/128)], strides (1, B')
==================  ==================================  ===================================================

with B = ceil(K/128) and B' = B rounded up to a multiple of 4. Row-wise and one-element scales are contiguous in both.
``torch._scaled_mm`` reads 128x128 scales with the stride B' although it demands B (torch 2.11.0, same recording): where
the two differ and there is more than one block beside K it returns wrong results without a word.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor
from torch.nn.functional import pad

from fp8ref.emulation.checks import check_tensor
from fp8ref.emulation.scales import Scaling, check_pair

TorchFunction = Literal["_scaled_mm", "scaled_mm"]
_ALIGNED_BLOCKS = 4


def to_torch_layout(
    scale_a: Tensor, scale_b: Tensor, *, scaling: tuple[Scaling, Scaling], function: TorchFunction
) -> tuple[Tensor, Tensor]:
    """Lay out the oracle's scales for ``torch._scaled_mm`` or ``torch.nn.functional.scaled_mm``.

    Args:
        scale_a: fp32 scales of ``a`` as :func:`fp8ref.emulate_matmul` takes them.
        scale_b: fp32 scales of ``b``, likewise.
        scaling: the pair of kinds.
        function: ``"_scaled_mm"`` or ``"scaled_mm"``.

    Returns:
        The two scales, copied where the layout differs; padding is zero.

    Raises:
        TypeError, ValueError: not tensors, an unknown pair of kinds or function, block scales that are not matrices, or
            128x128 scales that ``torch._scaled_mm`` would misread (see above).

    >>> import torch
    >>> sa, sb = to_torch_layout(torch.ones(5, 3), torch.ones(3, 2), scaling=("1x128", "128x128"), function="scaled_mm")
    >>> sa.stride(), sb.shape, sb.stride()
    ((1, 5), torch.Size([4, 2]), (1, 4))
    """
    left, right = _check(scale_a, scale_b, scaling, function)
    if "1x128" not in scaling:
        return left.contiguous(), right.contiguous()
    if scaling[0] == "1x128":
        left = left.t().contiguous().t()
    else:
        left = _square(left.t(), function, "scale_a")
        left = left.t() if function == "_scaled_mm" else left
    if scaling[1] == "128x128":
        return left, _square(right, function, "scale_b")
    right = right.contiguous()
    return left, right if function == "_scaled_mm" else right.t()


def _square(scale: Tensor, function: str, argument: str) -> Tensor:
    """128x128 scales [B, blocks] with K running fastest in memory, padded where the function wants that."""
    missing = -scale.shape[0] % _ALIGNED_BLOCKS
    if function == "_scaled_mm" and missing and scale.shape[1] > 1:
        raise ValueError(
            f"{argument}: got {scale.shape[0]} blocks along K and {scale.shape[1]} across; torch._scaled_mm reads such "
            "128x128 scales at a wrong stride and returns wrong results; use torch.nn.functional.scaled_mm, or K of a "
            "multiple of 4 blocks"
        )
    if function == "scaled_mm":
        scale = pad(scale, (0, 0, 0, missing))
    return scale.t().contiguous().t()


def from_torch_layout(
    scale_a: Tensor, scale_b: Tensor, *, scaling: tuple[Scaling, Scaling], function: TorchFunction
) -> tuple[Tensor, Tensor]:
    """Undo :func:`to_torch_layout`: views of scales given to PyTorch, in the form that the oracle takes.

    Args:
        scale_a: fp32 scales as ``function`` takes them.
        scale_b: likewise.
        scaling: the pair of kinds.
        function: ``"_scaled_mm"`` or ``"scaled_mm"``.

    Raises:
        TypeError, ValueError: as :func:`to_torch_layout`.

    >>> import torch
    >>> pair = ("1x128", "1x128")
    >>> sa, sb = from_torch_layout(torch.ones(5, 3), torch.ones(16, 3), scaling=pair, function="scaled_mm")
    >>> sb.shape
    torch.Size([3, 16])
    """
    left, right = _check(scale_a, scale_b, scaling, function)
    if function == "_scaled_mm" or "1x128" not in scaling:
        return left, right
    if scaling[1] == "1x128":
        right = right.t()
    if scaling[0] == "128x128":
        left = left[: right.shape[0]].t()
    if scaling[1] == "128x128":
        right = right[: left.shape[1]]
    return left, right


def _check(scale_a: object, scale_b: object, scaling: object, function: object) -> tuple[Tensor, Tensor]:
    pair = check_pair(scaling)
    if function not in get_args(TorchFunction):
        raise ValueError(f"function: got {function!r}; give one of {list(get_args(TorchFunction))}")
    left, right = check_tensor(scale_a, "scale_a"), check_tensor(scale_b, "scale_b")
    for argument, scale in (("scale_a", left), ("scale_b", right)):
        if "1x128" in pair and scale.dim() != 2:
            raise ValueError(f"{argument}: got shape {list(scale.shape)}; block scales are matrices")
    return left, right
