"""What every test shares: Hypothesis profiles, torch's threads, the public hardware vectors."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ReadOnlyDatabase
from hypothesis.internal.conjecture import providers
from hypothesis.internal.constants_ast import Constants

ROOT = Path(__file__).resolve().parent.parent

KEPT_FAILURES = Path(__file__).resolve().parent / "fuzz_failures"
"""What `make fuzz` found, as Hypothesis's examples: every run tries them first."""

# "ci" gives every run the same examples, so that a failure belongs to the change at hand; "fuzz" looks for new ones and
# keeps what fails. Time must never decide a result: no deadline, and no health check that a slow machine could fail.
settings.register_profile(
    "ci",
    # The same examples come from the seed below: with derandomize=True Hypothesis would not look at the kept ones.
    database=ReadOnlyDatabase(DirectoryBasedExampleDatabase(KEPT_FAILURES)),
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "fuzz",
    settings.get_profile("ci"),
    database=DirectoryBasedExampleDatabase(os.environ.get("FP8REF_KEPT_FAILURES", KEPT_FAILURES)),
    max_examples=500,
)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "ci")
settings.load_profile(PROFILE)

# Hypothesis also tries the literals of whatever local modules a process has imported by then, which differs between the
# processes of pytest-xdist: the same seed would give other examples. There is no setting for it.
if PROFILE == "ci" and hasattr(providers, "_get_local_constants"):
    providers._get_local_constants = Constants


@pytest.hookimpl(tryfirst=True)  # before Hypothesis's plugin reads the option
def pytest_configure(config: pytest.Config) -> None:
    """Fix the seed of the examples, but not when fuzzing, and not when one was given."""
    if PROFILE == "ci" and config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = "0"  # as text: the number 0 would count as no seed


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """File kept failures under the name of their test, not its text; when fuzzing run nothing else, in random order."""
    functions = [(item, item.obj) for item in items if isinstance(item, pytest.Function)]
    found = [(item, test) for item, test in functions if getattr(test, "is_hypothesis_test", False)]
    for item, test in found:
        test._hypothesis_internal_database_key = item.nodeid.split("[")[0].encode()
    if PROFILE == "fuzz":
        chosen = {id(item) for item, _ in found}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in chosen])
        modules: dict[str, list[pytest.Item]] = {}
        for item, _ in found:
            modules.setdefault(item.nodeid.split("::")[0], []).append(item)
        order = list(modules.values())
        random.shuffle(order)
        items[:] = [item for module in order for item in random.sample(module, len(module))]


# Under pytest-xdist the processes share the cores; torch's own threads on top would only take them from each other.
if "PYTEST_XDIST_WORKER" in os.environ:
    import torch

    torch.set_num_threads(1)


def golden_folder() -> Path | None:
    """Return the folder of the public hardware vectors, or None where there is none.

    It is ``$FP8REF_GOLDEN``, which must exist when given, or else ``shared/golden`` beside the repository.

    Raises:
        NotADirectoryError: ``FP8REF_GOLDEN`` is set to something that is not a folder.
    """
    given = os.environ.get("FP8REF_GOLDEN")
    folder = Path(given) if given else ROOT.parent / "shared" / "golden"
    if folder.is_dir():
        return folder
    if given:
        raise NotADirectoryError(f"FP8REF_GOLDEN: got {given!r}, which is not a folder; correct it or unset it")
    return None


@pytest.fixture(scope="session")
def shared_golden() -> Path:
    """The folder of the public hardware vectors; a test that asks for it is skipped where there is none."""
    folder = golden_folder()
    if folder is None:
        pytest.skip("the public hardware vectors are not here; FP8REF_GOLDEN=FOLDER names another place")
    return folder
