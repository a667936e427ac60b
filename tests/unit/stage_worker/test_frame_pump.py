"""Frames that are handed to a transport within the event loop, which may have no room for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from omni.v1 import stage_service_pb2 as pb
from stage_worker.frames import MAX_FRAME_BYTES, PART_OVERHEAD_BYTES, PAUSE_BYTES, FrameWriter


class Transport:
    """Takes frames as ``FrameWriter.pump`` hands them out."""

    def __init__(self, *, room: bool = True) -> None:
        self.room = room
        self.frames: list[list[int]] = []
        self.closed = 0
        self.during: Callable[[], None] = lambda: None
        """Called once, within the next ``write``."""
        self.writer = FrameWriter(pb.SessionResponse)

    def pump(self) -> None:
        self.writer.pump(self.write, self.on_closed)

    def write(self, frame: pb.SessionResponse) -> bool:
        assert not self.closed
        self.frames.append([event.call_id for event in frame.events])
        during, self.during = self.during, lambda: None
        during()
        return self.room

    def on_closed(self) -> None:
        self.closed += 1

    def add(self, call_id: int, size_bytes: int = 1) -> None:
        self.writer.part(size_bytes).events.add(call_id=call_id)

    async def assert_nothing_unsent(self) -> None:
        """To the byte."""
        self.room = True
        for beyond in (0, 1):
            self.add(0, PAUSE_BYTES - PART_OVERHEAD_BYTES + beyond)
            assert self.writer.blocked == bool(beyond)
            await asyncio.sleep(0)


async def test_what_is_added_in_one_turn_leaves_in_one_frame_in_order() -> None:
    one = Transport()
    one.add(1)
    one.pump()
    one.add(2)
    assert one.frames == [], "not before the turn is over"
    await asyncio.sleep(0)
    assert one.frames == [[1, 2]]
    for call_id in (3, 4):
        one.add(call_id)
    await asyncio.sleep(0)
    one.writer.touch()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert one.frames == [[1, 2], [3, 4], []]
    await one.assert_nothing_unsent()


async def test_nothing_was_added_and_nothing_leaves() -> None:
    one = Transport()
    one.pump()
    one.writer.resume()
    await asyncio.sleep(0)
    assert (one.frames, one.closed) == ([], 0)


async def test_large_frames_are_bounded_and_leave_in_order() -> None:
    one = Transport()
    one.pump()
    for call_id in range(10):
        one.add(call_id, MAX_FRAME_BYTES // 2 - 100)
    await asyncio.sleep(0)
    assert one.frames == [[number, number + 1] for number in range(0, 10, 2)]
    await one.assert_nothing_unsent()


async def test_without_room_frames_fill_up_and_wait() -> None:
    one = Transport(room=False)
    one.pump()
    one.add(1, PAUSE_BYTES)
    assert one.writer.blocked
    await asyncio.sleep(0)
    assert one.frames == [[1]]
    assert one.writer.blocked, "it has been taken, but there is no room for another"
    waiting = asyncio.create_task(one.writer.room())
    for call_id in (2, 3):
        one.add(call_id)
        await asyncio.sleep(0)
    assert one.frames == [[1]]
    assert not waiting.done()
    one.writer.resume()
    assert one.frames == [[1], [2, 3]]
    await asyncio.wait_for(waiting, 30)
    one.add(4)
    one.writer.resume()
    assert one.frames == [[1], [2, 3], [4]]
    one.writer.resume()
    await one.assert_nothing_unsent()


STEPS = st.lists(
    st.sampled_from(["small", "large", "turn", "resume", "room", "no room", "during", "touch"]), max_size=40
)


@given(STEPS)
def test_whenever_there_is_room_all_leaves_in_order_and_is_accounted_for(steps: Sequence[str]) -> None:
    async def run() -> None:
        one, added = Transport(), 0
        one.pump()

        def add(size_bytes: int = 10) -> None:
            nonlocal added
            one.add(added, size_bytes)
            added += 1

        for step in steps:
            match step:
                case "small":
                    add()
                case "large":
                    add(PAUSE_BYTES)
                case "turn":
                    await asyncio.sleep(0)
                case "resume":
                    one.writer.resume()
                case "during":
                    one.during = add
                case "touch":
                    one.writer.touch()
                case _:
                    one.room = step == "room"
        one.room = True
        one.during = lambda: None
        one.writer.resume()
        await asyncio.sleep(0)
        assert [call_id for frame in one.frames for call_id in frame] == list(range(added))
        assert not one.writer.blocked
        await one.assert_nothing_unsent()

    asyncio.run(run())


async def test_what_is_added_from_within_a_write_comes_after_it() -> None:
    one = Transport()
    one.pump()
    one.add(1)
    one.during = lambda: one.add(2)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert one.frames == [[1], [2]]
    await one.assert_nothing_unsent()


async def test_room_that_comes_from_within_a_write() -> None:
    """A transport may say so while it takes something else."""
    one = Transport()
    one.pump()
    for call_id in (1, 2, 3):
        one.add(call_id, MAX_FRAME_BYTES)

    def during() -> None:
        one.room = False
        one.writer.resume()

    one.during = during
    await asyncio.sleep(0)
    one.room = True
    for _ in range(3):
        one.writer.resume()
    assert one.frames == [[1], [2], [3]]
    await one.assert_nothing_unsent()


async def test_a_frame_without_parts_may_find_no_room_either() -> None:
    one = Transport(room=False)
    one.pump()
    one.writer.touch()
    await asyncio.sleep(0)
    one.add(1)
    await asyncio.sleep(0)
    assert one.frames == [[]]
    one.room = True
    one.writer.resume()
    assert one.frames == [[], [1]]
    await one.assert_nothing_unsent()


async def test_the_end_is_told_once_and_after_all_has_left() -> None:
    one = Transport(room=False)
    one.pump()
    one.add(1)
    await asyncio.sleep(0)
    one.add(2, PAUSE_BYTES)
    waiting = asyncio.create_task(one.writer.room())
    await asyncio.sleep(0)
    one.writer.close()
    await asyncio.wait_for(waiting, 30)
    assert (one.frames, one.closed) == ([[1]], 0)
    one.writer.resume()
    assert (one.frames, one.closed) == ([[1], [2]], 0)
    one.writer.resume()
    assert one.closed == 1
    one.writer.resume()
    one.writer.close()
    await asyncio.sleep(0)
    assert one.closed == 1


async def test_an_end_with_room_leaves_at_once() -> None:
    one = Transport()
    one.pump()
    one.add(1)
    one.writer.close()
    assert (one.frames, one.closed) == ([[1]], 1)


async def test_an_end_from_within_a_write_is_told_once() -> None:
    one = Transport()
    one.pump()
    for call_id in (1, 2):
        one.add(call_id, MAX_FRAME_BYTES)
    one.during = one.writer.close
    await asyncio.sleep(0)
    assert (one.frames, one.closed) == ([[1], [2]], 1)


async def test_an_end_before_anybody_pumps_is_told() -> None:
    for parts in (0, 1):
        one = Transport()
        for call_id in range(parts):
            one.add(call_id)
        one.writer.close()
        one.pump()
        await asyncio.sleep(0)
        assert (one.frames, one.closed) == ([[0]] * parts, 1)
