"""The measurement: a causal language model on a text, in fp32 and under each recipe."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from fp8ref.report.errors import ReportError
from fp8ref.report.layers import OracleLinear, QuantisedWeight, choose_linears, computed_by, quantise_and_count
from fp8ref.report.recipes import Recipe
from fp8ref.report.results import NotConverted, RecipeResult, Report

WINDOW = 512
"""Longer token sequences are cut in windows of this many tokens, each predicted from its own beginning."""

MIN_TOKENS = 8
"""Fewer tokens than this say nothing."""

_ROWS = 64
"""Rows of logits that are turned into float64 probabilities at a time, to keep memory flat for large vocabularies."""


class Progress(Protocol):
    """Who wants to know how far a run is."""

    def begin(self, recipes: Sequence[str], products: int) -> None:
        """The run starts: these recipes, each with this many multiplications."""

    def recipe(self, name: str) -> None:
        """A recipe starts."""

    def advance(self, products: int) -> None:
        """This many more multiplications are done."""

    def done(self, name: str, seconds: float) -> None:
        """A recipe is done."""


class Silent:
    """A :class:`Progress` that shows nothing."""

    def begin(self, recipes: Sequence[str], products: int) -> None:
        """Show nothing."""

    def recipe(self, name: str) -> None:
        """Show nothing."""

    def advance(self, products: int) -> None:
        """Show nothing."""

    def done(self, name: str, seconds: float) -> None:
        """Show nothing."""


@dataclass
class _Losses:
    """Per-token figures, collected window by window."""

    nll: list[float] = field(default_factory=list)
    fp32_nll: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    same_top: int = 0


def measure(
    model: nn.Module,
    tokens: torch.Tensor,
    recipes: Sequence[Recipe],
    *,
    include_head: bool = False,
    model_name: str = "",
    text_name: str = "",
    progress: Progress | None = None,
) -> Report:
    """Measure what FP8 does to a causal language model.

    Args:
        model: an fp32 model on the CPU that returns ``.logits`` [1, T, vocabulary] for int64 token ids [1, T], as those
            of ``transformers`` do. It is run in evaluation mode and left as it was.
        tokens: int64 [T], at least :data:`MIN_TOKENS`.
        recipes: at least one.
        include_head: also compute the output head in FP8.
        model_name: what the report calls the model.
        text_name: what it calls the text.
        progress: told after every layer.

    Raises:
        ReportError: too few tokens, no linear layer to convert, a model that is not fp32, NaN or Inf on the way.

    >>> from types import SimpleNamespace
    >>> from fp8ref.report.recipes import RECIPES
    >>> class Bigrams(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table, self.linear = nn.Embedding(16, 32), nn.Linear(32, 16)
    ...
    ...     def forward(self, input_ids, use_cache):
    ...         return SimpleNamespace(logits=self.linear(self.table(input_ids)))
    >>> report = measure(Bigrams(), torch.arange(16), [RECIPES["row-exact"]])
    >>> [(layer.name, layer.accumulation_snr_db) for layer in report.recipes[0].layers]
    [('linear', inf)]
    """
    began = time.perf_counter()
    linears, rest = _check(model, tokens, recipes, include_head)
    windows = [window for window in tokens.split(WINDOW) if len(window) > 1]
    with _evaluating(model):
        fp32_nll = [value for window in windows for value in _nll(_log_probabilities(model, window), window)]
        results = _run_recipes(model, windows, recipes, linears, progress or Silent())
    for name, linear in linears.items():
        if any(name not in {layer.name for layer in result.layers} for result in results):
            rest.append(NotConverted(name, "Linear", linear.weight.numel(), "not reached by this text"))
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    return Report(
        model_name,
        text_name,
        len(tokens),
        WINDOW,
        digest,
        tuple(fp32_nll),
        tuple(results),
        tuple(rest),
        time.perf_counter() - began,
    )


def _check(
    model: nn.Module, tokens: torch.Tensor, recipes: Sequence[Recipe], include_head: bool
) -> tuple[dict[str, nn.Linear], list[NotConverted]]:
    """Refuse what cannot be measured; return the layers to convert and the rest."""
    if tokens.dim() != 1 or tokens.dtype != torch.int64:
        raise ReportError(f"tokens: got {tokens.dtype} {list(tokens.shape)}; give int64 token ids [T]")
    if len(tokens) < MIN_TOKENS:
        raise ReportError(f"tokens: got {len(tokens)}; give {MIN_TOKENS} or more")
    if not recipes:
        raise ReportError("recipes: got none; give at least one")
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            raise ReportError(
                f"model: parameter {name} is {parameter.dtype} on {parameter.device}; load the model in "
                "torch.float32 on the CPU"
            )
    linears, rest = choose_linears(model, include_head=include_head)
    if not linears:
        kinds = ", ".join(sorted({module.kind for module in rest}))
        raise ReportError(f"model: it has no torch.nn.Linear to compute in FP8, only {kinds}")
    return linears, rest


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without gradients and with every module in evaluation mode; afterwards each is in the mode it had."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _quantise_weights(linears: dict[str, nn.Linear], recipe: Recipe) -> dict[str, QuantisedWeight]:
    """Every layer's weight [N, K] under the recipe's weight scaling."""
    return {
        name: QuantisedWeight(
            *quantise_and_count(linear.weight.detach(), recipe.weight_dtype, recipe.weight_scaling, recipe.scale_format)
        )
        for name, linear in linears.items()
    }


def _run_recipes(
    model: nn.Module,
    windows: Sequence[torch.Tensor],
    recipes: Sequence[Recipe],
    linears: dict[str, nn.Linear],
    progress: Progress,
) -> list[RecipeResult]:
    """Run the model under every recipe; weights are quantised anew only where two neighbours differ in them."""
    size = sum(linear.weight.numel() for linear in linears.values())
    progress.begin([recipe.name for recipe in recipes], size * sum(map(len, windows)))
    results: list[RecipeResult] = []
    weights: dict[str, QuantisedWeight] = {}
    previous: tuple[object, ...] = ()
    for recipe in recipes:
        if previous != (recipe.weight_scaling, recipe.weight_dtype, recipe.scale_format):
            weights = _quantise_weights(linears, recipe)
            previous = (recipe.weight_scaling, recipe.weight_dtype, recipe.scale_format)
        results.append(_run_recipe(model, windows, recipe, linears, weights, progress))
    return results


def _run_recipe(
    model: nn.Module,
    windows: Sequence[torch.Tensor],
    recipe: Recipe,
    linears: dict[str, nn.Linear],
    weights: dict[str, QuantisedWeight],
    progress: Progress,
) -> RecipeResult:
    """Run the model under one recipe, beside the fp32 model on the same windows."""
    began = time.perf_counter()
    progress.recipe(recipe.name)
    products = 0

    def on_products(count: int) -> None:
        nonlocal products
        products += count
        progress.advance(count)

    oracles = {
        linear: OracleLinear(name, linear, weights[name], recipe, on_products) for name, linear in linears.items()
    }
    losses = _Losses()
    for window in windows:
        expected = _log_probabilities(model, window)
        with computed_by(oracles):
            got = _log_probabilities(model, window, f"recipe {recipe.name}")
        losses.nll += _nll(got, window)
        losses.fp32_nll += _nll(expected, window)
        losses.divergence += _divergence(expected, got)
        losses.same_top += int((expected.argmax(-1) == got.argmax(-1))[:-1].sum())
    layers = tuple(oracle.result() for oracle in oracles.values() if oracle.activations.values)
    if not layers:
        raise ReportError("model: it calls none of its torch.nn.Linear modules; there is nothing to compute in FP8")
    seconds = time.perf_counter() - began
    progress.done(recipe.name, seconds)
    return RecipeResult(
        recipe,
        layers,
        tuple(losses.nll),
        tuple(losses.fp32_nll),
        tuple(losses.divergence),
        losses.same_top,
        products,
        seconds,
    )


def _log_probabilities(model: nn.Module, window: torch.Tensor, what: str = "fp32") -> torch.Tensor:
    """fp32 log-probabilities [T, vocabulary] of the token after each of the window's T tokens."""
    output: Any = model(input_ids=window[None], use_cache=False)
    logits: torch.Tensor = output.logits[0]
    if not bool(logits.isfinite().all()):
        raise ReportError(f"{what}: the model's logits are not finite on this text; nothing can be compared")
    return logits.log_softmax(-1)


def _nll(log_probabilities: torch.Tensor, window: torch.Tensor) -> list[float]:
    """Negative log-likelihood in nats of each token but the first."""
    picked = log_probabilities[:-1].gather(1, window[1:, None])
    return [-value for value in picked[:, 0].tolist()]


def _divergence(expected: torch.Tensor, got: torch.Tensor) -> list[float]:
    """Kullback-Leibler divergence in nats of ``got`` from ``expected`` [T, vocabulary], for all rows but the last."""
    values: list[float] = []
    for p, q in zip(expected[:-1].split(_ROWS), got[:-1].split(_ROWS), strict=True):
        values += (p.double().exp() * (p.double() - q.double())).sum(-1).tolist()
    return values
