from __future__ import annotations

import asyncio
import dataclasses
import functools
import re
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from connectors.grpc_fetch import GrpcConnector
from connectors.handles import HandleStore
from connectors.object_store import ObjectStoreConnector, object_key
from connectors.options import MooncakeStoreOptions, StoreOptions, YuanrongOptions, parse_options
from connectors.payload import Payload
from connectors.registry import ConnectorContext, create_connector
from connectors.stores.base import ObjectStore, OpenObject
from connectors.stores.buffers import BufferPool
from connectors.stores.calls import Calls
from connectors.stores.removal import ATTEMPTS, Remover
from connectors.stores.shared import share
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from tests.support.processes import wait_until

EDGE = transfer_pb2.EdgeRef(request_id="req1", from_stage=0, to_stage=1)
PAYLOAD = Payload({"x": np.arange(1000, dtype=np.int32)})


@dataclasses.dataclass
class _Held:
    data: memoryview
    closed: bool = False

    def close(self) -> None:
        self.closed = True


class MemoryStore:
    """A store in this process that fails when told to."""

    def __init__(self) -> None:
        self.address = "store:1"
        self.objects: dict[str, bytes] = {}
        self.put_errors: list[errors.OmniError] = []
        self.lose_answers = False  # puts take effect and fail all the same
        self.unreachable = False
        self.gate = threading.Event()  # what calls wait for
        self.gate.set()
        self.opened: list[_Held] = []
        self.removals = 0
        self.closed = False

    def _call(self) -> None:
        assert self.gate.wait(30)
        if self.unreachable:
            raise errors.UnavailableError("the store is away", reason="STORE_UNREACHABLE")

    def put(self, object_key: str, size_bytes: int, fill: Callable[[memoryview], None]) -> None:
        self._call()
        if self.put_errors:
            raise self.put_errors.pop(0)
        memory = bytearray(size_bytes)
        fill(memoryview(memory))
        self.objects[object_key] = bytes(memory)
        if self.lose_answers:
            raise errors.UnavailableError("no answer", reason="STORE_UNREACHABLE")

    def open(self, object_key: str, size_bytes: int) -> OpenObject:
        self._call()
        if object_key not in self.objects:
            raise errors.NotFoundError("no object", reason="OBJECT_NOT_FOUND")
        self.opened.append(_Held(memoryview(self.objects[object_key])))
        return self.opened[-1]

    def remove(self, object_keys: Sequence[str]) -> None:
        self.removals += 1
        self._call()
        for key in object_keys:
            self.objects.pop(key, None)

    def healthy(self) -> bool:
        return not self.unreachable

    def close(self) -> None:
        self.closed = True


class Worker:
    def __init__(self, objects: ObjectStore, **options: Any) -> None:
        self.ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p", stage_id=3), replica_id=2, epoch=5)
        self.store = HandleStore(lambda: self.ref, lambda: "10.0.0.1:99")
        mine = {"inline_bytes": 0, "put_wait_s": 30.0, "timeout_s": 30.0, **options}
        self.connector = ObjectStoreConnector("test", self.store, objects, StoreOptions(**mine))

    @property
    def free(self) -> bool:
        """Nothing is published, nothing takes room."""
        usage = self.connector.usage()
        return (usage.handles, usage.free_bytes) == (0, usage.pool_bytes)

    async def put(self, key: str = "k") -> transfer_pb2.TransferHandle:
        return await self.connector.put(key, EDGE, 0, PAYLOAD)

    async def read(self, handle: transfer_pb2.TransferHandle) -> bytes:
        async with self.connector.get(handle) as got:
            return bytes(got.tensors["x"].tobytes())


@pytest.fixture
def objects() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
async def worker(objects: MemoryStore) -> AsyncIterator[Worker]:
    worker = Worker(objects)
    yield worker
    await worker.connector.close()
    assert objects.closed
    assert worker.free


async def test_objects_are_put_read_and_removed(worker: Worker, objects: MemoryStore) -> None:
    handle = await worker.put()
    assert (handle.store.connector, handle.store.address, len(objects.objects)) == ("test", "store:1", 1)
    assert await worker.read(handle) == PAYLOAD.tensors["x"].tobytes()
    await wait_until(lambda: objects.opened[0].closed, what="what was read to be let go")
    assert worker.store.release("k", handle.token)
    await wait_until(lambda: not objects.objects and worker.free, what="the removal")
    with pytest.raises(errors.NotFoundError):
        await worker.read(handle)


async def test_names_of_objects_are_used_once_and_fit_every_store(worker: Worker, objects: MemoryStore) -> None:
    names = set()
    for key in ("k", "k", "täg/with spaces.and\n" + 500 * "x"):
        handle = await worker.put(key)
        names.add(handle.store.object_key)
        assert handle.store.object_key == object_key(handle)
        assert re.fullmatch(r"omni:[0-9a-f]{12}:5:[0-9a-f]{32}", handle.store.object_key)
        worker.store.release(key, handle.token)
    assert len(names) == 3, "a key that is used again names another object"


async def test_an_object_that_was_replaced_is_an_error(worker: Worker, objects: MemoryStore) -> None:
    handle, other = await worker.put("k"), await worker.put("other")
    objects.objects[handle.store.object_key] = objects.objects[other.store.object_key]
    with pytest.raises(errors.DataLossError) as caught:
        await worker.read(handle)
    assert caught.value.reason == "OTHER_OBJECT"
    await wait_until(lambda: objects.opened[-1].closed, what="what was read to be let go")
    handle.store.object_key = other.store.object_key
    with pytest.raises(errors.NotFoundError):
        await worker.read(handle)


async def test_handles_of_other_stores_and_connectors_are_refused(worker: Worker) -> None:
    for field, value, reason in (("address", "store:2", "OTHER_STORE"), ("connector", "else", "OTHER_BACKEND")):
        handle = transfer_pb2.TransferHandle()
        handle.CopyFrom(await worker.put(field))
        setattr(handle.store, field, value)
        with pytest.raises(errors.FailedPreconditionError) as caught:
            await worker.read(handle)
        assert caught.value.reason == reason


async def test_put_waits_for_room_in_the_store_and_then_fails(worker: Worker, objects: MemoryStore) -> None:
    full = errors.ResourceExhaustedError("full", reason="STORE_FULL")
    objects.put_errors = [full, full]
    assert await worker.put("after a while")
    objects.put_errors = [full] * 1000
    impatient = Worker(objects, put_wait_s=0.05)
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        await impatient.put("never")
    assert caught.value.reason == "STORE_FULL"
    assert impatient.free
    assert len(objects.objects) == 1
    await impatient.connector.close()


async def test_what_may_have_been_put_is_removed(worker: Worker, objects: MemoryStore) -> None:
    objects.lose_answers = True
    with pytest.raises(errors.UnavailableError):
        await worker.put()
    await wait_until(lambda: not objects.objects and worker.free, what="the removal")


async def test_cancelled_put_leaves_nothing(worker: Worker, objects: MemoryStore) -> None:
    objects.gate.clear()
    putting = asyncio.ensure_future(worker.put())
    await asyncio.sleep(0)
    putting.cancel()
    await asyncio.wait([putting])
    assert putting.cancelled()
    assert not worker.free, "the thread still writes"
    objects.gate.set()
    await wait_until(lambda: not objects.objects and worker.free, what="the removal")
    assert await worker.put()


async def test_store_that_hangs_holds_nobody_up(worker: Worker, objects: MemoryStore) -> None:
    handle = await worker.put()
    impatient = Worker(objects, timeout_s=0.1)
    await wait_until(lambda: impatient.connector.offer().healthy, what="health")
    objects.gate.clear()
    for doing in (impatient.read(handle), impatient.put("other")):
        with pytest.raises(errors.UnavailableError) as caught:
            await doing
        assert caught.value.reason == "STORE_TIMEOUT"
    assert not impatient.connector.offer().healthy
    objects.gate.set()
    await wait_until(lambda: bool(objects.opened) and objects.opened[0].closed, what="the late read to be let go")
    await wait_until(lambda: len(objects.objects) == 1 and impatient.free, what="the late object to be removed")
    await wait_until(lambda: impatient.connector.offer().healthy, what="health")
    assert await worker.read(handle)
    await impatient.connector.close()


async def test_letting_go_of_what_was_read_holds_nobody_up(
    worker: Worker, objects: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    proceed = threading.Event()

    def close(held: _Held) -> None:
        held.closed = proceed.wait(60)

    monkeypatch.setattr(_Held, "close", close)
    assert await worker.read(await worker.put()) == PAYLOAD.tensors["x"].tobytes()
    assert not objects.opened[0].closed, "the loop has not waited for it"
    proceed.set()
    await wait_until(lambda: objects.opened[0].closed, what="what was read to be let go")


async def test_a_put_that_waits_while_the_connector_closes_is_refused(objects: MemoryStore) -> None:
    worker = Worker(objects)
    objects.put_errors = [errors.ResourceExhaustedError("full", reason="STORE_FULL")] * 1000
    putting = asyncio.ensure_future(worker.put())
    await wait_until(lambda: len(objects.put_errors) < 999, what="attempts")
    await worker.connector.close()
    with pytest.raises(errors.OmniError) as caught:
        await putting
    assert caught.value.reason == "CONNECTOR_CLOSED"
    assert worker.free


async def test_health_follows_the_store(objects: MemoryStore) -> None:
    objects.unreachable = True
    worker = Worker(objects)
    with pytest.raises(errors.UnavailableError):
        await worker.put()
    worker.connector.sweep()
    assert not worker.connector.offer().healthy
    objects.unreachable = False
    async with asyncio.timeout(30):
        while not worker.connector.offer().healthy:
            worker.connector.sweep()
            await asyncio.sleep(0.01)
    assert worker.connector.offer().address == "store:1"
    await worker.connector.close()
    assert not worker.connector.offer().healthy
    with pytest.raises(errors.UnavailableError):
        await worker.put()


async def test_fetch_brings_the_bytes_from_the_store(worker: Worker) -> None:
    handle = await worker.put()

    async def fetch(handle: transfer_pb2.TransferHandle) -> AsyncIterator[bytes]:
        async with worker.store.open(handle.key, handle.token) as data:
            yield bytes(data)

    async with GrpcConnector(worker.store, fetch).get(handle) as got:
        np.testing.assert_array_equal(got.tensors["x"], PAYLOAD.tensors["x"])
    with pytest.raises(errors.FailedPreconditionError), worker.store.read("k", handle.token):
        pass


def test_removals_are_repeated_a_few_times_then_counted() -> None:
    objects = MemoryStore()
    objects.unreachable = True
    remover = Remover("test", objects.remove, first_pause_s=0.001)
    done = threading.Event()
    remover.add("k1", done.set)
    assert done.wait(30)
    remover.close(30)
    assert (objects.removals, remover.left_behind, remover.pending) == (ATTEMPTS, 1, 0)
    late = threading.Event()
    remover.add("k2", late.set)
    assert late.is_set()
    assert remover.left_behind == 2


def test_closing_a_remover_finishes_what_waits() -> None:
    objects = MemoryStore()
    objects.objects = {f"k{i}": b"x" for i in range(250)}
    objects.gate.clear()
    remover = Remover("test", objects.remove)
    done: list[str] = []
    for key in list(objects.objects):
        remover.add(key, functools.partial(done.append, key))
    objects.gate.set()
    remover.close(30)
    assert (len(done), objects.objects, remover.left_behind) == (250, {}, 0)


class _Piece:
    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes


def test_buffers_are_used_again_unless_they_were_set_aside() -> None:
    dropped: list[_Piece] = []
    pool = BufferPool(_Piece, dropped.append, keep_bytes=256 << 10)
    first = pool.take(100_000)
    assert first.size_bytes == 128 << 10
    pool.give_back(first)
    assert pool.take(70_000) is first
    large = pool.take((64 << 20) + 64)
    assert large.size_bytes == 72 << 20
    pool.give_back(large)
    assert dropped == [large], "more than is kept"
    pool.set_aside(first)
    assert (pool.set_aside_bytes, pool.take(100_000) is first) == (128 << 10, False)
    late = pool.take(1)
    pool.close()
    assert first in dropped
    pool.give_back(late)
    assert late in dropped


def test_a_client_ends_after_its_calls() -> None:
    calls = Calls("x")
    with calls.one():
        assert not calls.end(0.01)
    assert calls.end(30)
    with pytest.raises(errors.UnavailableError), calls.one():
        pass


def test_connectors_of_a_process_share_a_client() -> None:
    made = [share("key", MemoryStore), share("key", MemoryStore)]
    other = share("other key", MemoryStore)
    made[0].put("k", 1, lambda memory: None)
    assert bytes(made[1].open("k", 1).data) == b"\0"
    with pytest.raises(errors.NotFoundError):
        other.open("k", 1)
    made[0].close()
    made[0].close()
    assert made[1].healthy()
    with pytest.raises(errors.UnavailableError):
        made[0].remove(["k"])
    assert not made[0].healthy()
    made[1].close()
    other.close()
    fresh = share("key", MemoryStore)
    with pytest.raises(errors.NotFoundError):
        fresh.open("k", 1)
    fresh.close()


def test_defaults_are_those_of_the_reference_connectors() -> None:
    mooncake = MooncakeStoreOptions()
    assert (mooncake.host, mooncake.master) == ("127.0.0.1", "127.0.0.1:50051")
    assert mooncake.metadata_server == "http://127.0.0.1:8080/metadata"
    assert (mooncake.proto, mooncake.rdma, mooncake.localbuf, mooncake.segment) == ("tcp", "", 64 << 20, 512 << 20)
    assert mooncake.hard_pin
    assert YuanrongOptions().get_sub_timeout_ms == 1000


@pytest.mark.parametrize(
    ("kind", "extra", "message"),
    [
        ("mooncake_store", {"master": 7}, "extra.master: must be a string"),
        ("mooncake_store", {"mster": "x"}, "did you mean 'master'"),
        ("mooncake_store", {"segment": -1}, "extra.segment: must be 0"),
        ("yuanrong", {"get_sub_timeout_ms": -1}, "extra.get_sub_timeout_ms: must be 0"),
        ("yuanrong", {"port": 0}, "extra.port: must be 1 to 65535"),
    ],
)
def test_wrong_options_are_named(kind: str, extra: dict[str, Any], message: str) -> None:
    cls = MooncakeStoreOptions if kind == "mooncake_store" else YuanrongOptions
    with pytest.raises(errors.InvalidRequestError, match=re.escape(message)):
        parse_options(cls, kind, extra)


@pytest.mark.parametrize(("kind", "package"), [("mooncake_store", "mooncake"), ("yuanrong", "yr")])
def test_missing_library_is_named_with_its_extra(kind: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    store = HandleStore(types_pb2.ReplicaRef, str)
    with pytest.raises(
        errors.FailedPreconditionError, match=re.escape(f"omniplane[{kind.replace('_', '-')}]")
    ) as caught:
        create_connector(kind, ConnectorContext(store, lambda handle: _nothing(), 0))
    assert caught.value.reason == "LIBRARY_MISSING"
    assert caught.value.metadata["library"].startswith(package)


async def _nothing() -> AsyncIterator[bytes]:
    yield b""
