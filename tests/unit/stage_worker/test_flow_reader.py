"""A reader whose producer is lost and replaced by one that makes the same chunks again: nothing twice, nothing left
out, and everything that was left behind is given back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from connectors.payload import Payload
from omni.v1 import transfer_pb2
from omni.v1 import transfer_service_pb2 as pb
from omnicore.errors import DataLossError, OmniError, RequestCancelledError, UnavailableError
from stage_worker.flow_reader import FlowReader, Peer
from stage_worker.reading import Reads
from stage_worker.transfer_metrics import TransferMetrics

PEER_LOST = UnavailableError("gone", reason="PEER_LOST")


class Stream:
    """A link, and what its readers told it."""

    def __init__(self, name: str) -> None:
        self.peer = Peer(0, 0, 1, "127.0.0.1:1", "", name)
        self.frames = 0
        self.readers: list[FlowReader] = []
        self.acks: list[int] = []
        self.cancels: list[int] = []
        self.reports: list[OmniError] = []

    def acknowledge(self, edge: transfer_pb2.EdgeRef, sequence: int, *, soon: bool) -> None:
        self.acks.append(sequence)

    def forget(self, reader: FlowReader) -> bool:
        if reader not in self.readers:
            return False
        self.readers.remove(reader)
        return True

    def cancel(self, edge: transfer_pb2.EdgeRef) -> None:
        self.cancels.append(edge.attempt)

    def report(self, reader: FlowReader, error: OmniError) -> None:
        self.reports.append(error)


class Reading:
    """A reader of a replaceable flow, its first producer and the one that takes its place."""

    def __init__(self, source_wait_s: float = 60) -> None:
        self.old, self.new = Stream("old"), Stream("new")
        self.edges = [transfer_pb2.EdgeRef(request_id="r", attempt=n, to_stage=1) for n in range(2)]
        self.unreadable: OmniError | None = None
        """What reading bytes fails with."""
        self.opening = asyncio.Event()
        """Bytes are being read."""
        self.read = asyncio.Event()
        """They may be."""
        self.read.set()
        reads = Reads(self.get, TransferMetrics("demo", dict, lambda: 0), chunk_timeout_s=7)
        self.reader = FlowReader(
            self.old, reads.begin(self.edges[0], "old"), 4, replaceable=True, source_wait_s=source_wait_s
        )
        self.old.readers.append(self.reader)

    @asynccontextmanager
    async def get(self, handle: transfer_pb2.TransferHandle) -> AsyncIterator[Payload]:
        self.opening.set()
        await self.read.wait()
        if self.unreadable is not None:
            raise self.unreadable
        yield Payload(text=handle.key)

    def send(self, *sequences: int, attempt: int = 0, inline: bool = True) -> None:
        for at in sequences:
            handle = transfer_pb2.TransferHandle(key=f"chunk {at}", edge=self.edges[attempt], sequence=at)
            if inline:
                handle.text, handle.size_bytes = handle.key, len(handle.key)
                handle.inline.SetInParent()
            self.reader.deliver(pb.Chunk(edge=self.edges[attempt], sequence=at, handle=handle))

    def end(self, sequence: int, error: OmniError | None = None) -> None:
        chunk = pb.Chunk(sequence=sequence, final=error is None)
        if error is not None:
            chunk.error.CopyFrom(error.to_status())
        self.reader.deliver(chunk)

    def move(self) -> int:
        first = self.reader.move_to(self.new, self.edges[1], 4)
        self.new.readers.append(self.reader)
        return first

    async def next(self) -> str:
        async with asyncio.timeout(30):
            payload = await anext(self.reader)
        assert payload.text is not None
        return payload.text

    async def begun(self) -> asyncio.Task[str]:
        """Somebody waits for the next chunk."""
        waiting = asyncio.create_task(self.next())
        await asyncio.sleep(0)
        return waiting


@pytest.mark.parametrize("how", ["link", "session", "moved at once"])
async def test_who_waits_for_a_chunk_gets_it_from_the_next_producer(how: str) -> None:
    one = Reading()
    one.send(0, 1)
    assert await one.next() == "chunk 0"
    assert await one.next() == "chunk 1"
    waiting = await one.begun()
    if how == "link":
        one.old.readers.clear()
        one.reader.lost(PEER_LOST)
    elif how == "session":
        one.end(2, RequestCancelledError("no gateway", reason="SESSION_BROKEN"))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert one.move() == 2
    assert one.old.cancels == ([0] if how == "moved at once" else [])
    one.send(2, attempt=1)
    assert await waiting == "chunk 2"
    one.end(3)
    with pytest.raises(StopAsyncIteration):
        await one.next()
    assert (one.old.acks, one.new.acks) == ([0, 1], [2])
    assert not one.new.readers
    await one.reader.aclose()
    assert not one.new.cancels


async def test_what_had_come_unread_comes_again() -> None:
    one = Reading()
    one.send(0, 1, 2)
    assert await one.next() == "chunk 0"
    assert one.move() == 1
    assert one.reader.outstanding == 1
    one.send(1, 2, attempt=1)
    assert [await one.next(), await one.next()] == ["chunk 1", "chunk 2"]
    await one.reader.aclose()
    assert one.new.cancels == [1]
    assert one.old.cancels == [0]


async def test_a_payload_in_use_is_given_back_to_whom_it_came_from_before_that_flow_is_left() -> None:
    one = Reading()
    one.send(0)
    await one.next()
    one.move()
    assert one.old.cancels == []
    assert not one.old.readers
    one.send(1, attempt=1)
    assert await one.next() == "chunk 1"
    assert one.old.cancels == [0]
    assert (one.old.acks, one.new.acks) == ([], [])
    await one.reader.aclose()
    assert (one.old.acks, one.new.acks) == ([], [1])


@pytest.mark.parametrize("readable", [True, False])
async def test_a_producer_that_is_replaced_while_a_chunk_of_it_is_read(readable: bool) -> None:
    one = Reading()
    one.read.clear()
    one.send(0, inline=False)
    waiting = await one.begun()
    await one.opening.wait()
    assert one.move() == 0
    assert one.old.cancels == [], "it may only have hung, and would free what is being read"
    if not readable:
        one.unreadable = UnavailableError("gone", reason="OWNER_GONE")
    one.read.set()
    one.send(0, attempt=1)
    one.send(1, attempt=1)
    assert await waiting == "chunk 0"
    assert await one.next() == "chunk 1"
    assert one.old.cancels == [0]
    assert one.old.acks == []
    assert one.new.acks == [0]
    await one.reader.aclose()
    assert one.old.cancels == [0]


async def test_a_producer_that_is_replaced_while_its_last_chunk_is_read_was_the_last() -> None:
    one = Reading()
    one.read.clear()
    handle = transfer_pb2.TransferHandle(key="chunk 0", edge=one.edges[0])
    one.reader.deliver(pb.Chunk(edge=one.edges[0], handle=handle, final=True))
    waiting = await one.begun()
    await one.opening.wait()
    one.move()
    one.read.set()
    assert await waiting == "chunk 0"
    with pytest.raises(StopAsyncIteration):
        await anext(one.reader)
    await one.reader.aclose()
    assert (one.old.cancels, one.new.cancels) == ([0], [1])
    assert not one.new.readers


async def test_who_stops_in_the_midst_of_a_chunk_of_a_replaced_producer_leaves_both() -> None:
    one = Reading()
    one.read.clear()
    one.send(0, inline=False)
    waiting = await one.begun()
    await one.opening.wait()
    one.move()
    waiting.cancel()
    await asyncio.wait({waiting})
    await one.reader.aclose()
    assert (one.old.cancels, one.new.cancels) == ([0], [1])


async def test_bytes_that_went_with_their_producer_come_again() -> None:
    one = Reading()
    one.unreadable = UnavailableError("gone", reason="OWNER_GONE")
    one.send(0, 1, inline=False)
    waiting = await one.begun()
    await one.opening.wait()
    while one.old.readers:
        await asyncio.sleep(0)
    assert not waiting.done()
    assert one.move() == 0
    one.send(0, attempt=1)
    assert await waiting == "chunk 0"
    assert not one.old.reports
    await one.reader.aclose()


async def test_bytes_that_are_wrong_are_an_error_as_ever() -> None:
    one = Reading()
    one.unreadable = DataLossError("overwritten", reason="RELEASED_WHILE_READ")
    one.send(0, inline=False)
    with pytest.raises(DataLossError, match="overwritten"):
        await one.next()
    assert len(one.old.reports) == 1
    assert one.reader.over
    await one.reader.aclose()


async def test_a_repetition_that_is_shorter_is_an_error() -> None:
    one = Reading()
    one.send(0, 1)
    assert [await one.next(), await one.next()] == ["chunk 0", "chunk 1"]
    assert one.move() == 2
    one.end(1)
    with pytest.raises(DataLossError, match="missing chunk 2"):
        await one.next()
    await one.reader.aclose()


async def test_nobody_takes_its_place() -> None:
    one = Reading(source_wait_s=0.01)
    one.send(0)
    one.reader.lost(PEER_LOST)
    with pytest.raises(UnavailableError) as lost:
        await one.next()
    assert lost.value.reason == "PEER_LOST"
    await one.reader.aclose()


async def test_left_while_it_waits_for_another_producer() -> None:
    one = Reading()
    one.reader.lost(PEER_LOST)
    await one.reader.aclose()
    await one.reader.aclose()
    assert one.reader.over


async def test_the_next_chunk_has_as_long_as_all_those_that_are_made_again() -> None:
    one = Reading()
    one.send(0, 1)
    assert [await one.next(), await one.next()] == ["chunk 0", "chunk 1"]
    one.move()
    assert one.reader.patience_s == 3 * 7
    one.send(2, attempt=1)
    await one.next()
    assert one.reader.patience_s == 7
    await one.reader.aclose()
