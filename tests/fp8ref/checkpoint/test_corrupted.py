"""Corrupted tensors: always an error that names the file and the tensor, and the model is as it was."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fp8ref
from checkpoint_corruption import NAMES, SOURCES, assert_inspected, assert_refused, change, copy_of, names_of, shard_of
from checkpoint_formats import INDEX, small_model, snapshot

SCALES = ("weight_scale", "weight_scale_inv", "input_scale")
formats = st.sampled_from(NAMES)


@given(formats, st.data(), st.sampled_from([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, -1.0, -(2.0**-100)]))
def test_a_bad_scale(name: str, data: st.DataObject, value: float) -> None:
    tensor = data.draw(st.sampled_from(names_of(name, *SCALES)))
    with copy_of(name) as folder:

        def edit(scale: Tensor) -> Tensor:
            scale.reshape(-1)[data.draw(st.integers(0, scale.numel() - 1))] = value
            return scale

        shard = change(folder, tensor, edit)
        assert_refused(folder, shard, tensor, f"has {value}")
        assert_inspected(folder, shard, tensor)


@given(formats, st.data(), st.sampled_from([0x7F, 0xFF]))
def test_a_nan_code(name: str, data: st.DataObject, code: int) -> None:
    tensor = data.draw(st.sampled_from(names_of(name, ".weight")))
    place: list[int] = []
    with copy_of(name) as folder:

        def edit(weight: Tensor) -> Tensor:
            place.extend(data.draw(st.integers(0, size - 1)) for size in weight.shape)
            weight.view(torch.uint8)[tuple(place)] = code
            return weight

        shard = change(folder, tensor, edit)
        assert_refused(folder, shard, tensor, f"has the NaN code {hex(code)} at {place}")
        assert_inspected(folder, shard, tensor)


@given(formats, st.data(), st.sampled_from([torch.float64, torch.int8, torch.float8_e5m2, torch.uint8, torch.bool]))
def test_a_wrong_dtype(name: str, data: st.DataObject, dtype: torch.dtype) -> None:
    tensor = data.draw(st.sampled_from(names_of(name, ".weight", *SCALES)))
    with copy_of(name) as folder:
        shard = change(folder, tensor, lambda old: torch.ones(old.shape).to(dtype))
        scale_of = tensor.replace(".weight", ".weight_scale_inv" if name == "DeepSeek blocks" else ".weight_scale")
        if tensor.endswith(".weight"):
            # Without its weight, the scale has nothing to scale.
            assert_refused(folder, shard_of(folder, scale_of), scale_of, "has no F8_E4M3 weight beside it")
        else:
            assert_refused(folder, shard, tensor)
            assert_inspected(folder, shard, tensor)


@given(formats, st.data())
def test_a_wrong_shape(name: str, data: st.DataObject) -> None:
    tensor = data.draw(st.sampled_from(names_of(name, *SCALES)))
    with copy_of(name) as folder:

        def edit(old: Tensor) -> Tensor:
            shape = data.draw(st.lists(st.integers(0, 5), max_size=3).filter(lambda s: bad(old, s)))
            return torch.ones(shape)

        def bad(old: Tensor, shape: list[int]) -> bool:
            """Not one of the shapes that mean the same."""
            scalar = old.numel() == 1 and torch.Size(shape).numel() == 1
            return shape != list(old.shape) and not scalar

        shard = change(folder, tensor, edit)
        assert_refused(folder, shard, tensor, "belongs")
        assert_inspected(folder, shard, tensor)


@given(formats, st.data())
def test_a_weight_of_another_size(name: str, data: st.DataObject) -> None:
    tensor = data.draw(st.sampled_from(names_of(name, ".weight")))
    with copy_of(name) as folder:
        rows, columns = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))

        def edit(old: Tensor) -> Tensor:
            return torch.zeros(rows + (rows == old.shape[0]), columns + (columns == old.shape[1])).to(old.dtype)

        change(folder, tensor, edit)
        model = small_model()
        before = snapshot(model)
        with pytest.raises(fp8ref.CheckpointError, match=tensor.removesuffix(".weight")):
            fp8ref.load_checkpoint(folder, model, backend="emulate")
        assert snapshot(model) == before


@given(formats, st.data())
def test_a_missing_tensor(name: str, data: st.DataObject) -> None:
    where = json.loads((SOURCES[name] / INDEX).read_text())["weight_map"]
    tensor = data.draw(st.sampled_from(sorted(where)))
    in_index = data.draw(st.booleans())
    with copy_of(name) as folder:
        shard = change(folder, tensor, lambda _: None)
        if in_index:  # the index says that it is there
            assert_refused(folder, shard, tensor, f"is not in the file where {INDEX} puts it")
            return
        del where[tensor]
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))
        model = small_model()
        before = snapshot(model)
        with pytest.raises(fp8ref.CheckpointError) as caught:
            fp8ref.load_checkpoint(folder, model, backend="emulate")
        assert snapshot(model) == before
        assert tensor in str(caught.value)
