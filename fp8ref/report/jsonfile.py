"""The report as JSON: everything that was measured, and what is needed to measure it again."""

from __future__ import annotations

import json
import math
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from fp8ref.report.recipes import Recipe
from fp8ref.report.results import Estimate, LayerResult, OperandCounts, RecipeResult, Report

SCHEMA = 1
"""Raised when a field changes its meaning or goes."""


def report_to_dict(report: Report) -> dict[str, Any]:
    """The report as plain data that JSON can hold.

    A figure that is not finite is None: a signal-to-noise ratio without noise, above all; the energies that the ratios
    are made of are there too, and always finite. Names end in their unit; shares are of 1.
    """
    return {
        "schema": SCHEMA,
        "versions": {"python": platform.python_version(), **_versions()},
        "model": report.model,
        "text": report.text,
        "tokens": report.tokens,
        "token_sha256": report.token_sha256,
        "window": report.window,
        "predicted_tokens": len(report.fp32_nll),
        "seconds": report.seconds,
        "fp32": {
            "perplexity": _finite(report.fp32_perplexity),
            "nll_nats": _estimate(Estimate.of(report.fp32_nll)),
        },
        "recipes": [_recipe_result(report, result) for result in report.recipes],
        "not_converted": [
            {"name": m.name, "kind": m.kind, "parameters": m.parameters, "reason": m.reason}
            for m in report.not_converted
        ],
    }


def write_json(report: Report, path: Path) -> None:
    """Write the report to a file."""
    path.write_text(json.dumps(report_to_dict(report), indent=1, allow_nan=False) + "\n", encoding="utf-8")


def _versions() -> dict[str, str]:
    """Of the packages that decide the figures."""
    return {name: metadata.version(name) for name in ("fp8ref", "torch", "transformers")}


def _finite(value: float) -> float | None:
    """The value, or None for Inf and NaN, which JSON has no word for."""
    return value if math.isfinite(value) else None


def _estimate(estimate: Estimate) -> dict[str, float]:
    """Mean, standard error and interval."""
    low, high = estimate.interval95
    return {"mean": estimate.mean, "standard_error": estimate.standard_error, "low95": low, "high95": high}


def _definition(recipe: Recipe) -> dict[str, Any]:
    """All of a recipe."""
    return {
        "name": recipe.name,
        "activation_scaling": recipe.activation_scaling,
        "weight_scaling": recipe.weight_scaling,
        "use_fast_accum": recipe.use_fast_accum,
        "unit": recipe.unit_name,
        "activation_dtype": str(recipe.activation_dtype).removeprefix("torch."),
        "weight_dtype": str(recipe.weight_dtype).removeprefix("torch."),
        "scale_format": recipe.scale_format,
        "activation_bound": recipe.activation_bound,
    }


def _counts(counts: OperandCounts) -> dict[str, float]:
    """Counts and shares of one operand."""
    return {
        "values": counts.values,
        "at_max": counts.at_max,
        "at_max_share": counts.at_max_share,
        "flushed": counts.flushed,
        "flushed_share": counts.flushed_share,
    }


def _recipe_result(report: Report, result: RecipeResult) -> dict[str, Any]:
    """One recipe with its layers."""
    twin = report.exact_twin(result)
    return {
        "recipe": _definition(result.recipe),
        "seconds": result.seconds,
        "products": result.products,
        "perplexity": _finite(result.perplexity),
        "delta_nll_nats": _estimate(result.delta_nll),
        "delta_nll_nats_from_accumulation": None if twin is None else _estimate(result.delta_nll_to(twin.nll)),
        "kl_divergence_nats": _estimate(Estimate.of(result.divergence)),
        "same_top_share": result.same_top_share,
        "median_snr_db": {
            "total": _finite(result.median_total_snr_db),
            "quantisation": _finite(result.median_quantisation_snr_db),
            "accumulation": _finite(result.median_accumulation_snr_db),
        },
        "activations": _counts(result.activations),
        "weights": _counts(result.weights),
        "layers": [_layer(layer) for layer in result.layers],
    }


def _layer(layer: LayerResult) -> dict[str, Any]:
    """One layer."""
    energies = layer.energies
    return {
        "name": layer.name,
        "in_features": layer.in_features,
        "out_features": layer.out_features,
        "snr_db": {
            "total": _finite(layer.total_snr_db),
            "quantisation": _finite(layer.quantisation_snr_db),
            "accumulation": _finite(layer.accumulation_snr_db),
        },
        "energies": {
            "signal": energies.signal,
            "exact_signal": energies.exact_signal,
            "quantisation_noise": energies.quantisation_noise,
            "accumulation_noise": energies.accumulation_noise,
            "total_noise": energies.total_noise,
        },
        "activations": _counts(layer.activations),
        "weights": _counts(layer.weights),
    }
