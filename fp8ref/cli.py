"""The command ``fp8ref``. Imports nothing outside the standard library before it knows what is missing."""

from __future__ import annotations

import io
import sys
from importlib import metadata, util

NEEDS = {
    # transformers loads GGUF files with accelerate alone
    "report": ("report", ("typer", "rich", "transformers", "accelerate", "gguf", "safetensors", "matplotlib")),
    "inspect": ("checkpoints", ("typer", "rich", "safetensors")),
    "probe": ("testing", ("typer", "rich")),
}
"""By command: the smallest extra that brings all it needs, and the modules of it that the command imports."""
_ANY = ("report", ("typer", "rich"))


def missing_modules(command: str) -> tuple[str, list[str]]:
    """The extra for a command, or for help, and those of its modules that are not installed."""
    extra, modules = NEEDS.get(command, _ANY)
    return extra, [name for name in modules if util.find_spec(name) is None]


def main() -> None:
    """Run the command line; the entry point of ``fp8ref`` and of ``python -m fp8ref``."""
    extra, missing = missing_modules(next((word for word in sys.argv[1:] if not word.startswith("-")), ""))
    if missing:
        if sys.argv[1:] == ["--version"]:
            print(f"fp8ref {metadata.version('fp8ref')}")
            return
        print(
            f'fp8ref: error: not installed: {", ".join(missing)}; run: pip install "fp8ref[{extra}]"', file=sys.stderr
        )
        raise SystemExit(2)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        # A name that the locale's encoding lacks is no reason to lose a result.
        sys.stdout.reconfigure(errors="backslashreplace")
    from fp8ref.commands import app

    app()
