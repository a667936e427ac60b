"""What is encoded by hand is what protobuf encodes."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway import wire
from gateway.direct import DirectCall
from gateway.validation import ROLES
from omni.v1 import prompt_pb2, stage_service_pb2

# Where a length takes a byte more: of the text, of the part around it, of the message, of the chat.
_LENGTHS = [*range(110, 131), *range(16_360, 16_386)]


def _check(turns: list[tuple[str, str]]) -> None:
    prompt = prompt_pb2.Prompt()
    for role, text in turns:
        prompt.chat.messages.add(role=role).parts.add(text=text)
    assert (
        wire.chat_prompt(wire.text_message(wire.role(role), text) for role, text in turns) == prompt.SerializeToString()
    )


@given(st.lists(st.tuples(st.sampled_from(ROLES), st.text(max_size=200)), min_size=1, max_size=4))
@settings(max_examples=100, deadline=None)
def test_prompts(turns: list[tuple[str, str]]) -> None:
    _check(turns)


@pytest.mark.parametrize("length", _LENGTHS)
def test_prompts_of_lengths_where_their_length_grows(length: int) -> None:
    _check([("user", "x" * length)])


def test_a_text_that_is_none_is_refused() -> None:
    with pytest.raises(UnicodeEncodeError):
        wire.text_message(wire.role("user"), "\ud800")


@given(st.integers(0, 2**64 - 1), st.text(min_size=1, max_size=200))
@example(127, "a")
@example(128, "a" * 127)
@example(16383, "a" * 128)
@example(16384, "a")
def test_calls(call_id: int, request_id: str) -> None:
    kind = stage_service_pb2.StageCall(emit_output=True)
    call = DirectCall(kind.SerializeToString(), b"", request_id)
    call.call_id = call_id
    call.more = stage_service_pb2.StageCall(traceparent="t")
    whole = stage_service_pb2.StageCall(
        call_id=call_id, request_id=request_id, emit_output=True, prompt=prompt_pb2.Prompt(), traceparent="t"
    )
    assert stage_service_pb2.StageCall.FromString(call.SerializeToString()) == whole
