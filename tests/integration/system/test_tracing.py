"""Traces of requests over real workers, as a collector receives them."""

from __future__ import annotations

import socket
from typing import Any

from tests.bugs.harness import System, start_gateway, system
from tests.support.collectors import CollectedSpan, Collector
from tests.support.collectors import collector as collector  # a fixture
from tests.support.processes import wait_until

SPEECH = """
pipeline: speech
async_chunk: true
stages:
  - {stage_id: 0, engine: sim, final_output: true, final_output_type: text, sim: {output: text, tokens: 8}}
  - {stage_id: 1, engine: sim, sim: {output: tensor, chunks: 2, chunk_bytes: 70000}}
  - {stage_id: 2, engine: sim, final_output: true, final_output_type: audio,
     sim: {output: audio, seconds_per_chunk: 0.01}}
edges:
  - {from: 0, to: 1}
  - {from: 1, to: 2}
"""
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = f"00-{TRACE_ID}-00f067aa0ba902b7-"


async def stream(made: System, base: str, flags: str) -> str:
    """A streamed chat of a caller who has such flags ("": who says nothing); returns its text."""
    headers = {"traceparent": CALLER + flags, "tracestate": "vendor=1"} if flags else {}
    body: dict[str, Any] = {
        "model": "speech", "messages": [{"role": "user", "content": "Say something. And more."}], "stream": True,
        "modalities": ["text", "audio"], "audio": {"voice": "a", "format": "pcm16"},
    }  # fmt: skip
    async with made.http.post(f"{base}/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status == 200
        text = await response.text()
        assert text.endswith("data: [DONE]\n\n")
        assert "error" not in text
        return text


def only(spans: list[CollectedSpan], name: str) -> CollectedSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


async def test_a_streamed_chat_over_three_stages_is_one_tree(collector: Collector) -> None:
    async with system(trace_endpoint=collector.address, trace_sample=0.0) as made:
        await made.apply(SPEECH)
        for stage_id in range(3):
            await made.worker("speech", stage_id, trace_endpoint=collector.address)
            await made.routable(1, "speech", stage_id)
        await stream(made, made.base, "")  # this gateway chooses none by itself
        await stream(made, made.base, "00")  # and this caller does not want it
        await stream(made, made.base, "01")
        with socket.socket() as bound:  # nobody listens there, and nobody else gets the port
            bound.bind(("127.0.0.1", 0))
            away = f"http://127.0.0.1:{bound.getsockname()[1]}"
            gateway, base = await start_gateway(made.stack, made.client.address, trace_endpoint=away, trace_sample=1.0)
            ready = gateway.router.ready_pipelines
            await wait_until(lambda: ready().get("speech", False), what="the second gateway knows the replicas")
            await stream(made, base, "")
            await gateway.close()
        traced = {f"call speech/{n}" for n in range(3)} | {f"run speech/{n}" for n in range(3)}
        names = {"POST /v1/chat/completions", *traced, "receive 0→1", "receive 1→2"}

        def whole(spans: list[CollectedSpan]) -> bool:
            return {span.name for span in spans if span.trace_id == TRACE_ID} >= names

        spans = [span for span in await collector.until(whole) if span.trace_id == TRACE_ID]
    assert sorted(span.name for span in spans) == sorted(names)
    root = only(spans, "POST /v1/chat/completions")
    assert (root.parent_id, root.kind, root.trace_state) == ("00f067aa0ba902b7", "server", "vendor=1")
    assert root.resource["service.name"] == "omniplane-gateway"
    assert (root.attributes["omni.status"], root.attributes["http.response.status_code"]) == ("finished", 200)
    assert "first_output" in [name for name, _ in root.events]
    for stage_id in range(3):
        call, run = only(spans, f"call speech/{stage_id}"), only(spans, f"run speech/{stage_id}")
        assert (call.parent_id, run.parent_id) == (root.span_id, call.span_id)
        assert (call.kind, run.kind) == ("client", "server")
        assert call.attributes["omni.outcome"] == "finished"
        assert "omni.policy_reason" in call.attributes
        assert (run.resource["service.name"], run.resource["omni.stage"]) == ("omniplane-stage-worker", stage_id)
        assert (call.error, run.error, run.trace_state) == ("", "", "vendor=1")
        told = [name for name, _ in run.events]
        assert told == ["first_output", *(["published"] if stage_id < 2 else [])]
    for edge, stage_id in (("0→1", 1), ("1→2", 2)):
        read = only(spans, f"receive {edge}")
        published = dict(only(spans, f"run speech/{stage_id - 1}").events)["published"]
        assert read.parent_id == only(spans, f"run speech/{stage_id}").span_id
        assert read.attributes["omni.outcome"] == "OK"
        assert read.attributes["omni.wait_ms"] >= 0
        assert read.attributes["omni.chunks"] == published["omni.chunks"] > 0
        assert read.attributes["omni.bytes"] == published["omni.bytes"] > 0
    # Whatever else has come is of the gateway that chose for itself, whose own spans had nowhere to go.
    others = [span for span in collector.spans if span.trace_id != TRACE_ID]
    assert len({span.trace_id for span in others}) <= 1
    assert {span.resource["service.name"] for span in others} <= {"omniplane-stage-worker"}


def _runs(spans: list[CollectedSpan]) -> list[CollectedSpan]:
    return [span for span in spans if span.name.startswith("run ")]


async def test_spans_of_all_processes_know_a_request_as_its_client_does(collector: Collector) -> None:
    """Workers know it under an id that is unique among gateways, companions under ids of their own."""
    body = {"model": "speech", "request_id": "mine", "prompt": {"text": "Say something."}, "modalities": ["text"]}
    async with system(trace_endpoint=collector.address, trace_sample=1.0) as made:
        await made.apply(SPEECH)
        for stage_id in range(3):
            await made.worker("speech", stage_id, trace_endpoint=collector.address)
            await made.routable(1, "speech", stage_id)
        untraced, other = await start_gateway(made.stack, made.client.address)
        await wait_until(lambda: untraced.router.ready_pipelines().get("speech", False), what="the other gateway")
        for base, headers in ((made.base, {}), (other, {"traceparent": f"{CALLER}01"})):
            async with made.http.post(f"{base}/api/v1/generate", json=body, headers=headers) as response:
                assert response.status == 200
                assert '"finish"' in await response.text()
        spans = await collector.until(lambda spans: len(spans) == 4 and len(_runs(spans)) == 2)
    assert {span.attributes["omni.request_id"] for span in spans if "omni.request_id" in span.attributes} == {"mine"}
    wires = [span.attributes["omni.wire_id"] for span in _runs(spans)]
    assert len(set(wires)) == 2
    assert all(wire.startswith("mine.") for wire in wires)
