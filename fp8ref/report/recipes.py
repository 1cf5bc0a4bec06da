"""Recipes: the ways to compute a linear layer in FP8 that the report compares, as frozen data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace

from fp8ref.emulation.units import TensorCoreUnit
from fp8ref.recipes import Recipe as LayerRecipe
from fp8ref.report.errors import ReportError


@dataclass(frozen=True, kw_only=True)
class Recipe(LayerRecipe):
    """A layer's recipe with a name, and the unit that is to compute it: what the report compares.

    Scales are dynamic: taken from the values at hand, those of x anew for every call.

    Attributes:
        name: what ``--recipe`` takes and the tables show.
        unit: the tensor-core unit that adds the products.

    >>> RECIPES["row-fast-sm90"].weight_scaling, RECIPES["row-fast-sm90"].use_fast_accum
    ('row', True)
    """

    name: str
    unit: str | TensorCoreUnit

    def __post_init__(self) -> None:
        """Check what a layer's recipe checks, and that no calibration is asked for."""
        super().__post_init__()
        if not self.dynamic:
            raise ReportError(f"recipe {self.name}: it is static, and the report has no calibration; give dynamic=True")

    @property
    def unit_name(self) -> str:
        """The name of the unit."""
        return self.unit if isinstance(self.unit, str) else self.unit.name

    @property
    def is_exact(self) -> bool:
        """True where sums are infinitely precise, so that only quantisation costs anything."""
        return self.unit_name == "exact"

    @property
    def operands(self) -> tuple[object, ...]:
        """What decides the quantised operands: recipes that agree in it differ in accumulation alone."""
        return (
            self.activation_scaling,
            self.weight_scaling,
            self.activation_dtype,
            self.weight_dtype,
            self.scale_format,
            self.activation_bound,
        )


def _table() -> Iterable[Recipe]:
    """The known recipes, those with the same operands next to each other."""
    for name, recipe in (("tensor", LayerRecipe("tensor", "tensor")), ("row", LayerRecipe("row", "row"))):
        for unit in ("sm90", "sm89"):
            yield _computed_by(f"{name}-fast-{unit}", replace(recipe, use_fast_accum=True), unit)
            yield _computed_by(f"{name}-accurate-{unit}", recipe, unit)
        yield _computed_by(f"{name}-exact", recipe, "exact")
    for unit in ("sm90", "sm89", "exact"):
        yield _computed_by(f"block-{unit}", LayerRecipe("128x128", "1x128"), unit)


def _computed_by(name: str, recipe: LayerRecipe, unit: str) -> Recipe:
    """The report's recipe of a layer's recipe."""
    return Recipe(name=name, unit=unit, **{field.name: getattr(recipe, field.name) for field in fields(recipe)})


RECIPES: dict[str, Recipe] = {recipe.name: recipe for recipe in _table()}
"""Every recipe that ``--recipe`` knows. In a name: the scaling (``tensor``: one scale per operand; ``row``: one per
token and one per output channel; ``block``: activations 1x128, weights 128x128), ``fast`` or ``accurate`` accumulation
(block scales have only the accurate kind), and the unit (``sm90`` Hopper, ``sm89`` Ada, ``exact`` an infinitely precise
sum)."""

DEFAULT_RECIPES: tuple[str, ...] = (
    "tensor-fast-sm90",
    "tensor-exact",
    "row-fast-sm90",
    "row-accurate-sm90",
    "row-fast-sm89",
    "row-exact",
    "block-sm90",
    "block-exact",
)
"""What a run without ``--recipe`` compares."""


def select_recipes(names: Sequence[str] | None) -> list[Recipe]:
    """Return the recipes of the given names, in the order of :data:`RECIPES` and each once.

    Args:
        names: recipe names; ``"all"`` stands for every one; None or empty for :data:`DEFAULT_RECIPES`.

    Raises:
        ReportError: a name that is not in :data:`RECIPES`; the message lists those that are.

    >>> [recipe.name for recipe in select_recipes(["row-exact", "tensor-exact"])]
    ['tensor-exact', 'row-exact']
    """
    wanted = set(names or DEFAULT_RECIPES)
    if "all" in wanted:
        return list(RECIPES.values())
    unknown = sorted(wanted - set(RECIPES))
    if unknown:
        raise ReportError(f"--recipe: got {', '.join(unknown)}; give one of: {', '.join(RECIPES)}, all")
    return [recipe for recipe in RECIPES.values() if recipe.name in wanted]
