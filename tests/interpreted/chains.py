"""What the interpreting process computes of the oracle's CUDA engine. All of it is exact there, on any operands."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8ref.emulation.chain import tiles
from fp8ref.emulation.compiled_cuda import CompiledCuda, CudaChains
from fp8ref.emulation.decode import Span
from fp8ref.emulation.specials import finite_part
from fp8ref.emulation.units import TensorCoreUnit


def _codes(rows: int, k: int, dtype: torch.dtype, seed: int, spread: int) -> Tensor:
    """Return random finite codes [rows, K], magnitudes from the lowest 2 ** spread codes above a random one."""
    g = torch.Generator().manual_seed(seed)
    low = int(torch.randint(0, 128, (1,), generator=g))
    magnitude = (torch.randint(0, 1 << spread, (rows, k), generator=g) + low) % 128
    sign = torch.randint(0, 2, (rows, k), generator=g) << 7
    return finite_part((magnitude | sign).to(torch.uint8).view(dtype))


def differing(
    unit: TensorCoreUnit,
    dtypes: tuple[torch.dtype, torch.dtype],
    m: int,
    n: int,
    spans: list[Span],
    seed: int,
    spread: int,
) -> int:
    """Count the bits in which the chains of the two engines differ."""
    k = max(stop for _, stop in spans)
    a, b = _codes(m, k, dtypes[0], seed, spread), _codes(n, k, dtypes[1], seed + 1, spread)
    engine = CompiledCuda(unit, spans, k, torch.device("cpu"))
    mine = torch.stack(list(engine.chains(engine.prepare(a, spans), engine.prepare(b, spans), spans)))
    theirs = torch.full_like(mine, float("nan"))
    for tile in tiles(a, b.t(), unit, spans, "torch"):
        for index, chain in enumerate(tile.chains()):
            theirs[index, tile.rows, tile.columns] = chain
    return int((mine.view(torch.int32) != theirs.view(torch.int32)).sum())


def differing_sums(groups: list[int], counts: list[int], seed: int) -> int:
    """Count the bits in which sums of runs of chains differ from sums taken one by one."""
    g = torch.Generator().manual_seed(seed)
    results = [torch.randn(size, 3, 5, generator=g) * torch.rand(1, generator=g) ** 20 for size in groups]
    every = torch.cat(results)
    chains, start, found = CudaChains(iter(results)), 0, 0
    for count in counts:
        wanted = torch.zeros(3, 5)
        for chain in every[start : start + count]:
            wanted = wanted + chain
        start += count
        found += int((chains.add_up(count).view(torch.int32) != wanted.view(torch.int32)).sum())
    return found
