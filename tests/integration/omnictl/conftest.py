"""One cluster for all tests that only look at it or put it back as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.omnictl.cli import SPEECH, START_S, Cli

# On a busy machine nobody becomes suspect, which tables would show.
CALM = {"OMNI_CONTROL_PLANE_LEASE_TTL_S": "60", "OMNI_CONTROL_PLANE_HEARTBEAT_INTERVAL_S": "2"}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    """omnictl without a cluster."""
    return Cli(tmp_path)


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """omnictl beside the speech pipeline on the sim engine."""
    shared = Cli(tmp_path_factory.mktemp("cluster"), CALM)
    with shared.spawn("up", SPEECH, "--engine", "sim", "--http", "127.0.0.1:0") as up:
        up.wait_out("is ready after", START_S)
        yield shared
        assert up.end() == 0
