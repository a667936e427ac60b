"""Payloads that stay in the memory of the producer's process, read by real other processes."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from connectors.connector_set import ConnectorSet
from connectors.payload import Payload
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors, process

EDGE = transfer_pb2.EdgeRef(request_id="req1", from_stage=0, to_stage=1)
IN_PLACE = 10_000


def connectors_of(fetched: list[str] | None = None, **options: Any) -> ConnectorSet:
    ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p"), replica_id=1, epoch=5)

    def fetcher(handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            assert fetched is not None
            fetched.append(handle.key)
            async with found.store.open(handle.key, handle.token) as data:
                yield bytes(data)

        return pieces()

    found = ConnectorSet(
        lambda: ref,
        lambda: "",
        fetcher,
        pool_bytes=1 << 20,
        options={"shm": {"in_place_bytes": IN_PLACE, "shm_threshold_bytes": 0, **options}},
    )
    return found


def payload(seed: int, size: int = 300_000) -> Payload:
    rng = np.random.default_rng(seed)
    odd = rng.integers(0, 256, 77, np.uint8)
    return Payload({"odd": odd, "none": np.zeros((0, 3)), "x": rng.standard_normal(size // 8)}, metadata={"seed": seed})


async def check(connectors: ConnectorSet, handle: transfer_pb2.TransferHandle, seed: int, size: int = 300_000) -> None:
    async with connectors.get(handle) as got:
        assert got.metadata == {"seed": seed}
        for name, sent in payload(seed, size).tensors.items():
            assert got.tensors[name].tobytes() == sent.tobytes()
            assert got.tensors[name].shape == sent.shape


async def main() -> int:
    """A producer in a process of its own."""
    process.die_with_parent()
    ours = connectors_of()
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = orjson.loads(line)
        if asked["op"] == "put":
            handle = await ours.put("shm", asked["key"], EDGE, 0, payload(asked["seed"], asked["size"]))
            print(base64.b64encode(handle.SerializeToString()).decode(), flush=True)
        else:
            print(ours.store.cleanup("req1"), flush=True)
    return 0


@contextlib.asynccontextmanager
async def producing() -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.connectors.test_process_memory"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    yield child
    if child.returncode is None:
        child.kill()
        await child.wait()


async def ask(child: asyncio.subprocess.Process, **asked: Any) -> bytes:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(orjson.dumps(asked) + b"\n")
    return (await child.stdout.readline()).strip()


async def test_a_peer_copies_out_of_the_producers_memory() -> None:
    async with producing() as child:
        consumer = connectors_of()
        for seed, size in enumerate((IN_PLACE, 300_000, 70 << 20)):  # the last in more than one piece
            raw = await ask(child, op="put", key=f"k{seed}", seed=seed, size=size)
            handle = transfer_pb2.TransferHandle.FromString(base64.b64decode(raw))
            assert handle.WhichOneof("backend") == "process"
            await check(consumer, handle, seed, size)
            into = np.empty(size // 8)
            await consumer.get_into(handle, {"x": into})
            assert into.tobytes() == payload(seed, size).tensors["x"].tobytes()
        assert await ask(child, op="cleanup") == b"3"
        with pytest.raises(errors.NotFoundError):
            await check(consumer, handle, seed, size)
        raw = await ask(child, op="put", key="last", seed=1, size=300_000)
        handle = transfer_pb2.TransferHandle.FromString(base64.b64decode(raw))
        await check(consumer, handle, 1)
        child.kill()
        await child.wait()
        with pytest.raises((errors.UnavailableError, AssertionError)):  # OWNER_GONE, and then nobody to fetch from
            await check(consumer, handle, 1)
        await consumer.close()


async def test_nothing_is_copied_at_the_producer_and_all_is_let_go() -> None:
    fetched: list[str] = []
    both = connectors_of(fetched)
    free = both.usage().free_bytes
    sent = payload(3)
    references = sys.getrefcount(sent.tensors["x"])
    handle = await both.put("shm", "k", EDGE, 0, sent, consumers=2)
    assert both.usage().free_bytes == free
    address = sent.tensors["x"].__array_interface__["data"][0]
    assert handle.process.addresses[2] == address
    for left in (1, 0):
        await check(both, handle, 3)
        assert both.store.release("k", handle.token) == (left == 0)
    now = sys.getrefcount(sent.tensors["x"])  # not inside the assertion, which would hold on to the array
    assert now == references
    small = await both.put("shm", "small", EDGE, 0, Payload({"x": np.zeros(IN_PLACE - 1, np.uint8)}))
    strided = await both.put("shm", "strided", EDGE, 0, Payload({"x": np.zeros((400, 400))[:, ::2]}))
    assert [h.WhichOneof("backend") for h in (small, strided)] == ["shm", "shm"]
    with pytest.raises(errors.AlreadyExistsError):
        await both.put("shm", "small", EDGE, 0, payload(1))
    assert not fetched
    await both.close()
    with pytest.raises(errors.UnavailableError):
        await both.put("shm", "k2", EDGE, 0, payload(1))


async def test_what_may_not_be_read_is_fetched() -> None:
    """Another host, and process 1, which is another user's or another container's, or is not what the handle says."""
    fetched: list[str] = []
    both = connectors_of(fetched, checksum=True)
    handle = await both.put("shm", "k", EDGE, 0, payload(4))
    handle.crc32 ^= 1
    with pytest.raises(errors.DataLossError):
        await check(both, handle, 4)
    handle.crc32 ^= 1
    elsewhere = transfer_pb2.TransferHandle.FromString(handle.SerializeToString())
    elsewhere.process.boot_id = "00000000-0000-0000-0000-000000000000"
    await check(both, elsewhere, 4)
    gone = transfer_pb2.TransferHandle.FromString(handle.SerializeToString())
    gone.process.pid = 1
    await check(both, gone, 4)
    assert fetched == ["k", "k"]
    await both.close()


async def test_no_wrong_number_is_believed() -> None:
    both = connectors_of()
    await both.put("shm", "neighbour", EDGE, 0, payload(1))
    handle = await both.put("shm", "k", EDGE, 0, payload(2))
    raw = handle.SerializeToString()
    for change in (0, 1, 4096, 2**47, 2**64 - 1):
        for index in range(-1, 3):
            changed = transfer_pb2.TransferHandle.FromString(raw)
            if index < 0:
                changed.process.header_address = change
            else:
                changed.process.addresses[index] = change
            with pytest.raises(errors.OmniError):
                await check(both, changed, 2)
    changed = transfer_pb2.TransferHandle.FromString(raw)
    changed.process.addresses.append(0)
    with pytest.raises(errors.DataLossError):
        await check(both, changed, 2)
    await check(both, handle, 2)
    await both.close()


if __name__ == "__main__":
    sys.exit(process.run(main()))
