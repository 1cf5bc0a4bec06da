"""A model's linear layers, computed by the oracle and measured on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from fp8ref.emulation.formats import format_of
from fp8ref.emulation.lanes import for_each
from fp8ref.emulation.matmul import emulate_matmul
from fp8ref.emulation.quantize import ScaledTensor, ScaleFormat, quantize
from fp8ref.emulation.scales import Scaling
from fp8ref.report.errors import ReportError
from fp8ref.report.recipes import Recipe
from fp8ref.report.results import Energies, LayerResult, NotConverted, OperandCounts

_ROWS = 64
"""Rows of a plain product that one thread computes."""

OnProducts = Callable[[int], None]
"""Called after each product of matrices with the number of multiplications done."""


@dataclass(frozen=True)
class QuantisedWeight:
    """A weight's codes and scales, and how its values became codes."""

    scaled: ScaledTensor
    counts: OperandCounts


def quantise_and_count(
    x: torch.Tensor,
    dtype: torch.dtype,
    scaling: Scaling,
    scale_format: ScaleFormat = "float32",
    absmax_bound: float | None = None,
) -> tuple[ScaledTensor, OperandCounts]:
    """Quantise a matrix with dynamic scales and count its saturated and flushed values.

    Args:
        x: fp32 [rows, K].
        dtype: an FP8 dtype.
        scaling: ``scaling=`` of :func:`fp8ref.quantize`, and so are the two that follow.
        scale_format: see there.
        absmax_bound: see there.

    >>> _, counts = quantise_and_count(torch.tensor([[448.0, 0.0, 1e-4]]), torch.float8_e4m3fn, "row")
    >>> counts
    OperandCounts(values=3, at_max=1, flushed=1)
    """
    scaled = quantize(x, dtype, scaling=scaling, scale_format=scale_format, absmax_bound=absmax_bound)
    magnitude = scaled.data.view(torch.uint8) & 0x7F
    at_max = int((magnitude == format_of(dtype).max_code).sum())
    flushed = int(((magnitude == 0) & (x != 0)).sum())
    return scaled, OperandCounts(x.numel(), at_max, flushed)


def choose_linears(model: nn.Module, *, include_head: bool) -> tuple[dict[str, nn.Linear], list[NotConverted]]:
    """Split a model's modules with parameters into those the oracle computes and the rest.

    Args:
        model: a model; one from ``transformers`` also says which module is its output head.
        include_head: also compute the output head.

    Returns:
        The linear layers by name, and every other module that has parameters of its own, with the reason.

    >>> linears, rest = choose_linears(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), include_head=False)
    >>> list(linears), rest[0].reason
    (['0'], 'no matrix product')
    """
    find_head = getattr(model, "get_output_embeddings", None)
    head = find_head() if callable(find_head) else None
    linears: dict[str, nn.Linear] = {}
    rest = []
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own:
            continue
        if module is head and not include_head:
            reason = "output head: engines keep it in 16 bits (--lm-head converts it)"
        elif type(module) is nn.Linear:  # a subclass may compute something else
            linears[name] = module
            continue
        elif isinstance(module, nn.Embedding):
            reason = "a look-up, no product"
        elif max(parameter.dim() for parameter in own) < 2:
            reason = "no matrix product"
        else:
            reason = "not a torch.nn.Linear: its products stay in fp32"
        rest.append(NotConverted(name, type(module).__name__, sum(parameter.numel() for parameter in own), reason))
    return linears, rest


def product_of_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``, some rows at a time, each on one thread: with more its last bits are others.

    Args:
        x: [..., K].
        weight: [N, K].
        bias: [N].

    >>> product_of_rows(torch.ones(3, 2), torch.ones(1, 2))
    tensor([[2.],
            [2.],
            [2.]])
    """
    rows = x.reshape(-1, x.shape[-1])
    result = rows.new_empty(rows.shape[0], weight.shape[0])
    height = max(1, min(_ROWS, -(-rows.shape[0] // 2)))  # two pieces at least, or all threads would work on the one

    def multiply(start: int) -> None:
        result[start : start + height] = nn.functional.linear(rows[start : start + height], weight, bias)

    for_each(multiply, iter(range(0, rows.shape[0], height)), x.device)
    return result.reshape(*x.shape[:-1], weight.shape[0])


def plain_linears(model: nn.Module) -> dict[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]:
    """Replacements for :func:`computed_by` that give every linear layer the same bits on any number of threads.

    >>> len(plain_linears(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    1
    """

    def replacement(linear: nn.Linear) -> Callable[[torch.Tensor], torch.Tensor]:
        return lambda x: product_of_rows(x, linear.weight, linear.bias)

    return {module: replacement(module) for module in model.modules() if type(module) is nn.Linear}


class OracleLinear:
    """Computes one linear layer under one recipe and adds up what that costs.

    The output is fp32, and the bias is added in fp32, so that the only differences from the fp32 layer are FP8's.

    >>> from fp8ref.report.recipes import RECIPES
    >>> linear, recipe = nn.Linear(2, 1, bias=False), RECIPES["row-exact"]
    >>> _ = linear.weight.data.fill_(448.0)
    >>> weight = QuantisedWeight(
    ...     *quantise_and_count(linear.weight.detach(), recipe.weight_dtype, recipe.weight_scaling)
    ... )
    >>> oracle = OracleLinear("only", linear, weight, recipe, lambda products: None)
    >>> oracle(torch.full((1, 2), 448.0)), oracle.result().accumulation_snr_db
    (tensor([[401408.]]), inf)
    """

    def __init__(
        self, name: str, linear: nn.Linear, weight: QuantisedWeight, recipe: Recipe, on_products: OnProducts
    ) -> None:
        """Compute the layer ``linear``, which is only read, from its quantised weight.

        Args:
            name: the layer's name, for messages.
            linear: the layer [N, K].
            weight: its weight under the recipe's weight scaling.
            recipe: how to compute it.
            on_products: called after each call with the number of multiplications.
        """
        self.name = name
        self.linear = linear
        self.weight = weight
        self.recipe = recipe
        self.on_products = on_products
        self.energies = Energies()
        self.activations = OperandCounts()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return fp32 [..., N] for fp32 x [..., K]."""
        recipe = self.recipe
        rows = x.reshape(-1, self.linear.in_features)
        a, counts = quantise_and_count(
            rows, recipe.activation_dtype, recipe.activation_scaling, recipe.scale_format, recipe.activation_bound
        )
        b = self.weight.scaled.t()
        exact = emulate_matmul(a, b, out_dtype=torch.float32, unit="exact")
        output = exact
        if not recipe.is_exact:
            output = emulate_matmul(
                a, b, out_dtype=torch.float32, use_fast_accum=recipe.use_fast_accum, unit=recipe.unit
            )
        if not bool(output.isfinite().all()):
            raise ReportError(
                f"recipe {recipe.name}: layer {self.name} gives NaN or Inf, from an input of absmax "
                f"{rows.abs().max().item():.3g}; the report needs finite activations"
            )
        self.activations += counts
        self.energies += _energies(rows, self.linear.weight.detach(), exact, output)
        self.on_products(rows.shape[0] * self.linear.weight.numel())
        y = output if self.linear.bias is None else output + self.linear.bias
        return y.reshape(*x.shape[:-1], self.linear.out_features)

    def result(self) -> LayerResult:
        """What the calls so far add up to."""
        return LayerResult(
            self.name,
            self.linear.in_features,
            self.linear.out_features,
            self.energies,
            self.activations,
            self.weight.counts,
        )


def _energies(x: torch.Tensor, weight: torch.Tensor, exact: torch.Tensor, output: torch.Tensor) -> Energies:
    """The energies of one call: x [M, K], weight [N, K], exact and output [M, N], all fp32."""

    def energy(values: torch.Tensor) -> float:
        # Row by row: torch splits a sum over everything by threads, and its last bits with it.
        return float(values.square().sum(-1).sum())

    reference = product_of_rows(x.double(), weight.double())
    exact, output = exact.double(), output.double()
    return Energies(
        energy(reference),
        energy(exact),
        energy(exact - reference),
        energy(output - exact),
        energy(output - reference),
    )


@contextmanager
def computed_by(replacements: Mapping[nn.Linear, Callable[[torch.Tensor], torch.Tensor]]) -> Iterator[None]:
    """Within the block, the given layers are computed by their replacements; afterwards all is as before.

    >>> linear = nn.Linear(2, 2)
    >>> with computed_by({}):
    ...     "forward" in vars(linear)
    False
    """
    before = {linear: vars(linear).get("forward") for linear in replacements}
    try:
        for linear, replacement in replacements.items():
            vars(linear)["forward"] = replacement
        yield
    finally:
        for linear, forward in before.items():
            if forward is None:
                vars(linear).pop("forward", None)
            else:
                vars(linear)["forward"] = forward
