"""The report's figures equal a calculation of their own, and the model is left as it was."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fp8ref
from fp8ref.report import RECIPES, Energies, OperandCounts, Recipe, ReportError, measure
from fp8ref.report.listening import Silent
from tiny_models import VOCABULARY, TinyModel, tiny_model, tokens

NAMES = ["tensor-fast-sm90", "row-fast-sm90", "row-accurate-sm89", "row-exact", "block-sm90", "block-exact"]


def recorded(model: TinyModel, recipe: Recipe, count: int = 24) -> tuple[Any, dict[str, tuple[Tensor, Tensor]]]:
    """The recipe's result, and the last input and output of each layer, seen from outside by forward hooks."""
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def hook(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        seen["up" if module is model.up else "down"] = (args[0][0].clone(), output[0].clone())

    handles = [layer.register_forward_hook(hook) for layer in (model.up, model.down)]
    result = measure(model, tokens(count), [recipe]).recipes[0]
    for handle in handles:
        handle.remove()
    return result, seen


def energy(values: Tensor) -> float:
    return float(values.double().square().sum(-1).sum())


def counted(x: Tensor, q: fp8ref.ScaledTensor, largest: float) -> OperandCounts:
    values = q.data.float()
    return OperandCounts(x.numel(), int((values.abs() == largest).sum()), int(((values == 0) & (x != 0)).sum()))


@pytest.mark.parametrize("name", NAMES)
def test_layers_equal_a_direct_calculation(name: str) -> None:
    recipe, model = RECIPES[name], tiny_model()
    result, seen = recorded(model, recipe)
    assert [layer.name for layer in result.layers] == ["up", "down"]
    for layer in result.layers:
        linear = getattr(model, layer.name)
        x, y = seen[layer.name]
        a = fp8ref.quantize(x, scaling=recipe.activation_scaling)
        w = fp8ref.quantize(linear.weight.detach(), scaling=recipe.weight_scaling)
        output = fp8ref.emulate_matmul(
            a, w.t(), out_dtype=torch.float32, use_fast_accum=recipe.use_fast_accum, unit=recipe.unit
        )
        exact = fp8ref.emulate_matmul(a, w.t(), out_dtype=torch.float32, unit="exact")
        reference = x.double() @ linear.weight.detach().double().t()
        assert torch.equal(y, output + linear.bias)
        assert layer.energies == Energies(
            energy(reference),
            energy(exact),
            energy(exact.double() - reference),
            energy(output.double() - exact.double()),
            energy(output.double() - reference),
        )
        assert layer.quantisation_snr_db == 10 * math.log10(energy(reference) / energy(exact.double() - reference))
        assert layer.activations == counted(x, a, 448.0)
        assert layer.weights == counted(linear.weight.detach(), w, 448.0)


def test_an_exact_sum_costs_nothing_and_a_tensor_core_something() -> None:
    exact, hopper = measure(tiny_model(), tokens(24), [RECIPES["row-exact"], RECIPES["row-fast-sm90"]]).recipes
    assert [layer.accumulation_snr_db for layer in exact.layers] == [math.inf, math.inf]
    assert [layer.total_snr_db for layer in exact.layers] == [layer.quantisation_snr_db for layer in exact.layers]
    assert all(math.isfinite(layer.accumulation_snr_db) for layer in hopper.layers)
    assert all(layer.energies.total_noise != layer.energies.quantisation_noise for layer in hopper.layers)


def test_recipes_with_the_same_operands_share_their_quantisation_in_the_first_layer() -> None:
    fast, exact = measure(tiny_model(), tokens(24), [RECIPES["row-fast-sm90"], RECIPES["row-exact"]]).recipes
    assert fast.layers[0].energies.quantisation_noise == exact.layers[0].energies.quantisation_noise
    assert fast.layers[0].activations == exact.layers[0].activations


def test_counts_of_saturated_and_flushed_values() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.down.weight.zero_()
        # absmax 448 makes the scale 1: the second value keeps the largest code, half the smallest subnormal is a tie
        # to zero, and what is just above it is not flushed.
        model.down.weight[0, :5] = torch.tensor([448.0, -440.0, 2.0**-10, -(2.0**-11), 2.0**-10 + 2.0**-20])
    layer = measure(model, tokens(24), [RECIPES["tensor-exact"]]).recipes[0].layers[1]
    assert layer.weights == OperandCounts(model.down.weight.numel(), at_max=2, flushed=2)
    assert layer.weights.flushed_share == 2 / model.down.weight.numel()


def test_losses_equal_a_direct_calculation() -> None:
    model, recipe, ids = tiny_model().eval(), RECIPES["row-fast-sm90"], tokens(24)
    report = measure(model, ids, [recipe])
    result = report.recipes[0]
    with torch.no_grad():
        expected = model(ids[None], use_cache=False).logits[0].log_softmax(-1)
    picked = expected[torch.arange(23), ids[1:]]
    assert report.fp32_nll == result.fp32_nll == tuple((-picked).tolist())
    assert report.fp32_perplexity == math.exp(math.fsum(-picked.tolist()[i] for i in range(23)) / 23)
    differences = [mine - theirs for mine, theirs in zip(result.nll, result.fp32_nll, strict=True)]
    assert result.delta_nll.mean == math.fsum(differences) / 23
    assert any(differences)
    assert all(value > 0 for value in result.divergence)


def test_windows_start_anew() -> None:
    ids = torch.cat([tokens(512), tokens(512)[:300], tokens(512)[300:301]])
    report = measure(tiny_model(), ids, [RECIPES["row-exact"]])
    assert len(report.fp32_nll) == 511 + 300
    assert report.recipes[0].nll[:300] == report.recipes[0].nll[511:]


def test_a_last_window_of_one_token_predicts_nothing() -> None:
    report = measure(tiny_model(), tokens(513), [RECIPES["tensor-exact"]])
    assert (report.tokens, len(report.fp32_nll)) == (513, 511)
    assert report.recipes[0].products == 512 * 2 * 144 * 200


def test_what_stays_in_fp32_is_listed_with_its_reason() -> None:
    report = measure(tiny_model(), tokens(24), [RECIPES["row-exact"]])
    reasons = {module.name: module.reason for module in report.not_converted}
    assert reasons == {
        "table": "a look-up, no product",
        "norm": "no matrix product",
        "head": "output head: engines keep it in 16 bits (--lm-head converts it)",
        "unused": "not reached by this text",
    }


def test_the_output_head_is_converted_on_request() -> None:
    report = measure(tiny_model(), tokens(24), [RECIPES["row-exact"]], include_head=True)
    assert [layer.name for layer in report.recipes[0].layers] == ["up", "down", "head"]
    assert report.recipes[0].layers[2].out_features == VOCABULARY


def test_other_layers_with_matrices_are_not_skipped_silently() -> None:
    class OwnLinear(nn.Linear):
        pass

    model = tiny_model()
    model.up = OwnLinear(144, 200)
    report = measure(model, tokens(24), [RECIPES["row-exact"]])
    assert [layer.name for layer in report.recipes[0].layers] == ["down"]
    assert ("up", "OwnLinear", "not a torch.nn.Linear: its products stay in fp32") in [
        (module.name, module.kind, module.reason) for module in report.not_converted
    ]


class Interrupting(Silent):
    """Stops the run in the middle of a model."""

    def advance(self, products: int) -> None:
        raise KeyboardInterrupt(products)


@pytest.mark.parametrize("interrupted", [False, True])
def test_the_model_is_left_as_it_was(interrupted: bool) -> None:
    model, ids = tiny_model(), tokens(24)
    model.norm.eval()
    model.down.forward = model.down.forward  # type: ignore[method-assign]  # as wrappers of modules leave them
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(ids[None], use_cache=False).logits
    if interrupted:
        with pytest.raises(KeyboardInterrupt):
            measure(model, ids, [RECIPES["row-fast-sm90"]], progress=Interrupting())
    else:
        measure(model, ids, [RECIPES["row-fast-sm90"]], progress=Silent())
    assert {name: vars(module) for name, module in model.named_modules()} == before
    assert torch.is_grad_enabled()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(ids[None], use_cache=False).logits, logits)


def test_two_runs_are_equal() -> None:
    first, second = (measure(tiny_model(), tokens(24), [RECIPES["block-sm90"]]) for _ in range(2))
    assert first.recipes[0].layers == second.recipes[0].layers
    assert first.recipes[0].nll == second.recipes[0].nll
    assert first.token_sha256 == second.token_sha256


def test_the_number_of_threads_changes_no_bit() -> None:
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            result = measure(tiny_model(), tokens(600), [RECIPES["block-sm90"]]).recipes[0]
            results.append((result.layers, result.nll, result.fp32_nll, result.divergence))
    finally:
        torch.set_num_threads(before)
    assert results[0] == results[1] == results[2]


def broken(value: float, *, layer: str = "down") -> TinyModel:
    model = tiny_model()
    with torch.no_grad():
        getattr(model, layer).weight[0, 0] = value
    return model


@pytest.mark.parametrize(
    ("model", "ids", "recipes", "message"),
    [
        (tiny_model(), tokens(7), ["row-exact"], "tokens: got 7; give 8 or more"),
        (tiny_model(), tokens(24)[None], ["row-exact"], r"tokens: got torch.int64 \[1, 24\]; give int64 token ids"),
        (tiny_model(), tokens(24).int(), ["row-exact"], r"tokens: got torch.int32 \[24\]; give int64 token ids"),
        (tiny_model(), tokens(24), [], "recipes: got none"),
        (tiny_model().bfloat16(), tokens(24), ["row-exact"], "model: parameter table.weight is torch.bfloat16 on cpu"),
        (nn.Embedding(4, 4), tokens(24), ["row-exact"], "model: it has no torch.nn.Linear .*, only Embedding"),
        (broken(math.nan), tokens(24), ["row-exact"], "fp32: the model's logits are not finite"),
    ],
)
def test_errors_name_what_is_wrong(model: nn.Module, ids: Tensor, recipes: list[str], message: str) -> None:
    with pytest.raises(ReportError, match=message):
        measure(model, ids, [RECIPES[name] for name in recipes])


def test_an_overflow_names_recipe_and_layer() -> None:
    model = tiny_model(bias=False)
    with torch.no_grad():
        # Finite in fp32; but acc * scale_b, which comes first, leaves fp32 before scale_a brings it back.
        model.up.weight.mul_(1e-20)
        model.down.weight.fill_(1e35)
        model.head.weight.mul_(1e-20)
    with pytest.raises(ReportError, match="recipe row-exact: layer down gives NaN or Inf"):
        measure(model, tokens(24), [RECIPES["row-exact"]])


def test_a_model_that_calls_no_linear_is_refused() -> None:
    model = tiny_model()
    model.up, model.down = nn.Identity(), nn.Identity()  # type: ignore[assignment]
    with pytest.raises(ReportError, match=r"model: it calls none of its torch\.nn\.Linear modules"):
        measure(model, tokens(24), [RECIPES["row-exact"]])
