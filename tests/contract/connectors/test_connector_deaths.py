"""Either end killed, in processes of their own: clear errors, and nothing left behind."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from connectors.payload import Payload
from omni.v1 import transfer_pb2
from omnicore import errors
from tests.contract.connectors.conftest import Child, Traits, settled
from tests.contract.connectors.peer import EDGE, Peer, digest, tensor
from tests.support.processes import wait_until

Spawn = Callable[[str], Awaitable[Child]]
SIZE = 300_000
PAYLOAD = Payload(tensors={"x": tensor(SIZE, 1)})


def shared_memory_files() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir() if "omni" in path.name}


def handle_of(answer: dict[str, str]) -> transfer_pb2.TransferHandle:
    return transfer_pb2.TransferHandle.FromString(base64.b64decode(answer["handle"]))


async def test_processes_hand_over(kind: str, spawn: Spawn, consumer: Peer) -> None:
    child = await spawn(kind)
    empty = await child.ask(op="usage")
    put = await child.ask(op="put", kind=kind, key="k", size=SIZE, seed=1)
    handle = handle_of(put)
    async with consumer.connectors.get(handle) as got:
        assert digest(got) == put["digest"]
    assert consumer.fetched_pieces == (1 if kind == "grpc" else 0)
    assert await consumer.describe(handle) == handle
    assert await consumer.release(handle) == 1
    async with asyncio.timeout(30):
        while await child.ask(op="usage") != empty:
            await asyncio.sleep(0.01)
    assert shared_memory_files() == set()


async def test_producer_killed(kind: str, traits: Traits, spawn: Spawn, consumer: Peer) -> None:
    child = await spawn(kind)
    first = await child.ask(op="put", kind=kind, key="first", size=SIZE, seed=1)
    second = await child.ask(op="put", kind=kind, key="second", size=SIZE, seed=2)
    async with consumer.connectors.get(handle_of(first)) as got:
        await child.kill()
        assert digest(got) == first["digest"], "what is being read stays readable"
    for answer in (first, second):
        if traits.outlives_owner:
            async with consumer.connectors.get(handle_of(answer)) as got:
                assert digest(got) == answer["digest"]
            continue
        with pytest.raises((errors.UnavailableError, errors.NotFoundError)):
            async with consumer.connectors.get(handle_of(answer)):
                pass
    consumer.connectors.sweep()
    assert shared_memory_files() == set()
    again = await spawn(kind)
    put = await again.ask(op="put", kind=kind, key="first", size=SIZE, seed=3)
    async with consumer.connectors.get(handle_of(put)) as got:
        assert digest(got) == put["digest"]


async def test_mappings_of_a_dead_producer_are_given_back(spawn: Spawn, consumer: Peer) -> None:
    before = mapped_pools()
    child = await spawn("shm")
    put = await child.ask(op="put", kind="shm", key="k", size=SIZE, seed=1)
    async with consumer.connectors.get(handle_of(put)):
        assert len(mapped_pools() - before) == 1
    await child.kill()
    consumer.connectors.sweep()
    assert not mapped_pools() - before


def mapped_pools() -> set[str]:
    """The pools that this process has mapped now, by inode: also those that earlier tests have left to collect."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split()[4] for line in lines if "memfd:omni-pool" in line}


async def test_consumer_killed(kind: str, spawn: Spawn, producer: Peer) -> None:
    """It has claimed and is reading; the owner notices by its stream and takes the place back."""
    free = producer.connectors.usage().free_bytes
    child = await spawn(kind)
    handle = await producer.connectors.put(kind, "k", EDGE, 0, PAYLOAD)
    raw = base64.b64encode(handle.SerializeToString()).decode()
    producer.store.claim("k", handle.token, "child")
    assert (await child.ask(op="get", handle=raw))["digest"] == digest(PAYLOAD)
    await child.kill()
    assert producer.store.stats().claims == 1
    assert producer.store.release("k", handle.token, "child")
    await settled(producer, free)
    assert producer.connectors.usage().handles == 0
    assert shared_memory_files() == set()
    handle = await producer.connectors.put(kind, "k", EDGE, 0, PAYLOAD)
    assert producer.store.release("k", handle.token)


async def test_consumer_killed_in_the_middle_of_a_fetch_lets_go(spawn: Spawn, producer: Peer) -> None:
    child = await spawn("grpc")
    handle = await producer.connectors.put("grpc", "k", EDGE, 0, PAYLOAD)
    raw = base64.b64encode(handle.SerializeToString()).decode()
    assert child.process.stdin is not None
    child.process.stdin.write(b'{"op": "get", "handle": "%s"}\n' % raw.encode())
    await child.kill()
    producer.store.cleanup("req1")
    await wait_until(lambda: producer.store.stats().draining == 0, what="the killed reader's hold on the data")


async def test_another_host_fetches_what_lies_in_shared_memory(spawn: Spawn, consumer: Peer) -> None:
    child = await spawn("shm")
    put = await child.ask(op="put", kind="shm", key="k", size=3_000_000, seed=1)
    handle = handle_of(put)
    handle.shm.boot_id = "00000000-0000-0000-0000-000000000000"
    async with consumer.connectors.get(handle) as got:
        assert digest(got) == put["digest"]
    assert consumer.fetched_pieces == 3


async def test_another_container_fetches_what_lies_in_shared_memory(spawn: Spawn, consumer: Peer) -> None:
    """Same kernel, other process numbers: the number means nobody here, or somebody else."""
    child = await spawn("shm")
    put = await child.ask(op="put", kind="shm", key="k", size=SIZE, seed=1)
    for pid in (1, 2**22 + 1):
        handle = handle_of(put)
        handle.shm.pid = pid
        async with consumer.connectors.get(handle) as got:
            assert digest(got) == put["digest"]
    assert consumer.fetched_pieces == 2
