"""Progress on the terminal: two bars with a rate and a time left, or a line per recipe where there is no terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text


class RateColumn(ProgressColumn):
    """Multiplications per second."""

    def render(self, task: Task) -> Text:
        """The rate of late, or nothing before there is one."""
        speed = task.finished_speed or task.speed
        return Text("" if speed is None else f"{speed / 1e6:,.0f} M products/s", style="progress.data.speed")


def products_progress(console: Console) -> Progress:
    """Bars of rich that count multiplications, with their rate and the time left; silent where there is no terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        TextColumn("{task.percentage:>3.0f}%"),
        RateColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )


class Bars:
    """Shows a run on a console; a context manager."""

    def __init__(self, console: Console) -> None:
        """Show the run on ``console``."""
        self._console = console
        self._progress = products_progress(console)
        self._names: Sequence[str] = ()
        self._products = 0
        self._all: TaskID | None = None
        self._one: TaskID | None = None

    @contextmanager
    def showing(self) -> Iterator[Bars]:
        """Show the bars within the block."""
        with self._progress:
            yield self

    def begin(self, recipes: Sequence[str], products: int) -> None:
        """The run starts: these recipes, each with this many multiplications."""
        self._names, self._products = recipes, products
        self._all = self._progress.add_task("all recipes", total=products * len(recipes))

    def recipe(self, name: str) -> None:
        """A recipe starts."""
        if self._one is not None:
            self._progress.remove_task(self._one)
        number = self._names.index(name) + 1
        self._one = self._progress.add_task(f"{name} ({number} of {len(self._names)})", total=self._products)

    def advance(self, products: int) -> None:
        """This many more multiplications are done."""
        for task in (self._all, self._one):
            if task is not None:
                self._progress.advance(task, products)

    def done(self, name: str, seconds: float) -> None:
        """A recipe is done."""
        if not self._console.is_terminal:
            number = self._names.index(name) + 1
            self._console.print(f"{name} ({number} of {len(self._names)}): {seconds:.1f} s", highlight=False)
