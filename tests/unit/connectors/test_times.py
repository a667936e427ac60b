"""Where the time of a read went."""

from __future__ import annotations

import asyncio

from connectors import times


def test_nothing_is_kept_where_nobody_asked() -> None:
    with times.phase("read"):
        times.read_by("shm", zero_copy=True)
    with times.recording() as record:
        pass
    assert record == times.ReadTimes()


async def test_each_task_has_its_own_record_and_phases_add_up() -> None:
    async def read(connector: str, turns: int) -> times.ReadTimes:
        with times.recording() as record:
            for _ in range(turns):
                with times.phase("read"):
                    await asyncio.sleep(0.001)
            times.read_by(connector, zero_copy=connector == "shm")
        return record

    one, two = await asyncio.gather(read("shm", 3), read("grpc", 1))
    assert (one.connector, one.zero_copy, two.connector, two.zero_copy) == ("shm", True, "grpc", False)
    assert one.read >= 0.003
    assert two.read >= 0.001
    assert one.query == one.alloc == one.sync == 0
    before = one.read
    one.add(two)
    assert one.read == before + two.read
