"""What every test shares: Hypothesis profiles, torch's threads, the public hardware vectors."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent

# "ci" gives every run the same examples, so that a failure belongs to the change at hand; "fuzz" looks for new ones.
# Time must never decide a result: no deadline, and no health check that a slow machine could fail.
settings.register_profile(
    "ci",
    derandomize=True,
    max_examples=100,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fuzz", settings.get_profile("ci"), derandomize=False, max_examples=2000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Under pytest-xdist the processes share the cores; torch's own threads on top would only take them from each other.
if "PYTEST_XDIST_WORKER" in os.environ:
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
