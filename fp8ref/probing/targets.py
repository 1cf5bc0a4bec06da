"""Names that can be probed from the command line: torch's scaled product, and ``module:function``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fp8ref.emulation.layouts import to_torch_layout
from fp8ref.emulation.scales import Scaling
from fp8ref.probing.subject import ProbeError

KNOWN = "torch._scaled_mm"


@dataclass(frozen=True)
class Target:
    """A callable and what :func:`fp8ref.probe` needs to know about it."""

    name: str
    call: Callable[..., Tensor]
    scaling: tuple[Scaling, Scaling] | None


def scaled_mm(
    *,
    fast: bool = False,
    scaling: tuple[Scaling, Scaling] = ("tensor", "tensor"),
    out_dtype: torch.dtype = torch.float32,
) -> Target:
    """``torch._scaled_mm`` as a target; on a GPU of the Hopper generation that is cuBLASLt.

    >>> scaled_mm(fast=True).name
    'torch._scaled_mm (fast accumulation, tensor by tensor scales, float32 output)'
    """

    def call(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None = None) -> Tensor:
        left, right = scale_a, scale_b
        if "1x128" in scaling:
            left, right = to_torch_layout(scale_a, scale_b, scaling=scaling, function="_scaled_mm")
        result: Tensor = torch._scaled_mm(  # noqa: SLF001 - the function has no public name
            a, b, left, right, bias=bias, out_dtype=out_dtype, use_fast_accum=fast
        )
        return result

    mode = "fast" if fast else "accurate"
    out = str(out_dtype).removeprefix("torch.")
    return Target(f"{KNOWN} ({mode} accumulation, {scaling[0]} by {scaling[1]} scales, {out} output)", call, scaling)


def resolve(name: str, scaling: tuple[Scaling, Scaling] | None, *, fast: bool, out_dtype: torch.dtype | None) -> Target:
    """The target that a command line names.

    Raises:
        ProbeError: no such module or function, or it is not callable.
    """
    if name == KNOWN:
        return scaled_mm(fast=fast, scaling=scaling or ("tensor", "tensor"), out_dtype=out_dtype or torch.float32)
    module, _, function = name.partition(":")
    if not module or not function:
        raise ProbeError(f"target: got {name!r}; give module:function, or {KNOWN}")
    if fast or out_dtype is not None:
        raise ProbeError(f"--fast, --out-dtype: they are for {KNOWN}; give the target {name!r} without them")
    if "" not in sys.path:
        sys.path.insert(0, "")  # a console script does not look where it is started, python -m does
    try:
        found = importlib.import_module(module)
        for part in function.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise ProbeError(f"target: cannot load {name!r}: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise ProbeError(f"target: {name!r} is {type(found).__name__}; give a callable matmul(a, b)")
    return Target(name, found, scaling)
