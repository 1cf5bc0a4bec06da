"""Whether a callable returns a @ b: all of it, for a kernel may leave out a tail, and one library does."""

from __future__ import annotations

import torch

from fp8ref.probing.subject import ProbeError, Subject

_NAMED = 8


def never_added(subject: Subject) -> list[int]:
    """The places along K whose products never reach the result; none where the callable is no product at all.

    Ones in row i of a and column j of b at two places of K, others for every i and j, must count 2; what counts less is
    asked again one by one.
    """
    asked = list(range(subject.k))
    for each in (2, 1):
        at_once = each * subject.m * subject.n
        short: list[int] = []
        for first in range(0, len(asked), at_once):
            places = torch.tensor(asked[first : first + at_once])
            index = torch.arange(len(places))
            rows, columns = index % subject.m, index // subject.m % subject.n
            x, y = torch.zeros(subject.m, subject.k), torch.zeros(subject.n, subject.k)
            x[rows, places] = y[columns, places] = 1.0
            wanted = x @ y.t()
            seen = subject.multiply(*subject.operands(x, y)).float().cpu()
            if not bool(((seen >= 0) & (seen <= wanted) & (seen == seen.round())).all()):
                return []
            short += places[(seen < wanted)[rows, columns]].tolist()
        asked = short
    return asked


def leave_out_tail(subject: Subject, places: list[int], *, blocks: bool) -> None:
    """Probe the rest of K where the last places do not count; from then on every call has ones there.

    Raises:
        ProbeError: other places do not count, or with block scales.
    """
    if not places:
        return
    whole, count = subject.k, len(places)
    if blocks or whole - count < 64 or places != list(range(whole - count, whole)):
        named = ", ".join(map(str, places[:_NAMED])) + (", ..." if count > _NAMED else "")
        raise ProbeError(
            f"the callable does not return a @ b: {count} of {whole} products are never added, those at k = {named}"
        )
    subject.k, subject.tail = whole - count, count


def check_product(subject: Subject) -> torch.dtype:
    """The output type; refuses what is no product of a and b, or not the same twice.

    Raises:
        ProbeError: says which.
    """
    generator = torch.Generator().manual_seed(1)
    x, y = torch.zeros(subject.m, subject.k), torch.zeros(subject.n, subject.k)
    for row in range(subject.m):
        x[row, torch.randint(0, subject.k, (2,), generator=generator)] = 1.0
    y[torch.rand(y.shape, generator=generator) < 0.5] = 1.0
    y[:, 0] = 1.0
    first = subject.multiply(*subject.operands(x, y))
    if not torch.equal(first.double().cpu(), (x @ y.t()).double()):
        raise ProbeError(
            "the callable does not return a @ b: a product of ones and zeros came out wrong. It is called with a "
            "[M, K] and b [K, N]; a callable that wants b as [N, K] needs a wrapper"
        )
    noise = [torch.randn(t.shape, generator=generator) for t in (x, y)]
    a, b = subject.operands(noise[0], noise[1])
    one, two = subject.multiply_untouched(a, b), subject.multiply(a, b)
    if not torch.equal(one.double(), two.double()):
        count = int((one.double() != two.double()).sum())
        raise ProbeError(
            f"the callable is not deterministic: {count} of {one.numel()} outputs differ between two calls"
        )
    return first.dtype
