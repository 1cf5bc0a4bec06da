"""Models of transformers, converted in place: the report's perplexity, bit for bit, and text that is generated."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fp8ref import ConversionReport, Fp8Linear, convert_
from fp8ref.report import RECIPES, measure
from fp8ref.report.model import first_tokens, load_model, read_text
from tiny_models import save_llama, tiny_model, tokens

TWINS = {
    "row": "row-accurate-sm90",
    "row-fast": "row-fast-sm90",
    "tensor": "tensor-accurate-sm90",
    "tensor-fast": "tensor-fast-sm90",
    "block": "block-sm90",
}
"""The report's recipe of the same layer."""


def convert(model: nn.Module, recipe: str = "row", **options: Any) -> ConversionReport:
    return convert_(model, recipe, backend="emulate", show=False, **options)


def losses(model: nn.Module, text: Tensor) -> tuple[float, ...]:
    """The negative log-likelihood of each token but the first, with the report's own operations."""
    with torch.no_grad():
        logits = model.eval()(input_ids=text[None], use_cache=False).logits[0].log_softmax(-1)
    return tuple((-logits[:-1].gather(1, text[1:, None])[:, 0].double()).tolist())


@pytest.mark.parametrize("name", TWINS)
def test_every_loss_is_that_of_the_report(name: str) -> None:
    model, text = tiny_model(), tokens(100)
    wanted = measure(model, text, [RECIPES[TWINS[name]]]).recipes[0]
    convert(model, name, skip=["head"])
    assert losses(model, text) == wanted.nll


def test_few_rows_need_batch_invariance_to_equal_the_report() -> None:
    """The report never cuts K; a layer does where few rows would leave most of a GPU idle."""
    model, text = tiny_model(), tokens(20)
    model.up = nn.Linear(144, 2048)
    model.down = nn.Linear(2048, 144)
    wanted = measure(model, text, [RECIPES["row-fast-sm90"]]).recipes[0]
    whole, cut = copy.deepcopy(model), copy.deepcopy(model)
    convert(whole, "row-fast", skip=["head"], batch_invariant=True)
    convert(cut, "row-fast", skip=["head"])
    assert isinstance(cut.down, Fp8Linear)
    assert cut.down.explain(20).split_k > 1
    assert losses(whole, text) == wanted.nll != losses(cut, text)


def test_a_llama_is_converted_and_generates(tmp_path: Path) -> None:
    loaded = load_model(save_llama(tmp_path))
    model, text = loaded.module, tokens(80)
    wanted = measure(model, text, [RECIPES["row-accurate-sm90"]]).recipes[0]
    report = convert(model, "row", skip=["lm_head"])
    assert len(report.converted) == 14
    assert losses(model, text) == wanted.nll
    generated = model.generate(text[None, :5], max_new_tokens=6, do_sample=False)  # type: ignore[operator]
    assert generated.shape == (1, 11)
    # Without a cache, token by token, the same text comes out.
    ids = text[:5]
    for _ in range(6):
        with torch.no_grad():
            ids = torch.cat([ids, model(input_ids=ids[None], use_cache=False).logits[0, -1:].argmax(-1)])
    assert torch.equal(generated[0], ids)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["row", "block"])
def test_the_real_model(name: str) -> None:
    loaded = load_model(None)
    model, text = loaded.module, first_tokens(loaded.tokenizer, read_text(None)[0], 96)
    wanted = measure(model, text, [RECIPES[TWINS[name]]]).recipes[0]
    report = convert(model, name)
    assert len(report.converted) == 210
    assert {layer.name for layer in report.kept} == {"model.embed_tokens", "lm_head"}
    assert losses(model, text) == wanted.nll
    prompt = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    generated = model.generate(prompt, max_new_tokens=2, do_sample=False)  # type: ignore[operator]
    assert loaded.tokenizer.decode(generated[0]).startswith("The capital of France is Paris.")


def test_conv1d_of_gpt2() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    reference = copy.deepcopy(model)
    report = convert(model)
    assert {layer.kind for layer in report.converted} == {"Conv1D"}
    assert len(report.converted) == 8
    shapes = {layer.name.rpartition(".")[2]: layer.shape for layer in report.converted}
    assert shapes == {"c_attn": (96, 32), "c_proj": (32, 128), "c_fc": (128, 32)}
    head = next(layer for layer in report.layers if layer.name == "lm_head")
    assert head.reason.startswith("its weight is that of transformer.wte too")
    ids = torch.arange(8)[None]
    logits, wanted = model(ids).logits, reference(ids).logits
    assert logits.shape == wanted.shape
    assert 0 < (logits - wanted).abs().max() < wanted.abs().max()
