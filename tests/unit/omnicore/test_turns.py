"""Turns: the limit, the order, and that nobody leaves a trace, whatever happens."""

from __future__ import annotations

import asyncio
import collections
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnicore.turns import Turn, Turns


async def test_the_second_waits_for_the_first() -> None:
    turns: Turns[str] = Turns()
    first, second = turns.queue("edge", 1), turns.queue("edge", 1)
    assert first.mine
    assert not second.mine
    waiting = asyncio.create_task(second.come())
    await asyncio.sleep(0)
    assert not waiting.done()
    assert turns.counts() == {"edge": (1, 1)}
    first.leave()
    assert await waiting
    second.leave()
    second.leave()
    assert turns.counts() == {}


async def test_a_waiter_that_is_told_to_leave_returns_and_is_passed_over() -> None:
    turns: Turns[str] = Turns()
    first, second, third = (turns.queue("edge", 1) for _ in range(3))
    waiting = asyncio.create_task(second.come())
    await asyncio.sleep(0)
    second.leave()
    assert not await waiting
    first.leave()
    assert third.mine
    third.leave()
    assert turns.counts() == {}


async def test_a_turn_that_comes_in_the_moment_of_cancellation_is_passed_on() -> None:
    turns: Turns[str] = Turns()
    first, second, third = (turns.queue("edge", 1) for _ in range(3))

    async def use() -> None:
        try:
            await second.come()
        finally:
            second.leave()

    task = asyncio.create_task(use())
    await asyncio.sleep(0)
    first.leave()  # gives the turn to `second`, whose task is cancelled before it runs
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert third.mine
    third.leave()
    assert turns.counts() == {}


def test_a_new_limit_holds_for_those_who_wait() -> None:
    turns: Turns[str] = Turns()
    held = [turns.queue("edge", 1) for _ in range(3)]
    assert [turn.mine for turn in held] == [True, False, False]
    last = turns.queue("edge", 3)
    assert [turn.mine for turn in (*held, last)] == [True, True, True, False]
    for turn in (*held, last):
        turn.leave()
    assert turns.counts() == {}


@settings(max_examples=200, deadline=None)
@given(
    limits=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    moves=st.lists(st.tuples(st.sampled_from(["queue", "leave"]), st.integers(0, 50)), max_size=120),
)
def test_turns_go_to_who_has_waited_longest(limits: list[int], moves: list[tuple[str, int]]) -> None:
    """Any order of calls, against lists as the model."""
    turns: Turns[int] = Turns()
    lines: dict[int, list[Turn[int]]] = collections.defaultdict(list)
    for move, number in moves:
        key = number % len(limits)
        if move == "queue":
            lines[key].append(turns.queue(key, limits[key]))
        elif lines[key]:
            lines[key].pop(number % len(lines[key])).leave()
        for at, line in lines.items():
            assert all(turn.mine for turn in line[: limits[at]])
            assert not any(turn.mine for turn in line[limits[at] :])
    for line in lines.values():
        while line:
            line.pop(0).leave()
    assert turns.counts() == {}


@pytest.mark.parametrize("seed", range(5))
async def test_any_mix_of_ends_leaves_zero_and_nobody_waits_for_ever(seed: int) -> None:
    """Requests over several edges at once that finish, fail, are cancelled or time out, at any moment."""
    rng = random.Random(seed)
    turns: Turns[int] = Turns()
    limits = {0: 1, 1: 2, 2: 1}
    using: collections.Counter[int] = collections.Counter()
    finished = 0

    async def request(edges: list[int], steps: int, fails: bool) -> None:
        nonlocal finished
        mine: list[Turn[int]] = []
        try:
            for edge in sorted(edges):
                mine.append(turns.queue(edge, limits[edge]))
                if not await mine[-1].come():
                    return
            for edge in edges:
                using[edge] += 1
                assert using[edge] <= limits[edge]
            try:
                for _ in range(steps):
                    await asyncio.sleep(0)
                if fails:
                    raise RuntimeError
            finally:
                for edge in edges:
                    using[edge] -= 1
            finished += 1
        finally:
            for turn in mine:
                turn.leave()

    tasks = []
    for _ in range(200):
        edges = rng.sample(sorted(limits), rng.randint(1, 3))
        tasks.append(asyncio.create_task(request(edges, rng.randint(0, 4), rng.random() < 0.2)))
        if rng.random() < 0.5:
            await asyncio.sleep(0)
        if rng.random() < 0.3:
            rng.choice(tasks).cancel()
    async with asyncio.timeout(60):
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            assert task.exception() is None or isinstance(task.exception(), RuntimeError)
    assert finished > 50
    assert turns.counts() == {}
    assert not any(using.values())
