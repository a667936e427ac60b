"""What the OpenAI endpoints answer beyond plain text, before real workers with simulated engines."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import wave
from typing import Any

import aiohttp

from omni.v1 import inference_service_pb2, inference_service_pb2_grpc, prompt_pb2
from omnicore import rpc
from omnicore.errors import InternalError
from stage_worker.engines.sim_content import answer_text
from tests.integration.gateway.conftest import USER, Stand, events, running_stand
from tests.integration.gateway.scripts import hang, tokens
from tests.integration.openai.models import running_models, text_model, voice_model
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until


def wav(seconds: float = 0.5, frequency: int = 3) -> bytes:
    made = io.BytesIO()
    with wave.open(made, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(bytes(i * frequency % 251 for i in range(int(16000 * seconds))))
    return made.getvalue()


async def streamed(stand: Stand, path: str, body: dict[str, Any]) -> list[Any]:
    async with stand.http.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        received = events(await response.read())
    assert received.count("[DONE]") == 1
    assert received[-1] == "[DONE]"
    return received[:-1]


def texts_of(chunks: list[Any]) -> dict[int, str]:
    """The text of each choice of a stream."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    return found


async def test_several_choices_and_their_probabilities() -> None:
    async with running_models(text_model()) as stand:
        asked = {"n": 3, "seed": 7, "logprobs": True, "top_logprobs": 2}
        status, body = await stand.chat("words", **asked)
        assert status == 200, body
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        contents = [choice["message"]["content"] for choice in body["choices"]]
        assert contents == [answer_text("user: hello", 7 + index, 12).rstrip(".") + "." for index in range(3)]
        assert body["usage"]["completion_tokens"] == 36
        assert body["usage"]["prompt_tokens"] == 2
        for choice in body["choices"]:
            entries = choice["logprobs"]["content"]
            assert len(entries) == 12
            assert all(
                len(e["top_logprobs"]) == 2 and e["logprob"] <= 0 and not math.isnan(e["logprob"]) for e in entries
            )
            said = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
            assert choice["message"]["content"].rstrip(".") == said.rstrip(".")
        (alone,) = (await stand.chat("words", seed=7))[1]["choices"]
        assert alone["message"]["content"] == contents[0]
        assert alone["logprobs"] is None
        without_seed = (await stand.chat("words", n=4))[1]["choices"]
        assert len({choice["message"]["content"] for choice in without_seed}) == 4

        options = {"stream_options": {"include_usage": True}}
        chunks = await streamed(stand, "/v1/chat/completions", {"model": "words", "messages": USER, **asked, **options})
        assert texts_of(chunks) == dict(enumerate(contents))
        assert chunks[-1]["usage"] == body["usage"]
        finished = [c["index"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]]
        assert sorted(finished) == [0, 1, 2]
        roles = [c["index"] for chunk in chunks for c in chunk["choices"] if c.get("delta", {}).get("role")]
        assert sorted(roles) == [0, 1, 2]
        typed = inference_service_pb2.GenerateRequest(model="words", prompt=prompt_pb2.Prompt(text="hello"))
        typed.sampling.logprobs = 2
        async with rpc.channel(stand.addresses["grpc"]) as channel:
            stub = inference_service_pb2_grpc.InferenceServiceStub(channel)
            answers = [answer async for answer in stub.Generate(typed)]
        assert [len(answer.logprobs) for answer in answers] == [len(answer.token_ids) for answer in answers]
        assert sum(len(answer.logprobs) for answer in answers) == 12
        with_chances = [c for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
        assert len(with_chances) == 36
        await stand.settled()


async def test_usage_in_every_chunk() -> None:
    """``continuous_usage_stats``, as vLLM has it; load generators such as guidellm always ask for it."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    async with running_models(text_model(), voice_model()) as stand:
        for path, asked in (
            ("/v1/chat/completions", {"messages": USER}),
            ("/v1/chat/completions", {"messages": USER, "logprobs": True, "n": 2}),
            ("/v1/completions", {"prompt": "three more words", "echo": True}),
            ("/v1/completions", {"prompt": ["three more words"] * 2, "logprobs": 0}),
        ):
            chunks = await streamed(stand, path, {"model": "words", **asked, "stream_options": options})
            prompt = 3 if "prompt" in asked else 2
            *running, last = chunks
            for index in {choice["index"] for chunk in running for choice in chunk["choices"]}:
                usages = [chunk["usage"] for chunk in running if chunk["choices"][0]["index"] == index]
                made = [usage["completion_tokens"] for usage in usages]
                # The role or the echo, if there is one; a chunk for each of 12 tokens; the finish reason.
                assert made[-13:] == [*range(1, 13), 12]
                assert made[:-13] in ([], [0])
                assert all(
                    usage == {"prompt_tokens": prompt, "completion_tokens": n, "total_tokens": prompt + n}
                    for usage, n in zip(usages, made, strict=True)
                )
            assert last["choices"] == []
            assert last["usage"]["completion_tokens"] == 12 * (1 + max(c["choices"][0]["index"] for c in running))

        spoken = {"model": "voice", "messages": USER, "modalities": ["text", "audio"], "stream_options": options}
        *running, last = await streamed(stand, "/v1/chat/completions", spoken)
        made = [chunk["usage"]["completion_tokens"] for chunk in running]
        assert made == sorted(made)
        assert (made[0], made[-1]) == (0, 12)
        assert last["usage"]["completion_tokens"] > 12, "other stages' as well"

        for given, expected in (({"include_usage": True}, None), ({"continuous_usage_stats": True}, "none")):
            chunks = await streamed(
                stand, "/v1/chat/completions", {"model": "words", "messages": USER, "stream_options": given}
            )
            assert {chunk.get("usage", "none") for chunk in chunks if chunk["choices"]} == {expected}
        wrong = {"model": "words", "messages": USER, "stream": True, "stream_options": {"continuous_usage_stats": 1}}
        status, answer = await stand.post("/v1/chat/completions", wrong)
        assert (status, answer["error"]["param"]) == (400, "stream_options.continuous_usage_stats")
        await stand.settled()


async def test_completions_of_several_prompts() -> None:
    async with running_models(text_model(max_model_len=50)) as stand:
        body = {"model": "words", "prompt": ["one", "two words"], "n": 2, "echo": True, "seed": 1}
        status, answer = await stand.post("/v1/completions", body)
        assert status == 200, answer
        assert answer["id"].startswith("cmpl-")
        expected = [
            prompt + answer_text(prompt, seed, 12).rstrip(".") + "."
            for prompt, seed in (("one", 1), ("one", 2), ("two words", 1), ("two words", 2))
        ]
        assert [choice["text"] for choice in answer["choices"]] == expected
        assert answer["usage"]["prompt_tokens"] == 3
        assert answer["usage"]["completion_tokens"] == 48
        assert texts_of(await streamed(stand, "/v1/completions", body)) == dict(enumerate(expected))

        body = {"model": "words", "prompt": [[1, 2], [3]], "logprobs": 2, "max_tokens": 4}
        status, answer = await stand.post("/v1/completions", body)
        assert status == 200, answer
        assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
        for choice in answer["choices"]:
            found = choice["logprobs"]
            assert "".join(found["tokens"]) == choice["text"]
            assert found["text_offset"] == [choice["text"].index(token) for token in found["tokens"]]
            assert [len(top) for top in found["top_logprobs"]] == [2] * 4
        chunks = await streamed(stand, "/v1/completions", body)
        offsets = [c["logprobs"]["text_offset"][0] for ch in chunks for c in ch["choices"] if c["logprobs"]]
        assert sorted(offsets) == sorted(o for c in answer["choices"] for o in c["logprobs"]["text_offset"])

        status, answer = await stand.post("/v1/completions", {"model": "words", "prompt": "much " * 51})
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        status, answer = await stand.chat("words", response_format={"type": "json_object"})
        assert (status, answer["error"]["param"]) == (400, "response_format")
        await stand.settled()


async def test_choices_fail_together() -> None:
    async def one_of_them_fails(call: Any) -> None:
        if call.request.request_id.endswith("-1"):
            call.text("half")
            call.fail(InternalError("it broke"))
        else:
            call.text("begun")
            await hang(call)

    async with running_stand(text_pipeline()) as stand:
        worker = await stand.cluster.add("text", 0, one_of_them_fails)
        await stand.ready("text")
        status, body = await stand.chat("text", n=3)
        assert (status, body["error"]["message"]) == (500, "it broke")
        await stand.settled()
        received = await stand.stream("text", n=3)
        assert received[-1] == "[DONE]"
        error: Any = received[-2]
        assert error["error"]["message"] == "it broke"
        await stand.settled()
        assert len(worker.calls) == 6
        # The client leaves: all of them end.
        worker.script = hang
        task = asyncio.create_task(stand.chat("text", n=3))
        await wait_until(lambda: len(worker.running) == 3, what="three running calls")
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await stand.settled()


async def test_a_request_may_limit_its_own_time() -> None:
    async with running_stand(text_pipeline()) as stand:
        worker = await stand.cluster.add("text", 0, hang)
        await stand.ready("text")
        for fields, headers in (
            ({"timeout": 0.05}, {}),
            ({}, {"x-request-timeout": "0.05"}),
            ({"timeout": 300}, {"x-request-timeout": "0.05"}),
        ):
            async with stand.http.post(
                "/v1/chat/completions", json={"model": "text", "messages": USER, **fields}, headers=headers
            ) as response:
                assert response.status == 504
                assert (await response.json())["error"]["code"] == "deadline_exceeded"
        await stand.settled()
        for wrong in ("soon", "0", "-1", "nan", "inf"):
            async with stand.http.post(
                "/v1/chat/completions",
                json={"model": "text", "messages": USER},
                headers={"x-request-timeout": wrong},
            ) as response:
                assert response.status == 400, wrong
                assert (await response.json())["error"]["param"] == "x-request-timeout"
        worker.script = tokens(1)
        async with stand.http.post(
            "/v1/chat/completions",
            json={"model": "text", "messages": USER},
            headers={"x-request-timeout": "1000000", "x-request-id": "mine/@_1"},
        ) as response:
            assert response.status == 200
            assert response.headers["x-request-id"] == "mine/@_1"
        assert worker.calls[-1].timeout.ToSeconds() <= 600


async def test_tokens_models_and_version() -> None:
    async with running_models(text_model(max_model_len=99), voice_model()) as stand:
        asked = {"model": "words", "prompt": "The river, naïve 🙂", "return_token_strs": True}
        status, found = await stand.post("/tokenize", asked)
        assert status == 200, found
        assert found["count"] == len(found["tokens"]) == len(found["token_strs"])
        assert found["max_model_len"] == 99
        status, text = await stand.post("/detokenize", {"model": "words", "tokens": found["tokens"]})
        assert (status, text) == (200, {"prompt": asked["prompt"]})
        status, chat = await stand.post("/tokenize", {"model": "words", "messages": USER})
        assert (status, chat["token_strs"]) == (200, None)
        for path, body, code, param in (
            ("/tokenize", {"prompt": "x"}, 400, "model"),
            ("/tokenize", {"model": "words"}, 400, "prompt"),
            ("/tokenize", {"model": "words", "prompt": "x", "messages": USER}, 400, "prompt"),
            ("/tokenize", {"model": "words", "prompt": "x", "chat_template": "y"}, 400, "chat_template"),
            ("/tokenize", {"model": "nope", "prompt": "x"}, 404, "model"),
            ("/detokenize", {"model": "words"}, 400, "tokens"),
            ("/detokenize", {"model": "words", "tokens": [-1]}, 400, "tokens[0]"),
            ("/detokenize", {"model": "words", "tokens": [1, 99999999]}, 400, "tokens[1]"),
        ):
            status, answer = await stand.post(path, body)
            assert (status, answer["error"]["param"]) == (code, param), answer
        async with stand.http.get("/v1/models") as response:
            listed = (await response.json())["data"]
        assert [model["id"] for model in listed] == ["voice", "words"]
        assert listed[1]["max_model_len"] == 99
        assert listed[0]["max_model_len"] is None
        for model in listed:
            assert model["object"] == "model"
            assert (model["owned_by"], model["root"], model["ready"]) == ("omniplane", "none", True)
        async with stand.http.get("/v1/models/words") as response:
            assert await response.json() == listed[1]
        async with stand.http.get("/version") as response:
            assert (await response.json())["version"]
        await stand.settled()


async def test_a_replica_that_is_lost_while_it_tokenizes_is_a_503() -> None:
    async with running_stand(text_pipeline(), route_wait_s=0.1) as stand:
        worker = await stand.cluster.add("text", 0, hang)
        await stand.ready("text")
        asking = asyncio.create_task(stand.post("/tokenize", {"model": "text", "prompt": "x"}))
        await wait_until(lambda: worker.tokenizing == 1, what="the question at its worker")
        # Its session ends first, and with it the channel; else the call's own failure says the same.
        (session,) = stand.gateway.router.sessions.values()
        await session.close()
        await worker.kill()
        status, answer = await asking
        assert (status, answer["error"]["type"]) == (503, "service_unavailable"), answer
        await stand.settled()


async def test_speech_as_bytes_and_as_events() -> None:
    async with running_models(voice_model()) as stand:
        body = {"model": "voice", "input": "One. Two.", "voice": {"id": "anna"}, "instructions": "Whisper."}
        async with stand.http.post("/v1/audio/speech", json={**body, "response_format": "pcm"}) as response:
            assert response.status == 200
            assert response.headers["x-speech-id"].startswith("speech-")
            plain = await response.read()
        for response_format in ("pcm", "wav"):
            asked = {**body, "stream_format": "sse", "response_format": response_format}
            async with stand.http.post("/v1/audio/speech", json=asked) as response:
                assert response.status == 200, await response.text()
                received: list[Any] = events(await response.read())
            assert received[-1] == "[DONE]"
            assert received[-2]["type"] == "speech.audio.done"
            assert received[-2]["usage"]["output_tokens"] > 0
            data = b"".join(base64.b64decode(event["audio"]) for event in received[:-2])
            assert data == plain if response_format == "pcm" else data[44:] == plain
        async with stand.http.post(
            "/v1/audio/speech", json={**body, "instructions": "", "response_format": "pcm"}
        ) as response:
            assert await response.read() != plain
        await stand.settled()


async def test_transcriptions() -> None:
    async with running_models(text_model(), voice_model()) as stand:

        async def transcribe(file: bytes = wav(), **fields: Any) -> aiohttp.ClientResponse:
            data = aiohttp.FormData()
            data.add_field("file", file, filename="a.wav")
            for name, value in {"model": "words", **fields}.items():
                data.add_field(name, value)
            response = await stand.http.post("/v1/audio/transcriptions", data=data)
            await response.read()
            return response

        plain = await (await transcribe()).json()
        assert plain["text"].startswith("Answer-")
        assert plain["usage"]["output_tokens"] == 12
        assert (await (await transcribe()).json())["text"] == plain["text"]
        assert (await (await transcribe(wav(frequency=5))).json())["text"] != plain["text"]
        assert (await (await transcribe(language="de")).json())["text"] != plain["text"]
        text = await transcribe(response_format="text")
        assert text.content_type == "text/plain"
        assert await text.text() == plain["text"] + "\n"
        verbose = await (await transcribe(response_format="verbose_json", temperature="0.5")).json()
        assert (verbose["duration"], verbose["text"], verbose["task"]) == (0.5, plain["text"], "transcribe")
        received: list[Any] = events(await (await transcribe(stream="true")).read())
        assert received[-1] == "[DONE]"
        assert "".join(event["delta"] for event in received[:-2]) == plain["text"]
        assert received[-2] == {"type": "transcript.text.done", "text": plain["text"], "usage": plain["usage"]}
        for fields, param in (
            ({"response_format": "srt"}, "response_format"),
            ({"language": "German"}, "language"),
            ({"temperature": "hot"}, "temperature"),
            ({"include[]": "logprobs"}, "include"),
            ({"file": b"MZ not audio"}, "file"),
            ({"response_format": "verbose_json", "file": b"OggS...."}, "response_format"),
            ({"stream": "true", "response_format": "text"}, "response_format"),
            ({"model": "voice"}, "model"),
        ):
            refused = await transcribe(**fields)
            body = await refused.json()
            assert (refused.status, body["error"]["param"]) == (400, param), body
        await stand.settled()
