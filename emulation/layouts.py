"""Scales in the memory layouts that PyTorch's two scaled products want, which differ from each other.

The oracle takes one form: ``scale_a`` [M, ceil(K/128)] and ``scale_b`` [ceil(K/128), N] or [ceil(K/128), ceil(N/128)],
any strides. PyTorch wants (recorded on an H200, ``tests/golden/record.py``):

=============================  ===========================  ==========================================
kind                           ``torch._scaled_mm``         ``torch.nn.functional.scaled_mm``
=============================  ===========================  ==========================================
1x128 of a                     [M, B], strides (1, M)       [M, B], strides (1, M)
1x128 of b                     [B, N], strides (N, 1)       [N, B], strides (1, N)
128x128 of b                   [B, ceil(N/128)], strides    [B', ceil(N/128)], strides (1, B'), B' being
                               (1, B)                       B rounded up to a multiple of 4
=============================  ===========================  ==========================================

with B = ceil(K/128). Row-wise and one-element scales are contiguous in both.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

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
        TypeError, ValueError: not tensors, an unknown pair of kinds or function, block scales that are not matrices.

    >>> sa, sb = to_torch_layout(torch.ones(5, 3), torch.ones(3, 2), scaling=("1x128", "128x128"), function="scaled_mm")
    >>> sa.stride(), sb.shape, sb.stride()
    ((1, 5), torch.Size([4, 2]), (1, 4))
    """
    left, right = _check(scale_a, scale_b, scaling, function)
    if scaling[0] != "1x128":
        return left.contiguous(), right.contiguous()
    left = left.t().contiguous().t()
    if scaling[1] == "1x128":
        right = right.contiguous()
        return left, right if function == "_scaled_mm" else right.t()
    if function == "scaled_mm":
        right = torch.nn.functional.pad(right, (0, 0, 0, -right.shape[0] % _ALIGNED_BLOCKS))
    return left, right.t().contiguous().t()


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

    >>> pair = ("1x128", "1x128")
    >>> sa, sb = from_torch_layout(torch.ones(5, 3), torch.ones(16, 3), scaling=pair, function="scaled_mm")
    >>> sb.shape
    torch.Size([3, 16])
    """
    left, right = _check(scale_a, scale_b, scaling, function)
    if scaling[0] == "1x128" and function == "scaled_mm":
        right = right.t() if scaling[1] == "1x128" else right[: left.shape[1]]
    return left, right


def _check(scale_a: object, scale_b: object, scaling: object, function: object) -> tuple[Tensor, Tensor]:
    pair = check_pair(scaling)
    if function not in get_args(TorchFunction):
        raise ValueError(f"function: got {function!r}; give one of {list(get_args(TorchFunction))}")
    left, right = check_tensor(scale_a, "scale_a"), check_tensor(scale_b, "scale_b")
    for argument, scale in (("scale_a", left), ("scale_b", right)):
        if pair[0] == "1x128" and scale.dim() != 2:
            raise ValueError(f"{argument}: got shape {list(scale.shape)}; block scales are matrices")
    return left, right
