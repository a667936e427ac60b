"""The order of waiting requests: nobody starves, nobody is lost. Against any sequence of operations."""

from __future__ import annotations

import copy
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from gateway.fair_queue import WEIGHTS, FairQueue
from gateway.token_bucket import TokenBucket
from omnicore.api_keys import Priority

LONGEST_GAP = sum(WEIGHTS) + 2
PRIORITIES = st.sampled_from(list(Priority))


@given(st.lists(st.tuples(PRIORITIES, st.integers(0, 4), st.integers(0, 3)), max_size=300))
def test_a_class_with_somebody_waiting_is_served_soon(steps: list[tuple[Priority, int, int]]) -> None:
    queue: FairQueue[int] = FairQueue()
    where: dict[int, Priority] = {}
    since = dict.fromkeys(Priority, 0)
    for number, (priority, key, turns) in enumerate(steps):
        if not queue.count(priority):
            since[priority] = 0
        queue.push(number, priority, str(key))
        where[number] = priority
        for _ in range(turns):
            waiting = [other for other in Priority if queue.count(other)]
            item = queue.pop()
            if item is None:
                assert not where
                break
            served = where.pop(item)
            for other in waiting:
                since[other] = 0 if other is served else since[other] + 1
                assert since[other] <= LONGEST_GAP
    assert len(queue) == len(where) == sum(map(queue.count, Priority))
    assert sorted(item for item in iter(queue.pop, None)) == sorted(where)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6))
def test_keys_take_turns(sizes: list[int]) -> None:
    queue: FairQueue[tuple[int, int]] = FairQueue()
    for key, size in enumerate(sizes):
        for number in range(size):
            queue.push((key, number), Priority.NORMAL, str(key))
    served: Counter[int] = Counter()
    for key, number in iter(queue.pop, None):
        assert number == served[key], "the oldest of a key first"
        served[key] += 1
        behind = [other for other, size in enumerate(sizes) if served[other] < size]
        assert all(served[key] <= served[other] + 1 for other in behind)
    assert [served[key] for key in range(len(sizes))] == sizes


@given(st.lists(st.tuples(PRIORITIES, st.integers(0, 3)), max_size=200), st.integers(1, 40))
def test_a_full_queue_is_shared_by_the_same_weights(steps: list[tuple[Priority, int]], room: int) -> None:
    queue: FairQueue[int] = FairQueue()
    where: dict[int, tuple[Priority, int]] = {}
    for number, (priority, key) in enumerate(steps):
        if len(queue) == room:
            dropped = queue.make_room(priority, str(key))
            if dropped is None:
                assert len(queue) == room
                continue
            loser, _ = where.pop(dropped)
            if loser is not priority:
                own = (queue.count(priority) + 1) / WEIGHTS[priority]
                assert (queue.count(loser) + 1) / WEIGHTS[loser] > own
        queue.push(number, priority, str(key))
        where[number] = (priority, key)
        assert len(queue) == len(where) <= room


def test_a_class_is_not_shut_out_by_a_full_queue() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(1024):
        queue.push(number, Priority.HIGH, "greedy")
    assert queue.make_room(Priority.LOW, "modest") == 1023
    assert queue.make_room(Priority.HIGH, "modest") == 1022
    assert queue.make_room(Priority.HIGH, "greedy") is None


def test_removed_items_take_no_turn() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(3):
        queue.push(number, Priority.NORMAL, "k")
    assert queue.remove(0)
    assert not queue.remove(0)
    assert [queue.pop(), queue.pop(), queue.pop()] == [1, 2, None]


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=100))
def test_a_bucket_gives_no_more_than_its_rate(per_minute: int, steps: list[tuple[float, int]]) -> None:
    now_s, taken = 0.0, 0
    bucket = TokenBucket(per_minute, now_s)
    for pause_s, wanted in steps:
        now_s += pause_s
        for _ in range(wanted):
            if bucket.wait_s(now_s) > 0:
                break
            bucket.take(1, now_s)
            taken += 1
        assert taken <= per_minute * (1 + now_s / 60) + 1e-6
        if (wait_s := bucket.wait_s(now_s)) > 0:
            assert copy.copy(bucket).wait_s(now_s + wait_s + 1e-6) <= 1e-6
