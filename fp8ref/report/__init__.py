"""What FP8 does to a language model: :func:`measure` behind the command ``fp8ref report``.

Measuring needs only torch; the command line, loading models and drawing need the extra ``report``.
"""

from fp8ref.report.errors import ReportError
from fp8ref.report.recipes import DEFAULT_RECIPES, RECIPES, Recipe, select_recipes
from fp8ref.report.results import (
    Energies,
    Estimate,
    LayerResult,
    NotConverted,
    OperandCounts,
    RecipeResult,
    Report,
    snr_db,
)
from fp8ref.report.run import measure

__all__ = [
    "DEFAULT_RECIPES",
    "RECIPES",
    "Energies",
    "Estimate",
    "LayerResult",
    "NotConverted",
    "OperandCounts",
    "Recipe",
    "RecipeResult",
    "Report",
    "ReportError",
    "measure",
    "select_recipes",
    "snr_db",
]
