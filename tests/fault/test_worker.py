"""A worker is killed, stopped, hangs, or loses its network."""

from __future__ import annotations

import asyncio
import itertools
import signal
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.fault.clients import CLIENTS, Load, Outcome, ask, http_session, load, serves
from tests.fault.cluster import Cluster, Rounds, Routes, Unit, eventually, rounds
from tests.fault.record import record

pytestmark = pytest.mark.asyncio(loop_scope="module")

KILLS = 4
UNROUTED_S = 0.25
"""Killed, until no gateway routes there: the bar. Half of the kills must keep it, and all of them ``SLOW`` times it:
on a busy machine the test itself is late."""
SLOW = 4
HANG_UNROUTED_S = 3.0
"""Hung, until no gateway routes there: the bar."""
KEEPALIVE_S = 13.0
"""A connection that says nothing is given up after 10 + 3 s (omnicore/rpc.py)."""
SLACK_S = 10.0
"""What a loaded machine may take on top of a limit that the product keeps by itself."""

_sessions = itertools.count()


@pytest_asyncio.fixture(loop_scope="module")
async def watch(system: Cluster) -> AsyncIterator[Rounds]:
    async with rounds(system) as running:
        yield running


def check_none_lost(requests: Load) -> None:
    """What ran at a worker that was lost went on at the other one."""
    assert not requests.failed, requests.failed


async def owned(system: Cluster, replica_id: int) -> str:
    """A new session, at the first gateway, of that replica."""
    async with Routes(system.gateways[0]) as routes:
        for _ in range(100):
            session_id = f"session-{next(_sessions)}"
            owner = await routes.route(session_id)
            if owner is not None and owner.replica_id == replica_id:
                return session_id
    raise AssertionError("all sessions go elsewhere")


async def check_strict_session(
    http: aiohttp.ClientSession, gateway: Unit, lost: Outcome, strict: dict[str, Any]
) -> None:
    """``lost`` was asked of a session whose owner had just gone; its owner is back by now, as another instance."""
    assert lost.error in ("session_owner_unavailable", "session_lost"), lost
    assert not lost.text
    assert lost.took_s < KEEPALIVE_S + SLACK_S
    assert (await ask(http, gateway, **strict)).error == "session_lost"
    assert (await ask(http, gateway, **strict | {"session_id": f"session-{next(_sessions)}"})).ok


async def kill(system: Cluster, watch: Rounds, victim: Unit) -> float:
    """Kill, and return the seconds until it is unrouted."""
    number, since_s = system.replica_of(victim), time.monotonic()
    victim.running.send(signal.SIGKILL)
    return await watch.unrouted(number, since_s)


async def test_sigkill_idle(system: Cluster, watch: Rounds) -> None:
    times = []
    for turn in range(KILLS):
        victim = system.workers[turn % 2]
        times.append(await kill(system, watch, victim))
        await serves(system)
        await system.start(victim)
        await system.settled()
    assert statistics.median(times) < UNROUTED_S, times
    assert max(times) < UNROUTED_S * SLOW, times
    record("worker", "SIGKILL", "idle", f"nothing ({KILLS} kills)", unrouted=max(times))


async def test_sigkill_under_load(system: Cluster, watch: Rounds) -> None:
    times, count = [], 0
    for turn in range(KILLS):
        victim = system.workers[turn % 2]
        async with load(system) as requests:
            await requests.begun()
            since_s = time.monotonic()
            times.append(await kill(system, watch, victim))
            await eventually(lambda: len(requests.after(since_s)) > 4, "requests go on")  # noqa: B023
        check_none_lost(requests)
        count += len(requests.outcomes)
        await system.start(victim)
        await system.settled()
    assert statistics.median(times) < UNROUTED_S, times
    assert max(times) < UNROUTED_S * SLOW, times
    outcome = f"nothing: answers that had begun there go on elsewhere ({count} requests, 0 failed)"
    record("worker", "SIGKILL", "under load", outcome, unrouted=max(times))


@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "load"])
async def test_sigterm(system: Cluster, watch: Rounds, loaded: bool) -> None:
    victim = system.workers[0]
    number = system.replica_of(victim)
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        if loaded:
            await requests.begun()
        since_s = time.monotonic()
        assert await victim.running.terminate(30) == 0
        stopped_s = time.monotonic() - since_s
        unrouted_s = await watch.unrouted(number, since_s)
        await serves(system)
    assert not requests.failed, requests.failed
    assert unrouted_s < UNROUTED_S + SLACK_S
    outcome = f"nothing: what runs there ends first ({requests.count()})" if loaded else "nothing"
    record("worker", "SIGTERM", "under load" if loaded else "idle", outcome, unrouted=unrouted_s, exit=stopped_s)


@pytest.mark.parametrize("loaded", [False, True], ids=["idle", "load"])
@pytest.mark.parametrize("fault", ["SIGSTOP", "partition", "reset"])
async def test_silent(system: Cluster, watch: Rounds, fault: str, loaded: bool) -> None:
    """Hung or cut off until its lease has ended, then back: same id, new epoch. A strict session of its is nobody
    else's meanwhile, and lost then."""
    victim = system.workers[1]
    number = system.replica_of(victim)
    epoch = (await system.epochs(system.control_planes[0]))[number]
    breaks: dict[str, Callable[[], None]] = {
        "SIGSTOP": victim.running.freeze,
        "partition": lambda: system.partition(victim),
        "reset": lambda: system.partition(victim, "reset"),
    }
    gateway = system.gateways[0]
    strict: dict[str, Any] = {"session_policy": "strict", "session_id": await owned(system, number)}
    async with load(system, clients=CLIENTS if loaded else 0) as requests, http_session() as http:
        assert (await ask(http, gateway, **strict)).ok
        if loaded:
            await requests.begun()
        since_s = time.monotonic()
        breaks[fault]()
        asking = asyncio.create_task(ask(http, gateway, **strict))
        unrouted_s = await watch.unrouted(number, since_s)
        held_s = await requests.ended(since_s, KEEPALIVE_S + SLACK_S) if loaded else 0.0
        while not (listed := await system.replicas(system.control_planes[0])) or number in listed:
            assert time.monotonic() < since_s + KEEPALIVE_S + SLACK_S, "the claim outlives its lease"
        await serves(system)
        back_s = time.monotonic()
        await system.heal()
        routed_s = await watch.routed(number, back_s)
        await check_strict_session(http, gateway, await asking, strict)
    check_none_lost(requests)
    assert unrouted_s < HANG_UNROUTED_S
    assert held_s < KEEPALIVE_S + SLACK_S
    assert (await system.claims(system.control_planes[0]))[number] > epoch
    seconds = {"unrouted": unrouted_s, "back": routed_s}
    if not loaded:
        record("worker", fault, "idle", "nothing", **seconds)
    else:
        goes = "go on elsewhere at once" if fault == "reset" else "wait, then go on elsewhere"
        outcome = f"answers that had begun there {goes} ({requests.count()})"
        record("worker", fault, "under load", outcome, **seconds, held=held_s)
