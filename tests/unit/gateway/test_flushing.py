"""Calls of consumers, gathered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from gateway.flushing import Flusher, flusher_of
from tests.support.processes import wait_until


class Item:
    def __init__(self, *, on_flush: Callable[[], None] = lambda: None) -> None:
        self.flushed_s = 0.0
        self.status = "running"
        self.flushes = 0
        self._on_flush = on_flush

    def flush(self) -> None:
        self.flushes += 1
        self._on_flush()


async def test_all_of_a_turn_are_called_in_the_next_one() -> None:
    flusher, items = flusher_of(asyncio.get_running_loop()), [Item() for _ in range(3)]
    for item in items:
        flusher.add(item)
    assert [item.flushes for item in items] == [0, 0, 0]
    await asyncio.sleep(0)
    assert [item.flushes for item in items] == [1, 1, 1]
    assert flusher_of(asyncio.get_running_loop()) is flusher


async def test_what_follows_at_once_waits_a_little_but_the_end_does_not() -> None:
    flusher, item, ending = Flusher(asyncio.get_running_loop()), Item(), Item()
    for one in (item, ending):
        flusher.add(one)
    await asyncio.sleep(0)
    item.flushed_s = ending.flushed_s = item.flushed_s + 3600  # as if it had been now, on any machine
    ending.status = "finished"
    for one in (item, ending):
        flusher.add(one)
    await asyncio.sleep(0)
    assert (item.flushes, ending.flushes) == (1, 2)
    await wait_until(lambda: item.flushes == 2, what="the flush after the gap")


async def test_an_end_does_not_wait_for_the_gap_of_what_came_just_before() -> None:
    loop = asyncio.get_running_loop()
    flusher, item = Flusher(loop), Item()
    item.flushed_s = loop.time() + 3600  # as if it had been now, on any machine
    flusher.add(item)
    await asyncio.sleep(0)
    assert item.flushes == 0
    item.status = "finished"
    flusher.hurry(item)
    await asyncio.sleep(0)
    assert item.flushes == 1
    flusher.hurry(item)  # it waits no more
    await asyncio.sleep(0)
    assert item.flushes == 1


async def test_one_that_raises_costs_no_other_its_call() -> None:
    def fail() -> None:
        raise ValueError("a bug of ours")

    flusher, bad, good = Flusher(asyncio.get_running_loop()), Item(on_flush=fail), Item()
    flusher.add(bad)
    flusher.add(good)
    await asyncio.sleep(0)
    assert (bad.flushes, good.flushes) == (1, 1)


async def test_what_is_added_while_others_are_called_comes_in_the_turn_after() -> None:
    flusher = Flusher(asyncio.get_running_loop())
    second = Item()
    first = Item(on_flush=lambda: flusher.add(second))
    flusher.add(first)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (first.flushes, second.flushes) == (1, 1)
