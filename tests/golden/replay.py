"""Computes with the oracle what a recorded case holds, and compares bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

import fp8ref
from fp8ref.emulation.compiled import Engine
from golden.store import DTYPES, Case, Recording, bits_of

_NAN_FP16 = torch.tensor(0x7FFF, dtype=torch.int16).view(torch.float16)


def operands(case: Case, pools: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The operands a [m, k] and b [k, n] of a case."""
    sides = []
    for pool, side, rows in ((case.a, "a", case.m), (case.b, "b", case.n)):
        codes = pools[f"{pool}/{side}"][:rows, : case.k].contiguous()
        sides.append(codes.view(DTYPES[pool.split("/")[1]]))
    return sides[0], sides[1].t()


def _chain(a: Tensor, b: Tensor, c: Tensor, unit: fp8ref.TensorCoreUnit) -> Tensor:
    """One accumulator from ``c`` over all of K, instruction by instruction."""
    for k in range(0, a.shape[1], unit.instruction_k):
        part = slice(k, k + unit.instruction_k)
        c = fp8ref.fused_dot_add(a[:, None, part], b.t()[None, :, part], c, unit)
    return c


def _dot(case: Case, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``tl.dot`` and mma.sync with an fp32 accumulator: one chain from c, or chains from 0 promoted into it."""
    unit = fp8ref.UNITS[case.unit]
    if case.promote is None or case.unit != "sm90":
        return _chain(a, b, c, unit)
    for k in range(0, case.k, case.promote):
        part = slice(k, k + case.promote)
        c = c + _chain(a[:, part], b[part], torch.zeros_like(c), unit)
    return torch.where(c.isnan(), torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32), c)


def _power_of_two(x: Tensor, e_min: int) -> Tensor:
    """2**e of each value, a subnormal keeping ``e_min``; 0 for 0."""
    exponent = torch.frexp(x)[1] - 1
    return torch.where(x == 0, 0.0, torch.ldexp(torch.ones_like(x), exponent.clamp(min=e_min)))


def step_fp16(a: Tensor, b: Tensor, c: Tensor, fraction_bits: int) -> Tensor:
    """One step with an fp16 accumulator: aligned as ever, then one rounding to fp16, to nearest even; zero is +0."""
    x, y, addend = a.double(), b.double(), c.double()
    products = x * y
    special = torch.where(products.isfinite(), 0.0, products).sum(-1) + torch.where(addend.isfinite(), 0.0, addend)
    products, addend = products.nan_to_num(0.0, 0.0, 0.0), addend.nan_to_num(0.0, 0.0, 0.0)
    e_min = {torch.float8_e4m3fn: -6, torch.float8_e5m2: -14}
    exponents = _power_of_two(x, e_min[a.dtype]) * _power_of_two(y, e_min[b.dtype])
    largest = torch.maximum(torch.where(products == 0, 0.0, exponents).amax(-1), _power_of_two(addend, -14))
    grid = torch.where(largest == 0, 1.0, largest) * 2.0**-fraction_bits
    total = ((products / grid.unsqueeze(-1)).trunc().sum(-1) + (addend / grid).trunc()) * grid
    with np.errstate(over="ignore"):
        rounded = torch.from_numpy(total.numpy().astype(np.float16)) + 0.0  # torch would round twice, through fp32
    result = torch.where(special == 0, rounded, special.half())
    return torch.where(result.isnan(), _NAN_FP16, result)


def _dot_fp16(case: Case, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """``tl.dot`` with an fp16 accumulator, one chain from c."""
    unit = fp8ref.UNITS[case.unit]
    steps = unit.products_per_step
    assert steps is not None
    acc, columns = c.half(), b.t()
    for k in range(0, case.k, unit.instruction_k):
        for first in range(0, unit.instruction_k, steps):
            chosen = [k + i for i in unit.k_order[first : first + steps]]
            acc = step_fp16(a[:, None, chosen], columns[None, :, chosen], acc, unit.fraction_bits)
    return acc


def _scaled(case: Case, recording: Recording, a: Tensor, b: Tensor, engine: Engine) -> Tensor:
    assert case.scale_a is not None
    assert case.scale_b is not None
    sa, sb = recording.get(case.scale_a, torch.float32), recording.get(case.scale_b, torch.float32)
    bias = None
    if case.bias is not None and case.bias_dtype is not None:
        bias = recording.get(case.bias, DTYPES[case.bias_dtype])
    out_dtype, scaling = DTYPES[case.out_dtype], case.scaling
    return fp8ref.emulate_matmul(
        a,
        b,
        sa,
        sb,
        bias=bias,
        out_dtype=out_dtype,
        use_fast_accum=case.fast,
        split_k=case.split_k,
        scaling=scaling,  # type: ignore[arg-type]  # a pair of plain strings
        engine=engine,
    )


def question(case: Case) -> Case:
    """The case without what cannot change its result: equal questions need one answer."""
    if case.c is None:
        return replace(case, group="", via="", out="", shape=None, part_tiles=None, workspace="", note="")
    promote = case.promote if case.unit == "sm90" else None
    return replace(case, group="", via="", out="", fast=False, promote=promote, note="", instructions=())


def difference(case: Case, got: Tensor, recording: Recording) -> str | None:
    """How the bits ``got`` differ from the recorded ones; None where all are equal."""
    want = recording.tensors[case.out].reshape(case.m, case.n)
    if got.dtype != want.dtype or got.shape != want.shape:
        return f"{case.label}: got {got.dtype} {list(got.shape)}, recorded {want.dtype} {list(want.shape)}"
    wrong = got != want
    if not wrong.any():
        return None
    row, column = wrong.nonzero()[0].tolist()
    width = 2 * want.element_size()
    bits = [f"0x{int(x[row, column]) & ((1 << 4 * width) - 1):0{width}x}" for x in (got, want)]
    return (
        f"{case.label}: {int(wrong.sum())} of {wrong.numel()} differ, first at [{row}, {column}]: "
        f"oracle {bits[0]}, hardware {bits[1]} (scales {case.scaling}, split_k {case.split_k}, bias {case.bias_dtype})"
    )


def replay(case: Case, recording: Recording, pools: dict[str, Tensor], engine: Engine = "torch") -> Tensor:
    """The bits that the oracle gives for a case, [m, n]; only a case without c, a scaled product, has engines."""
    a, b = operands(case, pools)
    if case.c is None:
        return bits_of(_scaled(case, recording, a, b, engine))
    c = pools[case.c].view(torch.float32)
    return bits_of(_dot_fp16(case, a, b, c) if case.out_dtype == "fp16" else _dot(case, a, b, c))
