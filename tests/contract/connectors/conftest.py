from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from connectors.payload import JsonValue
from omnicore.clock import ManualClock
from tests.contract.connectors.peer import Peer, running_peer

# Everything goes through the backend, however small.
OPTIONS: dict[str, dict[str, JsonValue]] = {
    "shm": {"shm_threshold_bytes": 0, "put_wait_s": 1.0},
    "grpc": {"inline_bytes": 0, "put_wait_s": 1.0, "pool_bytes": 1 << 20},
}


@pytest.fixture(params=["shm", "grpc"])
def kind(request: pytest.FixtureRequest) -> str:
    """The connector under test."""
    return str(request.param)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def producer(clock: ManualClock) -> AsyncIterator[Peer]:
    """A worker that publishes into 1 MiB; whatever happens in the test, it ends empty."""
    async with running_peer(clock=clock, options=OPTIONS) as peer:
        before = peer.connectors.usage().free_bytes
        yield peer
        await peer.connectors.close()
        assert (peer.connectors.usage().free_bytes, peer.connectors.usage().handles) == (before, 0)
        assert peer.store.stats().draining == 0


@pytest.fixture
async def consumer() -> AsyncIterator[Peer]:
    """A worker that only reads."""
    async with running_peer(pool_bytes=0, options=OPTIONS) as peer:
        yield peer


@dataclasses.dataclass
class Child:
    """A peer in its own process."""

    process: asyncio.subprocess.Process
    endpoint: str = ""

    async def ask(self, **command: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(orjson.dumps(command) + b"\n")
        line = await self.process.stdout.readline()
        assert line, "the peer process ended"
        answer: dict[str, Any] = orjson.loads(line)
        return answer

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


@pytest.fixture
async def spawn() -> AsyncIterator[Callable[[str], Awaitable[Child]]]:
    """Starts peers as child processes, and ends those that a test leaves."""
    children: list[Child] = []

    async def start(kind: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.contract.connectors.peer",
            kind,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )
        child = Child(process)
        children.append(child)
        assert process.stdout is not None
        child.endpoint = orjson.loads(await process.stdout.readline())["endpoint"]
        return child

    yield start
    for child in children:
        if child.process.returncode is None:
            await child.kill()
