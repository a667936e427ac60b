"""Starts take turns."""

from __future__ import annotations

import asyncio

from omnictl.local.turns import Turns


async def settle() -> None:
    """Let every task run until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_more_at_once_than_allowed_and_in_order() -> None:
    turns = Turns(at_once=2)
    started: list[int] = []
    ends = [asyncio.Event() for _ in range(4)]

    async def start(number: int) -> None:
        async with turns.turn():
            started.append(number)
            await ends[number].wait()

    starts = [asyncio.create_task(start(number)) for number in range(4)]
    await settle()
    assert started == [0, 1]
    ends[1].set()
    await settle()
    assert started == [0, 1, 2]
    ends[0].set()
    await settle()
    assert started == [0, 1, 2, 3]
    for end in ends:
        end.set()
    await asyncio.gather(*starts)


async def test_a_long_start_does_not_hold_up_the_others_for_ever() -> None:
    turns = Turns(at_once=1, busy_s=0.0)
    ready = asyncio.Event()

    async def loads_for_minutes() -> None:
        async with turns.turn():
            await ready.wait()

    long = asyncio.create_task(loads_for_minutes())
    async with asyncio.timeout(30), turns.turn():
        assert not long.done()
    ready.set()
    await long
    # Its turn was over by then and is not given back twice.
    blocked = Turns(at_once=1)
    async with blocked.turn():
        waiting = asyncio.create_task(blocked.turn().__aenter__())
        await settle()
        assert not waiting.done()
    await waiting


async def test_a_failed_start_gives_its_turn_back() -> None:
    turns = Turns(at_once=1)
    for _ in range(3):
        try:
            async with asyncio.timeout(30), turns.turn():
                raise RuntimeError("did not start")
        except RuntimeError:
            continue
