"""etcd is killed, stopped, hangs, is cut off, or comes back empty."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.fault.clients import CLIENTS, Load, load, serves
from tests.fault.cluster import GUARD_S, POLL_S, Cluster, cluster
from tests.fault.record import record

pytestmark = pytest.mark.asyncio(loop_scope="module")

TTL_S = 3
OUTAGE_S = TTL_S + 5.0
"""Longer than any lease lives."""

everyone = pytest.mark.parametrize("loaded", [False, True], ids=["idle", "load"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """With short leases, so that outages can be short, too."""
    async with cluster(tmp_path_factory.mktemp("cluster"), ttl_s=TTL_S) as running:
        yield running


async def outage(system: Cluster, requests: Load, seconds: float) -> None:
    """Wait for ``seconds``, while every replica stays known and requests are served."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        for plane in system.control_planes:
            assert set(await system.replicas(plane)) == {0, 1}, plane.name
        await serves(system)
        await asyncio.sleep(0.2)
    assert not requests.failed, requests.failed


@pytest.mark.parametrize(
    ("fault", "loaded"),
    [("SIGKILL", False), *((fault, True) for fault in ("SIGKILL", "SIGTERM", "SIGSTOP", "partition", "reset"))],
)
async def test_away_for_longer_than_a_lease(system: Cluster, fault: str, loaded: bool) -> None:
    node = system.etcd[0]
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        if fault in ("partition", "reset"):
            system.partition_etcd("blackhole" if fault == "partition" else "reset")
        elif fault == "SIGSTOP":
            node.freeze()
        else:
            node.send(signal.SIGKILL if fault == "SIGKILL" else signal.SIGTERM)
        await outage(system, requests, OUTAGE_S)
        since_s = time.monotonic()
        await system.heal()
        back_s = time.monotonic() - since_s
        await serves(system)
    assert not requests.failed, requests.failed
    outcome = f"nothing ({requests.count()})" if loaded else "nothing"
    record("etcd", f"{fault}, {OUTAGE_S:g} s", "under load" if loaded else "idle", outcome, back=back_s)


async def written_again(system: Cluster, before: dict[int, int]) -> None:
    """Wait until every control plane has all replicas under claims that are later than ``before``: epochs never go
    back. Until it has seen that the store is another one, a control plane goes on with what it knew."""
    begin_s = time.monotonic()
    for plane in system.control_planes:
        while True:
            found = await system.claims(plane)
            if set(found) == set(before) and all(found[number] > before[number] for number in before):
                break
            assert time.monotonic() < begin_s + GUARD_S, f"{plane.name} has {found}, before the loss {before}"
            await asyncio.sleep(POLL_S)


@everyone
async def test_wiped(system: Cluster, loaded: bool) -> None:
    """It comes back with an empty store: plans and replicas are written again by those who remember them."""
    node = system.etcd[0]
    before = await system.claims(system.control_planes[0])
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        node.kill()
        node.wipe()
        since_s = time.monotonic()
        await node.restart()
        await written_again(system, before)
        await system.heal()
        back_s = time.monotonic() - since_s
        await serves(system)
    assert not requests.failed, requests.failed
    keys = node.ctl("get", "--prefix", "/omni/v1/", "--keys-only").split()
    assert "/omni/v1/default/pipelines/faults" in keys
    assert len([key for key in keys if "/replicas/faults/0/" in key]) == 2
    outcome = f"nothing ({requests.count()})" if loaded else "nothing"
    record("etcd", "killed and wiped", "under load" if loaded else "idle", outcome, back=back_s)
