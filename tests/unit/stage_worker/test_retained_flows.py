"""Flows that are retained: read again from the beginning, dropped when memory is short, gone when nobody will come."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from omni.v1 import transfer_pb2
from omnicore.clock import ManualClock
from omnicore.errors import (
    AlreadyExistsError,
    DataLossError,
    InternalError,
    OmniError,
    RequestCancelledError,
    from_status,
)
from stage_worker.flows import FlowTable
from stage_worker.outbox import MAX_BACKLOG_CHUNKS, Outbox
from stage_worker.retention import OVERHEAD_BYTES, RETAIN_S, Retention
from tests.unit.stage_worker.test_flows import Consumer

CANCELLED = RequestCancelledError("gone")
CHUNK_BYTES = 1000


def edge(request_id: str = "r", *, reader: int = 0) -> transfer_pb2.EdgeRef:
    return transfer_pb2.EdgeRef(request_id=request_id, from_stage=0, to_stage=1, reader_attempt=reader)


class Producer:
    """A flow table whose flows are retained, and a count of what was released."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.released: Counter[str] = Counter()
        self.clock = ManualClock()
        self.keeper = Retention(self.clock, limit_bytes)
        self.table = FlowTable(
            lambda key, token, claimant: self.released.update([key]), self.clock, linger_s=60, keeper=self.keeper
        )

    def declare(self, request_id: str = "r") -> Outbox:
        return self.table.declare(edge(request_id), retained=True)

    def publish(self, outbox: Outbox, count: int = 1) -> None:
        for _ in range(count):
            at = outbox.next_sequence
            handle = transfer_pb2.TransferHandle(
                key=f"{outbox.request_id}/{at}", sequence=at, edge=outbox.edge, size_bytes=CHUNK_BYTES
            )
            outbox.publish(handle)

    def read(
        self, consumer: Consumer, request_id: str = "r", *, reader: int = 0, window: int = -1, first: int = 0
    ) -> None:
        self.table.open(edge(request_id, reader=reader), window, consumer, first)

    def assert_empty(self, published: int) -> None:
        assert len(self.table) == 0
        assert self.keeper.size_bytes == 0
        assert len(self.released) == published
        assert set(self.released.values()) <= {1}


def is_full(outbox: Outbox) -> bool:
    return outbox.full


def error_of(consumer: Consumer) -> OmniError:
    return from_status(consumer.chunks[-1].error)


def test_what_was_acknowledged_is_read_again_from_the_beginning() -> None:
    producer, first, second = Producer(), Consumer(), Consumer()
    outbox = producer.declare()
    producer.read(first, window=2)
    producer.publish(outbox, 4)
    producer.table.acknowledge(edge(), first, 0)
    assert first.sequences == [0, 1, 2]
    producer.table.drop_subscriber(first)
    assert outbox.wanted, "the producer goes on"
    producer.publish(outbox, 1)
    producer.read(second, reader=1, window=3)
    assert second.sequences == [0, 1, 2], "under its own window"
    assert second.chunks[0].edge == edge(reader=1)
    producer.table.acknowledge(edge(reader=1), second, 2)
    outbox.finish()
    producer.table.acknowledge(edge(reader=1), second, 4)
    assert second.sequences == [0, 1, 2, 3, 4]
    assert second.ended
    assert not producer.released
    assert producer.keeper.size_bytes == 5 * (CHUNK_BYTES + OVERHEAD_BYTES)
    assert producer.table.holding == 0, "nobody waits for it: a drain need not either"
    third = Consumer()
    producer.read(third, reader=2)
    assert third.sequences == [0, 1, 2, 3, 4]
    assert third.ended
    producer.table.acknowledge(edge(reader=2), third, 4)
    outbox.discard(CANCELLED)
    producer.assert_empty(5)


@pytest.mark.parametrize("how", ["cancelled", "failed", "broke"])
def test_a_lost_consumer_does_not_end_the_call(how: str) -> None:
    producer, consumer = Producer(), Consumer()
    outbox = producer.declare()
    told: list[OmniError] = []
    outbox.on_consumer_failure = told.append
    producer.read(consumer)
    producer.publish(outbox, 2)
    match how:
        case "cancelled":
            producer.table.cancel(edge(), consumer)
        case "failed":
            producer.table.consumer_failed(edge(), consumer, InternalError("bad chunk"))
        case _:
            producer.table.drop_subscriber(consumer)
    assert not told
    assert outbox.wanted
    assert not producer.released
    outbox.discard(CANCELLED)
    producer.assert_empty(2)


def test_a_later_attempt_takes_the_place_of_a_reader_that_hangs() -> None:
    producer, hung, other = Producer(), Consumer(), Consumer()
    outbox = producer.declare()
    producer.read(hung, window=1)
    producer.publish(outbox, 3)
    producer.read(other, reader=1)
    assert isinstance(error_of(hung), RequestCancelledError)
    assert error_of(hung).reason == "FLOW_TAKEN_OVER"
    assert hung.chunks[-1].edge == edge()
    assert other.sequences == [0, 1, 2]
    producer.table.acknowledge(edge(), hung, 2)
    producer.table.cancel(edge(), hung)
    producer.table.drop_subscriber(hung)
    assert outbox.wanted, "what the one before says means nothing any more"
    late = Consumer()
    producer.read(late)
    assert isinstance(error_of(late), AlreadyExistsError)
    producer.table.drop_subscriber(other)
    producer.read(late)
    assert isinstance(error_of(late), AlreadyExistsError), "an earlier attempt does not come back"
    outbox.discard(CANCELLED)
    producer.assert_empty(3)


def test_two_attempts_of_one_worker_are_told_apart() -> None:
    producer, worker = Producer(), Consumer()
    outbox = producer.declare()
    producer.read(worker)
    producer.publish(outbox, 2)
    # The new call opens before the cancel of the old one has been taken: both are in one message.
    producer.read(worker, reader=1)
    producer.table.cancel(edge(), worker)
    outbox.finish()
    of_new = [chunk for chunk in worker.chunks if chunk.edge.reader_attempt == 1]
    assert [chunk.sequence for chunk in of_new] == [0, 1, 2]
    assert of_new[-1].final
    outbox.discard(CANCELLED)
    producer.table.acknowledge(edge(reader=1), worker, 1)
    producer.assert_empty(2)


def test_an_open_of_a_later_attempt_waits_in_place_of_an_earlier_one() -> None:
    producer, first, second = Producer(), Consumer(), Consumer()
    producer.read(first)
    producer.read(second, reader=1)
    assert isinstance(error_of(first), AlreadyExistsError)
    producer.table.cancel(edge(), first)
    producer.read(first)
    assert isinstance(error_of(first), AlreadyExistsError)
    producer.publish(producer.declare())
    assert second.sequences == [0]


@pytest.mark.parametrize("opened", ["before the call", "before the first chunk", "late"])
def test_who_has_had_the_first_chunks_gets_the_rest_and_nobody_later_gets_less_than_all(opened: str) -> None:
    producer, reader, late = Producer(), Consumer(), Consumer()
    if opened == "before the call":
        producer.read(reader, window=2, first=3)
    outbox = producer.declare()
    if opened == "before the first chunk":
        producer.read(reader, window=2, first=3)
    published = 0
    for _ in range(7):
        if outbox.wants_next:
            producer.publish(outbox)
            published += 1
        else:
            outbox.pass_over()
        if opened == "late" and outbox.next_sequence == 2:
            producer.read(reader, window=2, first=3)
    assert published == {"late": 2 + 4}.get(opened, 4)
    assert reader.sequences == [3, 4]
    producer.table.acknowledge(edge(), reader, 4)
    outbox.finish()
    assert reader.sequences == [3, 4, 5, 6]
    producer.table.acknowledge(edge(), reader, 6)
    assert (reader.chunks[-1].final, reader.chunks[-1].sequence) == (True, 7)
    producer.read(late, reader=1)
    assert error_of(late).reason == "RETENTION_LOST"
    outbox.discard(CANCELLED)
    producer.assert_empty(published)


def test_who_reads_the_rest_and_is_lost_may_ask_for_it_again() -> None:
    producer, first, second = Producer(), Consumer(), Consumer()
    outbox = producer.declare()
    producer.read(first, first=2)
    for _ in range(2):
        assert not outbox.wants_next
        outbox.pass_over()
    producer.publish(outbox, 3)
    producer.table.acknowledge(edge(), first, 3)
    producer.table.drop_subscriber(first)
    producer.read(second, reader=1, first=2)
    outbox.finish()
    assert [chunk.sequence for chunk in second.chunks] == [2, 3, 4, 5]
    outbox.discard(CANCELLED)
    producer.table.drop_subscriber(second)
    producer.assert_empty(3)


def test_who_wants_nothing_is_told_of_the_end_and_not_waited_for() -> None:
    producer, reader = Producer(), Consumer()
    outbox = producer.declare()
    producer.publish(outbox, 2)
    producer.read(reader, first=2**64 - 1)
    assert not is_full(outbox)
    assert not outbox.wants_next
    assert len(producer.released) == 2
    for _ in range(MAX_BACKLOG_CHUNKS + 1):
        outbox.pass_over()
    assert not is_full(outbox)
    outbox.finish()
    assert [chunk.final for chunk in reader.chunks] == [True]
    assert not outbox.owes
    outbox.discard(CANCELLED)
    producer.assert_empty(2)


async def test_a_producer_without_a_consumer_goes_on_up_to_the_backlog() -> None:
    producer, first, second = Producer(), Consumer(), Consumer()
    outbox = producer.declare()
    producer.read(first)
    producer.publish(outbox, 1000)
    producer.table.acknowledge(edge(), first, 900)
    producer.table.drop_subscriber(first)
    assert not is_full(outbox), "what a consumer was sent is no backlog"
    producer.publish(outbox, MAX_BACKLOG_CHUNKS)
    assert is_full(outbox)
    waiting = asyncio.create_task(outbox.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    producer.read(second, reader=1, window=10)
    assert is_full(outbox), "it has to catch up first"
    while is_full(outbox):
        producer.table.acknowledge(edge(reader=1), second, second.chunks[-1].sequence)
    assert second.chunks[-1].sequence in range(1000, 1010)
    await asyncio.wait_for(waiting, 30)


def test_above_the_limit_the_oldest_request_gives_up_what_it_retains() -> None:
    producer = Producer(limit_bytes=5 * (CHUNK_BYTES + OVERHEAD_BYTES))
    readers = {name: Consumer() for name in ("old", "new")}
    flows = {name: producer.declare(name) for name in readers}
    for name, reader in readers.items():
        producer.read(reader, name)
        producer.publish(flows[name], 3)
        producer.table.acknowledge(edge(name), reader, 2)
    assert set(producer.released) == {"old/0", "old/1", "old/2"}
    assert producer.keeper.dropped == {"limit": 1}
    producer.publish(flows["old"], 1)
    assert readers["old"].sequences == [0, 1, 2, 3], "who reads it reads on"
    producer.table.acknowledge(edge("old"), readers["old"], 3)
    assert "old/3" in producer.released, "the rest alone is of no use"
    producer.table.drop_subscriber(readers["old"])
    for ended in (False, True):
        late = Consumer()
        producer.read(late, "old", reader=1)
        assert isinstance(error_of(late), DataLossError)
        assert error_of(late).reason == "RETENTION_LOST"
        assert not flows["old"].wanted
        if not ended:
            flows["old"].finish()
    for outbox in flows.values():
        outbox.discard(CANCELLED)
    producer.table.acknowledge(edge("new"), readers["new"], 2)
    producer.table.drop_subscriber(readers["new"])
    producer.assert_empty(7)


def test_one_request_above_the_limit_gives_up_its_own() -> None:
    producer, reader = Producer(limit_bytes=2 * (CHUNK_BYTES + OVERHEAD_BYTES)), Consumer()
    outbox = producer.declare()
    producer.read(reader)
    producer.publish(outbox, 3)
    producer.table.acknowledge(edge(), reader, 2)
    assert len(producer.released) == 3
    producer.table.drop_subscriber(reader)
    producer.publish(outbox, 1)
    outbox.finish()
    assert len(producer.table) == 1, "it stays to say that it is not whole"
    outbox.discard(CANCELLED)
    producer.assert_empty(4)


def test_a_flow_whose_consumer_is_away_is_dropped_for_room() -> None:
    producer, reader = Producer(), Consumer()
    outbox = producer.declare()
    producer.read(reader)
    producer.publish(outbox, 2)
    assert not producer.keeper.make_room(), "its consumer needs it"
    producer.table.drop_subscriber(reader)
    producer.publish(outbox, 1)
    assert producer.keeper.make_room()
    assert len(producer.released) == 3
    assert not producer.keeper.make_room()
    assert producer.keeper.dropped == {"pool": 1}
    outbox.discard(CANCELLED)
    producer.assert_empty(3)


def test_a_failed_call_retains_nothing() -> None:
    producer, reader = Producer(), Consumer()
    outbox = producer.declare()
    producer.read(reader)
    producer.publish(outbox, 3)
    producer.table.acknowledge(edge(), reader, 1)
    outbox.fail(InternalError("broken"))
    assert error_of(reader).message == "broken"
    producer.table.drop_subscriber(reader)
    producer.assert_empty(3)


def test_when_nobody_will_come_only_what_a_consumer_still_reads_is_kept() -> None:
    producer, reader = Producer(), Consumer()
    flows = {name: producer.declare(name) for name in ("read", "reading", "away", "waiting")}
    for name, outbox in flows.items():
        if name != "waiting":
            producer.read(reader, name, window=1)
        producer.publish(outbox, 2)
        outbox.finish()
    for sequence in (0, 1):
        producer.table.acknowledge(edge("read"), reader, sequence)
    producer.table.cancel(edge("away"), reader)
    for outbox in flows.values():
        outbox.stop_retaining()
    assert set(producer.released) == {"read/0", "read/1", "away/0", "away/1"}
    for sequence in (0, 1):
        producer.table.acknowledge(edge("reading"), reader, sequence)
    producer.clock.advance(61)
    producer.table.sweep()
    producer.assert_empty(8)


def test_what_nobody_asks_for_is_dropped_after_long() -> None:
    producer, reader = Producer(), Consumer()
    ended, runs = producer.declare("ended"), producer.declare("runs")
    for name, outbox in (("ended", ended), ("runs", runs)):
        producer.read(reader, name)
        producer.publish(outbox, 1)
        producer.table.acknowledge(edge(name), reader, 0)
    ended.finish()
    producer.clock.advance(RETAIN_S - 1)
    producer.table.sweep()
    producer.keeper.sweep()
    assert not producer.released
    producer.clock.advance(2)
    producer.table.sweep()
    producer.keeper.sweep()
    assert ended.gone
    assert not runs.gone
    assert len(producer.released) == 2
    runs.discard(CANCELLED)
    producer.table.drop_subscriber(reader)
    producer.assert_empty(2)


@pytest.mark.parametrize("seed", range(20))
def test_at_random_every_chunk_is_released_once_and_each_whole_reading_has_all(seed: int) -> None:
    rng = random.Random(seed)
    producer = Producer(limit_bytes=rng.choice([None, 0, 20 * (CHUNK_BYTES + OVERHEAD_BYTES)]))
    outbox, reader, attempt, ended = producer.declare(), Consumer(), 0, False
    producer.read(reader, window=rng.choice([-1, 1, 5]))
    readers = [reader]
    published = 0
    for _ in range(300):
        match rng.randrange(6):
            case 0 | 1 if not ended and not outbox.full:
                if outbox.wanted:
                    producer.publish(outbox)
                    published += 1
            case 2 | 3 if reader.sequences:
                producer.table.acknowledge(edge(reader=attempt), reader, rng.choice(reader.sequences))
            case 4 if rng.random() < 0.3:
                if rng.random() < 0.5:
                    producer.table.drop_subscriber(reader)
                attempt, reader = attempt + 1, Consumer()
                readers.append(reader)
                producer.read(reader, reader=attempt, window=rng.choice([-1, 1, 5]))
            case 5 if rng.random() < 0.02 and not ended:
                outbox.finish()
                ended = True
        assert reader.sequences == list(range(len(reader.sequences)))
    if not ended:
        outbox.finish()
    for _ in range(published):
        if reader.sequences:
            producer.table.acknowledge(edge(reader=attempt), reader, reader.sequences[-1])
    assert reader.ended
    if not reader.chunks[-1].HasField("error"):
        assert reader.sequences == list(range(published))
    else:
        assert error_of(reader).reason == "RETENTION_LOST"
    outbox.discard(CANCELLED)
    for reader in readers:
        producer.table.drop_subscriber(reader)
    producer.assert_empty(published)
