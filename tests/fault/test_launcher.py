"""``omnictl up``, which started everything, is killed, stopped, or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.fault.clients import CLIENTS, load, serves
from tests.fault.cluster import DEPLOY, GUARD_S, Unit, eventually
from tests.fault.record import record
from tests.support.system import System

everyone = pytest.mark.parametrize("loaded", [False, True], ids=["idle", "load"])


def children(pid: int) -> list[int]:
    """All processes below one, by /proc; ended ones that nobody has reaped are not counted."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if fields[0] != "Z":
                    parents[int(entry.name)] = int(fields[1])
    found = [pid]
    for above in found:
        found += [each for each, parent in parents.items() if parent == above]
    return found[1:]


def alive(pids: list[int]) -> list[int]:
    """Those that still run."""
    running = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                running.append(pid)
    return running


@contextlib.asynccontextmanager
async def launched(directory: Path) -> AsyncIterator[tuple[System, Unit]]:
    """A launcher with the cluster that it started, and its gateway as clients see it."""
    file = directory / "faults.yaml"
    file.write_text(DEPLOY)
    system = System(directory, file, "--drain-timeout", "10s")
    try:
        await asyncio.to_thread(system.wait_ready, GUARD_S)
        yield system, Unit("gateway", "", [], [], http=system.http.removeprefix("http://"))
    finally:
        print(system.log())
        if system.process.poll() is None:
            system.process.send_signal(signal.SIGCONT)
            await asyncio.to_thread(system.stop)


@everyone
async def test_sigkill(tmp_path: Path, loaded: bool) -> None:
    async with launched(tmp_path) as (system, gateway):
        await serves(None, [gateway])
        below = children(system.process.pid)
        assert len(below) >= 5, "etcd, control plane, gateway and two workers"
        async with load(None, clients=CLIENTS if loaded else 0, gateways=[gateway]) as requests:
            if loaded:
                await requests.begun()
            running, since_s = list(requests.running), time.monotonic()
            system.process.kill()
            await eventually(lambda: not alive(below), "no orphans")
            gone_s = time.monotonic() - since_s
    cut = sum(not outcome.ok for outcome in running)
    if loaded:
        outcome = f"all ends with it: {cut} of {len(running)} running answers are cut off"
    else:
        outcome = "all ends with it, no orphan is left"
    record("launcher", "SIGKILL", "under load" if loaded else "idle", outcome, gone=gone_s)


@everyone
async def test_sigterm(tmp_path: Path, loaded: bool) -> None:
    async with launched(tmp_path) as (system, gateway):
        await serves(None, [gateway])
        below = children(system.process.pid)
        async with load(None, clients=CLIENTS if loaded else 0, gateways=[gateway]) as requests:
            if loaded:
                await requests.begun()
            running, since_s = list(requests.running), time.monotonic()
            system.process.send_signal(signal.SIGTERM)
            code = await asyncio.to_thread(system.process.wait, GUARD_S)
            gone_s = time.monotonic() - since_s
        assert code == 0
        assert not alive(below)
    for outcome in requests.outcomes:
        assert outcome.ok or outcome.started_s > since_s, outcome
    assert all(outcome.ok for outcome in running), running
    said = f"its {len(running)} running answers complete; new ones are refused" if loaded else "new ones are refused"
    record("launcher", "SIGTERM", "under load" if loaded else "idle", said, gone=gone_s)


async def test_sigstop(tmp_path: Path) -> None:
    """What it started goes on without it; what dies meanwhile is started again once it is back."""
    async with launched(tmp_path) as (system, gateway):
        for loaded in (False, True):
            async with load(None, clients=CLIENTS if loaded else 0, gateways=[gateway]) as requests:
                system.process.send_signal(signal.SIGSTOP)
                begin_s = time.monotonic()
                while time.monotonic() < begin_s + 3.0:
                    await serves(None, [gateway])
                    await asyncio.sleep(0.1)
                system.process.send_signal(signal.SIGCONT)
            assert not requests.failed, requests.failed
            said = f"nothing ({requests.count()})" if loaded else "nothing"
            record("launcher", "SIGSTOP, 3 s", "under load" if loaded else "idle", said)
        victim = int((await asyncio.to_thread(system.replicas))[0]["placement"]["pid"])
        system.process.send_signal(signal.SIGSTOP)
        os.kill(victim, signal.SIGKILL)
        await serves(None, [gateway])
        system.process.send_signal(signal.SIGCONT)
        since_s = time.monotonic()
        while True:
            pids = {replica["placement"]["pid"] for replica in await asyncio.to_thread(system.replicas)}
            if len(pids) == 2 and victim not in pids:
                break
            assert time.monotonic() < since_s + GUARD_S
        back_s = time.monotonic() - since_s
    record("launcher", "SIGSTOP, a worker is killed meanwhile", "idle", "nothing: the other worker serves", back=back_s)
