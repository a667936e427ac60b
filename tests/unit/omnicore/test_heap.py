"""When full garbage collections are due, and what a service leaves behind in the interpreter."""

from __future__ import annotations

import asyncio
import gc

import pytest

from omnicore import heap


def test_due_after_ten_minutes_or_when_memory_has_grown_by_half() -> None:
    collections = heap.FullCollections(100.0, 1000)
    assert not collections.due(100.0 + heap.FULL_EVERY_S - 1, 1500)
    assert collections.due(100.0 + heap.FULL_EVERY_S, 1000)
    assert collections.due(101.0, 1501)

    collections.done(101.0, 1400)
    assert not collections.due(102.0, 2100)
    assert collections.due(102.0, 2101)
    assert not collections.due(101.0 + heap.FULL_EVERY_S - 1, 10)


async def test_old_objects_are_left_alone_while_a_service_runs() -> None:
    before = gc.get_threshold()

    async def service() -> int:
        assert gc.get_threshold()[:2] == before[:2], "young objects are collected as always"
        assert gc.get_threshold()[2] > 10_000
        assert gc.get_freeze_count() > 0
        return 3

    assert await heap.tended(service()) == 3
    assert (gc.get_threshold(), gc.get_freeze_count()) == (before, 0)


async def test_a_service_that_fails_or_is_cancelled_says_so() -> None:
    async def fails() -> int:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await heap.tended(fails())

    async def waits() -> int:
        await asyncio.get_running_loop().create_future()
        return 0

    task = asyncio.create_task(heap.tended(waits()))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert gc.get_freeze_count() == 0
