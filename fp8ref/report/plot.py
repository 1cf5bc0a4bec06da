"""The report as one figure that also reads in black and white."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import TypedDict, Unpack

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fp8ref.emulation.checks import first_line
from fp8ref.report.errors import ReportError
from fp8ref.report.results import LayerResult, RecipeResult, Report

_QUANTISATION = "quantisation"
_ACCUMULATION = "accumulation"
_LINES = ((0, (5, 2)), (0, (1, 1.2)), (0, (5, 1.5, 1, 1.5)), (0, (2, 2)), (0, (8, 2, 2, 2)))
"""Line styles of the accumulations within a panel; the quantisation's is solid."""


class _LineStyle(TypedDict, total=False):
    color: str
    linewidth: float
    linestyle: tuple[int, tuple[float, ...]]


def check_plot_path(path: Path) -> None:
    """Refuse a file name whose format cannot be drawn.

    Raises:
        ReportError: the ending is not one of matplotlib's formats, which the message lists; or this one needs a program
            that is not here, as .pgf needs LaTeX.

    >>> check_plot_path(Path("out.png"))
    """
    figure, ending = Figure(figsize=(1.0, 1.0)), path.suffix.lower().removeprefix(".")
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    if ending not in known:
        raise ReportError(f"--plot: cannot draw {path}; end its name in one of: {', '.join(sorted(known))}")
    figure.suptitle("a word")
    try:
        figure.savefig(io.BytesIO(), format=ending)
    except Exception as error:  # noqa: BLE001 - what is missing decides which
        raise ReportError(f"--plot: cannot draw {path}: {first_line(error)}; or end its name in .png") from None


def write_plot(report: Report, path: Path) -> None:
    """Draw the predictions and the layers of every recipe to a file."""
    groups = _groups(report)
    top = 1.3 + 0.3 * len(report.recipes)
    figure = Figure(figsize=(11.0, top + 4.2), layout="constrained")
    figure.suptitle(
        f"{report.model or 'model'}: what FP8 costs, on {len(report.fp32_nll)} predicted tokens", parse_math=False
    )
    upper, lower = figure.subfigures(2, 1, height_ratios=[top, 3.9], squeeze=False)[:, 0]
    left, right = upper.subplots(1, 2, sharey=True)
    _draw_predictions(left, report)
    _draw_spread(right, report)
    panels = lower.subplots(1, len(groups), sharey=True, squeeze=False)[0]
    for panel, (title, results) in zip(panels, groups.items(), strict=True):
        _draw_layers(panel, title, results)
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high + 0.08 * (1 + max(map(len, groups.values()))) * (high - low))  # room for the legends
    panels[0].set_ylabel("signal-to-noise ratio (dB)")
    lower.supxlabel("linear layers by kind; within a kind from the first to the last", fontsize="medium")
    figure.savefig(path, dpi=150)


def _groups(report: Report) -> dict[str, list[RecipeResult]]:
    """The recipes by their operands: those of a group share what quantisation costs."""
    groups: dict[str, list[RecipeResult]] = {}
    for result in report.recipes:
        recipe = result.recipe
        groups.setdefault(f"scales: x {recipe.activation_scaling}, weight {recipe.weight_scaling}", []).append(result)
    return groups


def _draw_predictions(axes: Axes, report: Report) -> None:
    """nats per token lost, with its interval, one row a recipe."""
    rows = range(len(report.recipes))
    deltas = [result.delta_nll for result in report.recipes]
    axes.axvline(0.0, color="black", linewidth=0.8, linestyle=":")
    axes.errorbar(
        [delta.mean for delta in deltas],
        rows,
        xerr=[delta.interval95[1] - delta.mean for delta in deltas],
        fmt="o",
        color="black",
        markersize=4,
        capsize=3,
        linewidth=1,
    )
    for row, result in zip(rows, report.recipes, strict=True):
        axes.annotate(
            f"{result.perplexity:.2f}",
            (1.0, row),
            xycoords=("axes fraction", "data"),
            xytext=(-4, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            fontsize="small",
        )
    axes.margins(x=0.18)
    axes.set_yticks(list(rows), [result.recipe.name for result in report.recipes])
    axes.invert_yaxis()
    axes.set_xlabel("nats per token lost against fp32, with 95 % interval")
    axes.set_title(f"Predictions (right: perplexity; fp32 {report.fp32_perplexity:.2f})", fontsize="medium", loc="left")


def _draw_spread(axes: Axes, report: Report) -> None:
    """The layers' signal-to-noise ratios: the median and the whole range, one row a recipe."""
    kinds: tuple[tuple[str, str, float, str, Callable[[LayerResult], float]], ...] = (
        (_QUANTISATION, "o", -0.14, "white", lambda layer: layer.quantisation_snr_db),
        (_ACCUMULATION, "s", 0.14, "black", lambda layer: layer.accumulation_snr_db),
    )
    for label, marker, offset, fill, ratio in kinds:
        for row, result in enumerate(report.recipes):
            values = [value for value in map(ratio, result.layers) if math.isfinite(value)]
            if not values:
                continue
            at = row + offset
            axes.plot([min(values), max(values)], [at, at], color="black", linewidth=1)
            axes.plot(median(values), at, marker, color="black", markerfacecolor=fill, markersize=5)
        axes.plot([], [], marker, color="black", markerfacecolor=fill, markersize=5, label=label)
    axes.set_xlabel("signal-to-noise ratio of a layer's output (dB)")
    axes.set_title("Layers: median and range", fontsize="medium", loc="left")
    axes.grid(axis="x", color="0.85")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=2, frameon=False, borderpad=0, fontsize="small")


def _draw_layers(axes: Axes, title: str, results: Sequence[RecipeResult]) -> None:
    """Every layer's ratios for recipes with the same operands: one run of a line for every kind of layer."""
    exact = next((result for result in results if result.recipe.is_exact), results[0])
    kinds: dict[str, list[str]] = {}
    for layer in exact.layers:
        kinds.setdefault(layer.name.rpartition(".")[2], []).append(layer.name)
    quantisation = {layer.name: layer.quantisation_snr_db for layer in exact.layers}
    _draw_runs(axes, kinds, quantisation, _QUANTISATION, color="black", linewidth=1.6)
    units = [result for result in results if not result.recipe.is_exact]
    for index, result in enumerate(units):
        accumulation = {layer.name: layer.accumulation_snr_db for layer in result.layers}
        label = f"{_ACCUMULATION}: {result.recipe.name.partition('-')[2] or result.recipe.name}"
        style = _LINES[index % len(_LINES)]
        _draw_runs(axes, kinds, accumulation, label, color="0.25", linewidth=1.0, linestyle=style)
    edges = [0, *accumulate(len(names) for names in kinds.values())]
    for edge in edges[1:-1]:
        axes.axvline(edge - 0.5, color="0.6", linewidth=0.6)
    middles = [(begin + end - 1) / 2 for begin, end in pairwise(edges)]
    axes.set_xticks(middles, list(kinds), rotation=40, ha="right", fontsize="small")
    axes.set_xlim(-0.5, edges[-1] - 0.5)
    axes.set_title(title, fontsize="medium", loc="left")
    axes.grid(axis="y", color="0.85")
    axes.legend(loc="upper left", fontsize="x-small")


def _draw_runs(
    axes: Axes, kinds: dict[str, list[str]], ratios: dict[str, float], label: str, **style: Unpack[_LineStyle]
) -> None:
    """One quantity of every layer; one without noise, or that this recipe did not reach, leaves a gap."""
    begin = 0
    for index, names in enumerate(kinds.values()):
        values = [ratios.get(name, math.nan) for name in names]
        positions = range(begin, begin + len(names))
        axes.plot(positions, values, marker=".", markersize=2, label=label if index == 0 else None, **style)
        begin += len(names)
