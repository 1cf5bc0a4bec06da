"""Which devices the kernels accept; each refusal says what to do."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from fp8ref.kernels import device as module

CUDA = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _no_memory_between_tests() -> Iterator[None]:
    module.unit_of_device.cache_clear()
    yield
    module.unit_of_device.cache_clear()


@pytest.mark.parametrize(("capability", "unit"), [((9, 0), "sm90"), ((8, 9), "sm89")])
def test_units(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], unit: str) -> None:
    monkeypatch.setattr(module, "capability_of", lambda _: capability)
    assert module.unit_of_device(CUDA) == unit


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (10, 0), (12, 0)])
def test_other_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(module, "capability_of", lambda _: capability)
    words = rf'capability {capability[0]}\.{capability[1]}; the kernels need the FP8 units.*backend="emulate"'
    with pytest.raises(ValueError, match=words):
        module.unit_of_device(CUDA)


def test_cpu_and_amd_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r'on cpu; the kernels need an NVIDIA GPU.*backend="emulate"'):
        module.unit_of_device(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.0")
    with pytest.raises(ValueError, match=r'AMD GPU.*backend="emulate"'):
        module.unit_of_device(CUDA)


def test_tensors_on_two_devices_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "unit_of_device", lambda *_: "sm90")
    with pytest.raises(ValueError, match="bias: got a tensor on meta while x is on cpu"):
        module.check_placement(torch.ones(1), {"w": None, "bias": torch.ones(1, device="meta")})
