"""Which of the last products of K cuBLASLt adds where it cuts K: ``python benchmarks/split_k_tail.py`` on an H200.

A quarter of a minute; with PYTHONPATH=.:tests. For each shape: products of 1 at k = 0 and of 2 at one of the last 48
places, NaN at all the places that did not count, and random operands against the oracle, bit for bit. What came out is
kept in benchmarks/results/split_k_tail.json, which tests/emulation/test_split_k.py replays.
"""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

import cublaslt
import torch
from guarded import differing_bits
from split_k_map import wake

import fp8ref
from fp8ref.emulation.split_k import LARGEST_K, NoEvidenceError, dropped_k, split_k
from golden.record import cublaslt_version
from golden.scaled_mm import TENSOR, multiply

RESULT = Path(__file__).resolve().parent / "results" / "split_k_tail.json"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn}
LAST = 48
PARTS = ((5, 208, 20), (2, 112, 22), (2, 48, 25), (1, 16, 18), (4, 64, 30), (8, 16, 17), (1, 128, 23))
"""M, N and the number of parts that cuBLASLt makes of ``parts * 2560 + 16``."""


class Shape:
    """One kind of call on one shape."""

    def __init__(self, m: int, n: int, k: int, out: str, fast: bool) -> None:
        """Prepare scales and the generator."""
        self.m, self.n, self.k, self.out, self.fast = m, n, k, DTYPES[out], fast
        self.one = torch.ones(1, device="cuda")
        self.generator = torch.Generator("cuda").manual_seed(k)

    def multiply(self, x: torch.Tensor, y: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """cuBLASLt's product of x [M, K] and y [N, K]."""
        a, b = (t.to(torch.float8_e4m3fn) for t in (x, y))
        return multiply("_scaled_mm", a, b, TENSOR, self.one * scale, self.one, self.out, self.fast)

    def counted(self) -> list[bool]:
        """Whether the product at each of the last places is added; every row must say the same."""
        found: list[bool] = []
        places = list(range(self.k - LAST, self.k))
        for first in range(0, LAST, self.n):
            asked = places[first : first + self.n]
            x, y = (torch.zeros(size, self.k, device="cuda") for size in (self.m, self.n))
            x[:, 0] = x[:, -LAST:] = y[:, 0] = 1.0
            y[torch.arange(len(asked)), asked] = 2.0
            seen = self.multiply(x, y)[:, : len(asked)].float()
            if not bool(((seen == 1) | (seen == 3)).all()) or bool((seen != seen[0]).any()):
                raise RuntimeError(f"M, N, K = {self.m}, {self.n}, {self.k}: got {seen.tolist()}, not 1 or 3")
            found += (seen[0] == 3).tolist()
        return found

    def read(self, count: int) -> bool:
        """Whether NaN at the last ``count`` places is seen."""
        x, y = (torch.ones(size, self.k, device="cuda") for size in (self.m, self.n))
        x[:, self.k - count :] = torch.nan
        return bool(self.multiply(x, y, 2.0**-14).float().isnan().any())

    def differing(self, parts: int) -> int:
        """Outputs of random operands that are not the oracle's."""
        x, y = (torch.randn(size, self.k, device="cuda", generator=self.generator) for size in (self.m, self.n))
        seen = self.multiply(x, y, 2.0**-4)
        added = self.k - dropped_k(self.k, parts)
        a, b = (t[:, :added].to(torch.float8_e4m3fn) for t in (x, y))
        options: dict[str, Any] = {"out_dtype": self.out, "use_fast_accum": self.fast, "split_k": parts}
        return differing_bits(seen, fp8ref.emulate_matmul(a, b.t(), self.one / 16, self.one, **options))


def predicted(m: int, n: int, k: int, out: str, fast: bool) -> int | None:
    """What fp8ref.split_k says; None where it raises."""
    try:
        return split_k(m, n, k, out_dtype=DTYPES[out], use_fast_accum=fast)
    except NoEvidenceError:
        return None


def ask(m: int, n: int, k: int, out: str, fast: bool) -> dict[str, object]:
    """Everything about one kind of call."""
    shape = Shape(m, n, k, out, fast)
    _, found = cublaslt.Query(out, fast).ask(m, n, k)
    parts = found[0][0][cublaslt.FIELDS.index("SPLITK_NUM")]
    counted = shape.counted()
    left_out = counted.count(False)
    return {
        "M, N, K": [m, n, k],
        "out": out,
        "fast": fast,
        "parts": parts,
        "parts by fp8ref.split_k": predicted(m, n, k, out, fast),
        "never added": left_out,
        "they are the last": not any(counted[LAST - left_out :]),
        "NaN there is seen": shape.read(left_out) if left_out else None,
        "outputs": m * n,
        "differing from the oracle": shape.differing(parts),
    }


def main() -> int:
    """Ask about shapes of both sorts, print, and keep the answers; 1 if the oracle differs anywhere."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    wake()
    warnings.simplefilter("ignore", fp8ref.DroppedProductsWarning)
    rows = []
    for m, n, parts in PARTS:
        for k in (parts * 2560 + 16, parts * 2560 + 32, parts * 2560 + 48, parts * 2560, parts * 2688 + 16):
            if k > LARGEST_K:
                continue
            for out in DTYPES:
                rows += [ask(m, n, k, out, fast) for fast in (True, False)]
            print(rows[-1], flush=True)
    environment = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cublaslt": cublaslt_version()}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    options.out.write_text(f'{{"environment": {json.dumps(environment)},\n"rows": [\n{lines}\n]}}\n')
    return int(any(row["differing from the oracle"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
