"""The checkpoints that the tests of damage copy."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from checkpoint_corruption import NAMES, SOURCES
from checkpoint_formats import write_small


@pytest.fixture(scope="session", autouse=True)
def _sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    for number, name in enumerate(NAMES):
        SOURCES[name] = write_small(tmp_path_factory.mktemp("small") / str(number), name).folder
    yield
    SOURCES.clear()
