"""What a report holds: counts, energies and per-token losses, and the figures derived from them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from fp8ref.report.recipes import Recipe

_NORMAL_975 = 1.959963984540054
"""The 97.5 % quantile of the normal distribution: mean +- this many standard errors is a 95 % interval."""


def snr_db(signal: float, noise: float) -> float:
    """Signal-to-noise ratio in decibels of two energies; without noise it is infinite.

    >>> snr_db(1000.0, 1.0), snr_db(2.0, 0.0)
    (30.0, inf)
    """
    if noise == 0.0:
        return math.inf
    return 10.0 * math.log10(signal / noise) if signal > 0.0 else -math.inf


def perplexity(nll: Iterable[float]) -> float:
    """exp of the mean negative log-likelihood, infinite where float64 cannot hold it.

    >>> perplexity([0.0, 0.0]), perplexity([1e6, 1e6])
    (1.0, inf)
    """
    mean = Estimate.of(nll).mean
    return math.exp(mean) if mean < 709.0 else math.inf


@dataclass(frozen=True)
class OperandCounts:
    """How the values of one operand became codes.

    Attributes:
        values: how many values were quantised.
        at_max: how many got the code of the format's largest magnitude. Dynamic scaling puts at least one value of
            every scale group there and clips none.
        flushed: how many were not zero but got the code of zero.

    >>> OperandCounts(200, 1, 3).flushed_share
    0.015
    """

    values: int = 0
    at_max: int = 0
    flushed: int = 0

    def __add__(self, other: OperandCounts) -> OperandCounts:
        """The counts of both together."""
        return OperandCounts(self.values + other.values, self.at_max + other.at_max, self.flushed + other.flushed)

    @property
    def at_max_share(self) -> float:
        """``at_max`` as a share of all values."""
        return self.at_max / self.values if self.values else 0.0

    @property
    def flushed_share(self) -> float:
        """``flushed`` as a share of all values."""
        return self.flushed / self.values if self.values else 0.0


@dataclass(frozen=True)
class Energies:
    """Sums of squares over a layer's outputs, in float64.

    With x the input that the layer really got under the recipe,

    - reference: x @ weight.t() in float64, nothing quantised;
    - exact: the product of the quantised operands, scaled, by the unit ``exact``;
    - output: the same operands through the recipe's unit and accumulation mode.

    Attributes:
        signal: of the reference.
        exact_signal: of exact.
        quantisation_noise: of exact - reference.
        accumulation_noise: of output - exact.
        total_noise: of output - reference.
    """

    signal: float = 0.0
    exact_signal: float = 0.0
    quantisation_noise: float = 0.0
    accumulation_noise: float = 0.0
    total_noise: float = 0.0

    def __add__(self, other: Energies) -> Energies:
        """The energies of both together."""
        return Energies(
            self.signal + other.signal,
            self.exact_signal + other.exact_signal,
            self.quantisation_noise + other.quantisation_noise,
            self.accumulation_noise + other.accumulation_noise,
            self.total_noise + other.total_noise,
        )


@dataclass(frozen=True)
class LayerResult:
    """One linear layer under one recipe, over all tokens."""

    name: str
    in_features: int
    out_features: int
    energies: Energies
    activations: OperandCounts
    weights: OperandCounts

    @property
    def total_snr_db(self) -> float:
        """What the layer computes against what it would in float64 from the same input."""
        return snr_db(self.energies.signal, self.energies.total_noise)

    @property
    def quantisation_snr_db(self) -> float:
        """What quantising the operands costs alone."""
        return snr_db(self.energies.signal, self.energies.quantisation_noise)

    @property
    def accumulation_snr_db(self) -> float:
        """What the unit's inexact sum costs alone."""
        return snr_db(self.energies.exact_signal, self.energies.accumulation_noise)


@dataclass(frozen=True)
class Estimate:
    """A mean over tokens and its standard error (as if tokens were independent).

    >>> Estimate.of([1.0, 3.0])
    Estimate(mean=2.0, standard_error=1.0)
    """

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Estimate:
        """The estimate from the values of at least two tokens."""
        listed = list(values)
        mean = math.fsum(listed) / len(listed)
        variance = math.fsum((value - mean) ** 2 for value in listed) / (len(listed) - 1)
        return cls(mean, math.sqrt(variance / len(listed)))

    @property
    def interval95(self) -> tuple[float, float]:
        """The 95 % interval under a normal approximation."""
        half = _NORMAL_975 * self.standard_error
        return self.mean - half, self.mean + half


@dataclass(frozen=True)
class RecipeResult:
    """One recipe: every layer, and what became of the model's predictions; of all windows, or of a single one.

    Attributes:
        nll: negative log-likelihood in nats, one value per predicted token.
        fp32_nll: the same of the fp32 model.
        divergence: Kullback-Leibler divergence in nats of the recipe's prediction from the fp32 one, per token.
        same_top: how many tokens have the same most likely prediction as in fp32.
        products: multiplications that the oracle did.
        seconds: of computing, those of all processes added up.
    """

    recipe: Recipe
    layers: tuple[LayerResult, ...]
    nll: tuple[float, ...]
    fp32_nll: tuple[float, ...]
    divergence: tuple[float, ...]
    same_top: int
    products: int
    seconds: float

    @property
    def perplexity(self) -> float:
        """exp of the mean nll."""
        return perplexity(self.nll)

    @property
    def delta_nll(self) -> Estimate:
        """nll less that of fp32, token by token: the paired difference is far less noisy than either."""
        return self.delta_nll_to(self.fp32_nll)

    def delta_nll_to(self, other: tuple[float, ...]) -> Estimate:
        """nll less another nll of the same tokens."""
        return Estimate.of(mine - theirs for mine, theirs in zip(self.nll, other, strict=True))

    @property
    def same_top_share(self) -> float:
        """``same_top`` as a share of all predicted tokens."""
        return self.same_top / len(self.nll)

    @property
    def median_total_snr_db(self) -> float:
        """Median over the layers."""
        return median(layer.total_snr_db for layer in self.layers)

    @property
    def median_quantisation_snr_db(self) -> float:
        """Median over the layers."""
        return median(layer.quantisation_snr_db for layer in self.layers)

    @property
    def median_accumulation_snr_db(self) -> float:
        """Median over the layers."""
        return median(layer.accumulation_snr_db for layer in self.layers)

    @property
    def activations(self) -> OperandCounts:
        """The activations of all layers together."""
        return sum((layer.activations for layer in self.layers), OperandCounts())

    @property
    def weights(self) -> OperandCounts:
        """The weights of all layers together."""
        return sum((layer.weights for layer in self.layers), OperandCounts())

    def lowest_total(self, count: int) -> list[LayerResult]:
        """The layers with the lowest total signal-to-noise ratio, worst first."""
        return sorted(self.layers, key=lambda layer: layer.total_snr_db)[:count]

    def lowest_accumulation(self, count: int) -> list[LayerResult]:
        """The layers with the lowest signal-to-noise ratio of accumulation, worst first, without those of no noise."""
        noisy = [layer for layer in self.layers if layer.energies.accumulation_noise]
        return sorted(noisy, key=lambda layer: layer.accumulation_snr_db)[:count]


@dataclass(frozen=True)
class NotConverted:
    """A module with parameters whose work stayed in fp32, and why."""

    name: str
    kind: str
    parameters: int
    reason: str


@dataclass(frozen=True)
class Report:
    """All of a run; ``fp8ref report`` prints it and writes it with ``--json``.

    Attributes:
        model, text: what was measured, in words.
        tokens: how many tokens were read; in windows of at most ``window``, each predicted from its own beginning.
        token_sha256: of the token ids as int64, to tell whether two runs read the same.
        fp32_nll: of the unchanged model, per predicted token.
        not_converted: modules with parameters that stayed in fp32.
        seconds: wall-clock time of the whole run.
    """

    model: str
    text: str
    tokens: int
    window: int
    token_sha256: str
    fp32_nll: tuple[float, ...]
    recipes: tuple[RecipeResult, ...]
    not_converted: tuple[NotConverted, ...]
    seconds: float

    @property
    def fp32_perplexity(self) -> float:
        """exp of the mean nll of the unchanged model."""
        return perplexity(self.fp32_nll)

    def exact_twin(self, result: RecipeResult) -> RecipeResult | None:
        """The recipe of this run with the same operands and an exact sum, if there is one."""
        for other in self.recipes:
            if other.recipe.is_exact and other.recipe.operands == result.recipe.operands:
                return other
        return None
