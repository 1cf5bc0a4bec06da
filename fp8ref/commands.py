"""The commands of ``fp8ref``, each defined beside what it runs, and needing what ``fp8ref.cli`` says."""

from __future__ import annotations

from importlib import metadata
from typing import Annotated

import typer

from fp8ref.checkpoint.app import inspect
from fp8ref.probing.app import probe
from fp8ref.report.app import report

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


def _version(wanted: bool) -> None:
    """Print the version and stop."""
    if wanted:
        typer.echo(f"fp8ref {metadata.version('fp8ref')}")
        raise typer.Exit


@app.callback()
def _fp8ref(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """FP8 matrix products, bit for bit what an NVIDIA Hopper GPU returns."""


app.command()(report)
app.command()(inspect)
app.command()(probe)
