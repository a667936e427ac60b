"""Frames: one per turn of the loop, bounded, and a slow reader makes writers pause."""

from __future__ import annotations

import asyncio

from omni.v1 import stage_service_pb2 as pb
from stage_worker.frames import MAX_FRAME_BYTES, PAUSE_BYTES, FrameWriter


async def read_all(writer: FrameWriter[pb.SessionResponse], into: list[pb.SessionResponse]) -> None:
    async for frame in writer.frames():
        into.append(frame)  # noqa: PERF401 -- read while it grows


async def test_what_is_added_in_one_turn_leaves_in_one_frame() -> None:
    writer = FrameWriter(pb.SessionResponse)
    frames: list[pb.SessionResponse] = []
    reader = asyncio.create_task(read_all(writer, frames))
    await asyncio.sleep(0)
    for step in range(3):
        for call in range(10):
            writer.part(1).events.add(call_id=call, text=str(step))
        while len(frames) <= step:
            await asyncio.sleep(0)
    writer.close()
    await reader
    assert [len(frame.events) for frame in frames] == [10, 10, 10]


async def test_frames_are_bounded_and_nothing_is_lost() -> None:
    writer = FrameWriter(pb.SessionResponse)
    for call in range(10):
        writer.part(MAX_FRAME_BYTES // 2 - 100).events.add(call_id=call)
    writer.close()
    frames: list[pb.SessionResponse] = []
    await read_all(writer, frames)
    assert [[event.call_id for event in frame.events] for frame in frames] == [[i, i + 1] for i in range(0, 10, 2)]


async def test_writers_pause_while_nobody_reads() -> None:
    writer = FrameWriter(pb.SessionResponse)
    writer.part(PAUSE_BYTES + 1).events.add()
    waiting = asyncio.create_task(writer.room())
    await asyncio.sleep(0)
    assert not waiting.done()
    frames: list[pb.SessionResponse] = []
    reading = asyncio.create_task(read_all(writer, frames))
    await asyncio.wait_for(waiting, 30)
    assert not writer.blocked
    writer.close()
    await reading
    assert len(frames) == 1


async def test_closing_lets_writers_go() -> None:
    writer = FrameWriter(pb.SessionResponse)
    writer.part(PAUSE_BYTES + 1).events.add()
    waiting = asyncio.create_task(writer.room())
    await asyncio.sleep(0)
    writer.close()
    await asyncio.wait_for(waiting, 30)
