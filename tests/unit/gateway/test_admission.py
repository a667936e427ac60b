"""Admission: limits, order, keys, and no place ever lost."""

from __future__ import annotations

import asyncio
import gc
import resource
from pathlib import Path

import pytest

from gateway.admission import Admission, Entry, effective_priority
from omnicore import errors
from omnicore.api_keys import ApiKey, Priority
from omnicore.clock import ManualClock


def _key(key_id: str, **limits: int) -> ApiKey:
    return ApiKey(key_id, "0" * 64, **limits)  # type: ignore[arg-type]


async def _queued(admission: Admission, count: int) -> None:
    while admission.queued < count:
        await asyncio.sleep(0)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def _waiting(admission: Admission, key: ApiKey, priority: Priority = Priority.NORMAL) -> asyncio.Task[Entry]:
    return asyncio.create_task(admission.enter(Entry(key, priority)))


async def test_runs_up_to_the_limit_then_queues_in_order() -> None:
    admission = Admission(max_inflight=1, max_queued=2, queue_timeout_s=30)
    running = await admission.enter()
    first, second = asyncio.create_task(admission.enter()), asyncio.create_task(admission.enter())
    await _queued(admission, 2)
    with pytest.raises(errors.ResourceExhaustedError) as refused:
        await admission.enter()
    assert refused.value.retry_after_s == 1.0
    admission.leave(running)
    entered = await first
    assert not second.done()
    admission.leave(entered)
    admission.leave(await second)
    assert admission.inflight == admission.queued == 0
    assert admission.rejected == {"queue_full": 1}
    assert sum(admission.waits[Priority.NORMAL].counts) == 2
    assert admission.waits[Priority.NORMAL].at_once == 1


async def test_a_long_wait_ends_and_later_ones_go_on() -> None:
    admission = Admission(max_inflight=1, max_queued=1, queue_timeout_s=0.01)
    running = await admission.enter()
    for _ in range(2):
        with pytest.raises(errors.ResourceExhaustedError) as refused:
            await admission.enter()
        assert refused.value.metadata["cause"] == "queue_timeout"
    assert admission.queued == 0
    admission.leave(running)
    assert admission.inflight == 0


async def test_a_cancelled_wait_passes_its_place_on() -> None:
    admission = Admission(max_inflight=1, max_queued=5, queue_timeout_s=30)
    running = await admission.enter()
    waiting = asyncio.create_task(admission.enter())
    await _queued(admission, 1)
    admission.leave(running)  # gives the place to `waiting`, which is cancelled before it runs
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert admission.inflight == 0


@pytest.mark.parametrize("given", [False, True], ids=["while it waits", "as its turn comes"])
async def test_a_client_that_leaves_frees_its_place_in_the_queue(given: bool) -> None:
    admission = Admission(max_inflight=1, max_queued=5, queue_timeout_s=30)
    running, entry = await admission.enter(), Entry(_key("alice", max_concurrent=2, requests_per_minute=2))
    waiting = asyncio.create_task(admission.enter(entry))
    await _queued(admission, 1)
    if given:
        admission.leave(running)
    entry.abort("the client disconnected")
    with pytest.raises(errors.RequestCancelledError):
        await waiting
    assert admission.queued == 0
    assert admission.inflight == (0 if given else 1)
    account = admission.accounts.of(entry.key, 0.0)
    assert account.active == 0
    with pytest.raises(errors.RequestCancelledError):
        await admission.enter(entry)  # too late


async def test_entering_without_waiting_counts_only_what_enters() -> None:
    admission = Admission(1, 4, 30.0, clock=ManualClock())
    key = _key("alice", requests_per_minute=2)
    first, second = Entry(key), Entry(key)
    assert admission.try_enter(first)
    assert not any(admission.try_enter(second) for _ in range(3)), "the only place is taken"
    assert (admission.inflight, admission.queued, admission.rejected) == (1, 0, {})

    waiting = _waiting(admission, _key(""))
    await _queued(admission, 1)
    admission.leave(first, tokens=7)
    assert not admission.try_enter(second), "the place went to who waited"
    admission.leave(await waiting)
    assert admission.try_enter(second), "what was not let in did not count against the key"
    admission.leave(second)
    with pytest.raises(errors.ResourceExhaustedError, match="2 requests per minute"):
        admission.try_enter(Entry(key))
    admission.draining = True
    with pytest.raises(errors.UnavailableError, match="shutting down"):
        admission.try_enter(Entry())
    gone = Entry()
    gone.abort("left")
    with pytest.raises(errors.RequestCancelledError):
        admission.try_enter(gone)
    assert admission.inflight == admission.queued == 0
    assert [(a.active, a.admitted, a.tokens_used) for _, a in admission.accounts.labelled()] == [(0, 2, 7)]


async def test_nothing_enters_while_draining() -> None:
    admission = Admission(1, 1, 1)
    admission.draining = True
    with pytest.raises(errors.UnavailableError) as refused:
        await admission.enter()
    assert refused.value.reason == "GATEWAY_DRAINING"


async def test_classes_go_first_and_a_full_queue_is_shared() -> None:
    admission = Admission(max_inflight=1, max_queued=3, queue_timeout_s=30)
    running, key = await admission.enter(), _key("")
    low = [_waiting(admission, key, Priority.LOW) for _ in range(3)]
    await _queued(admission, 3)
    high = _waiting(admission, key, Priority.HIGH)
    with pytest.raises(errors.ResourceExhaustedError) as refused:
        await low[-1]  # the newest
    assert refused.value.metadata["cause"] == "displaced"
    admission.leave(running)
    admission.leave(await high)
    for task in low[:2]:
        admission.leave(await task)
    assert admission.inflight == 0


async def test_a_key_with_many_requests_does_not_hold_up_another() -> None:
    admission = Admission(max_inflight=1, max_queued=1_000, queue_timeout_s=30)
    running, greedy, modest = await admission.enter(), _key("greedy"), _key("modest")
    many = [_waiting(admission, greedy) for _ in range(1_000)]
    await _queued(admission, 1_000)
    one = _waiting(admission, modest)  # the queue is full: one of the thousand makes room
    while not admission.rejected["displaced"]:
        await asyncio.sleep(0)
    admission.leave(running)
    admission.leave(await many[0])
    admission.leave(await one)
    for task in many:
        task.cancel()
    await asyncio.wait(many)
    assert admission.inflight == admission.queued == 0
    assert all(account.active == 0 for _, account in admission.accounts.labelled())


async def test_requests_per_minute() -> None:
    clock = ManualClock()
    admission, key = Admission(10, 10, 1, clock=clock), _key("alice", requests_per_minute=3)
    for _ in range(3):
        admission.leave(await admission.enter(Entry(key)))
    with pytest.raises(errors.ResourceExhaustedError) as refused:
        await admission.enter(Entry(key))
    assert (refused.value.reason, refused.value.retry_after_s) == ("RATE_LIMITED", 20)
    assert admission.inflight == 0
    admission.leave(await admission.enter(Entry(_key("bob", requests_per_minute=3))))
    clock.advance(20)
    admission.leave(await admission.enter(Entry(key)))
    assert admission.rejected == {"rate_limited": 1}


async def test_tokens_per_minute_are_known_at_the_end() -> None:
    clock = ManualClock()
    admission, key = Admission(10, 10, 1, clock=clock), _key("alice", tokens_per_minute=600)
    admission.leave(await admission.enter(Entry(key)), tokens=900)
    with pytest.raises(errors.ResourceExhaustedError) as refused:
        await admission.enter(Entry(key))
    assert refused.value.metadata["cause"] == "token_limited"
    assert refused.value.retry_after_s == 31, "300 too many at 10 a second, and one to begin with"
    clock.advance(31)
    admission.leave(await admission.enter(Entry(key)))


async def test_concurrency_counts_what_waits() -> None:
    admission, key = Admission(1, 10, 30), _key("alice", max_concurrent=2)
    running = await admission.enter(Entry(key))
    waiting = _waiting(admission, key)
    await _queued(admission, 1)
    with pytest.raises(errors.ResourceExhaustedError) as refused:
        await admission.enter(Entry(key))
    assert refused.value.metadata["cause"] == "too_many_concurrent"
    admission.leave(running)
    admission.leave(await waiting)
    admission.leave(await admission.enter(Entry(key)))


async def test_requests_that_belong_together_may_enter_all_or_none() -> None:
    clock = ManualClock()
    admission = Admission(max_inflight=9, max_queued=0, queue_timeout_s=30, clock=clock)
    few, slow = _key("few", max_concurrent=3), _key("slow", requests_per_minute=6)
    for key, count, named in ((few, 4, "max_concurrent"), (slow, 7, "requests_per_minute"), (_key("any"), 10, "9")):
        with pytest.raises(errors.InvalidRequestError) as never:
            admission.check_together(key, count, "n")
        assert never.value.violations[0].field == "n"
        assert f"{count} requests" in never.value.message
        assert named in never.value.message
    admission.check_together(few, 3, "n")
    running = await admission.enter(Entry(few))
    with pytest.raises(errors.ResourceExhaustedError) as later:
        admission.check_together(few, 3, "n")
    assert (later.value.metadata["cause"], later.value.retry_after_s) == ("too_many_concurrent", 1)
    admission.leave(running)
    # Who waits as long as it is told gets through: a refusal uses nothing up.
    admission.leave(await admission.enter(Entry(slow)))
    for _ in range(2):
        with pytest.raises(errors.ResourceExhaustedError) as later:
            admission.check_together(slow, 6, "n")
        assert later.value.retry_after_s == 10
    clock.advance(10)
    admission.check_together(slow, 6, "n")


async def test_what_is_not_served_does_not_count() -> None:
    clock = ManualClock()
    admission, key = Admission(1, 0, 30, clock=clock), _key("alice", requests_per_minute=2)
    running = await admission.enter()
    for _ in range(5):
        with pytest.raises(errors.ResourceExhaustedError) as refused:
            await admission.enter(Entry(key))
        assert refused.value.metadata["cause"] == "queue_full"
    admission.leave(running)
    admission.leave(await admission.enter(Entry(key)))


async def test_the_hint_follows_how_fast_the_queue_moves() -> None:
    clock = ManualClock()
    admission = Admission(1, 40, 60, clock=clock)
    running = await admission.enter()
    tasks = [asyncio.create_task(admission.enter()) for _ in range(40)]
    await _queued(admission, 40)
    for task in tasks[:30]:
        clock.advance(2.0)
        admission.leave(running)
        running = await task
    tasks += [asyncio.create_task(admission.enter()) for _ in range(30)]
    await _queued(admission, 40)
    with pytest.raises(errors.ResourceExhaustedError) as refused:
        await admission.enter()
    assert refused.value.retry_after_s == 60, "41 ends at two seconds each, at most a minute"
    for task in tasks[30:]:
        task.cancel()
    await asyncio.wait(tasks[30:])
    admission.leave(running)


async def test_a_changed_line_of_a_key_holds_at_once_and_use_is_kept() -> None:
    clock = ManualClock()
    admission = Admission(10, 10, 1, clock=clock)
    for _ in range(5):
        admission.leave(await admission.enter(Entry(_key("alice", requests_per_minute=5))))
    with pytest.raises(errors.ResourceExhaustedError):
        await admission.enter(Entry(_key("alice", requests_per_minute=5)))
    admission.leave(await admission.enter(Entry(_key("alice", requests_per_minute=6))))
    admission.leave(await admission.enter(Entry(_key("alice"))))


async def test_ten_thousand_queued_requests_take_little_memory() -> None:
    admission = Admission(1, 10_000, 60)
    running = await admission.enter()
    gc.collect()
    before_bytes = _resident_bytes()
    tasks = [asyncio.create_task(admission.enter(Entry())) for _ in range(10_000)]
    await _queued(admission, 10_000)
    # Tasks and coroutines included, which the caller of a real request has anyway: about 2 KiB each.
    assert _resident_bytes() - before_bytes < 10_000 * 8_192
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert admission.queued == 0
    admission.leave(running)
    assert admission.inflight == 0


@pytest.mark.parametrize(
    ("key", "asked", "priority"),
    [
        (_key(""), None, Priority.NORMAL),
        (_key("a"), None, Priority.NORMAL),
        (_key("a"), "high", Priority.NORMAL),
        (_key("a"), "Low", Priority.LOW),
        (_key("a"), -5, Priority.NORMAL),
        (_key("a"), "3", Priority.LOW),
        (ApiKey("a", "", priority=Priority.HIGH), None, Priority.HIGH),
        (ApiKey("a", "", priority=Priority.HIGH), 0, Priority.NORMAL),
        (ApiKey("a", "", priority=Priority.HIGH), "-1", Priority.HIGH),
        (ApiKey("a", "", priority=Priority.LOW), "high", Priority.LOW),
    ],
)
def test_a_request_may_ask_for_what_its_key_may(key: ApiKey, asked: int | str | None, priority: Priority) -> None:
    assert effective_priority(key, asked) is priority


@pytest.mark.parametrize("asked", ["urgent", "1.5", "--1", "9" * 40])
def test_wrong_priorities(asked: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match="must be high, normal, low or a whole number"):
        effective_priority(_key("a"), asked)
