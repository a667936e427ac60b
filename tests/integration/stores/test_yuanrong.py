"""openYuanrong's store with its real worker: what its library leaves to its users."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from connectors.options import YuanrongOptions
from connectors.payload import Payload
from connectors.stores import factories
from connectors.stores.shared import SharedClient
from connectors.stores.yuanrong import YuanrongStore
from omni.v1 import transfer_pb2
from omnicore import errors
from tests.contract.connectors.peer import EDGE, running_peer, tensor
from tests.integration.stores.speech import assert_stages_hand_over
from tests.support.stores import MIB, YuanrongWorker

KIND = "yuanrong"


@pytest.fixture(scope="module")
def worker() -> Iterator[YuanrongWorker]:
    worker = YuanrongWorker(shared_memory_mib=64)
    worker.start()
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def store(worker: YuanrongWorker) -> Iterator[SharedClient]:
    store = factories.yuanrong_client(YuanrongOptions(**worker.extra()))
    yield store
    store.close()


def filled_with(value: int) -> Callable[[memoryview], None]:
    def fill(memory: memoryview) -> None:
        np.frombuffer(memory, np.uint8)[:] = value

    return fill


def read(store: SharedClient, key: str, size_bytes: int) -> bytes:
    with contextlib.closing(store.open(key, size_bytes)) as found:
        return bytes(found.data)


def test_a_key_in_use_is_an_error_and_its_object_stays(store: SharedClient) -> None:
    store.put("twice", 100, filled_with(1))
    with pytest.raises(errors.AlreadyExistsError):
        store.put("twice", 100, filled_with(2))
    assert read(store, "twice", 100) == bytes([1]) * 100
    store.remove(["twice"])


def test_missing_and_wrong_lengths_are_told_apart(store: SharedClient) -> None:
    with pytest.raises(errors.NotFoundError):
        store.open("never", 100)
    store.put("k", 2 * MIB, filled_with(3))
    for size in (99, 2 * MIB - 1, 2 * MIB + 1):
        with pytest.raises(errors.DataLossError):
            store.open("k", size)
    assert read(store, "k", 2 * MIB) == bytes([3]) * 2 * MIB
    store.remove(["k", "never"])
    with pytest.raises(errors.NotFoundError):
        store.open("k", 2 * MIB)


def test_keys_that_the_store_refuses_are_our_mistake(store: SharedClient) -> None:
    for key in ("with/slash", "with.dot", 256 * "x"):
        with pytest.raises(errors.InternalError):
            store.put(key, 10, filled_with(1))
    store.put(255 * "x", 10, filled_with(1))
    store.remove([255 * "x"])


def test_a_read_waits_for_an_object_as_long_as_it_is_told_to(worker: YuanrongWorker, store: SharedClient) -> None:
    patient = YuanrongStore(YuanrongOptions(**worker.extra(get_sub_timeout_ms=300)))
    try:
        assert patient.healthy()
        started_s = time.monotonic()
        with pytest.raises(errors.NotFoundError):
            patient.open("never", 10)
        assert time.monotonic() - started_s > 0.2
    finally:
        patient.close()
    assert not patient.healthy()
    with pytest.raises(errors.UnavailableError):
        patient.open("never", 10)


async def test_stages_hand_over_through_the_store(worker: YuanrongWorker, store: SharedClient) -> None:
    await assert_stages_hand_over(KIND, worker.extra(inline_bytes=0))


async def test_a_store_that_is_full_or_frozen_or_dead_stops_nobody(worker: YuanrongWorker) -> None:
    """The library waits with the interpreter in its hands; here that is another process's."""
    options = {KIND: worker.extra(inline_bytes=0, timeout_s=1.0, put_wait_s=0.5, connect_timeout_ms=500)}
    ticks: list[float] = []

    async def tick() -> None:
        while True:
            ticks.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def fails(doing: asyncio.Future[object]) -> errors.OmniError:
        ticks[:] = [begin_s := time.monotonic()]
        with pytest.raises(errors.OmniError) as caught:
            await doing
        ticks.append(time.monotonic())
        longest_s = max(later - earlier for earlier, later in itertools.pairwise(ticks))
        assert longest_s < max(0.8 * (ticks[-1] - begin_s), 0.2), "the event loop did not wait, too"
        return caught.value

    async with running_peer(options=options) as peer, asyncio.TaskGroup() as group:
        ticking = group.create_task(tick())

        def put(key: str, size: int) -> asyncio.Future[object]:
            return asyncio.ensure_future(
                peer.connectors.put(KIND, key, EDGE, 0, Payload({"x": np.zeros(size, np.uint8)}))
            )

        async def seen(handle: transfer_pb2.TransferHandle) -> object:
            async with peer.connectors.get(handle) as got:
                return got.tensors["x"].tobytes()

        async def until_it_works() -> transfer_pb2.TransferHandle:
            """A helper starts, and a second may be too short for that; a client that was missed connects anew."""
            async with asyncio.timeout(60):
                while True:
                    try:
                        handle = await peer.connectors.put(KIND, "k", EDGE, 0, Payload({"x": tensor(300_000, 1)}))
                        assert await seen(handle) == tensor(300_000, 1).tobytes()
                        return handle
                    except errors.UnavailableError:
                        await asyncio.sleep(0.05)
                    peer.store.cleanup("req1")

        handle = await until_it_works()

        # In which of the limits it ends depends on who is quicker.
        full = await fails(put("huge", 65 * MIB))
        assert isinstance(full, errors.ResourceExhaustedError | errors.UnavailableError)

        worker.signal(signal.SIGSTOP)
        frozen = await fails(asyncio.ensure_future(seen(handle)))
        assert isinstance(frozen, errors.UnavailableError)
        worker.signal(signal.SIGCONT)
        peer.store.cleanup("req1")
        await until_it_works()

        await asyncio.to_thread(worker.kill)
        with pytest.raises(errors.UnavailableError):
            await put("late", 300_000)
        assert not next(o.healthy for o in peer.connectors.offers() if o.name == KIND)
        ticking.cancel()
