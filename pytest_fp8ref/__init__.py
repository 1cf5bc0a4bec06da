"""The pytest plugin of ``fp8ref.testing``: ``--fp8ref-examples``, the fixture ``fp8ref_device``, a line in the summary.

A package of its own, because pytest imports plugins at every start: importing anything below ``fp8ref`` would import
torch, which takes seconds, and before a ``conftest.py`` could set the environment that torch and Triton look at.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    import torch

_TALLIES = pytest.StashKey[list[tuple[int, int]]]()
_OUTPUT = "fp8ref_tally"


def _examples(text: str) -> int:
    """The number that ``--fp8ref-examples`` takes."""
    if not text.isdigit() or not int(text):
        raise pytest.UsageError(f"--fp8ref-examples: got {text!r}; give a whole number above 0")
    return int(text)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option."""
    parser.getgroup("fp8ref", "exact tests of FP8 kernels").addoption(
        "--fp8ref-examples",
        type=_examples,
        metavar="N",
        help="examples of every Hypothesis test, and cases of every property of check_matmul, that set no number",
    )


@pytest.hookimpl(trylast=True)  # after Hypothesis's own plugin has chosen its profile
def pytest_configure(config: pytest.Config) -> None:
    """Make the option's number that of the Hypothesis profile in use."""
    config.stash[_TALLIES] = []
    examples = config.getoption("--fp8ref-examples")
    if examples is not None:
        from hypothesis import settings

        settings.register_profile("fp8ref", settings(), max_examples=examples)
        settings.load_profile("fp8ref")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a test that asks for ``fp8ref_device`` once on each device."""
    if "fp8ref_device" in metafunc.fixturenames:
        import torch

        devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
        metafunc.parametrize("fp8ref_device", devices, indirect=True, scope="session")


@pytest.fixture(scope="session")
def fp8ref_device(request: pytest.FixtureRequest) -> torch.device:
    """The device to test on: the CPU, then the GPU where there is one."""
    import torch

    return torch.device(request.param)


def _tally() -> tuple[int, int] | None:
    """What this process compared; None where the kit was not imported."""
    module: Any = sys.modules.get("fp8ref.testing.tally")
    return None if module is None else (module.TALLY.cases, module.TALLY.elements)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand this process's count over: to the summary, or from a process of pytest-xdist to the one that prints it."""
    counted = _tally()
    output: dict[str, Any] | None = getattr(session.config, "workeroutput", None)
    if counted is not None and output is not None:
        output[_OUTPUT] = counted
    elif counted is not None:
        session.config.stash[_TALLIES].append(counted)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the count of a process of pytest-xdist."""
    counted = getattr(node, "workeroutput", {}).get(_OUTPUT)
    if counted is not None:
        node.config.stash[_TALLIES].append(tuple(counted))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print what was compared."""
    tallies = config.stash[_TALLIES]
    cases, elements = sum(one[0] for one in tallies), sum(one[1] for one in tallies)
    if cases:
        terminalreporter.write_line(f"fp8ref: {cases:,} comparisons, {elements:,} elements")
