"""The command line, as a user meets it."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from fp8ref.cli import main
from fp8ref.commands import app
from fp8ref.report.recipes import RECIPES
from tiny_models import save_llama

TEXT = "The quick brown fox jumps over the lazy dog. " * 3


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "200"})


def python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_report_of_a_model_folder(llama: Path, text: Path, tmp_path: Path) -> None:
    result = call(
        "report", llama, "--text", text, "--tokens", "24", "--layers", "1", "--recipe", "row-fast-sm90",
        "--recipe", "row-exact", "--json", tmp_path / "out.json", "--plot", tmp_path / "out.png",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    assert [recipe["recipe"]["name"] for recipe in content["recipes"]] == ["row-fast-sm90", "row-exact"]
    assert content["model"] == "llama"
    assert content["text"] == str(text)
    assert content["tokens"] == 24
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    for recipe in content["recipes"]:
        assert [layer["name"].rpartition(".")[2] for layer in recipe["layers"]] == 2 * kinds
        assert recipe["products"] == 24 * 2 * (48 * (48 + 24 + 24 + 48) + 3 * 48 * 136)
        assert f"{recipe['perplexity']:.3f}" in result.stdout
    assert {module["reason"] for module in content["not_converted"]} == {
        "a look-up, no product",
        "no matrix product",
        "output head: engines keep it in 16 bits (--lm-head converts it)",
    }
    worst = min(content["recipes"][0]["layers"], key=lambda layer: layer["snr_db"]["total"])
    assert worst["name"] in result.stdout
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert f"wrote {tmp_path / 'out.png'}" in result.stderr


def test_the_same_in_a_process_of_its_own_on_the_default_text(llama: Path) -> None:
    arguments = ["report", str(llama), "--tokens", "8", "--recipe", "tensor-exact", "--layers", "0"]
    done = subprocess.run([sys.executable, "-m", "fp8ref", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "pydoc_data.topics of Python 3." in done.stdout
    assert "worst" not in done.stdout
    assert re.fullmatch(r"tensor-exact \(1 of 1\): \d+\.\d s\n", done.stderr.replace("loading the model\n", ""))


ERRORS = [
    (["{tmp}/absent"], "MODEL: no such folder: {tmp}/absent"),
    (["{tmp}"], "MODEL: {tmp} holds neither a config.json nor a .gguf file"),
    (["{llama}", "--recipe", "row"], "--recipe: got row; give one of: tensor-fast-sm90, "),
    (["{llama}", "--tokens", "7"], "--tokens: got 7; give 8 or more"),
    (["{llama}", "--tokens", "500", "--text", "{text}"], "--tokens: got 500, but the text has only 135 tokens"),
    (["{llama}", "--layers", "-1"], "--layers: got -1; give 0 or more"),
    (["{llama}", "--text", "{tmp}/absent.txt"], "--text: cannot read {tmp}/absent.txt: No such file or directory"),
    (["{llama}", "--text", "{tmp}/empty.txt"], "--text: {tmp}/empty.txt is empty"),
    (["{llama}", "--text", "{tmp}/latin1.txt"], "--text: {tmp}/latin1.txt is not UTF-8: byte 2 is wrong"),
    (["{llama}", "--json", "{tmp}/absent/out.json"], "--json: cannot write {tmp}/absent/out.json"),
    (["{llama}", "--plot", "{tmp}"], "--plot: cannot write {tmp}: it is a folder"),
    (["{llama}", "--plot", "{tmp}/out.txt"], "--plot: cannot draw {tmp}/out.txt; end its name in one of: "),
    (["{llama}", "--plot", "{tmp}/out.svg", "--json", "{tmp}/out.svg"], "--json, --plot: got {tmp}/out.svg for both"),
    (["{text}"], "MODEL: {text} is a file, but no .gguf; give a model folder, or a GGUF file"),
    (["{tmp}/quantised"], "MODEL: {tmp}/quantised is already quantised (quant_method: fp8)"),
    (["{tmp}/broken"], "MODEL: {tmp}/broken/config.json is not JSON"),
    (["{tmp}/unknown"], "MODEL: transformers cannot load {tmp}/unknown: "),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS, ids=[message.partition(";")[0] for _, message in ERRORS])
def test_user_errors_are_one_line_and_exit_2(
    arguments: list[str], message: str, llama: Path, text: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin1.txt").write_bytes(b"Gr\xfc\xdfe")
    for name, config in (
        ("quantised", '{"quantization_config": {"quant_method": "fp8"}}'),
        ("broken", "{"),
        ("unknown", '{"model_type": "no-such-model"}'),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    names = {"tmp": str(tmp_path), "llama": str(llama), "text": str(text)}
    result = call("report", *(argument.format(**names) for argument in arguments))
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line.strip() != "loading the model" and line]
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith(f"fp8ref: error: {message.format(**names)}")


def test_a_picture_that_needs_what_is_not_here_is_refused_before_the_work(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib import rcParams

    monkeypatch.setitem(rcParams, "pgf.texsystem", "pdflatex")
    monkeypatch.setenv("PATH", str(tmp_path))
    result = call("report", llama, "--tokens", "8", "--plot", tmp_path / "out.pgf")
    assert result.exit_code == 2
    assert re.fullmatch(r"fp8ref: error: --plot: cannot draw .*out\.pgf: 'pdflatex' not found.*\n", result.stderr)


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_a_folder_that_may_not_be_written_is_refused_before_the_work(
    option: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path)  # root, which may all, runs this too
    result = call("report", llama, "--tokens", "8", option, tmp_path / "out.png")
    assert result.exit_code == 2
    assert result.stderr == f"fp8ref: error: {option}: cannot write {tmp_path / 'out.png'}: no permission\n"


def test_no_name_or_figure_is_cut_and_none_ends_the_report(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A narrow terminal, a locale without most characters, and a name that matplotlib could take for a formula."""
    folder, plot = tmp_path / "mö$^$del", tmp_path / "out.png"
    shutil.copytree(llama, folder)
    arguments = ["report", folder, "--text", text, "--tokens", "8", "--recipe", "row-exact", "--plot", plot]
    written = io.BytesIO()
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setattr(sys, "argv", ["fp8ref", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
    with pytest.raises(SystemExit) as ended:
        main()
    shown = written.getvalue().decode("ascii")
    assert not ended.value.code
    assert shown.startswith("model   m\\xf6$^$del\n")
    assert "\\u2026" not in shown  # an ellipsis
    assert re.search(r"model\.layers\.[01]\.(mlp|self_attn)\.\w+_proj +\|", shown)
    assert plot.stat().st_size


def test_output_that_nobody_reads_loses_no_file(
    llama: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in ``fp8ref report --json out.json | head``."""

    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr("fp8ref.report.app.print_report", closed)
    result = call(
        "report", llama, "--text", text, "--tokens", "8", "--recipe", "row-exact", "--json", tmp_path / "out.json"
    )
    assert result.exit_code == 1
    assert json.loads((tmp_path / "out.json").read_text())["tokens"] == 8


def test_a_checkpoint_that_lacks_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(llama / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    del weights[name]
    for file in llama.iterdir():
        if file.suffix == ".json":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    result = call("report", tmp_path, "--recipe", "tensor-exact")
    assert result.exit_code == 2
    assert f"lacks weights of its own model: {name} (1 in all)" in result.stderr


def test_help_lists_every_recipe() -> None:
    result = call("report", "--help")
    shown = re.sub(r"[\s│]+", "", result.stdout)
    assert result.exit_code == 0
    assert all(f"{name}," in shown or f"{name};" in shown for name in RECIPES)


def test_version() -> None:
    assert call("--version").stdout == f"fp8ref {metadata.version('fp8ref')}\n"


def run_without(modules: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command line in a process where importing these modules fails as if they were not installed."""
    hide = f"import sys; sys.modules.update(dict.fromkeys({modules.split()})); from fp8ref.cli import main; main()"
    return python(hide, *arguments)


@pytest.mark.parametrize(
    ("command", "extra"), [("report", "report"), ("inspect", "checkpoints"), ("probe", "testing"), ("--help", "report")]
)
def test_a_missing_extra_says_what_to_install(command: str, extra: str) -> None:
    done = run_without("rich", command)
    assert done.returncode == 2
    assert done.stderr == f'fp8ref: error: not installed: rich; run: pip install "fp8ref[{extra}]"\n'


def test_a_command_needs_nothing_of_the_others(llama: Path) -> None:
    others = "transformers accelerate gguf matplotlib hypothesis pytest"
    assert run_without(others, "inspect", str(llama), "--fast").stdout.startswith(f"folder  {llama}")
    assert run_without(f"{others} safetensors", "probe", "nothing:here").stderr.startswith("fp8ref: error: target: ")
    assert "inspect" in run_without(f"{others} safetensors", "--help").stdout
    assert "not installed: transformers, accelerate, gguf, matplotlib;" in run_without(others, "report").stderr


def test_the_version_needs_no_extra() -> None:
    done = run_without("rich", "--version")
    assert (done.returncode, done.stdout) == (0, f"fp8ref {metadata.version('fp8ref')}\n")


@pytest.mark.slow
def test_the_embedded_model(tmp_path: Path) -> None:
    result = call("report", "--tokens", "32", "--recipe", "row-exact", "--json", tmp_path / "out.json")
    assert result.exit_code == 0, result.stderr
    content = json.loads((tmp_path / "out.json").read_text())
    assert len(content["recipes"][0]["layers"]) == 210
    # What FP8 with row scales does to a working model; a model loaded wrongly would not come near.
    assert 0.0 < content["recipes"][0]["kl_divergence_nats"]["mean"] < 0.1
    assert content["fp32"]["perplexity"] < 200.0
