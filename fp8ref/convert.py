"""Converting a model in place: every linear layer is converted, or listed with the reason why not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from torch import Tensor, nn

from fp8ref.calibration import static_scales
from fp8ref.conversion import ConversionReport, LayerConversion
from fp8ref.emulation.checks import check_bool
from fp8ref.kernels.activations import Backend, checked_backend
from fp8ref.linear import Fp8Linear
from fp8ref.recipes import Recipe, recipe_of
from fp8ref.selection import Found, check_matches, check_patterns, place_of, reason_to_keep, survey
from fp8ref.sources import check_weight, is_linear, weight_of


def convert_(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    skip: Sequence[str] = (),
    only: Sequence[str] | None = None,
    calibration: Mapping[str, float] | None = None,
    backend: Backend = "auto",
    batch_invariant: bool = False,
    tied: Literal["keep", "untie"] = "keep",
    keep_weight: bool = False,
    show: bool = True,
) -> ConversionReport:
    """Replace a model's linear layers by :class:`fp8ref.Fp8Linear`, in place, and say what became of each.

    Args:
        model: any module but a linear layer itself. ``torch.nn.Linear`` and the ``Conv1D`` of transformers' GPT-2 are
            converted. Left alone, with the reason in the report: subclasses of Linear (they may compute something
            else), parametrised and hooked layers, layers that are FP8 already, and the two layers that a
            ``TransformerEncoderLayer`` reads without calling them.
        recipe: a :class:`fp8ref.Recipe` or a name in :data:`fp8ref.RECIPES`.
        skip: patterns of names to leave alone: those of ``fnmatch``, on the whole dotted name (``"*.down_proj"``). A
            layer with several names counts under each of them.
        only: patterns of names; what none of them matches is left alone. None chooses every layer.
        calibration: input scales by layer name, for a static recipe: what :func:`fp8ref.calibrate` returned.
        backend: as in :class:`fp8ref.Fp8Linear`.
        batch_invariant: as in :class:`fp8ref.Fp8Linear`.
        tied: what happens to a layer whose weight is another module's too, an output head that is the embedding above
            all: "keep" leaves it alone, "untie" converts it, which saves nothing as long as the other module stays
            (before ``save_pretrained`` also set ``model.config.tie_word_embeddings = False``).
        keep_weight: as in :meth:`fp8ref.Fp8Linear.from_linear`, for training.
        show: print the report.

    Returns:
        A :class:`fp8ref.ConversionReport`. A layer that is used in several places stays one layer, listed once.

    Raises:
        TypeError: an argument of the wrong kind.
        ValueError: a pattern that matches nothing; a weight with NaN or Inf, or on the meta device (load first); no
            scale for a layer of a static recipe; nothing to convert. The model is then as it was: nothing is replaced
            before everything has been made, for which the old and the new weights are in memory together.

    >>> model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 8))
    >>> report = convert_(model, "row", backend="emulate")
    layer  count  kind    shape    done, or why not    saved
    0          1  Linear  16 x 32  FP8               1.47 kB
    2          1  Linear   8 x 16  FP8                   192
    2 of 2 linear layers converted: weight e4m3 row, x e4m3 row dynamic
    2.66 kB of parameters and buffers became 992 (-62.7 %)
    >>> [layer.shape for layer in report.converted]
    [(16, 32), (8, 16)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}; give a torch.nn.Module")
    if is_linear(model) or isinstance(model, Fp8Linear):
        raise TypeError(f"model: got a {type(model).__name__}, which is in no model; use Fp8Linear.from_linear")
    recipe = recipe_of(recipe)
    if tied not in ("keep", "untie"):
        raise ValueError(f'tied: got {tied!r}; give "keep" or "untie"')
    check_bool(keep_weight, "keep_weight")
    check_bool(batch_invariant, "batch_invariant")
    skip = check_patterns(skip, "skip")
    only = None if only is None else check_patterns(only, "only")
    layers = survey(model)
    check_matches(layers, skip, "skip")
    check_matches(layers, only or (), "only")
    reasons = [_reason(found, skip, only, tied) for found in layers]
    chosen = [found for found, reason in zip(layers, reasons, strict=True) if reason is None]
    _check_chosen(chosen, layers, reasons)
    scales = static_scales(chosen, recipe, calibration)
    options: dict[str, Any] = {
        "backend": checked_backend(backend), "batch_invariant": batch_invariant, "keep_weight": keep_weight,
    }  # fmt: skip
    made = {found.module: _made(found, recipe, input_scale=scales.get(found.name), **options) for found in chosen}
    freed = _freed(chosen)
    before = nbytes_of(model)
    rows = tuple(_outcome(f, made.get(f.module), r, freed) for f, r in zip(layers, reasons, strict=True))
    for parent in list(model.modules()):
        for name, child in parent._modules.items():  # noqa: SLF001 - every place, also those under a second name
            if child in made:
                parent._modules[name] = made[child]  # noqa: SLF001 - a setattr may do more, in some models
    report = ConversionReport(recipe, rows, before, nbytes_of(model))
    if show:
        report.print()
    return report


def _reason(found: Found, skip: Sequence[str], only: Sequence[str] | None, tied: str) -> str | None:
    """Why a module is kept; None where it is converted."""
    reason = reason_to_keep(found, skip, only)
    if reason is None and found.sharers and tied == "keep":
        return f'its weight is that of {", ".join(found.sharers)} too (tied="untie" converts it)'
    return reason


def _check_chosen(chosen: Sequence[Found], layers: Sequence[Found], reasons: Sequence[str | None]) -> None:
    """Raise unless there are layers to convert, with values."""
    if not chosen:
        why = [str(r) for f, r in zip(layers, reasons, strict=True) if not isinstance(f.module, nn.Embedding)]
        raise ValueError(f"model: it has no layer to convert ({'; '.join(dict.fromkeys(why)) or 'no linear layer'})")
    for found in chosen:
        check_weight(weight_of(found.module), found.name)


def _made(found: Found, recipe: Recipe, **options: Any) -> Fp8Linear:
    """The layer in FP8; what is wrong with it is said with its name."""
    try:
        return Fp8Linear.from_linear(found.module, recipe, **options)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{found.name}: {error}") from None


def _freed(chosen: Sequence[Found]) -> dict[nn.Module, int]:
    """Bytes of the old weight that nobody holds afterwards; of one that several layers share, the first frees it."""
    converted = {name for found in chosen for name in found.names}
    seen: set[tuple[object, ...]] = set()
    freed = {}
    for found in chosen:
        weight = found.module.weight
        assert isinstance(weight, Tensor)
        place = place_of(weight)
        free = place not in seen and converted.issuperset(found.sharers)
        seen.add(place)
        freed[found.module] = weight.numel() * weight.element_size() if free else 0
    return freed


def _outcome(
    found: Found, made: Fp8Linear | None, reason: str | None, freed: Mapping[nn.Module, int]
) -> LayerConversion:
    module = found.module
    shape: tuple[int, ...]
    if isinstance(module, Fp8Linear):
        shape = (module.out_features, module.in_features)
    elif is_linear(module) and found.obstacle is None:
        shape = tuple(weight_of(module).shape)
    else:
        shape = tuple(next((p.shape for p in module.parameters() if p.dim() >= 2), ()))
    saved, done = 0, "FP8"
    if made is not None:
        kept = made.kept_weight
        saved = freed[module] - made.packed.nbytes
        if kept is module.weight:
            saved = -made.packed.nbytes
        elif kept is not None:
            saved -= kept.numel() * kept.element_size()
        done += ", weight kept" * (kept is not None)
        if found.sharers:
            done += f", untied from {', '.join(found.sharers)}"
    return LayerConversion(
        found.name, found.names[1:], type(module).__name__, shape, made is not None, reason or done, saved
    )


def nbytes_of(model: nn.Module) -> int:
    """Bytes of a model's parameters and buffers, memory that several share counted once.

    >>> nbytes_of(nn.Linear(2, 3))
    36
    """
    sizes: dict[tuple[object, ...], int] = {}
    for module in model.modules():
        for tensor in (*module._parameters.values(), *module._buffers.values()):  # noqa: SLF001 - all, not only what is saved
            if tensor is not None:
                place = place_of(tensor)
                sizes[place] = max(sizes.get(place, 0), tensor.numel() * tensor.element_size())
    return sum(sizes.values())
