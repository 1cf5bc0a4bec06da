"""What a tree of additions says: steps, instructions, promotion, parts of K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fp8ref.probing.subject import Subject
from fp8ref.probing.tree import Masks, Node, NotATreeError, all_leaves, sizes, window_tree

WINDOW = 64
"""Products among which every pair is asked."""
FINE = 512
"""Products that are placed one by one; beyond, one in every tile of :data:`TILE`."""
TILE = 128


@dataclass(frozen=True)
class Structure:
    """The order of additions.

    Attributes:
        exact: nothing is ever lost: one precise sum, or one wider than the operands can show.
        steps: the products of the first steps, in the order the chain takes them.
        products_per_step: L.
        chains: lengths in K of the sums that start from +0 and are added to a total: promotion, then parts of K. Empty:
            one chain over all of K.
        parts: where K is cut into parts, as (start, stop); one where it is not.
        tree: the tree over the first products, for the report.
        groups: products that join the first one, as (number so far, first, last), in that order.
    """

    exact: bool
    steps: tuple[tuple[int, ...], ...] = ()
    products_per_step: int = 0
    chains: tuple[int, ...] = ()
    parts: tuple[tuple[int, int], ...] = ()
    tree: str = ""
    groups: tuple[tuple[int, int, int], ...] = field(default=())


def find_structure(subject: Subject, masks: Masks) -> Structure:
    """Ask for the tree over a window, then how the rest of K joins it.

    Raises:
        NotATreeError: the additions are none of the kinds that a :class:`Structure` describes.
    """
    window = min(WINDOW, subject.k)
    if _all_survive(subject, masks, window):
        return Structure(exact=True, parts=((0, subject.k),), tree=f"(0..{window - 1})")
    tree = window_tree(subject, masks, window)
    text = draw(tree)
    chain = first_chain(tree)
    steps = _split_first(chain)
    per_step = max(len(step) for step in steps)
    start = steps[0][0]
    fine = list(range(min(FINE, subject.k)))
    groups = join(subject, masks, start, fine)
    lengths = chain_lengths(groups, per_step, _whole(steps, tree, window))
    chains, parts = list(lengths), [(0, subject.k)]
    if subject.k > FINE:
        coarse = [start, *range(TILE + start, subject.k, TILE)]
        parts = _parts(subject, masks, coarse)
        chains += [parts[0][1]] if len(parts) > 1 else []
    elif lengths and lengths[-1] % TILE == 0 and lengths[-1] > TILE:
        parts = [(k, min(k + lengths[-1], subject.k)) for k in range(0, subject.k, lengths[-1])]
    summary = tuple((size, min(places), max(places)) for size, places in groups)
    return Structure(False, tuple(steps), per_step, tuple(chains), tuple(parts), text, summary)


def _all_survive(subject: Subject, masks: Masks, window: int) -> bool:
    """Whether nothing is lost between the first product and any other of the window."""
    places = list(range(window))
    return all(size == 2 for size in sizes(subject, masks, [(0, other) for other in places[1:]], places))


def first_chain(node: Node) -> list[tuple[int, ...]]:
    """The steps of the chain that holds the deepest products: each adds single products to what was before.

    Raises:
        NotATreeError: a node of another kind.
    """
    steps: list[tuple[int, ...]] = []
    while True:
        if node.leaves and len(node.nodes) <= 1:
            steps.append(node.leaves)
            if not node.nodes:
                return steps[::-1]
            node = node.nodes[0]
        elif not node.leaves and len(node.nodes) >= 2:
            steps.clear()
            node = min(node.nodes, key=lambda below: min(all_leaves(below)))
        else:
            raise NotATreeError(f"a sum of {len(node.leaves)} products and {len(node.nodes)} earlier sums")


def _split_first(chain: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """Steps of one product: the first two meet in the second step, for the first is added to nothing."""
    if len(chain) > 1 and len(chain[0]) == 2 and all(len(step) == 1 for step in chain[1:]):
        one, two = chain[0][:1], chain[0][1:]
        # Which of the two comes first does not show; the order that repeats is taken.
        return min(([one, two, *chain[1:]], [two, one, *chain[1:]]), key=lambda steps: len(period(steps)))
    return chain


def period(window: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The shortest run of steps that the window repeats, counted from k = 0: those of one instruction.

    >>> period([(0, 2), (1, 3), (4, 6), (5, 7)])
    [(0, 2), (1, 3)]
    """
    steps = list(window)
    for count in range(1, len(steps) + 1):
        length = sum(map(len, steps[:count]))
        covers = sorted(place for step in steps[:count] for place in step) == list(range(length))
        repeats = all(
            tuple(place + length for place in before) == after
            for before, after in zip(steps, steps[count:], strict=False)
        )
        if covers and repeats:
            return steps[:count]
    return steps


def _whole(steps: Sequence[tuple[int, ...]], tree: Node, window: int) -> int | None:
    """Length of the first chain where it ends within the window, else None."""
    length = sum(map(len, steps))
    return length if length < window and not tree.leaves else None


def join(subject: Subject, masks: Masks, start: int, places: Sequence[int]) -> list[tuple[int, list[int]]]:
    """In which groups ``places`` join ``start``: (products summed by then, the group)."""
    others = [place for place in places if place != start]
    if not others:
        return []
    found: dict[int, list[int]] = {}
    for place, size in zip(others, sizes(subject, masks, [(start, other) for other in others], places), strict=True):
        found.setdefault(size, []).append(place)
    groups = sorted(found.items())
    for (before, _), (size, group) in pairwise([(1, [start]), *groups]):
        if size - before != len(group):
            raise NotATreeError(f"{len(group)} products join k={start} where the sum grows from {before} to {size}")
    return groups


def chain_lengths(groups: Sequence[tuple[int, list[int]]], per_step: int, known: int | None) -> list[int]:
    """Lengths of the sums that start afresh: of the shortest, and of the sums of those.

    Args:
        groups: what :func:`join` returned.
        per_step: products in a step; a group of no more is a step, unless the first chain is ``known`` to be as short.
        known: the length of the first chain where it is known.

    Raises:
        NotATreeError: lengths of another kind.
    """
    lengths: list[int] = []
    base, total = known, 1
    for index, (size, group) in enumerate(groups):
        last = index == len(groups) - 1
        grown = size - total
        if base is None or (known is not None and total < known):
            if len(group) > per_step:
                lengths.append(total)
                base = total
        elif not lengths:
            lengths.append(base)
        if base is not None and total >= base and grown != base and not (last and grown < base):
            if grown != total:
                raise NotATreeError(f"after sums of {base} comes one of {grown}")
            base = total
            lengths.append(base)
        total = size
    return lengths


def _parts(subject: Subject, masks: Masks, coarse: list[int]) -> list[tuple[int, int]]:
    """Parts of K from one product in every tile, their borders then found exactly.

    Raises:
        NotATreeError: the parts are not added one after the other from the first.
    """
    groups = join(subject, masks, coarse[0], coarse)
    borders, rest = [], False
    for index, (_, group) in enumerate(groups):
        rest = rest or len(group) > 1
        tail = index == len(groups) - 1 and rest
        if len(group) > 1 or tail:
            if group != list(range(group[0], group[-1] + 1, TILE)):
                raise NotATreeError(f"the part from k={group[0]} to {group[-1]} has gaps")
            borders.append(group[0] // TILE * TILE)
    if not borders:
        return [(0, subject.k)]
    exact = [_border(subject, masks, coarse, border) for border in borders]
    if sorted(exact) != exact:
        raise NotATreeError(f"the parts join in another order than that of K: {exact}")
    return list(pairwise([0, *exact, subject.k]))


def _border(subject: Subject, masks: Masks, coarse: list[int], border: int) -> int:
    """The first k of the part that begins in the tile before ``border`` or at it."""
    known = border + coarse[0]
    before = [place for place in coarse if place < border]
    inside = range(before[-1] + 1, known)
    asked = sizes(subject, masks, [(place, known) for place in inside], coarse)
    # Beside another part, all that came before is lost; beside its own, at most the products since the border.
    return min([known, *(place for place, size in zip(inside, asked, strict=True) if size <= len(before))])


def draw(node: Node) -> str:
    """The tree as nested sums, runs of places shortened.

    >>> draw(Node((2, 3), (Node((0, 1), ()),)))
    '((0,1)+2,3)'
    """
    inner = "+".join(draw(below) for below in node.nodes)
    leaves = _runs(node.leaves)
    return f"({inner}{'+' if inner and leaves else ''}{leaves})"


def _runs(places: tuple[int, ...]) -> str:
    """``0..3,8`` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for place in sorted(places):
        if runs and place == runs[-1][-1] + 1:
            runs[-1].append(place)
        else:
            runs.append([place])
    return ",".join(f"{run[0]}..{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs)
