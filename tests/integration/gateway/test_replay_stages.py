"""Replays of several stages: whose data is gone, who is to blame, and what that costs which stage."""

from __future__ import annotations

import asyncio

from omni.v1 import stage_service_pb2, transfer_pb2, types_pb2
from omnicore import errors
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.replays import (
    AUDIO,
    Gate,
    delivered,
    execution_of,
    lose,
    over_http,
    plays,
    speech_workers,
)
from tests.integration.gateway.scripted import Call, Script
from tests.integration.gateway.scripts import hang, silent, speak
from tests.support.pipelines import speech_pipeline
from tests.support.processes import wait_until


def begun_again_for(stand: Stand) -> list[types_pb2.ReplicaRef | None]:
    """Which replicas the one request, which has ended, was begun again for."""
    (record,) = stand.gateway.orchestrator._kept
    return [entry.ref for entry in record.timeline if entry.event in ("retried", "replayed")]


RETENTION_LOST = errors.DataLossError("trimmed", reason="RETENTION_LOST")


async def test_data_that_was_not_kept_is_made_again() -> None:
    async with running_stand(speech_pipeline()) as stand:
        gate, refused = Gate(3), asyncio.Event()
        play = plays(gate)

        async def wary(call: Call) -> None:
            if call.request.attempt == 1:
                refused.set()
                call.fail(RETENTION_LOST)
                return
            await play(call)

        async def talks(call: Call) -> None:
            if call.request.attempt == 0:
                await refused.wait()
            call.finish()

        stages = await speech_workers(stand, [silent, talks, wary])
        asking = asyncio.create_task(over_http(stand, "speech", True, ["audio"]))
        await gate.reached.wait()
        await delivered(stand)
        await lose(stages[2])
        gate.go.set()
        answer = await asking
        assert answer["audio"] == AUDIO
        attempts = [sorted(call.attempt for worker in stage for call in worker.calls) for stage in stages]
        assert attempts == [[0], [0, 2], [0, 1, 2]]
        assert stand.gateway.orchestrator.counts.replays == {("speech", 2, "done"): 1}
        await stand.settled()


async def test_each_stage_has_its_own_limit() -> None:
    """Every stage is lost once, each after another's loss was mended: more losses than the limit, none too many."""

    def lost_in_turn(stage_id: int, then: Script) -> Script:
        async def script(call: Call) -> None:
            if call.request.attempt < stage_id:
                await hang(call)
            if call.request.attempt > stage_id:
                await then(call)
                return
            if stage_id == 0:
                call.send(stage_service_pb2.StageEvent(text="x", token_ids=[1]))
            await delivered(stand)
            call.fail(errors.UnavailableError("gone", reason="REPLICA_LOST"))

        return script

    async with running_stand(speech_pipeline(), replay_limit=1, retry_limit=0) as stand:
        for stage_id, then in enumerate((silent, silent, plays(Gate(-1)))):
            await stand.cluster.add("speech", stage_id, lost_in_turn(stage_id, then))
        await stand.ready("speech")
        answer = await over_http(stand, "speech", True, ["text", "audio"])
        assert (answer["text"], answer["audio"]) == ("x", AUDIO)
        assert stand.gateway.orchestrator.counts.replays == {("speech", n, "done"): 1 for n in range(3)}
        await stand.settled()


async def test_stages_without_flow_are_made_again_from_kept_handles() -> None:
    def produces(text: str) -> Script:
        async def script(call: Call) -> None:
            for output in call.request.outputs:
                handle = transfer_pb2.TransferHandle(key=f"{call.request.attempt}", size_bytes=4)
                told = stage_service_pb2.StageOutput(to_stage=output.to_stage, handles=[handle])
                call.send(stage_service_pb2.StageEvent(outputs=[told]))
            if text and call.request.emit_output:
                call.text(text)
            call.finish(completion=1)

        return script

    async with running_stand(speech_pipeline(async_chunk=False)) as stand:
        gate = Gate(3)
        stages = await speech_workers(stand, [produces("words"), produces(""), plays(gate)])
        asking = asyncio.create_task(over_http(stand, "speech", True, ["text", "audio"]))
        await gate.reached.wait()
        await delivered(stand)
        talker = next(worker for worker in stages[1] if worker.calls)
        await talker.kill()  # it had finished; its data is gone with it
        await lose(stages[2])
        gate.go.set()
        answer = await asking
        assert (answer["text"], answer["audio"], answer["usage"]) == ("words", AUDIO, 10)
        attempts = [sorted(call.attempt for worker in stage for call in worker.calls) for stage in stages]
        assert attempts == [[0], [0, 1], [0, 1]]
        again = next(call for worker in stages[2] for call in worker.calls if call.attempt == 1)
        assert [handle.key for handle in again.inputs[0].handles.handles] == ["1"]
        await stand.settled()


async def test_the_replica_that_was_lost_is_told_not_the_consumer_that_noticed_first() -> None:
    noticed = asyncio.Event()

    async def thinks(call: Call) -> None:
        if call.request.attempt == 0:
            await hang(call)
        call.finish()

    async def listens(call: Call) -> None:
        if call.request.attempt == 0:
            call.fail(errors.UnavailableError("reset", reason="PEER_LOST", metadata={"peer_stage": 0}))
            noticed.set()
        else:
            call.finish()

    async with running_stand(speech_pipeline()) as stand:
        thinkers, *_ = await speech_workers(stand, [thinks, listens, speak])
        asking = asyncio.create_task(stand.chat("speech", modalities=["audio"]))
        await noticed.wait()
        execution = execution_of(stand)
        await wait_until(lambda: any(run.ended for run in execution.works[1].runs), what="the consumer's failure")
        lost = await lose(thinkers)
        assert (await asking)[0] == 200
        assert begun_again_for(stand) == [lost.ref]
        await stand.settled()


async def test_the_only_consumer_of_a_lost_producer_is_not_blamed_for_what_it_could_not_read() -> None:
    """Its fetch fails with whatever the connection says. Had it to be avoided, nobody else could take its place."""
    half, unreadable = asyncio.Event(), asyncio.Event()

    async def talks(call: Call) -> None:
        if call.request.attempt == 0:
            await half.wait()
            # A peer is named: the gateway looks out for its failure, too, before it begins again.
            call.fail(errors.UnavailableError("gone", reason="PEER_LOST", metadata={"peer_stage": 2}))
        else:
            call.finish()

    async def sounds(call: Call) -> None:
        if call.request.attempt == 0:
            call.audio(AUDIO[: len(AUDIO) // 2])
            half.set()
            await unreadable.wait()
            call.fail(errors.UnavailableError("connection refused", metadata={"peer_stage": 1}))
        else:
            await plays(Gate(-1))(call)

    async with running_stand(speech_pipeline()) as stand:
        await stand.cluster.add("speech", 0, silent)
        for n in range(2):
            await stand.cluster.add("speech", 1, talks, replica_id=n)
        await stand.cluster.add("speech", 2, sounds)
        await stand.ready("speech")
        asking = asyncio.create_task(over_http(stand, "speech", True, ["audio"]))
        await half.wait()
        execution = execution_of(stand)
        await wait_until(lambda: any(run.ended for run in execution.works[1].runs), what="the talker's end is known")
        unreadable.set()
        answer = await asking
        assert answer["audio"] == AUDIO
        await stand.settled()


async def test_who_finished_and_cannot_be_reached_is_asked_once_more_then_its_work_is_done_elsewhere() -> None:
    """It owes nobody a sign of life, so nothing but its consumer tells that it hangs."""

    async def listens(call: Call) -> None:
        if call.request.attempt < 2:
            execution = execution_of(stand)
            await wait_until(lambda: execution.works[0].finished, what="the thinker has finished")
            call.fail(errors.UnavailableError("ping timeout", reason="PEER_LOST", metadata={"peer_stage": 0}))
        else:
            call.finish()

    async def sounds(call: Call) -> None:
        if call.request.attempt < 2:
            await hang(call)
        await speak(call)

    async with running_stand(speech_pipeline()) as stand:
        stages = await speech_workers(stand, [silent, listens, sounds])
        status, _ = await stand.chat("speech", modalities=["audio"])
        assert status == 200
        attempts = [sorted(call.attempt for worker in stage for call in worker.calls) for stage in stages]
        assert attempts == [[0, 2], [0, 1, 2], [0, 1, 2]]
        assert [ref.stage.stage_id for ref in begun_again_for(stand) if ref is not None] == [0, 0]
        await stand.settled()


async def test_an_edge_that_stays_silent_moves_its_producer() -> None:
    async def thinks(call: Call) -> None:
        if call.request.attempt == 0:
            await hang(call)
        call.finish()

    async def listens(call: Call) -> None:
        if call.request.attempt == 0:
            where = {"stage": 1, "peer_stage": 0}
            call.fail(errors.DeadlineExceededError("nothing came", reason="CHUNK_TIMEOUT", metadata=where))
        else:
            call.finish()

    async with running_stand(speech_pipeline()) as stand:
        thinkers = [await stand.cluster.add("speech", 0, thinks, replica_id=n) for n in range(2)]
        await stand.cluster.add("speech", 1, listens)
        await stand.cluster.add("speech", 2, speak)
        await stand.ready("speech")
        status, _ = await stand.chat("speech", modalities=["audio"])
        assert status == 200
        assert [[call.attempt for call in worker.calls] for worker in thinkers] in ([[0], [1]], [[1], [0]])
        await wait_until(lambda: sum(len(worker.aborts) for worker in thinkers) >= 1, what="the silent one aborted")
        silent_one = next(worker for worker in thinkers if worker.calls[0].attempt == 0)
        assert begun_again_for(stand) == [silent_one.ref]
        await stand.settled()
