"""The OpenAI surface over real sockets, before scripted workers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import wave
from typing import Any

import openai
import pytest

from tests.integration.gateway.conftest import USER, Stand, running_stand
from tests.integration.gateway.scripted import Call
from tests.integration.gateway.scripts import hang, silent, speak, tokens


async def with_speech(stand: Stand) -> None:
    await stand.cluster.add("speech", 0, tokens(4))
    await stand.cluster.add("speech", 1, silent)
    await stand.cluster.add("speech", 2, speak)
    await stand.ready("speech")


async def with_text(stand: Stand, count: int = 4) -> None:
    await stand.cluster.add("text", 0, tokens(count))
    await stand.ready("text")


async def test_text_in_one_piece(stand: Stand) -> None:
    await with_text(stand)
    async with stand.http.post(
        "/v1/chat/completions", json={"model": "text", "messages": USER}, headers={"x-request-id": "mine-1"}
    ) as response:
        assert response.status == 200
        assert response.headers["x-request-id"] == "mine-1"
        body = await response.json()
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "t0 t1 t2 t3 "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["total_tokens"] == 7
    await stand.settled()


async def test_what_the_worker_is_asked(stand: Stand) -> None:
    worker = await stand.cluster.add("text", 0, tokens(1))
    await stand.ready("text")
    await stand.chat("text", temperature=0.5, max_tokens=9, stop=["x"])
    (call,) = worker.calls
    assert call.prompt.chat.messages[0].parts[0].text == "hello"
    assert (call.sampling.temperature, call.sampling.max_tokens, list(call.sampling.stop)) == (0.5, 9, ["x"])
    assert call.emit_output
    assert call.attempt == 0
    assert 0 < call.timeout.ToSeconds() <= 600


async def test_a_stream_ends_once(stand: Stand) -> None:
    await with_text(stand)
    received = await stand.stream("text", stream_options={"include_usage": True})
    assert received[-1] == "[DONE]"
    assert received.count("[DONE]") == 1
    chunks: list[Any] = received[:-1]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"])
    assert text == "t0 t1 t2 t3 "
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]].count("stop") == 1
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(c["usage"] is None for c in chunks[:-1])
    assert len({c["id"] for c in chunks}) == 1


async def test_a_hundred_streams_each_end_once(stand: Stand) -> None:
    async def as_asked(call: Call) -> None:
        await tokens(call.request.sampling.max_tokens)(call)

    await stand.cluster.add("text", 0, as_asked)
    await stand.cluster.add("text", 0, as_asked, replica_id=1)
    await stand.ready("text")
    counts = [1 + number % 50 for number in range(100)]
    for received, count in zip(
        await asyncio.gather(*(stand.stream("text", max_tokens=count) for count in counts)), counts, strict=True
    ):
        chunks: list[Any] = received[:-1]
        assert received.count("[DONE]") == 1
        assert received[-1] == "[DONE]"
        assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]
        assert sum("content" in c["choices"][0]["delta"] for c in chunks) == count + 1
    assert all(len(worker.calls) >= 20 for worker in stand.cluster.workers)
    await stand.settled()


async def test_text_and_audio_in_one_piece(stand: Stand) -> None:
    await with_speech(stand)
    status, body = await stand.chat("speech", modalities=["text", "audio"], audio={"voice": "anna", "format": "wav"})
    assert status == 200
    message = body["choices"][0]["message"]
    assert message["content"] == message["audio"]["transcript"] == "t0 t1 t2 t3 "
    with wave.open(io.BytesIO(base64.b64decode(message["audio"]["data"]))) as audio:
        assert (audio.getframerate(), audio.getnchannels(), audio.getsampwidth()) == (24000, 1, 2)
        assert audio.readframes(1000) == b"\x01\x00" * 240 + b"\x02\x00" * 120
    thinker, talker, code2wav = (worker.calls[0] for worker in stand.cluster.workers)
    assert thinker.emit_output
    assert not talker.emit_output
    assert code2wav.emit_output
    assert thinker.outputs[0].flow
    assert thinker.outputs[0].connector == "shm"
    source = stand.cluster.workers[0]
    flow = talker.inputs[0].flow
    assert (flow.endpoint, flow.session_endpoint) == (source.endpoint, source.session_endpoint)
    assert talker.inputs[0].flow.window == 4
    assert not talker.HasField("prompt")
    assert talker.speech.voice == "anna"
    assert {call.request_id for call in (thinker, talker, code2wav)} == {body["id"]}
    await stand.settled()


async def test_text_only_does_not_trouble_later_stages(stand: Stand) -> None:
    await with_speech(stand)
    assert (await stand.chat("speech"))[0] == 200
    assert [len(worker.calls) for worker in stand.cluster.workers] == [1, 0, 0]
    assert not stand.cluster.workers[0].calls[0].outputs


async def test_speech_is_streamed(stand: Stand) -> None:
    await with_speech(stand)
    body = {"model": "speech", "input": "hello", "voice": "anna", "response_format": "pcm"}
    async with stand.http.post("/v1/audio/speech", json=body) as response:
        assert response.status == 200
        assert response.headers["content-type"] == "audio/pcm;rate=24000;channels=1"
        assert await response.read() == b"\x01\x00" * 240 + b"\x02\x00" * 120
    assert [len(worker.calls) for worker in stand.cluster.workers] == [0, 1, 1]
    assert stand.cluster.workers[1].calls[0].prompt.text == "hello"
    await stand.settled()


async def test_the_official_client(stand: Stand) -> None:
    await with_speech(stand)
    client = openai.AsyncOpenAI(base_url=f"http://{stand.addresses['http']}/v1", api_key="none", max_retries=0)
    async with client:
        plain = await client.chat.completions.create(model="speech", messages=[{"role": "user", "content": "hi"}])
        assert plain.choices[0].message.content == "t0 t1 t2 t3 "
        stream = await client.chat.completions.create(
            model="speech",
            messages=[{"role": "user", "content": "hi"}],
            modalities=["text", "audio"],
            audio={"voice": "anna", "format": "pcm16"},
            stream=True,
            stream_options={"include_usage": True},
        )
        text, audio, transcript, finish = "", b"", "", []
        async for chunk in stream:
            for choice in chunk.choices:
                text += choice.delta.content or ""
                if choice.delta.audio is not None:
                    audio += base64.b64decode(choice.delta.audio.data or "")
                    transcript += choice.delta.audio.transcript or ""
                finish += [choice.finish_reason] if choice.finish_reason else []
            last = chunk
        assert text == transcript == "t0 t1 t2 t3 "
        assert audio == b"\x01\x00" * 240 + b"\x02\x00" * 120
        assert finish == ["stop"]
        assert last.usage is not None
        assert last.usage.prompt_tokens == 3
        heard = await client.chat.completions.create(
            model="speech",
            messages=[{"role": "user", "content": "hi"}],
            modalities=["text", "audio"],
            audio={"voice": "anna", "format": "wav"},
        )
        assert heard.choices[0].message.audio is not None
        assert heard.choices[0].message.audio.transcript == "t0 t1 t2 t3 "
        spoken = await client.audio.speech.create(model="speech", voice="anna", input="hi", response_format="wav")
        assert spoken.content[:4] == b"RIFF"
        async with client.audio.speech.with_streaming_response.create(
            model="speech", voice="anna", input="hi", response_format="pcm"
        ) as response:
            assert len(await response.read()) == 720
        assert [model.id async for model in client.models.list()] == ["speech"]
        assert (await client.models.retrieve("speech")).id == "speech"
        completed = await client.completions.create(model="speech", prompt="hi", max_tokens=4)
        assert completed.choices[0].text == "t0 t1 t2 t3 "
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nope", messages=[{"role": "user", "content": "hi"}])
        assert unknown.value.code == "model_not_found"
        with pytest.raises(openai.BadRequestError) as bad:
            await client.audio.speech.create(model="speech", voice="a", input="hi", response_format="mp3")
        assert bad.value.param == "response_format"
    await stand.settled()


@pytest.mark.parametrize(
    ("body", "headers", "status", "code", "text"),
    [
        (b'{"model": "text",\n "messages": [}', {}, 400, "invalid_json", "line 2, column"),
        (b"", {}, 400, "invalid_json", "not valid JSON"),
        (b"\xff\xfe", {}, 400, "invalid_json", "not valid JSON"),
        (b"[]", {}, 400, "invalid_request", "body: must be an object, got a list"),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type", "json"),
        (b'{"model": "nope", "messages": []}', {}, 404, "model_not_found", "known models"),
        (b'{"messages": []}', {}, 400, "invalid_request", "model: required"),
        (b'{"model": 5}', {}, 400, "invalid_request", "model: must be a string"),
        (b" " * 200_000, {}, 413, "body_too_large", "at most 100000 bytes"),
    ],
)
async def test_bad_bodies(body: bytes, headers: dict[str, str], status: int, code: str, text: str) -> None:
    async with running_stand(max_body_bytes=100_000) as stand:
        await with_text(stand)
        sent = {"content-type": "application/json", **headers}
        async with stand.http.post("/v1/chat/completions", data=body, headers=sent) as response:
            assert response.status == status
            assert response.headers["content-type"] == "application/json"
            error = (await response.json())["error"]
        assert error["code"] == code
        assert text in error["message"]
        assert set(error) == {"message", "type", "param", "code"}


async def test_a_body_without_length_is_limited_too() -> None:
    async def pieces() -> Any:
        for _ in range(20):
            yield b" " * 10_000

    async with (
        running_stand(max_body_bytes=100_000) as stand,
        stand.http.post(
            "/v1/chat/completions", data=pieces(), headers={"content-type": "application/json"}
        ) as response,
    ):
        assert response.status == 413


async def test_wrong_paths_and_methods_are_json(stand: Stand) -> None:
    for method, path, status, code in (
        ("GET", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/nope", 404, "path_not_found"),
        ("GET", "/v1/models/nope", 404, "model_not_found"),
    ):
        async with stand.http.request(method, path) as response:
            assert response.status == status
            error = (await response.json())["error"]
            assert error["code"] == code
            assert code != "path_not_found" or error["message"].endswith("/docs shows those that there are")


async def test_models_and_readiness_follow_the_replicas(stand: Stand) -> None:
    async def ready() -> tuple[int, Any]:
        async with stand.http.get("/ready") as response:
            return response.status, await response.json()

    async def models() -> list[str]:
        async with stand.http.get("/v1/models") as response:
            return [model["id"] for model in (await response.json())["data"]]

    status, detail = await ready()
    assert (status, detail["ready"]) == (503, False)
    assert await models() == []
    await with_text(stand)
    status, detail = await ready()
    assert (status, detail["pipelines"]["text"]) == (200, {"ready": True, "routable_replicas": {"0": 1}})
    assert detail["pipelines"]["speech"]["ready"] is False
    assert await models() == ["text"]
    async with stand.http.get("/health") as response:
        assert (response.status, (await response.json())["degraded"]) == (200, True)
    stand.cluster.control_plane.remove(stand.cluster.workers[0].ref)
    while await models():
        await asyncio.sleep(0.01)
    assert (await ready())[0] == 503
    async with stand.http.get("/health") as response:
        assert response.status == 200


async def test_metrics_count_what_happened(stand: Stand) -> None:
    await stand.cluster.add("text", 0, tokens(4), replica_id=5)
    await stand.ready("text")
    await stand.chat("text")
    await stand.settled()
    async with stand.http.get("/metrics") as response:
        text = await response.text()
    assert 'omni_gateway_requests_total{outcome="finished",pipeline="text",task="chat"} 1.0' in text
    assert 'omni_gateway_stage_calls_total{pipeline="text",replica="5",stage="0"} 1.0' in text
    assert 'omni_gateway_completion_tokens_total{pipeline="text"} 4.0' in text
    assert "omni_gateway_inflight_requests 0.0" in text


async def test_silence_is_filled_with_comments() -> None:
    async with running_stand(keepalive_s=0.05) as stand:
        await stand.cluster.add("text", 0, hang)
        await stand.ready("text")
        body = {"model": "text", "messages": USER, "stream": True}
        async with stand.http.post("/v1/chat/completions", json=body) as response:
            assert await response.content.readline() == b": keep-alive\n"
            response.close()
        await stand.settled()


async def test_a_full_gateway_says_when_to_come_back() -> None:
    async with running_stand(max_inflight=1, max_queued=0) as stand:
        worker = await stand.cluster.add("text", 0, hang)
        await stand.ready("text")
        first = asyncio.create_task(stand.chat("text"))
        while not worker.calls:
            await asyncio.sleep(0.01)
        async with stand.http.post("/v1/chat/completions", json={"model": "text", "messages": USER}) as response:
            assert response.status == 429
            assert response.headers["retry-after"] == "1"
            assert (await response.json())["error"]["type"] == "rate_limit_error"
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        await stand.settled()


async def test_random_bytes_do_not_hurt(stand: Stand) -> None:
    await with_text(stand)
    for address in stand.addresses.values():
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(bytes(range(256)) * 16)
        await writer.drain()
        writer.close()
        with contextlib.suppress(ConnectionError):  # the other end may close or reset
            await reader.read()
    assert (await stand.chat("text"))[0] == 200
