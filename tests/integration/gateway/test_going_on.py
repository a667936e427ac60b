"""A lost stage that makes the same again leaves its consumers where they are: they are told of the one that takes its
place. Where anything may differ, they start again with it, as ever.

Workers are scripted: thinker and talker wait until the test lets them end, the vocoder plays a fixed sound.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from omnicore import errors
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.replays import AUDIO, Gate, lose, over_http, passed_on, plays
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.support.pipelines import speech_pipeline
from tests.support.processes import wait_until

HALF = len(AUDIO) // 2


class Speech:
    """A spoken answer, half of which has come."""

    def __init__(self, stand: Stand, *, repeats: bool = True, talkers: int = 2) -> None:
        self.stand = stand
        self.repeats = repeats
        self.talkers = talkers
        self.workers: list[list[ScriptedWorker]] = []
        self.gate = Gate(4)
        self.end = asyncio.Event()
        """Thinker and talker may end."""
        self.fail = asyncio.Event()
        """The first talker fails."""
        self.asking: asyncio.Task[dict[str, Any]] | None = None

    async def begin(self) -> Speech:
        for stage_id, (script, count) in enumerate(
            [(self._wait, 1), (self._talk, self.talkers), (plays(self.gate), 2)]
        ):
            self.workers.append(
                [
                    await self.stand.cluster.add(
                        "speech", stage_id, script, n, repeats=self.repeats and stage_id == 1, takes_sources=True
                    )
                    for n in range(count)
                ]
            )
        await self.stand.ready("speech")
        self.asking = asyncio.create_task(over_http(self.stand, "speech", True, ["audio"]))
        await self.gate.reached.wait()
        await wait_until(lambda: passed_on(self.stand) == HALF, what="half of it")
        return self

    async def lose(self, stage_id: int, replays: int) -> None:
        """Kill the one of that stage that has the call, and wait until another one has it."""
        await lose(self.workers[stage_id])
        await self.begun_again(stage_id, replays)

    async def begun_again(self, stage_id: int, replays: int) -> None:
        (state,) = self.stand.gateway.orchestrator.running.values()
        await wait_until(lambda: state.replays == replays, what="replay")
        stage = self.workers[stage_id]
        await wait_until(lambda: any(c.attempt == replays for w in stage for c in w.calls), what="the new call")

    async def told(self, count: int) -> None:
        await wait_until(lambda: len(self.sources) == count, what="new sources")

    async def answer(self) -> dict[str, Any]:
        self.end.set()
        self.gate.go.set()
        assert self.asking is not None
        found = await self.asking
        assert (found["audio"], found["usage"], found["finishes"]) == (AUDIO, 8, ["stop"])
        return found

    @property
    def attempts(self) -> list[list[int]]:
        return [sorted(call.attempt for worker in stage for call in worker.calls) for stage in self.workers]

    @property
    def sources(self) -> list[Any]:
        return [source for worker in self.workers[2] for source in worker.sources]

    async def _wait(self, call: Call) -> None:
        await self.end.wait()
        call.finish()

    async def _talk(self, call: Call) -> None:
        if call.request.attempt == 0:
            failing = asyncio.create_task(self.fail.wait())
            ending = asyncio.create_task(self.end.wait())
            await asyncio.wait((failing, ending), return_when=asyncio.FIRST_COMPLETED)
            failing.cancel()
            ending.cancel()
            if self.fail.is_set():
                call.fail(errors.UnavailableError("not now", reason="ENGINE_BUSY"))
                return
        await self._wait(call)


@contextlib.asynccontextmanager
async def half_spoken(*, hung_after_s: float = 3.0, **options: Any) -> AsyncIterator[Speech]:
    """A spoken answer, half of which has come; in the end nothing of it is left."""
    async with running_stand(speech_pipeline(), hung_after_s=hung_after_s) as stand:
        speech = await Speech(stand, **options).begin()
        yield speech
        await stand.settled()
        for stage in speech.workers:
            for worker in stage:
                assert len(set(worker.aborts)) == len(worker.aborts)


@pytest.mark.parametrize("how", ["dies", "hangs"])
async def test_its_consumer_is_told_who_takes_its_place_and_goes_on(how: str) -> None:
    async with half_spoken(hung_after_s=2.5) as speech:
        (lost,) = [worker for worker in speech.workers[1] if worker.running]
        if how == "dies":
            await speech.lose(1, replays=1)
        else:
            lost.freeze()
            await speech.begun_again(1, replays=1)
        await speech.told(1)
        await speech.answer()
        assert speech.attempts == [[0], [0, 1], [0]]
        (source,) = speech.sources
        (spoken,) = [call for worker in speech.workers[2] for call in worker.calls]
        (other,) = [worker for worker in speech.workers[1] if worker is not lost]
        assert (source.call_id, source.request_id, source.from_stage) == (spoken.call_id, spoken.request_id, 1)
        assert (source.source.replica, source.source.endpoint) == (other.ref, other.endpoint)
        assert source.source.session_endpoint == other.session_endpoint
        assert (source.source.attempt, source.source.window) == (1, spoken.inputs[0].flow.window)
        assert spoken.inputs[0].flow.replaceable
        assert not other.calls[0].inputs[0].flow.replaceable, "the thinker says nothing of repeating itself"
        assert other.calls[0].inputs[0].flow.attempt == 0
        assert speech.stand.gateway.orchestrator.counts.replays == {("speech", 1, "done"): 1}
        (record,) = speech.stand.gateway.orchestrator._kept
        assert "goes_on" in [entry.event for entry in record.timeline]
        lost.wake()


async def test_it_goes_on_again_when_that_one_is_lost_as_well() -> None:
    async with half_spoken(talkers=3) as speech:
        await speech.lose(1, replays=1)
        await speech.lose(1, replays=2)
        await speech.told(2)
        await speech.answer()
        assert speech.attempts == [[0], [0, 1, 2], [0]]
        assert [source.source.attempt for source in speech.sources] == [1, 2]


async def test_what_brings_the_rest_alone_starts_again_when_its_consumer_is_lost() -> None:
    async with half_spoken() as speech:
        await speech.lose(1, replays=1)
        await speech.told(1)
        await speech.lose(2, replays=2)
        await speech.answer()
        assert speech.attempts == [[0], [0, 1, 2], [0, 2]]
        (again,) = [call for worker in speech.workers[2] for call in worker.calls if call.attempt == 2]
        assert not again.inputs[0].flow.HasField("attempt")
        assert again.skip_media_bytes == HALF


@pytest.mark.parametrize("why", ["may differ", "was heard of", "its input may differ"])
async def test_where_anything_may_differ_its_consumer_starts_again(why: str) -> None:
    async with half_spoken(repeats=why != "may differ") as speech:
        if why == "was heard of":  # its consumer heard of its failure, and may have failed with it
            speech.fail.set()
            await speech.begun_again(2, replays=1)
        elif why == "may differ":
            await speech.lose(1, replays=1)
        else:
            await speech.stand.cluster.add("speech", 0, speech._wait, 1)
            await speech.stand.ready("speech")
            await asyncio.gather(lose(speech.workers[0]), lose(speech.workers[1]))
            await wait_until(lambda: sum(len(w.calls) for w in speech.workers[2]) > 1, what="the vocoder again")
        await speech.answer()
        assert 0 not in speech.attempts[2][1:]
        assert len(speech.attempts[2]) > 1
        if why != "its input may differ":
            assert speech.attempts == [[0], [0, 1], [0, 1]]


async def test_a_consumer_that_has_ended_has_its_new_producer_told_so() -> None:
    async with half_spoken() as speech:
        speech.gate.go.set()
        execution = next(iter(speech.stand.gateway.orchestrator.running.values())).stoppable.execution  # type: ignore[union-attr]
        await wait_until(lambda: execution.works[2].finished, what="the vocoder's end")
        await speech.lose(1, replays=1)
        await speech.told(1)
        await speech.answer()
        assert speech.attempts == [[0], [0, 1], [0]]


async def test_a_client_that_leaves_meanwhile() -> None:
    async with half_spoken() as speech:
        await speech.lose(1, replays=1)
        await speech.told(1)
        assert speech.asking is not None
        speech.asking.cancel()
        await asyncio.gather(speech.asking, return_exceptions=True)
        (spoken,) = [(worker, call) for worker in speech.workers[2] for call in worker.calls]
        await wait_until(lambda: spoken[1].call_id in spoken[0].aborts, what="its abort")
        assert speech.attempts == [[0], [0, 1], [0]]
