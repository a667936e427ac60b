"""The short way through a plain chat body, and the answer written by a template, are the long ways' equals."""

from __future__ import annotations

import dataclasses
import math
import tracemalloc
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.access.control import ANYBODY, AccessControl
from gateway.graph import PipelineGraph
from gateway.http import chat as chat_module
from gateway.http import chat_schema, ids, plain_chat
from gateway.http.exchange import JSON_HEADERS, Credentials, Exchange
from gateway.request import Usage
from omni.v1 import stage_service_pb2
from omnicore import errors
from omnicore.api_keys import ApiKey, KeyRole
from tests.support.pipelines import speech_pipeline, text_pipeline

PIPELINES = {"speech": PipelineGraph(speech_pipeline()), "text": PipelineGraph(text_pipeline())}
LIMIT = 200

_SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.sampled_from([0, 1, -1, 2, 20, 2**31, 2**32, 2**63]),
    st.floats(), st.sampled_from([0.0, -0.0, 1.0, 2.0, -2.0, 5e-324]), st.text(max_size=4),
)  # fmt: skip
_ANY = st.one_of(_SCALARS, st.lists(_SCALARS, max_size=2), st.dictionaries(st.text(max_size=3), _SCALARS, max_size=2))
_PLAIN_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "system", "tool"]), "content": st.text(max_size=30)}
)
_ODD_MESSAGE = st.one_of(
    _ANY,
    st.fixed_dictionaries({"role": _ANY, "content": _ANY}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.just("x"), "name": _ANY}),
    st.fixed_dictionaries({"role": st.just("user"), "content": st.just([{"type": "text", "text": "x"}])}),
)
_MESSAGES = st.one_of(
    st.lists(_PLAIN_MESSAGE, max_size=4), st.lists(st.one_of(_PLAIN_MESSAGE, _ODD_MESSAGE), max_size=3), _ANY
)
_NAMES = [*sorted(chat_schema._KNOWN - {"model", "messages"}), "nonsense"]
_GOOD: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.floats(0, 2), "top_p": st.floats(0.1, 1), "max_tokens": st.integers(1, 100),
    "max_completion_tokens": st.integers(1, 100), "seed": st.integers(-(2**63), 2**63 - 1), "top_k": st.integers(1, 9),
    "presence_penalty": st.integers(-2, 2), "ignore_eos": st.booleans(), "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "session_id": st.text("ab-1", max_size=5), "user": _ANY,
}  # fmt: skip
_FIELDS = st.one_of(
    st.fixed_dictionaries({}, optional=_GOOD),
    st.dictionaries(st.sampled_from(_NAMES), _ANY, max_size=4),
    st.tuples(
        st.fixed_dictionaries({}, optional=_GOOD), st.dictionaries(st.sampled_from(_NAMES), _ANY, max_size=1)
    ).map(lambda both: {**both[0], **both[1]}),
)
_MODELS = st.sampled_from(["text", "speech", "none", "", None, 3])


def _outcome(body: object) -> object:
    try:
        return _comparable(chat_schema.parse_chat(body, PIPELINES, LIMIT))
    except errors.OmniError as error:
        return type(error), error.message, error.violations


def _comparable(asked: chat_schema.ChatRequest) -> object:
    values = {field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)}
    for name in ("prompt", "speech"):
        values[name] = values[name].SerializeToString(deterministic=True)
    # By what is set, and to what: the short way takes 0.0 and -0.0 for the same number.
    values["sampling"] = [
        (field.name, value if isinstance(value, float | int | str) else str(value))
        for field, value in values["sampling"].ListFields()
    ]
    return values


def _check_agreement(body: dict[str, Any]) -> None:
    short = plain_chat.plain_chat(body, PIPELINES, LIMIT)
    # A field that is null says nothing, and keeps the short way from being taken.
    long = _outcome({**body, "tools": body.get("tools")})
    if short is not None:
        assert _comparable(chat_schema.of_plain(short)) == long
    assert _outcome(body) == long


@given(model=_MODELS, messages=_MESSAGES, fields=_FIELDS)
@settings(max_examples=200, deadline=None)
def test_the_short_way_reads_what_the_long_way_reads(model: Any, messages: Any, fields: dict[str, Any]) -> None:
    _check_agreement({"model": model, "messages": messages, **fields})


# Of random bodies few have one thing wrong and all else right, which is where the ways could part.
_EDGES: tuple[Any, ...] = (
    None, True, False, "", "a", "a b", "a\n", "\u00e9", "x" * 256, "x" * 257, [], {}, [1], ["a"], {"include_usage": 1},
    {"include_usage": True}, {"include_usage": None}, {"include_usage": True, "x": 1}, 0, 1, -1, 2, -2, 3, -3,
    2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 0.0, -0.0, 0.5, 1.0, 1.5, 2.0,
    5e-324, 1e308, -2.5, math.inf, -math.inf, math.nan,
)  # fmt: skip
_TURN = {"role": "user", "content": "x"}
_ODD_MESSAGES: tuple[Any, ...] = (
    None, [], {}, "x", [None], [[]], [{}], [{"role": "user"}], [{"content": "x"}], [{"role": "user", "name": "x"}],
    [{**_TURN, "name": "me"}], [{**_TURN, "tool_calls": [1]}], [{**_TURN, "nonsense": 1}], [{**_TURN, "role": "robot"}],
    [{**_TURN, "role": ["user"]}], [{**_TURN, "content": ""}], [{**_TURN, "content": None}], [{**_TURN, "content": 1}],
    [{**_TURN, "content": []}], [{**_TURN, "content": [{"type": "text", "text": "x"}]}],
    [_TURN, {**_TURN, "role": None}], [{**_TURN, "content": "x" * 300}], [_TURN] * 4097,
)  # fmt: skip


@pytest.mark.parametrize("name", [*sorted(chat_schema._KNOWN), "nonsense"])
def test_one_odd_field_is_read_alike(name: str) -> None:
    for others in ({}, {"stream": True}, {"max_tokens": 2}, {"min_tokens": 2}):
        for value in _EDGES:
            _check_agreement({"model": "text", "messages": [_TURN], **others, name: value})


@pytest.mark.parametrize("messages", _ODD_MESSAGES, ids=range(len(_ODD_MESSAGES)))
def test_odd_messages_are_read_alike(messages: Any) -> None:
    _check_agreement({"model": "text", "messages": messages})


def test_the_longest_prompt_is_the_same() -> None:
    for length in range(LIMIT - 30, LIMIT + 1):
        _check_agreement({"model": "text", "messages": [{"role": "user", "content": "x" * length}]})


def test_plain_bodies_take_the_short_way() -> None:
    body = {
        "model": "text", "messages": [{"role": "user", "content": "hi"}], "temperature": 0, "top_p": 1, "seed": 3,
        "max_tokens": 5, "stream": True, "stream_options": {"include_usage": True}, "user": "me", "session_id": "s",
    }  # fmt: skip
    assert plain_chat.plain_chat(body, PIPELINES, LIMIT) is not None
    assert plain_chat.plain_chat({**body, "tools": None}, PIPELINES, LIMIT) is None


class _State:
    def __init__(self, reason: str, usage: Usage) -> None:
        self.finish_reason = reason
        self.usage = usage


@given(
    texts=st.lists(st.text(), max_size=3), reason=st.sampled_from(["stop", "length", "eos"]), prompt=st.integers(0, 9)
)
@settings(max_examples=100, deadline=None)
def test_the_template_is_the_object(texts: list[str], reason: str, prompt: int) -> None:
    asked = chat_schema.parse_chat({"model": "text", "messages": [{"role": "user", "content": "x"}]}, PIPELINES, LIMIT)
    state: Any = _State(reason, Usage(prompt_tokens=prompt, completion_tokens=7, text_tokens=5))
    events = [stage_service_pb2.StageEvent(text=text) for text in texts]
    choice = chat_module._choice(0, "chatcmpl-1", asked, state, events)
    whole = chat_module._response("chatcmpl-1", 12, asked, [choice], state.usage)
    assert chat_module.plain_answer("chatcmpl-1", 12, asked, state, events) == orjson.dumps(whole)


class _Wire:
    lost = congested = ends = False

    def __init__(self) -> None:
        self.sent = b""
        self.credentials: Credentials | None = None

    def write(self, data: bytes) -> None:
        self.sent += data

    async def drain(self) -> None: ...

    def resume_reading(self) -> None: ...

    def peer(self) -> Any: ...

    def answered(self, exchange: Exchange) -> None: ...


def _head(sent: bytes) -> tuple[bytes, set[bytes], bytes]:
    head, _, body = sent.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    return status, {line for line in lines if not line.startswith(b"date:")}, body


async def test_a_plain_response_is_the_same_by_template() -> None:
    sent = []
    for headers in (JSON_HEADERS, list(JSON_HEADERS)):  # the second one is written header by header
        wire = _Wire()
        exchange = Exchange(wire, "POST", b"/v1/x", {b"x-request-id": b"mine"})
        exchange.keep_alive = True
        exchange.complete_body()
        await exchange.respond(200, b"{}", headers)
        assert exchange.started
        assert exchange.ended
        assert exchange.keep_alive
        assert b"\r\ndate: " in wire.sent
        sent.append(_head(wire.sent))
    assert sent[0] == sent[1]


async def test_a_whole_body_may_still_be_read_until_it_is_dropped() -> None:
    exchange = Exchange(_Wire(), "POST", b"/v1/x", {})
    exchange.feed(b'{"a":')
    before = exchange.whole_json
    exchange.feed(b"1}")
    exchange.complete_body()
    assert (before, exchange.whole_json) == (None, b'{"a":1}')
    assert await exchange.read_json(100) == {"a": 1}
    dropped = Exchange(_Wire(), "POST", b"/v1/x", {})
    dropped.feed(b"{}")
    dropped.complete_body()
    assert dropped.whole_json == b"{}"
    dropped.drop_body()
    assert await dropped.read_body(100) == b""


def test_of_long_targets_nothing_is_kept() -> None:
    wire, long = _Wire(), b"%F0%9F%98%80" + b"a" * 60_000  # four bytes a character, once decoded
    tracemalloc.start()
    try:
        for number in range(50):
            assert Exchange(wire, "GET", b"/%d" % number + long, {}).path.endswith("a")
        kept_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept_bytes < 2_000_000, "one of them is 0.3 MB"


def test_ids_are_all_different() -> None:
    wire = _Wire()
    drawn = {Exchange(wire, "GET", b"/", {}).id for _ in range(1000)}
    assert len(drawn) == 1000
    assert all(len(one) == 32 for one in drawn)


def test_a_forked_process_draws_ids_of_its_own() -> None:
    ids.random_id()
    before = ids._Drawn.hex
    ids.forget()  # what a child calls first
    ids.random_id()
    assert ids._Drawn.hex != before


@given(
    roles=st.frozensets(st.sampled_from(list(KeyRole)), min_size=1),
    role=st.sampled_from(list(KeyRole)),
    anybody=st.booleans(),
    trusted=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_may_is_what_check_accepts(roles: frozenset[KeyRole], role: KeyRole, anybody: bool, trusted: bool) -> None:
    control = AccessControl(trusted=trusted)
    key = ANYBODY if anybody else ApiKey(id="a", sha256="", roles=roles)
    accepted = True
    try:
        control.check(key, role, "what")
    except errors.PermissionDeniedError:
        accepted = False
    assert control.may(key, role) is accepted
