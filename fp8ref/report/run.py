"""The measurement: a causal language model on a text, in fp32 and under each recipe."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from fp8ref.report.errors import ReportError
from fp8ref.report.layers import choose_linears
from fp8ref.report.listening import Progress, Silent
from fp8ref.report.pieces import Pieces
from fp8ref.report.ranks import Alone, Ranks
from fp8ref.report.recipes import Recipe
from fp8ref.report.results import NotConverted, RecipeResult, Report

WINDOW = 512
"""Longer token sequences are cut in windows of this many tokens, each predicted from its own beginning."""

MIN_TOKENS = 8
"""Fewer tokens than this say nothing."""


def measure(
    model: nn.Module,
    tokens: torch.Tensor,
    recipes: Sequence[Recipe],
    *,
    include_head: bool = False,
    model_name: str = "",
    text_name: str = "",
    progress: Progress | None = None,
    ranks: Ranks | None = None,
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
        ranks: the processes that share the work, each of which calls this with the same arguments and gets the same
            report; :func:`fp8ref.report.ranks.joined` finds them. None: this one alone.

    Raises:
        ReportError: too few tokens, no linear layer to convert, a model that is not fp32, NaN or Inf on the way; of
            several processes, one that is lost or was given something else.

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
    ranks, progress = ranks or Alone(), progress or Silent()
    digest = hashlib.sha256(tokens.numpy().tobytes()).hexdigest()
    if ranks.count > 1:
        ranks.check_same(
            {
                "PyTorch": torch.__version__,
                "the recipes": ", ".join(recipe.name for recipe in recipes),
                "the text": f"{len(tokens)} tokens {digest}",
                "the model": f"{len(linears)} layers of parameters {_fingerprint(model)}",
            }
        )
    with _evaluating(model):
        results = _run(Pieces(model, windows, recipes, linears), ranks, progress)
    for name, linear in linears.items():
        if any(name not in {layer.name for layer in result.layers} for result in results):
            rest.append(NotConverted(name, "Linear", linear.weight.numel(), "not reached by this text"))
    return Report(
        model_name,
        text_name,
        len(tokens),
        WINDOW,
        digest,
        results[0].fp32_nll,
        tuple(results),
        tuple(rest),
        time.perf_counter() - began,
    )


def _run(pieces: Pieces, ranks: Ranks, progress: Progress) -> list[RecipeResult]:
    """Compute every piece, here or on another rank, and merge them."""
    progress.begin([recipe.name for recipe in pieces.recipes], pieces.products_per_recipe)
    alone = ranks.count == 1
    began = time.perf_counter()

    def work(index: int, advance: Callable[[int], None]) -> RecipeResult:
        nonlocal began
        recipe, window = pieces.at(index)
        if alone and window == 0:
            began = time.perf_counter()
            progress.recipe(recipe.name)
        result = pieces.run(index, advance)
        if alone and window == len(pieces.windows) - 1:
            progress.done(recipe.name, time.perf_counter() - began)
        return result

    results = pieces.merge(ranks.share(len(pieces), work, progress.advance))
    if not alone:
        for result in results:
            progress.done(result.recipe.name, result.seconds)
    return results


def _fingerprint(model: nn.Module) -> str:
    """A digest of every parameter's name and bits."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        digest.update(f"{name} {list(parameter.shape)}".encode())
        digest.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


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
