from __future__ import annotations

import contextlib
import threading
from collections.abc import AsyncIterator, Iterator

import pytest

from connectors.handles import HandleStore, Reservation
from connectors.held import StoreStats, edge_key
from connectors.places import ConsumerPlaces
from omni.v1 import transfer_pb2, types_pb2
from omnicore import errors
from omnicore.clock import ManualClock


class Owner:
    """A worker with a store, counting what is freed."""

    def __init__(self, ttl_s: float = 10, claim_limit_s: float = 1000) -> None:
        self.clock = ManualClock()
        self.ref = types_pb2.ReplicaRef(stage=types_pb2.StageRef(pipeline="speech", stage_id=1), replica_id=2, epoch=7)
        self.freed: list[str] = []
        self.freed_tokens: list[bytes] = []
        self.store = HandleStore(
            lambda: self.ref,
            lambda: "10.0.0.1:99",
            clock=self.clock,
            ttl_s=ttl_s,
            claim_limit_s=claim_limit_s,
            wall_s=lambda: 1e9,
        )

    def reserve(self, key: str = "k", request: str = "req1", consumers: int = 1, **edge: int) -> Reservation:
        ref = transfer_pb2.EdgeRef(request_id=request, from_stage=1, to_stage=2, **edge)
        return self.store.reserve(key, ref, 0, consumers, "test")

    def put(
        self, key: str = "k", request: str = "req1", consumers: int = 1, **edge: int
    ) -> transfer_pb2.TransferHandle:
        reservation = self.reserve(key, request, consumers, **edge)
        reservation.handle.size_bytes = 4

        def on_free() -> None:
            self.freed.append(key)
            self.freed_tokens.append(reservation.handle.token)

        return reservation.publish(memoryview(b"data"), on_free)


@pytest.fixture
def owner() -> Iterator[Owner]:
    owner = Owner()
    yield owner
    owner.store.close()
    assert owner.store.stats() == StoreStats()
    assert len(owner.freed_tokens) == len(set(owner.freed_tokens)), "freed twice"


def test_a_handle_says_all_that_a_consumer_needs(owner: Owner) -> None:
    handle = owner.put(consumers=3, attempt=1)
    assert handle.owner == owner.ref
    assert (handle.owner_endpoint, handle.consumers, handle.edge.attempt) == ("10.0.0.1:99", 3, 1)
    assert handle.expire_time.ToSeconds() == 1_000_000_010
    assert len(handle.token) == 16
    assert owner.store.describe("k", handle.token) == handle


def test_keys_are_used_once_at_a_time_and_the_first_stays(owner: Owner) -> None:
    handle = owner.put("k", "req1")
    with pytest.raises(errors.AlreadyExistsError):
        owner.put("k", "req2")
    pending = owner.reserve("p")
    with pytest.raises(errors.AlreadyExistsError):
        owner.reserve("p")
    pending.cancel()
    pending.cancel()
    owner.reserve("p").cancel()
    assert owner.store.describe("k", handle.token).edge.request_id == "req1"
    owner.store.release("k", handle.token)
    again = owner.put("k", "req2")
    assert again.token != handle.token, "the token of a used key must not open the next one"
    with pytest.raises(errors.PermissionDeniedError):
        owner.store.release("k", handle.token)


def test_last_consumer_frees(owner: Owner) -> None:
    handle = owner.put(consumers=3)
    assert [owner.store.release("k", handle.token) for _ in range(2)] == [False, False]
    assert owner.freed == []
    assert owner.store.release("k", handle.token)
    assert owner.freed == ["k"]
    assert not owner.store.release("k", handle.token), "a release that comes again is no error"
    with pytest.raises(errors.NotFoundError) as caught:
        owner.store.describe("k", handle.token)
    assert caught.value.reason == "HANDLE_NOT_FOUND"


def test_named_consumers_release_once(owner: Owner) -> None:
    handle = owner.put(consumers=2)
    for _ in range(3):
        assert not owner.store.release("k", handle.token, "a")
    assert owner.store.release("k", handle.token, "b")


@pytest.mark.parametrize("token", [b"", b"x" * 16, b"x" * 15])
def test_wrong_token_does_nothing(owner: Owner, token: bytes) -> None:
    handle = owner.put()
    for call in (owner.store.describe, owner.store.claim, owner.store.release):
        with pytest.raises(errors.PermissionDeniedError) as caught:
            call("k", token)
        assert handle.token.hex() not in str(caught.value)
    with pytest.raises(errors.PermissionDeniedError), owner.store.read("k", token):
        pass
    assert owner.store.describe("k", handle.token)


def test_claims_take_places(owner: Owner) -> None:
    handle = owner.put(consumers=2)
    assert owner.store.claim("k", handle.token, "a") == 1
    assert owner.store.claim("k", handle.token, "a") == 1, "claiming again is the same place"
    assert owner.store.claim("k", handle.token, "b") == 0
    with pytest.raises(errors.ResourceExhaustedError, match="all 2 consumers"):
        owner.store.claim("k", handle.token, "c")
    assert not owner.store.release("k", handle.token, "c"), "nobody gives back what another has claimed"
    assert owner.store.stats().claims == 2
    assert not owner.store.release("k", handle.token, "a")
    assert owner.store.release("k", handle.token, "b")


def test_unread_data_expires(owner: Owner) -> None:
    owner.put("old")
    owner.clock.advance(6)
    young = owner.put("young")
    owner.clock.advance(5)
    assert owner.store.sweep() == 1
    assert owner.freed == ["old"]
    assert owner.store.describe("young", young.token)


def test_expired_data_is_refused_even_before_it_is_swept(owner: Owner) -> None:
    handle = owner.put()
    owner.clock.advance(10)
    for call in (owner.store.describe, owner.store.claim):
        with pytest.raises(errors.NotFoundError) as caught:
            call("k", handle.token)
        assert caught.value.reason == "HANDLE_EXPIRED"


def test_claimed_and_read_data_does_not_expire(owner: Owner) -> None:
    claimed, read, idle = owner.put("claimed"), owner.put("read"), owner.put("idle")
    owner.store.claim("claimed", claimed.token)
    with owner.store.read("read", read.token) as data, owner.store.read("read", read.token) as again:
        owner.clock.advance(30)  # three times the TTL
        assert owner.store.sweep() == 1
        assert bytes(data) == bytes(again) == b"data"
    assert owner.freed == [idle.key]
    assert owner.store.release("claimed", claimed.token)
    assert owner.store.sweep() == 1
    assert owner.freed == ["idle", "claimed", "read"]


def test_a_claim_does_not_protect_for_ever() -> None:
    owner = Owner(claim_limit_s=100)
    handle = owner.put()
    owner.store.claim("k", handle.token, "died silently")
    owner.clock.advance(99)
    assert owner.store.sweep() == 0
    owner.clock.advance(1)
    assert owner.store.sweep() == 1
    assert owner.freed == ["k"]


@pytest.mark.parametrize("end", ["release", "cleanup", "close", "sweep"])
def test_memory_that_is_being_read_is_freed_only_afterwards(owner: Owner, end: str) -> None:
    handle = owner.put()
    with contextlib.ExitStack() as readers:
        first = readers.enter_context(owner.store.read("k", handle.token))
        if end == "sweep":
            owner.ref.epoch += 1
            owner.store.sweep()
        elif end == "release":
            owner.store.release("k", handle.token)
        elif end == "cleanup":
            owner.store.cleanup("req1")
        else:
            owner.store.close()
        assert (owner.freed, owner.store.stats().draining, bytes(first)) == ([], 1, b"data")
        with pytest.raises(errors.NotFoundError), owner.store.read("k", handle.token):
            pass
    assert (owner.freed, owner.store.stats().draining) == (["k"], 0)


def test_cleanup_takes_exactly_one_request(owner: Owner) -> None:
    for request in ("req1", "req11", "1", "xreq1", "req1__cfg_text", "req1_x", "x_req1"):
        owner.put(f"key of {request}", request)
    owner.put("second of req1", "req1")
    assert owner.store.cleanup("req1") == 2
    assert sorted(owner.freed) == ["key of req1", "second of req1"]
    assert owner.store.cleanup("req1") == 0
    assert owner.store.stats().handles == 6


def test_what_is_being_published_fails_after_cleanup(owner: Owner) -> None:
    reservation = owner.reserve()
    assert owner.store.cleanup("req1") == 0
    with pytest.raises(errors.RequestCancelledError):
        reservation.publish(memoryview(b""), lambda: owner.freed.append("k"))
    assert owner.freed == [], "the publisher still has the memory and frees it itself"


def test_data_of_an_earlier_epoch_is_freed(owner: Owner) -> None:
    owner.put("old")
    owner.ref.epoch = 8
    owner.put("new")
    assert owner.store.sweep() == 1
    assert owner.freed == ["old"]


def test_closed_stores_take_nothing(owner: Owner) -> None:
    owner.put()
    pending = owner.reserve("pending")
    owner.store.close()
    owner.store.close()
    assert owner.freed == ["k"]
    with pytest.raises(errors.UnavailableError):
        owner.reserve("other")
    with pytest.raises(errors.UnavailableError):
        pending.publish(memoryview(b""), lambda: owner.freed.append("pending"))
    assert "pending" not in owner.freed


@pytest.mark.parametrize(
    ("key", "request_id", "sequence", "consumers", "field"),
    [
        ("", "r", 0, 1, "key"),
        ("k", "", 0, 1, "edge.request_id"),
        ("k", "r", -1, 1, "sequence"),
        ("k", "r", 2**64, 1, "sequence"),
        ("k", "r", 0, 0, "consumers"),
        ("k", "r", 0, 2**32, "consumers"),
    ],
)
def test_bad_arguments_are_named(
    owner: Owner, key: str, request_id: str, sequence: int, consumers: int, field: str
) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        owner.store.reserve(key, transfer_pb2.EdgeRef(request_id=request_id), sequence, consumers, "test")
    assert caught.value.violations[0].field == field


def test_threads_free_each_handle_once(owner: Owner) -> None:
    handles = [owner.put(f"k{i}", f"r{i % 7}", consumers=3) for i in range(300)]

    def release() -> None:
        for handle in handles:
            owner.store.release(handle.key, handle.token)

    def read() -> None:
        for handle in handles:
            with contextlib.suppress(errors.NotFoundError), owner.store.read(handle.key, handle.token) as data:
                assert bytes(data) == b"data"

    threads = [threading.Thread(target=work) for work in (release, read, release, read, release)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(owner.freed) == sorted(handle.key for handle in handles)


async def test_data_elsewhere_is_brought_for_its_readers_and_freed_after_them(owner: Owner) -> None:
    brought: list[str] = []

    @contextlib.asynccontextmanager
    async def bring() -> AsyncIterator[memoryview]:
        brought.append("open")
        yield memoryview(bytearray(b"data"))
        brought.append("closed")

    reservation = owner.reserve("k")
    handle = reservation.publish(bring, lambda: owner.freed.append("k"))
    with pytest.raises(errors.FailedPreconditionError), owner.store.read("k", handle.token):
        pass
    async with owner.store.open("k", handle.token) as data:
        assert owner.store.release("k", handle.token)
        assert (bytes(data), data.readonly, owner.freed) == (b"data", True, [])
    assert (brought, owner.freed) == (["open", "closed"], ["k"])
    in_memory = owner.put("m")
    async with owner.store.open("m", in_memory.token) as data:
        assert bytes(data) == b"data"
    with pytest.raises(errors.NotFoundError):
        async with owner.store.open("k", handle.token):
            pass


def test_keys_of_a_flow_differ() -> None:
    edges = [
        transfer_pb2.EdgeRef(request_id=request, attempt=attempt, from_stage=0, to_stage=to)
        for request in ("a", "b")
        for attempt in (0, 1)
        for to in (1, 2)
    ]
    assert len({edge_key(edge, sequence) for edge in edges for sequence in (0, 1)}) == 16


def test_unnamed_places_are_counted() -> None:
    places = ConsumerPlaces(3)
    assert places.claim("", 0)
    assert places.claim("", 0)
    assert (places.claimed, places.left) == (2, 1)
    for _ in range(2):
        places.release("")
    assert (places.claimed, places.left, places.done) == (0, 1, False)
    places.release("")
    places.release("")
    assert (places.left, places.done) == (0, True)


def test_who_asks_hears_of_every_handle_that_is_gone_and_how_long_it_was_held(owner: Owner) -> None:
    heard: list[tuple[str, str, float]] = []
    owner.store.on_freed = lambda handle, kind, held_s: heard.append((handle.key, kind, held_s))
    released = owner.put("released")
    owner.clock.advance(3)
    owner.put("cleaned", "other")
    owner.store.release("released", released.token)
    owner.clock.advance(1)
    owner.store.cleanup("other")
    assert heard == [("released", "test", 3.0), ("cleaned", "test", 1.0)]
