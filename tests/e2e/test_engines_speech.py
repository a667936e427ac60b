"""The real acoustic model and vocoder: text to audible speech, in isolation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from connectors.payload import Payload
from omni.v1 import pipeline_pb2, prompt_pb2, sampling_pb2, types_pb2
from omnicore.errors import InvalidRequestError, RequestCancelledError, UnimplementedError
from stage_worker.engine import Engine, EngineOutput, EngineRequest
from stage_worker.engines import create_engine

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.asyncio(loop_scope="module")]
RATE = 24_000


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def acoustic(require_packages: Callable[..., None]) -> AsyncIterator[Engine]:
    require_packages("hibari", "onnxruntime")
    engine = create_engine(pipeline_pb2.Stage(stage_id=1, engine="hibari-acoustic"), [])
    await engine.start()
    yield engine
    await engine.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def vocoder(require_packages: Callable[..., None]) -> AsyncIterator[Engine]:
    require_packages("hibari", "onnxruntime")
    engine = create_engine(pipeline_pb2.Stage(stage_id=2, engine="hibari-vocoder"), [])
    await engine.start()
    yield engine
    await engine.close()


def request(
    *,
    text: str | None = None,
    inputs: Mapping[int, AsyncIterator[Payload]] | None = None,
    voice: str = "",
    speed: float = 0.0,
    request_id: str = "r",
) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt=None if text is None else prompt_pb2.Prompt(text=text),
        inputs=inputs or {},
        sampling=sampling_pb2.SamplingParams(),
        speech=prompt_pb2.SpeechOptions(voice=voice, speed=speed),
        wants_output=True,
        downstream=(2,),
    )


async def chunks_of(outputs: AsyncIterator[EngineOutput]) -> AsyncIterator[Payload]:
    async for output in outputs:
        if output.chunk is not None:
            yield output.chunk


async def stream(*items: Any) -> AsyncIterator[Payload]:
    for item in items:
        yield item if isinstance(item, Payload) else Payload(text=item)


async def speak(acoustic: Engine, vocoder: Engine, first: EngineRequest) -> tuple[bytes, list[EngineOutput]]:
    spectrum = chunks_of(acoustic.execute(first))
    outputs = [output async for output in vocoder.execute(request(inputs={1: spectrum}))]
    return b"".join(output.media for output in outputs), outputs


async def test_a_text_becomes_audible_speech_sentence_by_sentence(acoustic: Engine, vocoder: Engine) -> None:
    text = "The capital of France is **Paris**. It lies on the river Seine, at https://paris.fr. 🎉"
    pcm, outputs = await speak(acoustic, vocoder, request(text=text))
    info = outputs[0].media_info
    assert info is not None
    assert (info.mime_type, info.sample_rate_hz, info.channels) == ("audio/pcm", RATE, 1)
    assert all(output.media_info is None for output in outputs[1:])
    assert [bool(output.media) for output in outputs] == [True, True, False]
    assert outputs[-1].finish is not None
    assert outputs[-1].finish.reason == "stop"

    samples = np.frombuffer(pcm, "<i2").astype(np.float64) / 32768
    assert 3.0 < len(samples) / RATE < 12.0
    frames = samples[: len(samples) // 480 * 480].reshape(-1, 480)
    loud = np.sqrt((frames**2).mean(axis=1)) > 0.01
    assert 0.3 < loud.mean() < 0.98  # speech has pauses, and is mostly not one
    assert np.abs(samples).max() < 1.0
    # Speech, not noise: most of its energy is where voices are.
    spectrum = np.abs(np.fft.rfft(samples)) ** 2
    hertz = np.fft.rfftfreq(len(samples), 1 / RATE)
    assert spectrum[(hertz > 80) & (hertz < 4000)].sum() > 0.8 * spectrum.sum()
    # The same request sounds the same.
    again, _ = await speak(acoustic, vocoder, request(text=text))
    assert again == pcm


async def test_upstream_text_is_spoken_as_it_comes(acoustic: Engine) -> None:
    gate = asyncio.Event()

    async def upstream() -> AsyncIterator[Payload]:
        yield Payload(text="The first sentence is here.")
        await gate.wait()
        yield Payload(text=" And the sec")
        yield Payload(text="ond one")

    outputs = acoustic.execute(request(inputs={0: upstream()}))
    async with contextlib.aclosing(chunks_of(outputs)) as chunks:  # type: ignore[type-var]
        first = await asyncio.wait_for(anext(chunks), 120)
        assert first.metadata["text"] == "The first sentence is here."
        gate.set()
        rest = [chunk.metadata["text"] async for chunk in chunks]
    assert rest == ["And the second one"]


async def test_speed_changes_the_length(acoustic: Engine, vocoder: Engine) -> None:
    text = "This is a sentence of some length, to be read slowly."
    slow, _ = await speak(acoustic, vocoder, request(text=text, speed=0.5))
    fast, _ = await speak(acoustic, vocoder, request(text=text, speed=2.0))
    assert len(slow) > 2.5 * len(fast)


@pytest.mark.parametrize("text", ["", "   ", "🎉", "***", "\n\n"])
async def test_nothing_to_say_is_a_finish_without_audio(acoustic: Engine, vocoder: Engine, text: str) -> None:
    pcm, outputs = await speak(acoustic, vocoder, request(text=text))
    assert pcm == b""
    assert [output.finish is not None for output in outputs] == [True]


@pytest.mark.parametrize(
    "text", ["word " * 500, "a" * 5000, "你好，世界。", "\x00\ud7ff", "1234567890" * 20, "[x](/ˈ/)" * 50]
)
async def test_odd_text_does_not_break_the_engine(acoustic: Engine, vocoder: Engine, text: str) -> None:
    _, outputs = await speak(acoustic, vocoder, request(text=text))
    assert outputs[-1].finish is not None
    await acoustic.probe()


async def test_wrong_requests_name_the_field(acoustic: Engine, vocoder: Engine) -> None:
    with pytest.raises(InvalidRequestError, match=r"speech\.voice: this model has the voice 'heart', got 'nobody'"):
        await anext(acoustic.execute(request(text="Hello.", voice="nobody")))
    with pytest.raises(InvalidRequestError, match=r"speech\.speed: this model speaks at 0\.5 to 2, got 4"):
        await anext(acoustic.execute(request(text="Hello.", speed=4.0)))
    with pytest.raises(InvalidRequestError, match="reads text"):
        await anext(acoustic.execute(request(inputs={0: stream(Payload(tensors={"a": np.zeros(1)}))})))
    chat = prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt())
    with pytest.raises(InvalidRequestError, match=r"send prompt\.text"):
        await anext(acoustic.execute(dataclasses.replace(request(), prompt=chat)))
    with pytest.raises(InvalidRequestError, match="needs 'lh'"):
        await anext(vocoder.execute(request(inputs={1: stream("text")})))
    wrong = {name: np.zeros((601, 5), np.float32) for name in ("lh", "theta", "ln", "lr", "phi")}
    with pytest.raises(InvalidRequestError, match=r"tensor 'lh' has shape \(601, 5\), not \(601, 4\)"):
        await anext(vocoder.execute(request(inputs={1: stream(Payload(tensors=wrong | {"f0": np.zeros(4)}))})))
    assert acoustic.load().queue_length == vocoder.load().queue_length == 0


async def test_an_openai_voice_is_the_models_own(acoustic: Engine) -> None:
    assert [chunk async for chunk in chunks_of(acoustic.execute(request(text="Hello there.", voice="alloy")))]


async def test_abort_ends_a_request_that_waits(acoustic: Engine) -> None:
    async def never() -> AsyncIterator[Payload]:
        await asyncio.Event().wait()
        yield Payload()

    async def run() -> None:
        async for _ in acoustic.execute(request(inputs={0: never()}, request_id="waits")):
            pass

    task = asyncio.create_task(run())
    while not acoustic.load().queue_length:
        await asyncio.sleep(0)
    assert await acoustic.abort("waits") is True
    with pytest.raises(RequestCancelledError):
        await asyncio.wait_for(task, 60)
    assert await acoustic.abort("waits") is False
    assert acoustic.load().queue_length == 0


async def test_there_is_nothing_to_control(vocoder: Engine) -> None:
    with pytest.raises(UnimplementedError, match="hibari-vocoder has no sleep"):
        await vocoder.control(types_pb2.CONTROL_METHOD_SLEEP, {})


@pytest.mark.parametrize(("engine", "arguments"), [("hibari-acoustic", {"voice": "x"}), ("hibari-vocoder", {"a": 1})])
async def test_wrong_engine_arguments(
    require_packages: Callable[..., None], engine: str, arguments: dict[str, Any]
) -> None:
    require_packages("hibari", "onnxruntime")
    stage = pipeline_pb2.Stage(stage_id=1, engine=engine)
    stage.engine_args.update(arguments)
    with pytest.raises(InvalidRequestError, match=rf"engine_args\.{next(iter(arguments))}"):
        create_engine(stage, [])
