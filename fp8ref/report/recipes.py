"""Recipes: the ways to compute a linear layer in FP8 that the report compares, as frozen data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from fp8ref.emulation.scales import Scaling
from fp8ref.emulation.units import TensorCoreUnit
from fp8ref.report.errors import ReportError


@dataclass(frozen=True)
class Recipe:
    """One way to compute ``x @ weight.t()`` in FP8.

    Scales are dynamic: taken from the values at hand, those of x anew for every call.

    Attributes:
        name: what ``--recipe`` takes and the tables show.
        activation_scaling: ``scaling=`` of :func:`fp8ref.quantize` for x [tokens, K].
        weight_scaling: the same for the weight [N, K]; ``"row"`` is one scale per output channel.
        use_fast_accum: one accumulator chain over all of K instead of a promotion to fp32 every 128 (block scales
            always promote, so there it must be False).
        unit: the tensor-core unit that adds the products.
        activation_dtype, weight_dtype: the two FP8 formats.

    >>> RECIPES["row-fast-sm90"].weight_scaling, RECIPES["row-fast-sm90"].use_fast_accum
    ('row', True)
    """

    name: str
    activation_scaling: Scaling
    weight_scaling: Scaling
    use_fast_accum: bool
    unit: str | TensorCoreUnit
    activation_dtype: torch.dtype = torch.float8_e4m3fn
    weight_dtype: torch.dtype = torch.float8_e4m3fn

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
        return (self.activation_scaling, self.weight_scaling, self.activation_dtype, self.weight_dtype)


def _table() -> Iterable[Recipe]:
    """The known recipes, those with the same operands next to each other."""
    scalings: tuple[Scaling, ...] = ("tensor", "row")
    for scaling in scalings:
        for unit in ("sm90", "sm89"):
            for mode in ("fast", "accurate"):
                yield Recipe(f"{scaling}-{mode}-{unit}", scaling, scaling, mode == "fast", unit)
        yield Recipe(f"{scaling}-exact", scaling, scaling, False, "exact")
    for unit in ("sm90", "sm89"):
        yield Recipe(f"block-{unit}", "1x128", "128x128", False, unit)
    yield Recipe("block-exact", "1x128", "128x128", False, "exact")


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
