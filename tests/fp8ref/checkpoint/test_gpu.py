"""Loaded onto a GPU, every format runs on the kernels, with the bits of the emulated backend."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8ref
from checkpoint_formats import SMALL_LAYERS, small_model, write_small
from checkpoint_variants import VARIANTS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("m", [1, 15, 80])
def test_kernels_and_emulation_agree_on_a_loaded_layer(name: str, m: int, tmp_path: Path) -> None:
    written = write_small(tmp_path, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fp8ref.CheckpointWarning)
        model: Any = fp8ref.load_checkpoint(tmp_path, small_model(5), device="cuda", dtype=torch.bfloat16)
    for path in SMALL_LAYERS:
        layer = model.get_submodule(path)
        assert layer.weight.is_cuda
        assert torch.equal(layer.dequantized_weight().cpu(), written.weights[path])
        x = torch.randn(m, layer.in_features, generator=torch.Generator().manual_seed(m)).bfloat16().cuda()
        with torch.no_grad():
            fast = layer(x)
            layer.backend = "emulate"
            assert torch.equal(fast, layer(x))
