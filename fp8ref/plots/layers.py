"""Layers of a model beside each other, and estimates with their intervals."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import accumulate, pairwise

from matplotlib.axes import Axes

from fp8ref.plots.style import axes_or_current, check_name, line_style

_DENSE_MARKER = 2.0


def draw_layers(series: Mapping[str, Mapping[str, float]], axes: Axes | None = None) -> Axes:
    """Draw a figure of every layer of a model, layers of a kind beside each other from the first to the last.

    Args:
        series: by name, then by the layer's full name, such as ``model.layers.0.mlp.down_proj``: what follows the last
            dot is its kind. A layer that a series lacks, or whose value is not finite, leaves a gap.
        axes: where; None for pyplot's current axes.

    Raises:
        ValueError: no series, no layer, or a name that begins with "_".

    >>> from matplotlib.figure import Figure
    >>> axes = draw_layers({"row": {"0.up": 30.0, "0.down": 28.0, "1.up": 31.0}}, Figure().subplots())
    >>> [label.get_text() for label in axes.get_xticklabels()]
    ['up', 'down']
    """
    kinds: dict[str, list[str]] = {}
    for layer in dict.fromkeys(name for layers in series.values() for name in layers):
        kinds.setdefault(layer.rpartition(".")[2], []).append(layer)
    if not kinds:
        raise ValueError(f"series: got {len(series)} series without any layer; give at least one with one")
    for label in series:
        check_name(label)
    axes = axes_or_current(axes)
    edges = [0, *accumulate(len(names) for names in kinds.values())]
    for index, (label, values) in enumerate(series.items()):
        for begin, (kind, names) in zip(edges, kinds.items(), strict=False):
            drawn = [value if math.isfinite(value := values.get(name, math.nan)) else math.nan for name in names]
            style = line_style(index) | {"markersize": _DENSE_MARKER, "linewidth": 1.0}
            axes.plot(
                range(begin, begin + len(names)), drawn, label=label if kind == next(iter(kinds)) else None, **style
            )
    for edge in edges[1:-1]:
        axes.axvline(edge - 0.5, color="0.6", linewidth=0.6)
    axes.set_xticks([(begin + end - 1) / 2 for begin, end in pairwise(edges)], list(kinds))
    axes.set_xlim(-0.5, edges[-1] - 0.5)
    axes.grid(visible=False, axis="x")
    axes.set_xlabel("linear layers by kind; within a kind from the first to the last")
    return axes


def draw_intervals(estimates: Mapping[str, tuple[float, float, float]], axes: Axes | None = None) -> Axes:
    """Draw estimates with their intervals, one row each, the first on top.

    Args:
        estimates: by name: the estimate, and the lower and upper end of its interval.
        axes: where; None for pyplot's current axes.

    Raises:
        ValueError: none given, or an interval that does not hold its estimate.

    >>> from matplotlib.figure import Figure
    >>> axes = draw_intervals({"row": (0.01, -0.02, 0.04), "tensor": (0.03, 0.0, 0.06)}, Figure().subplots())
    >>> [label.get_text() for label in axes.get_yticklabels()]
    ['row', 'tensor']
    """
    if not estimates:
        raise ValueError("estimates: got none; give at least one")
    axes = axes_or_current(axes)
    for row, (name, (middle, low, high)) in enumerate(estimates.items()):
        if not low <= middle <= high:
            raise ValueError(f"estimates: {name!r} is {middle} with the interval {low} to {high}, which lacks it")
        bars = [[middle - low], [high - middle]]
        axes.errorbar([middle], [row], xerr=bars, fmt="o", color="black", markersize=4, capsize=3, linewidth=1)
    axes.axvline(0.0, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(estimates)), list(estimates))
    axes.set_ylim(len(estimates) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    return axes
