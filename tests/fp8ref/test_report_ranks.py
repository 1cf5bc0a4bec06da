"""Several processes make the report of one, and none of them waits for one that is lost."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import shared_report
from fp8ref.commands import app
from fp8ref.report import measure, select_recipes
from fp8ref.report.jsonfile import report_to_dict
from fp8ref.report.ranks import Alone, is_shared, joined
from tiny_models import save_llama, tiny_model, tokens

SCRIPT = shared_report.__file__
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--master-port"]
LIMIT = 240.0
"""Seconds; on a machine with nothing else to do it is a tenth of that."""


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


@contextmanager
def started(command: list[str], **variables: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a group of its own, which is gone after the block."""
    process = subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def by_torchrun(count: int, *arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    with started([*TORCHRUN, free_port(), "--nproc-per-node", str(count), *arguments]) as process:
        out, err = process.communicate(timeout=LIMIT)
    return process.returncode, out, err


def by_hand(count: int, folder: Path, what: str, where: int) -> list[tuple[int, str]]:
    """Exit code and errors of each rank, started as on machines of their own: nobody ends one that has lost another."""
    shared = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, SCRIPT, str(folder), what, str(where)]
    with ExitStack() as stack:
        processes = [stack.enter_context(started(command, RANK=str(rank), **shared)) for rank in range(count)]
        errors = [process.communicate(timeout=LIMIT)[1] for process in processes]
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def without_times(report: dict[str, Any]) -> dict[str, Any]:
    """What has to be equal: all but how long it took."""
    recipes = [{name: value for name, value in recipe.items() if name != "seconds"} for recipe in report["recipes"]]
    return {**report, "seconds": None, "recipes": recipes}


def test_three_processes_have_the_report_of_one(tmp_path: Path) -> None:
    code, _, err = by_torchrun(3, SCRIPT, str(tmp_path), "nothing", "0")
    assert code == 0, err
    alone = report_to_dict(measure(tiny_model(), tokens(shared_report.TOKENS), select_recipes(shared_report.NAMES)))
    for rank in range(3):
        assert without_times(json.loads((tmp_path / f"{rank}.json").read_text())) == without_times(alone)


def test_two_processes_print_the_table_of_one(tmp_path: Path) -> None:
    llama, text = save_llama(tmp_path / "llama"), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 3)
    names = [part for name in shared_report.NAMES for part in ("--recipe", name)]
    command = ["report", str(llama), "--text", str(text), "--tokens", "100", *names, "--json"]
    alone = CliRunner().invoke(app, [*command, str(tmp_path / "one.json")], env={"COLUMNS": "200"})
    assert alone.exit_code == 0, alone.stderr
    code, out, err = by_torchrun(2, "-m", "fp8ref", *command, str(tmp_path / "two.json"))
    assert code == 0, err
    assert out == alone.stdout
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    assert without_times(one) == without_times(two)
    assert err.count("row-exact (2 of 3): ") == 1


def test_the_loss_of_one_ends_the_others_with_an_error(tmp_path: Path) -> None:
    first, killed, last = by_hand(3, tmp_path, "killed", 1)
    assert killed[0] == -signal.SIGKILL
    for code, err in (first, last):
        assert code == 2
        assert re.search(
            r"^rank [02]: (rank [02] of 3 failed: )?rank 1 of 3 is lost: no sign of life for 4 s", err, re.M
        )
    assert list(tmp_path.iterdir()) == []


def test_the_loss_of_the_one_that_holds_the_store(tmp_path: Path) -> None:
    killed, other = by_hand(2, tmp_path, "killed", 0)
    assert killed[0] == -signal.SIGKILL
    assert other[0] == 2
    assert re.search(r"^rank 1: a rank or its machine is lost: .*; start the report again$", other[1], re.M), other[1]


def test_torchrun_ends_with_an_error_where_one_is_killed(tmp_path: Path) -> None:
    code, _, err = by_torchrun(2, SCRIPT, str(tmp_path), "killed", "1")
    assert code != 0
    assert re.search(r"^rank 0: (stopped by SIGTERM: another rank has ended early|rank 1 of 2 is lost)", err, re.M)
    assert "Signal 9 (SIGKILL)" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("overflow", "recipe [a-z0-9-]+: the model's logits are not finite on this text"),
        ("other text", "ranks 0 and 1 would not measure the same: the text is 1100 tokens [0-9a-f]+ and 1100 tokens"),
    ],
)
def test_an_error_of_one_is_the_error_of_all(tmp_path: Path, what: str, message: str) -> None:
    found = by_hand(2, tmp_path, what, 1)
    assert [code for code, _ in found] == [2, 2]
    for _, err in found:
        assert re.search(f"^rank [01]: (rank [01] of 2 failed: )?{message}", err, re.M), err


def test_one_process_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert not is_shared()
    with joined() as ranks:
        assert isinstance(ranks, Alone)


@pytest.mark.parametrize(("variable", "value"), [("WORLD_SIZE", "two"), ("RANK", "first")])
def test_variables_that_are_no_numbers_are_an_error_and_no_traceback(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    for name, text in {**usual, variable: value}.items():
        monkeypatch.setenv(name, text)
    found = CliRunner().invoke(app, ["report", "/absent"])
    assert found.exit_code == 2
    assert f"the ranks did not find each other: invalid literal for int() with base 10: '{value}'" in found.stderr
