"""Records Triton's ``tl.dot`` on a GPU, in the forms that take different hardware paths."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

import torch

from golden.operands import KINDS
from golden.store import DTYPES, Case, Recording

PAIRS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"), ("e5m2", "e5m2"))


@dataclass(frozen=True)
class Form:
    """One compiled form of the kernel; ``imprecise`` is ``max_num_imprecise_acc`` (None: not given)."""

    group: str
    bm: int
    bn: int
    bk: int
    imprecise: int | None = None
    half: bool = False
    all_pairs: bool = False
    warps: int = 4


FORMS = (
    Form("tl.dot wgmma", 64, 16, 128, all_pairs=True),
    Form("tl.dot wgmma", 64, 16, 64),
    Form("tl.dot wgmma", 64, 16, 32),
    Form("tl.dot wgmma", 128, 16, 128, warps=8),
    Form("tl.dot wgmma", 64, 16, 128, 128, all_pairs=True),
    Form("tl.dot wgmma", 64, 16, 128, 64),
    Form("tl.dot wgmma", 64, 16, 128, 32, all_pairs=True),
    Form("tl.dot hmma", 16, 16, 128, all_pairs=True),
    Form("tl.dot hmma", 16, 16, 64),
    Form("tl.dot hmma", 16, 16, 32, all_pairs=True),
    Form("tl.dot hmma", 32, 16, 128),
    Form("tl.dot hmma", 16, 16, 128, 0),
    Form("tl.dot hmma", 16, 16, 128, 32),
    Form("tl.dot hmma", 16, 16, 128, 128),
    Form("tl.dot hmma", 64, 16, 128, 0, all_pairs=True),
    Form("tl.dot hmma", 64, 16, 32, 0),
    Form("tl.dot fp16", 64, 16, 128, half=True, all_pairs=True),
    Form("tl.dot fp16", 64, 16, 32, half=True),
    Form("tl.dot fp16", 64, 16, 128, 0, half=True),
    Form("tl.dot fp16", 64, 16, 128, 32, half=True),
    Form("tl.dot fp16", 16, 16, 128, half=True, all_pairs=True),
    Form("tl.dot fp16", 16, 16, 32, half=True),
)
GROUPS = tuple(dict.fromkeys(form.group for form in FORMS))


def instructions(ptx: str) -> tuple[str, ...]:
    """The distinct matrix instructions of a kernel's PTX."""
    return tuple(sorted(set(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)[\w.]*", ptx))))


def _launch(form: Form, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, tuple[str, ...]]:
    """Run one form on the kept 16 rows of a, repeated to fill the tile; return the 16 rows of the result."""
    from golden.tl_dot_kernel import products

    copies = form.bm // 16
    d = torch.full((form.bm, form.bn), torch.nan, dtype=c.dtype, device=c.device)
    kernel = products[(1,)](
        a.view(torch.uint8).repeat_interleave(copies, 0).view(a.dtype),
        b,
        c.repeat_interleave(copies, 0),
        d,
        a.shape[1],
        BM=form.bm,
        BN=form.bn,
        BK=form.bk,
        IMPRECISE=form.imprecise,
        HALF=form.half,
        num_warps=form.warps,
    )
    return d[::copies].contiguous(), instructions(kernel.asm["ptx"])


def _cases(form: Form) -> list[tuple[tuple[str, str], str, str, int]]:
    """(formats, kind, c, K) of one form."""
    pairs = PAIRS if form.all_pairs else PAIRS[:1]
    depths = {max(form.bk, 32), 256}
    found = itertools.product(pairs, KINDS, ("zero", "wide", "bits"), sorted(depths))
    return [(pair, kind, c, k) for pair, kind, c, k in found if kind != "bits" or k <= 48]


def record(recording: Recording, pools: dict[str, torch.Tensor], device: str, group: str) -> None:
    """Run every form of one group; a form that does not compile is a finding."""
    for form in (form for form in FORMS if form.group == group):
        for pair, kind, c, k in _cases(form):
            a = pools[f"{kind}/{pair[0]}/a"][:16, :k].to(device).contiguous().view(DTYPES[pair[0]])
            b = pools[f"{kind}/{pair[1]}/b"][: form.bn, :k].to(device).contiguous().view(DTYPES[pair[1]])
            start = pools[f"c/{c}"].to(device)
            start = start.half() if form.half else start
            try:
                out, seen = _launch(form, a, b, start)
                torch.cuda.synchronize()
            except Exception as error:  # noqa: BLE001 - any compiler failure is the answer to "does this form exist"
                message = " ".join(str(error).split())[:240]
                recording.findings.append({"call": str(form), "error": type(error).__name__, "message": message})
                break
            recording.cases.append(
                Case(
                    group,
                    "tl.dot",
                    f"{kind}/{pair[0]}",
                    f"{kind}/{pair[1]}",
                    16,
                    form.bn,
                    k,
                    "fp16" if form.half else "fp32",
                    recording.put(out),
                    fast=form.imprecise != 128,
                    c=f"c/{c}",
                    unit="sm90" if "wgmma" in "".join(seen) else "sm90_hmma",
                    promote=form.imprecise,
                    note=f"tile {form.bm}x{form.bn}x{form.bk} imprecise {form.imprecise}",
                    instructions=seen,
                )
            )
