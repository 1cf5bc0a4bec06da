"""Whether the last products of K are added at all where cuBLASLt cuts K unevenly; on an H200, a few seconds.

With S parts of K, K // S a multiple of 128 and K no multiple of S, the parts are K // S long and 16 products are left
over. One product is put at the end of K, another at its beginning.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import cublaslt
import torch
from split_k_map import wake

from golden.scaled_mm import TENSOR, multiply

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def ask(m: int, n: int, k: int, out: str, fast: bool) -> dict[str, object]:
    """What comes out of 1 at the beginning and 2 at k = ``k - 16``, ..., ``k - 1``, and with ones everywhere."""
    _, found = cublaslt.Query(out, fast).ask(m, n, k)
    parts = found[0][0][cublaslt.FIELDS.index("SPLITK_NUM")]
    a = torch.zeros(m, k, device="cuda")
    b = torch.zeros(n, k, device="cuda")
    a[:, 0] = a[:, k - 16 :] = b[:, 0] = 1.0
    one = torch.ones(1, device="cuda")
    answers = []
    for place in range(k - 16, k):
        b[:, k - 16 :] = 0.0
        b[:, place] = 2.0
        eight = [x.to(torch.float8_e4m3fn) for x in (a, b)]
        result = multiply("_scaled_mm", eight[0], eight[1], TENSOR, one, one, DTYPES[out], fast)
        answers.append(sorted(set(result.flatten().tolist())))
    ones = [torch.ones_like(x).to(torch.float8_e4m3fn) for x in (a, b)]
    total = multiply("_scaled_mm", ones[0], ones[1], TENSOR, one / 16, one, DTYPES[out], fast)
    uneven = (k // parts) % 128 == 0 and k % parts != 0
    return {
        "M, N, K": [m, n, k],
        "out": out,
        "fast": fast,
        "parts": parts,
        "uneven": uneven,
        "expected": [3.0],
        "got": answers,
        "ones": sorted(set(total.flatten().tolist())),
        "ones expected": k / 16,
    }


def main() -> None:
    """Ask about shapes of both sorts, print, and keep the answers in ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    wake()
    rows = []
    for m, n, parts in ((5, 208, 20), (2, 112, 22), (2, 48, 25), (1, 16, 18), (4, 64, 30), (8, 16, 17), (1, 128, 23)):
        for k in (parts * 2560 + 16, parts * 2560 + 48, parts * 2560):
            for out in DTYPES:
                for fast in (True, False):
                    rows.append(ask(m, n, k, out, fast))
                    print(rows[-1], flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "split_k_tail.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
