"""The producer's side of flows: order, credit, ends, and that every handle is released exactly once."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from omni.v1 import transfer_pb2, transfer_service_pb2
from omnicore.clock import ManualClock
from omnicore.errors import AlreadyExistsError, InternalError, NotFoundError, RequestCancelledError, from_status
from stage_worker.flows import FlowTable
from stage_worker.outbox import MAX_BACKLOG_CHUNKS, Outbox


class Consumer:
    def __init__(self) -> None:
        self.chunks: list[transfer_service_pb2.Chunk] = []

    def new_chunk(self, size_bytes: int) -> transfer_service_pb2.Chunk:
        self.chunks.append(transfer_service_pb2.Chunk())
        return self.chunks[-1]

    @property
    def sequences(self) -> list[int]:
        return [chunk.sequence for chunk in self.chunks if chunk.HasField("handle")]

    @property
    def ended(self) -> bool:
        return bool(self.chunks) and (self.chunks[-1].final or self.chunks[-1].HasField("error"))


class Producer:
    """A flow table with its clock, and a count of what was released."""

    def __init__(self) -> None:
        self.released: Counter[str] = Counter()
        self.clock = ManualClock()
        self.table = FlowTable(self._release, self.clock, open_wait_s=30, linger_s=60)

    def _release(self, key: str, token: bytes, claimant: str) -> None:
        assert claimant == "flow-1"
        assert token == b"token-" + key.encode()
        self.released[key] += 1

    def publish(self, outbox: Outbox, count: int = 1) -> None:
        for _ in range(count):
            key = f"{outbox.edge.request_id}/{outbox.next_sequence}"
            outbox.publish(
                transfer_pb2.TransferHandle(
                    key=key, token=b"token-" + key.encode(), sequence=outbox.next_sequence, edge=outbox.edge
                )
            )

    def assert_empty(self, published: int) -> None:
        assert len(self.table) == 0
        assert len(self.released) == published
        assert set(self.released.values()) <= {1}


def edge(request_id: str = "r", attempt: int = 0) -> transfer_pb2.EdgeRef:
    return transfer_pb2.EdgeRef(request_id=request_id, attempt=attempt, from_stage=0, to_stage=1)


def test_chunks_leave_under_credit_in_order_and_end_once() -> None:
    producer, consumer = Producer(), Consumer()
    outbox = producer.table.declare(edge())
    producer.table.open(edge(), 2, consumer)
    producer.publish(outbox, 5)
    assert consumer.sequences == [0, 1]
    producer.table.acknowledge(edge(), Consumer(), 1)  # another stream's, which reads something else
    assert consumer.sequences == [0, 1]
    producer.table.acknowledge(edge(), consumer, 0)
    assert consumer.sequences == [0, 1, 2]
    outbox.finish()
    assert not consumer.ended
    producer.table.acknowledge(edge(), consumer, 2)
    assert consumer.sequences == [0, 1, 2, 3, 4]
    assert [chunk.final for chunk in consumer.chunks] == [False] * 5 + [True]
    assert consumer.chunks[-1].sequence == 5
    producer.table.acknowledge(edge(), consumer, 4)
    producer.assert_empty(5)


def test_without_limit_everything_leaves_at_once() -> None:
    producer, consumer = Producer(), Consumer()
    outbox = producer.table.declare(edge())
    producer.table.open(edge(), -1, consumer)
    producer.publish(outbox, 100)
    assert consumer.sequences == list(range(100))


def test_a_flow_may_be_opened_before_its_call_comes() -> None:
    producer, consumer = Producer(), Consumer()
    producer.table.open(edge(), 4, consumer)
    producer.clock.advance(29)
    producer.table.sweep()
    assert not consumer.chunks
    outbox = producer.table.declare(edge())
    producer.publish(outbox)
    outbox.finish()
    assert consumer.sequences == [0]
    assert consumer.ended


def test_an_open_for_a_call_that_never_comes_is_told_so() -> None:
    producer, consumer = Producer(), Consumer()
    producer.table.open(edge(), 4, consumer)
    producer.clock.advance(31)
    producer.table.sweep()
    (chunk,) = consumer.chunks
    error = from_status(chunk.error)
    assert isinstance(error, NotFoundError)
    assert "0→1 of r" in error.message
    assert len(producer.table) == 0


def test_a_call_may_end_before_its_consumer_opens() -> None:
    producer, consumer = Producer(), Consumer()
    outbox = producer.table.declare(edge())
    producer.publish(outbox, 3)
    outbox.finish()
    producer.clock.advance(59)
    producer.table.sweep()
    producer.table.open(edge(), -1, consumer)
    assert consumer.sequences == [0, 1, 2]
    assert consumer.ended
    producer.table.acknowledge(edge(), consumer, 2)
    producer.assert_empty(3)


def test_data_that_nobody_comes_for_is_freed() -> None:
    producer = Producer()
    outbox = producer.table.declare(edge())
    producer.publish(outbox, 3)
    producer.clock.advance(1000)
    producer.table.sweep()
    assert not producer.released, "the call still runs: its data is kept"
    outbox.finish()
    producer.clock.advance(61)
    producer.table.sweep()
    producer.assert_empty(3)
    assert outbox.gone


def test_a_failure_reaches_the_consumer_at_once_and_later_frees_what_it_holds() -> None:
    producer, consumer = Producer(), Consumer()
    outbox = producer.table.declare(edge())
    producer.table.open(edge(), 1, consumer)
    producer.publish(outbox, 3)
    outbox.fail(InternalError("broken", metadata={"stage": 0}))
    error = from_status(consumer.chunks[-1].error)
    assert error.message == "broken"
    assert error.metadata["stage"] == "0"
    assert set(producer.released) == {"r/1", "r/2"}, "what the consumer reads is left to it"
    producer.table.cancel(edge(), consumer)
    producer.assert_empty(3)


def test_a_failure_is_kept_for_a_consumer_that_comes_late() -> None:
    producer, consumer = Producer(), Consumer()
    outbox = producer.table.declare(edge())
    outbox.fail(InternalError("broken"))
    producer.table.open(edge(), 1, consumer)
    assert from_status(consumer.chunks[0].error).message == "broken"
    assert len(producer.table) == 0


def test_an_abort_waits_for_nobody() -> None:
    producer, consumer = Producer(), Consumer()
    nobody = producer.table.declare(edge("nobody"))
    producer.publish(nobody, 2)
    nobody.discard(RequestCancelledError("gone"))
    producer.assert_empty(2)

    outbox = producer.table.declare(edge())
    producer.table.open(edge(), -1, consumer)
    producer.publish(outbox, 1)
    outbox.discard(RequestCancelledError("gone"))
    assert isinstance(from_status(consumer.chunks[-1].error), RequestCancelledError)
    producer.table.cancel(edge(), consumer)
    producer.assert_empty(3)


def test_a_consumer_that_cancels_frees_everything_and_later_chunks_are_not_kept() -> None:
    producer, consumer = Producer(), Consumer()
    outbox = producer.table.declare(edge())
    producer.table.open(edge(), 1, consumer)
    producer.publish(outbox, 3)
    producer.table.cancel(edge(), consumer)
    assert not outbox.wanted
    producer.publish(outbox, 1)
    outbox.finish()
    producer.assert_empty(4)


def test_a_broken_stream_ends_its_flows_and_no_other() -> None:
    producer, lost, other = Producer(), Consumer(), Consumer()
    mine, theirs = producer.table.declare(edge("mine")), producer.table.declare(edge("theirs"))
    producer.table.open(edge("mine"), 1, lost)
    producer.table.open(edge("waits"), 1, lost)
    producer.table.open(edge("theirs"), 1, other)
    producer.publish(mine, 2)
    producer.publish(theirs, 2)
    producer.table.drop_subscriber(lost)
    assert set(producer.released) == {"mine/0", "mine/1"}
    mine.finish()
    assert len(producer.table) == 1
    assert theirs.wanted


def test_an_attempt_never_gets_the_data_of_another() -> None:
    producer, consumer = Producer(), Consumer()
    producer.publish(producer.table.declare(edge(attempt=0)))
    producer.table.open(edge(attempt=1), -1, consumer)
    assert not consumer.chunks
    with pytest.raises(AlreadyExistsError):
        producer.table.declare(edge(attempt=0))


def test_a_second_reader_is_refused() -> None:
    producer, first, second = Producer(), Consumer(), Consumer()
    producer.table.declare(edge())
    producer.table.open(edge(), 1, first)
    producer.table.open(edge(), 1, second)
    assert isinstance(from_status(second.chunks[0].error), AlreadyExistsError)
    assert not first.chunks


async def test_a_producer_pauses_when_nobody_takes_its_chunks() -> None:
    producer, consumer = Producer(), Consumer()
    outbox = producer.table.declare(edge())
    producer.publish(outbox, MAX_BACKLOG_CHUNKS)
    assert outbox.full
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    producer.table.open(edge(), 1, consumer)
    await asyncio.wait_for(waiting, 30)
