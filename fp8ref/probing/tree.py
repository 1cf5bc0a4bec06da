"""The tree of additions behind a sum, read from what is lost beside a large value that cancels later.

Put +M at i and -M at j and a small s elsewhere: every s that meets M before M cancels is lost, that is every s below
the lowest node above both i and j; the others survive and are counted in the result. (The idea of masked counting is
that of FPRev, Xie et al., 2024; nodes here may add any number of terms.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8ref.probing.subject import ProbeError, Range, Subject, factors, range_of


class NotATreeError(Exception):
    """The answers fit no tree of additions."""


@dataclass(frozen=True)
class Masks:
    """What the questions are asked with: M = 2**big, s = 2**small, at most ``capacity`` of them in one sum."""

    big: int
    small: int
    capacity: int
    left: Range
    right: Range

    @property
    def ratio(self) -> int:
        """log2 of M / s: bits that a lost s proves to be missing."""
        return self.big - self.small


SMALLEST = {torch.bfloat16: -133, torch.float16: -24, torch.float8_e4m3fn: -9, torch.float8_e5m2: -16}
"""Exponents of the smallest values of output types; fp32 otherwise."""


def choose_masks(subject: Subject, out: torch.dtype) -> Masks:
    """The largest M that comes and goes without overflow, the smallest s that is seen, and how many add up exactly.

    Raises:
        ProbeError: no such pair.
    """
    left, right = range_of(subject.dtype_a), range_of(subject.dtype_b)
    floor = SMALLEST.get(out, -149) - subject.lift
    last = subject.k - 1
    top, bottom = left.high + right.high, left.lowest + right.lowest
    ends = [0, 1, last // 2, last]
    for big in dict.fromkeys((top, 14, 12, 8, 6)):
        if big > top:
            continue
        plus = factors(big, 1.0, left, right)
        minus = (-plus[0], plus[1])
        if all(v == 0 for v in subject.ask([{0: plus, place: minus} for place in ends[1:] if place])):
            break
    else:
        raise ProbeError("large products do not cancel at any size: this is no sum of products")
    normal = max(left.low + right.low, floor)
    # The least that an fp16 accumulator holds comes before giving up on small values.
    lows = [max(bottom, floor), normal, normal + 2, *([-24] if normal + 2 < -24 else []), 0]
    for small in lows:
        value = factors(small, 1.0, left, right)
        if all(v == 2.0**small for v in subject.ask([{place: value} for place in ends])):
            break
    else:
        raise ProbeError("a single product does not come out as itself: the callable scales or changes its operands")
    capacity = _capacity(subject, factors(small, 1.0, left, right), 2.0**small)
    absorbed = max(1, 2 ** max(0, big - 26 - small))
    return Masks(big, small, min(capacity, absorbed, 256), left, right)


def _capacity(subject: Subject, value: tuple[float, float], small: float) -> int:
    """How many s add up exactly, wherever they lie: a power of two."""
    counts = sorted({c for e in range(1, 10) for c in (2**e - 1, 2**e, 2**e + 1) if c <= subject.k})
    stride = [max(1, subject.k // count) for count in counts]
    dense = subject.ask([dict.fromkeys(range(count), value) for count in counts])
    spread = subject.ask([{i * step: value for i in range(count)} for count, step in zip(counts, stride, strict=True)])
    good = 1
    for count, one, two in zip(counts, dense, spread, strict=True):
        if one != count * small or two != count * small:
            break
        good = count
    return 1 << (good.bit_length() - 1)


def sizes(subject: Subject, masks: Masks, pairs: Sequence[tuple[int, int]], within: Sequence[int]) -> list[int]:
    """For each pair (i, j): how many of the leaves ``within`` lie below the lowest node above both, i and j counted.

    Raises:
        NotATreeError: a result that no number of surviving s explains.
    """
    plus, low = factors(masks.big, 1.0, masks.left, masks.right), factors(masks.small, 1.0, masks.left, masks.right)
    leaves = torch.tensor(within)
    chunks = leaves.split(masks.capacity)
    found = [len(within)] * len(pairs)
    batch = max(1, 2**22 // subject.k)
    jobs = [(index, chunk) for index in range(len(pairs)) for chunk in chunks]
    for first in range(0, len(jobs), batch):
        part = jobs[first : first + batch]
        x, y = torch.zeros(len(part), subject.k), torch.zeros(len(part), subject.k)
        for row, (index, chunk) in enumerate(part):
            x[row, chunk], y[row, chunk] = low
            i, j = pairs[index]
            x[row, i], x[row, j] = plus[0], -plus[0]
            y[row, i] = y[row, j] = plus[1]
        for (index, chunk), value in zip(part, subject.sums(x, y).double().tolist(), strict=True):
            survivors = value / 2.0**masks.small
            if not (survivors.is_integer() and 0 <= survivors <= len(chunk)):
                raise NotATreeError(
                    f"M at k={pairs[index][0]}, -M at k={pairs[index][1]}: {survivors} of {len(chunk)} left"
                )
            found[index] -= int(survivors)
    return found


@dataclass(frozen=True)
class Node:
    """One addition of single products and of results of earlier additions."""

    leaves: tuple[int, ...]
    nodes: tuple[Node, ...]

    @property
    def size(self) -> int:
        """Products below."""
        return len(self.leaves) + sum(node.size for node in self.nodes)


def all_leaves(node: Node) -> list[int]:
    """Every product below, in rising order."""
    return sorted([*node.leaves, *(leaf for below in node.nodes for leaf in all_leaves(below))])


def window_tree(subject: Subject, masks: Masks, window: int) -> Node:
    """The tree over the first ``window`` products, every pair asked.

    Raises:
        NotATreeError: the answers contradict each other.
    """
    places = list(range(window))
    pairs = [(i, j) for i in places for j in places[i + 1 :]]
    answers = dict(zip(pairs, sizes(subject, masks, pairs, places), strict=True))
    return _grow(places, {**answers, **{(j, i): size for (i, j), size in answers.items()}})


def _grow(places: list[int], size: dict[tuple[int, int], int]) -> Node:
    """The node over ``places``: two of them lie under the same child where their lowest node is smaller than all."""
    rest, groups = list(places), []
    while rest:
        one = rest[0]
        group = [one, *(other for other in rest[1:] if size[one, other] < len(places))]
        groups.append(group)
        rest = [place for place in rest if place not in group]
    if len(groups) < 2:
        raise NotATreeError(f"the products {places[:8]}... are never all together")
    for index, group in enumerate(groups):
        if any(size[i, j] != len(places) for i in group for other in groups[index + 1 :] for j in other):
            raise NotATreeError(f"k={group[0]} meets its neighbours in more than one place")
    return Node(
        tuple(group[0] for group in groups if len(group) == 1),
        tuple(_grow(group, size) for group in groups if len(group) > 1),
    )
