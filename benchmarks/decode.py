"""Tokens per second of a language model on the GPU at hand, bf16 beside FP8: ``python benchmarks/decode.py``.

Greedy decoding at batch 1 and 8, three ways: eager and in one CUDA graph a token with the step of decoding.py, and with
``generate`` of transformers. Two models: SmolLM2-135M, whose layers are too small for FP8 to matter, and a Llama with
the layer sizes of the 8B one, but 4 layers, 32,000 tokens and random weights. Before anything is timed, layers of each
converted model must equal the emulate backend bit for bit. Writes decode.json and decode.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from decoding import Step, decode
from guarded import differing_bits
from verify import environment

import fp8ref
from fp8ref.report.errors import ReportError
from fp8ref.report.model import load_model

HERE = Path(__file__).resolve().parent
BF16 = torch.bfloat16
BATCHES = (1, 8)
LENGTH = 512
"""Tokens that the caches hold: every step attends over all of them."""


def small_model(path: Path | None) -> tuple[str, Any]:
    """Return the embedded model (or one in a folder) in bf16 on the GPU."""
    loaded = load_model(path)
    return loaded.name, loaded.module.to(BF16).cuda().eval()


def large_model() -> tuple[str, Any]:
    """Return a random Llama with the layer sizes of the 8B one."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=4, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=LENGTH, rope_theta=500000.0,
    )  # fmt: skip
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config)
    return "Llama, layers of 8B, 4 of them, random", model.to(BF16).cuda().eval()


def equal_bits(model: Any) -> str:
    """Compare layers of the first block with the emulate backend; raise where a bit differs."""
    block, compared = model.model.layers[0], 0
    for layer in (block.self_attn.q_proj, block.self_attn.k_proj, block.mlp.gate_proj, block.mlp.down_proj):
        assert isinstance(layer, fp8ref.Fp8Linear), type(layer)
        oracle = copy.deepcopy(layer)
        oracle.backend = "emulate"
        for m in (*BATCHES, 100):
            x = torch.randn(m, layer.in_features, device="cuda", dtype=BF16)
            x[0, ::7] *= 30.0
            with torch.no_grad():
                wrong = differing_bits(layer(x), oracle(x))
            if wrong:
                raise SystemExit(
                    f"{layer} differs from the emulate backend in {wrong} of {m * layer.out_features} outputs"
                )
            compared += m * layer.out_features
    return f"{compared:,} outputs of 4 layers equal the emulate backend's, bit for bit"


def rate(run: Callable[[], None], tokens: int, repeats: int = 5) -> float:
    """Return the median tokens per second of a run that decodes so many."""
    rates = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        rates.append(tokens / (time.perf_counter() - began))
    return round(statistics.median(rates), 1)


def measure(model: Any, batch: int, count: int = 64) -> dict[str, Any]:
    """Return the row of one model at one batch size."""
    step = Step(model, batch, LENGTH)
    eager = decode(step, 16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    step.restart()
    captured = []
    for _ in range(16):
        graph.replay()
        captured.append(step.tokens.clone())
    if not torch.equal(torch.cat(captured, dim=1), eager):
        raise SystemExit("the graph decodes other tokens than eager")

    def replay() -> None:
        step.restart()
        for _ in range(count):
            graph.replay()

    def call() -> None:
        step.restart()
        for _ in range(count // 4):
            step()

    prompt = torch.ones(batch, 1, dtype=torch.int64, device="cuda")
    words = {"max_new_tokens": count // 4, "min_new_tokens": count // 4, "do_sample": False}

    def generate() -> None:
        with torch.no_grad():
            model.generate(prompt, attention_mask=torch.ones_like(prompt), **words)

    generate()
    return {
        "graph": rate(replay, count * batch),
        "eager": rate(call, count // 4 * batch, repeats=3),
        "generate": rate(generate, count // 4 * batch, repeats=3),
    }


def weights_nbytes(model: Any) -> int:
    """Return the bytes that a token reads: every parameter and buffer but the embedding's table."""
    table = model.model.embed_tokens.weight
    tied = model.lm_head.weight.data_ptr() == table.data_ptr()
    everything = {t.data_ptr(): t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers())}
    if not tied:
        everything.pop(table.data_ptr())
    return sum(everything.values())


def rows_of(name: str, model: Any, recipes: list[str]) -> list[dict[str, Any]]:
    """Measure a model in bf16, then converted with each recipe."""
    rows = []
    for recipe in ("bf16", *recipes):
        current, checked = model, ""
        if recipe != "bf16":
            current = copy.deepcopy(model)
            report = fp8ref.convert_(current, recipe, skip=[] if _tied(model) else ["lm_head"])
            checked = f"{len(report.converted)} layers converted; {equal_bits(current)}"
            print(checked, flush=True)
        nbytes = weights_nbytes(current)
        for batch in BATCHES:
            began = time.monotonic()
            row = {"model": name, "weights": recipe, "batch": batch, "bytes a token": nbytes, "checked": checked}
            row |= measure(current, batch)
            row["graph, TB/s of weights"] = round(nbytes * row["graph"] / batch / 1e12, 2)
            row["seconds"] = round(time.monotonic() - began, 1)
            rows.append(row)
            print(json.dumps(row), flush=True)
    return rows


def _tied(model: Any) -> bool:
    return bool(model.lm_head.weight is model.model.embed_tokens.weight)


def table(found: dict[str, Any]) -> str:
    """Return the results as a table."""
    e = found["environment"]
    lines = [
        f"{e['gpu']}, torch {e['torch']}, triton {e['triton']}, transformers {e['transformers']}, {e['date']}.",
        f"Tokens per second, greedy, caches of {LENGTH} tokens. The output head and the embedding are bf16 throughout.",
        "",
        "| model | weights | batch | CUDA graph | x bf16 | eager | `generate` | weights read, TB/s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    base = {(r["model"], r["batch"]): r["graph"] for r in found["rows"] if r["weights"] == "bf16"}
    for r in found["rows"]:
        factor = r["graph"] / base[r["model"], r["batch"]]
        lines.append(
            f"| {r['model']} | {r['weights']} | {r['batch']} | {r['graph']:,.0f} | {factor:.2f} | {r['eager']:,.0f} "
            f"| {r['generate']:,.0f} | {r['graph, TB/s of weights']:.2f} |"
        )
    lines += [f"\nNot measured: {what}: {why}" for what, why in found["not measured"].items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure both models and write the results."""
    import transformers

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--model", type=Path, help="a model folder or GGUF file in place of the embedded model")
    parser.add_argument("--recipes", nargs="*", default=["row"], help="names of fp8ref.RECIPES")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"environment": environment() | {"transformers": transformers.__version__}}
    found |= {"rows": [], "not measured": {}}
    for make in (large_model, lambda: small_model(args.model)):
        try:
            name, model = make()
        except (ReportError, ImportError) as error:
            found["not measured"]["the small model"] = str(error)
            continue
        found["rows"] += rows_of(name, model, args.recipes)
        del model
        torch.cuda.empty_cache()
        (args.out / "decode.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "decode.md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
