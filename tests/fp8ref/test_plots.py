"""The pictures: what they draw is what the library computes, and series differ without colour."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import fp8ref
from fp8ref import plots
from fp8ref.plots.formats import positive_values

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@pytest.fixture
def axes() -> Axes:
    return Figure().subplots()


@pytest.fixture(autouse=True)
def own_settings() -> Iterator[None]:
    with mpl.rc_context():
        yield


def codes(fmt: fp8ref.Fp8Format) -> st.SearchStrategy[int]:
    return st.integers(0, 255).filter(lambda code: code & 0x7F <= fmt.max_code)


@given(st.data(), st.sampled_from(["sm90", "sm89", "sm100"]), st.sampled_from(list(fp8ref.FORMATS.values())))
def test_a_step_ends_where_the_unit_does(data: st.DataObject, unit: str, fmt: fp8ref.Fp8Format) -> None:
    rows = data.draw(st.lists(st.tuples(codes(fmt), codes(fmt)), min_size=1, max_size=16))
    a, b = torch.tensor(rows, dtype=torch.uint8).t().contiguous().view(fmt.dtype)
    c = torch.tensor(data.draw(st.floats(-1e6, 1e6, width=32)), dtype=torch.float32)
    step = plots.explain_step(a, b, c, unit)
    assert step.result == Fraction(float(fp8ref.fused_dot_add(a, b, c, unit)))
    assert step.exact == sum(
        (Fraction(x) * Fraction(y) for x, y in zip(a.tolist(), b.tolist(), strict=True)), Fraction(c.item())
    )
    assert all(abs(term.lost) < Fraction(2) ** step.grid for term in step.terms)
    assert all(term.lost == 0 or (term.lost > 0) == (term.value > 0) for term in step.terms)


def test_the_picture_of_a_step_shows_its_bits(axes: Axes) -> None:
    x = torch.tensor([1.0, 2.0**-9]).to(E4M3)
    step = plots.explain_step(x, torch.tensor([1.5, 2.0**-6]).to(E4M3), torch.tensor(0.0))
    plots.draw_step(step, axes)
    cells = [patch for patch in axes.patches if isinstance(patch, Rectangle) and patch.get_width() < 1]
    ones = sorted(
        (round(cell.get_y() + 0.4), round(cell.get_x() + 0.45)) for cell in cells if cell.get_facecolor()[0] == 0
    )
    lost = [(round(cell.get_y() + 0.4), round(cell.get_x() + 0.45)) for cell in cells if cell.get_hatch()]
    # 1.5 twice in full (product, sum, result); 2**-15 lies below the grid of 2**-13.
    assert ones == [(0, 0), (0, 1), (3, 0), (3, 1), (4, 0), (4, 1)]
    assert lost == [(1, 15)]


@pytest.mark.parametrize(
    ("unit", "count", "message"),
    [
        ("sm90", 33, "at most 32"),
        ("sm89", 17, "17 products"),
        ("exact", 2, "sm90, sm89"),
        ("sm90_hmma", 8, "8 products"),
    ],
)
def test_a_step_that_is_none_is_refused(unit: str, count: int, message: str) -> None:
    one = torch.ones(count).to(E4M3)
    with pytest.raises(ValueError, match=message):
        plots.explain_step(one, one, torch.tensor(0.0), unit)


def test_what_is_not_finite_is_refused() -> None:
    nan = torch.tensor([float("nan")]).to(E4M3)
    with pytest.raises(ValueError, match="finite"):
        plots.explain_step(nan, nan, torch.tensor(0.0))


@pytest.mark.parametrize("fmt", fp8ref.FORMATS.values(), ids=lambda fmt: fmt.name)
def test_a_number_line_holds_every_value(fmt: fp8ref.Fp8Format, axes: Axes) -> None:
    assert positive_values(fmt) == sorted(positive_values(fmt))
    assert (positive_values(fmt)[0], positive_values(fmt)[-1]) == (fmt.smallest_subnormal, fmt.max)
    plots.draw_number_line(fmt.dtype, axes, log=True)
    subnormal, normal = (len(lines.get_segments()) for lines in axes.collections)  # type: ignore[attr-defined]
    assert (subnormal, normal) == (2**fmt.mantissa_bits - 1, fmt.max_code - 2**fmt.mantissa_bits + 1)


@pytest.mark.parametrize(("low", "high"), [(-1.0, 1.0), (2.0, 1.0), (1.01, 1.02)])
def test_an_interval_without_values_is_refused(low: float, high: float, axes: Axes) -> None:
    with pytest.raises(ValueError, match="low, high"):
        plots.draw_number_line(E4M3, axes, low=low, high=high)


@pytest.mark.parametrize(("argument", "value"), [("points", 0), ("low", 0.0), ("high", math.inf), ("high", math.nan)])
def test_rounding_errors_of_nothing_are_refused_by_name(axes: Axes, argument: str, value: float) -> None:
    with pytest.raises(ValueError, match=argument):
        plots.draw_rounding_error(E4M3, axes=axes, **{argument: value})  # type: ignore[arg-type]
    assert not axes.lines


def test_a_number_line_without_end_is_refused(axes: Axes) -> None:
    with pytest.raises(ValueError, match="low, high"):
        plots.draw_number_line(E4M3, axes, high=math.inf, log=True)


def test_the_rounding_error_is_that_of_the_format(axes: Axes) -> None:
    plots.draw_rounding_error(E4M3, E5M2, axes=axes, low=1.0, high=64.0)
    for line, mantissa_bits in zip(axes.lines, (3, 2), strict=True):
        half = 2.0 ** -(mantissa_bits + 1)
        assert set(np.asarray(line.get_ydata()).tolist()) == {half / (1 + half)}


def test_series_differ_without_colour() -> None:
    looks = [plots.line_style(index) for index in range(8)]
    assert all(one["linestyle"] != other["linestyle"] for one, other in combinations(looks, 2))
    assert all(one["marker"] != other["marker"] for one, other in combinations(looks, 2))
    assert all(look["color"] in ("black", "0.35") for look in looks)
    with pytest.raises(ValueError, match="index"):
        plots.line_style(-1)


def test_bars_differ_without_colour(axes: Axes) -> None:
    plots.draw_bars(["x"], {str(index): [1.0] for index in range(6)}, axes)
    looks = {(bar.get_hatch(), bar.get_facecolor()) for bar in axes.patches}
    assert len(looks) == 6


@pytest.mark.parametrize("draw", [plots.draw_series, plots.draw_bars])
def test_series_of_other_lengths_are_refused(draw: object, axes: Axes) -> None:
    assert callable(draw)
    with pytest.raises(ValueError, match="'b' has 1 values beside 2"):
        draw(["1", "2"], {"a": [1.0, 2.0], "b": [1.0]}, axes)
    with pytest.raises(ValueError, match="series: got none"):
        draw(["1", "2"], {}, axes)


def test_a_name_that_a_legend_would_leave_out_is_refused(axes: Axes) -> None:
    with pytest.raises(ValueError, match="'_scaled_mm'"):
        plots.draw_series([1.0], {"_scaled_mm": [1.0]}, axes)
    with pytest.raises(ValueError, match="'_scaled_mm'"):
        plots.draw_bars(["1"], {"_scaled_mm": [1.0]}, axes)
    with pytest.raises(ValueError, match="'_scaled_mm'"):
        plots.draw_layers({"_scaled_mm": {"0.up": 1.0}}, axes)


def test_layers_are_grouped_by_kind_and_leave_gaps(axes: Axes) -> None:
    ratios = {"0.up": 30.0, "0.down": 28.0, "1.up": math.inf, "1.down": 27.0}
    plots.draw_layers({"row": ratios, "block": {"0.up": 31.0}}, axes)
    assert [label.get_text() for label in axes.get_xticklabels()] == ["up", "down"]
    up, down = (np.asarray(line.get_ydata()).tolist() for line in axes.lines[:2])
    assert up[0] == 30.0
    assert math.isnan(up[1])
    assert down == [28.0, 27.0]
    legend = [text for text in axes.get_legend_handles_labels()[1] if not text.startswith("_")]
    assert legend == ["row", "block"]
    with pytest.raises(ValueError, match="without any layer"):
        plots.draw_layers({"row": {}}, axes)


def test_an_interval_holds_its_estimate(axes: Axes) -> None:
    with pytest.raises(ValueError, match="'row' is 2"):
        plots.draw_intervals({"row": (2.0, 0.0, 1.0)}, axes)
    with pytest.raises(ValueError, match="none"):
        plots.draw_intervals({}, axes)


def test_without_matplotlib_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"pip install 'fp8ref\[plots\]'"):
        importlib.reload(plots)


def test_a_table_is_markdown_and_text_and_never_ragged() -> None:
    table = plots.Table(["input", "e4m3"], [["500", "448"]])
    assert table._repr_markdown_() == "| input | e4m3 |\n| --- | --: |\n| 500 | 448 |"
    assert repr(table) == "input  e4m3\n500     448"
    with pytest.raises(ValueError, match="1 columns under 2 names"):
        plots.Table(["input", "e4m3"], [["500"]])


def test_the_page_is_as_wide_as_a_page() -> None:
    plots.use_style()
    assert mpl.rcParams["figure.figsize"][0] == plots.PAGE_WIDTH
    assert mpl.rcParams["font.size"] >= 8
