"""Where the kernels run: which GPUs, and what stands in for one where there is none."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor

UNIT_OF_CAPABILITY = {(8, 9): "sm89", (9, 0): "sm90"}
"""The oracle's unit that has the arithmetic of the kernels on a GPU of this compute capability."""


@lru_cache(maxsize=1)
def interpreting() -> bool:
    """Whether Triton's interpreter runs the kernels on the CPU (``TRITON_INTERPRET=1``): for tests of indexing only.

    Its FP8 arithmetic is not the hardware's, so only exact data gives the right bits.
    """
    return os.environ.get("TRITON_INTERPRET", "0") in ("1", "true", "on", "yes")


@lru_cache(maxsize=64)
def capability_of(device: torch.device) -> tuple[int, int]:
    """Return the compute capability of a CUDA device; (9, 0) under the interpreter."""
    return (9, 0) if device.type == "cpu" else torch.cuda.get_device_capability(device)


@lru_cache(maxsize=64)
def unit_of_device(device: torch.device, argument: str = "x") -> str:
    """Return the oracle's unit for the device of an argument, or raise where the kernels cannot run.

    Raises:
        ValueError: not an NVIDIA GPU, or one without the FP8 units that the kernels were written for.
        ImportError: Triton is not installed.
    """
    remedy = 'pass backend="emulate" for the oracle\'s answer on this device'
    if device.type != "cuda" and not (device.type == "cpu" and interpreting()):
        raise ValueError(
            f"{argument}: got a tensor on {device}; the kernels need an NVIDIA GPU: move it there, or {remedy}"
        )
    if torch.version.hip is not None:
        raise ValueError(
            f"{argument}: got a tensor on an AMD GPU; the kernels are written for NVIDIA's FP8 units: {remedy}"
        )
    unit = UNIT_OF_CAPABILITY.get(capability_of(device))
    if unit is None:
        major, minor = capability_of(device)
        raise ValueError(
            f"{argument}: got a tensor on a GPU of compute capability {major}.{minor}; the kernels need the FP8 "
            f"units of 8.9 (Ada) or 9.0 (Hopper): {remedy}"
        )
    if importlib.util.find_spec("triton") is None:
        raise ImportError(
            f"triton is not installed, and the kernels are compiled by it: pip install triton, or {remedy}"
        )
    return unit


def check_placement(x: Tensor, others: dict[str, Tensor | None], name: str = "x") -> str:
    """Return the unit of ``x``'s device after checking that every other tensor lies there too."""
    unit = unit_of_device(x.device, name)
    for argument, tensor in others.items():
        if tensor is not None and tensor.device != x.device:
            raise ValueError(
                f"{argument}: got a tensor on {tensor.device} while {name} is on {x.device}; move one of them"
            )
    return unit
