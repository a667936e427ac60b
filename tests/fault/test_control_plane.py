"""A control plane is killed, stopped, hangs, or loses its network; then both of them are, with all that they knew."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio

from control_plane.etcd import EtcdClient
from tests.fault.clients import CLIENTS, load, serves
from tests.fault.cluster import GUARD_S, Cluster, Unit, cluster
from tests.fault.record import record

pytestmark = pytest.mark.asyncio(loop_scope="module")

MOVED_S = 1.0
"""A control plane died, until workers and gateways are with the other one: the bar, for a machine that is not busy."""
SLOW = 4
"""What is asserted is so many times as long; ``docs/faults.md`` has what it took."""
HANG_MOVED_S = 5.0
"""It says nothing any more: workers wait up to 3 s for a beat's answer, gateways 5 s for a sign of life."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """With leases that outlast the start of both control planes, which takes many seconds on a busy machine."""
    async with cluster(tmp_path_factory.mktemp("cluster"), ttl_s=60) as running:
        yield running


everyone = pytest.mark.parametrize("loaded", [False, True], ids=["idle", "load"])


async def busier(system: Cluster) -> tuple[Unit, Unit]:
    """The control plane that most are with, and the other one."""
    first, second = system.control_planes
    counts = [sum(await system.audience(plane)) for plane in (first, second)]
    return (first, second) if counts[0] >= counts[1] else (second, first)


async def moved(system: Cluster, to: Unit, since_s: float) -> float:
    """Seconds from ``since_s`` until every worker beats at this control plane and every gateway watches it."""
    everybody = (len(system.workers), len(system.gateways))
    while await system.audience(to) != everybody:
        assert time.monotonic() < since_s + GUARD_S, f"only {await system.audience(to)} came to {to.name}"
        await asyncio.sleep(0.01)
    return time.monotonic() - since_s


@everyone
@pytest.mark.parametrize(
    ("fault", "limit_s"),
    [
        ("SIGKILL", MOVED_S),
        ("SIGTERM", MOVED_S),
        ("SIGSTOP", HANG_MOVED_S),
        ("partition", HANG_MOVED_S),
        ("reset", MOVED_S),
    ],
)
async def test_one_of_two(system: Cluster, fault: str, limit_s: float, loaded: bool) -> None:
    victim, other = await busier(system)
    before = await system.claims(other)
    breaks: dict[str, Callable[[], None]] = {
        "SIGKILL": lambda: victim.running.send(signal.SIGKILL),
        "SIGTERM": lambda: victim.running.send(signal.SIGTERM),
        "SIGSTOP": victim.running.freeze,
        "partition": lambda: system.partition(victim),
        "reset": lambda: system.partition(victim, "reset"),
    }
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        since_s = time.monotonic()
        breaks[fault]()
        moved_s = await moved(system, other, since_s)
        await serves(system)
        await system.settled_at(other, before)
        await system.heal()
        # It is back with old news: nobody loses a claim to them.
        await system.settled()
    assert not requests.failed, requests.failed
    # A suspicion that was on its way when it healed may still land, and is taken back; a claim would not come back.
    for plane in system.control_planes:
        await system.settled_at(plane, before)
    assert moved_s < limit_s * SLOW, moved_s
    outcome = f"nothing ({requests.count()})" if loaded else "nothing"
    record("control plane", fault, "under load" if loaded else "idle", outcome, moved=moved_s)


@everyone
async def test_both_restarted_with_empty_memory(system: Cluster, loaded: bool) -> None:
    before = await system.claims(system.control_planes[0])
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        for plane in system.control_planes:
            plane.running.kill()
        await serves(system)
        for plane in system.control_planes:
            system.spawn(plane)
        for plane in system.control_planes:
            await plane.running.wait_ready(GUARD_S)
        since_s = time.monotonic()
        views = [set(await system.replicas(plane)) for plane in system.control_planes]
        full_s = time.monotonic() - since_s
        await system.settled()
    assert not requests.failed, requests.failed
    # From etcd, before the first beat has come.
    assert views == [set(before)] * 2, views
    outcome = f"nothing ({requests.count()})" if loaded else "nothing"
    record("control plane", "both killed, restarted", "under load" if loaded else "idle", outcome, table=full_s)


async def test_compacted_while_cut_off(system: Cluster) -> None:
    """History that a control plane has not seen is gone from etcd: it lists anew."""
    node = system.etcd[0]
    before = await system.claims(system.control_planes[0])
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
