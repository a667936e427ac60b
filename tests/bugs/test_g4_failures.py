"""G4: a replica dies, drains or fails; what its requests and all others see. Workers are scripted."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from omni.v1 import stage_service_pb2
from omnicore import errors
from tests.integration.gateway.conftest import Stand, running_stand, text_of
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.integration.gateway.scripts import broken, hang, held, silent, speak, tokens
from tests.support.pipelines import speech_pipeline, text_pipeline
from tests.support.ports import reserved_port
from tests.support.processes import wait_until

INTERNAL = errors.InternalError("the engine fell over", reason="ENGINE_FAILED", metadata={"stage": 1})


async def one_of(workers: list[ScriptedWorker]) -> ScriptedWorker:
    """The worker that has a call."""
    await wait_until(lambda: any(worker.running for worker in workers), what="a call")
    return next(worker for worker in workers if worker.running)


async def health(stand: Stand) -> int:
    async with stand.http.get("/health") as response:
        return response.status


async def test_bug_37_the_death_of_a_replica_is_nobodys_but_its_own() -> None:
    async with running_stand(speech_pipeline(), replay_limit=0, retry_limit=0, route_wait_s=0.2) as stand:
        go = asyncio.Event()
        await stand.cluster.add("speech", 0, silent)
        talkers = [await stand.cluster.add("speech", 1, held(go, silent), replica_id=n) for n in range(2)]
        await stand.cluster.add("speech", 2, speak)
        await stand.ready("speech")
        asked = [asyncio.create_task(stand.chat("speech", modalities=["audio"])) for _ in range(2)]
        await wait_until(lambda: sum(len(worker.running) for worker in talkers) == 2, what="both calls")
        victim = await one_of(talkers)
        lost = len(victim.running)
        await victim.kill()
        go.set()
        statuses = sorted(status for status, _ in await asyncio.gather(*asked))
        assert statuses == [200] * (2 - lost) + [503] * lost
        assert (await stand.chat("speech", modalities=["audio"]))[0] == 200
        assert await health(stand) == 200
        (last,) = [worker for worker in talkers if worker is not victim]
        await last.kill()
        await wait_until(lambda: not stand.gateway.router.ready_pipelines()["speech"], what="unrouted")
        status, body = await stand.chat("speech", modalities=["audio"])
        assert (status, body["error"]["code"]) == (503, "no_replica")
        assert "stage 1" in body["error"]["message"]
        assert await health(stand) == 200
        assert (await stand.chat("speech"))[0] == 200  # what needs no talker is served
        await stand.cluster.add("speech", 1, silent, replica_id=2)
        await stand.ready("speech")
        assert (await stand.chat("speech", modalities=["audio"]))[0] == 200
        await stand.settled()


async def test_bug_38_a_drain_ends_no_stream_and_its_refusals_are_not_seen() -> None:
    refusal = errors.UnavailableError("draining", reason="DRAINING", metadata={"stage": 0})
    async with running_stand(text_pipeline()) as stand:
        go = asyncio.Event()
        leaving = await stand.cluster.add("text", 0, held(go, tokens(40)))
        await stand.ready("text")
        long = asyncio.create_task(stand.stream("text"))
        await one_of([leaving])
        leaving.script = broken(refusal)  # it drains, and nobody has heard of it yet
        staying = await stand.cluster.add("text", 0, tokens(2), replica_id=1)
        await stand.ready("text")
        late = await asyncio.gather(*(stand.chat("text") for _ in range(20)))
        assert [status for status, _ in late] == [200] * 20
        leaving.broadcast(stage_service_pb2.SessionResponse(draining=True))
        await wait_until(lambda: not stand.gateway.table.replicas["text", 0, 0].routable, what="unrouted")
        before = len(leaving.calls)
        assert [s for s, _ in await asyncio.gather(*(stand.chat("text") for _ in range(10)))] == [200] * 10
        assert (len(leaving.calls), len(staying.calls)) == (before, 30)
        stand.cluster.control_plane.remove(leaving.ref)
        await wait_until(lambda: len(stand.gateway.table.replicas) == 1, what="deregistered")
        go.set()
        received: list[Any] = await long
        assert received[-1] == "[DONE]"
        assert sum(bool(c["choices"][0]["delta"].get("content")) for c in received[:-1]) >= 1
        text = text_of(received)
        assert text == "".join(f"t{n} " for n in range(40))


async def test_bug_39_what_fails_before_its_first_token_is_done_elsewhere_once() -> None:
    async with running_stand(text_pipeline()) as stand:
        bad = await stand.cluster.add("text", 0, broken(errors.UnavailableError("no", reason="ENGINE_BUSY")))
        good = await stand.cluster.add("text", 0, tokens(2), replica_id=1)
        await stand.ready("text")
        for _ in range(8):
            assert (await stand.chat("text"))[0] == 200
        assert len(good.calls) == 8
        retried = [call.request_id for call in bad.calls]
        assert len(set(retried)) == len(retried)
        assert {call.attempt for call in good.calls if call.request_id in retried} <= {1}


async def test_bug_40_a_stream_that_breaks_says_so_and_ends() -> None:
    async with running_stand(text_pipeline(), replay_limit=0) as stand:

        async def three(call: Call) -> None:
            for n in range(3):
                call.text(f"t{n} ")
            await hang(call)

        worker = await stand.cluster.add("text", 0, three)
        await stand.ready("text")
        streaming = asyncio.create_task(stand.stream("text"))
        await wait_until(lambda: any(s.delivered for s in stand.gateway.orchestrator.running.values()), what="tokens")
        await worker.kill()
        killed_s = time.monotonic()
        received: list[Any] = await streaming  # returns at the end of the response
        assert time.monotonic() - killed_s < 10.0  # a guard: nothing waits for a limit
        assert received[-2]["error"]["code"] == "replica_lost"
        assert received[-1] == "[DONE]"
        assert sum(chunk == "[DONE]" for chunk in received) == 1
    async with running_stand(text_pipeline(), route_wait_s=0.2) as stand:
        worker = await stand.cluster.add("text", 0, hang)
        await stand.ready("text")
        asking = asyncio.create_task(stand.chat("text", stream=True))
        await one_of([worker])
        await worker.kill()
        status, body = await asking
        assert status == 503
        assert body["error"]["code"] == "no_replica"


async def test_bug_41_every_stream_has_one_finish_reason_and_one_done() -> None:
    async def counted(call: Call) -> None:
        await tokens(call.request.sampling.max_tokens)(call)

    async with running_stand(text_pipeline()) as stand:
        await stand.cluster.add("text", 0, counted)
        await stand.ready("text")
        streams: list[Any] = await asyncio.gather(*(stand.stream("text", max_tokens=n % 50 + 1) for n in range(100)))
        for number, received in enumerate(streams):
            assert received[-1] == "[DONE]"
            assert received.count("[DONE]") == 1
            chunks = [chunk for chunk in received if chunk != "[DONE]"]
            assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]
            text = text_of(chunks)
            assert text == "".join(f"t{n} " for n in range(number % 50 + 1))


async def test_bug_42_an_error_within_a_pipeline_reaches_the_client() -> None:
    async with running_stand(speech_pipeline()) as stand:
        thinker = await stand.cluster.add("speech", 0, hang)
        await stand.cluster.add("speech", 1, broken(INTERNAL))
        code2wav = await stand.cluster.add("speech", 2, hang)
        await stand.ready("speech")
        asked_s = time.monotonic()
        status, body = await stand.chat("speech", modalities=["audio"])
        assert time.monotonic() - asked_s < 10.0  # a guard: it does not wait for a deadline
        assert (status, body["error"]["code"]) == (500, "engine_failed")
        await wait_until(lambda: len(thinker.aborts) == len(code2wav.aborts) == 1, what="the others to be aborted")
        await stand.settled()


async def test_bug_44_a_producer_restarted_at_its_address_is_asked_again_by_its_new_epoch() -> None:
    """The consumer refuses the claim that is no more; the request names the new one and goes through."""
    port = reserved_port()
    async with running_stand(speech_pipeline()) as stand:
        old = await stand.cluster.add("speech", 0, hang, port=port)

        async def reads(call: Call) -> None:
            named = call.request.inputs[0].flow.replica.epoch
            if named == old.ref.epoch:
                await restarted.wait()
                where = {"stage": 1, "peer_stage": 0}
                call.fail(errors.FailedPreconditionError("another instance", reason="STALE_EPOCH", metadata=where))
                return
            call.finish()

        restarted = asyncio.Event()
        talker = await stand.cluster.add("speech", 1, reads)
        await stand.cluster.add("speech", 2, held(restarted, speak))
        await stand.ready("speech")
        asking = asyncio.create_task(stand.chat("speech", modalities=["audio"]))
        await wait_until(lambda: bool(talker.running), what="the talker's call")
        await old.kill()
        new = await stand.cluster.add("speech", 0, silent, port=port)
        await wait_until(lambda: ("speech", 0, 0, new.ref.epoch) in stand.gateway.router.sessions, what="its claim")
        restarted.set()
        assert (await asking)[0] == 200
        epochs = [call.inputs[0].flow.replica.epoch for call in talker.calls]
        assert epochs[0] == old.ref.epoch
        assert set(epochs[1:]) == {new.ref.epoch}
        assert (await stand.chat("speech", modalities=["audio"]))[0] == 200
        await stand.settled()
