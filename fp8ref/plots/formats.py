"""The two FP8 formats: where their values lie, and what rounding to them costs."""

from __future__ import annotations

import math

import numpy as np
import torch
from matplotlib.axes import Axes

from fp8ref.emulation.formats import Fp8Format, format_of
from fp8ref.emulation.rounding import Rounding, round_to_fp8
from fp8ref.plots.style import axes_or_current, line_style


def positive_values(fmt: Fp8Format) -> list[float]:
    """Every finite value above zero, in order.

    >>> from fp8ref.emulation.formats import E4M3
    >>> positive_values(E4M3)[:2], len(positive_values(E4M3))
    ([0.001953125, 0.00390625], 126)
    """
    codes = torch.arange(1, fmt.max_code + 1, dtype=torch.uint8)
    return list(codes.view(fmt.dtype).double().tolist())


def draw_number_line(
    dtype: torch.dtype, axes: Axes | None = None, *, low: float = 0.0, high: float | None = None, log: bool = False
) -> Axes:
    """Draw the values of a format that lie in an interval, subnormals shorter and dashed, and count them.

    Args:
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        axes: where; None for pyplot's current axes.
        low: the lower end of the interval, included; 0 or more.
        high: the upper end, included; None is the largest finite value.
        log: a logarithmic axis, which leaves zero out.

    Raises:
        TypeError: not an FP8 dtype.
        ValueError: an interval that is below zero, has no end or holds no value.

    >>> from matplotlib.figure import Figure
    >>> draw_number_line(torch.float8_e4m3fn, Figure().subplots(), high=1.0).get_title()
    'e4m3: 57 values from 0 to 1'
    """
    fmt = format_of(dtype)
    top = fmt.max if high is None else high
    if not 0.0 <= low < top < math.inf:
        raise ValueError(f"low, high: got {low} and {top}; give finite bounds with 0 <= low < high")
    zero = [] if log else [0.0]
    inside = [value for value in zero + positive_values(fmt) if low <= value <= top]
    if not inside:
        raise ValueError(f"low, high: {fmt.name} has no value from {low} to {top}; give a wider interval")
    axes = axes_or_current(axes)
    smallest_normal = 2.0**fmt.e_min
    for height, style, values in (
        (0.55, (0, (2, 1)), [value for value in inside if value < smallest_normal]),
        (0.85, "solid", [value for value in inside if value >= smallest_normal]),
    ):
        axes.vlines(values, 0.0, height, color="black", linewidth=0.7, linestyle=style)
    if log:
        axes.set_xscale("log", base=2)
        axes.set_xlim((low or fmt.smallest_subnormal) / 1.2, top * 1.2)
    axes.set_ylim(0.0, 1.0)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.grid(visible=False)
    axes.set_title(f"{fmt.name}: {len(inside)} values from {inside[0]:g} to {inside[-1]:g}")
    return axes


def draw_rounding_error(
    *dtypes: torch.dtype,
    axes: Axes | None = None,
    low: float = 2.0**-20,
    high: float = 2.0**18,
    points: int = 64,
    rounding: Rounding = "nearest_even",
) -> Axes:
    """Draw the largest relative error of :func:`fp8ref.round_to_fp8` within every octave against the magnitude.

    Args:
        *dtypes: FP8 dtypes, a line each.
        axes: where; None for pyplot's current axes.
        low: the smallest magnitude, rounded down to a power of two.
        high: the largest, rounded up to one.
        points: how many magnitudes of each octave are rounded, evenly spaced.
        rounding: as in :func:`fp8ref.round_to_fp8`; overflow saturates.

    Raises:
        TypeError: not an FP8 dtype.
        ValueError: no dtype, no points, or bounds that are not finite with 0 < low < high.

    >>> from matplotlib.figure import Figure
    >>> axes = draw_rounding_error(torch.float8_e4m3fn, axes=Figure().subplots(), low=1.0, high=2.0)
    >>> float(axes.lines[0].get_ydata()[0])  # 1/17: half a step of 1/8, at 1 + 1/16
    0.058823529411764705
    """
    if not dtypes:
        raise ValueError("dtypes: got none; give at least one FP8 dtype")
    if not 0.0 < low < high < math.inf:
        raise ValueError(f"low, high: got {low} and {high}; give finite bounds with 0 < low < high")
    if points < 1:
        raise ValueError(f"points: got {points}; give 1 or more")
    axes = axes_or_current(axes)
    octaves = np.arange(np.floor(np.log2(low)), np.ceil(np.log2(high)))
    inside = 1.0 + np.arange(points) / points
    x = torch.from_numpy(np.ldexp(inside[None, :], octaves.astype(int)[:, None]))
    for index, dtype in enumerate(dtypes):
        fmt = format_of(dtype)
        errors = ((round_to_fp8(x, dtype, rounding=rounding).double() - x).abs() / x).amax(1)
        axes.plot(np.exp2(octaves + 0.5), errors.numpy(), label=fmt.name, **line_style(index))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("magnitude (one point per octave)")
    axes.set_ylabel("largest relative error")
    return axes
