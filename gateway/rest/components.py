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
    "session_id": text("Extension. Requests of one session go to the same replicas.", maxLength=256),
}
_STREAM: Final[Mapping[str, Schema]] = {
    "stream": flag("Answer with server-sent events as output is made; the last is `data: [DONE]`."),
    "stream_options": given(
        "", "Only with `stream`.",
        include_usage=flag("One more event before the end tells the usage."), include_obfuscation=flag("No effect."),
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
        modalities=several(text("", "text", "audio"), "What should come back.", minItems=1),
        audio=given(
            "", 'Only with "audio" among the modalities.',
            voice=either(text(), given("id", id=text())),
            format=text("Streamed: pcm16 only.", "wav", "pcm16"), speed=number("Extension.", 0.25, 4),
        ),
        **_STREAM, **_SAMPLING,
        max_completion_tokens=whole("The newer name of max_tokens.", 1, 2**32 - 1),
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
                    role=text("", "assistant"), content=or_null(text()), refusal=or_null(text()),
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
            text(minLength=1), several(whole("", 0, 2**32 - 1), minItems=1), description="Text or token ids."
        ),
        **_STREAM, **_SAMPLING,
        max_completion_tokens=whole("The same as max_tokens.", 1, 2**32 - 1),
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
        stream_format=text("", "audio"), session_id=text(maxLength=256),
    ),
    "OpenAIModel": got(
        "id object created owned_by tasks modalities ready",
        id=text(), object=text("", "model"), created=whole(), owned_by=text(),
        tasks=several(text()), modalities=several(text()), ready=flag("It can serve now."),
    ),
    "OpenAIModels": got("object data", object=text("", "list"), data=several(ref("OpenAIModel"))),
    "Readiness": got(
        "ready",
        ready=flag(), draining=flag(), control_plane_connected=flag(), stale=flag(), revision=whole(),
        inflight_requests=whole(), pipelines={"type": "object", "additionalProperties": {"type": "object"}},
    ),
}  # fmt: skip
