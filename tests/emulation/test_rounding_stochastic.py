"""Stochastic rounding, by the exact count of random numbers that round up, and what a generator decides."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import islice

import numpy as np
import pytest
import torch
from gfloat import RoundMode, encode_ndarray, round_ndarray  # type: ignore[import-untyped]
from gfloat.formats import format_info_ocp_e4m3, format_info_ocp_e5m2  # type: ignore[import-untyped]
from torch import Tensor

from fp8ref.emulation.rounding import RANDOM_BITS, round_to_fp8
from reference.fp8_tables import NAN_CODE, TABLES, Place, Table, place, rounded
from reference.rounding_inputs import SOURCES, boundary_inputs, boundary_places

each_table = pytest.mark.parametrize("table", TABLES.values(), ids=list(TABLES))
each_source = pytest.mark.parametrize("source", SOURCES, ids=str)


def codes_of(x: Tensor) -> list[int]:
    """The codes of an FP8 tensor, in row-major order."""
    return [int(code) for code in x.contiguous().view(torch.uint8).flatten().tolist()]


def stochastic(x: Tensor, table: Table, *, saturate: bool = True, seed: int = 0) -> Tensor:
    """Round with a generator of its own."""
    generator = torch.Generator().manual_seed(seed)
    return round_to_fp8(x, table.dtype, rounding="stochastic", saturate=saturate, generator=generator)


def drawn(count: int, seed: int = 0) -> Tensor:
    """The random numbers, int64, that ``stochastic`` sees with the same seed."""
    generator = torch.Generator().manual_seed(seed)
    return torch.empty(count, dtype=torch.int64).random_(0, 1 << RANDOM_BITS, generator=generator)


def codes_with_randoms(monkeypatch: pytest.MonkeyPatch, x: Tensor, table: Table, randoms: list[int]) -> list[int]:
    """Round not saturating, ``randoms`` taking the place of what the generator would draw."""
    remaining = iter(randoms)

    def forced(target: Tensor, low: int, high: int, *, generator: torch.Generator | None) -> Tensor:
        assert (low, high) == (0, 1 << RANDOM_BITS)
        assert generator is None
        return target.copy_(torch.tensor(list(islice(remaining, target.numel()))))

    with monkeypatch.context() as patch:
        patch.setattr(Tensor, "random_", forced)
        codes = codes_of(round_to_fp8(x, table.dtype, rounding="stochastic", saturate=False))
    assert next(remaining, None) is None, "fewer randoms were drawn than there are elements"
    return codes


def is_whole(at: Place) -> bool:
    """Whether the probability of rounding up is a multiple of 2**-62."""
    return (at.position * (1 << RANDOM_BITS)).denominator == 1


@each_table
@each_source
def test_the_number_of_randoms_that_round_up_is_the_position(
    table: Table, source: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the 2**62 equally likely randoms exactly those below position * 2**62 round up: the last one and the first."""
    x = boundary_inputs(table, source)
    where = boundary_places(table.name, source)
    count = [math.floor(at.position * 2**RANDOM_BITS) for at in where]
    last_up = codes_with_randoms(monkeypatch, x, table, [max(c - 1, 0) for c in count])
    first_down = codes_with_randoms(monkeypatch, x, table, count)
    for i, at in enumerate(where):
        sign = 128 * at.negative
        down, up = (
            NAN_CODE if at.kind == "nan" or (c > table.max_code and not table.has_infinity) else c + sign
            for c in (at.lower, at.lower + 1)
        )
        assert first_down[i] == down, f"x = {x[i].item()!r}: {count[i]} must not round up"
        assert last_up[i] == (up if count[i] else down), f"x = {x[i].item()!r}: {count[i]} - 1 must round up"


@each_table
@pytest.mark.parametrize(
    ("source", "exact_from"),
    [(torch.float16, 0.0), (torch.bfloat16, 2.0**-64), (torch.float32, 2.0**-48), (torch.float64, 2.0**-19)],
    ids=str,
)
def test_probabilities_are_exact_from_where_the_docstring_says(
    table: Table, source: torch.dtype, exact_from: float
) -> None:
    # Every binade of the small inputs, with an odd last bit, which is the hardest.
    small = torch.tensor([math.ldexp(1.0, e) for e in range(-130, 0)], dtype=torch.float64).to(source)
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[source.itemsize]
    last_bit_set = (small.view(integer) | 1).view(source).double().tolist()
    inexact = [v for v in last_bit_set if not is_whole(place(v, table))]
    inexact += [
        v
        for v, at in zip(boundary_inputs(table, source).tolist(), boundary_places(table.name, source), strict=True)
        if not is_whole(at)
    ]
    assert all(abs(v) < exact_from for v in inexact)
    # One binade lower it is false for e4m3, so the docstring's bound is the best one.
    if not table.has_infinity and exact_from:
        assert max(abs(v) for v in inexact) >= exact_from / 2


@each_table
@each_source
def test_the_generator_and_the_table_decide_every_code(table: Table, source: torch.dtype) -> None:
    x = boundary_inputs(table, source)
    where, randoms = boundary_places(table.name, source), drawn(x.numel(), seed=7).tolist()
    for saturate in (True, False):
        got = codes_of(stochastic(x, table, saturate=saturate, seed=7))
        for i, (at, random) in enumerate(zip(where, randoms, strict=True)):
            expected = rounded(at, table, "stochastic", saturate, random=random, random_bits=RANDOM_BITS)
            assert got[i] == expected, f"x = {x[i].item()!r}, {random = }: expected {expected:#04x}, got {got[i]:#04x}"


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("saturate", [True, False])
def test_gfloat_agrees_given_the_same_random_bits(name: str, saturate: bool) -> None:
    table = TABLES[name]
    x = boundary_inputs(table, torch.float64)
    # gfloat rounds its sum to nearest where p * 2**62 is not whole; we cut it, as the docstring says.
    x = x[torch.tensor([is_whole(at) for at in boundary_places(name, torch.float64)])]
    peer_format = {"e4m3": format_info_ocp_e4m3, "e5m2": format_info_ocp_e5m2}[name]
    # gfloat rounds up when position + random carries, so its randoms run the other way.
    randoms = (1 << RANDOM_BITS) - 1 - drawn(x.numel()).numpy()
    with np.errstate(over="ignore"):
        values = round_ndarray(peer_format, x.numpy(), RoundMode.Stochastic, saturate, randoms, RANDOM_BITS)
    peer = encode_ndarray(peer_format, values).astype(np.uint8).tolist()
    # Its NaN is 0xFF.
    assert codes_of(stochastic(x, table, saturate=saturate)) == [NAN_CODE if code == 0xFF else code for code in peer]


@each_table
def test_all_62_bits_are_drawn_and_the_mean_is_the_input(table: Table) -> None:
    """By Hoeffding a fair mean of n coins is off by more than t with probability 2 exp(-2 n t^2): here 1e-9."""
    count = 1 << 17
    bound = math.sqrt(math.log(2 / 1e-9) / (2 * count))
    randoms = drawn(count)
    ones = [int(((randoms >> k) & 1).sum()) for k in range(RANDOM_BITS)]
    assert all(abs(n / count - 0.5) <= bound for n in ones)
    # From 1 to 1.25 both formats have a step, e4m3 two.
    for value in (1.03125, 1.078125, 1.0625):
        at = place(value, table)
        codes = stochastic(torch.full((count,), value, dtype=torch.float64), table).view(torch.uint8)
        ups = int((codes == at.lower + 1).sum())
        assert ups + int((codes == at.lower).sum()) == count
        assert abs(Fraction(ups, count) - at.position) <= bound


@each_source
def test_the_same_generator_state_gives_the_same_codes_in_any_layout(source: torch.dtype) -> None:
    table = TABLES["e4m3"]
    # Positive, so that a code is its magnitude; more than two chunks, so that their draws must join without a seam.
    once = torch.linspace(0.001, 3, 500, dtype=torch.float64).to(source)
    base = once.repeat(600, 1)
    where = [place(v, table) for v in once.double().tolist()]
    threshold = torch.tensor([math.floor(at.position * (1 << RANDOM_BITS)) for at in where])
    up = drawn(base.numel()).reshape(base.shape) < threshold
    expected = torch.tensor([at.lower for at in where]) + up
    assert torch.equal(stochastic(base, table).view(torch.uint8).long(), expected)
    transposed = base.t().contiguous().t()
    assert not transposed.is_contiguous()
    result = stochastic(transposed, table)
    assert torch.equal(result.view(torch.uint8).long(), expected)
    assert result.stride() == transposed.stride()
    assert not torch.equal(stochastic(base, table, seed=1).view(torch.uint8).long(), expected)


def test_without_a_generator_torch_manual_seed_decides() -> None:
    x = torch.full((1000,), 1.03)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        default = codes_of(round_to_fp8(x, torch.float8_e5m2, rounding="stochastic"))
        after = codes_of(round_to_fp8(x, torch.float8_e5m2, rounding="stochastic"))
    assert default == codes_of(stochastic(x, TABLES["e5m2"], seed=5))
    assert after != default


def test_a_generator_moves_on_from_call_to_call() -> None:
    x = torch.full((1000,), 1.03)
    generator = torch.Generator().manual_seed(5)
    first, second = (
        codes_of(round_to_fp8(x, torch.float8_e4m3fn, rounding="stochastic", generator=generator)) for _ in range(2)
    )
    both = codes_of(stochastic(torch.cat([x, x]), TABLES["e4m3"], seed=5))
    assert first + second == both
