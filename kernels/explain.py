"""What a call will run, in words and as data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fp8ref.emulation.checks import BIAS_DTYPES, check_bool, check_out_dtype
from fp8ref.emulation.formats import format_of
from fp8ref.emulation.scales import Scaling
from fp8ref.kernels.activations import Activations, activations_of
from fp8ref.kernels.linear import plan_for, unit_or_sm90
from fp8ref.kernels.pack import PackedWeight
from fp8ref.kernels.plan import Plan, Tile, parts_of, run_multiple
from fp8ref.kernels.product import gpu_name, tile_for
from fp8ref.kernels.quantize import row_cut


@dataclass(frozen=True)
class Explanation:
    """The kernels, tile, split and padding of one :func:`fp8ref.scaled_linear` call; prints as text.

    Attributes:
        gpu: the GPU that the plan is for; without one, the one whose bits ``backend="emulate"`` gives.
        unit: the oracle's unit with the same arithmetic.
        path: "triton", or "library" for the quantiser and ``torch._scaled_mm``.
        split_k: what to give :func:`fp8ref.emulate_matmul` for the same bits.
        tile: the tile of the Triton product.
        text: the same in words, with the reason.

    >>> from fp8ref.kernels.pack import pack_weight
    >>> explain(pack_weight(torch.eye(64, 300)), m=3).path
    'triton'
    """

    gpu: str
    unit: str
    path: str
    split_k: int
    tile: Tile
    text: str

    def __str__(self) -> str:
        """Return the text."""
        return self.text


def explain(
    w: PackedWeight,
    m: int,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    activation_scaling: Scaling | None = None,
    activation_dtype: torch.dtype = torch.float8_e4m3fn,
    static: bool = False,
) -> Explanation:
    """Say which kernels, tile, split and padding ``scaled_linear(x, w)`` uses for ``m`` rows, and why.

    Args:
        w: a packed weight.
        m: rows of ``x``, all leading dimensions multiplied.
        out_dtype: as given to ``scaled_linear``.
        bias_dtype: the dtype of the bias, None without one.
        batch_invariant: as given to ``scaled_linear``.
        activation_scaling: as given to ``scaled_linear``.
        activation_dtype: as given to ``scaled_linear``.
        static: whether ``scaled_linear`` is given an ``input_scale``.

    Raises:
        TypeError: ``w`` is not a packed weight; a dtype or a flag that :func:`fp8ref.scaled_linear` would not take.
        ValueError: a negative ``m``; a scaling, or a static scale, that does not fit the weight.

    >>> from fp8ref.kernels.pack import pack_weight
    >>> print(explain(pack_weight(torch.ones(64, 100)), m=3))
    [3, 100] x [64, 100] on NVIDIA H200 (unit sm90)
    weight: e4m3, row scales, stored [64, 112]: 7424 bytes, 768 padding
    quantise: one Triton kernel, 3 x 1 programs of 128 elements
    product: triton, tile 64 weight rows x 16 rows of x x 128 of K, 8 stages, 4 warps, split_k 1 of 1 tile of 128
    why: M <= 64: one pass over the weights is the cost
    """
    if not isinstance(w, PackedWeight):
        raise TypeError(f"w: got {type(w).__name__}; give what fp8ref.pack_weight returned")
    if isinstance(m, bool) or not isinstance(m, int) or m < 0:
        raise ValueError(f"m: got {m!r}; give the number of rows, an int of at least 0")
    check_out_dtype(out_dtype)
    if bias_dtype is not None and bias_dtype not in BIAS_DTYPES:
        raise TypeError(f"bias_dtype: got {bias_dtype}; give one of {list(BIAS_DTYPES)}, or None without a bias")
    check_bool(batch_invariant, "batch_invariant")
    check_bool(static, "static")
    if static and w.scaling != "row":
        raise ValueError(f"static: got True beside a weight with {w.scaling} scales, which take no input_scale")
    device = w.codes.device
    activations = activations_of(w, activation_scaling, activation_dtype, "float32", None, None)
    plan = plan_for(w, m, device, out_dtype, bias_dtype, batch_invariant, activations)
    gpu, unit = gpu_name(device), unit_or_sm90(device)
    tile = tile_for(unit, plan, w.scaling)
    quantiser = _quantiser(w, m, activations, static=static)
    text = "\n".join(_lines(w, m, plan, tile, gpu, unit, quantiser))
    return Explanation(gpu, unit, plan.path, plan.split_k, tile, text)


def _quantiser(w: PackedWeight, m: int, activations: Activations, *, static: bool) -> str:
    """What makes codes of x."""
    dtype = "" if activations.dtype == torch.float8_e4m3fn else f" of {format_of(activations.dtype).name}"
    if w.scaling != "row":
        return f"one Triton kernel{dtype}, {m} rows in blocks of 128"
    cut = row_cut(max(1, m), w.k)
    chunks = max(1, -(-w.codes.shape[1] // cut["CHUNK"]))
    programs = f"{dtype}, {m} x {chunks} programs of {cut['CHUNK']} elements"
    if static:
        return f"one Triton kernel{programs}, the scale given"
    if activations.scaling == "tensor":
        return f"two Triton kernels: absmax of all of x, then codes{programs}"
    return f"one Triton kernel{programs}"


def _lines(w: PackedWeight, m: int, plan: Plan, tile: Tile, gpu: str, unit: str, quantiser: str) -> list[str]:
    name = format_of(w.codes.dtype).name
    stored = list(w.codes.shape)
    part_tiles, parts = parts_of(w.k, plan.split_k, run_multiple(w.scaling))
    tiles = f"{part_tiles} tile{'s' * (part_tiles != 1)} of 128"
    if m == 0 or w.n == 0:
        quantiser = product = "no kernel runs, for the result has no elements"
    elif plan.path == "library":
        product = "torch._scaled_mm on the packed weight, K not split"
    else:
        product = (
            f"triton, tile {tile.block_n} weight rows x {tile.block_m} rows of x x {tile.block_k} of K, "
            f"{tile.stages} stages, {tile.warps} warps, split_k {parts} of {tiles}"
        )
    return [
        f"[{m}, {w.k}] x [{w.n}, {w.k}] on {gpu} (unit {unit})",
        f"weight: {name}, {w.scaling} scales, stored {stored}: {w.nbytes} bytes, {w.padding_nbytes} padding",
        f"quantise: {quantiser}",
        f"product: {product}",
        f"why: {plan.why}",
    ]
