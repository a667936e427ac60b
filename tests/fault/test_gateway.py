"""A gateway is killed, stopped, hangs, or loses its network: its clients go to the other one."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from omni.v1 import stage_service_pb2, stage_service_pb2_grpc
from omnicore import rpc
from tests.fault.clients import CLIENTS, ask, http_session, load, serves
from tests.fault.cluster import GUARD_S, Cluster, Routes, Unit
from tests.fault.record import record

pytestmark = pytest.mark.asyncio(loop_scope="module")

WORKER_FREE_S = 20.0
"""Workers let go of what a vanished gateway asked for, at the latest when its connection is given up after 13 s."""

everyone = pytest.mark.parametrize("loaded", [False, True], ids=["idle", "load"])


async def workers_free(system: Cluster, since_s: float) -> float:
    """Seconds from ``since_s`` until no worker has anything to do. They are asked themselves: a control plane shows the
    last load that it heard of, also when the worker beats at another one by now."""
    for worker in system.workers:
        async with rpc.channel(worker.address) as channel:
            stub = stage_service_pb2_grpc.StageServiceStub(channel)
            while (await stub.GetStageInfo(stage_service_pb2.GetStageInfoRequest(), timeout=GUARD_S)).active_calls:
                assert time.monotonic() < since_s + GUARD_S, "a worker goes on with what nobody waits for"
                await asyncio.sleep(0.05)
    return time.monotonic() - since_s


async def serves_again(gateway: Unit, since_s: float) -> float:
    """Seconds from ``since_s`` until it answers a question."""
    async with http_session() as session:
        while not (await ask(session, gateway)).ok:
            assert time.monotonic() < since_s + GUARD_S
            await asyncio.sleep(0.02)
    return time.monotonic() - since_s


@everyone
async def test_sigkill(system: Cluster, loaded: bool) -> None:
    victim, other = system.gateways
    # Answers of some seconds: what a killed gateway has sent arrives, and that must not be the rest of an answer.
    async with load(system, clients=CLIENTS if loaded else 0, max_tokens=200) as requests:
        if loaded:
            await requests.begun()
        since_s = time.monotonic()
        victim.running.kill()
        cut = [outcome for outcome in requests.running if outcome.gateway == victim.name]
        await serves(system, [other])
        ended_s = await requests.ended(since_s, GUARD_S)
        again_s = time.monotonic()
        await system.start(victim)
        restart_s = await serves_again(victim, again_s)
        back_s = time.monotonic()
        await serves(system)
    assert all(not outcome.ok for outcome in cut)
    for outcome in requests.failed:
        assert outcome.gateway == victim.name
        assert outcome.started_s < back_s
    free_s = await workers_free(system, time.monotonic())
    assert free_s < WORKER_FREE_S
    seconds = {"restart to first answer": restart_s}
    if loaded:
        lost = f"its {len(cut)} running answers are cut off at once, new ones refused until it is back"
        record("gateway", "SIGKILL", "under load", f"{lost}; the other gateway's complete", **seconds, cut=ended_s)
    else:
        record("gateway", "SIGKILL", "idle", "connections refused until it is back", **seconds)


@everyone
async def test_sigterm(system: Cluster, loaded: bool) -> None:
    victim = system.gateways[1]
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        if loaded:
            await requests.begun()
        running = [outcome for outcome in requests.running if outcome.gateway == victim.name]
        since_s = time.monotonic()
        assert await victim.running.terminate(GUARD_S) == 0
        stopped_s = time.monotonic() - since_s
        await serves(system, [system.gateways[0]])
    assert all(outcome.ok for outcome in running), running
    for outcome in requests.failed:
        assert outcome.gateway == victim.name
        assert outcome.started_s > since_s
    lost = f"none of its {len(running)} running answers; new ones are refused" if loaded else "new requests are refused"
    record("gateway", "SIGTERM", "under load" if loaded else "idle", lost, exit=stopped_s)


@everyone
@pytest.mark.parametrize("fault", ["SIGSTOP", "partition"])
async def test_silent(system: Cluster, fault: str, loaded: bool) -> None:
    """For three seconds: those who wait get the rest then; the other gateway does not care."""
    victim, other = system.gateways
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        if loaded:
            await requests.begun()
        since_s = time.monotonic()
        if fault == "SIGSTOP":
            victim.running.freeze()
        else:
            system.partition(victim)
        async with Routes(other) as routes:
            while time.monotonic() < since_s + 3.0:
                assert await routes.route() is not None
                await serves(system, [other])
        again_s = time.monotonic()
        await system.heal()
        back_s = await serves_again(victim, again_s)
        await serves(system)
    for outcome in requests.failed:
        assert outcome.gateway == victim.name, outcome
    failed = len(requests.failed)
    waited = f"its answers wait for it ({failed} of {len(requests.outcomes)} failed); the other gateway's do not"
    seen = waited if loaded else "nobody asked; the other gateway serves"
    record("gateway", f"{fault}, 3 s", "under load" if loaded else "idle", seen, back=back_s)


@everyone
async def test_cut_off_from_control_planes(system: Cluster, loaded: bool) -> None:
    """It goes on with its last view, also when a replica dies: its own sessions tell it that."""
    victim = system.gateways[0]
    async with load(system, clients=CLIENTS if loaded else 0) as requests:
        for wire in victim.wires[:-1]:
            wire.blackhole()
        since_s = time.monotonic()
        while time.monotonic() < since_s + 6.0:  # longer than it waits for a sign of life
            await serves(system)
            await asyncio.sleep(0.2)
        assert not requests.failed, requests.failed
        if not loaded:
            worker = system.workers[0]
            worker.running.send(signal.SIGKILL)
            await serves(system)
        await system.heal()
    assert not requests.failed, requests.failed
    outcome = f"nothing ({requests.count()})" if loaded else "nothing, although a worker is killed meanwhile"
    record("gateway", "cut off from control planes", "under load" if loaded else "idle", outcome)
