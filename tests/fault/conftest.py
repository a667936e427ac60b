"""One cluster per module: what a case breaks, the next one finds healed."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fault.cluster import Cluster, cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All cases here are faults, share their module's event loop, and take longer than others."""
    for item in items:
        if "tests/fault/" in item.nodeid:
            item.add_marker(pytest.mark.fault)
            item.add_marker(pytest.mark.timeout(400))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """The module's cluster, as the case before left it."""
    async with cluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def system(shared: Cluster) -> AsyncIterator[Cluster]:
    """The module's cluster, whole."""
    await shared.heal()
    yield shared
