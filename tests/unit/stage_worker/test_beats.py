"""Beats of a session, and the one way to know that the engine makes progress."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from google.protobuf import duration_pb2

from connectors.publish import Usage
from omni.v1 import pipeline_pb2
from omni.v1 import stage_service_pb2 as pb
from omnicore.errors import InvalidRequestError, UnavailableError
from stage_worker.beats import Beats, check_interval
from stage_worker.engines.sim import create
from stage_worker.progress import EngineDiedError, LoadSource, Progress, Vitality


class Probes:
    """An engine's probe: answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[None]] = []
        self.answers = False

    async def __call__(self) -> None:
        if not self.answers:
            self.asked.append(asyncio.get_running_loop().create_future())
            await self.asked[-1]


class Replica:
    def __init__(self) -> None:
        self.progress = Progress()
        self.probes = Probes()
        engine = create(pipeline_pb2.Stage(engine="sim", stage_id=0), ())
        self.load = LoadSource(engine, lambda: Usage(0, 0, 0), lambda: 0, self.progress)
        self.load.started = True
        self.vitality = Vitality(self.progress, self.load, self.probes)
        self.sent = 0
        self.beats = Beats(0.02, self.vitality, self._send)

    def _send(self) -> None:
        self.sent += 1
        self.beats.frame_left()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(30):
            while self.sent < count:
                await asyncio.sleep(0.002)

    async def until_asked(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.probes.asked) < count:
                await asyncio.sleep(0.002)


@pytest_asyncio.fixture
async def replica() -> AsyncIterator[Replica]:
    made = Replica()
    yield made
    made.beats.close()


async def test_who_asks_at_a_time_shares_one_probe(replica: Replica) -> None:
    asking = [asyncio.create_task(replica.vitality.shown(0)) for _ in range(5)]
    await replica.until_asked(1)
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(replica.probes.asked) == 1
    asking.pop().cancel()
    replica.probes.asked[0].set_result(None)
    assert await asyncio.wait_for(asyncio.gather(*asking), 30) == [0] * 4
    again = asyncio.create_task(replica.vitality.shown(0))
    await replica.until_asked(2)
    again.cancel()
    await asyncio.wait([again])
    await asyncio.sleep(0)
    assert replica.probes.asked[1].cancelled(), "nobody asks any more"


async def test_who_asks_as_the_last_other_leaves_does_not_wait_for_its_cancelled_probe(replica: Replica) -> None:
    leaving = asyncio.create_task(replica.vitality.shown(0))
    await replica.until_asked(1)
    leaving.cancel()
    staying = asyncio.create_task(replica.vitality.shown(0))
    await asyncio.wait([leaving])
    await replica.until_asked(2)
    replica.probes.asked[1].set_result(None)
    assert await asyncio.wait_for(staying, 30) == 0


async def test_output_is_progress_also_while_a_probe_is_out(replica: Replica) -> None:
    replica.progress.outputs = 3
    assert await replica.vitality.shown(2) == 3
    assert not replica.probes.asked
    asking = asyncio.create_task(replica.vitality.shown(3))
    await replica.until_asked(1)
    replica.progress.outputs = 4
    assert await asyncio.wait_for(asking, 30) == 4
    replica.load.started = False
    assert await replica.vitality.shown(4) == 4, "a loading engine is not asked"


async def test_a_dead_engine_is_told_to_all_who_ask(replica: Replica) -> None:
    asking = [asyncio.create_task(replica.vitality.shown(0)) for _ in range(2)]
    await replica.until_asked(1)
    replica.probes.asked[0].set_exception(UnavailableError("no device"))
    for task in asking:
        with pytest.raises(EngineDiedError, match="the engine has died: no device"):
            await asyncio.wait_for(task, 30)


async def test_beats_leave_while_the_engine_answers_and_end_when_it_hangs(replica: Replica) -> None:
    replica.probes.answers = True
    replica.beats.start()
    replica.beats.start()
    await replica.until(3)
    replica.probes.answers = False
    await replica.until_asked(1)
    at_hang = replica.sent
    replica.beats.ask()  # the load has changed: that says nothing of the engine
    for _ in range(20):
        await asyncio.sleep(0.002)
    assert replica.sent == at_hang
    replica.probes.asked[0].set_result(None)
    await replica.until(at_hang + 1)
    replica.beats.stop()
    assert not replica.beats.running


async def test_calls_that_end_before_a_beat_is_due_cost_no_task_and_the_next_is_heard_of(replica: Replica) -> None:
    tasks = asyncio.all_tasks()
    for _ in range(5):
        replica.beats.start()
        replica.beats.stop()
    assert asyncio.all_tasks() == tasks
    replica.beats.start()
    await replica.until_asked(1)
    replica.beats.stop()  # the engine hangs: who waits for it is let go
    for _ in range(5):
        await asyncio.sleep(0)
    assert replica.probes.asked[0].cancelled()
    assert asyncio.all_tasks() == tasks
    replica.probes.answers = True
    replica.beats.start()
    await replica.until(1)


async def test_what_is_asked_for_leaves_at_once_after_progress() -> None:
    replica = Replica()
    replica.beats = Beats(3600, replica.vitality, replica._send)
    replica.beats.start()
    replica.progress.outputs = 1
    replica.beats.ask()
    await replica.until(1)
    assert not replica.probes.asked
    replica.beats.close()


async def test_a_dead_engine_ends_the_beats(replica: Replica) -> None:
    replica.beats.start()
    await replica.until_asked(1)
    replica.probes.asked[0].set_exception(UnavailableError("no device"))
    for _ in range(5):
        await asyncio.sleep(0)
    assert replica.sent == 0


@pytest.mark.parametrize("seconds", [0.0, 0.001, -1.0])
def test_an_interval_that_cannot_be_kept_is_refused(seconds: float) -> None:
    interval = duration_pb2.Duration()
    interval.FromNanoseconds(int(seconds * 1e9))
    with pytest.raises(InvalidRequestError, match=r"hello\.beat_interval: at least 0\.01 s, got"):
        check_interval(pb.SessionHello(beat_interval=interval))


def test_no_interval_is_none() -> None:
    check_interval(pb.SessionHello())
