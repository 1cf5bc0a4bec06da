"""Pictures of FP8 arithmetic that read in black and white at the width of a page; needs the extra ``plots``.

Each function draws on the matplotlib axes that it is given, or on the current ones, and returns them. Nothing is
drawn that was not computed: :func:`draw_step` holds its result equal to :func:`fp8ref.fused_dot_add`.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("matplotlib") is None:
    raise ImportError("fp8ref.plots: matplotlib is not installed; run: pip install 'fp8ref[plots]'")

from fp8ref.plots.formats import draw_number_line, draw_rounding_error
from fp8ref.plots.layers import draw_intervals, draw_layers
from fp8ref.plots.series import draw_bars, draw_series
from fp8ref.plots.step import Step, Term, draw_step, explain_step
from fp8ref.plots.style import PAGE_WIDTH, line_style, use_style
from fp8ref.plots.table import Table

__all__ = [
    "PAGE_WIDTH",
    "Step",
    "Table",
    "Term",
    "draw_bars",
    "draw_intervals",
    "draw_layers",
    "draw_number_line",
    "draw_rounding_error",
    "draw_series",
    "draw_step",
    "explain_step",
    "line_style",
    "use_style",
]
