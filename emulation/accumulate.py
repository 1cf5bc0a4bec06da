"""The fp32 accumulators of a whole matrix product: chains, promotion, split-K."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from fp8ref.emulation.bits import canonical_nan
from fp8ref.emulation.chain import Tile, tiles
from fp8ref.emulation.checks import check_bool, check_operands, check_split_k
from fp8ref.emulation.compiled import Engine, is_compiled
from fp8ref.emulation.compiled_cuda import CudaChains
from fp8ref.emulation.decode import Span
from fp8ref.emulation.lanes import for_each
from fp8ref.emulation.units import TensorCoreUnit, unit_of

PROMOTION_K = 128
"""K after which an accurate chain is added to the fp32 total; also the tile that split-K counts in."""

Promote = Callable[[Tensor, Tensor, Span, slice, slice], Tensor]
"""How a chain's result joins the fp32 total: ``(total, chain, (k_start, k_stop), rows, columns) -> total``.

The total that goes in is used up; it is laid out as the chain is."""

Finish = Callable[[Tensor, slice, slice], Tensor]
"""What becomes of a tile's fp32 accumulators, NaN of any payload among them: ``(total, rows, columns) -> output``."""


def accumulate(
    a: Tensor,
    b: Tensor,
    *,
    use_fast_accum: bool = False,
    unit: str | TensorCoreUnit = "sm90",
    split_k: int = 1,
    engine: Engine = "auto",
) -> Tensor:
    """Return the fp32 accumulators of ``a @ b``, before scales, bias and output rounding.

    Args:
        a: FP8 [M, K], any strides.
        b: FP8 [K, N], any strides.
        use_fast_accum: True carries one accumulator over all of K (of a part); False starts a new chain from +0 every
            128 of K and adds each chain's result to an fp32 total, rounded to nearest even.
        unit: a name of :data:`fp8ref.UNITS` or a :class:`fp8ref.TensorCoreUnit`. ``"exact"`` is one precise sum a part.
        split_k: S parts of ``ceil(ceil(K / 128) / S)`` consecutive tiles of 128, added in fp32 in order.
        engine: what computes it, with the same bits: see :func:`fp8ref.emulate_matmul`.

    Returns:
        fp32 [M, N] on the device of ``a``. NaN is 0x7FFFFFFF.

    Raises:
        TypeError, ValueError: an argument that does not fit; the message names it.
        ImportError: ``engine="compiled"`` without its compiler.

    Source: recorded on an H200 for ``sm90``, ``tests/emulation/test_golden.py``; the units' evidence for the others.

    >>> import fp8ref
    >>> a = torch.full((1, 256), 0.5).to(torch.float8_e4m3fn)
    >>> fp8ref.accumulate(a, a.t(), use_fast_accum=True)
    tensor([[64.]])
    """
    check_operands(a, b)
    check_split_k(split_k)
    check_bool(use_fast_accum, "use_fast_accum")
    parts = split_parts(a.shape[1], split_k)
    return run_chains(
        a,
        b,
        unit_of(unit),
        parts,
        engine,
        lambda total, _rows, _columns: canonical_nan(total),
        torch.float32,
        promoted=not use_fast_accum,
    )


def run_chains(
    a: Tensor,
    b: Tensor,
    unit: TensorCoreUnit,
    parts: list[Span],
    engine: Engine,
    finish: Finish,
    out_dtype: torch.dtype,
    *,
    promoted: bool,
    promote: Promote | None = None,
) -> Tensor:
    """Run all chains of ``a @ b`` and fold them, each split-K part from +0, and the parts from +0; [M, N].

    ``promote`` scales a block of 128 on its way into the total, whatever the unit; None is an fp32 addition. ``finish``
    makes ``out_dtype`` of a tile at a time, so that nothing but the output is ever as large as the output.
    """
    is_compiled(engine, a.device)  # raises here for whatever tiles() could not use, empty products included
    cut = promoted and (promote is not None or unit.products_per_step is not None)
    spans_of_parts = [_cut(part) if cut else [part] for part in parts]
    out = torch.empty(a.shape[0], b.shape[1], dtype=out_dtype, device=a.device)

    def fill(tile: Tile) -> None:
        chains = tile.chains()
        total = _fold(chains, spans_of_parts[0], promote, tile.rows, tile.columns)
        if len(parts) > 1:
            total = total + 0.0  # only a cut product adds to +0, which turns a -0 that block scales left into +0
        for spans in spans_of_parts[1:]:
            total = total + _fold(chains, spans, promote, tile.rows, tile.columns)
        out[tile.rows, tile.columns] = finish(total, tile.rows, tile.columns)

    every_span = [span for spans in spans_of_parts for span in spans]
    # Autocast would turn the products of powers into bf16.
    with torch.no_grad(), torch.autocast(a.device.type, enabled=False):
        for_each(fill, tiles(a, b, unit, every_span, engine), a.device)
    return out


def _fold(chains: Iterator[Tensor], spans: list[Span], promote: Promote | None, rows: slice, columns: slice) -> Tensor:
    if promote is None and isinstance(chains, CudaChains):
        return chains.add_up(len(spans))
    chain = next(chains)
    total = torch.zeros_like(chain)  # in its layout, which is not that of the output where the engine transposes
    for index, span in enumerate(spans):
        chain = next(chains) if index else chain
        total = total + chain if promote is None else promote(total, chain, span, rows, columns)
    return total


def split_parts(k: int, split_k: int, multiple: int = 1) -> list[Span]:
    """cuBLASLt's split of K: runs of ceil(T / S) tiles of 128 for T tiles; the last run is shorter, none is empty.

    Args:
        k: K.
        split_k: S, the number of parts asked for; rounding up the runs can leave fewer.
        multiple: runs are rounded up to a multiple of this number of tiles: 4 with 128x128 scales, 1 otherwise.

    Source: recorded on an H200, ``tests/golden/split_k.json``.

    >>> split_parts(16 * 128, 3), split_parts(300, 1)
    ([(0, 768), (768, 1536), (1536, 2048)], [(0, 300)])
    """
    run = -(-k // (PROMOTION_K * split_k))
    length = (k if split_k == 1 else -(-run // multiple) * multiple * PROMOTION_K) or PROMOTION_K
    return [(start, min(start + length, k)) for start in range(0, k, length)] or [(0, 0)]


def _cut(part: Span) -> list[Span]:
    start, stop = part
    return [(k, min(k + PROMOTION_K, stop)) for k in range(start, stop, PROMOTION_K)] or [part]
