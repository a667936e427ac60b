"""The connector between GPUs over a double of CUDA (``tests/doubles/cuda.py``): real processes, real shared memory,
device memory that is host memory. On GPUs: ``tests/contract/connectors/test_cuda_ipc_on_gpus.py``."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest

from connectors import registry
from connectors.handles import HandleStore
from connectors.options import CudaIpcOptions
from connectors.payload import Payload
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors, process
from omnicore.clock import ManualClock

torch = pytest.importorskip("torch")

from connectors.cuda_ipc import CudaIpcConnector, settled  # noqa: E402
from tests.doubles.cuda import CudaDouble  # noqa: E402

EDGE = transfer_pb2.EdgeRef(request_id="req1", from_stage=0, to_stage=1)
REF = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p"), replica_id=1, epoch=5)


class End:
    """One worker."""

    def __init__(self, pool_bytes: int = 1 << 20, **options: Any) -> None:
        self.cuda = CudaDouble()
        self.clock = ManualClock()
        self.store = HandleStore(lambda: REF, lambda: "", clock=self.clock, ttl_s=10)
        chosen = CudaIpcOptions(**{"put_wait_s": 0.05, **options})
        self.connector = CudaIpcConnector(self.store, chosen, pool_bytes=pool_bytes, cuda=self.cuda)

    async def put(self, key: str, seed: int = 1, consumers: int = 1) -> transfer_pb2.TransferHandle:
        return await self.connector.put(key, EDGE, 0, payload(seed), consumers)


def payload(seed: int) -> Payload:
    tensors = {"kv": torch.full((3, 5), seed, dtype=torch.bfloat16), "odd": np.full(7, seed), "none": np.zeros((0, 2))}
    return Payload(tensors, metadata={"seed": seed})


@contextlib.asynccontextmanager
async def running(pool_bytes: int = 1 << 20, **options: Any) -> AsyncIterator[End]:
    """An end; whatever happens in the test, nothing of it is left."""
    end = End(pool_bytes, **options)
    before = end.connector.usage()
    yield end
    await end.connector.close()
    await end.connector.close()
    assert (end.connector.usage().free_bytes, end.connector.usage().handles) == (before.free_bytes, 0)
    assert (end.cuda.allocated, len(end.cuda.opened)) == (0, 0)


async def main() -> int:
    """A producer in a process of its own: puts each line's key."""
    process.die_with_parent()
    end = End()
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = orjson.loads(line)
        if asked["op"] == "put":
            handle = await end.put(asked["key"], asked["seed"])
            print(base64.b64encode(handle.SerializeToString()).decode(), flush=True)
        elif asked["op"] == "release":
            print(end.store.cleanup("req1"), flush=True)
        else:
            await end.connector.close()
            end.connector = CudaIpcConnector(end.store, CudaIpcOptions(), pool_bytes=1 << 20, cuda=end.cuda)
            print("closed", flush=True)
    return 0


class Child:
    """That process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def ask(self, op: str, **facts: Any) -> bytes:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(orjson.dumps({"op": op, **facts}) + b"\n")
        return (await self.process.stdout.readline()).strip()

    async def put(self, key: str, seed: int) -> transfer_pb2.TransferHandle:
        return transfer_pb2.TransferHandle.FromString(base64.b64decode(await self.ask("put", key=key, seed=seed)))


@pytest.fixture
async def child() -> AsyncIterator[Child]:
    started = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.unit.connectors.test_cuda_ipc"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
    yield Child(started)
    if started.returncode is None:
        started.kill()
        await started.wait()


async def check(connector: CudaIpcConnector, handle: transfer_pb2.TransferHandle, seed: int) -> None:
    async with connector.get(handle) as got:
        assert torch.equal(got.tensors["kv"], torch.full((3, 5), seed, dtype=torch.bfloat16))
        assert (got.tensors["odd"].tolist(), got.tensors["odd"].dtype) == ([seed] * 7, torch.int64)
        assert tuple(got.tensors["none"].shape) == (0, 2)
        assert got.metadata == {"seed": seed}


async def test_a_peer_opens_the_pool_once_and_reads_in_place(child: Child) -> None:
    async with running(pool_bytes=0) as consumer:
        for seed in range(4):
            await check(consumer.connector, await child.put(f"k{seed}", seed), seed)
        assert len(consumer.cuda.opened) == 1
        handle = await child.put("k", 9)
        target = torch.zeros(3, 5, dtype=torch.bfloat16)
        odd = np.zeros(7, np.int64)
        await consumer.connector.get_into(handle, {"kv": target, "odd": odd})
        assert target.unique().tolist() == [9]
        assert odd.tolist() == [9] * 7
        whole = bytearray(handle.size_bytes)
        await consumer.connector.get_into(handle, memoryview(whole))
        assert whole[30:64] == bytes(34), "gaps hold nothing of what was there before"
        assert np.frombuffer(whole, np.int64, 7, 64).tolist() == [9] * 7
        for wrong in ({"kv": target[:1]}, {"kv": target.float()}, {"no": target}, {"kv": [1]}, {"odd": odd[:3]}):
            with pytest.raises(errors.InvalidRequestError, match="into"):
                await consumer.connector.get_into(handle, wrong)
        assert await child.ask("release") == b"5"
        with pytest.raises(errors.NotFoundError):
            await consumer.connector.get_into(handle, {"kv": target})


async def test_freed_while_read_and_owners_that_close_or_die(child: Child) -> None:
    async with running(pool_bytes=0) as consumer:
        handle = await child.put("k", 1)
        with pytest.raises(errors.DataLossError) as lost:
            async with consumer.connector.get(handle):
                await child.ask("release")
        assert lost.value.reason == "RELEASED_WHILE_READ"
        handle = await child.put("again", 2)
        await check(consumer.connector, handle, 2)
        assert await child.ask("close") == b"closed"
        with pytest.raises(errors.OmniError):
            await check(consumer.connector, handle, 2)
        assert consumer.connector.sweep() == 1, "the pool that its owner has closed"
        handle = await child.put("other pool", 3)
        await check(consumer.connector, handle, 3)
        async with consumer.connector.get(handle) as got:
            child.process.kill()
            await child.process.wait()
            assert got.tensors["odd"].tolist() == [3] * 7
            assert consumer.connector.sweep() == 0, "somebody reads it"
        with pytest.raises(errors.UnavailableError) as gone:
            await check(consumer.connector, handle, 3)
        assert gone.value.reason == "OWNER_GONE"
        assert consumer.connector.sweep() == 1
        assert not consumer.cuda.opened


async def test_one_process_needs_no_opening_and_slots_are_used_again() -> None:
    async with running() as both:
        for seed in range(50):
            handle = await both.put(f"k{seed}", seed, consumers=2)
            await check(both.connector, handle, seed)
            assert not both.store.release(handle.key, handle.token)
            await check(both.connector, handle, seed)
            assert both.store.release(handle.key, handle.token)
        assert not both.cuda.opened


async def test_device_work_is_ordered() -> None:
    """What the caller still computes is put computed; what it still reads when the context ends is waited for."""
    async with running() as both:
        source = torch.zeros(8)
        both.cuda.caller.give(lambda: source.fill_(4))
        handle = await both.connector.put("k", EDGE, 0, Payload({"x": source}))
        source.fill_(99)
        big = np.zeros(1 << 19, np.float64)[: 5 << 16]
        both.cuda.caller.give(lambda: big.fill(5))
        with pytest.raises(errors.ResourceExhaustedError):
            await both.connector.put("large", EDGE, 0, Payload({"x": big}))
        kept: list[float] = []
        async with both.connector.get(handle) as got:
            view = got.tensors["x"]
            both.cuda.caller.give(lambda: kept.extend(view.tolist()))
            assert not kept
        assert kept == [4.0] * 8
    async with running(pool_bytes=8 << 20) as both:
        large = np.zeros(5 << 17)
        both.cuda.caller.give(lambda: large.fill(5))
        handle = await both.connector.put("large", EDGE, 0, Payload({"x": large}))  # written by a thread
        async with both.connector.get(handle) as got:
            assert got.tensors["x"].unique().tolist() == [5.0]


async def test_fetch_brings_what_lies_on_the_device() -> None:
    async with running() as both:
        handle = await both.put("k", 6)
        async with both.store.open("k", handle.token) as data:
            assert (len(data), data.readonly) == (handle.size_bytes, True)
            assert np.frombuffer(data, np.int64, 7, 64).tolist() == [6] * 7
            assert bytes(data[30:64]) == bytes(34)
            await both.connector.close()
        assert both.cuda.allocated == 0, "the memory went when nobody read it any more"


async def test_to_host_text_and_checksums() -> None:
    async with running(to_host=True, checksum=True) as both:
        handle = await both.put("k", 3)
        async with both.connector.get(handle) as got:
            assert isinstance(got.tensors["odd"], np.ndarray)
            assert got.tensors["odd"].tolist() == [3] * 7
        handle.crc32 ^= 1
        with pytest.raises(errors.DataLossError) as caught:
            await check(both.connector, handle, 3)
        assert caught.value.reason == "WRONG_CHECKSUM"
    async with running() as both:
        for text in ("short", "long " * 20_000):
            handle = await both.connector.put(text[:5], EDGE, 0, Payload(text=text))
            async with both.connector.get(handle) as got:
                assert got.text == text


async def test_full_pools_wait_and_cancelled_puts_leave_nothing() -> None:
    async with running(put_wait_s=30) as both:
        big = Payload({"x": torch.ones(700 << 10, dtype=torch.uint8)})
        first = await both.connector.put("first", EDGE, 0, big)
        waiting = asyncio.ensure_future(both.connector.put("second", EDGE, 0, big))
        cancelled = asyncio.ensure_future(both.connector.put("third", EDGE, 0, big))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert not waiting.done()
        both.store.release("first", first.token)
        second = await waiting
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        both.store.release("second", second.token)
        for turns in range(6):  # while it waits for room, for the device, or for nothing any more
            put = asyncio.ensure_future(both.connector.put("fourth", EDGE, 0, big))
            for _ in range(turns):
                await asyncio.sleep(0)
            put.cancel()
            await asyncio.wait([put])
            if not put.cancelled():
                both.store.release("fourth", put.result().token)
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        End(pool_bytes=1 << 40)
    assert caught.value.reason == "DEVICE_MEMORY"


async def test_no_wrong_number_of_the_backend_is_believed() -> None:
    async with running() as both:
        await both.put("neighbour", 2)
        handle = await both.put("k", 1)
        intact = handle.SerializeToString()
        changes: list[tuple[str, Any]] = [
            *((name, value) for name in ("pid", "process_start_ticks", "pool_bytes") for value in (0, 1, 2**32 - 1)),
            *(("offset_bytes", value) for value in (0, 1, 64, 512, 1024, 1 << 20, 2**63)),
            *(("memory_handle", value) for value in (b"", bytes(64), bytes(65))),
            *(("boot_id", "x"), ("device_uuid", "GPU-1"), ("event_handle", bytes(64))),
        ]
        for name, value in changes:
            changed = transfer_pb2.TransferHandle.FromString(intact)
            if getattr(changed.cuda_ipc, name) == value:
                continue
            setattr(changed.cuda_ipc, name, value)
            with pytest.raises(errors.OmniError):
                await check(both.connector, changed, 1)
        for name, value in (("fd", 0), ("pid", 1), ("offset_bytes", 128), ("pool_bytes", 4096), ("boot_id", "x")):
            changed = transfer_pb2.TransferHandle.FromString(intact)
            if getattr(changed.cuda_ipc.header, name) != value:
                setattr(changed.cuda_ipc.header, name, value)
                with pytest.raises(errors.OmniError):
                    await check(both.connector, changed, 1)
        changed = transfer_pb2.TransferHandle.FromString(intact)
        changed.fetch.SetInParent()
        with pytest.raises(errors.FailedPreconditionError):
            await check(both.connector, changed, 1)
        await check(both.connector, transfer_pb2.TransferHandle.FromString(intact), 1)


async def test_settling_does_not_hold_up_the_loop() -> None:
    class Slow:
        looks = 0

        def done(self) -> bool:
            self.looks += 1
            return False

        def wait(self) -> None:
            self.waited = True

    slow, turns = Slow(), 0
    waiting = asyncio.ensure_future(settled(slow))
    while not waiting.done():
        await asyncio.sleep(0)
        turns += 1
    assert slow.waited
    assert turns > 1


async def test_who_is_cancelled_waits_for_the_device_but_the_loop_does_not() -> None:
    class Stuck:
        ends = threading.Event()

        def done(self) -> bool:
            return False

        def wait(self) -> None:
            assert self.ends.wait(60)

    waiting = asyncio.ensure_future(settled(Stuck()))
    await asyncio.sleep(0)
    waiting.cancel()
    for _ in range(3):  # were the loop held up, nobody would come to end it
        await asyncio.sleep(0)
    assert not waiting.done()
    Stuck.ends.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_pool_that_cannot_be_exported_is_given_back() -> None:
    class NotExported(CudaDouble):
        def export(self, device: int, address: int) -> bytes:
            raise errors.InternalError("cuIpcGetMemHandle failed", reason="CUDA")

    cuda = NotExported()
    with pytest.raises(errors.InternalError):
        CudaIpcConnector(HandleStore(lambda: REF, lambda: ""), pool_bytes=1 << 20, cuda=cuda)
    assert cuda.allocated == 0


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="this machine has a GPU")
def test_without_a_gpu_it_says_so() -> None:
    store = HandleStore(lambda: REF, lambda: "")

    def fetcher(handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        raise AssertionError

    context = registry.ConnectorContext(store, fetcher, 1 << 20)
    with pytest.raises(errors.FailedPreconditionError) as caught:
        registry.create_connector("cuda_ipc", context)
    assert caught.value.reason == "NO_CUDA_DEVICE"
    with pytest.raises(errors.FailedPreconditionError, match="device 7") as caught:
        CudaIpcConnector(store, CudaIpcOptions(device=7), cuda=CudaDouble())
    with pytest.raises(errors.InvalidRequestError, match="to_host"):
        registry.create_connector("cuda_ipc", context, {"to_hots": True})


if __name__ == "__main__":
    sys.exit(process.run(main()))
