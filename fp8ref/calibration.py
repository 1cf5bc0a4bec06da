"""Static scales: what a model's layers see on sample data becomes one scale for the input of each."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib import util
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fp8ref.emulation.quantize import quantize
from fp8ref.recipes import Recipe, recipe_of
from fp8ref.selection import Found, check_matches, check_patterns, reason_to_keep, survey

_BINS = 0x7F80  # every magnitude of bfloat16 below Inf


@dataclass(frozen=True, eq=False)
class Calibration(Mapping[str, float]):
    """Input scales by layer name, exact as fp32; a mapping, and frozen.

    Attributes:
        scales: the scales.
        dtype: the FP8 dtype that they are for.
        observer: "absmax", or "percentile 99.9" and the like.
        batches: how many batches were seen.
        unreached: layers that no batch reached, which have no scale.

    >>> calibration = calibrate(nn.Sequential(nn.Linear(2, 2)), [torch.tensor([[1.0, -224.0]])], "tensor-static")
    >>> dict(calibration), calibration.batches
    ({'0': 0.5}, 1)
    """

    scales: Mapping[str, float]
    dtype: torch.dtype
    observer: str
    batches: int
    unreached: tuple[str, ...]

    def __getitem__(self, name: str) -> float:
        """Return the scale of a layer."""
        return self.scales[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self.scales)

    def __len__(self) -> int:
        """Return how many layers have a scale."""
        return len(self.scales)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle it, for which ``scales`` has to be a dict on the way."""
        return _restored, (dict(self.scales), self.dtype, self.observer, self.batches, self.unreached)


def _restored(scales: dict[str, float], *rest: Any) -> Calibration:
    return Calibration(MappingProxyType(scales), *rest)


def static_scales(chosen: Sequence[Found], recipe: Recipe, calibration: Mapping[str, float] | None) -> dict[str, float]:
    """Return the input scales of a static recipe by the layers' first names, and none of a dynamic one.

    Raises:
        TypeError, ValueError: there is no calibration, or one too many; it is for another dtype, has no scale for a
            layer, or one that fp32 does not hold as a finite value above zero.

    >>> static_scales([Found(("a", "b"), nn.Linear(2, 2), None)], recipe_of("row-static"), {"b": 0.5})
    {'a': 0.5}
    """
    if recipe.dynamic:
        if calibration is not None:
            raise ValueError("calibration: got one for a dynamic recipe; leave it out, or give one with dynamic=False")
        return {}
    if not isinstance(calibration, Mapping):
        raise TypeError(
            f"calibration: got {type(calibration).__name__}; a static recipe needs what fp8ref.calibrate returned"
        )
    if isinstance(calibration, Calibration) and calibration.dtype != recipe.activation_dtype:
        raise ValueError(
            f"calibration: got scales for {calibration.dtype}, but the recipe's activations are "
            f"{recipe.activation_dtype}; calibrate with this recipe"
        )
    scales: dict[str, float] = {}
    for found in chosen:
        given = [calibration[name] for name in found.names if name in calibration]
        if not given:
            raise ValueError(
                f"calibration: it has no scale for {found.name}; give batches that reach the layer, or skip it"
            )
        if not isinstance(given[0], float) or not 0.0 < torch.tensor(given[0], dtype=torch.float32).item() < math.inf:
            raise ValueError(
                f"calibration: got {given[0]!r} for {found.name}; give a float that is finite and above zero in fp32"
            )
        scales[found.name] = given[0]
    return scales


class _Absmax:
    """Keeps the largest magnitude."""

    def __init__(self) -> None:
        self.absmax: Tensor | None = None

    def see(self, magnitudes: Tensor) -> None:
        """Take in fp32 magnitudes, at least one."""
        largest = magnitudes.max()
        self.absmax = largest if self.absmax is None else torch.maximum(self.absmax, largest)

    def value(self) -> float | None:
        """The largest, None without any."""
        return None if self.absmax is None else self.absmax.item()


class _Percentile(_Absmax):
    """Counts magnitudes in bins as fine as bfloat16, rounded up to it: exact for bf16, at most 0.8 % high otherwise."""

    def __init__(self, percentile: float) -> None:
        super().__init__()
        self.percentile = Fraction(percentile) / 100
        self.counts: Tensor | None = None

    def see(self, magnitudes: Tensor) -> None:
        """Take in fp32 magnitudes, at least one."""
        super().see(magnitudes)
        bins = (magnitudes.view(torch.int32) + 0xFFFF) >> 16
        counts = torch.bincount(bins.flatten(), minlength=_BINS + 1)
        self.counts = counts if self.counts is None else self.counts + counts

    def value(self) -> float | None:
        """The smallest magnitude with at least the wanted share of all magnitudes at or below it."""
        if self.counts is None or self.absmax is None:
            return None
        below = self.counts.cumsum(0)
        rank = max(1, -int(-self.percentile * int(below[-1]) // 1))
        found = torch.searchsorted(below, torch.tensor(rank, device=below.device)).to(torch.int32)
        return min((found << 16).view(torch.float32).item(), self.absmax.item())


@torch.no_grad()
def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    recipe: Recipe | str,
    *,
    observer: Literal["absmax", "percentile"] = "absmax",
    percentile: float = 99.9,
    skip: Sequence[str] = (),
    only: Sequence[str] | None = None,
    show: bool = True,
) -> Calibration:
    """Run a model on sample data and return a static input scale for each of its linear layers.

    The model runs as it is, in its own precision, in evaluation mode and without gradients, and is left as it was.

    Args:
        model: the model, before :func:`fp8ref.convert_`.
        batches: what the model is called with: a mapping is passed as keywords, a tuple or list as arguments, anything
            else as the one argument. At least one.
        recipe: a static :class:`fp8ref.Recipe`, or the name of one: its activation dtype and scale format count.
        observer: "absmax" takes the largest magnitude that a layer's input ever had; "percentile" the smallest that
            ``percentile`` % of all magnitudes do not exceed, so that outliers saturate (bins as fine as bfloat16).
        percentile: above 0, at most 100.
        skip: as in :func:`fp8ref.convert_`.
        only: as in :func:`fp8ref.convert_`.
        show: show a progress bar on standard error, where that is a terminal and rich is installed.

    Returns:
        A :class:`fp8ref.Calibration` for ``convert_(model, recipe, calibration=...)``. A scale is that magnitude
        divided by the format's maximum, as :func:`fp8ref.quantize` makes it (1 for a layer that only saw zeros).

    Raises:
        TypeError, ValueError: a dynamic recipe; no batch; a pattern that matches nothing; NaN or Inf on the way, with
            the layer's name.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    >>> calibrate(model, [torch.tensor([[1.0, 448.0]]), torch.tensor([[-896.0, 0.0]])], "row-static")["0"]
    2.0
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; give a torch.nn.Module")
    if isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable):
        raise TypeError(f"batches: got {type(batches).__name__}; give a list or another iterable of batches")
    recipe = recipe_of(recipe)
    if recipe.dynamic:
        raise ValueError("recipe: got a dynamic one, which needs no calibration; give one with dynamic=False")
    if observer not in ("absmax", "percentile"):
        raise ValueError(f'observer: got {observer!r}; give "absmax" or "percentile"')
    if isinstance(percentile, bool) or not isinstance(percentile, float | int) or not 0 < percentile <= 100:
        raise ValueError(f"percentile: got {percentile!r}; give a number above 0 and at most 100")
    skip = check_patterns(skip, "skip")
    only = None if only is None else check_patterns(only, "only")
    layers = survey(model)
    check_matches(layers, skip, "skip")
    check_matches(layers, only or (), "only")
    chosen = [found for found in layers if reason_to_keep(found, skip, only) is None]
    if not chosen:
        raise ValueError("model: it has no layer to calibrate")
    observers = {found.name: _Absmax() if observer == "absmax" else _Percentile(percentile) for found in chosen}
    seen = 0
    with _watched(model, chosen, observers):
        for batch in _counted(batches, show=show):
            _call(model, batch)
            seen += 1
    if not seen:
        raise ValueError("batches: got none; give at least one")
    values = {name: watcher.value() for name, watcher in observers.items()}
    scales = {name: _scale(value, recipe) for name, value in values.items() if value is not None}
    unreached = tuple(name for name, value in values.items() if value is None)
    words = observer if observer == "absmax" else f"percentile {percentile:g}"
    return Calibration(MappingProxyType(scales), recipe.activation_dtype, words, seen, unreached)


def _scale(absmax: float, recipe: Recipe) -> float:
    """The scale of a magnitude, by the one rule that there is for that."""
    x = torch.tensor([[absmax]], dtype=torch.float32)
    return quantize(x, recipe.activation_dtype, scale_format=recipe.scale_format).scale.item()


@contextmanager
def _watched(model: nn.Module, chosen: Sequence[Found], observers: Mapping[str, _Absmax]) -> Iterator[None]:
    """In evaluation mode with an observer before each layer; afterwards all is as it was."""
    modes = [(module, module.training) for module in model.modules()]
    with ExitStack() as stack:
        for found in chosen:
            hook = _observing(found.name, observers[found.name])
            stack.callback(found.module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def _observing(name: str, observer: _Absmax) -> Callable[..., None]:
    def look(_module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        x = arguments[0] if arguments else next(iter(keywords.values()))
        if x.numel() == 0:
            return
        magnitudes = x.detach().float().abs()
        if not bool(magnitudes.isfinite().all()):
            raise ValueError(f"batches: the input of {name} holds NaN or Inf; a scale of it would mean nothing")
        observer.see(magnitudes)

    return look


def _call(model: nn.Module, batch: Any) -> None:
    if isinstance(batch, Mapping):
        model(**batch)
    elif isinstance(batch, tuple | list):
        model(*batch)
    else:
        model(batch)


def _counted(batches: Iterable[Any], *, show: bool) -> Iterator[Any]:
    """Iterate with a bar where somebody can see it."""
    if not show or not sys.stderr.isatty() or util.find_spec("rich") is None:
        yield from batches
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    total = len(batches) if isinstance(batches, Sized) else None
    columns = (TextColumn("calibrating"), BarColumn(), MofNCompleteColumn(), TextColumn("batches, left"))
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        yield from bar.track(batches, total=total)
