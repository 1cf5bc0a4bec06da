"""Series of numbers as lines or as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from fp8ref.plots.style import axes_or_current, check_name, line_style

_HATCHES = ("", "////", "....", "xxxx", "\\\\\\\\", "++++")
_GREYS = ("0.25", "white", "white", "white", "0.8", "white")


def _check_series(argument: str, count: int, series: Mapping[str, Sequence[float]]) -> None:
    """Raise unless there is a series, each has ``count`` values, and each will show in a legend."""
    if not series:
        raise ValueError("series: got none; give at least one")
    for name, values in series.items():
        check_name(name)
        if len(values) != count:
            raise ValueError(f"series: {name!r} has {len(values)} values beside {count} of {argument}; give as many")


def draw_series(x: Sequence[float], series: Mapping[str, Sequence[float]], axes: Axes | None = None) -> Axes:
    """Draw one line for each series, told apart by dash, marker and grey.

    Args:
        x: positions that all series share.
        series: by name, one value for each position; NaN leaves a gap.
        axes: where; None for pyplot's current axes.

    Raises:
        ValueError: no series, one with another number of values, or a name that begins with "_".

    >>> from matplotlib.figure import Figure
    >>> axes = draw_series([1, 2], {"fast": [0.1, 0.2], "exact": [0.0, 0.0]}, Figure().subplots())
    >>> [line.get_linestyle() for line in axes.lines]
    ['-', '--']
    """
    _check_series("x", len(x), series)
    axes = axes_or_current(axes)
    for index, (name, values) in enumerate(series.items()):
        axes.plot(x, values, label=name, **line_style(index))
    return axes


def draw_bars(
    groups: Sequence[str], series: Mapping[str, Sequence[float]], axes: Axes | None = None, *, values: str = ""
) -> Axes:
    """Draw bars side by side, one for each series within each group, told apart by hatches.

    Args:
        groups: labels along the horizontal axis.
        series: by name, one value for each group; NaN leaves a gap.
        axes: where; None for pyplot's current axes.
        values: a format such as ``".0f"`` that writes each bar's value above it; "" for none.

    Raises:
        ValueError: no series, one with another number of values, or a name that begins with "_".

    >>> from matplotlib.figure import Figure
    >>> axes = draw_bars(["a", "b"], {"ours": [1.0, 2.0]}, Figure().subplots(), values=".1f")
    >>> [text.get_text() for text in axes.texts]
    ['1.0', '2.0']
    """
    _check_series("groups", len(groups), series)
    axes = axes_or_current(axes)
    width = 0.8 / len(series)
    for index, (name, heights) in enumerate(series.items()):
        places = [group - 0.4 + width * (index + 0.5) for group in range(len(groups))]
        look = index % len(_HATCHES)
        bars = axes.bar(
            places,
            heights,
            width,
            label=name,
            color=_GREYS[look],
            hatch=_HATCHES[look],
            edgecolor="black",
            linewidth=0.7,
        )
        if values:
            axes.bar_label(bars, [format(height, values) for height in heights], fontsize=7, padding=1)
    axes.set_xticks(range(len(groups)), list(groups))
    axes.grid(visible=False, axis="x")
    return axes
