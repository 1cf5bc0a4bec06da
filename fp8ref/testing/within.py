"""``assert_within_bound``: where bits cannot be required, a bound that is derived, element by element."""

from __future__ import annotations

import torch
from torch import Tensor

from fp8ref.emulation.checks import (
    check_bias,
    check_bool,
    check_operands,
    check_out_dtype,
    check_same_device,
    check_split_k,
    check_tensor,
)
from fp8ref.emulation.matmul import unpack_scaled
from fp8ref.emulation.quantize import ScaledTensor
from fp8ref.emulation.scales import Scaling, resolve_pair
from fp8ref.emulation.units import UNITS, TensorCoreUnit, unit_of
from fp8ref.testing.bound import FP32_ANY_ORDER, Bound, Request, bound_of
from fp8ref.testing.compare import describe_element, place_of
from fp8ref.testing.floats import bits_of, float_of
from fp8ref.testing.tally import TALLY
from fp8ref.testing.textmap import where_text


@torch.no_grad()
def matmul_bound(
    a: Tensor | ScaledTensor,
    b: Tensor | ScaledTensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    unit: str | TensorCoreUnit = "sm90",
    split_k: int = 1,
    scaling: tuple[Scaling, Scaling] | None = None,
) -> Bound:
    """Where every output of a correct matmul lies, in whatever order its accumulator takes the k.

    Proven in ``docs/testing.md`` from the accumulator's width (F and B of the unit), the products of a step (L), the
    runs of K that start from +0 (128 with promotion; those of ``split_k``), the magnitudes of the products, the scales
    in any order, an fp32 bias, fused or not, and the rounding to the output.

    Args:
        a: FP8 [M, K], or a ScaledTensor, as in :func:`fp8ref.emulate_matmul`.
        b: FP8 [K, N], or a ScaledTensor.
        scale_a: finite fp32 scales; both None for no scales.
        scale_b: likewise.
        bias: [N], finite, or None.
        out_dtype: dtype of the output.
        use_fast_accum: whether one accumulator is carried over all of K.
        unit: a name of :data:`fp8ref.UNITS`, a :class:`fp8ref.TensorCoreUnit`, or "fp32" for fp32 additions or FMAs,
            each rounded to nearest, in any order and grouping.
        split_k: parts of K; with promotion (or "fp32") the bound is the same for any number of them.
        scaling: the kinds of scales, where the shapes leave it open.

    Returns:
        A :class:`fp8ref.testing.Bound`. On data that the accumulator holds exactly ``low`` equals ``high``.

    Raises:
        TypeError, ValueError: an argument that does not fit, as in :func:`fp8ref.emulate_matmul`; scales or a bias that
            are not finite.

    >>> a = torch.tensor([[256.0] + 31 * [1.0]]).to(torch.float8_e4m3fn)
    >>> found = matmul_bound(a, a.t(), out_dtype=torch.float32)
    >>> found.low.item(), found.exact.item(), found.high.item()
    (65529.0, 65567.0, 65605.0)
    """
    a, b, scale_a, scale_b, scaling = unpack_scaled(a, b, scale_a, scale_b, scaling)
    check_operands(a, b)
    if scale_a is None and scale_b is None and scaling is None:
        scale_a = scale_b = torch.ones((), device=a.device)
    kinds, left, right = resolve_pair(a, b, scale_a, scale_b, scaling)
    check_out_dtype(out_dtype)
    check_bias(bias, a, b.shape[1])
    check_split_k(split_k)
    check_bool(use_fast_accum, "use_fast_accum")
    for name, values in (("scale_a", left), ("scale_b", right), ("bias", bias)):
        if values is not None and not bool(values.isfinite().all()):
            raise ValueError(
                f"{name}: got NaN or Inf; a bound needs finite ones (compare bits with the oracle instead)"
            )
    if use_fast_accum and "1x128" in kinds:
        raise ValueError("use_fast_accum: got True with block scales, which are always promoted; pass False")
    return bound_of(
        Request(
            a,
            b.t(),
            left.reshape(1, 1) if kinds[0] == "tensor" else left,
            right.reshape(1, 1) if kinds[1] == "tensor" else right.t(),
            kinds,
            bias,
            out_dtype,
            model_of(unit),
            use_fast_accum,
            split_k,
        )
    )


def model_of(unit: object) -> TensorCoreUnit | None:
    """The unit, or None for fp32 additions.

    Raises:
        TypeError, ValueError: neither.

    >>> model_of("fp32") is None
    True
    """
    if unit == FP32_ANY_ORDER:
        return None
    if isinstance(unit, str) and unit not in UNITS:
        raise ValueError(f"unit: got {unit!r}; give one of {[FP32_ANY_ORDER, *UNITS]} or a TensorCoreUnit")
    return unit_of(unit)  # type: ignore[arg-type]  # it raises for whatever is neither


def assert_within_bound(
    actual: Tensor,
    a: Tensor | ScaledTensor,
    b: Tensor | ScaledTensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    bias: Tensor | None = None,
    use_fast_accum: bool = False,
    unit: str | TensorCoreUnit = "sm90",
    split_k: int = 1,
    scaling: tuple[Scaling, Scaling] | None = None,
    message: str = "",
) -> None:
    """Raise unless every output lies within its own bound: see :func:`fp8ref.testing.matmul_bound`.

    For kernels whose order of addition is not known, or not fixed; where it is, require equal bits.

    Args:
        actual: what the kernel returned, [M, N] of the output's dtype.
        a: as in :func:`fp8ref.testing.matmul_bound`, and so are all the arguments that follow but the last.
        b: see there.
        scale_a: see there.
        scale_b: see there.
        bias: see there.
        use_fast_accum: see there.
        unit: see there.
        split_k: see there.
        scaling: see there.
        message: a first line for the report.

    Raises:
        AssertionError: outputs lie outside, or are NaN where no NaN is due. The report counts them, shows the first
            with its exact result and what is allowed, how far outside the farthest lies, and a map.
        TypeError, ValueError: an argument that does not fit; scales or a bias that are not finite; and outputs that
            have no bound, because an order of the scales exists in which fp32 overflows.

    >>> a = torch.full((2, 64), 0.25).to(torch.float8_e4m3fn)
    >>> assert_within_bound(torch.full((2, 2), 4.0), a, a.t())
    >>> assert_within_bound(torch.tensor([[4.0, 4.0], [4.0, 0.0]]), a, a.t())
    Traceback (most recent call last):
    ...
    AssertionError: 1 of 4 outputs lie outside their bound (unit sm90, accurate, split_k 1)
    first at (1, 1): actual 0x00000000 = 0.0, exact 4.0, allowed 4.0 to 4.0
    farthest outside: 1,082,130,432 units in the last place at (1, 1)
    rows: 1 (the last of 2)
    columns: 1 (the last of 2)
    map of 2 x 2, '.' equal, '#' different
         0 |..
         1 |.#
    """
    y = check_tensor(actual, "actual")
    fmt = float_of(y.dtype, "actual")
    found = matmul_bound(
        a, b, scale_a, scale_b, bias=bias, out_dtype=y.dtype, use_fast_accum=use_fast_accum, unit=unit,
        split_k=split_k, scaling=scaling,
    )  # fmt: skip
    if y.shape != found.low.shape:
        raise ValueError(f"actual: got shape {list(y.shape)}; the product is {list(found.low.shape)}")
    check_same_device(y, found.low, "actual")
    unknown = found.radius.isinf()
    if bool(unknown.any()):
        raise ValueError(
            f"actual: {int(unknown.sum()):,} of {y.numel():,} outputs have no bound, the first at "
            f"{tuple(unknown.nonzero()[0].tolist())}: in some order of the scales fp32 overflows; give smaller scales"
        )
    TALLY.add(y.numel())
    low, value, high = found.low.double(), y.detach().double(), found.high.double()
    wrong = torch.where(low.isnan(), ~value.isnan(), ~((low <= value) & (value <= high)))
    if not bool(wrong.any()):
        return
    how = f"unit {unit if isinstance(unit, str) else unit.name}, {'fast' if use_fast_accum else 'accurate'}"
    at = tuple(wrong.nonzero()[0].tolist())
    allowed = f"exact {found.exact[at].item()!r}, allowed {low[at].item()!r} to {high[at].item()!r}"
    lines = [
        f"{int(wrong.sum()):,} of {y.numel():,} outputs lie outside their bound ({how}, split_k {split_k})",
        f"first at {at}: actual {describe_element(y[at], fmt)}, {allowed}",
    ]
    places = [place_of(bits_of(x), fmt) for x in (found.low, y, found.high)]
    outside = torch.maximum(places[0] - places[1], places[1] - places[2]).masked_fill(~wrong | value.isnan(), -1)
    if int(outside.max()) > 0:
        far = tuple(int(i) for i in torch.unravel_index(outside.flatten().argmax(), outside.shape))
        lines.append(f"farthest outside: {int(outside.max()):,} units in the last place at {far}")
    raise AssertionError("\n".join(([message] if message else []) + lines + where_text(wrong)))
