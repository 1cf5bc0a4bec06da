"""Recipes are frozen data, checked field by field; the report's are uses of them."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from fp8ref import RECIPES, Recipe
from fp8ref.emulation.scales import PAIRS, SCALINGS
from fp8ref.recipes import recipe_of
from fp8ref.report import RECIPES as REPORTED
from fp8ref.report import Recipe as ReportRecipe
from fp8ref.report import ReportError, measure
from tiny_models import tiny_model, tokens


def test_recipes_are_frozen_hashable_data() -> None:
    recipe = Recipe()
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.dynamic = False  # type: ignore[misc]
    assert hash(dataclasses.replace(recipe)) == hash(recipe)
    assert len(set(RECIPES.values())) == len(RECIPES)


def test_the_table_covers_scalings_and_kinds() -> None:
    found = {(r.activation_scaling, r.weight_scaling) for r in RECIPES.values()}
    assert found >= {("row", "row"), ("tensor", "tensor"), ("tensor", "row"), ("1x128", "128x128")}
    assert {r.dynamic for r in RECIPES.values()} == {True, False}
    assert {r.scale_format for r in RECIPES.values()} == {"float32", "ue8m0"}


def test_every_pair_is_taken_or_refused_by_name() -> None:
    for weight, x in itertools.product(SCALINGS, SCALINGS):
        plain = {weight, x} <= {"tensor", "row"}
        if plain or ((x, weight) in PAIRS and x == "1x128"):
            assert Recipe(weight, x).weight_scaling == weight
        else:
            with pytest.raises(
                ValueError, match=f"activation_scaling: got '{x}' beside '{weight}' weights; give one of"
            ):
                Recipe(weight, x)


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"weight_scaling": "channel"}, ValueError, "weight_scaling: got 'channel'"),
        ({"activation_scaling": "token"}, ValueError, "activation_scaling: got 'token'"),
        ({"weight_dtype": torch.int8}, TypeError, "weight_dtype: got torch.int8"),
        ({"activation_dtype": torch.float16}, TypeError, "activation_dtype: got torch.float16"),
        ({"dynamic": 1}, TypeError, "dynamic: got 1"),
        ({"dynamic": False}, ValueError, "activation_scaling: got 'row' with dynamic=False"),
        ({"scale_format": "e8m0"}, ValueError, "scale_format: got 'e8m0'"),
        ({"use_fast_accum": None}, TypeError, "use_fast_accum: got None"),
        (
            {"weight_scaling": "128x128", "activation_scaling": "1x128", "use_fast_accum": True},
            ValueError,
            "use_fast_accum: got True with block scales",
        ),
        ({"activation_bound": 0.0}, ValueError, "activation_bound: got 0.0"),
        ({"activation_bound": float("inf")}, ValueError, "activation_bound: got inf"),
        ({"activation_bound": float("nan")}, ValueError, "activation_bound: got nan"),
        ({"activation_bound": "1200"}, TypeError, "activation_bound: got '1200'"),
        (
            {"activation_scaling": "tensor", "dynamic": False, "activation_bound": 3.0},
            ValueError,
            "activation_bound: got 3.0 with dynamic=False",
        ),
    ],
)
def test_an_error_names_the_field(fields: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        Recipe(**fields)


def test_names_stand_for_recipes() -> None:
    assert recipe_of("block") is RECIPES["block"] is recipe_of(RECIPES["block"])
    with pytest.raises(ValueError, match=r"recipe: got 'blocks'; give one of .*'block'"):
        recipe_of("blocks")
    for wrong in (None, Recipe, REPORTED["row-exact"]):
        with pytest.raises(TypeError, match=f"recipe: got {type(wrong).__name__}"):
            recipe_of(wrong)  # type: ignore[arg-type]


def test_the_reports_recipes_are_the_layers_with_a_name_and_a_unit() -> None:
    assert issubclass(ReportRecipe, Recipe)
    mine = {dataclasses.replace(recipe, use_fast_accum=False) for recipe in RECIPES.values()}
    for recipe in REPORTED.values():
        shared = {field.name: getattr(recipe, field.name) for field in dataclasses.fields(Recipe)}
        assert dataclasses.replace(Recipe(**shared), use_fast_accum=False) in mine


def test_the_report_takes_every_dynamic_recipe() -> None:
    static = RECIPES["row-static"]
    with pytest.raises(ReportError, match="recipe s: it is static"):
        ReportRecipe(name="s", unit="sm90", **{f.name: getattr(static, f.name) for f in dataclasses.fields(static)})
    model, results = tiny_model(), []
    for fields in ({}, {"scale_format": "ue8m0"}, {"activation_bound": 0.5}):
        recipe = ReportRecipe(name="r", unit="sm90", **fields)
        results.append(measure(model, tokens(16), [recipe]).recipes[0].nll)
    assert len(set(results)) == 3, "a field left no trace"
