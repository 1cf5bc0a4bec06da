"""The Triton kernel whose ``tl.dot`` is recorded."""
# Triton reads this source itself: names are constexpr and pointers, which annotations could not describe.

import triton
import triton.language as tl


@triton.jit
def products(
    a, b, c, d, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, IMPRECISE: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """d [BM, BN] = c + a [BM, k] @ b [BN, k] transposed, one program, BK at a time."""
    rows, columns, depth = tl.arange(0, BM), tl.arange(0, BN), tl.arange(0, BK)
    places = rows[:, None] * BN + columns[None, :]
    acc = tl.load(c + places)
    for at in range(0, k, BK):
        x = tl.load(a + rows[:, None] * k + (at + depth)[None, :])
        y = tl.load(b + columns[None, :] * k + (at + depth)[:, None])
        if HALF:
            acc = tl.dot(x, y, acc, max_num_imprecise_acc=IMPRECISE, out_dtype=tl.float16)
        else:
            acc = tl.dot(x, y, acc, max_num_imprecise_acc=IMPRECISE)
    tl.store(d + places, acc)
