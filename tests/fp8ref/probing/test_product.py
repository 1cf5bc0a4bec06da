"""Is it all of a @ b: products that a callable leaves out are found, wherever they lie."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fp8ref import ProbeError, accumulate, emulate_matmul, probe
from fp8ref.probing.product import never_added
from fp8ref.probing.subject import Subject


@given(data=st.data(), m=st.integers(1, 9), n=st.integers(1, 9), k=st.integers(1, 300))
def test_every_place_that_does_not_count_is_found(data: st.DataObject, m: int, n: int, k: int) -> None:
    places = sorted(data.draw(st.sets(st.integers(0, k - 1), max_size=k)))

    def product(a: Tensor, b: Tensor) -> Tensor:
        a = a.float()
        a[:, places] = 0.0
        return a @ b.float()

    assert never_added(Subject(product, m, n, k)) == places


@pytest.mark.parametrize("factor", [0.5, 2.0, -1.0, float("nan")])
def test_what_is_no_product_leaves_nothing_out(factor: float) -> None:
    """It is refused for what it is."""
    subject = Subject(lambda a, b: a.float() @ b.float() * factor, 4, 4, 64)
    assert never_added(subject) == []
    with pytest.raises(ProbeError, match="a product of ones and zeros came out wrong"):
        probe(subject.call, k=64)


@pytest.mark.parametrize(("left_out", "fast"), [(1, True), (16, False), (100, True)])
def test_a_tail_that_is_left_out_is_a_finding(left_out: int, fast: bool) -> None:
    """cuBLASLt does it, benchmarks/split_k_tail.py; the rest is found as ever."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return accumulate(a[:, :-left_out], b[:-left_out], use_fast_accum=fast)

    report = probe(product, k=400, elements=8192)
    kept = 400 - left_out
    assert report["never added"] == left_out
    assert f"the products at k = {kept} to 399, the end of K" in str(report)
    assert (report.known_as, report.equal) == ("sm90", True)
    assert f"accumulate(a[:, :{kept}], b[:{kept}], unit='sm90'" in str(report.reproduced_by)


def test_a_tail_is_left_out_beside_scales_too() -> None:
    def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return emulate_matmul(a[:, :-16], b[:-16], scale_a, scale_b, scaling=("row", "row"))

    report = probe(product, k=272, scaling=("row", "row"), elements=8192)
    assert (report["never added"], report["scales"], report.equal) == (16, ["(acc * scale_b) * scale_a"], True)


@pytest.mark.parametrize(
    ("places", "options", "message"),
    [
        ([3], {}, r"1 of 128 products are never added, those at k = 3$"),
        (list(range(0, 128, 8)), {}, r"16 of 128 products .* k = 0, 8, 16, 24, 32, 40, 48, 56, \.\.\.$"),
        (list(range(60, 128)), {}, r"68 of 128 products"),
        ([127], {"scaling": ("1x128", "1x128")}, r"1 of 128 products .* k = 127"),
    ],
)
def test_other_places_are_named(places: list[int], options: dict[str, Any], message: str) -> None:
    def product(a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        a = a.float()
        a[:, places] = 0.0
        return a @ b.float()

    with pytest.raises(ProbeError, match=message):
        probe(product, k=128, **options)
