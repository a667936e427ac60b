"""etcd is killed, stopped, hangs, is cut off, compacted, or comes back empty."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from control_plane.etcd import EtcdClient
from tests.fault.clients import CLIENTS, Load, load, serves
from tests.fault.cluster import Cluster, cluster
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


@everyone
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGTERM", "SIGSTOP", "partition", "reset"])
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


@everyone
async def test_wiped(system: Cluster, loaded: bool) -> None:
    """It comes back with an empty store: plans and replicas are written again by those who remember them."""
    node = system.etcd[0]
    before = await system.epochs(system.control_planes[0])
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        node.kill()
        node.wipe()
        since_s = time.monotonic()
        await node.restart()
        await system.heal()
        back_s = time.monotonic() - since_s
        await serves(system)
    assert not requests.failed, requests.failed
    after = await system.claims(system.control_planes[0])
    assert set(after) == set(before)
    assert all(after[number] > before[number] for number in before), "epochs never go back"
    keys = node.ctl("get", "--prefix", "/omni/v1/", "--keys-only").split()
    assert "/omni/v1/default/pipelines/faults" in keys
    assert len([key for key in keys if "/replicas/faults/0/" in key]) == 2
    outcome = f"nothing ({requests.count()})" if loaded else "nothing"
    record("etcd", "killed and wiped", "under load" if loaded else "idle", outcome, back=back_s)


async def test_compacted_while_cut_off(system: Cluster) -> None:
    """History that a control plane has not seen is gone: it lists anew."""
    node = system.etcd[0]
    before = await system.epochs(system.control_planes[0])
    async with load(system) as requests:
        system.partition_etcd("reset")
        async with EtcdClient([node.endpoint]) as client:
            for number in range(50):
                await client.put("/omni/v1/default/admin/noise", str(number).encode())
            await client.delete("/omni/v1/default/admin/noise")
            await client.compact((await client.get_prefix("/omni/v1/default/")).revision)
        since_s = time.monotonic()
        await system.heal()
        back_s = time.monotonic() - since_s
    assert not requests.failed, requests.failed
    await system.settled_at(system.control_planes[0], before)
    record("etcd", "compacted while cut off", "under load", f"nothing ({requests.count()})", back=back_s)
