"""What a report says beside its findings: the call of the oracle, and where it was made."""

from __future__ import annotations

import platform

import torch

from fp8ref.emulation.formats import FORMATS
from fp8ref.probing.model import Model
from fp8ref.probing.subject import Subject


def oracle_call(model: Model | None, known: str | None, subject: Subject) -> str | None:
    """The call of the oracle that computes the sums."""
    fp8 = subject.dtype_a in FORMATS and subject.dtype_b in FORMATS
    if model is None or model.unit is None or not model.split_k or not fp8:
        return None
    unit = repr(known) if known else "report.unit"
    extra = "" if model.split_k == 1 else f", split_k={model.split_k}"
    operands = f"a[:, :{subject.k}], b[:{subject.k}]" if subject.tail else "a, b"
    return f"fp8ref.accumulate({operands}, unit={unit}, use_fast_accum={model.use_fast_accum}{extra})"


def where(device: str) -> dict[str, str]:
    """Versions, and the GPU where there is one."""
    found = {"torch": torch.__version__, "python": platform.python_version()}
    if torch.device(device).type == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(device), "cuda": str(torch.version.cuda)}
    return found
