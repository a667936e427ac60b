"""One system of simulated engines for all read-only tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.system import ROOT, System, running_system


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    directory = tmp_path_factory.mktemp("system")
    with running_system(directory, ROOT / "examples" / "speech.yaml", "--engine", "sim") as running:
        yield running
