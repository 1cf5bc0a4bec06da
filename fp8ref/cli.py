"""The command ``fp8ref``. Imports nothing outside the standard library before it knows what is missing."""

from __future__ import annotations

import io
import sys
from importlib import metadata, util

REPORT_EXTRA = ("typer", "rich", "transformers", "accelerate", "gguf", "safetensors", "matplotlib")
"""The modules of the extra ``report``. accelerate is there because transformers loads GGUF files with it alone."""


def missing_modules() -> list[str]:
    """The modules of the extra that are not installed."""
    return [name for name in REPORT_EXTRA if util.find_spec(name) is None]


def main() -> None:
    """Run the command line; the entry point of ``fp8ref`` and of ``python -m fp8ref``."""
    missing = missing_modules()
    if missing:
        if sys.argv[1:] == ["--version"]:
            print(f"fp8ref {metadata.version('fp8ref')}")
            return
        print(f'fp8ref: error: not installed: {", ".join(missing)}; run: pip install "fp8ref[report]"', file=sys.stderr)
        raise SystemExit(2)
    if isinstance(sys.stdout, io.TextIOWrapper) and not sys.stdout.encoding.lower().startswith("utf"):
        # A name that the locale's encoding lacks is no reason to lose a result.
        sys.stdout.reconfigure(errors="backslashreplace")
    from fp8ref.commands import app

    app()
