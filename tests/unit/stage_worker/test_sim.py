"""The simulated engine: deterministic content, one step clock, real admission, and the failures it is told to have."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from connectors.payload import Payload
from omni.v1 import pipeline_pb2, prompt_pb2, sampling_pb2, types_pb2
from omnicore.errors import (
    DataLossError,
    InternalError,
    InvalidRequestError,
    RequestCancelledError,
    UnavailableError,
    UnimplementedError,
)
from stage_worker.engine import Engine, EngineOutput, EngineRequest, Resume, Tokenizing
from stage_worker.engines import create_engine, known_engines
from stage_worker.engines.sim_content import answer_text, payload_digest


def stage(max_num_seqs: int = 0, **sim: Any) -> pipeline_pb2.Stage:
    made = pipeline_pb2.Stage(stage_id=0, engine="sim", model="m", max_num_seqs=max_num_seqs)
    made.engine_args.update({"sim": sim})
    return made


@contextlib.asynccontextmanager
async def started(max_num_seqs: int = 0, **sim: Any) -> AsyncIterator[Engine]:
    engine = create_engine(stage(max_num_seqs, **sim), ())
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def request(
    request_id: str = "r",
    text: str | None = "hello",
    inputs: dict[int, Sequence[Payload]] | None = None,
    downstream: Sequence[int] = (),
    **sampling: Any,
) -> EngineRequest:
    async def stream(payloads: Sequence[Payload]) -> AsyncIterator[Payload]:
        for payload in payloads:
            yield payload

    return EngineRequest(
        request_id=request_id,
        prompt=None if text is None else prompt_pb2.Prompt(text=text),
        inputs={stage_id: stream(payloads) for stage_id, payloads in (inputs or {}).items()},
        sampling=sampling_pb2.SamplingParams(**sampling),
        speech=prompt_pb2.SpeechOptions(),
        wants_output=True,
        downstream=downstream,
    )


async def run(engine: Engine, what: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.execute(what)]


def text_of(outputs: Sequence[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


async def test_text_depends_on_prompt_and_seed_and_on_nothing_else() -> None:
    async with started(tokens=30) as one, started(tokens=30) as two:
        first = text_of(await run(one, request("a", "hello")))
        assert first == text_of(await run(two, request("b", "hello")))
        assert first.startswith("Answer-")
        assert first.rstrip(".") == answer_text("hello", 0, 30).rstrip(".")
        assert first != text_of(await run(one, request("c", "hallo")))
        assert first != text_of(await run(one, request("d", "hello", seed=7)))
        assert ". " in first


async def test_the_end_is_said_once_with_counts() -> None:
    async with started(tokens=20) as engine:
        done = await run(engine, request(text="one two three"))
        assert [output.finish for output in done[:-1]] == [None] * 19
        finish = done[-1].finish
        assert finish is not None
        assert (finish.reason, finish.prompt_tokens, finish.completion_tokens) == ("stop", 3, 20)
        cut = (await run(engine, request(max_tokens=5)))[-1].finish
        assert cut is not None
        assert (cut.reason, cut.completion_tokens) == ("length", 5)
        on = (await run(engine, request(max_tokens=50, ignore_eos=True)))[-1].finish
        assert on is not None
        assert (on.reason, on.completion_tokens) == ("length", 50)


async def test_stop_texts_end_the_answer_before_them_even_across_tokens() -> None:
    whole = answer_text("hello", 0, 30)
    words = whole.split(" ")
    stop = words[9][-2:] + " " + words[10][:2]
    async with started(tokens=30) as engine:
        outputs = await run(engine, request(stop=["@@@", stop]))
    finish = outputs[-1].finish
    assert finish is not None
    assert finish.reason == "stop"
    assert text_of(outputs) == whole[: whole.index(stop)]


@pytest.mark.parametrize("stop", ["@", "@@@@"])
async def test_a_stop_text_that_never_comes_changes_nothing(stop: str) -> None:
    async with started(tokens=30) as engine:
        assert text_of(await run(engine, request(stop=[stop]))) == text_of(await run(engine, request()))


async def test_one_step_advances_all_and_no_more_than_max_num_seqs() -> None:
    async with started(2, tokens=10, step_ms=5) as engine:
        tasks = [asyncio.create_task(run(engine, request(str(i), f"prompt {i}"))) for i in range(4)]
        while (load := engine.load()).queue_length < 4 or not load.running:
            await asyncio.sleep(0)
        assert (load.running, load.waiting, load.queue_length) == (2, 2, 4)
        answers = [text_of(await task) for task in tasks]
        assert len(set(answers)) == 4
        assert engine.load().queue_length == 0


async def test_times_are_kept() -> None:
    async with started(tokens=6, ttft_ms=60, tpot_ms=20) as engine:
        begin = time.monotonic()
        at = [time.monotonic() - begin async for _ in engine.execute(request())]
    assert at[0] >= 0.045
    assert at[-1] >= 0.045 + 5 * 0.015


async def test_tensors_answer_their_input() -> None:
    chunks = [Payload(text="one. "), Payload({"x": np.arange(6, dtype=np.float32)})]
    async with started(output="tensor", chunk_bytes=1000) as engine:
        outputs = await run(engine, request(text=None, inputs={0: chunks}, downstream=(2,)))
    made = [output.chunk for output in outputs if output.chunk is not None]
    assert [chunk.metadata["source"] for chunk in made] == [payload_digest(chunk) for chunk in chunks]
    assert all(chunk.metadata["crc32"] == payload_digest(chunk) for chunk in made)
    assert {chunk.tensors["hidden"].nbytes for chunk in made} == {1000}
    assert outputs[-1].finish is not None


async def test_a_changed_tensor_is_noticed() -> None:
    broken = Payload({"x": np.zeros(4, np.float32)}, metadata={"crc32": 1})
    async with started(output="audio") as engine:
        with pytest.raises(DataLossError, match="checksum"):
            await run(engine, request(text=None, inputs={0: [broken]}))


async def test_audio_can_be_heard_and_belongs_to_its_input() -> None:
    async with started(output="audio", seconds_per_chunk=0.25) as engine:
        outputs = await run(engine, request(text="A first sentence. And then a second one."))
        other = await run(engine, request(text="Something else entirely."))
    first, second = (np.frombuffer(output.media, "<i2") for output in outputs[:2])
    info = outputs[0].media_info
    assert info is not None
    assert (info.mime_type, info.sample_rate_hz, info.channels) == ("audio/pcm", 24000, 1)
    assert outputs[1].media_info is None
    assert len(first) == len(second) == 6000
    assert float(np.sqrt(np.mean(first.astype(float) ** 2))) > 1000
    assert outputs[0].media != other[0].media


async def test_images_are_png() -> None:
    async with started(output="image") as engine:
        outputs = await run(engine, request(text="a cat"))
    assert outputs[0].media.startswith(b"\x89PNG\r\n\x1a\n")
    assert outputs[0].media_info is not None
    assert outputs[0].media_info.mime_type == "image/png"


async def test_abort_ends_running_and_waiting_requests() -> None:
    async with started(1, tokens=10_000, step_ms=2) as engine:
        running = asyncio.create_task(run(engine, request("running")))
        waiting = asyncio.create_task(run(engine, request("waiting")))
        await asyncio.sleep(0.01)
        assert await engine.abort("waiting")
        assert await engine.abort("running")
        assert not await engine.abort("unknown")
        for task in (running, waiting):
            with pytest.raises(RequestCancelledError):
                await task
        assert engine.load().queue_length == 0


async def test_a_reader_that_leaves_gives_its_place_to_the_next() -> None:
    async with started(1, tokens=10_000, step_ms=1) as engine:
        hog = engine.execute(request("hog"))
        await anext(hog)
        waiting = asyncio.create_task(run(engine, request("next", max_tokens=3)))
        gone = asyncio.create_task(run(engine, request("gone")))
        await asyncio.sleep(0)
        gone.cancel()
        await hog.aclose()  # type: ignore[attr-defined]
        assert (await asyncio.wait_for(waiting, 30))[-1].finish is not None
        assert engine.load().queue_length == 0


async def test_failures_come_where_they_are_configured() -> None:
    async with started(tokens=10, fail_after_tokens=3) as engine:
        outputs = engine.execute(request())
        for _ in range(3):
            await anext(outputs)
        with pytest.raises(InternalError, match="after 3 outputs"):
            await anext(outputs)
    async with started(tokens=3, fail_rate=0.3) as engine:
        results = await asyncio.gather(
            *(run(engine, request(str(i), f"p{i}")) for i in range(200)), return_exceptions=True
        )
        failed = sum(isinstance(result, InternalError) for result in results)
        assert 30 <= failed <= 90


async def test_a_hung_engine_answers_no_probe_but_lets_go_of_requests() -> None:
    async with started(tokens=10, hang_after_tokens=2) as engine:
        await asyncio.wait_for(engine.probe(), 30)
        hung = engine.execute(request("hung"))
        for _ in range(2):
            await anext(hung)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(engine.probe(), 0.1)
        assert await engine.abort("hung")
        with pytest.raises(RequestCancelledError):
            await anext(hung)


async def test_a_dead_engine_says_so() -> None:
    async with started(tokens=10, crash_after_tokens=2) as engine:
        with pytest.raises(UnavailableError, match="died"):
            await run(engine, request())
        with pytest.raises(UnavailableError, match="died"):
            await engine.probe()


async def test_an_idle_engine_answers_probes_and_does_not_spin() -> None:
    async with started() as engine:
        used_s = []
        for _ in range(10):
            await asyncio.wait_for(engine.probe(), 30)
            begin = time.process_time()
            await asyncio.sleep(0.01)
            used_s.append(time.process_time() - begin)
        # One that spins uses all of every round; a collection of garbage falls into one or two of them.
        assert min(used_s) < 0.005


async def test_control() -> None:
    async with started() as engine:
        assert await engine.control(types_pb2.CONTROL_METHOD_SLEEP, {}) == {"asleep": True}
        await asyncio.wait_for(engine.probe(), 30)
        assert await engine.control(types_pb2.CONTROL_METHOD_WAKE_UP, {}) == {"asleep": False}
        assert await engine.control(types_pb2.CONTROL_METHOD_RESET_PREFIX_CACHE, {}) == {}
        with pytest.raises(UnimplementedError, match="engine sim has no start_profile"):
            await engine.control(types_pb2.CONTROL_METHOD_START_PROFILE, {})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tpt_ms": 1}, r"engine_args\.sim\.tpt_ms: unknown key; did you mean 'tpot_ms'"),
        ({"tokens": 1.5}, r"engine_args\.sim\.tokens: must be a whole number, got 1\.5"),
        ({"tokens": "9"}, r"engine_args\.sim\.tokens: must be a number, got '9'"),
        ({"ttft_ms": -1}, r"engine_args\.sim\.ttft_ms: must be at least 0"),
        ({"output": "smell"}, r"engine_args\.sim\.output: must be one of text, tensor, audio, image"),
        ({"fail_rate": 2}, r"engine_args\.sim\.fail_rate: must be -1 to 1"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        create_engine(stage(**options), ())


def test_unknown_engines_are_refused_with_those_that_exist() -> None:
    assert {"sim", "vllm", "hibari-acoustic", "hibari-vocoder"} <= set(known_engines())
    with pytest.raises(InvalidRequestError, match=r"unknown engine 'simm'; known: .*sim"):
        create_engine(pipeline_pb2.Stage(engine="simm"), ())


def test_engines_that_plans_may_name_and_nobody_ships_are_told_apart_from_unknown_ones() -> None:
    with pytest.raises(UnavailableError, match=r"'vllm-omni' is not part of Omniplane.*--engine sim") as caught:
        create_engine(pipeline_pb2.Stage(engine="vllm-omni"), ())
    assert caught.value.reason == "ENGINE_NOT_INSTALLED"


async def test_log_probabilities_are_of_each_token_and_only_if_asked_for() -> None:
    async with started(tokens=5) as engine:
        plain = await run(engine, request())
        asked = await run(engine, request("asked", logprobs=3))
        bare = await run(engine, request("bare", logprobs=0))
    assert not any(output.logprobs for output in plain)
    for output in asked:
        (entry,) = output.logprobs
        assert entry.token.token_id == output.token_ids[0]
        assert entry.token.text == output.text.rstrip(".").encode() or entry.token.text == output.text.encode()
        assert entry.top[0] == entry.token
        assert [chance.logprob for chance in entry.top] == sorted((c.logprob for c in entry.top), reverse=True)
        assert len({chance.token_id for chance in entry.top}) == 3
        assert all(chance.logprob <= 0 for chance in entry.top)
    assert [output.logprobs[0].top for output in bare] == [[]] * 5
    assert [output.text for output in asked] == [output.text for output in plain]


async def test_text_is_what_its_tokens_say() -> None:
    async with started(tokens=5, max_model_len=50) as engine:
        assert isinstance(engine, Tokenizing)
        for text in ("Hello", " the river, naïve\n🙂 always", "", "a" * 300):
            tokens = await engine.tokenize(
                prompt_pb2.Prompt(text=text), add_special_tokens=True, add_generation_prompt=True
            )
            assert len(tokens.texts) == len(tokens.token_ids)
            assert tokens.max_model_len == 50
            assert await engine.detokenize(tokens.token_ids) == text
        made = [token for output in await run(engine, request()) for token in output.token_ids]
        assert len((await engine.detokenize(made)).split()) == 5
        with pytest.raises(InvalidRequestError, match=r"token_ids\[1\]"):
            await engine.detokenize([1, 999_999])


async def test_a_prompt_that_does_not_fit_says_what_does() -> None:
    async with started(max_model_len=3) as engine:
        await run(engine, request(text="one two three"))
        with pytest.raises(InvalidRequestError, match="has 4 tokens; this model takes at most 3") as caught:
            await run(engine, request("long", text="one two three four"))
    assert caught.value.reason == "CONTEXT_LENGTH_EXCEEDED"


async def test_a_picture_follows_all_that_steers_it() -> None:
    async def picture(engine: Engine, number: int, **sampling: Any) -> bytes:
        return b"".join(output.media for output in await run(engine, request(f"r{number}", **sampling)))

    async with started(output="image") as engine:
        steering: list[dict[str, Any]] = [
            {}, {"seed": 1}, {"num_inference_steps": 5}, {"guidance_scale": 5.0}, {"width": 32, "height": 16},
        ]  # fmt: skip
        made = [await picture(engine, number, **sampling) for number, sampling in enumerate(steering)]
        again = [await picture(engine, number + 9, **sampling) for number, sampling in enumerate(steering)]
        with pytest.raises(InvalidRequestError, match="width"):
            await picture(engine, 99, width=100_000, height=1)
    assert made == again
    assert len(set(made)) == len(made)
    assert made[0][16:24] == bytes((0, 0, 0, 64, 0, 0, 0, 64))
    assert made[-1][16:24] == bytes((0, 0, 0, 32, 0, 0, 0, 16))


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"max_tokens": 20},
        {"max_tokens": 70, "ignore_eos": True},
        {"stop": ["garden and", "the"]},
        {"stop_token_ids": [7]},
        {"seed": 5, "max_tokens": 1},
    ],
)
async def test_an_answer_is_the_same_from_wherever_it_is_resumed(sampling: dict[str, Any]) -> None:
    async with started(tokens=40) as engine:
        whole = await run(engine, request(**sampling))
        for cut in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
            tokens = [token for output in whole[:cut] for token in output.token_ids]
            for text in (text_of(whole[:cut]), text_of(whole[:cut])[:-1]):
                resumed = dataclasses.replace(request(**sampling), resume=Resume(tokens, text))
                rest = await run(engine, resumed)
                assert text + text_of(rest) == text_of(whole)
                made = [token for output in (*whole[:cut], *rest) for token in output.token_ids]
                assert made == [token for output in whole for token in output.token_ids]
                assert rest[-1].finish == whole[-1].finish
                assert all(output.finish is None for output in rest[:-1])


@pytest.mark.parametrize(
    ("resume", "message"),
    [
        (Resume([3], "x"), r"resume\.token_ids\[0\]: 3 is not what"),
        (Resume([], "x"), r"resume\.text: is not"),
    ],
)
async def test_tokens_of_another_answer_are_refused(resume: Resume, message: str) -> None:
    async with started(tokens=4) as engine:
        with pytest.raises(InvalidRequestError, match=message):
            await run(engine, dataclasses.replace(request(), resume=resume))
        tokens = [token for output in await run(engine, request()) for token in output.token_ids]
        with pytest.raises(InvalidRequestError, match=r"resume\.token_ids\[3\]"):
            await run(engine, dataclasses.replace(request(), resume=Resume([*tokens, 1], "")))
