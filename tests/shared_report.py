"""A process of those that tests/fp8ref/test_report_ranks.py starts: its share of the report of a tiny model.

``python shared_report.py FOLDER WHAT RANK``: writes the whole report to ``FOLDER/<rank>.json``. WHAT is ``nothing`` or
what goes wrong in one rank: ``killed`` in the middle of its first recipe, ``overflow`` there, ``other text`` from the
start.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import torch

from fp8ref.report import ReportError, measure, select_recipes
from fp8ref.report.jsonfile import report_to_dict
from fp8ref.report.ranks import joined
from tiny_models import TinyModel, tiny_model, tokens

PATIENCE = 4.0
NAMES = ["row-exact", "row-fast-sm90", "block-sm90"]
TOKENS = 1100


class Dying(TinyModel):
    """Ends its process without a word at the second call, that under a recipe."""

    calls = 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        self.calls += 1
        if self.calls == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().forward(input_ids, use_cache)


class Overflowing(TinyModel):
    """Gives NaN at the second call."""

    calls = 0

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> SimpleNamespace:
        self.calls += 1
        logits = super().forward(input_ids, use_cache).logits
        return SimpleNamespace(logits=logits * float("nan") if self.calls == 2 else logits)


def main() -> None:
    folder, what, where = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    model, ids = tiny_model(), tokens(TOKENS)
    try:
        with joined(PATIENCE) as ranks:
            if ranks.number == where:
                model.__class__ = {"killed": Dying, "overflow": Overflowing}.get(what, TinyModel)
                ids = tokens(TOKENS, seed=2) if what == "other text" else ids
            report = measure(model, ids, select_recipes(NAMES), ranks=ranks)
    except ReportError as error:
        sys.stderr.write(f"rank {os.environ['RANK']}: {error}\n")
        raise SystemExit(2) from None
    (folder / f"{ranks.number}.json").write_text(json.dumps(report_to_dict(report)))


if __name__ == "__main__":
    main()
