"""Workers name fields as messages between services have them; clients know those of their bodies."""

from __future__ import annotations

import pytest

from gateway.http.body_fields import as_in_body
from omnicore import errors

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


@pytest.mark.parametrize(
    ("path", "field", "told"),
    [
        (CHAT, "sampling.temperature", "temperature"),
        (CHAT, "sampling.structured_output", "response_format"),
        (CHAT, "prompt.chat.messages[2]", "messages[2]"),
        (CHAT, "prompt", "messages"),
        (CHAT, "prompt.bot_task", "bot_task"),
        (CHAT, "speech.voice", "audio.voice"),
        (CHAT, "promptness", "promptness"),
        (COMPLETION, "prompt", "prompt"),
        (COMPLETION, "prompt.tokens.token_ids[3]", "prompt[3]"),
        (COMPLETION, "sampling.structured_output.json_schema", "response_format.json_schema"),
        ("/v1/audio/speech", "speech.voice", "voice"),
        ("/v1/audio/speech", "prompt.text", "input"),
        ("/detokenize", "token_ids[1]", "tokens[1]"),
        ("/api/v1/generate", "sampling.temperature", "sampling.temperature"),
    ],
)
def test_a_field_has_the_name_that_the_client_gave_it(path: str, field: str, told: str) -> None:
    error = as_in_body(errors.InvalidRequestError.field(field, "must be better", reason="SO_SO"), path)
    assert (type(error), error.reason) == (errors.InvalidRequestError, "SO_SO")
    assert (error.violations[0].field, error.message) == (told, f"{told}: must be better")


def test_an_error_of_no_field_is_left_as_it_is() -> None:
    error = errors.InternalError("prompt: a bug")
    assert as_in_body(error, CHAT) is error


@pytest.mark.parametrize(
    ("path", "field"), [(CHAT, "prompt"), (CHAT, "voice"), (COMPLETION, "text"), ("/detokenize", "token_ids")]
)
def test_a_field_that_nobody_knows_is_told_as_it_was_sent(path: str, field: str) -> None:
    """A chat with a field "prompt" must not be told that "messages" is unknown."""
    error = errors.InvalidRequestError.field(field, "unknown field", reason="UNKNOWN_FIELD")
    assert as_in_body(error, path) is error
