"""The report as tables on a terminal, within 80 columns unless the names of layers are longer."""

from __future__ import annotations

import math
from collections import Counter

from rich import box
from rich.console import Console
from rich.table import Table

from fp8ref.report.results import Estimate, RecipeResult, Report, perplexity

_WIDTH = 1000
"""Columns that a table may have."""

_FOOTER = """\
nats/token lost: negative log-likelihood less that of fp32 on the same tokens; +- is a 95 % interval as if tokens \
were independent, and one that holds 0 shows no difference.
of it accum.: less that of the exact recipe with the same scales, which is what the unit's sums cost.
KL: divergence of the predictions from those of fp32, in nats a token.
dB: signal-to-noise ratio of a layer's output, each layer fed what it gets in the recipe's own run. quant.: the exact \
product of the quantised operands against the float64 product of the fp32 ones. accum.: the unit's sums against that \
exact product (inf: no difference). total: both.
at max: codes at the format's largest value. Scales are dynamic: nothing is clipped, and the largest value of every \
scale group is there. to zero: values that were not zero and got the code of zero. Shares of all values; x are \
activations, w weights.
Layers put out fp32 and the rest of the model runs in fp32, so that FP8 is the only difference."""


def print_report(report: Report, console: Console, *, layers: int) -> None:
    """Print a report.

    Args:
        report: what was measured.
        console: where to.
        layers: how many of its worst layers to list for every recipe, by each of two ratios; 0 for none.
    """
    low, high = _interval(report)
    console.print(f"model   {report.model}", highlight=False, markup=False)
    console.print(f"text    {report.text}, first {report.tokens} tokens", highlight=False, markup=False)
    console.print(f"fp32    perplexity {report.fp32_perplexity:.3f} (95 % {low:.1f} to {high:.1f})", highlight=False)
    tables = [_model_table(report), _layer_table(report)]
    if layers:
        tables.append(_worst_table(report, layers))
    width = console.width
    console.width = _WIDTH  # or rich would cut names and figures to the width of the terminal, or to 80 without one
    for table in tables:
        console.print(table)
    console.width = width
    for line in (*_FOOTER.splitlines(), *_not_converted(report)):
        console.print(line, style="dim", highlight=False, markup=False)


def _interval(report: Report) -> tuple[float, float]:
    """The 95 % interval of the fp32 perplexity."""
    low, high = Estimate.of(report.fp32_nll).interval95
    return perplexity([low, low]), perplexity([high, high])


def _new_table(title: str, *columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _model_table(report: Report) -> Table:
    """What became of the predictions, one row a recipe."""
    table = _new_table(
        f"The model's predictions ({len(report.fp32_nll)} tokens predicted)",
        "recipe",
        "perplexity",
        "nats/token lost\nagainst fp32",
        "of it\naccum.",
        "KL",
    )
    for result in report.recipes:
        divergence = math.fsum(result.divergence) / len(result.divergence)
        table.add_row(
            result.recipe.name,
            f"{result.perplexity:.3f}",
            _signed(result.delta_nll),
            _accumulation_cost(report, result),
            f"{divergence:.5f}",
        )
    return table


def _accumulation_cost(report: Report, result: RecipeResult) -> str:
    """nats per token against the exact recipe on the same operands."""
    twin = report.exact_twin(result)
    if twin is None:
        return "not run"
    return "0" if twin is result else _signed(result.delta_nll_to(twin.nll))


def _signed(estimate: Estimate) -> str:
    """A mean with half its 95 % interval."""
    return f"{estimate.mean:+.4f} +- {estimate.interval95[1] - estimate.mean:.4f}"


def _layer_table(report: Report) -> Table:
    """What the layers lose, one row a recipe."""
    table = _new_table(
        f"The layers (median of {len(report.recipes[0].layers)}; shares over all of them)",
        "recipe",
        "total\ndB",
        "quant.\ndB",
        "accum.\ndB",
        "x at\nmax, %",
        "w at\nmax, %",
        "x to\nzero, %",
        "w to\nzero, %",
    )
    for result in report.recipes:
        table.add_row(
            result.recipe.name,
            _db(result.median_total_snr_db),
            _db(result.median_quantisation_snr_db),
            _db(result.median_accumulation_snr_db),
            _percent(result.activations.at_max_share),
            _percent(result.weights.at_max_share),
            _percent(result.activations.flushed_share),
            _percent(result.weights.flushed_share),
        )
    return table


def _worst_table(report: Report, count: int) -> Table:
    """The layers that lose most under every recipe, in all and by accumulation."""
    table = _new_table(
        f"The worst layers of every recipe ({count} by each ratio)",
        "layer",
        "total\ndB",
        "quant.\ndB",
        "accum.\ndB",
        "x at\nmax, %",
        "x to\nzero, %",
    )
    for result in report.recipes:
        for what, layers in (("total", result.lowest_total(count)), ("accum.", result.lowest_accumulation(count))):
            if layers:
                table.add_row(f"{result.recipe.name}, lowest {what}", style="bold")
            for layer in layers:
                table.add_row(
                    f"  {layer.name}",
                    _db(layer.total_snr_db),
                    _db(layer.quantisation_snr_db),
                    _db(layer.accumulation_snr_db),
                    _percent(layer.activations.at_max_share),
                    _percent(layer.activations.flushed_share),
                )
    return table


def _not_converted(report: Report) -> list[str]:
    """One line for every kind of module that stayed in fp32, and why."""
    groups = Counter((module.kind, module.reason) for module in report.not_converted)
    lines = [f"Kept in fp32: {number} x {kind}: {reason}." for (kind, reason), number in groups.items()]
    return [*lines, "Kept in fp32: attention's own products of activations with activations."]


def _db(value: float) -> str:
    """A ratio in dB."""
    return f"{value:.1f}" if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def _percent(share: float) -> str:
    """A share in per cent, two digits of it."""
    return f"{100 * share:.2g}"
