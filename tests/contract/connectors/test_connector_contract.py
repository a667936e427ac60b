"""What every connector does, on each of them: one body."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import numpy as np
import pytest
from google.protobuf.message import DecodeError

from connectors import dtypes
from connectors.payload import JsonValue, Payload
from omni.v1 import transfer_pb2
from omnicore import errors
from omnicore.clock import ManualClock
from tests.contract.connectors.conftest import Factories, Traits, settled
from tests.contract.connectors.peer import EDGE, Peer, running_peer, tensor
from tests.support.processes import wait_until

KIB = 1024


def edge(request_id: str = "req1") -> transfer_pb2.EdgeRef:
    return transfer_pb2.EdgeRef(request_id=request_id, from_stage=0, to_stage=1)


def payload(size: int = KIB, seed: int = 1) -> Payload:
    return Payload(tensors={"x": tensor(size, seed)})


async def read(peer: Peer, handle: transfer_pb2.TransferHandle) -> Payload:
    """A copy of what is behind the handle."""
    async with peer.connectors.get(handle) as got:
        return Payload({name: t.copy() for name, t in got.tensors.items()}, got.text, got.metadata)


@pytest.mark.parametrize("name", list(dtypes.DTYPES))
async def test_every_dtype_arrives_as_it_left(kind: str, producer: Peer, consumer: Peer, name: str) -> None:
    dtype = dtypes.DTYPES[name]
    sent = tensor(60 * dtype.itemsize, 3)
    values = (sent % 2).astype(np.bool_)[:60] if name == "bool" else np.frombuffer(sent, dtype)
    handle = await producer.connectors.put(kind, "k", EDGE, 0, Payload({"x": values.reshape(3, 4, 5)}))
    async with consumer.connectors.get(handle) as got:
        array = got.tensors["x"]
        assert array.shape == (3, 4, 5)
        assert dtypes.dtype_name(array.dtype) == name
        assert array.tobytes() == values.tobytes()
        assert not array.flags.writeable
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.parametrize(
    "sent",
    [
        Payload(text="héllo", metadata={"final": True}),
        Payload(text=""),
        Payload(text="long " * 20000),
        Payload(),
        Payload(metadata={"only": ["facts", {"n": 1}]}),
        Payload({"empty": np.zeros((0, 4), np.float32), "scalar": np.array(7)}, metadata={"sample_rate_hz": 24000}),
        Payload({f"t{i}": np.full((i, 3), i, np.int16) for i in range(40)}),
    ],
    ids=["text", "empty text", "long text", "nothing", "facts", "odd shapes", "many tensors"],
)
async def test_every_kind_of_payload_arrives(kind: str, producer: Peer, consumer: Peer, sent: Payload) -> None:
    handle = await producer.connectors.put(kind, "k", EDGE, 4, sent)
    got = await read(consumer, transfer_pb2.TransferHandle.FromString(handle.SerializeToString()))
    assert (got.text, got.metadata) == (sent.text, sent.metadata)
    assert list(got.tensors) == list(sent.tensors)
    for name, array in sent.tensors.items():
        np.testing.assert_array_equal(got.tensors[name], array, strict=True)
    assert handle.sequence == 4
    assert producer.store.release("k", handle.token)


async def test_each_consumer_reads_and_the_last_frees(kind: str, producer: Peer, consumer: Peer) -> None:
    free = producer.connectors.usage().free_bytes
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload(), consumers=3)
    for left in (2, 1, 0):
        np.testing.assert_array_equal((await read(consumer, handle)).tensors["x"], tensor(KIB, 1))
        assert producer.connectors.usage().free_bytes < free
        assert producer.store.release("k", handle.token) == (left == 0)
    await settled(producer, free)
    assert not producer.store.release("k", handle.token), "double release is harmless"
    with pytest.raises(errors.NotFoundError):
        await read(consumer, handle)


async def test_same_key_twice_is_refused_and_the_first_stays(kind: str, producer: Peer, consumer: Peer) -> None:
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload(seed=1))
    with pytest.raises(errors.AlreadyExistsError):
        await producer.connectors.put(kind, "k", edge("req2"), 0, payload(seed=2))
    np.testing.assert_array_equal((await read(consumer, handle)).tensors["x"], tensor(KIB, 1))


async def test_wrong_token_neither_reads_nor_frees(kind: str, producer: Peer, consumer: Peer) -> None:
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload())
    forged = transfer_pb2.TransferHandle.FromString(handle.SerializeToString())
    forged.token = bytes(16)
    with pytest.raises((errors.PermissionDeniedError, errors.NotFoundError)):
        await read(consumer, forged)
    with pytest.raises(errors.PermissionDeniedError):
        producer.store.release("k", forged.token)
    assert (await read(consumer, handle)).tensors


async def test_expired_data_is_not_read(kind: str, producer: Peer, consumer: Peer, clock: ManualClock) -> None:
    free = producer.connectors.usage().free_bytes
    old = await producer.connectors.put(kind, "old", EDGE, 0, payload(seed=1))
    clock.advance(11)
    assert producer.connectors.sweep() == 1
    await settled(producer, free)
    new = await producer.connectors.put(kind, "new", EDGE, 0, payload(seed=2))  # most likely in the same place
    with pytest.raises(errors.NotFoundError):
        await read(consumer, old)
    np.testing.assert_array_equal((await read(consumer, new)).tensors["x"], tensor(KIB, 2))


async def test_claimed_data_outlives_its_time(kind: str, producer: Peer, consumer: Peer, clock: ManualClock) -> None:
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload())
    assert await consumer.claim(handle) == 0
    clock.advance(30)
    assert producer.connectors.sweep() == 0
    np.testing.assert_array_equal((await read(consumer, handle)).tensors["x"], tensor(KIB, 1))
    assert producer.store.release("k", handle.token)


async def test_cleanup_frees_one_request_exactly(kind: str, producer: Peer, consumer: Peer) -> None:
    handles = {
        request: await producer.connectors.put(kind, f"key of {request}", edge(request), 0, payload())
        for request in ("req1", "req11", "xreq1", "req1_x")
    }
    free = producer.connectors.usage().free_bytes
    assert producer.store.cleanup("req1") == 1
    assert producer.store.cleanup("req1") == 0
    await wait_until(lambda: producer.connectors.usage().free_bytes > free, what="room of what was cleaned up")
    with pytest.raises(errors.NotFoundError):
        await read(consumer, handles.pop("req1"))
    for handle in handles.values():
        assert (await read(consumer, handle)).tensors


async def test_full_pool_makes_put_wait_then_fail(kind: str, traits: Traits, producer: Peer) -> None:
    big = payload(600 * KIB)
    first = await producer.connectors.put(kind, "first", EDGE, 0, big)
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        await producer.connectors.put(kind, "second", EDGE, 0, big)
    assert (caught.value.reason, caught.value.retry_after_s) == ("POOL_FULL", 2.0 if traits.frees_later else 1.0)
    waiting = asyncio.ensure_future(producer.connectors.put(kind, "third", EDGE, 0, big))
    await asyncio.sleep(0)
    assert not waiting.done()
    producer.store.release("first", first.token)
    third = await waiting
    assert producer.store.release("third", third.token)
    with pytest.raises(errors.ResourceExhaustedError) as caught:
        await producer.connectors.put(kind, "huge", EDGE, 0, payload(1100 * KIB))
    assert caught.value.reason == "LARGER_THAN_POOL"


async def test_cancelled_and_cleaned_up_puts_leave_nothing(kind: str, producer: Peer) -> None:
    free = producer.connectors.usage().free_bytes
    first = await producer.connectors.put(kind, "first", EDGE, 0, payload(900 * KIB))
    cancelled = asyncio.ensure_future(producer.connectors.put(kind, "second", EDGE, 0, payload(900 * KIB)))
    cleaned = asyncio.ensure_future(producer.connectors.put(kind, "third", edge("gone"), 0, payload(900 * KIB)))
    await asyncio.sleep(0)
    cancelled.cancel()
    producer.store.cleanup("gone")
    producer.store.release("first", first.token)
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    with pytest.raises(errors.RequestCancelledError):
        await cleaned
    await settled(producer, free)
    assert producer.connectors.usage().handles == 0
    again = await producer.connectors.put(kind, "second", EDGE, 0, payload())
    assert producer.store.release("second", again.token)


async def test_stale_epoch_is_refused(kind: str, producer: Peer, consumer: Peer) -> None:
    free = producer.connectors.usage().free_bytes
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload())
    producer.ref.epoch += 1
    assert producer.connectors.sweep() == 1
    await settled(producer, free)
    with pytest.raises((errors.FailedPreconditionError, errors.NotFoundError)):
        await read(consumer, handle)


async def test_closed_connectors_take_and_give_nothing(kind: str, producer: Peer, consumer: Peer) -> None:
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload())
    waiting = asyncio.ensure_future(producer.connectors.put(kind, "w", EDGE, 0, payload(1023 * KIB + 1)))
    await asyncio.sleep(0)
    for _ in range(3):
        await producer.connectors.close()
    with pytest.raises(errors.UnavailableError):
        await waiting
    with pytest.raises(errors.UnavailableError):
        await producer.connectors.put(kind, "k2", EDGE, 0, payload())
    with pytest.raises((errors.UnavailableError, errors.NotFoundError)):
        await read(consumer, handle)
    await consumer.connectors.close()
    with pytest.raises(errors.UnavailableError):
        await read(consumer, handle)


async def test_data_freed_while_it_is_read_is_an_error_or_a_copy(
    kind: str, traits: Traits, producer: Peer, consumer: Peer
) -> None:
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload(seed=1))
    if traits.reads_copies:
        async with consumer.connectors.get(handle) as got:
            producer.store.cleanup("req1")
            np.testing.assert_array_equal(got.tensors["x"], tensor(KIB, 1))
        return

    async def read_too_long() -> None:
        async with consumer.connectors.get(handle):
            producer.store.cleanup("req1")
            await producer.connectors.put(kind, "other", EDGE, 0, payload(seed=2))

    with pytest.raises(errors.DataLossError) as caught:
        await read_too_long()
    assert caught.value.reason == "RELEASED_WHILE_READ"


async def test_errors_of_the_reader_are_its_own(kind: str, producer: Peer, consumer: Peer) -> None:
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload())

    async def fail() -> None:
        async with consumer.connectors.get(handle):
            producer.store.cleanup("req1")
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        await fail()


def numeric_fields(message: Any, path: str = "") -> list[tuple[str, Any, str, int | None]]:
    """Every number in a message, set or not: its path, the message that has it, field name and index."""
    found: list[tuple[str, Any, str, int | None]] = []
    for field in message.DESCRIPTOR.fields:
        value, name = getattr(message, field.name), f"{path}{field.name}"
        if field.type == field.TYPE_MESSAGE:
            for item in value if field.is_repeated else [value] if message.HasField(field.name) else []:
                found += numeric_fields(item, f"{name}.")
        elif isinstance(value, int):
            found.append((name, message, field.name, None))
        elif field.is_repeated and field.type != field.TYPE_STRING:
            found += [(f"{name}[{i}]", message, field.name, i) for i in range(len(value))]
    return found


async def test_no_wrong_number_in_a_handle_gives_other_data(kind: str, producer: Peer, consumer: Peer) -> None:
    sent = Payload({"a": tensor(300, 1).reshape(3, 100), "b": tensor(800, 2).view(np.float64)})
    await producer.connectors.put(kind, "neighbour", EDGE, 0, payload(4 * KIB))
    handle = await producer.connectors.put(kind, "k", EDGE, 1, sent)
    intact = handle.SerializeToString()
    paths = [path for path, *_ in numeric_fields(handle)]
    assert {"size_bytes", "crc32", "owner.epoch", "edge.attempt", "tensors.shape[0]", "tensors.offset_bytes"} <= {
        *paths
    }
    assert (kind != "shm") or "shm.offset_bytes" in paths
    refused = 0
    for number in range(len(paths)):
        for new in (0, 1, 63, 64, 4096, 2**31, 2**32 - 1, 2**63, 2**64 - 1, "+1", "-1", "+64", "*2"):
            changed = transfer_pb2.TransferHandle.FromString(intact)
            path, message, name, index = numeric_fields(changed)[number]
            old = getattr(message, name) if index is None else getattr(message, name)[index]
            value = new if isinstance(new, int) else {"+1": old + 1, "-1": old - 1, "+64": old + 64, "*2": old * 2}[new]
            try:
                if index is None:
                    setattr(message, name, value)
                else:
                    getattr(message, name)[index] = value
            except ValueError:
                continue  # does not fit the field, so it cannot arrive
            try:
                got = await read(consumer, changed)
            except errors.OmniError:
                refused += 1
                continue
            # What does not say which bytes are meant may be ignored; the data must be right then.
            assert all(got.tensors[key].tobytes() == sent.tensors[key].tobytes() for key in sent.tensors), path
            assert value == old or not path.startswith(("size_bytes", "tensors", "shm.offset")), f"{path}={value}"
    assert refused > 50
    assert (await read(consumer, handle)).tensors.keys() == sent.tensors.keys()


async def test_truncated_handles_are_refused(kind: str, producer: Peer, consumer: Peer) -> None:
    handle = await producer.connectors.put(kind, "k", EDGE, 0, payload())
    raw = handle.SerializeToString()
    for end in range(0, len(raw), 3):
        try:
            cut = transfer_pb2.TransferHandle.FromString(raw[:end])
        except DecodeError:
            continue
        try:
            got = await read(consumer, cut)
        except errors.OmniError:
            continue
        assert got.tensors["x"].tobytes() == tensor(KIB, 1).tobytes()


async def test_checksum_finds_a_flipped_byte(
    kind: str, extra: dict[str, JsonValue], factories: Factories, consumer: Peer
) -> None:
    threshold = "shm_threshold_bytes" if kind == "shm" else "inline_bytes"
    options = {kind: {**extra, "checksum": True, threshold: 128}}
    async with running_peer(options=options, factories=factories(True)) as producer:
        for key, size in (("inline", 100), ("behind", 5 * KIB), ("text", 0)):
            sent = payload(size) if size else Payload(text="text")
            handle = await producer.connectors.put(kind, key, EDGE, 0, sent)
            assert handle.HasField("crc32")
            assert (handle.WhichOneof("backend") == "inline") == (key != "behind")
            assert (await read(consumer, handle)).tensors.keys() == sent.tensors.keys()
            handle.crc32 ^= 1
            with pytest.raises(errors.DataLossError) as caught:
                await read(consumer, handle)
            assert caught.value.reason == "WRONG_CHECKSUM"


async def test_many_at_once_are_never_mixed(kind: str, producer: Peer, consumer: Peer) -> None:
    rng = random.Random(7)
    free = producer.connectors.usage().free_bytes

    async def one(number: int) -> None:
        size, consumers = rng.randrange(1, 60 * KIB), rng.randrange(1, 4)
        handle = await producer.connectors.put(
            kind, f"k{number}", edge(f"r{number}"), 0, payload(size, number), consumers
        )
        for _ in range(consumers):
            async with consumer.connectors.get(handle) as got:
                await asyncio.sleep(0)
                assert got.tensors["x"].tobytes() == tensor(size, number).tobytes()
            producer.store.release(handle.key, handle.token)

    for start in range(0, 150, 15):
        async with asyncio.TaskGroup() as group:
            for number in range(start, start + 15):
                group.create_task(one(number))
    await settled(producer, free)
    assert producer.connectors.usage().handles == 0


async def test_large_payload_is_copied_beside_the_event_loop(
    kind: str, extra: dict[str, JsonValue], factories: Factories, consumer: Peer
) -> None:
    size = 9 << 20
    options = {kind: {**extra, "checksum": True}}
    async with running_peer(pool_bytes=16 << 20, options=options, factories=factories(True)) as producer:
        free = producer.connectors.usage().free_bytes
        handle = await producer.connectors.put(kind, "k", EDGE, 0, payload(size))
        assert (await read(consumer, handle)).tensors["x"].tobytes() == tensor(size, 1).tobytes()
        producer.store.release("k", handle.token)
        for attempt in range(40):  # until it is cancelled while it copies: a thread is sometimes quicker than we are
            cancelled = asyncio.ensure_future(producer.connectors.put(kind, "c", EDGE, 0, payload(size)))
            await asyncio.sleep(0.001 if attempt < 20 else 0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            if cancelled.cancelled():
                break
            producer.store.release("c", cancelled.result().token)
        assert cancelled.cancelled()
        async with asyncio.timeout(30):
            while producer.connectors.usage().free_bytes != free:  # once the copying thread has finished
                await asyncio.sleep(0.005)
        assert producer.connectors.usage().handles == 0


async def test_headers_that_are_not_the_owners_are_refused(kind: str, producer: Peer, consumer: Peer) -> None:
    """Of the same length, so that only their meaning differs."""
    sent = Payload({"x": np.arange(6, dtype=np.int32).reshape(2, 3)})
    handle = await producer.connectors.put(kind, "k", EDGE, 0, sent)
    altered = []
    for change in ("dtype", "shape", "name", "sequence"):
        other = transfer_pb2.TransferHandle.FromString(handle.SerializeToString())
        spec = other.tensors[0]
        if change == "dtype":
            spec.dtype = "float32"
        elif change == "shape":
            spec.shape[:] = [3, 2]
        elif change == "name":
            spec.name = "y"
        else:
            other.sequence += 1
        altered.append(other)
    for other in altered:
        with pytest.raises((errors.DataLossError, errors.NotFoundError)):
            await read(consumer, other)
    got = await read(consumer, handle)
    np.testing.assert_array_equal(got.tensors["x"], sent.tensors["x"], strict=True)
