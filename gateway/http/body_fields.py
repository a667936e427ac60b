"""What workers call a field, in messages between services, and what the body of each endpoint does. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from omnicore import errors

_INNER = ("sampling.", "prompt.", "speech.")
"""Where a StageCall has what stands at the top of a body."""
# By path: what has another name in a body, by its name in a StageCall without what stands before it.
_NAMES: dict[str, tuple[tuple[str, str], ...]] = {
    "/v1/chat/completions": (
        ("structured_output", "response_format"), ("chat.messages", "messages"), ("prompt", "messages"),
        ("voice", "audio.voice"), ("speed", "audio.speed"),
    ),
    "/v1/completions": (("structured_output", "response_format"), ("tokens.token_ids", "prompt"), ("text", "prompt")),
    "/v1/audio/speech": (("prompt", "input"), ("text", "input")),
    "/tokenize": (("chat.messages", "messages"), ("text", "prompt")),
    "/detokenize": (("token_ids", "tokens"),),
}  # fmt: skip


def as_in_body(error: errors.OmniError, path: str) -> errors.OmniError:
    """An error, maybe a worker's, with the fields of a body of the endpoint at ``path``. REST's are the messages'; and
    a field that a body has and nobody knows is told as it was sent."""
    if not error.violations or path.startswith("/api/") or error.reason == "UNKNOWN_FIELD":
        return error
    names = _NAMES.get(path, ())
    violations = [errors.FieldViolation(_in_body(v.field, names), v.description) for v in error.violations]
    if violations == list(error.violations):
        return error
    field, rest = error.violations[0].field, error.message
    if rest.startswith(field):
        rest = violations[0].field + rest.removeprefix(field)
    return type(error)(
        rest, reason=error.reason, metadata=error.metadata, violations=violations, retry_after_s=error.retry_after_s
    )


def _in_body(field: str, names: Sequence[tuple[str, str]]) -> str:
    for prefix in _INNER:
        field = field.removeprefix(prefix)
    for inner, name in names:
        if field == inner or field.startswith((f"{inner}.", f"{inner}[")):
            return name + field.removeprefix(inner)
    return field
