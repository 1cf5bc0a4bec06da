"""The pieces that a report is made of, a recipe on a window each: independent of each other, so they can be shared.

One process and several compute the same pieces and merge them in the same order, and the number of threads decides no
bit: the figures are the same to the last one. On processors of another kind PyTorch's own products may have other bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from fp8ref.report.errors import ReportError
from fp8ref.report.layers import OracleLinear, QuantisedWeight, computed_by, plain_linears, quantise_and_count
from fp8ref.report.recipes import Recipe
from fp8ref.report.results import Energies, LayerResult, OperandCounts, RecipeResult

_ROWS = 64
"""Rows of logits that are turned into float64 probabilities at a time, to keep memory flat for large vocabularies."""


class Pieces:
    """Every recipe on every window, in this order; weights are quantised anew only where two neighbours differ."""

    def __init__(
        self,
        model: nn.Module,
        windows: Sequence[torch.Tensor],
        recipes: Sequence[Recipe],
        linears: dict[str, nn.Linear],
    ) -> None:
        """Compute nothing yet."""
        self.model = model
        self.windows = windows
        self.recipes = recipes
        self.linears = linears
        self._weights: dict[str, QuantisedWeight] = {}
        self._quantised: tuple[object, ...] = ()

    def __len__(self) -> int:
        """How many there are."""
        return len(self.recipes) * len(self.windows)

    @property
    def products_per_recipe(self) -> int:
        """Multiplications, if the model calls every layer once."""
        return sum(linear.weight.numel() for linear in self.linears.values()) * sum(map(len, self.windows))

    def at(self, index: int) -> tuple[Recipe, int]:
        """The recipe and the number of the window of one of them."""
        number, window = divmod(index, len(self.windows))
        return self.recipes[number], window

    def run(self, index: int, on_products: Callable[[int], None]) -> RecipeResult:
        """Compute one: a result of its window alone; ``on_products`` hears of the multiplications of every layer."""
        recipe, window = self.at(index)
        self._quantise_weights(recipe)
        return self._run(recipe, self.windows[window], on_products)

    def _quantise_weights(self, recipe: Recipe) -> None:
        """Every layer's weight [N, K] under the recipe's weight scaling."""
        wanted = (recipe.weight_scaling, recipe.weight_dtype)
        if self._quantised == wanted:
            return
        self._weights = {
            name: QuantisedWeight(
                *quantise_and_count(linear.weight.detach(), recipe.weight_dtype, recipe.weight_scaling)
            )
            for name, linear in self.linears.items()
        }
        self._quantised = wanted

    def _run(self, recipe: Recipe, window: torch.Tensor, on_products: Callable[[int], None]) -> RecipeResult:
        began = time.perf_counter()
        products = 0

        def count(more: int) -> None:
            nonlocal products
            products += more
            on_products(more)

        oracles = {
            linear: OracleLinear(name, linear, self._weights[name], recipe, count)
            for name, linear in self.linears.items()
        }
        plain = plain_linears(self.model)
        with computed_by(plain):
            expected = _log_probabilities(self.model, window)
        with computed_by({**plain, **oracles}):
            got = _log_probabilities(self.model, window, f"recipe {recipe.name}")
        return RecipeResult(
            recipe,
            tuple(oracle.result() for oracle in oracles.values() if oracle.activations.values),
            _nll(got, window),
            _nll(expected, window),
            _divergence(expected, got),
            int((expected.argmax(-1) == got.argmax(-1))[:-1].sum()),
            products,
            time.perf_counter() - began,
        )

    def merge(self, results: Sequence[RecipeResult]) -> list[RecipeResult]:
        """Put all pieces together, one result a recipe.

        Raises:
            ReportError: the model called none of its linear layers.
        """
        per_recipe = len(self.windows)
        return [
            self._merge(recipe, results[number * per_recipe : (number + 1) * per_recipe])
            for number, recipe in enumerate(self.recipes)
        ]

    def _merge(self, recipe: Recipe, results: Sequence[RecipeResult]) -> RecipeResult:
        layers: dict[str, list[LayerResult]] = {name: [] for name in self.linears}
        for result in results:
            for layer in result.layers:
                layers[layer.name].append(layer)
        merged = tuple(_join(found) for found in layers.values() if found)
        if not merged:
            raise ReportError("model: it calls none of its torch.nn.Linear modules; there is nothing to compute in FP8")
        return RecipeResult(
            recipe,
            merged,
            tuple(value for result in results for value in result.nll),
            tuple(value for result in results for value in result.fp32_nll),
            tuple(value for result in results for value in result.divergence),
            sum(result.same_top for result in results),
            sum(result.products for result in results),
            sum(result.seconds for result in results),
        )


def _join(parts: Sequence[LayerResult]) -> LayerResult:
    """One layer over all its windows."""
    first = parts[0]
    energies, activations = Energies(), OperandCounts()
    for part in parts:
        energies += part.energies
        activations += part.activations
    return LayerResult(first.name, first.in_features, first.out_features, energies, activations, first.weights)


def _log_probabilities(model: nn.Module, window: torch.Tensor, what: str = "fp32") -> torch.Tensor:
    """fp32 log-probabilities [T, vocabulary] of the token after each of the window's T tokens."""
    output: Any = model(input_ids=window[None], use_cache=False)
    logits: torch.Tensor = output.logits[0]
    if not bool(logits.isfinite().all()):
        raise ReportError(f"{what}: the model's logits are not finite on this text; nothing can be compared")
    return logits.log_softmax(-1)


def _nll(log_probabilities: torch.Tensor, window: torch.Tensor) -> tuple[float, ...]:
    """Negative log-likelihood in nats of each token but the first."""
    picked = log_probabilities[:-1].gather(1, window[1:, None])
    return tuple(-value for value in picked[:, 0].tolist())


def _divergence(expected: torch.Tensor, got: torch.Tensor) -> tuple[float, ...]:
    """Kullback-Leibler divergence in nats of ``got`` from ``expected`` [T, vocabulary], for all rows but the last."""
    values: list[float] = []
    for p, q in zip(expected[:-1].split(_ROWS), got[:-1].split(_ROWS), strict=True):
        values += (p.double().exp() * (p.double() - q.double())).sum(-1).tolist()
    return tuple(values)
