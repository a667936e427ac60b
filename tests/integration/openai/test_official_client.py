"""The official OpenAI client, as its users have it: iterators, retries, timeouts, exceptions, typed answers."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionUserMessageParam

from omnicore import errors
from stage_worker.engines.sim_content import picture
from tests.integration.gateway.conftest import Stand, running_stand
from tests.integration.gateway.scripted import Call
from tests.integration.gateway.scripts import broken, hang, tokens
from tests.integration.openai.models import picture_model, running_models, text_model, voice_model
from tests.integration.openai.test_surface import wav
from tests.support.pipelines import text_pipeline
from tests.support.processes import wait_until

USER: list[ChatCompletionUserMessageParam] = [{"role": "user", "content": "hello"}]
Connect = Callable[..., openai.AsyncOpenAI]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """Makes clients, and closes them after the test."""
    opened: list[openai.AsyncOpenAI] = []

    def make(stand: Stand, **options: Any) -> openai.AsyncOpenAI:
        settings = {"max_retries": 0, "timeout": 60.0, **options}
        opened.append(openai.AsyncOpenAI(base_url=f"http://{stand.addresses['http']}/v1", api_key="none", **settings))
        return opened[-1]

    yield make
    for client in opened:
        await client.close()


async def test_every_endpoint(connect: Connect) -> None:
    async with running_models(text_model(), picture_model(), voice_model()) as stand:
        client = connect(stand)
        assert [model.id async for model in client.models.list()] == ["pictures", "voice", "words"]
        assert (await client.models.retrieve("words")).object == "model"

        several = await client.chat.completions.create(
            model="words", messages=USER, n=2, logprobs=True, top_logprobs=1, seed=1
        )
        assert [choice.index for choice in several.choices] == [0, 1]
        logprobs = several.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content
        assert logprobs.content[0].top_logprobs[0].token == logprobs.content[0].token
        texts = {0: "", 1: ""}
        async for chunk in await client.chat.completions.create(
            model="words", messages=USER, n=2, seed=1, stream=True, stream_options={"include_usage": True}
        ):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
        assert texts == {choice.index: choice.message.content for choice in several.choices}
        assert chunk.usage == several.usage
        legacy = await client.completions.create(model="words", prompt=["a", "b"], logprobs=1, max_tokens=3)
        assert legacy.choices[1].logprobs is not None
        assert len(legacy.choices[1].logprobs.tokens or []) == 3

        made = await client.images.generate(model="pictures", prompt="A river.", n=2, size="auto")
        assert made.data is not None
        assert len({image.b64_json for image in made.data}) == 2
        edited = await client.images.edit(
            model="pictures", prompt="Night.", image=[picture(1), picture(2)], extra_body={"seed": 3, "bot_task": "x"}
        )
        assert edited.data is not None
        assert base64.b64decode(edited.data[0].b64_json or "").startswith(b"\x89PNG")
        pictures: list[Any] = ["image"]
        shown = await client.chat.completions.create(
            model="pictures", messages=USER, modalities=pictures, extra_body={"num_inference_steps": 4}
        )
        content: Any = shown.choices[0].message.content
        assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")

        file = ("a.wav", wav(), "audio/wav")
        heard = await client.audio.transcriptions.create(model="words", file=file)
        assert heard.text.startswith("Answer-")
        assert await client.audio.transcriptions.create(model="words", file=file, response_format="text") == (
            heard.text + "\n"
        )
        verbose = await client.audio.transcriptions.create(model="words", file=file, response_format="verbose_json")
        assert (verbose.text, verbose.duration) == (heard.text, 0.5)
        streamed = await client.audio.transcriptions.create(model="words", file=file, stream=True)
        found = [event async for event in streamed]
        assert "".join(event.delta for event in found if event.type == "transcript.text.delta") == heard.text
        assert found[-1].type == "transcript.text.done"

        spoken = await client.audio.speech.create(
            model="voice", input="Hello.", voice="alloy", response_format="pcm", speed=1.5
        )
        assert len(spoken.read()) > 100
        async with client.audio.speech.with_streaming_response.create(
            model="voice", input="Hello.", voice="alloy", response_format="wav"
        ) as response:
            written = io.BytesIO()
            async for piece in response.iter_bytes():
                written.write(piece)
        assert written.getvalue()[:4] == b"RIFF"
        await stand.settled()


async def test_iterators_of_the_blocking_client() -> None:
    async with running_models(text_model()) as stand:

        def work() -> tuple[str, str, str]:
            with openai.OpenAI(base_url=f"http://{stand.addresses['http']}/v1", api_key="none") as client:
                whole = client.chat.completions.create(model="words", messages=USER).choices[0].message.content or ""
                chunks = client.chat.completions.create(model="words", messages=USER, stream=True)
                text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
                legacy = client.completions.create(model="words", prompt="user: hello", stream=True)
                return whole, text, "".join(chunk.choices[0].text for chunk in legacy)

        whole, text, legacy = await asyncio.to_thread(work)
        assert whole == text == legacy
        assert whole
        await stand.settled()


ERRORS: list[tuple[errors.OmniError, int, type[openai.APIStatusError]]] = [
    (errors.InvalidRequestError.field("sampling.top_k", "wrong"), 400, openai.BadRequestError),
    (errors.UnauthenticatedError("who?"), 401, openai.AuthenticationError),
    (errors.PermissionDeniedError("no"), 403, openai.PermissionDeniedError),
    (errors.NotFoundError("where?"), 404, openai.NotFoundError),
    (errors.AlreadyExistsError("again?"), 409, openai.ConflictError),
    (errors.ResourceExhaustedError("later", retry_after_s=7), 429, openai.RateLimitError),
    (errors.InternalError("oh"), 500, openai.InternalServerError),
    (errors.DataLossError("gone"), 500, openai.InternalServerError),
    (errors.UnimplementedError("not here"), 501, openai.InternalServerError),
    (errors.UnavailableError("away"), 503, openai.InternalServerError),
    (errors.DeadlineExceededError("slow"), 504, openai.InternalServerError),
]


async def test_every_error_is_its_exception(connect: Connect) -> None:
    async with running_stand(text_pipeline(), retry_limit=0, max_body_bytes=20_000) as stand:
        worker = await stand.cluster.add("text", 0, tokens(1))
        await stand.ready("text")
        client = connect(stand)
        for error, status, kind in ERRORS:
            worker.script = broken(error)
            for stream in (False, True):
                with pytest.raises(kind) as caught:
                    await client.chat.completions.create(model="text", messages=USER, stream=stream)
                assert caught.value.status_code == status
                assert caught.value.code == error.reason.lower()
                assert caught.value.request_id
                assert (caught.value.response.headers.get("retry-after") == "7") == (status == 429)
        with pytest.raises(openai.BadRequestError) as wrong:
            await client.chat.completions.create(model="text", messages=USER, top_p=5)
        assert wrong.value.param == "top_p"
        with pytest.raises(openai.NotFoundError) as unknown:
            await client.chat.completions.create(model="nope", messages=USER)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.APIStatusError) as large:
            await client.completions.create(model="text", prompt="x" * 30_000)
        assert large.value.status_code == 413
        # After the status line: an event, which the iterator raises.
        worker.script = broken(errors.InternalError("in the middle"), after=2)
        received = ""

        async def read() -> None:
            nonlocal received
            async for chunk in await client.chat.completions.create(model="text", messages=USER, stream=True):
                received += chunk.choices[0].delta.content or ""

        with pytest.raises(openai.APIError, match="in the middle"):
            await read()
        assert "t0 t1 ".startswith(received)
        await stand.settled()


async def test_it_retries_what_passes(connect: Connect) -> None:
    failures: list[errors.OmniError] = [
        errors.UnavailableError("away"),
        errors.ResourceExhaustedError("full", retry_after_s=1),
    ]

    async def fails_first(call: Call) -> None:
        if failures:
            await broken(failures.pop(0))(call)
        else:
            await tokens(2)(call)

    async with running_stand(text_pipeline(), retry_limit=0) as stand:
        worker = await stand.cluster.add("text", 0, fails_first)
        await stand.ready("text")
        answer = await connect(stand, max_retries=3).chat.completions.create(model="text", messages=USER)
        assert answer.choices[0].message.content == "t0 t1 "
        assert len(worker.calls) == 3


async def test_its_timeout_ends_the_work(connect: Connect) -> None:
    async def begins_and_hangs(call: Call) -> None:
        call.text("first")
        await hang(call)

    async with running_stand(text_pipeline()) as stand:
        worker = await stand.cluster.add("text", 0, begins_and_hangs)
        await stand.ready("text")
        client = connect(stand, timeout=1.0)

        async def read() -> None:
            async for _ in await client.chat.completions.create(model="text", messages=USER, stream=True):
                pass

        with pytest.raises(openai.APITimeoutError):
            await read()
        with pytest.raises(openai.APITimeoutError):
            await client.chat.completions.create(model="text", messages=USER)
        await wait_until(lambda: len(worker.aborts) == len(worker.calls), what="every call is aborted")
        await stand.settled()
