"""Bad input is refused with the path of the field and what is accepted; good input is read as meant."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from gateway import validation
from gateway.graph import PipelineGraph
from gateway.http.chat_schema import ChatRequest, parse_chat
from gateway.http.completion_schema import CompletionRequest, parse_completion
from gateway.http.media import sniff
from gateway.http.speech_schema import parse_speech
from omni.v1 import prompt_pb2, sampling_pb2
from omnicore import errors
from tests.support.pipelines import speech_pipeline, text_pipeline

PIPELINES = {"speech": PipelineGraph(speech_pipeline()), "text": PipelineGraph(text_pipeline())}
USER = [{"role": "user", "content": "hello"}]
PNG = b"\x89PNG\r\n\x1a\n...."
WAV = b"RIFF....WAVEfmt "
MP4 = b"\x00\x00\x00\x18ftypmp42"
LIMIT = 1_000_000


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"model": "speech", "messages": USER, **fields}, PIPELINES, LIMIT)


def refused(**fields: Any) -> tuple[str, str]:
    """The path of the field that is wrong, and the message."""
    with pytest.raises(errors.InvalidRequestError) as caught:
        chat(**fields)
    return caught.value.violations[0].field, caught.value.message


def test_a_plain_chat() -> None:
    asked = chat()
    assert asked.modalities == ("text",)
    assert asked.prompt.chat.messages[0].parts[0].text == "hello"
    assert not asked.stream
    assert asked.sampling == sampling_pb2.SamplingParams()


def test_sampling_and_extensions_are_read() -> None:
    asked = chat(
        temperature=0, top_p=0.5, top_k=-1, max_completion_tokens=7, seed=-3, stop="END", repetition_penalty=1.1,
        presence_penalty=-2, frequency_penalty=2, min_tokens=2, ignore_eos=True, skip_special_tokens=False,
        stop_token_ids=[1, 2], session_id="s-1",
    )  # fmt: skip
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.max_tokens) == (0, 0.5, -1, 7)
    assert sampling.HasField("temperature")
    assert (sampling.seed, list(sampling.stop), list(sampling.stop_token_ids)) == (-3, ["END"], [1, 2])
    assert sampling.ignore_eos
    assert sampling.HasField("skip_special_tokens")
    assert asked.session_id == "s-1"


def test_harmless_fields_are_accepted_and_null_is_absent() -> None:
    chat(user="u", metadata={"a": "b"}, store=False, service_tier="auto", parallel_tool_calls=True)
    chat(tools=None, modalities=None, stop=None, temperature=None, audio=None, stream_options=None)
    chat(n=1, tools=[], tool_choice="none", response_format={"type": "text"}, logprobs=False, logit_bias={})


def test_of_several_errors_the_first_in_the_body_is_told() -> None:
    unknown = [f"unknown_{number}" for number in range(20)]
    assert refused(**dict.fromkeys(unknown, 1))[0] == "unknown_0"
    assert refused(**dict.fromkeys(reversed(unknown), 1))[0] == "unknown_19"
    assert refused(prediction=1, tools=[1], moderation=1)[0] == "prediction"
    assert refused(seed="x", top_k="x", min_tokens="x")[0] == "seed"
    assert refused(min_tokens="x", top_k="x", seed="x")[0] == "min_tokens"


def test_tool_calls_of_earlier_turns_are_refused_by_name_and_their_answers_are_messages() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    user, answer = {"role": "user", "content": "x"}, {"role": "tool", "tool_call_id": "c1", "content": "42"}
    for message in (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "assistant", "content": "I call f.", "tool_calls": [call]},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
    ):
        path, text = refused(messages=[user, message, answer])
        assert path == f"messages[1].{'function_call' if 'function_call' in message else 'tool_calls'}"
        assert "tools are not offered" in text
    said = {"role": "assistant", "content": "I call f.", "tool_calls": []}
    made = chat(messages=[user, said, answer]).prompt.chat.messages
    assert [(message.role, message.parts[0].text) for message in made][1:] == [
        ("assistant", "I call f."),
        ("tool", "42"),
    ]


@pytest.mark.parametrize(
    "field",
    ["tools", "tool_choice", "functions", "logit_bias", "prediction", "reasoning_effort"],
)
def test_what_would_change_the_output_is_refused_by_name(field: str) -> None:
    path, message = refused(**{field: [{"type": "x"}]})
    assert path == field
    assert "not supported" in message


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"messages": None}, "messages", "required"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": "hi"}, "messages", "must be a list, got a string"),
        ({"messages": ["hi"]}, "messages[0]", "must be an object, got a string"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of: system, user"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "got a whole number"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content", "at least one part"),
        (
            {"messages": [*USER, {"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "messages[1].content[0].text",
            "must be a string, got a whole number",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "video"}]}]},
            "messages[0].content[0].type",
            "must be one of: text, image_url, input_audio",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
            "messages[0].content[0].image_url.url",
            "data URI",
        ),
        ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages[0].nmae", "did you mean 'name'?"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls", "not"),
        ({"temperature": -0.1}, "temperature", "at least 0, got -0.1"),
        ({"temperature": True}, "temperature", "must be a number, got true or false"),
        ({"temperature": "1"}, "temperature", "must be a number, got a string"),
        ({"top_p": 0}, "top_p", "above 0 and at most 1"),
        ({"top_k": 0}, "top_k", "-1 or at least 1"),
        ({"top_k": 2**40}, "top_k", "out of range"),
        ({"seed": 2**70}, "seed", "out of range"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 1.5}, "max_tokens", "must be a whole number, got a number"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "contradicts"),
        ({"min_tokens": 9, "max_tokens": 5}, "min_tokens", "at most max_tokens (5)"),
        ({"stop": ["a", 1]}, "stop[1]", "must be a string"),
        ({"stop": [""]}, "stop[0]", "must not be empty"),
        ({"stream": "yes"}, "stream", "true or false, got a string"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        ({"stream": True, "stream_options": {"usage": 1}}, "stream_options.usage", "unknown field"),
        ({"modalities": []}, "modalities", "at least one of: text, audio"),
        ({"modalities": "audio"}, "modalities", "must be a list, got a string"),
        ({"modalities": ["text", 3]}, "modalities[1]", "must be a string"),
        ({"modalities": ["text", "video"]}, "modalities[1]", "does not offer 'video'; it offers: text, audio"),
        ({"audio": {"voice": "a"}}, "audio", 'only with "audio"'),
        ({"modalities": ["audio"], "audio": {"format": "mp3"}}, "audio.format", "must be one of: wav, pcm16"),
        (
            {"modalities": ["audio"], "audio": {"format": "wav"}, "stream": True},
            "audio.format",
            "must be one of: pcm16",
        ),
        ({"modalities": ["audio"], "audio": {"voice": 3}}, "audio.voice", "must be a string"),
        ({"temprature": 1}, "temprature", "unknown field; did you mean 'temperature'?"),
        ({"session_id": "a b"}, "session_id", "printable ASCII"),
        ({"n": 0}, "n", "1 to 16, got 0"),
        ({"n": 17}, "n", "1 to 16, got 17"),
        ({"n": 2, "modalities": ["text", "audio"]}, "n", "must be 1 with audio"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "must be one of: text, json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "required"),
        ({"timeout": 0}, "timeout", "above 0"),
        ({"priority": "x"}, "priority", "must be a whole number"),
        ({"bot_task": "x" * 65}, "bot_task", "at most 64"),
        ({"extra_body": {"seed": 1}, "seed": 2}, "extra_body.seed", "contradicts 'seed'"),
        ({"extra_body": 3}, "extra_body", "must be an object"),
    ],
)
def test_wrong_fields_name_their_path(fields: dict[str, Any], path: str, text: str) -> None:
    where, message = refused(**fields)
    assert where == path
    assert message.startswith(f"{path}: ")
    assert text in message


@pytest.mark.parametrize("body", [None, [], "x", 5])
def test_a_body_that_is_not_an_object(body: object) -> None:
    with pytest.raises(errors.InvalidRequestError, match="body: must be an object"):
        parse_chat(body, PIPELINES, LIMIT)


def test_models_are_never_defaulted() -> None:
    with pytest.raises(errors.NotFoundError, match="known models: speech, text") as unknown:
        chat(model="nope")
    assert unknown.value.reason == "MODEL_NOT_FOUND"
    path, message = refused(model=None)
    assert path == "model"
    assert "required" in message


def test_modalities_come_once_and_in_order() -> None:
    assert chat(modalities=["audio", "text", "audio"]).modalities == ("text", "audio")


def test_audio_options() -> None:
    asked = chat(modalities=["text", "audio"], audio={"voice": {"id": "anna"}, "format": "pcm16", "speed": 2})
    assert (asked.speech.voice, asked.speech.speed, asked.audio_format) == ("anna", 2.0, "pcm16")
    assert chat(modalities=["audio"]).audio_format == "wav"
    assert chat(modalities=["audio"], stream=True).audio_format == "pcm16"


def test_media_parts_are_decoded() -> None:
    def encoded(data: bytes) -> str:
        return base64.b64encode(data).decode()

    parts = [
        {"type": "text", "text": "what is this?"},
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{encoded(PNG)}", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": encoded(WAV), "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"DATA:audio/x-wav;base64,{encoded(WAV)}"}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{encoded(MP4)}"}},
    ]
    message = chat(messages=[{"role": "user", "content": parts}]).prompt.chat.messages[0]
    assert message.parts[0].text == "what is this?"
    media = [(part.media.mime_type, part.media.data) for part in message.parts[1:]]
    assert media == [("image/png", PNG), ("audio/wav", WAV), ("audio/wav", WAV), ("video/mp4", MP4)]


@pytest.mark.parametrize(
    ("part", "text"),
    [
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,bm90IGEgcGljdHVyZQ=="}}, "is not an image"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}, "is empty"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,???"}}, "must be base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,x"}}, "must be a data URI"),
        ({"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}, "must be a data URI"),
        ({"type": "image_url", "image_url": {"url": "HTTPS://example.org/a.png"}}, "this server fetches nothing"),
        ({"type": "image_url"}, "required"),
        ({"type": "input_audio", "input_audio": {"data": base64.b64encode(PNG).decode()}}, "is not an audio"),
        ({"type": "input_audio", "input_audio": {"data": "x", "format": "midi"}}, "must be one of: wav, mp3"),
    ],
)
def test_media_that_is_not_what_its_place_asks_for(part: dict[str, Any], text: str) -> None:
    path, message = refused(messages=[{"role": "user", "content": [part]}])
    assert path.startswith("messages[0].content[0].")
    assert text in message


@pytest.mark.parametrize(
    ("kind", "data", "mime_type"),
    [
        ("image", b"\xff\xd8\xff\xe0....", "image/jpeg"),
        ("image", b"GIF89a....", "image/gif"),
        ("image", b"RIFF....WEBPVP8 ", "image/webp"),
        ("image", b"BM....", "image/bmp"),
        ("audio", b"ID3....", "audio/mpeg"),
        ("audio", b"\xff\xfb\x90....", "audio/mpeg"),
        ("audio", b"fLaC....", "audio/flac"),
        ("audio", b"OggS....", "audio/ogg"),
        ("audio", b"....ftypM4A ", "audio/mp4"),
        ("video", b"\x1aE\xdf\xa3....", "video/webm"),
        ("video", b"....ftypqt  ", "video/quicktime"),
        ("image", b"XXXX....WEBP", ""),
        ("image", b"RIFF....WAVE", ""),
        ("audio", b"\xff\xf9....", ""),
    ],
)
def test_media_is_told_from_its_bytes(kind: str, data: bytes, mime_type: str) -> None:
    assert sniff(data, kind) == mime_type


def test_what_a_chat_may_ask_beyond_text() -> None:
    asked = chat(
        n=3, logprobs=True, top_logprobs=4, timeout=2.5, priority=-1, bot_task="think", negative_prompt="rain",
        response_format={"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}},
        extra_body={"width": 640, "num_inference_steps": 4},
    )  # fmt: skip
    assert (asked.n, asked.logprobs, asked.timeout_s, asked.priority) == (3, True, 2.5, -1)
    assert (asked.sampling.logprobs, asked.sampling.width, asked.sampling.num_inference_steps) == (4, 640, 4)
    assert asked.sampling.structured_output.json_schema == '{"type":"object"}'
    assert (asked.prompt.bot_task, asked.prompt.negative_prompt) == ("think", "rain")
    assert chat(response_format={"type": "json_object"}).sampling.structured_output.json_object
    assert chat(logprobs=True).sampling.HasField("logprobs")
    assert not chat(logprobs=False, top_logprobs=0).sampling.HasField("logprobs")


def test_a_prompt_that_does_not_fit_a_message_is_refused() -> None:
    with pytest.raises(errors.InvalidRequestError, match="must be at most 10 bytes"):
        parse_chat({"model": "text", "messages": USER}, PIPELINES, 10)


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"stop_token_ids": ["no number"] * 1025}, "stop_token_ids", "at most 1024, got 1025"),
        ({"stop": [0] * 65}, "stop", "at most 64, got 65"),
        ({"temprature" + "e" * 1_000_000: 1}, "temprature" + "e" * 90, "unknown field"),
    ],
)
def test_what_is_too_many_is_told_before_each_is_looked_at(fields: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(errors.InvalidRequestError, match=text) as caught:
        chat(**fields)
    assert caught.value.violations[0].field == path


def test_what_costs_by_the_piece_is_bounded() -> None:
    most = validation.MAX_MESSAGE_PARTS
    assert len(chat(messages=USER * most).prompt.chat.messages) == most
    path, message = refused(messages=USER * (most + 1))
    assert path == "messages"
    assert str(most) in message
    text = {"type": "text", "text": "a"}
    assert refused(messages=[{"role": "user", "content": [text] * 600}] * 7)[0] == "messages"
    assert refused(messages=[{"role": "user", "content": [text] * 5000}])[0] == "messages[0].content"
    assert refused(stop=["x"] * 65) == ("stop", "stop: at most 64, got 65")
    assert refused(stop_token_ids=[1] * 1025)[0] == "stop_token_ids"
    typed = prompt_pb2.Prompt()
    for _ in range(most + 1):
        typed.chat.messages.add(role="user").parts.add(text="a")
    with pytest.raises(errors.InvalidRequestError, match=r"prompt\.chat\.messages"):
        validation.check_prompt(typed, LIMIT, "prompt")


def test_speech() -> None:
    asked = parse_speech({"model": "speech", "input": "hi", "voice": "anna", "speed": 0.5}, PIPELINES, LIMIT)
    assert (asked.prompt.text, asked.speech.voice, asked.speech.speed) == ("hi", "anna", 0.5)
    assert asked.response_format == "wav"


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"input": ""}, "input", "must not be empty"),
        ({"input": 5}, "input", "must be a string"),
        ({"response_format": "mp3"}, "response_format", "must be one of: wav, pcm; got 'mp3'"),
        ({"speed": 5}, "speed", "at least 0.25 and at most 4"),
        ({"stream_format": "ndjson"}, "stream_format", "must be one of: audio, sse"),
        ({"instructions": "x" * 4097}, "instructions", "at most 4096"),
        ({"voice": {"name": "a"}}, "voice.id", "required"),
        ({"model": "text"}, "model", "does not offer 'speech'; it offers: chat"),
    ],
)
def test_wrong_speech(fields: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        parse_speech({"model": "speech", "input": "hi", **fields}, PIPELINES, LIMIT)
    assert caught.value.violations[0].field == path
    assert text in caught.value.message


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"model": "text", "prompt": "hi", **fields}, PIPELINES, LIMIT)


def test_completion_prompts() -> None:
    def prompts(value: object) -> list[object]:
        found = completion(prompt=value).prompts
        return [prompt.text or list(prompt.tokens.token_ids) for prompt in found]

    assert prompts("hi") == prompts(["hi"]) == ["hi"]
    assert prompts([1, 2]) == prompts([[1, 2]]) == [[1, 2]]
    assert prompts(["a", "b"]) == ["a", "b"]
    assert prompts([[1], [2, 3]]) == [[1], [2, 3]]
    for wrong in (None, "", [], [-1], [True], {"a": 1}, ["a", ""], ["a", 3], [[1], []]):
        with pytest.raises(errors.InvalidRequestError, match=r"prompt(\[\d\])?: must"):
            prompts(wrong)
    asked = completion(prompt=["a", "b"], n=2)
    assert [asked.prompt_of(choice).text for choice in range(4)] == ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"prompt": ["x"] * 129}, "prompt", "at most 128 prompts, got 129"),
        ({"prompt": ["x"] * 65, "n": 2}, "prompt", "at most 128 answers in all"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"logprobs": 21}, "logprobs", "0 to 20"),
        ({"logprobs": True}, "logprobs", "must be a whole number"),
        ({"echo": True, "logprobs": 1}, "echo", "not with logprobs"),
        ({"echo": True, "prompt": [1, 2]}, "echo", "only with prompts that are texts"),
    ],
)
def test_wrong_completions(fields: dict[str, Any], path: str, text: str) -> None:
    with pytest.raises(errors.InvalidRequestError) as caught:
        completion(**fields)
    assert caught.value.violations[0].field == path
    assert text in caught.value.message


def test_typed_prompts_are_checked_the_same() -> None:
    for prompt, text in (
        (prompt_pb2.Prompt(), "one of: chat, text, tokens"),
        (prompt_pb2.Prompt(text=""), "must not be empty"),
        (prompt_pb2.Prompt(chat=prompt_pb2.ChatPrompt()), "at least one message"),
        (prompt_pb2.Prompt(tokens=prompt_pb2.TokenPrompt()), "at least one token"),
    ):
        with pytest.raises(errors.InvalidRequestError, match=text):
            validation.check_prompt(prompt, LIMIT)
    robot = prompt_pb2.Prompt()
    robot.chat.messages.add(role="robot")
    with pytest.raises(errors.InvalidRequestError, match=r"prompt.chat.messages\[0\].role"):
        validation.check_prompt(robot, LIMIT)


def test_numbers_that_are_none() -> None:
    with pytest.raises(errors.InvalidRequestError, match=r"sampling\.temperature"):
        validation.check_sampling(sampling_pb2.SamplingParams(temperature=float("nan")), "sampling.")
