"""What clients see when things break, and that nothing is left behind afterwards."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest

from gateway.balancers import NO_HINT, C, Hint, RoundRobinBalancer
from omni.v1 import stage_service_pb2, transfer_pb2
from omnicore import errors
from tests.integration.gateway.conftest import USER, Stand, events, running_stand
from tests.integration.gateway.scripted import Call
from tests.integration.gateway.scripts import broken, endless, hang, held, silent, speak, tokens
from tests.support.pipelines import speech_pipeline, text_pipeline
from tests.support.ports import reserved_port
from tests.support.processes import wait_until

UNAVAILABLE = errors.UnavailableError("not now", reason="ENGINE_BUSY")
INTERNAL = errors.InternalError("the engine fell over", reason="ENGINE_FAILED")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_leaves_ends_its_request(stand: Stand, streamed: bool) -> None:
    worker = await stand.cluster.add("text", 0, endless if streamed else hang)
    await stand.ready("text")
    body = {"model": "text", "messages": USER, "stream": streamed}

    async def ask() -> None:
        async with stand.http.post("/v1/chat/completions", json=body) as response:
            await response.read()

    asking = asyncio.create_task(ask())
    await wait_until(lambda: bool(worker.running), what="the call at the worker")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await wait_until(lambda: len(worker.aborts) == 1, what="abort at the worker")
    await stand.settled()
    assert len(worker.aborts) == 1
    (record,) = stand.gateway.orchestrator._kept
    assert record.status == "aborted"


async def test_every_stage_hears_of_the_abort() -> None:
    async with running_stand(speech_pipeline()) as stand:
        workers = [await stand.cluster.add("speech", stage_id, hang) for stage_id in range(3)]
        await stand.ready("speech")
        asking = asyncio.create_task(stand.chat("speech", modalities=["text", "audio"]))
        await wait_until(lambda: all(worker.running for worker in workers), what="calls")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await wait_until(lambda: [len(worker.aborts) for worker in workers] == [1, 1, 1], what="aborts")
        await stand.settled()


async def test_unavailable_before_output_is_retried_elsewhere(stand: Stand) -> None:
    bad = await stand.cluster.add("text", 0, broken(UNAVAILABLE))
    good = await stand.cluster.add("text", 0, tokens(3), replica_id=1)
    await stand.ready("text")
    for _ in range(10):
        status, body = await stand.chat("text")
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "t0 t1 t2 "
    assert len(good.calls) == 10
    assert 1 <= len(bad.calls) <= 10
    assert {call.attempt for call in good.calls} <= {0, 1}
    await stand.settled()


async def test_output_of_a_failed_attempt_is_not_mixed_into_the_next(stand: Stand) -> None:
    await stand.cluster.add("text", 0, broken(UNAVAILABLE, after=2))
    await stand.cluster.add("text", 0, tokens(3), replica_id=1)
    await stand.ready("text")
    for _ in range(10):
        _, body = await stand.chat("text")
        assert body["choices"][0]["message"]["content"] == "t0 t1 t2 "
        assert body["usage"]["completion_tokens"] == 3


async def test_retries_are_bounded(stand: Stand) -> None:
    workers = [await stand.cluster.add("text", 0, broken(UNAVAILABLE), replica_id=n) for n in range(5)]
    await stand.ready("text")
    status, body = await stand.chat("text")
    assert status == 503
    assert body["error"]["code"] == "engine_busy"
    assert sorted(len(worker.calls) for worker in workers) == [0, 0, 1, 1, 1]
    await stand.settled()


async def test_other_errors_are_not_retried(stand: Stand) -> None:
    workers = [await stand.cluster.add("text", 0, broken(INTERNAL), replica_id=n) for n in range(2)]
    await stand.ready("text")
    status, body = await stand.chat("text")
    assert (status, body["error"]["type"], body["error"]["code"]) == (500, "server_error", "engine_failed")
    assert sum(len(worker.calls) for worker in workers) == 1


async def test_an_error_before_the_first_token_is_an_http_status(stand: Stand) -> None:
    await stand.cluster.add("text", 0, broken(INTERNAL))
    await stand.ready("text")
    status, body = await stand.chat("text", stream=True)
    assert status == 500
    assert body["error"]["code"] == "engine_failed"


async def test_an_error_after_output_is_an_event() -> None:
    async with running_stand(text_pipeline(), replay_limit=0) as stand:

        async def script(call: Call) -> None:
            call.text("one ")
            await wait_until(lambda: stand.gateway.orchestrator.running[call.request.request_id].delivered)
            call.fail(UNAVAILABLE)

        worker = await stand.cluster.add("text", 0, script)
        await stand.cluster.add("text", 0, script, replica_id=1)
        await stand.ready("text")
        received: list[Any] = await stand.stream("text")
        assert received[1]["choices"][0]["delta"]["content"] == "one "
        assert received[-2]["error"]["code"] == "engine_busy"
        assert received[-1] == "[DONE]"
        assert len(worker.calls) + len(stand.cluster.workers[1].calls) == 1
        await stand.settled()


async def test_a_killed_replica_is_unrouted_and_its_requests_move(stand: Stand) -> None:
    first = await stand.cluster.add("text", 0, hang)
    await stand.ready("text")
    asking = [asyncio.create_task(stand.chat("text")) for _ in range(8)]
    await wait_until(lambda: len(first.running) == 8, what="calls at the first replica")
    second = await stand.cluster.add("text", 0, tokens(2), replica_id=1)
    await first.kill()
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 8
    # The control plane still shows it; nobody is sent there.
    assert all(status == 200 for status, _ in await asyncio.gather(*(stand.chat("text") for _ in range(20))))
    assert len(second.calls) == 28
    await stand.settled()


async def test_a_replica_that_comes_back_is_used_again(stand: Stand) -> None:
    port = reserved_port()
    worker = await stand.cluster.add("text", 0, tokens(2), port=port)
    await stand.ready("text")
    await worker.kill()
    await wait_until(lambda: not stand.gateway.router.ready_pipelines()["text"], what="unrouted")
    await worker.start(port)
    await stand.ready("text")
    assert (await stand.chat("text"))[0] == 200


async def test_a_restarted_replica_at_another_address_replaces_the_old_one(stand: Stand) -> None:
    old = await stand.cluster.add("text", 0, tokens(2))
    await stand.ready("text")
    new = await stand.cluster.add("text", 0, tokens(5))  # the same replica id, a later epoch
    await wait_until(lambda: list(stand.gateway.router.sessions) == [("text", 0, 0, new.ref.epoch)], what="switch")
    await stand.ready("text")
    _, body = await stand.chat("text")
    assert body["usage"]["completion_tokens"] == 5
    assert not old.calls
    await wait_until(lambda: not old.sessions, what="the old session to close")


async def test_a_wrong_epoch_is_not_routed_to(stand: Stand) -> None:
    worker = await stand.cluster.add("text", 0, tokens(2))
    record = worker.record()
    record.ref.epoch += 50
    record.ref.replica_id = 7
    stand.cluster.control_plane.put(record)
    await wait_until(lambda: len(stand.gateway.table.replicas) == 2, what="both records")
    await wait_until(lambda: not stand.gateway.table.replicas["text", 0, 7].routable, what="refused")
    assert all(status == 200 for status, _ in await asyncio.gather(*(stand.chat("text") for _ in range(10))))


async def test_no_replica_is_an_honest_503(stand: Stand) -> None:
    async with running_stand(route_wait_s=0.05) as hurried:
        await wait_until(lambda: "text" in hurried.gateway.table.pipelines, what="pipeline")
        status, body = await hurried.chat("text")
        assert status == 503
        assert body["error"]["code"] == "no_replica"
        assert "stage 0 of text" in body["error"]["message"]
        await hurried.settled()


async def test_requests_wait_for_a_replica_to_come(stand: Stand) -> None:
    await wait_until(lambda: "text" in stand.gateway.table.pipelines, what="pipeline")
    asking = asyncio.create_task(stand.chat("text"))
    await wait_until(lambda: stand.gateway.router.pools["text", 0].waiting == 1, what="waiting pick")
    await stand.cluster.add("text", 0, tokens(1))
    assert (await asking)[0] == 200


async def test_a_draining_replica_gets_nothing_new(stand: Stand) -> None:
    first = await stand.cluster.add("text", 0, tokens(1))
    second = await stand.cluster.add("text", 0, tokens(1), replica_id=1)
    await stand.ready("text")
    first.broadcast(stage_service_pb2.SessionResponse(draining=True))
    await wait_until(lambda: not stand.gateway.table.replicas["text", 0, 0].routable, what="unrouted")
    for _ in range(10):
        assert (await stand.chat("text"))[0] == 200
    assert (len(first.calls), len(second.calls)) == (0, 10)


async def test_a_replica_that_leaves_finishes_what_it_has(stand: Stand) -> None:
    go = asyncio.Event()
    worker = await stand.cluster.add("text", 0, held(go, tokens(2)))
    await stand.ready("text")
    asking = asyncio.create_task(stand.chat("text"))
    await wait_until(lambda: bool(worker.running), what="call")
    stand.cluster.control_plane.remove(worker.ref)
    await wait_until(lambda: not stand.gateway.table.replicas, what="removal")
    go.set()
    assert (await asking)[0] == 200
    await wait_until(lambda: not worker.sessions, what="the session to close")


async def test_a_deadline_is_a_504() -> None:
    async with running_stand(request_timeout_s=1.0) as stand:  # time to get to the worker
        worker = await stand.cluster.add("text", 0, hang)
        await stand.ready("text")
        status, body = await stand.chat("text")
        assert (status, body["error"]["type"]) == (504, "timeout_error")
        await wait_until(lambda: len(worker.aborts) == 1, what="abort")
        await stand.settled()


async def test_a_stage_that_fails_takes_the_others_with_it() -> None:
    async with running_stand(speech_pipeline()) as stand:
        thinker = await stand.cluster.add("speech", 0, hang)
        talker = await stand.cluster.add("speech", 1, broken(INTERNAL))
        code2wav = await stand.cluster.add("speech", 2, hang)
        await stand.ready("speech")
        status, body = await stand.chat("speech", modalities=["audio"])
        assert (status, body["error"]["code"]) == (500, "engine_failed")
        await wait_until(lambda: len(thinker.aborts) == len(code2wav.aborts) == 1, what="aborts")
        assert talker.aborts == talker.released  # it had ended
        await stand.settled()


async def test_stages_without_flow_get_handles() -> None:
    async def produce(call: Call) -> None:
        handle = transfer_pb2.TransferHandle(key=f"{call.request.request_id}/0", size_bytes=4, consumers=1)
        output = stage_service_pb2.StageOutput(to_stage=call.request.outputs[0].to_stage, handles=[handle])
        call.text("words")
        call.send(stage_service_pb2.StageEvent(outputs=[output]))
        call.finish("stop", 2, 1)

    async with running_stand(speech_pipeline(async_chunk=False)) as stand:
        workers = [await stand.cluster.add("speech", n, script) for n, script in enumerate((produce, produce, speak))]
        await stand.ready("speech")
        status, body = await stand.chat("speech", modalities=["text", "audio"])
        assert status == 200
        assert body["choices"][0]["message"]["content"] == "words"
        talker, code2wav = workers[1].calls[0], workers[2].calls[0]
        assert talker.inputs[0].handles.handles[0].key == f"{body['id']}/0"
        assert not talker.outputs[0].flow
        assert len(code2wav.inputs[0].handles.handles) == 1
        await stand.settled()
        # What was kept for a replay is let go once nobody can need it.
        await wait_until(lambda: [len(w.released) for w in workers] == [1, 1, 0], what="kept data let go")
        assert all(worker.aborted_requests == [] for worker in workers)


async def test_handles_nobody_reads_are_given_back() -> None:
    async def produce(call: Call) -> None:
        output = stage_service_pb2.StageOutput(to_stage=1, handles=[transfer_pb2.TransferHandle(key="k")])
        call.send(stage_service_pb2.StageEvent(outputs=[output]))
        call.finish()

    async with running_stand(speech_pipeline(async_chunk=False)) as stand:
        thinker = await stand.cluster.add("speech", 0, produce)
        await stand.cluster.add("speech", 1, broken(INTERNAL))
        await stand.cluster.add("speech", 2, speak)
        await stand.ready("speech")
        assert (await stand.chat("speech", modalities=["audio"]))[0] == 500
        await wait_until(lambda: len(thinker.released) == 1, what="cleanup")
        await stand.settled()


async def test_a_slow_client_costs_its_own_request_only() -> None:
    async def flood(call: Call) -> None:
        while True:
            call.text("x" * 65536)
            await asyncio.sleep(0.001)

    async with running_stand(stream_buffer_bytes=1_000_000, keepalive_s=0.2) as stand:
        slow = await stand.cluster.add("text", 0, flood)
        await stand.ready("text")
        body = {"model": "text", "messages": USER, "stream": True}
        async with stand.http.post("/v1/chat/completions", json=body, read_bufsize=1024) as response:
            assert response.status == 200
            await wait_until(lambda: bool(slow.aborts), what="abort of the slow request")
            await slow.kill()
            await stand.cluster.add("text", 0, tokens(2), replica_id=1)
            await stand.ready("text")
            assert (await stand.chat("text"))[0] == 200
            # What was under way is still readable; then the connection ends, without a clean end of the stream.
            with contextlib.suppress(aiohttp.ClientError):
                assert b'finish_reason":"stop' not in await response.read()
        await stand.settled()


async def test_media_that_chat_cannot_carry_is_an_error(stand: Stand) -> None:
    async def picture(call: Call) -> None:
        info = stage_service_pb2.StageEvent(media=b"png")
        info.media_info.mime_type = "image/png"
        call.send(info)
        call.finish()

    await stand.cluster.add("speech", 0, tokens(1))
    await stand.cluster.add("speech", 1, silent)
    await stand.cluster.add("speech", 2, picture)
    await stand.ready("speech")
    status, body = await stand.chat("speech", modalities=["audio"])
    assert (status, body["error"]["code"]) == (500, "unexpected_media")
    assert (await stand.chat("speech"))[0] == 200


async def test_random_aborts_leave_nothing(stand: Stand) -> None:
    await stand.cluster.add("text", 0, endless)
    await stand.cluster.add("text", 0, endless, replica_id=1)
    await stand.ready("text")

    async def ask(number: int) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(number % 10 * 0.01):
                await stand.stream("text")

    await asyncio.gather(*(ask(number) for number in range(200)))
    await stand.settled()
    assert sum(len(worker.aborts) for worker in stand.cluster.workers) <= 200


async def test_draining_finishes_what_runs_and_takes_nothing_new(stand: Stand) -> None:
    go = asyncio.Event()
    worker = await stand.cluster.add("text", 0, held(go, tokens(2)))
    await stand.ready("text")
    asking = asyncio.create_task(stand.chat("text"))
    await wait_until(lambda: bool(worker.running), what="call")
    draining = asyncio.create_task(stand.gateway.drain())
    await wait_until(lambda: stand.gateway.orchestrator.admission.draining, what="draining")
    async with stand.http.get("/ready") as response:
        assert response.status == 503
    async with stand.http.get("/health") as response:
        assert response.status == 200
    status, body = await stand.chat("text")
    assert (status, body["error"]["code"]) == (503, "gateway_draining")
    async with stand.http.get("/api/v1/replicas:watch") as response:
        assert (response.status, response.headers["retry-after"]) == (503, "1"), "it would be cut off at the end"
    go.set()
    assert (await asking)[0] == 200
    await draining


async def test_responses_of_a_gateway_that_drains_are_the_last_of_their_connections(stand: Stand) -> None:
    """Or clients would send their next requests to connections that close under them."""
    go = asyncio.Event()
    worker = await stand.cluster.add("text", 0, held(go, tokens(2)))
    await stand.ready("text")

    async def answer() -> tuple[int, str | None]:
        async with stand.http.post("/v1/chat/completions", json={"model": "text", "messages": USER}) as response:
            await response.read()
            return response.status, response.headers.get("connection")

    async with stand.http.get("/ready") as response:
        assert "connection" not in response.headers
    asking = asyncio.create_task(answer())
    await wait_until(lambda: bool(worker.running), what="call")
    draining = asyncio.create_task(stand.gateway.drain())
    await wait_until(lambda: stand.gateway.orchestrator.admission.draining, what="draining")
    assert await answer() == (503, "close")
    go.set()
    assert await asking == (200, "close")
    await draining


@pytest.mark.parametrize("choices", [1, 2])
async def test_an_error_event_names_the_field_of_the_body(stand: Stand, choices: int) -> None:
    async def refuses(call: Call) -> None:
        call.text("a")
        call.fail(errors.InvalidRequestError.field("sampling.structured_output", "must be better"))

    await stand.cluster.add("text", 0, refuses)
    await stand.ready("text")
    body = {"model": "text", "messages": USER, "stream": True, "n": choices}
    async with stand.http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        *_, error, done = events(await response.read())
    assert done == "[DONE]"
    assert isinstance(error, dict)
    assert error["error"]["param"] == "response_format"


async def test_a_dead_engine_costs_nobody_else_a_request(stand: Stand) -> None:
    """Its replica is left at once, as one that says that it leaves: it takes no more tries, and who finds no other one
    waits for it."""
    died: list[Call] = []

    async def dies(call: Call) -> None:
        died.append(call)
        call.fail(errors.UnavailableError("the engine has died", reason="ENGINE_DEAD"))

    await stand.cluster.add("text", 0, dies)
    await stand.ready("text")
    asking = [asyncio.create_task(stand.chat("text")) for _ in range(16)]
    await wait_until(lambda: stand.gateway.router.pools["text", 0].waiting == 16, what="all wait for another")
    assert len(died) <= 16
    assert stand.gateway.router.pools["text", 0].routable == 0
    await stand.cluster.add("text", 0, tokens(2), replica_id=1)
    assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 16
    await stand.settled()


async def test_control_planes_fail_over_and_the_last_view_is_kept(stand: Stand) -> None:
    await stand.cluster.add("text", 0, tokens(1))
    await stand.ready("text")
    control_plane = stand.cluster.control_plane
    port = int(control_plane.address.rpartition(":")[2])
    seen = stand.gateway.table.revision
    await control_plane.stop()
    await wait_until(lambda: not stand.gateway.watch.connected, what="loss noticed")
    assert (await stand.chat("text"))[0] == 200
    await control_plane.start(port)
    await wait_until(lambda: stand.gateway.watch.connected, what="reconnection")
    assert control_plane.resumed_from[-1] == seen
    assert (await stand.chat("text"))[0] == 200


class _Faulty:
    """A balancer with a bug."""

    name = "faulty"

    def pick(self, candidates: Sequence[C], hint: Hint = NO_HINT) -> C:
        raise ZeroDivisionError("a bug of ours")


async def test_a_bug_of_ours_costs_the_request_that_meets_it(stand: Stand) -> None:
    await stand.cluster.add("text", 0, tokens(3))
    await stand.ready("text")
    pool = stand.gateway.router.pools["text", 0]
    pool.use(_Faulty())
    status, body = await stand.chat("text")
    assert (status, body["error"]["type"]) == (500, "server_error")
    await stand.settled()
    pool.use(RoundRobinBalancer())
    assert (await stand.chat("text"))[0] == 200
