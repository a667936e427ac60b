"""What a traced request over scripted workers tells: whichever way it went, and whom it lost."""

from __future__ import annotations

import asyncio

from omni.v1 import stage_service_pb2
from omnicore.tracing import TraceContext
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.scripted import Call, ScriptedWorker
from tests.support.collectors import CollectedSpan, Collector
from tests.support.collectors import collector as collector  # a fixture
from tests.support.processes import wait_until


async def test_a_killed_worker_is_a_replay_in_the_trace(collector: Collector) -> None:
    told: list[str] = []

    async def script(call: Call) -> None:
        told.append(call.request.traceparent)
        if not call.request.HasField("resume"):
            call.send(stage_service_pb2.StageEvent(text="so ", token_ids=[1]))
            await asyncio.Event().wait()
        call.send(stage_service_pb2.StageEvent(text="far", token_ids=[2]))
        call.finish("stop", prompt=5, completion=2)

    async def lose_one(stand: Stand, workers: list[ScriptedWorker]) -> None:
        running = stand.gateway.orchestrator.running
        await wait_until(lambda: any(state.delivered for state in running.values()), what="output at the client")
        await next(worker for worker in workers if worker.running).kill()

    async with running_stand(trace_endpoint=collector.address, trace_sample=1.0) as stand:
        workers = [await stand.cluster.add("text", 0, script, n) for n in range(2)]
        await stand.ready("text")
        losing = asyncio.create_task(lose_one(stand, workers))
        events = await stand.stream("text")
        await losing
        assert events[-1] == "[DONE]"
        spans = await collector.until(lambda spans: len(spans) >= 3)
        async with stand.http.get("/metrics") as response:
            assert 'omni_gateway_trace_spans_total{outcome="made"} 3.0' in await response.text()
    root, first, second = sorted(spans, key=lambda span: (bool(span.parent_id), span.begin_ns))
    assert (root.name, root.attributes["omni.replays"], root.error) == ("POST /v1/chat/completions", 1, "")
    replayed = dict(root.events)["replayed"]
    assert (replayed["omni.stage"], replayed["omni.replica"]) == (0, first.attributes["omni.replica"])
    assert [_outcome(span) for span in (first, second)] == [(0, "lost"), (1, "finished")]
    assert first.error
    assert first.attributes["omni.replica"] != second.attributes["omni.replica"]
    for span, traceparent in zip((first, second), told, strict=True):
        context = TraceContext.parse(traceparent)
        assert context is not None
        assert context.sampled
        assert (f"{context.trace_id:032x}", f"{context.span_id:016x}") == (root.trace_id, span.span_id)
        assert span.parent_id == root.span_id


def _outcome(span: CollectedSpan) -> tuple[int, str]:
    return span.attributes["omni.attempt"], span.attributes["omni.outcome"]
