"""Compare what is installed with constraints.txt: every package pinned, at the version that is there."""

from __future__ import annotations

import sys
from importlib.metadata import distributions
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import Version

CONSTRAINTS = Path(__file__).resolve().parent.parent / "constraints.txt"
# pip comes with the Python that made the environment; fp8ref is what is being worked on.
NOT_PINNED = {"pip", "fp8ref"}


def pinned_versions() -> dict[str, Version]:
    """Return the version of each package that constraints.txt names."""
    lines = (line.split("#")[0].strip() for line in CONSTRAINTS.read_text().splitlines())
    pairs = (line.split("==") for line in lines if line)
    return {canonicalize_name(name): Version(version) for name, version in pairs}


def complaints() -> list[str]:
    """Return a line for each installed package that differs from its pin or has none."""
    pinned = pinned_versions()
    found = []
    for distribution in distributions():
        name = canonicalize_name(distribution.name)
        # torch's builds add a local label (+cpu, +cu130), which a pin leaves open.
        installed = Version(Version(distribution.version).public)
        if name not in NOT_PINNED and pinned.get(name) != installed:
            found.append(f"{name}: installed {installed}, pinned {pinned.get(name, 'nowhere')}")
    return sorted(found)


if __name__ == "__main__":
    if found := complaints():
        sys.exit("constraints.txt and .venv differ; pin these, or make a fresh .venv:\n  " + "\n  ".join(found))
    print("pins: every installed package is the one that constraints.txt names")
