from __future__ import annotations

import asyncio
import threading

import pytest

from connectors.space import HeapSpace, SpaceQueue
from omnicore import errors


async def settle() -> None:
    """Let everything that is ready run."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_those_who_wait_are_served_in_order_and_not_overtaken() -> None:
    space = HeapSpace(100)
    queue = SpaceQueue(space, 30, "test")
    first = await queue.allocate(90)
    order: list[str] = []

    async def want(name: str, size: int) -> None:
        await queue.allocate(size)
        order.append(name)

    async with asyncio.TaskGroup() as group:
        group.create_task(want("big", 95))
        await settle()
        group.create_task(want("small", 5))  # would fit, but comes later
        await settle()
        assert order == []
        queue.releaser(first)()
        async with asyncio.timeout(30):
            while len(order) < 2:
                await asyncio.sleep(0)
    assert order == ["big", "small"]


async def test_room_freed_in_another_thread_wakes() -> None:
    space = HeapSpace(10)
    queue = SpaceQueue(space, 30, "test")
    release = queue.releaser(await queue.allocate(10))
    waiting = asyncio.ensure_future(queue.allocate(10))
    await settle()
    thread = threading.Thread(target=release)
    thread.start()
    await waiting
    thread.join()
    release()
    assert space.free_bytes == 0, "releasing twice gives back once"


async def test_waiting_ends_with_its_time_its_cancel_or_the_close() -> None:
    space = HeapSpace(10)
    queue = SpaceQueue(space, 0.01, "test")
    held = await queue.allocate(10)
    with pytest.raises(errors.ResourceExhaustedError, match="no room for 1 bytes") as caught:
        await queue.allocate(1)
    assert caught.value.retry_after_s == 0.01
    with pytest.raises(errors.ResourceExhaustedError, match="never fit"):
        await queue.allocate(11)
    patient = SpaceQueue(space, 60, "test")
    waiting = [asyncio.ensure_future(patient.allocate(1)) for _ in range(3)]
    await settle()
    waiting[0].cancel()
    await settle()
    patient.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert [type(result) for result in results[1:]] == [errors.UnavailableError] * 2
    held.free()
    held.free()
    assert space.free_bytes == 10


async def test_no_wait_still_takes_what_is_free() -> None:
    queue = SpaceQueue(HeapSpace(10), 0, "test")
    await queue.allocate(10)
    with pytest.raises(errors.ResourceExhaustedError):
        await queue.allocate(1)


async def test_what_is_kept_without_need_goes_before_anybody_waits() -> None:
    space = HeapSpace(100)
    kept = [space.allocate(50), space.allocate(50)]

    def make_room() -> bool:
        if kept:
            kept.pop().free()
            return True
        return False

    queue = SpaceQueue(space, 30, "x", make_room=make_room)
    first = await queue.allocate(30)
    assert len(kept) == 1, "no more than is needed"
    waiting = [await queue.allocate(60)]
    assert not kept
    # What others give back while somebody waits may be kept, too: it is asked for again.
    blocked = asyncio.create_task(queue.allocate(40))
    await asyncio.sleep(0)
    kept.append(first)
    (await asyncio.wait_for(blocked, 30)).free()
    waiting[0].free()
    assert space.free_bytes == 100
