"""A progress bar in bytes, where rich is installed and somebody is looking."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import util


@contextmanager
def byte_bar(what: str, total: int, *, show: bool) -> Iterator[Callable[[int], None]]:
    """Show a bar on standard error while the block runs.

    Args:
        what: is being done, in words.
        total: bytes in all.
        show: False shows nothing; nor does it where rich is missing or standard error is no terminal.

    Yields:
        A function that is called with the number of bytes done since the last call.
    """
    if not show or util.find_spec("rich") is None or not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(bar_width=20), DownloadColumn(), TransferSpeedColumn(),
        TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(file=sys.stderr)) as bars:
        task = bars.add_task(what, total=total)

        def done(count: int) -> None:
            bars.advance(task, count)

        yield done
