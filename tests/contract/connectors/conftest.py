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
from connectors.registry import ConnectorFactory
from omnicore.clock import ManualClock
from tests.contract.connectors.peer import Peer, running_peer
from tests.support.processes import wait_until
from tests.support.stores import mooncake_master, yuanrong_worker  # noqa: F401 (fixtures)
from tests.support.transfer_engines import (  # noqa: F401 (fixtures)
    Engines,
    mooncake_engines,
    mori_engines,
    nixl_engines,
    yuanrong_transfer_engines,
)

Options = dict[str, dict[str, JsonValue]]

# Everything goes through the backend, however small.
OPTIONS: Options = {
    "shm": {"shm_threshold_bytes": 0, "put_wait_s": 1.0},
    "grpc": {"inline_bytes": 0, "put_wait_s": 1.0, "pool_bytes": 1 << 20},
}
HAS_GPU = Path("/dev/nvidia0").exists()
if HAS_GPU:
    # The suite looks at arrays; what consumers otherwise get is test_cuda_ipc_on_gpus.py's.
    OPTIONS["cuda_ipc"] = {"inline_bytes": 0, "put_wait_s": 1.0, "to_host": True}
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs an NVIDIA GPU")


@dataclasses.dataclass(frozen=True)
class Traits:
    """What the contract leaves open, and connectors do differently."""

    service: str = ""
    """The fixture of the service that it needs."""
    frees_later: bool = False
    """What is freed goes a moment later: until then it can be read, and takes room."""
    reads_copies: bool = False
    """What is being read stays as it is when it is freed."""
    outlives_owner: bool = False
    """Data can be read after its owner has died."""


KINDS = {
    "shm": Traits(),
    "grpc": Traits(reads_copies=True),
    "cuda_ipc": Traits(),
    "mooncake": Traits("mooncake_engines", reads_copies=True),
    "nixl": Traits("nixl_engines", reads_copies=True),
    "mori": Traits("mori_engines", reads_copies=True),
    "yuanrong_transfer_engine": Traits("yuanrong_transfer_engines", reads_copies=True),
    "mooncake_store": Traits("mooncake_master", frees_later=True, reads_copies=True),
    "yuanrong": Traits("yuanrong_worker", frees_later=True, reads_copies=True, outlives_owner=True),
}


@pytest.fixture(params=[pytest.param(k, marks=needs_gpu) if k == "cuda_ipc" else k for k in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    """The connector under test."""
    return str(request.param)


@pytest.fixture
def traits(kind: str) -> Traits:
    """What is special about it."""
    return KINDS[kind]


@pytest.fixture
def extra(request: pytest.FixtureRequest) -> dict[str, JsonValue]:
    """What the connector under test must be told to work here at all."""
    kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else ""
    service = KINDS[kind].service if kind else ""
    return dict(request.getfixturevalue(service).extra()) if service else {}


@pytest.fixture
def options(request: pytest.FixtureRequest, extra: dict[str, JsonValue]) -> Options:
    """Of the peers: for all connectors that are always there, and for the one under test."""
    if not extra:
        return OPTIONS
    kind = request.getfixturevalue("kind")
    # Some give room back when a process beside this one has answered.
    wait_s = 2.0 if KINDS[kind].frees_later else 1.0
    mine: dict[str, JsonValue] = {"inline_bytes": 0, "put_wait_s": wait_s, "pool_bytes": 1 << 20}
    return {**OPTIONS, kind: {**extra, **mine}}


async def settled(peer: Peer, free_bytes: int) -> None:
    """Wait until so much is free: at once, where freeing takes no time."""
    await wait_until(lambda: peer.connectors.usage().free_bytes == free_bytes, what=f"{free_bytes} bytes free")


Factories = Callable[[bool], dict[str, ConnectorFactory]]


@pytest.fixture
def factories(request: pytest.FixtureRequest) -> Factories:
    """What makes the connector under test where its engine is shared, for a producer (True) or a consumer."""
    kind = request.getfixturevalue("kind") if "kind" in request.fixturenames else ""
    service = request.getfixturevalue(KINDS[kind].service) if kind and KINDS[kind].service else None
    if not isinstance(service, Engines):
        return lambda producing: {}
    engines = service
    return lambda producing: engines.factories(producing=producing)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
async def producer(clock: ManualClock, options: Options, factories: Factories) -> AsyncIterator[Peer]:
    """A worker that publishes into 1 MiB; whatever happens in the test, it ends empty."""
    async with running_peer(clock=clock, options=options, factories=factories(True)) as peer:
        before = peer.connectors.usage().free_bytes
        yield peer
        await peer.connectors.close()
        assert (peer.connectors.usage().free_bytes, peer.connectors.usage().handles) == (before, 0)
        assert peer.store.stats().draining == 0


@pytest.fixture
async def consumer(options: Options, factories: Factories) -> AsyncIterator[Peer]:
    """A worker that only reads."""
    async with running_peer(pool_bytes=0, options=options, factories=factories(False)) as peer:
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
async def spawn(extra: dict[str, JsonValue]) -> AsyncIterator[Callable[[str], Awaitable[Child]]]:
    """Starts peers as child processes, and ends those that a test leaves."""
    children: list[Child] = []

    async def start(kind: str) -> Child:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.contract.connectors.peer",
            kind,
            orjson.dumps(extra).decode(),
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
