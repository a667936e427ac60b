from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from connectors.connector_set import ConnectorSet
from connectors.payload import Payload
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors

EDGE = transfer_pb2.EdgeRef(request_id="req1", from_stage=0, to_stage=1)
MIXER = 0x9E3779B97F4A7C15  # 2**64 / golden ratio: neighbours differ in all bytes
SHAPES = {"kv": ((3, 5), "bfloat16"), "ids": ((7,), "int64"), "none": ((0, 2), "float32")}


@contextlib.asynccontextmanager
async def running(
    checksum: bool = False, pool_bytes: int = 1 << 20, pin_memory: bool = False
) -> AsyncIterator[ConnectorSet]:
    """Connectors with a megabyte each that end empty."""
    ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p"), replica_id=1, epoch=5)

    def fetcher(handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        async def pieces() -> AsyncIterator[bytes]:
            with connectors.store.read(handle.key, handle.token) as data:
                yield bytes(data)

        return pieces()

    connectors = ConnectorSet(
        lambda: ref,
        lambda: "",
        fetcher,
        pool_bytes=pool_bytes,
        options={
            "shm": {"put_wait_s": 30, "checksum": checksum, "pin_memory": pin_memory},
            "grpc": {"put_wait_s": 30, "checksum": checksum, "pool_bytes": 1 << 20},
        },
    )
    free = connectors.usage().free_bytes
    yield connectors
    await connectors.close()
    assert (connectors.usage().free_bytes, connectors.usage().handles) == (free, 0)


def fill(buffer: Any, value: int) -> None:
    for array in buffer.tensors.values():
        array[...] = value


@pytest.mark.parametrize("kind", ["shm", "grpc"])
@pytest.mark.parametrize("checksum", [False, True])
async def test_what_lies_in_the_pool_is_put_without_a_copy(kind: str, checksum: bool) -> None:
    async with running(checksum) as connectors:
        for value in range(3):
            dirty = await connectors.allocate(kind, 4096)
            dirty.view[:] = b"\xff" * 4096
            dirty.release()
            async with await connectors.allocate(kind, SHAPES) as buffer:
                fill(buffer, value)
                free = connectors.usage().free_bytes
                handle = await connectors.put(kind, f"k{value}", EDGE, 0, buffer.payload({"n": value}))
                assert connectors.usage().free_bytes == free, "no other room was taken"
                assert not buffer.held
            assert handle.WhichOneof("backend") == {"shm": "shm", "grpc": "fetch"}[kind]
            assert handle.HasField("crc32") == checksum
            async with connectors.get(handle) as got:
                assert got.tensors["ids"].tolist() == [value] * 7
                assert got.tensors["kv"].shape == (3, 5)
                assert got.tensors["none"].shape == (0, 2)
                assert got.metadata == {"n": value}
            with connectors.store.read(handle.key, handle.token) as data:
                assert bytes(data[30:64]) == bytes(34), "nothing of what was there before"
            assert connectors.store.release(handle.key, handle.token)
        assert connectors.leaked == 0


async def test_torch_tensors_write_into_the_pool() -> None:
    torch = pytest.importorskip("torch")
    async with running() as connectors:
        async with await connectors.allocate("shm", {"kv": ((2, 3), "bfloat16")}) as buffer:
            torch.full((2, 3), 1.5, dtype=torch.bfloat16, out=buffer.torch("kv"))
            handle = await connectors.put("shm", "k", EDGE, 0, buffer.payload())
        async with connectors.get(handle) as got:
            assert (
                got.tensors["kv"].tobytes()
                == torch.full((6,), 1.5, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
            )


async def test_puts_that_fail_or_copy_leave_the_buffer_with_its_holder() -> None:
    async with running() as connectors:
        buffer = await connectors.allocate("shm", {"x": ((40_000,), "uint8")})
        fill(buffer, 7)
        await connectors.put("shm", "taken", EDGE, 0, Payload({"x": np.zeros(70_000, np.uint8)}))
        with pytest.raises(errors.AlreadyExistsError):
            await connectors.put("shm", "taken", EDGE, 0, buffer.payload())
        other = transfer_pb2.EdgeRef(request_id="req2")
        with pytest.raises(errors.InvalidRequestError):
            await connectors.put("shm", "k", other, 0, buffer.payload({"n": float("nan")}))
        copied = await connectors.put("grpc", "k2", EDGE, 0, buffer.payload())
        held = [buffer.held]
        handle = await connectors.put("shm", "k", other, 0, buffer.payload())
        for each in (copied, handle):
            async with connectors.get(each) as got:
                assert got.tensors["x"].tolist() == [7] * 40_000
        assert [*held, buffer.held] == [True, False]
        with pytest.raises(errors.FailedPreconditionError, match=r"test_managed.py:\d+.*was released"):
            buffer.payload()
        buffer.release()
        async with connectors.get(handle) as got:
            assert got.tensors["x"][0] == 7, "its release is nobody's any more"


async def test_released_once_and_waiting_producers_hear_of_it() -> None:
    async with running() as connectors:
        free = connectors.usage().free_bytes
        first = await connectors.allocate("shm", 600_000)
        waiting = asyncio.ensure_future(connectors.allocate("shm", 600_000))
        await asyncio.sleep(0)
        assert not waiting.done()
        first.release()
        second = await waiting
        first.release()
        assert connectors.usage().free_bytes < free
        with second:
            assert second["data"].shape == (600_000,)
        assert connectors.usage().free_bytes == free
        for use in (lambda: second["data"], lambda: second.view, lambda: second.tensors):
            with pytest.raises(errors.FailedPreconditionError):
                use()


async def test_buffers_that_are_dropped_are_given_back_and_counted() -> None:
    async with running() as connectors:
        free = connectors.usage().free_bytes
        buffer = await connectors.allocate("shm", SHAPES)
        place = buffer.allocated_at
        assert "test_managed.py:" in place
        part = buffer["ids"][2:4]
        whole = buffer.view
        del buffer
        gc.collect()
        part[:] = 5
        assert (connectors.leaked, whole[64 + 16]) == (0, 5), "views keep it"
        del part, whole
        gc.collect()
        assert (connectors.leaked, connectors.usage().free_bytes) == (1, free)
        with await connectors.allocate("shm", SHAPES):
            pass
        gc.collect()
        assert connectors.leaked == 1


@pytest.mark.parametrize("size", [406_528, 440_000_000])
async def test_kv_caches_of_every_size_arrive_checksummed(size: int) -> None:
    """K-08: through the producer's pool, without a copy on either side."""
    async with running(checksum=True, pool_bytes=size + (1 << 20)) as connectors:
        async with await connectors.allocate("shm", {"kv": ((size // 8,), "uint64")}) as buffer:
            array = buffer["kv"]
            for start in range(0, array.size, 1 << 20):
                part = np.arange(start, min(start + (1 << 20), array.size), dtype=np.uint64)
                array[start : start + (1 << 20)] = part * np.uint64(MIXER)
            del array
            handle = await connectors.put("shm", "k", EDGE, 0, buffer.payload())
        assert (handle.size_bytes, handle.HasField("crc32")) == (size, True)
        async with connectors.get(handle) as got:  # compares the checksum
            kv = got.tensors["kv"]
            assert int(kv[-1]) == (size // 8 - 1) * MIXER % 2**64
            del kv, got
        handle.crc32 ^= 1
        with pytest.raises(errors.DataLossError):
            async with connectors.get(handle):
                pass


async def test_pools_are_not_pinned_where_there_is_no_gpu_and_work_all_the_same() -> None:
    """With one: ``tests/contract/connectors/test_cuda_ipc_on_gpus.py``."""
    async with running(pin_memory=True) as connectors:
        handle = await connectors.put("shm", "k", EDGE, 0, Payload({"x": np.arange(20_000)}))
        async with connectors.get(handle) as got:
            assert int(got.tensors["x"].sum()) == 199_990_000


@pytest.mark.parametrize(
    "shapes",
    [
        {"": ((1,), "int8")},
        {"x": ((-1,), "int8")},
        {"x": ((1,), "object")},
        {"x": ((2**62, 2**62), "int8")},
        {"x": ((1,) * 33, "int8")},
        -5,
    ],
    ids=str,
)
async def test_shapes_that_do_not_travel_are_refused(shapes: Any) -> None:
    async with running() as connectors:
        with pytest.raises(errors.InvalidRequestError, match="tensors"):
            await connectors.allocate("shm", shapes)
        with pytest.raises(errors.ResourceExhaustedError) as caught:
            await connectors.allocate("shm", 1 << 21)
        assert caught.value.reason == "LARGER_THAN_POOL"
        async with await connectors.allocate("shm", {"x": ((2,), "int8")}) as buffer:
            with pytest.raises(errors.InvalidRequestError, match="has: x"):
                buffer["y"]
