"""Calls PyTorch's two scaled products on a GPU and records what they return; needs a Hopper GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from golden.store import DTYPES, NAMES, Case, Recording

Scaling = tuple[str, str]
TENSOR: Scaling = ("tensor", "tensor")
ROW: Scaling = ("row", "row")


def ceil_div(a: int, b: int) -> int:
    """Divide and round up."""
    return -(-a // b)


def _spread(kept: int, total: int) -> list[int]:
    """``kept`` positions of ``total``, from the first to the last."""
    return [0] if kept == 1 else [i * (total - 1) // (kept - 1) for i in range(kept)]


def _embed(codes: torch.Tensor, total: int, dtype: torch.dtype) -> torch.Tensor:
    """Place the rows of ``codes`` among ``total`` rows of random codes."""
    if total == codes.shape[0]:
        return codes.contiguous()
    filler = torch.randn(total, codes.shape[1], device=codes.device, dtype=torch.float16) * 4
    full = filler.to(dtype).view(torch.uint8)
    full[_spread(codes.shape[0], total)] = codes
    return full


def _padded(scale: torch.Tensor) -> torch.Tensor:
    """[K blocks, columns] in K-major storage padded to a multiple of 4; 1e30 in the padding, which must not be read."""
    rows = ceil_div(scale.shape[0], 4) * 4
    storage = torch.full((scale.shape[1], rows), 1e30, device=scale.device)
    storage[:, : scale.shape[0]] = scale.t()
    return storage.t()


def _arguments(via: str, scaling: Scaling, sa: torch.Tensor, sb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales in the memory layout that ``via`` wants, from the oracle's form."""
    if scaling[0] == "1x128":
        sa = torch.as_strided(sa.t().contiguous(), tuple(sa.shape), (1, sa.shape[0]))
    if scaling[1] == "1x128":
        sb = torch.as_strided(sb.contiguous(), tuple(sb.shape), (sb.shape[1], 1))
    if via == "_scaled_mm":
        if scaling[1] == "128x128":
            sb = sb.t().contiguous().t()
        return sa, sb
    if scaling[0] == "128x128":
        sa = _padded(sa.t())
    if scaling[1] == "1x128":
        sb = sb.t()
    if scaling[1] == "128x128":
        sb = _padded(sb)
    return sa, sb


def multiply(
    via: str,
    a: torch.Tensor,
    b: torch.Tensor,
    scaling: Scaling,
    sa: torch.Tensor,
    sb: torch.Tensor,
    out: torch.dtype,
    fast: bool,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply a [M, K] by b [N, K] transposed, with scales in the oracle's form."""
    sa, sb = _arguments(via, scaling, sa, sb)
    if via == "_scaled_mm":
        result: torch.Tensor = torch._scaled_mm(a, b.t(), sa, sb, bias=bias, out_dtype=out, use_fast_accum=fast)
        return result
    from torch.nn.functional import ScalingType, scaled_mm

    kinds = {
        "tensor": ScalingType.TensorWise,
        "row": ScalingType.RowWise,
        "1x128": ScalingType.BlockWise1x128,
        "128x128": ScalingType.BlockWise128x128,
    }
    return scaled_mm(
        a, b.t(), sa, kinds[scaling[0]], sb, kinds[scaling[1]], bias=bias, output_dtype=out, use_fast_accum=fast
    )


def attempt(recording: Recording, what: str, call: Callable[[], torch.Tensor]) -> torch.Tensor | None:
    """Run ``call``; a refusal is recorded with its message and gives None."""
    try:
        out = call()
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 - whatever it raises is what gets recorded
        message = " ".join(str(error).split())[:240]
        recording.findings.append({"call": what, "error": type(error).__name__, "message": message})
        return None
    return out


@dataclass
class Products:
    """Runs cases on the GPU and keeps them in ``recording``.

    ``part_tiles`` gives the tiles in a part of K for a call (M, N, K, out, fast, scaling, with bias, via).
    """

    recording: Recording
    pools: dict[str, torch.Tensor]
    device: str
    workspace: str
    part_tiles: Callable[[int, int, int, str, bool, Scaling, bool, str], int]

    def operands(self, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
        """The kept rows of a [m, k] and of b [n, k] of a case."""
        formats = [DTYPES[pool.split("/")[1]] for pool in (case.a, case.b)]
        a = self.pools[f"{case.a}/a"][: case.m, : case.k].to(self.device).contiguous()
        b = self.pools[f"{case.b}/b"][: case.n, : case.k].to(self.device).contiguous()
        if a.shape != (case.m, case.k) or b.shape != (case.n, case.k):
            raise ValueError(f"the pools are smaller than {case.label}")
        return a.view(formats[0]), b.view(formats[1])

    def run(
        self, case: Case, sa: torch.Tensor, sb: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        """Run one case; ``case.out`` and the names of its tensors are filled in here. Returns the kept output."""
        scaling = case.scaling or TENSOR
        out_dtype = DTYPES[case.out_dtype]
        a, b = self.operands(case)
        m, n = case.shape or (case.m, case.n)
        full_a = _embed(a.view(torch.uint8), m, a.dtype).view(a.dtype)
        full_b = _embed(b.view(torch.uint8), n, b.dtype).view(b.dtype)
        full_sa, full_sb, full_bias = self._full_scales(case, sa, sb, bias, m, n)
        what = f"{case.label} {scaling} {m}x{n} bias={None if bias is None else bias.dtype}"
        out = attempt(
            self.recording,
            what,
            lambda: multiply(case.via, full_a, full_b, scaling, full_sa, full_sb, out_dtype, case.fast, full_bias),
        )
        if out is None:
            return None
        kept = out[_spread(case.m, m)][:, _spread(case.n, n)] if case.shape else out
        tiles = part = ceil_div(case.k, 128)
        if case.k >= 4096:
            part = self.part_tiles(m, n, case.k, case.out_dtype, case.fast, scaling, bias is not None, case.via)
        put = self.recording.put
        fields = case.__dict__ | {
            "scaling": scaling,
            "scale_a": put(sa),
            "scale_b": put(sb),
            "bias": None if bias is None else put(bias),
            "bias_dtype": None if bias is None else NAMES[bias.dtype],
            "out": put(kept),
            "split_k": ceil_div(tiles, part),
            "part_tiles": None if part == tiles else part,
            "workspace": self.workspace,
        }
        self.recording.cases.append(Case(**fields))
        return kept

    def _full_scales(
        self, case: Case, sa: torch.Tensor, sb: torch.Tensor, bias: torch.Tensor | None, m: int, n: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Scales and bias of the product that runs: those of the kept rows and columns among ones and zeros."""
        sa, sb = sa.to(self.device), sb.to(self.device)
        bias = None if bias is None else bias.to(self.device)
        if case.shape is None:
            return sa, sb, bias
        scaling = case.scaling or TENSOR
        if scaling[0] in ("row", "1x128"):
            full = torch.ones(m, sa.shape[1], device=self.device)
            full[_spread(case.m, m)] = sa
            sa = full
        if scaling[1] in ("row", "1x128"):
            full = torch.ones(sb.shape[0], n, device=self.device)
            full[:, _spread(case.n, n)] = sb
            sb = full
        if bias is not None:
            full = torch.zeros(n, device=self.device, dtype=bias.dtype)
            full[_spread(case.n, n)] = bias
            bias = full
        return sa, sb, bias
