"""Infinitely precise sums of FP8 products, rounded once to fp32.

Operands are split by magnitude so that every float64 partial product sum is exact; the few float64 terms that remain
are added exactly as an expansion (Shewchuk, "Adaptive precision floating-point arithmetic", 1997).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fp8ref.emulation.bits import add_to_odd, canonical_nan, two_sum
from fp8ref.emulation.formats import E4M3

# Products of one chunk sum below 2**53 units: e4m3 by e4m3 counts units of 2**-18 below 2**18 each; the split parts
# count units of at least 2**-6, 2**-19 and 2**-32 below 2**32, 2**17 and 1 each.
_CHUNK_E4M3 = 1 << 17
_CHUNK_SPLIT = 1 << 15


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of finite FP8 values, [M, K] by [K, N]: the exact sum, rounded once to fp32 (nearest even).

    >>> a = torch.tensor([[448.0, 2.0**-9, -448.0]]).to(torch.float8_e4m3fn)
    >>> b = torch.tensor([[448.0], [2.0**-9], [448.0]]).to(torch.float8_e4m3fn)
    >>> exact_matmul(a, b).item() == 2.0**-18
    True
    """
    terms: list[Tensor] = []
    chunk = _CHUNK_E4M3 if a.dtype == b.dtype == E4M3.dtype else _CHUNK_SPLIT
    for k in range(0, a.shape[1], chunk):
        x, y = a[:, k : k + chunk].double(), b[k : k + chunk].double()
        if chunk == _CHUNK_E4M3:
            terms.append(x @ y)
            continue
        (x_high, x_low), (y_high, y_low) = _split(x), _split(y)
        terms += [x_low @ y_low, x_high @ y_low + x_low @ y_high, x_high @ y_high]
    return round_sum(terms or [torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)])


def exact_dot(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``c + sum_k a[..., k] * b[..., k]`` for any FP8 values and fp32 ``c``, rounded once to fp32.

    >>> one = torch.ones(2).to(torch.float8_e5m2)
    >>> exact_dot(one, one, torch.tensor(2.0**24 - 1)).item() == 2.0**24
    True
    """
    products = a.double() * b.double()
    addend = c.double().expand(torch.broadcast_shapes(c.shape, products.shape[:-1]))
    terms = [*(products[..., k] for k in range(products.shape[-1])), addend]
    finite = round_sum([torch.where(t.isfinite(), t, 0.0) for t in terms])
    specials = sum((torch.where(t.isfinite(), 0.0, t) for t in terms), torch.zeros_like(addend))
    return canonical_nan(torch.where(specials == 0, finite, specials.float()))


def round_sum(terms: Sequence[Tensor]) -> Tensor:
    """The exact sum of float64 terms, rounded once to fp32 (nearest even); a zero sum is +0.

    >>> big, tiny = torch.tensor(2.0**60, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64)
    >>> round_sum([big, tiny, -big]).item()
    1.0
    """
    if len(terms) == 1:
        return terms[0].float() + 0.0
    expansion: list[Tensor] = []
    for term in terms:
        carry = term
        for i, part in enumerate(expansion):
            carry, expansion[i] = two_sum(carry, part)
        expansion.append(carry)
    total = torch.zeros_like(expansion[-1])
    for part in expansion:
        total = add_to_odd(total, part)
    return total.float() + 0.0


def _split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Operands of magnitude 1 and more, and those below."""
    high = torch.where(x.abs() >= 1, x, 0.0)
    return high, x - high
