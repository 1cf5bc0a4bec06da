"""What all pictures share: their width, their fonts, and series that differ without colour."""

from __future__ import annotations

from typing import Any

from matplotlib import pyplot as plt
from matplotlib.axes import Axes

PAGE_WIDTH = 6.9
"""Inches between the margins of an A4 or letter page."""

_SHAPES = (
    ("-", "o", "black"),
    ("--", "s", "black"),
    (":", "^", "black"),
    ("-.", "D", "0.35"),
    ((0, (8, 2)), "v", "0.35"),
    ((0, (1, 3)), "x", "black"),
    ((0, (4, 1, 1, 1, 1, 1)), "*", "0.35"),
    ((0, (12, 3)), "P", "black"),
)

_SETTINGS: dict[str, Any] = {
    "figure.figsize": (PAGE_WIDTH, 2.8),
    "figure.constrained_layout.use": True,
    "figure.dpi": 130,
    "savefig.dpi": 200,
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "0.88",
    "grid.linewidth": 0.6,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 4,
    "hatch.linewidth": 0.6,
}


def use_style() -> None:
    """Set matplotlib's defaults for a page: 6.9 inches wide, fonts of 8 and 9 points, light grids.

    They stay until ``matplotlib.rcdefaults()``; ``with matplotlib.rc_context():`` around the call limits them.

    >>> import matplotlib
    >>> with matplotlib.rc_context():
    ...     use_style()
    ...     matplotlib.rcParams["figure.figsize"]
    [6.9, 2.8]
    """
    plt.style.use(_SETTINGS)


def line_style(index: int) -> dict[str, Any]:
    """The look of series number ``index`` (from 0): a dash, a marker and a grey; no two of the first eight are alike.

    Args:
        index: 0 or more; the looks repeat from 8 on.

    Raises:
        ValueError: below 0.

    >>> line_style(1)
    {'linestyle': '--', 'marker': 's', 'color': 'black', 'markerfacecolor': 'white'}
    """
    if index < 0:
        raise ValueError(f"index: got {index}; give 0 or more")
    dash, marker, grey = _SHAPES[index % len(_SHAPES)]
    return {"linestyle": dash, "marker": marker, "color": grey, "markerfacecolor": "white" if index % 2 else grey}


def axes_or_current(axes: Axes | None) -> Axes:
    """The axes given, or pyplot's current ones."""
    return plt.gca() if axes is None else axes


def check_name(name: str) -> None:
    """Raise for a name that matplotlib would silently leave out of a legend."""
    if name.startswith("_"):
        raise ValueError(f"series: got the name {name!r}; matplotlib's legends leave out what begins with _: rename it")
