"""``fp8ref inspect`` on the command line; needs the extra ``checkpoints``."""

from __future__ import annotations

import json as json_module
import re
from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fp8ref.checkpoint.contents import Contents
from fp8ref.checkpoint.findings import CheckpointError
from fp8ref.checkpoint.inspection import Inspection, describe_activations, describe_scales, inspect_checkpoint

_WIDTH = 1000
"""Columns of a line: names of layers and tensors are there to be copied and searched, so none is cut."""
_STYLES = {"error": "bold red", "warning": "yellow", "note": "dim"}


def inspect(
    folder: Annotated[Path, typer.Argument(help="A checkpoint folder: config.json and safetensors files.")],
    json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    fast: Annotated[
        bool, typer.Option("--fast", help="Go by headers and configs; do not look at the values of any tensor.")
    ] = False,
) -> None:
    """Show what an FP8 checkpoint holds and what is wrong with it, tensor by tensor, without loading it.

    The exit status is 1 when something is wrong with it, so that it would not be loaded.
    """
    try:
        result = inspect_checkpoint(folder, scan=not fast)
    except CheckpointError as error:
        typer.echo(f"fp8ref: error: {error}", err=True)
        raise typer.Exit(2) from None
    if json:
        typer.echo(json_module.dumps(result.to_dict(), indent=1, allow_nan=False))
    else:
        print_inspection(result, Console(width=_WIDTH, soft_wrap=True))
    if not result.ok:
        raise typer.Exit(1)


def print_inspection(result: Inspection, console: Console) -> None:
    """Print what was found: the layers, the other tensors, the findings, a verdict."""
    contents = result.contents
    shards, nbytes = len(contents.files.shards), contents.files.nbytes()
    console.print(f"folder  {result.folder}", highlight=False, markup=False)
    console.print(f"format  {result.format or 'unknown'}", highlight=False)
    console.print(
        f"holds   {len(contents.files.tensors)} tensors, {nbytes:,} bytes, {shards} file{'s' * (shards != 1)}",
        highlight=False,
    )
    if contents.layers:
        console.print(_layer_table(contents))
    if contents.plain or contents.unused or contents.rejected:
        console.print(_tensor_table(contents))
    for finding in result.findings:
        console.print(f"{finding.level}: {finding}", style=_STYLES[finding.level], highlight=False, markup=False)
    console.print(_verdict(result), highlight=False)


def _table(title: str, *columns: str) -> Table:
    """A table of text, never cut: names of layers and tensors are there to be copied."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True, overflow="ignore")
    return table


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts layer 2 before layer 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _layer_table(contents: Contents) -> Table:
    """One row for each FP8 layer."""
    table = _table(f"FP8 layers ({len(contents.layers)})", "layer", "[N, K]", "weight scales", "activations", "file")
    for layer in sorted(contents.layers.values(), key=lambda layer: _natural(layer.name)):
        shape = str(list(layer.weight.shape))
        cells = (layer.name, shape, describe_scales(layer), describe_activations(layer), layer.weight.file)
        table.add_row(*map(Text, cells))
    return table


def _tensor_table(contents: Contents) -> Table:
    """One row for each other tensor."""
    rows = [(info, "loaded as it is") for info in contents.plain.values()]
    rows += [(info, "not used") for info in contents.unused.values()]
    rows += [(info, "wrong, see below") for info in contents.rejected.values()]
    table = _table(f"Other tensors ({len(rows)})", "tensor", "shape", "dtype", "what becomes of it", "file")
    for info, fate in sorted(rows, key=lambda row: _natural(row[0].name)):
        table.add_row(*map(Text, (info.name, str(list(info.shape)), info.dtype, fate, info.file)))
    return table


def _verdict(result: Inspection) -> str:
    """The last line."""
    counts = Counter(finding.level for finding in result.findings)
    values = "values scanned" if result.scanned else "values not scanned (--fast): NaN codes and bad scales go unseen"
    errors, warnings = (f"{counts[level]} {level}{'s' * (counts[level] != 1)}" for level in ("error", "warning"))
    found = f"{errors}, {warnings}; {values}"
    return f"{'ok' if result.ok else 'WRONG, not loaded'}: {found}"
