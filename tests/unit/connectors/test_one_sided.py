"""The connector over transfer engines: what reaches the engine, and what becomes of memory when reads fail."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from connectors.engines.base import TransferFailedError
from connectors.handles import HandleStore
from connectors.one_sided import OneSidedConnector
from connectors.options import OneSidedOptions
from connectors.payload import Payload
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from omnicore.clock import SYSTEM_CLOCK, Clock
from tests.doubles.transfer_engine import MemoryEngine
from tests.support.processes import wait_until

EDGE = transfer_pb2.EdgeRef(request_id="req1", from_stage=0, to_stage=1)
REF = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="p"), replica_id=1, epoch=5)
MIB = 1 << 20
POOL = 4 * MIB


class Pair:
    """A producer and a consumer."""

    def __init__(
        self,
        *,
        ordered: bool = True,
        takes_unregistered: bool = False,
        clock: Clock = SYSTEM_CLOCK,
        **options: Any,
    ) -> None:
        self.owner = MemoryEngine(ordered=ordered)
        self.engine = MemoryEngine(ordered=ordered, takes_unregistered=takes_unregistered)
        self.store = HandleStore(lambda: REF, lambda: "h:1", clock=clock)
        chosen = OneSidedOptions(**{"inline_bytes": 0, "receive_pool_bytes": POOL, **options})
        self.producer = OneSidedConnector("test", self.store, self.owner, chosen, pool_bytes=POOL)
        self.consumer = OneSidedConnector(
            "test", HandleStore(lambda: REF, lambda: "h:2"), self.engine, chosen, pool_bytes=0
        )

    async def put(self, key: str = "k", size: int = 3 * MIB, seed: int = 1) -> transfer_pb2.TransferHandle:
        return await self.producer.put(key, EDGE, 0, Payload({"x": data(size, seed)}))

    async def read(self, handle: transfer_pb2.TransferHandle) -> Any:
        async with self.consumer.get(handle) as got:
            return got.tensors["x"].copy()

    @property
    def free(self) -> int:
        return self.consumer.receive_usage().free_bytes

    @property
    def quarantined(self) -> int:
        return self.consumer.receive_usage().reads.quarantined_bytes


def data(size: int, seed: int = 1) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


@contextlib.asynccontextmanager
async def pair(**options: Any) -> AsyncIterator[Pair]:
    """Ends with everything given back."""
    made = Pair(**options)
    yield made
    await wait_until(lambda: made.free == POOL, what="the receive pool to be whole")
    await made.consumer.close()
    await made.producer.close()
    assert made.producer.usage().free_bytes == made.producer.usage().pool_bytes
    assert (made.owner.registered_bytes, made.engine.registered_bytes) == (0, 0)
    assert (made.owner.closed, made.engine.closed) == (1, 1)


async def test_data_and_trailer_come_in_one_read() -> None:
    async with pair() as ends:
        handle = await ends.put(size=1000)
        assert (await ends.read(handle) == data(1000)).all()
        (call,) = ends.engine.calls
        (piece,) = call.pieces
        assert (piece.remote_offset, piece.size_bytes) == (handle.engine.offset_bytes, 1024 + 64)
        assert ends.consumer.offer().address == ends.engine.session
        assert ends.consumer.offer().backend == "memory"


@pytest.mark.parametrize("ordered", [True, False])
async def test_data_freed_and_used_again_while_it_is_read_is_never_given_out(ordered: bool) -> None:
    async with pair(ordered=ordered) as ends:
        handle = await ends.put()

        def free() -> None:
            ends.engine.between = None
            ends.store.cleanup("req1")

        ends.engine.between = free
        with pytest.raises((errors.NotFoundError, errors.DataLossError)) as caught:
            await ends.read(handle)
        assert caught.value.reason == ("HANDLE_NOT_FOUND" if ordered else "RELEASED_WHILE_READ")
        with pytest.raises(errors.NotFoundError):
            await ends.read(handle)
        again = await ends.put(seed=2)
        assert again.engine.offset_bytes == handle.engine.offset_bytes
        with pytest.raises(errors.NotFoundError):
            await ends.read(handle)
        assert (await ends.read(again) == data(3 * MIB, 2)).all()
        ends.store.cleanup("req1")


async def test_an_unfenced_failure_keeps_the_buffer_until_the_fence() -> None:
    fenced = threading.Event()
    async with pair(get_timeout_s=60.0) as ends:
        handle = await ends.put()

        def fail() -> None:
            ends.engine.before = None
            raise TransferFailedError("it goes on", fenced=False)

        ends.engine.before, ends.engine.on_fence = fail, lambda: (fenced.wait(), None)[1]
        with pytest.raises(TransferFailedError):
            await ends.read(handle)
        await wait_until(lambda: ends.engine.fences == 1, what="a fence")
        assert ends.consumer.usage().quarantined_bytes == ends.quarantined > 3 * MIB
        reading = asyncio.ensure_future(ends.read(handle))  # needs the same room
        await asyncio.sleep(0.05)
        assert not reading.done()
        assert len(ends.engine.calls) == 1
        fenced.set()
        assert (await reading == data(3 * MIB)).all()
        assert ends.quarantined == 0
        stats = ends.consumer.receive_usage().reads
        assert (stats.failures, stats.fences) == (1, 1)
        ends.store.cleanup("req1")


async def test_a_fence_that_fails_costs_the_memory_and_nothing_else() -> None:
    ends = Pair()
    handle = await ends.put(size=MIB)

    def fail() -> None:
        raise RuntimeError("native code says something odd")

    ends.engine.before = ends.engine.on_fence = fail
    with pytest.raises(RuntimeError, match="odd"):
        await ends.read(handle)
    await wait_until(lambda: ends.engine.fences == 1, what="a fence")
    ends.engine.before = None
    assert (await ends.read(handle) == data(MIB)).all()
    assert ends.quarantined > MIB
    await ends.consumer.close()
    await ends.producer.close()


async def hanging(ends: Pair, handle: transfer_pb2.TransferHandle) -> asyncio.Future[Any]:
    """A read that has reached the engine, which hangs."""
    while True:
        reading = asyncio.ensure_future(ends.read(handle))

        def over(reading: asyncio.Future[Any] = reading) -> bool:
            return bool(ends.engine.calls) or reading.done()

        await wait_until(over, what="the read to begin or to be given up")
        if ends.engine.calls:
            return reading
        assert isinstance(reading.exception(), errors.UnavailableError)  # a slow machine: its time was up before


async def test_a_read_that_hangs_is_given_up_and_its_buffer_comes_back_when_it_returns() -> None:
    go_on = threading.Event()
    async with pair(get_timeout_s=0.2) as ends:
        handle = await ends.put()
        ends.engine.before = lambda: (go_on.wait(), None)[1]
        with pytest.raises(errors.UnavailableError) as caught:
            await (await hanging(ends, handle))
        assert caught.value.reason == "TRANSFER_TIMEOUT"
        with pytest.raises(errors.ResourceExhaustedError) as full:  # nobody else may have that memory
            await ends.read(handle)
        assert full.value.reason == "POOL_FULL"
        small = await ends.put("small", 1000)
        with pytest.raises(errors.UnavailableError):
            await ends.read(small)
        assert ends.consumer.sweep() == 0, "a peer that is being read is not forgotten"
        ends.engine.before = None
        go_on.set()
        await wait_until(lambda: ends.free == POOL, what="the buffer")
        assert ends.engine.fences == 0, "it ended well"
        assert ends.consumer.sweep() == 1
        await wait_until(lambda: ends.engine.forgotten == [ends.owner.session], what="the peer to be forgotten")
        ends.store.cleanup("req1")


async def test_waiting_behind_a_read_that_hangs_ends_without_having_begun() -> None:
    go_on = threading.Event()
    async with pair(get_timeout_s=0.2) as ends:
        handles = [await ends.put(f"k{i}", 1000) for i in range(3)]
        ends.engine.before = lambda: (go_on.wait(), None)[1]
        first = await hanging(ends, handles[0])
        results = await asyncio.gather(first, *map(ends.read, handles[1:]), return_exceptions=True)
        assert [type(result) for result in results] == [errors.UnavailableError] * 3
        assert len(ends.engine.calls) == 1
        assert ends.free == POOL - 4096, "only what was begun is kept"
        go_on.set()
        ends.store.cleanup("req1")


async def test_a_cancelled_reader_leaves_nothing_behind() -> None:
    go_on = threading.Event()
    async with pair() as ends:
        handle = await ends.put()
        ends.engine.before = lambda: (go_on.wait(), None)[1]
        reading = asyncio.ensure_future(ends.read(handle))
        await wait_until(lambda: len(ends.engine.calls) == 1, what="the read to begin")
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert ends.free < POOL
        go_on.set()
        await wait_until(lambda: ends.free == POOL, what="the buffer")
        ends.store.cleanup("req1")


async def test_small_reads_do_not_wait_behind_large_ones() -> None:
    go_on = threading.Event()
    async with pair() as ends:
        large, small = await ends.put("large", 2 * MIB), await ends.put("small", 1000)

        def wait_if_large() -> None:
            if ends.engine.calls[-1].pieces[0].size_bytes > MIB:
                go_on.wait()

        ends.engine.before = wait_if_large
        reading = asyncio.ensure_future(ends.read(large))
        await wait_until(lambda: len(ends.engine.calls) == 1, what="the large read to begin")
        assert (await ends.read(small) == data(1000)).all()
        go_on.set()
        assert (await reading == data(2 * MIB)).all()
        ends.store.cleanup("req1")


async def test_readers_queue_for_room_and_larger_than_the_pool_is_refused_at_once() -> None:
    async with pair(get_timeout_s=60.0, pool_bytes=2 * POOL) as ends:
        handles = [await ends.put(f"k{i}", 3 * MIB // 2, i) for i in range(4)]
        async with ends.consumer.get(handles[0]), ends.consumer.get(handles[1]):
            waiting = [asyncio.ensure_future(ends.read(handle)) for handle in handles[2:]]
            await asyncio.sleep(0.02)
            assert not any(task.done() for task in waiting)
            assert len(ends.engine.calls) == 2
        for i, got in enumerate(await asyncio.gather(*waiting), 2):
            assert (got == data(3 * MIB // 2, i)).all()
        ends.store.cleanup("req1")
        large = await ends.put("large", POOL)
        before = len(ends.engine.calls)
        with pytest.raises(errors.ResourceExhaustedError, match="raise receive_pool_bytes") as caught:
            await ends.read(large)
        assert caught.value.reason == "LARGER_THAN_POOL"
        assert len(ends.engine.calls) == before
        ends.store.cleanup("req1")


async def test_closing_does_not_wait_for_a_read_that_hangs_but_for_the_engine() -> None:
    go_on = threading.Event()
    ends = Pair(get_timeout_s=60.0)
    handle = await ends.put()
    ends.engine.before = lambda: (go_on.wait(), None)[1]
    reading = asyncio.ensure_future(ends.read(handle))
    await wait_until(lambda: len(ends.engine.calls) == 1, what="the read to begin")
    await ends.consumer.close()
    await ends.consumer.close()
    assert ends.engine.closed == 1
    with pytest.raises(errors.UnavailableError):
        await ends.read(handle)
    go_on.set()
    with contextlib.suppress(errors.OmniError):
        await reading
    await ends.producer.close()
    with pytest.raises(errors.UnavailableError):
        await ends.put("again")


@pytest.mark.parametrize("direct", [True, False])
async def test_get_into_reads_straight_into_the_callers_memory_where_it_can(direct: bool) -> None:
    async with pair(takes_unregistered=direct) as ends:
        sent: dict[str, npt.NDArray[Any]] = {"a": data(MIB, 1).reshape(4, -1), "b": data(MIB, 2).view(np.float32)}
        handle = await ends.producer.put("k", EDGE, 0, Payload(sent, metadata={"n": 1}))
        into = {name: np.zeros_like(array) for name, array in sent.items()}
        await ends.consumer.get_into(handle, into)
        assert all(into[name].tobytes() == sent[name].tobytes() for name in sent)
        addresses = {piece.local_address for call in ends.engine.calls for piece in call.pieces}
        assert (into["a"].ctypes.data in addresses) == direct
        some = np.zeros(MIB // 4, np.float32)
        await ends.consumer.get_into(handle, {"b": some})
        assert some.tobytes() == sent["b"].tobytes()
        strided = np.zeros((4, MIB // 2), np.uint8)[:, ::2]
        await ends.consumer.get_into(handle, {"a": strided})
        assert (strided == sent["a"]).all()
        room = bytearray(handle.size_bytes)
        await ends.consumer.get_into(handle, memoryview(room))
        assert bytes(room) == sent["a"].tobytes() + sent["b"].tobytes()
        ends.store.cleanup("req1")


async def test_get_into_registered_memory_is_direct_and_released_data_leaves_it_alone() -> None:
    async with pair() as ends:
        handle = await ends.put()
        into = np.zeros(3 * MIB, np.uint8)
        with ends.consumer.registered(into.data):
            await ends.consumer.get_into(handle, {"x": into})
            assert (into == data(3 * MIB)).all()
            assert [len(call.pieces) for call in ends.engine.calls] == [1, 1, 1], "trailer, data, trailer"
            assert ends.engine.calls[1].pieces[0].local_address == into.ctypes.data
            into[:] = 0
            ends.store.cleanup("req1")
            with pytest.raises(errors.NotFoundError):
                await ends.consumer.get_into(handle, {"x": into})
            assert not into.any()
            handle = await ends.put()
            calls = len(ends.engine.calls)

            def free() -> None:
                if len(ends.engine.calls) == calls + 2:
                    ends.store.cleanup("req1")

            ends.engine.between = free
            with pytest.raises(errors.DataLossError) as caught:
                await ends.consumer.get_into(handle, {"x": into})
            assert caught.value.reason == "RELEASED_WHILE_READ"


async def test_get_into_raises_when_nothing_is_written_any_more_and_not_before() -> None:
    fenced = threading.Event()
    async with pair(takes_unregistered=True) as ends:
        handle = await ends.put()
        into = np.zeros(3 * MIB, np.uint8)

        def fail() -> None:
            if len(ends.engine.calls) == 2:
                raise TransferFailedError("it goes on", fenced=False)

        ends.engine.before, ends.engine.on_fence = fail, lambda: (fenced.wait(), None)[1]
        reading = asyncio.ensure_future(ends.consumer.get_into(handle, {"x": into}))
        await wait_until(lambda: ends.engine.fences == 1, what="a fence")
        reading.cancel()
        await asyncio.sleep(0.02)
        assert not reading.done()
        fenced.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
        ends.store.cleanup("req1")


async def test_targets_that_do_not_fit_are_named_and_nothing_is_written_or_read() -> None:
    async with pair(takes_unregistered=True) as ends:
        handle = await ends.put(size=MIB)
        locked = np.zeros(MIB, np.uint8)
        locked.flags.writeable = False
        wrong: list[tuple[Any, str]] = [
            ({"x": np.zeros(MIB - 1, np.uint8)}, "into['x']"),
            ({"x": np.zeros(MIB, np.int8)}, "into['x']"),
            ({"x": np.zeros((2, MIB // 2), np.uint8)}, "into['x']"),
            ({"x": locked}, "into['x']"),
            ({"x": bytearray(MIB)}, "into['x']"),
            ({"y": np.zeros(MIB, np.uint8)}, "into['y']"),
            (memoryview(bytes(MIB)), "into"),
            (memoryview(bytearray(MIB + 1)), "into"),
            (memoryview(bytearray(MIB - 1)), "into"),
            (memoryview(bytearray(2 * MIB))[::2], "into"),
        ]
        for into, field in wrong:
            with pytest.raises(errors.InvalidRequestError) as caught:
                await ends.consumer.get_into(handle, into)
            assert caught.value.violations[0].field == field
            arrays = into.values() if isinstance(into, dict) else [into]
            assert not any(np.frombuffer(bytes(array), np.uint8).any() for array in arrays)
        assert ends.engine.calls == []
        ends.store.cleanup("req1")


EXTREMES = [0, 1, 63, 64, 4096, POOL, POOL + 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
numbers = st.one_of(st.sampled_from(EXTREMES), st.integers(0, 2**64 - 1))
names = st.one_of(st.sampled_from(["", "test", "shm", "test\0", "é" * 300, "a" * 256]), st.text(max_size=20))
CHANGES = st.one_of(
    st.tuples(st.sampled_from(["region_address", "region_bytes", "offset_bytes"]), numbers),
    st.tuples(st.sampled_from(["connector", "session"]), names),
    st.tuples(st.sampled_from(["engine", "region"]), st.sampled_from([bytes(65537), bytes(1 << 20)])),
    st.tuples(st.just("size_bytes"), numbers),
    st.tuples(st.sampled_from(["tensor.size_bytes", "tensor.offset_bytes", "tensor.shape"]), numbers),
    st.tuples(st.just("tensor.dtype"), st.sampled_from(["", "utf8", "float32", "object", "O8"])),
)


@dataclasses.dataclass
class Standing:
    """A pair that many examples share, in a loop of its own."""

    loop: asyncio.AbstractEventLoop
    ends: Pair
    handle: bytes


@pytest.fixture(scope="module")
def standing() -> Iterator[Standing]:
    loop = asyncio.new_event_loop()
    ends = Pair(get_timeout_s=5.0)
    handle = loop.run_until_complete(ends.put(size=1000))
    yield Standing(loop, ends, handle.SerializeToString())
    loop.run_until_complete(ends.consumer.close())
    loop.run_until_complete(ends.producer.close())
    loop.close()


@given(changes=st.lists(CHANGES, min_size=1, max_size=3))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_malformed_handle_is_refused_before_any_byte_moves(
    standing: Standing, changes: list[tuple[str, Any]]
) -> None:
    handle = transfer_pb2.TransferHandle.FromString(standing.handle)
    for field, value in changes:
        if field == "tensor.shape":
            handle.tensors[0].shape[:] = [value]
        elif field.startswith("tensor."):
            setattr(handle.tensors[0], field.removeprefix("tensor."), value)
        else:
            setattr(handle if field == "size_bytes" else handle.engine, field, value)
    calls = standing.ends.engine.calls
    calls.clear()
    with contextlib.suppress(errors.OmniError):
        assert standing.loop.run_until_complete(standing.ends.read(handle)).tobytes() == data(1000).tobytes()
        assert handle.SerializeToString() == standing.handle
    region = handle.engine
    for call in calls:  # then it was a range of the region as the handle has it, and there was room for it
        (piece,) = call.pieces
        assert call.remote.session == region.session
        assert 0 < len(region.session.encode()) <= 255
        assert region.session.isprintable()
        assert max(len(region.engine), len(region.region)) <= 65536
        assert 0 < region.region_address <= region.region_address + region.region_bytes <= 2**63
        assert piece.remote_offset == region.offset_bytes
        assert piece.remote_offset % 64 == 0
        assert piece.remote_offset + piece.size_bytes <= region.region_bytes
        assert piece.size_bytes == -(-handle.size_bytes // 64) * 64 + 64 <= POOL
        assert handle.tensors[0].size_bytes == handle.size_bytes
