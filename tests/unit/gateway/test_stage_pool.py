"""Routing within a stage: resolution order, accounting, bounded waits. No sockets, no sleeping."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from gateway.balancers import create_balancer
from gateway.replica_slot import ReplicaSlot
from gateway.replica_table import ReplicaView
from gateway.stage_pool import SESSION_TTL_S, StagePool
from omni.v1 import types_pb2
from omnicore import errors
from omnicore.clock import ManualClock


def view(replica_id: int, *, epoch: int = 0, **fields: object) -> ReplicaView:
    stage = types_pb2.StageRef(pipeline="p", stage_id=1)
    ref = types_pb2.ReplicaRef(stage=stage, replica_id=replica_id, epoch=epoch or 10 + replica_id)
    record = types_pb2.Replica(ref=ref, endpoint=f"10.0.0.{replica_id}:1", state=types_pb2.REPLICA_STATE_READY)
    broken = bool(fields.pop("broken", False))
    for name, value in fields.items():
        setattr(record, name, value)
    return ReplicaView(record, broken=broken)


def pool_of(*views: ReplicaView, policy: str = "round-robin", clock: ManualClock | None = None) -> StagePool:
    pool = StagePool(("p", 1), create_balancer(policy, random.Random(1)), clock=clock or ManualClock())
    for one in views:
        pool.put(one)
    return pool


def slot(pool: StagePool, replica_id: int) -> ReplicaSlot:
    return pool.slots["p", 1, replica_id]


def picked(pool: StagePool, request_id: str, **how: object) -> tuple[int, str]:
    assignment = pool.try_pick(request_id, **how)  # type: ignore[arg-type]
    assert assignment is not None
    return assignment.slot.key[2], assignment.reason


def test_own_binding_goes_before_everything() -> None:
    pool = pool_of(view(0), view(1), policy="least-queue-length")
    first = pool.try_pick("a")
    assert first is not None
    first.slot.report(types_pb2.LoadReport(queue_length=999))
    assert pool.try_pick("a", session_id="s", affinity_from="other") is first
    assert first.slot.inflight == 1


def test_affinity_goes_before_session_and_session_before_policy() -> None:
    pool = pool_of(view(0), view(1), view(2))
    assert picked(pool, "parent") == (0, "round-robin")
    assert picked(pool, "one", session_id="s") == (1, "round-robin")
    assert picked(pool, "two", session_id="s") == (1, "session")
    assert picked(pool, "child", affinity_from="parent", session_id="s") == (0, "affinity")
    assert picked(pool, "late", affinity_from="gone") == (2, "round-robin")


def test_a_session_is_forgotten_when_it_was_silent_too_long() -> None:
    clock = ManualClock()
    pool = pool_of(view(0), view(1), clock=clock)
    assert picked(pool, "a", session_id="s")[0] == 0
    clock.advance(SESSION_TTL_S + 1)
    assert picked(pool, "b", session_id="s") == (1, "round-robin")


def test_a_binding_ends_with_its_replica() -> None:
    pool = pool_of(view(0), view(1))
    first = pool.try_pick("a")
    assert first is not None
    pool.put(view(0, broken=True))
    second = pool.try_pick("a")
    assert second is not None
    assert second.slot.key[2] == 1
    first.release()
    second.release()
    assert [s.inflight for s in pool.slots.values()] == [0, 0]
    assert pool.bound_requests == 0


def test_invalidate_ends_bindings_and_keeps_their_places() -> None:
    pool = pool_of(view(0))
    held = [pool.try_pick(name) for name in ("a", "b")]
    pool.invalidate(("p", 1, 0))
    assert pool.bound_requests == 0
    for assignment in held:
        assert assignment is not None
        assignment.release()
    assert slot(pool, 0).inflight == 0


def test_suspect_only_if_nothing_better_is_left() -> None:
    pool = pool_of(view(0, suspect=True), view(1))
    assert {picked(pool, f"r{n}")[0] for n in range(4)} == {1}
    pool.put(view(1, cordoned=True))
    assert picked(pool, "last")[0] == 0


@pytest.mark.parametrize(
    "fields",
    [
        {"cordoned": True},
        {"broken": True},
        {"state": types_pb2.REPLICA_STATE_STARTING},
        {"state": types_pb2.REPLICA_STATE_ASLEEP},
        {"state": types_pb2.REPLICA_STATE_DRAINING},
    ],
)
def test_unroutable_replicas_are_never_taken(fields: dict[str, Any]) -> None:
    pool = pool_of(view(0, **fields))
    assert pool.try_pick("a") is None


def test_excluded_instances_are_not_taken_but_their_successors_are() -> None:
    pool = pool_of(view(0), view(1))
    tried = slot(pool, 0).claim
    assert {picked(pool, f"r{n}", exclude={tried})[0] for n in range(3)} == {1}
    pool.remove(("p", 1, 1))
    assert pool.try_pick("x", exclude={tried}) is None
    pool.remove(("p", 1, 0))
    pool.put(view(0, epoch=99))
    assert picked(pool, "y", exclude={tried})[0] == 0


def test_release_counts_once() -> None:
    pool = pool_of(view(0))
    assignment = pool.try_pick("a")
    assert assignment is not None
    assignment.release()
    assignment.release()
    assert assignment.released
    assert slot(pool, 0).inflight == 0
    assert pool.bound_requests == 0


def test_ten_thousand_requests_leave_nothing() -> None:
    pool = pool_of(view(0), view(1), view(2), policy="power-of-two")
    rng = random.Random(5)
    held = []
    for number in range(10_000):
        held.append(pool.try_pick(f"r{number}"))
        if len(held) > 50:
            assignment = held.pop(rng.randrange(len(held)))
            assert assignment is not None
            assignment.release()
    for assignment in held:
        assert assignment is not None
        assignment.release()
    assert pool.bound_requests == 0
    assert all(s.inflight == 0 and s.load == 0 for s in pool.slots.values())
    assert sum(s.calls for s in pool.slots.values()) == 10_000


def test_burst_before_the_first_report_spreads() -> None:
    pool = pool_of(*(view(n) for n in range(4)), policy="least-queue-length")
    for number in range(64):
        pool.try_pick(f"r{number}")
    assert [s.inflight for s in pool.slots.values()] == [16, 16, 16, 16]


def test_a_stale_report_does_not_hide_our_own_requests() -> None:
    pool = pool_of(view(0), view(1), policy="least-queue-length")
    for number in range(32):
        pool.try_pick(f"r{number}")
    slot(pool, 0).report(types_pb2.LoadReport(queue_length=0))
    assert slot(pool, 0).load == 16
    after = [picked(pool, f"s{n}")[0] for n in range(8)]
    assert after.count(0) == 4


def test_load_is_the_report_and_what_happened_since() -> None:
    pool = pool_of(view(0))
    first, second = pool.try_pick("a"), pool.try_pick("b")
    assert first is not None
    assert second is not None
    # Another gateway has 10 there as well; the report sees all 12.
    slot(pool, 0).report(types_pb2.LoadReport(queue_length=12))
    third = pool.try_pick("c")
    assert slot(pool, 0).load == 13
    first.release()
    second.release()
    assert slot(pool, 0).load == 11
    assert third is not None
    third.release()
    assert slot(pool, 0).load == 10


async def test_a_pick_waits_for_a_replica() -> None:
    pool = pool_of()
    waiting = asyncio.create_task(pool.pick("a", max_wait_s=30))
    while not pool.waiting:
        await asyncio.sleep(0)
    pool.put(view(0, state=types_pb2.REPLICA_STATE_STARTING))
    pool.put(view(0))
    assignment = await waiting
    assert assignment.slot.key[2] == 0
    assert pool.waiting == 0


async def test_a_pick_that_finds_nothing_in_time_is_unavailable() -> None:
    pool = pool_of(view(0, cordoned=True))
    with pytest.raises(errors.UnavailableError, match="no routable replica for stage 1 of p") as caught:
        await pool.pick("a", max_wait_s=0.01)
    assert caught.value.reason == "NO_REPLICA"
    assert pool.waiting == pool.bound_requests == 0


async def test_a_cancelled_wait_leaves_nothing() -> None:
    pool = pool_of()
    waiting = asyncio.create_task(pool.pick("a", max_wait_s=30))
    while not pool.waiting:
        await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert pool.waiting == 0
    pool.put(view(0))
    assert slot(pool, 0).inflight == 0


# -- sessions --


def test_a_session_moves_when_its_replica_is_gone_and_says_so() -> None:
    pool = pool_of(view(0), view(1))
    assert picked(pool, "a", session_id="s") == (0, "round-robin")
    pool.put(view(0, cordoned=True))
    assert picked(pool, "b", session_id="s") == (1, "session-moved")
    assert picked(pool, "c", session_id="s") == (1, "session")
    pool.remove(("p", 1, 1))
    pool.put(view(1, epoch=99))
    assert picked(pool, "d", session_id="s") == (1, "session-moved"), "the same place, but another instance"


def test_a_strict_session_is_refused_for_as_long_as_it_is_known() -> None:
    clock = ManualClock()
    pool = pool_of(view(0), view(1), clock=clock)
    assert picked(pool, "a", session_id="s", strict_session=True) == (0, "round-robin")
    pool.invalidate(("p", 1, 0))
    pool.remove(("p", 1, 0))
    pool.put(view(0, epoch=99))
    for request_id in ("b", "c"):  # not only once: whoever tries again must not get an empty session
        with pytest.raises(errors.FailedPreconditionError, match="p/1/0") as caught:
            pool.try_pick(request_id, session_id="s", strict_session=True)
        assert caught.value.reason == "SESSION_LOST"
        assert caught.value.metadata["replica"] == "p/1/0"
    assert picked(pool, "d", session_id="other", strict_session=True)[1] == "round-robin"
    clock.advance(SESSION_TTL_S + 1)
    assert picked(pool, "e", session_id="s", strict_session=True)[1] == "round-robin"


async def test_a_strict_session_leaves_no_replica_that_failed_it_for_another() -> None:
    pool = pool_of(view(0), view(1))
    picked(pool, "a", session_id="s", strict_session=True)
    wishes: dict[str, Any] = {"session_id": "s", "strict_session": True, "exclude": {slot(pool, 0).claim}}
    assert pool.try_pick("b", **wishes) is None
    with pytest.raises(errors.UnavailableError) as caught:
        await pool.pick("b", max_wait_s=0, **wishes)
    assert caught.value.reason == "SESSION_OWNER_UNAVAILABLE", "it is there, so its session is not lost"
    assert pool.bound_requests == 1
    assert slot(pool, 1).inflight == 0


async def test_a_strict_session_waits_for_its_replica_and_for_no_other() -> None:
    pool = pool_of(view(0), view(1))
    assert picked(pool, "a", session_id="s") == (0, "round-robin")
    pool.put(view(0, broken=True))
    with pytest.raises(errors.UnavailableError, match="p/1/0, which has session 's'") as caught:
        await pool.pick("b", session_id="s", strict_session=True, max_wait_s=0.01)
    assert caught.value.reason == "SESSION_OWNER_UNAVAILABLE"
    waiting = asyncio.create_task(pool.pick("c", session_id="s", strict_session=True, max_wait_s=30))
    while not pool.waiting:
        await asyncio.sleep(0)
    pool.put(view(0))
    assignment = await waiting
    assert (assignment.slot.key[2], assignment.reason) == (0, "session")


def test_sessions_are_bounded_and_the_one_used_longest_ago_goes() -> None:
    pool = StagePool(("p", 1), create_balancer("round-robin", random.Random(1)), clock=ManualClock(), max_sessions=3)
    pool.put(view(0))
    for name in ("a", "b", "c", "a", "d"):
        assignment = pool.try_pick(f"request-{name}", session_id=name)
        assert assignment is not None
        assignment.release()
    assert [picked(pool, f"again-{name}", session_id=name)[1] for name in ("a", "c", "d", "b")] == [
        "session",
        "session",
        "session",
        "round-robin",
    ]


async def test_the_hold_queue_is_bounded_first_come_first_served_and_a_leaver_frees_its_place() -> None:
    pool = StagePool(("p", 0), create_balancer("round-robin", random.Random(1)), max_waiting=3)
    order: list[str] = []

    async def ask(name: str) -> None:
        (await pool.pick(name, max_wait_s=30)).release()
        order.append(name)

    asking = {name: asyncio.create_task(ask(name)) for name in ("a", "b", "c")}
    await asyncio.sleep(0)
    assert pool.waiting == 3
    with pytest.raises(errors.UnavailableError) as caught:
        await pool.pick("d", max_wait_s=30)
    assert caught.value.reason == "HOLD_QUEUE_FULL"
    asking["b"].cancel()
    await asyncio.gather(asking["b"], return_exceptions=True)
    assert pool.waiting == 2
    asking["e"] = asyncio.create_task(ask("e"))
    await asyncio.sleep(0)
    pool.put(view(0))
    await asyncio.gather(asking["a"], asking["c"], asking["e"])
    assert order == ["a", "c", "e"]
    assert pool.waiting == 0


def test_changes_in_any_order_leave_the_tiers_as_they_would_be_made_anew() -> None:
    rng = random.Random(7)
    pool = pool_of()
    for _ in range(2000):
        replica_id = rng.randrange(12)
        if rng.random() < 0.1:
            pool.remove(("p", 1, replica_id))
        else:
            pool.put(view(replica_id, suspect=rng.random() < 0.3, cordoned=rng.random() < 0.3))
        routable = sorted((slot for slot in pool.slots.values() if slot.routable), key=lambda slot: slot.order)
        assert pool._healthy == [slot for slot in routable if not slot.suspect]
        assert pool._suspect == [slot for slot in routable if slot.suspect]


async def test_who_finds_nobody_is_told_what_is_in_the_way() -> None:
    starting = view(2, state=types_pb2.REPLICA_STATE_STARTING)
    pool = pool_of(view(0, cordoned=True), view(1, cordoned=True), starting, view(3, broken=True))
    with pytest.raises(errors.UnavailableError, match=r"4 registered: 2 cordoned, 1 starting, 1 not connected\)"):
        await pool.pick("a", max_wait_s=0)
