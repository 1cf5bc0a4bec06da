"""``fp8ref probe`` on the command line; needs the extra ``testing``."""

from __future__ import annotations

import json as json_module
import sys
from pathlib import Path
from typing import Annotated, get_args

import torch
import typer
from rich.console import Console

from fp8ref.emulation.scales import PAIRS, Scaling
from fp8ref.probing.report import ProbeReport
from fp8ref.probing.run import probe as run_probe
from fp8ref.probing.subject import ProbeError
from fp8ref.probing.targets import KNOWN, resolve

OPERANDS = {
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
OUTPUTS = {**OPERANDS, "fp32": torch.float32}


def probe(
    target: Annotated[str, typer.Argument(help=f"module:function taking (a, b), or {KNOWN}.", show_default=False)],
    device: Annotated[str, typer.Option(help="Where the operands lie, such as cuda.")] = "cpu",
    m: Annotated[int, typer.Option("--m", help="Rows of a, in every call.")] = 64,
    n: Annotated[int, typer.Option("--n", help="Columns of b, in every call.")] = 64,
    k: Annotated[int, typer.Option("--k", help="K, in every call.")] = 512,
    operands: Annotated[
        str, typer.Option(help=f"Formats of a and b, such as e4m3,e5m2. Of {', '.join(OPERANDS)}.")
    ] = "e4m3,e4m3",
    scaling: Annotated[
        str | None,
        typer.Option(
            help=f"Kinds of scales to call with, such as row,row. Of {', '.join(get_args(Scaling))}.",
            show_default=False,
        ),
    ] = None,
    bias: Annotated[bool, typer.Option("--bias", help="Also find out how a bias is added.")] = False,
    fast: Annotated[bool, typer.Option("--fast", help=f"{KNOWN} with use_fast_accum=True.")] = False,
    out_dtype: Annotated[
        str | None, typer.Option(help=f"Output of {KNOWN}. Default: fp32.", show_default=False)
    ] = None,
    elements: Annotated[int, typer.Option(help="Outputs to compare on random operands.")] = 1_000_000,
    json: Annotated[
        Path | None, typer.Option(help="Write every finding with its evidence to this file.", show_default=False)
    ] = None,
) -> None:
    """Find out how a matrix product accumulates, by crafted inputs, and check the answer on random ones."""
    errors = Console(file=sys.stderr)
    try:
        if json is not None and (json.is_dir() or not json.absolute().parent.is_dir()):
            raise ProbeError(f"--json: cannot write {json}: it is a folder, or its folder does not exist")
        found = resolve(target, _pair(scaling), fast=fast, out_dtype=_named("--out-dtype", out_dtype, OUTPUTS))
        formats = [_named("--operands", name, OPERANDS) for name in operands.split(",")]
        if len(formats) != 2 or formats[0] is None or formats[1] is None:
            raise ProbeError(f"--operands: got {operands!r}; give two, such as e4m3,e5m2")
        with errors.status("probing") as status:
            report = run_probe(
                found.call,
                m=m,
                n=n,
                k=k,
                dtypes=(formats[0], formats[1]),
                device=device,
                scaling=found.scaling,
                bias=bias,
                elements=elements,
                name=found.name,
                progress=lambda stage: _show(errors, status.update, stage),
            )
    except (ProbeError, ValueError) as error:
        typer.echo(f"fp8ref: error: {error}", err=True)
        raise typer.Exit(2) from None
    typer.echo(str(report))
    if json is not None:
        _write(json, report)


def _show(console: Console, update: object, stage: str) -> None:
    """Say where the probe is: in place on a terminal, else a line each."""
    if console.is_terminal and callable(update):
        update(stage)
    else:
        console.print(stage, highlight=False)


def _write(path: Path, report: ProbeReport) -> None:
    path.write_text(json_module.dumps(report.to_json(), indent=1) + "\n", encoding="utf-8")
    typer.echo(f"wrote {path}", err=True)


def _named(option: str, name: str | None, known: dict[str, torch.dtype]) -> torch.dtype | None:
    if name is None:
        return None
    if name not in known:
        raise ProbeError(f"{option}: got {name!r}; give one of {', '.join(known)}")
    return known[name]


def _pair(scaling: str | None) -> tuple[Scaling, Scaling] | None:
    if scaling is None:
        return None
    for pair in PAIRS:
        if scaling == ",".join(pair):
            return pair
    raise ProbeError(f"--scaling: got {scaling!r}; give one of {'; '.join(','.join(pair) for pair in PAIRS)}")
