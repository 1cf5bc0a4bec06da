"""Packing: layout, padding and its cost, values, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch

from fp8ref.emulation.quantize import quantize
from fp8ref.emulation.scales import Scaling, scale_shape
from fp8ref.kernels.pack import PackedWeight, pack_weight, padded_k

E4M3 = torch.float8_e4m3fn


@pytest.mark.parametrize("scaling", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (130, 257), (16, 128), (0, 5), (5, 0)])
def test_codes_and_scales_are_those_of_quantize(scaling: Scaling, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    w, q = pack_weight(weight, scaling), quantize(weight, E4M3, scaling=scaling)
    scaled = w.as_scaled()
    assert torch.equal(scaled.data.view(torch.uint8), q.data.view(torch.uint8))
    assert torch.equal(scaled.scale, q.scale.expand(shape[0], 1) if scaling == "tensor" else q.scale)
    assert scaled.scaling == ("row" if scaling == "tensor" else scaling)


@pytest.mark.parametrize("shape", [(1, 1), (33, 100), (4097, 4099), (16, 128)])
def test_layout(shape: tuple[int, int]) -> None:
    n, k = shape
    w = pack_weight(torch.ones(shape).to(E4M3), scale=torch.ones(n, 1))
    assert w.codes.shape == (-(-n // 16) * 16, padded_k(k))
    assert w.codes.is_contiguous()
    assert w.codes.data_ptr() % 16 == 0
    assert w.codes.shape[1] % 16 == 0
    bits = w.codes.view(torch.uint8)
    assert int(bits.count_nonzero()) == n * k, "the padding is not zero"
    assert torch.equal(w.scale[n:], torch.ones(w.scale.numel() - n))


@pytest.mark.parametrize("k", [1024, 1025, 4096, 4099, 20000])
@pytest.mark.parametrize("n", [256, 257, 4097])
def test_padding_is_cheap_for_real_layers(n: int, k: int) -> None:
    w = PackedWeight(torch.empty(-(-n // 16) * 16, padded_k(k), dtype=torch.uint8), torch.empty(n), "row", n, k)
    assert w.nbytes == w.codes.numel() + 4 * w.scale.numel()
    assert 0 <= w.padding_nbytes <= 0.13 * n * k
    assert (padded_k(k) - k) / k < 0.063


def test_a_weight_without_padding_costs_nothing() -> None:
    w = pack_weight(torch.ones(32, 4096))
    assert w.padding_nbytes == 0
    assert w.nbytes == 32 * 4096 + 32 * 4


def test_nothing_is_shared_with_the_weight() -> None:
    codes, scale = torch.ones(16, 64).to(E4M3), torch.ones(16, 1)
    w = pack_weight(codes, scale=scale)
    codes.view(torch.uint8).zero_()
    scale.zero_()
    assert bool((w.codes.float() == 1).all())
    assert bool((w.scale == 1).all())


def through_torch(w: PackedWeight) -> PackedWeight:
    file = io.BytesIO()
    torch.save(w, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert isinstance(loaded, PackedWeight)
    return loaded


@pytest.mark.parametrize("again", [lambda w: pickle.loads(pickle.dumps(w)), copy.copy, copy.deepcopy, through_torch])
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_copies_and_pickles(again: Callable[[PackedWeight], PackedWeight], dtype: torch.dtype) -> None:
    for scaling in ("tensor", "1x128"):
        w = pack_weight(torch.randn(5, 300), scaling, dtype=dtype)
        assert w.signature == pack_weight(torch.randn(5, 300), scaling, dtype=dtype).signature
        copied = again(w)
        # Where its tensors lie may differ, so what is known of that must not come along.
        assert "signature" not in copied.__dict__
        assert copied.codes.dtype == dtype
        assert torch.equal(copied.codes.view(torch.uint8), w.codes.view(torch.uint8))
        assert torch.equal(copied.scale, w.scale)
        assert copied.signature == w.signature
        assert (copied.shape, copied.one_scale) == (w.shape, w.one_scale)


@pytest.mark.parametrize("scaling", ["tensor", "row", "1x128", "128x128"])
@pytest.mark.parametrize(
    "weight", [torch.ones(5, 300), torch.ones(5, 300).to(E4M3), torch.nn.Parameter(torch.ones(5, 300))]
)
def test_no_graph_of_gradients_is_kept(scaling: Scaling, weight: torch.Tensor) -> None:
    shape = scale_shape(scaling, 5, 300)
    w = pack_weight(weight, scaling, torch.ones(shape, requires_grad=True))
    assert not w.scale.requires_grad
    assert not w.codes.requires_grad


@pytest.mark.parametrize("device", [torch.bfloat16, None, 1.0, torch.ones(1)])
def test_moving_changes_no_dtype(device: object) -> None:
    with pytest.raises(TypeError, match=r"device: got .*; give a torch\.device"):
        pack_weight(torch.ones(3, 3)).to(device)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((torch.ones(3),), {}, ValueError, r"weight: got shape \[3\]; give \[N, K\]"),
        ((torch.ones(3, 3, dtype=torch.int8),), {}, TypeError, "weight: got torch.int8"),
        ((torch.ones(3, 3), "column"), {}, ValueError, "scaling: got 'column'"),
        ((torch.ones(3, 3),), {"dtype": torch.int8}, TypeError, "dtype: got torch.int8"),
        ((torch.ones(3, 3).to(E4M3),), {}, TypeError, "scale: missing"),
        (
            (torch.ones(3, 3).to(E4M3), "row", torch.ones(3, 1)),
            {"dtype": torch.float8_e5m2},
            TypeError,
            "dtype: got torch.float8_e5m2 for a weight of torch.float8_e4m3fn",
        ),
        ((torch.ones(3, 3).to(E4M3), "row", torch.ones(3)), {}, ValueError, r"scale: got shape \[3\].*\[3, 1\]"),
        ((torch.ones(3, 3).to(E4M3), "tensor", torch.ones(3, 1)), {}, ValueError, r"scale: got shape \[3, 1\]"),
        ((torch.ones(3, 3).to(E4M3), "row", torch.ones(3, 1).double()), {}, TypeError, "scale: got torch.float64"),
        ((torch.ones(1, 3).to(E4M3), "row", torch.zeros(1, 1)), {}, ValueError, "scale: got 0.0 among"),
        ((torch.ones(1, 3).to(E4M3), "row", torch.full((1, 1), float("nan"))), {}, ValueError, "scale: got nan among"),
        ((torch.ones(1, 3).to(E4M3), "row", torch.full((1, 1), -1.0)), {}, ValueError, "scale: got -1.0 among"),
        ((torch.ones(130, 300).to(E4M3), "128x128", torch.ones(1, 3)), {}, ValueError, r"scale: got shape \[1, 3\]"),
    ],
)
def test_refusals_name_the_argument(
    arguments: tuple[object, ...], options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        pack_weight(*arguments, **options)  # type: ignore[arg-type]
