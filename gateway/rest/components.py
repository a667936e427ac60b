"""Schemas of the endpoints that are no RPCs: what clients send (``given``) and get (``got``).

The fields are those of docs/openai-api.md. What OpenAI's API has and this server refuses by name is not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from gateway.rest.shapes import Schema, anything, either, flag, given, got, number, or_null, ref, several, text, whole

_SAMPLING: Final[Mapping[str, Schema]] = {
    "temperature": number("0 is greedy.", 0, 2),
    "top_p": number("Above 0, at most 1.", 0, 1),
    "max_tokens": whole("Of all output together.", 1, 2**32 - 1),
    "stop": either(text(), several(text()), description="Output ends before any of these."),
    "seed": whole("Same seed, same input: same output. For all stages.", -(2**63), 2**63 - 1),
    "presence_penalty": number("", -2, 2),
    "frequency_penalty": number("", -2, 2),
    "top_k": whole("Extension. -1: off.", -1, 2**31 - 1),
    "repetition_penalty": number("Extension. Above 0; 1 is off.", 0),
    "min_tokens": whole("Extension. At most max_tokens.", 0, 2**32 - 1),
    "ignore_eos": flag("Extension. Go on past the end-of-sequence token."),
    "stop_token_ids": several(whole("", 0, 2**32 - 1), "Extension. Output ends at any of these tokens."),
    "skip_special_tokens": flag("Extension. Leave special tokens out of the text."),
    "num_inference_steps": whole("Extension, for diffusion stages.", 1, 2**32 - 1),
    "guidance_scale": number("Extension, for diffusion stages.", 0),
    "width": whole("Extension, for diffusion stages.", 1, 2**32 - 1),
    "height": whole("Extension, for diffusion stages.", 1, 2**32 - 1),
}
_EXTENSIONS: Final[Mapping[str, Schema]] = {
    "session_id": text("Extension. Requests of one session go to the same replicas.", maxLength=256),
    "session_policy": text(
        "Extension, with `session_id`. What if a replica of the session is gone: refuse, or go on at another.",
        "strict",
        "rebind",
    ),
    "timeout": {"type": "number", "exclusiveMinimum": 0, "description": "Extension. Give up after so many seconds."},
    "priority": whole("Extension. Within what the caller's API key allows."),
}
_RESPONSE_FORMAT: Final[Schema] = got(
    "type", "What the text must be. Where the engine can do it.",
    type=text("", "text", "json_object", "json_schema"), json_schema={"type": "object"},
)  # fmt: skip
_TOKEN: Final[Schema] = whole("", 0, 2**32 - 1)
_FILE: Final[Schema] = {"type": "string", "contentMediaType": "application/octet-stream"}
_PICTURES: Final[Mapping[str, Schema]] = {
    "model": text("The pipeline's name; may be left out where only one makes images."),
    "prompt": text("What to show.", minLength=1),
    "n": whole("", 1, 10),
    "size": text("WIDTHxHEIGHT, or auto.", pattern="^(auto|[1-9][0-9]{0,4}x[1-9][0-9]{0,4})$"),
    "seed": whole("Extension.", -(2**63), 2**63 - 1),
    "num_inference_steps": whole("Extension.", 1, 2**32 - 1),
    "guidance_scale": number("Extension.", 0),
    "negative_prompt": text("Extension. What not to show, where the engine can do it."),
    "bot_task": text("Extension, where the engine knows it."),
    "response_format": text("", "b64_json"),
    "user": text("No effect."),
    **_EXTENSIONS,
}
_STREAM: Final[Mapping[str, Schema]] = {
    "stream": flag("Answer with server-sent events as output is made; the last is `data: [DONE]`."),
    "stream_options": given(
        "", "Only with `stream`.",
        include_usage=flag("One more event before the end tells the usage."), include_obfuscation=flag("No effect."),
        continuous_usage_stats=flag("Extension. With `include_usage`: every event tells the usage so far."),
    ),
}  # fmt: skip

COMPONENTS: Final[Mapping[str, Schema]] = {
    "Error": got(
        "error",
        error=got(
            "message type code",
            message=text("For people."),
            type=text("The kind: what OpenAI's clients map to their exceptions."),
            param=or_null(text("Path of the wrong field.")),
            code=text("What went wrong: stable, for programs."),
            status=text("Of RPCs: the gRPC code."),
            details=several(
                {"type": "object"},
                "Of RPCs: google.rpc.ErrorInfo, and BadRequest and RetryInfo where they apply.",
            ),
        ),
    ),
    "ChatCompletionRequest": given(
        "model messages",
        model=text("The pipeline's name."),
        messages=several(ref("ChatMessageParam"), "The conversation, oldest first.", minItems=1),
        modalities=several(text("", "text", "audio", "image"), "What should come back.", minItems=1),
        audio=given(
            "", 'Only with "audio" among the modalities.',
            voice=either(text(), given("id", id=text())),
            format=text("Streamed: pcm16 only.", "wav", "pcm16"), speed=number("Extension.", 0.25, 4),
        ),
        **_STREAM, **_SAMPLING, **_EXTENSIONS,
        max_completion_tokens=whole("The newer name of max_tokens.", 1, 2**32 - 1),
        n=whole("So many answers.", 1, 16), logprobs=flag(), top_logprobs=whole("Only with logprobs.", 0, 20),
        response_format=_RESPONSE_FORMAT, negative_prompt=text("Extension, for images."),
        bot_task=text("Extension, where the engine knows it."),
        user=text("No effect."), metadata=anything("No effect."), store=anything("No effect."),
    ),
    "ChatMessageParam": given(
        "role content",
        role=text("", "system", "user", "assistant", "developer", "tool"),
        content=either(text(), several(ref("ContentPartParam"), minItems=1)),
        name=text(), tool_call_id=text(),
    ),
    "ContentPartParam": {
        "oneOf": [
            given("type text", type=text("", "text"), text=text()),
            given(
                "type image_url", type=text("", "image_url"),
                image_url=given("url", url=text("A data URI: nothing is fetched.", pattern="^data:"), detail=text()),
            ),
            given(
                "type input_audio", type=text("", "input_audio"),
                input_audio=given("data", data=text("Base64."), format=text("", "wav", "mp3")),
            ),
            given("type audio_url", type=text("", "audio_url"), audio_url=given("url", url=text(pattern="^data:"))),
            given("type video_url", type=text("", "video_url"), video_url=given("url", url=text(pattern="^data:"))),
        ]
    },
    "Usage": got(
        "prompt_tokens completion_tokens total_tokens",
        prompt_tokens=whole(), completion_tokens=whole(), total_tokens=whole(),
        completion_tokens_details=got("", audio_tokens=whole("Of stages that do not make text.")),
    ),
    "ChatCompletion": got(
        "id object created model choices usage",
        id=text(), object=text("", "chat.completion"), created=whole("Unix time."), model=text(),
        choices=several(
            got(
                "index message finish_reason",
                index=whole(), finish_reason=text("", "stop", "length", "content_filter", "tool_calls"),
                logprobs=or_null({"type": "object"}),
                message=got(
                    "role content",
                    role=text("", "assistant"), refusal=or_null(text()),
                    content=either(
                        text(), {"type": "null"}, several({"type": "object"}), description="A list where it has images."
                    ),
                    audio=got(
                        "id data transcript expires_at",
                        id=text(), data=text("Base64."), transcript=text(), expires_at=whole(),
                        format=text(), sample_rate_hz=whole(), channels=whole(),
                    ),
                ),
            )
        ),
        usage=ref("Usage"),
    ),
    "CompletionRequest": given(
        "model prompt",
        model=text("The pipeline's name."),
        prompt=either(
            text(minLength=1), several(_TOKEN, minItems=1), several(text(minLength=1), minItems=1),
            several(several(_TOKEN, minItems=1), minItems=1), description="Text or token ids, or several.",
        ),
        **_STREAM, **_SAMPLING, **_EXTENSIONS,
        max_completion_tokens=whole("The same as max_tokens.", 1, 2**32 - 1),
        n=whole("So many answers to each prompt.", 1, 16), echo=flag("Put the prompt before the answer."),
        logprobs=whole("", 0, 20), response_format=_RESPONSE_FORMAT,
        user=text("No effect."), metadata=anything("No effect."),
    ),
    "Completion": got(
        "id object created model choices usage",
        id=text(), object=text("", "text_completion"), created=whole("Unix time."), model=text(),
        choices=several(
            got(
                "index text finish_reason",
                index=whole(), text=text(), finish_reason=text(), logprobs=or_null({"type": "object"}),
            )
        ),
        usage=ref("Usage"),
    ),
    "SpeechRequest": given(
        "model input",
        model=text("The pipeline's name."), input=text("What to say.", minLength=1), voice=text(),
        response_format=text("", "wav", "pcm"), speed=number("", 0.25, 4), seed=whole("", -(2**63), 2**63 - 1),
        stream_format=text("Bytes, or events.", "audio", "sse"), instructions=text("Where the engine can do it."),
        **_EXTENSIONS,
    ),
    "OpenAIModel": got(
        "id object created owned_by tasks modalities ready",
        id=text(), object=text("", "model"), created=whole("When its oldest replica registered."), owned_by=text(),
        root=text(), parent=or_null(text()), max_model_len=or_null(whole()),
        tasks=several(text()), modalities=several(text()), ready=flag("It can serve now."),
    ),
    "ImageRequest": given("prompt", "", **_PICTURES),
    "ImageEditRequest": given(
        "prompt image", "", **_PICTURES,
        image=either(_FILE, several(_FILE, minItems=1, maxItems=16), description="What to edit, as files."),
    ),
    "Images": got(
        "id created data",
        id=text(), created=whole("Unix time."), data=several(got("b64_json", b64_json=text("Base64."))),
        output_format=text(), usage={"type": "object"},
    ),
    "TranscriptionRequest": given(
        "model file", "",
        model=text("The pipeline's name."), file=_FILE, language=text("Where the engine can do it."), prompt=text(),
        temperature=number("", 0, 2), response_format=text("", "json", "text", "verbose_json"), stream=flag(),
        seed=whole("Extension.", -(2**63), 2**63 - 1), **_EXTENSIONS,
    ),
    "Transcription": got("text", text=text(), language=text(), duration=anything(), usage={"type": "object"}),
    "TokenizeRequest": given(
        "model", "Either prompt or messages.",
        model=text("The pipeline's name."), prompt=text(), messages=several(ref("ChatMessageParam"), minItems=1),
        add_special_tokens=flag(), add_generation_prompt=flag(), return_token_strs=flag(),
    ),
    "Tokens": got(
        "count tokens",
        count=whole(), max_model_len=or_null(whole()), tokens=several(_TOKEN), token_strs=or_null(several(text())),
    ),
    "DetokenizeRequest": given("model tokens", model=text("The pipeline's name."), tokens=several(_TOKEN)),
    "OpenAIModels": got("object data", object=text("", "list"), data=several(ref("OpenAIModel"))),
    "Readiness": got(
        "ready",
        ready=flag(), draining=flag(), control_plane_connected=flag(), stale=flag(), revision=whole(),
        inflight_requests=whole(), pipelines={"type": "object", "additionalProperties": {"type": "object"}},
        missing={"type": "object"},
    ),
}  # fmt: skip
