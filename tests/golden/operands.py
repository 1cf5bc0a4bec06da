"""The operands that the recorded cases share: FP8 codes of several distributions, and fp32 accumulators.

They are drawn once, when recording, and stored as bits: a replay never draws them again. Every matrix is stored
K-contiguous: ``<kind>/<format>/a`` [rows, K] and ``<kind>/<format>/b`` [columns, K].
"""

from __future__ import annotations

import torch

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
KINDS = ("normal", "wide", "bits", "specials", "subnormal", "boundary", "cancel")
SHORT_K, LONG_K = 1040, 28672
SPLIT_K = 5264
"""A K that cuBLASLt cuts in two where the product is small."""
SHORT_M, SHORT_N = 17, 32
LONG_M, LONG_N = 4, 8
BLOCK_M, BLOCK_N = 144, 272


def _finite_codes(name: str) -> torch.Tensor:
    codes = torch.arange(256, dtype=torch.uint8)
    return codes[codes.view(FP8[name]).float().isfinite()]


def _boundary_codes(name: str) -> torch.Tensor:
    """Zeros, the largest subnormal, and per exponent the significands 0, 1, max - 1 and max, of both signs."""
    mantissa_bits = 3 if name == "e4m3" else 2
    last = (1 << mantissa_bits) - 1
    codes = [(e << mantissa_bits) | m for e in range(128 >> mantissa_bits) for m in (0, 1, last - 1, last)]
    both = torch.tensor(codes + [c | 0x80 for c in codes], dtype=torch.uint8)
    return both[both.view(FP8[name]).float().isfinite()]


def _pick(codes: torch.Tensor, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return codes[torch.randint(len(codes), shape, generator=generator)]


def _normal(name: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    return (torch.randn(shape, generator=generator) * 4).to(FP8[name]).view(torch.uint8)


def _specials(name: str, side: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Normal codes, with NaN, Inf and zeros early in K, in some rows only: every kind of special output occurs."""
    codes = _normal(name, shape, generator)
    inf = 0x7C if name == "e5m2" else 0x7F
    for row in range(shape[0]):
        where = int(torch.randint(16, (1,), generator=generator))
        if row % 4 == 1:
            codes[row, where] = 0x7F | (0x80 if row % 8 == 1 else 0)
        if row % 4 == 2:
            codes[row, where] = inf | (0x80 if row % 8 == 2 else 0)
            codes[row, 16 + where] = inf
        if row % 4 == 3 and side == "b":
            codes[row, :16] = 0x80 if row % 8 == 3 else 0
    return codes


def _cancel(name: str, side: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Neighbouring k nearly cancel: a holds (x, -x), b holds (y, y) or y beside the next code."""
    codes = _pick(_finite_codes(name), shape, generator)
    codes[:, 1::2] = codes[:, 0::2]
    if side == "a":
        codes[:, 1::2] ^= 0x80
    else:
        nudge = torch.rand(codes[:, 1::2].shape, generator=generator) < 0.1
        codes[:, 1::2] ^= nudge.to(torch.uint8)
    bad = ~codes.view(FP8[name]).float().isfinite()
    codes[bad] = 0x38
    return codes


def draw(kind: str, name: str, side: str, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Draw the codes of one operand, uint8 [rows or columns, K]."""
    if kind == "normal":
        return _normal(name, shape, generator)
    if kind == "wide":
        return _pick(_finite_codes(name), shape, generator)
    if kind == "bits":
        return torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    if kind == "specials":
        return _specials(name, side, shape, generator)
    if kind == "subnormal":
        limit = 16 if name == "e4m3" else 8
        sign = torch.randint(2, shape, generator=generator, dtype=torch.uint8) << 7
        return torch.randint(limit, shape, generator=generator, dtype=torch.uint8) | sign
    if kind == "cancel":
        return _cancel(name, side, shape, generator)
    if kind == "boundary":
        codes = _pick(_boundary_codes(name), shape, generator)
        codes[0] &= 0x80
        return codes
    raise ValueError(f"kind: got {kind!r}; give one of {KINDS}")


def _accumulators(generator: torch.Generator) -> dict[str, torch.Tensor]:
    """The fp32 c [16, 16]: zeros, values around the products' range, and any bit pattern."""
    shape = (16, 16)
    wide = torch.randn(shape, generator=generator) * torch.exp2(
        torch.randint(-20, 14, shape, generator=generator).float()
    )
    bits = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64).to(torch.int32)
    zero = torch.zeros(shape)
    zero[::2] = -0.0
    return {"c/zero": zero, "c/wide": wide, "c/bits": bits.view(torch.float32)}


def make() -> dict[str, torch.Tensor]:
    """Draw all operands: uint8 codes and fp32 accumulators, by name."""
    generator = torch.Generator().manual_seed(20261201)
    pools: dict[str, torch.Tensor] = {}
    for kind in KINDS:
        for name in FP8:
            k = 48 if kind == "bits" else SHORT_K
            pools[f"{kind}/{name}/a"] = draw(kind, name, "a", (SHORT_M, k), generator)
            pools[f"{kind}/{name}/b"] = draw(kind, name, "b", (SHORT_N, k), generator)
    for kind, name, k in (("normal", "e4m3", LONG_K), ("wide", "e4m3", 16384), ("normal", "e5m2", 16384)):
        pools[f"long-{kind}/{name}/a"] = draw(kind, name, "a", (LONG_M, k), generator)
        pools[f"long-{kind}/{name}/b"] = draw(kind, name, "b", (LONG_N, k), generator)
    for kind in ("zero", "tiny"):
        pools[f"{kind}/e4m3/a"] = draw("subnormal", "e4m3", "a", (2, SPLIT_K), generator)
        pools[f"{kind}/e4m3/b"] = draw("subnormal", "e4m3", "b", (LONG_N, SPLIT_K), generator)
    pools["zero/e4m3/a"] &= 0x80
    pools["block/e4m3/a"] = draw("normal", "e4m3", "a", (BLOCK_M, SHORT_K), generator)
    pools["block/e4m3/b"] = draw("normal", "e4m3", "b", (BLOCK_N, SHORT_K), generator)
    return pools | _accumulators(generator)
