"""What :func:`fp8ref.convert_` did, layer by layer; prints as a table."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import util
from typing import Any

from fp8ref.recipes import Recipe

_HEADS = ("layer", "count", "kind", "shape", "done, or why not", "saved")
_RIGHT = (1, 3, 5)


@dataclass(frozen=True)
class LayerConversion:
    """What became of one module.

    Attributes:
        name: its name in the model.
        aliases: its further names, where it is used more than once.
        kind: the class that it had.
        shape: [N, K] of a linear layer, else that of its first parameter.
        converted: whether it is a :class:`fp8ref.Fp8Linear` now, and was not before.
        reason: what was done, or why nothing was.
        nbytes_saved: bytes that its weight takes less than before; negative where it takes more.

    >>> from torch import nn
    >>> from fp8ref import convert_
    >>> convert_(nn.Sequential(nn.Linear(32, 16)), "row", show=False).layers[0].nbytes_saved
    1472
    """

    name: str
    aliases: tuple[str, ...]
    kind: str
    shape: tuple[int, ...]
    converted: bool
    reason: str
    nbytes_saved: int


@dataclass(frozen=True)
class ConversionReport:
    """What a conversion did: every linear layer of the model, and whatever else holds a matrix of parameters.

    Attributes:
        recipe: the recipe.
        layers: one entry for each module, in the model's order.
        nbytes_before: bytes of all the model's parameters and buffers before, what is shared counted once.
        nbytes_after: the same afterwards.

    >>> from torch import nn
    >>> from fp8ref import convert_
    >>> model = nn.Sequential(nn.Embedding(7, 32), nn.Linear(32, 16), nn.Linear(32, 16))
    >>> print(convert_(model, "row", skip=["2"], show=False))
    layer  count  kind       shape    done, or why not         saved
    0          1  Embedding   7 x 32  a look-up, no product        0
    1          1  Linear     16 x 32  FP8                    1.47 kB
    2          1  Linear     16 x 32  skip: '2'                    0
    1 of 2 linear layers converted: weight e4m3 row, x e4m3 row dynamic
    5.12 kB of parameters and buffers became 3.65 kB (-28.8 %)
    """

    recipe: Recipe
    layers: tuple[LayerConversion, ...]
    nbytes_before: int
    nbytes_after: int

    @property
    def converted(self) -> tuple[LayerConversion, ...]:
        """The layers that were converted."""
        return tuple(layer for layer in self.layers if layer.converted)

    @property
    def kept(self) -> tuple[LayerConversion, ...]:
        """The modules that stayed as they were."""
        return tuple(layer for layer in self.layers if not layer.converted)

    @property
    def nbytes_saved(self) -> int:
        """Bytes that the model takes less than before."""
        return self.nbytes_before - self.nbytes_after

    def rows(self) -> list[tuple[str, ...]]:
        """The table's cells: neighbours that differ in a number of their names alone share a row."""
        groups: dict[tuple[object, ...], list[LayerConversion]] = {}
        for layer in self.layers:
            key = (_masked(layer.name), layer.kind, layer.shape, layer.converted, _masked(layer.reason))
            groups.setdefault(key, []).append(layer)
        return [_row(group) for group in groups.values()]

    def summary(self) -> list[str]:
        """Two lines: how many layers, and what that saved."""
        linear = [layer for layer in self.layers if layer.converted or "Linear" in layer.kind]
        share = 100.0 * self.nbytes_saved / max(1, self.nbytes_before)
        before, after = in_bytes(self.nbytes_before), in_bytes(self.nbytes_after)
        return [
            f"{len(self.converted)} of {len(linear)} linear layers converted: {self.recipe.in_words()}",
            f"{before} of parameters and buffers became {after} ({-share:+.1f} %)",
        ]

    def __str__(self) -> str:
        """Return the table and the summary as plain text."""
        return "\n".join([*_plain([_HEADS, *self.rows()]), *self.summary()])

    def __rich__(self) -> Any:
        """Return the same for rich."""
        from rich import box
        from rich.console import Group
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD)
        for i, head in enumerate(_HEADS):
            table.add_column(head, justify="right" if i in _RIGHT else "left", overflow="fold")
        for row, done in zip(self.rows(), self._done(), strict=True):
            table.add_row(*row, style=None if done else "dim")
        return Group(table, *self.summary())

    def _done(self) -> list[bool]:
        return [row[4].startswith("FP8") for row in self.rows()]

    def print(self) -> None:
        """Print on standard output: with rich where that is a terminal and rich is installed."""
        if sys.stdout.isatty() and util.find_spec("rich") is not None:
            from rich.console import Console

            Console(highlight=False).print(self)
        else:
            sys.stdout.write(f"{self}\n")


def _masked(text: str) -> str:
    return re.sub(r"\d+", "#", text)


def _row(group: Sequence[LayerConversion]) -> tuple[str, ...]:
    first = group[0]
    name = _joined([layer.name for layer in group])
    aliases = [_joined(list(names)) for names in zip(*(layer.aliases for layer in group), strict=False)]
    return (
        " = ".join([name, *aliases]),
        str(len(group)),
        first.kind,
        " x ".join(map(str, first.shape)),
        first.reason if len(group) == 1 else _joined([layer.reason for layer in group]),
        in_bytes(sum(layer.nbytes_saved for layer in group)),
    )


def _joined(names: Sequence[str]) -> str:
    """Join texts that differ in numbers alone.

    >>> _joined(["layers.0.up", "layers.1.up", "layers.3.up"])
    'layers.{0-1,3}.up'
    """
    parts = [re.split(r"(\d+)", name) for name in names]
    return "".join(
        column[0] if len(set(column)) == 1 else "{" + _ranges(sorted(set(map(int, column)))) + "}"
        for column in zip(*parts, strict=True)
    )


def _ranges(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def _plain(rows: Sequence[tuple[str, ...]]) -> Iterable[str]:
    """Columns in plain text, two spaces apart."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADS))]
    for number, row in enumerate(rows):
        cells = [
            cell.rjust(width) if i in _RIGHT and (number or i != 3) else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def in_bytes(count: int) -> str:
    """Return a number of bytes with three digits and a decimal unit.

    >>> in_bytes(0), in_bytes(-1408), in_bytes(134_500_000)
    ('0', '-1.41 kB', '134 MB')
    """
    size, unit = float(count), 0
    while abs(size) >= 999.5 and unit < 4:
        size, unit = size / 1000.0, unit + 1
    if unit == 0:
        return str(count)
    decimals = 2 if abs(size) < 9.995 else 1 if abs(size) < 99.95 else 0
    return f"{size:.{decimals}f} {('', 'kB', 'MB', 'GB', 'TB')[unit]}"
