"""What ``round_to_fp8`` takes: any shape, layout and value; what it refuses, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from fp8ref.emulation.rounding import Rounding, _chunk, round_to_fp8
from reference.fp8_tables import NAN_CODE, TABLES, place, rounded
from reference.rounding_inputs import SOURCES, boundary_inputs

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MODES: tuple[Rounding, ...] = get_args(Rounding)
DETERMINISTIC: tuple[Rounding, ...] = ("nearest_even", "toward_zero")

floats = st.lists(st.floats(), min_size=1, max_size=200).map(lambda v: torch.tensor(v, dtype=torch.float64))
fp8_dtypes = st.sampled_from([E4M3, E5M2])


def raw(x: Tensor) -> Tensor:
    """The bits of a tensor, to compare with NaN and -0 counted."""
    return x.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()])


def seeded(x: Tensor, dtype: torch.dtype, rounding: Rounding, *, saturate: bool = True) -> Tensor:
    """Round; stochastic from the same seed each time."""
    generator = torch.Generator().manual_seed(3) if rounding == "stochastic" else None
    return round_to_fp8(x, dtype, rounding=rounding, saturate=saturate, generator=generator)


@given(floats, fp8_dtypes, st.sampled_from(SOURCES), st.sampled_from(DETERMINISTIC), st.booleans())
def test_monotone(x: Tensor, dtype: torch.dtype, source: torch.dtype, rounding: Rounding, saturate: bool) -> None:
    ordered = x[~x.isnan()].to(source).sort().values
    result = round_to_fp8(ordered, dtype, rounding=rounding, saturate=saturate).double()
    # A NaN here is an e4m3 overflow: it stands where the infinity would.
    result = torch.where(result.isnan(), ordered.sign().double() * torch.inf, result)
    assert bool((result[1:] >= result[:-1]).all())


@given(floats, fp8_dtypes, st.sampled_from(SOURCES), st.sampled_from(MODES), st.booleans())
def test_negation_flips_the_sign_bit_only(
    x: Tensor, dtype: torch.dtype, source: torch.dtype, rounding: Rounding, saturate: bool
) -> None:
    plus, minus = (raw(seeded(v, dtype, rounding, saturate=saturate)) for v in (x.to(source), -x.to(source)))
    assert torch.equal(minus, torch.where(plus == NAN_CODE, plus, plus ^ 0x80))


@given(floats, fp8_dtypes, st.sampled_from(SOURCES), st.sampled_from(MODES), st.sampled_from(MODES), st.booleans())
def test_rounding_again_changes_nothing(
    x: Tensor, dtype: torch.dtype, source: torch.dtype, first: Rounding, second: Rounding, saturate: bool
) -> None:
    once = seeded(x.to(source), dtype, first, saturate=saturate)
    # fp16 holds every value of both formats, and so do the others.
    twice = seeded(once.to(source), dtype, second, saturate=saturate)
    assert torch.equal(raw(twice), raw(once))


VIEWS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    lambda x: x.t(),
    lambda x: x[::2],
    lambda x: x[:, 1::3],
    lambda x: x.t()[1:-1],
    lambda x: x[:1].expand(5, -1),
    lambda x: x[3, 4],
    lambda x: x[:, :0],
    lambda x: x.reshape(5, 2, 3, 5).permute(2, 0, 3, 1),
    lambda x: x.reshape(1, 5, 1, 30).transpose(1, 3),
    lambda x: x.reshape(2, 3, 5, 5).contiguous(memory_format=torch.channels_last),
    lambda x: torch.complex(x.float(), x.float()).conj().imag.to(x.dtype) if x.dtype.itemsize == 2 else x,
    lambda x: torch.complex(x, x).conj().imag if x.dtype.itemsize >= 4 else x,
]


@given(st.integers(0, 2**30), st.sampled_from(VIEWS), st.sampled_from(SOURCES), fp8_dtypes, st.sampled_from(MODES))
def test_layout_changes_no_value_and_is_kept(
    seed: int, view: Callable[[Tensor], Tensor], source: torch.dtype, dtype: torch.dtype, rounding: Rounding
) -> None:
    base = torch.randn(10, 15, generator=torch.Generator().manual_seed(seed)).mul_(100).to(source)
    x = view(base)
    before = raw(base).clone()
    result = seeded(x, dtype, rounding)
    plain = seeded(x.resolve_neg().contiguous(), dtype, rounding)
    assert torch.equal(raw(result), raw(plain))
    assert (result.shape, result.dtype, result.device) == (x.shape, dtype, x.device)
    assert result.stride() == x.to(dtype).stride()
    assert torch.equal(raw(base), before)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,), (1, 1)], ids=str)
def test_scalars_and_empty_tensors(shape: tuple[int, ...], source: torch.dtype, rounding: Rounding) -> None:
    for saturate in (True, False):
        result = seeded(torch.full(shape, -1.5, dtype=source), E4M3, rounding, saturate=saturate)
        assert result.shape == shape
        assert (raw(result) == 0xBC).all()


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("rounding", DETERMINISTIC)
@pytest.mark.parametrize("name", TABLES)
def test_the_chunks_of_a_large_tensor_join_without_a_seam(name: str, rounding: Rounding, threads: int) -> None:
    table = TABLES[name]
    once = boundary_inputs(table, torch.float32)
    # A length that no power of two divides puts each input at another place of each chunk.
    x = once.repeat(400_000 // once.numel())
    codes = torch.tensor(
        [rounded(place(v, table), table, rounding, saturate=False) for v in once.double().tolist()], dtype=torch.uint8
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        # More threads take larger chunks: both sizes are shorter than half of x.
        assert 2 * _chunk(x.device) < x.numel()
        result = raw(round_to_fp8(x, table.dtype, rounding=rounding, saturate=False))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(result, codes.repeat(x.numel() // once.numel()))


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("source", SOURCES, ids=str)
def test_flushing_subnormals_to_zero_changes_nothing(name: str, source: torch.dtype) -> None:
    x = boundary_inputs(TABLES[name], source)
    dtype = TABLES[name].dtype
    expected = [raw(seeded(x, dtype, rounding, saturate=False)) for rounding in MODES]
    assert torch.set_flush_denormal(True), "this CPU cannot flush subnormals"
    try:
        flushed = [raw(seeded(x, dtype, rounding, saturate=False)) for rounding in MODES]
    finally:
        torch.set_flush_denormal(False)
    for want, got in zip(expected, flushed, strict=True):
        assert torch.equal(want, got)


def test_the_result_is_detached_and_the_input_keeps_its_gradient() -> None:
    x = torch.nn.Parameter(torch.tensor([1.1, -300.0]))
    result = round_to_fp8(x, E4M3)
    assert not result.requires_grad
    assert result.float().tolist() == [1.125, -288.0]
    assert x.requires_grad


class Elsewhere(torch.Generator):
    """A generator that says it is on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """The claim."""
        return torch.device("cuda", 0)


ONE = torch.tensor(1.0)


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (TypeError, r"x: got list; give a torch\.Tensor", {"x": [1.0]}),
        (TypeError, r"x: got torch\.int32; .*x\.to\(torch\.float64\)", {"x": torch.tensor(1, dtype=torch.int32)}),
        (TypeError, r"x: got torch\.complex64; give float64", {"x": torch.tensor(1j)}),
        (TypeError, r"x: got torch\.bool; give float64", {"x": torch.tensor(True)}),
        (TypeError, r"x: got torch\.float8_e5m2, already FP8; .*x\.to\(torch\.float32\)", {"x": ONE.to(E5M2)}),
        (TypeError, r"x: got a torch\.sparse_coo tensor", {"x": torch.eye(2).to_sparse()}),
        (TypeError, r"x: got a .* tensor on meta", {"x": torch.empty(2, device="meta")}),
        (TypeError, r"dtype: got torch\.float16; give torch\.float8_e4m3fn or", {"dtype": torch.float16}),
        (TypeError, r"dtype: got torch\.float8_e4m3fnuz; give", {"dtype": torch.float8_e4m3fnuz}),
        (TypeError, r"dtype: got 'e4m3'; give", {"dtype": "e4m3"}),
        (TypeError, r"dtype: got \['e4m3'\]; give", {"dtype": ["e4m3"]}),
        (ValueError, r"rounding: got 'up'; give one of \['nearest_even', 'toward_zero', 'stoch", {"rounding": "up"}),
        (ValueError, r"rounding: got \['up'\]; give one of", {"rounding": ["up"]}),
        (TypeError, r"saturate: got 1; give True or False", {"saturate": 1}),
        (TypeError, r"generator: got int; give a torch\.Generator", {"rounding": "stochastic", "generator": 3}),
        (ValueError, r"generator: given with rounding='nearest_even'.*stochastic", {"generator": torch.Generator()}),
        (
            ValueError,
            r"generator: is on cuda:0 but x is on cpu; use torch\.Generator\(device=x\.device\)",
            {"rounding": "stochastic", "generator": Elsewhere()},
        ),
    ],
)
def test_errors_name_the_argument_what_it_got_and_the_fix(
    error: type[Exception], message: str, arguments: dict[str, Any]
) -> None:
    call: dict[str, Any] = {"x": ONE, "dtype": E4M3, **arguments}
    with pytest.raises(error, match=message):
        round_to_fp8(**call)
