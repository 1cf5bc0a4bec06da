"""What the machine could do at most: the rate of its vector instructions, and how many of them a product takes.

The unit is an operation on 32 bits: one of 16 lanes of an AVX-512 instruction, 8 of AVX2. An operation on int8 counts a
quarter, one on float64 two. :func:`operations_per_product` counts those of ``emulation/compiled_loops.py``:

- for every product 4.5: two multiplications, a conversion and an addition; an addition and a maximum in int8;
- for every output of a step of L products 23 (``_align``: 3 for the exponent of c, 1 to widen the peak, 1 maximum, 4
  for the two scales, 2 to scale c; ``_finish``: 6 on float64), and 4 more for every further group (``_carry``);
- for every code that is decoded 17, which the rows of a tile share (up to 64) or, on the other side, a block's columns;
- for every output and 128 of K, 1 for a promotion, 37 for one with block scales (18 on float64 for the FMA, 1 on fp32).

Not counted: loads, stores, loops, and the transposition of the codes, a scalar load and a store for each.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

import fp8ref
from fp8ref.emulation.compiled_loops import BLOCK, use_wide_vectors
from fp8ref.emulation.compiled_numba import compile_loops

_CHAIN = 16
_ELEMENTS = 1024  # 8 KB for the two arrays: the first cache
_REPEATS = 4000


def multiply_convert_add(x: NDArray[np.float32], out: NDArray[np.int32], repeats: int) -> None:
    """The operations of a product, independent of each other and with little memory traffic: 3 * 16 an element."""
    use_wide_vectors()
    for _ in range(repeats):
        for j in range(out.shape[0]):
            factor = x[j]
            value = factor
            total = np.int32(0)
            for _step in range(_CHAIN):
                value = value * factor
                total = np.int32(total + np.int32(value))
            out[j] = total


def vector_rate(threads: int) -> float:
    """Billions of 32-bit operations a second, on that many threads together; the best of ten runs."""
    loop: Any = compile_loops(multiply_convert_add)
    arrays = [(np.ones(_ELEMENTS, np.float32), np.zeros(_ELEMENTS, np.int32)) for _ in range(threads)]
    best = float("inf")
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(11):
            start = time.perf_counter()
            list(pool.map(lambda pair: loop(*pair, _REPEATS), arrays))
            best = min(best, time.perf_counter() - start)
    return threads * 3 * _CHAIN * _ELEMENTS * _REPEATS / best / 1e9


def operations_per_product(
    unit: fp8ref.TensorCoreUnit, rows: int, promotion: Literal["none", "plain", "scaled"]
) -> float:
    """32-bit vector operations that the compiled engine's loops need for a product, loads and stores left out."""
    assert unit.products_per_step is not None
    length = unit.products_per_step
    groups = -(-length // (1 << (29 - unit.fraction_bits)))
    per_step = 23 + 4 * (groups - 1)
    promoted = {"none": 0, "plain": 1, "scaled": 37}[promotion]
    after = 1 / unit.instruction_k if unit.c_enters == "after" else 0.0
    return 4.5 + per_step / length + 17 / min(rows, 64) + 17 / BLOCK + promoted / 128 + after


def describe() -> dict[str, float]:
    """The measured limits of one thread and of as many as torch uses, by what they are."""
    threads = torch.get_num_threads()
    return {f"{count} thread{'s' if count > 1 else ''}": vector_rate(count) for count in sorted({1, threads})}
