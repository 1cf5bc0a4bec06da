"""Who wants to know how far a report is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Progress(Protocol):
    """Who wants to know how far a run is."""

    def begin(self, recipes: Sequence[str], products: int) -> None:
        """The run starts: these recipes, each with this many multiplications."""

    def recipe(self, name: str) -> None:
        """A recipe starts."""

    def advance(self, products: int) -> None:
        """This many more multiplications are done."""

    def done(self, name: str, seconds: float) -> None:
        """A recipe is done."""


class Silent:
    """A :class:`Progress` that shows nothing."""

    def begin(self, recipes: Sequence[str], products: int) -> None:
        """Show nothing."""

    def recipe(self, name: str) -> None:
        """Show nothing."""

    def advance(self, products: int) -> None:
        """Show nothing."""

    def done(self, name: str, seconds: float) -> None:
        """Show nothing."""
