"""What is wrong with a checkpoint, in words that name the file and the tensor; the errors and warnings made of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Level = Literal["error", "warning", "note"]

_SHOWN = 20
"""How many errors a message spells out."""


@dataclass(frozen=True)
class Finding:
    """One observation about a checkpoint.

    Attributes:
        level: "error": it is not loaded; "warning": loaded, but something in it is unused, odd or run otherwise than
            declared; "note": a fact that a reader may want.
        file: the file it is about, relative to the folder.
        tensor: the tensor or layer it is about, or "" for the file as a whole.
        message: what was found, and what was expected.

    >>> print(Finding("error", "model.safetensors", "a.weight", "has the NaN code 0x7f at [3, 5]"))
    model.safetensors: a.weight: has the NaN code 0x7f at [3, 5]
    """

    level: Level
    file: str
    tensor: str
    message: str

    def __str__(self) -> str:
        """``file: tensor: message``."""
        return ": ".join(part for part in (self.file, self.tensor, self.message) if part)


class CheckpointError(ValueError):
    """A checkpoint that is not loaded, or not written. Nothing was changed.

    Attributes:
        findings: what is wrong, each with its file and tensor; empty for a wrong argument.

    >>> raise CheckpointError.of("/models/m", [Finding("error", "config.json", "", "is not JSON")])
    Traceback (most recent call last):
    fp8ref.checkpoint.findings.CheckpointError: /models/m: config.json: is not JSON
    """

    def __init__(self, message: str, findings: tuple[Finding, ...] = ()) -> None:
        super().__init__(message)
        self.findings = findings

    @classmethod
    def of(cls, folder: Path | str, findings: Iterable[Finding]) -> CheckpointError:
        """One exception for all the errors of a folder."""
        errors = tuple(finding for finding in findings if finding.level == "error")
        if len(errors) == 1:
            return cls(f"{folder}: {errors[0]}", errors)
        lines = [f"{folder}: {len(errors)} errors", *(f"  {error}" for error in errors[:_SHOWN])]
        if len(errors) > _SHOWN:
            lines.append(f"  and {len(errors) - _SHOWN} more; fp8ref inspect {folder} lists all of them")
        return cls("\n".join(lines), errors)


class CheckpointWarning(UserWarning):
    """Something in a checkpoint is not used, or runs otherwise than the checkpoint declares.

    >>> issubclass(CheckpointWarning, UserWarning)
    True
    """


class Broken(Exception):  # noqa: N818 - a signal inside this package, never seen outside
    """Reading a file or config ended early; carries the finding that says why.

    >>> Broken.at("config.json", "is not JSON").finding.file
    'config.json'
    """

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

    @classmethod
    def at(cls, file: str, message: str, tensor: str = "") -> Broken:
        """An error about a file, or about a tensor in it."""
        return cls(Finding("error", file, tensor, message))


def warn_of(folder: Path | str, findings: Iterable[Finding]) -> None:
    """Warn once for each kind of thing that is not as declared."""
    kinds: dict[str, list[Finding]] = {}
    for finding in findings:
        if finding.level == "warning":
            kinds.setdefault(finding.message, []).append(finding)
    for same in kinds.values():
        first, more = same[0], len(same) - 1
        where = ": ".join(part for part in (first.file, first.tensor) if part)
        also = f" and {more} more" if more else ""
        warnings.warn(f"{folder}: {where}{also}: {first.message}", CheckpointWarning, stacklevel=3)
